"""Vision towers of clip and siglip: the image encoders of multimodal models.

GGUF keeps a tower in a separate file (mmproj, architecture `clip`), with the names `v.*`; a
tower alone has no projector. Of a whole clip or siglip the tower is read below `vision_config`.
siglip's pooling head has no name there. Sources: transformers' modeling_clip and
modeling_siglip; the gguf package's name map and keys; the converter's base.py.
"""

from collections.abc import Collection, Mapping
from typing import Any

from aprfmt.arch import hyper_rules
from aprfmt.arch.gpt2 import NO_ROPE
from aprfmt.arch.spec import HyperRule
from aprfmt.arch.spec_builders import names_only_spec
from aprfmt.arch.tensor_rows import KV, Q, RoleRow, Rows, linear, make_tables, norm, single_row
from aprfmt.base.protocols import Value

_LAYER = "encoder.layers.{L}."
_WIDTH = ("hidden_size",)
_PATCH = ("hidden_size", "image_channels", "patch_size", "patch_size")


def _linear_rows(role: str, hf: str, out: str, into: str) -> Rows:
    """Return the table rows of a projection's weight and bias, `v.blk.{L}.ROLE` in a GGUF."""
    return tuple(
        RoleRow(row.role, _LAYER + row.hf, row.shape, gguf=f"v.blk.{{L}}.{row.role}")
        for row in linear(role, hf, out, into, bias="")
    )


def _norm_rows(role: str, hf: str) -> Rows:
    """Return the table rows of a layer's norm, weight and bias, `v.blk.{L}.ROLE` in a GGUF."""
    return tuple(
        RoleRow(row.role, _LAYER + row.hf, row.shape, gguf=f"v.blk.{{L}}.{row.role}")
        for row in norm(role, hf, bias=True)
    )


def _outer_norm_rows(role: str, hf: str) -> Rows:
    """Return the tensor-table rows of a norm outside the layers, weight and bias."""
    return tuple(
        single_row(f"{role}.{part}", f"{hf}.{part}", *_WIDTH) for part in ("weight", "bias")
    )


def _layer_rows() -> Rows:
    """Return the tensor-table rows of a layer's tensors."""
    return (
        *_norm_rows("ln1", "layer_norm1"),
        *_linear_rows("attn_q", "self_attn.q_proj", Q, "hidden_size"),
        *_linear_rows("attn_k", "self_attn.k_proj", KV, "hidden_size"),
        *_linear_rows("attn_v", "self_attn.v_proj", KV, "hidden_size"),
        *_linear_rows("attn_out", "self_attn.out_proj", "hidden_size", Q),
        *_norm_rows("ln2", "layer_norm2"),
        *_linear_rows("ffn_up", "mlp.fc1", "ffn_size", "hidden_size"),
        *_linear_rows("ffn_down", "mlp.fc2", "hidden_size", "ffn_size"),
    )


def _pooling_head_rows() -> Rows:
    """Return the table rows of siglip's pooling head: a learned query, attention and an MLP."""
    shapes = {
        "probe": ("1", "1", *_WIDTH), "attention.in_proj_weight": ("3*hidden_size", *_WIDTH),
        "attention.in_proj_bias": ("3*hidden_size",),
        "attention.out_proj.weight": _WIDTH * 2, "attention.out_proj.bias": _WIDTH,
        "layernorm.weight": _WIDTH, "layernorm.bias": _WIDTH,
        "mlp.fc1.weight": ("ffn_size", *_WIDTH), "mlp.fc1.bias": ("ffn_size",),
        "mlp.fc2.weight": (*_WIDTH, "ffn_size"), "mlp.fc2.bias": _WIDTH,
    }  # fmt: skip
    return tuple(
        RoleRow(f"v.head.{name}", f"head.{name}", shape, "optional", gguf="", layered=False)
        for name, shape in shapes.items()
    )


def _count_positions(hp: Mapping[str, Value]) -> int:
    """Return the number of positions: the patches of an image, and a class token if any."""
    side = int(hp["image_size"]) // int(hp["patch_size"])
    return side * side + bool(hp["class_token"])


def tower_size_rule(name: str, hf: str, gguf: str, default: int) -> HyperRule:
    """Return the rule of a size with its keys in config.json and in GGUF.

    `default` is the size where config.json does not give it.
    """
    return hyper_rules.size(name, hf, gguf, hf_default=default)


def activation_rule(activation: str) -> HyperRule:
    """Return the rule for the activation; a GGUF has a boolean key for each one it knows.

    Writing it also writes the key that says that the file has a vision encoder.
    """
    names = {"quick_gelu": "gelu_quick"}

    def write(value: Value, hp: Mapping[str, Value]) -> Mapping[str, Value]:
        """Return GGUF's {key: True}: it has a vision encoder, and which activation its MLPs use.

        An activation that llama.cpp has no key for gets none.
        """
        word = {"gelu": "gelu", "gelu_tanh": "gelu", "silu": "silu"}.get(value)
        flag = {} if word is None else {f"{{arch}}.use_{word}": True}
        return {"{arch}.has_vision_encoder": True, **flag}

    usual = hyper_rules.activation(activation, names=names)
    return HyperRule(
        usual.name, read=usual.read, default=usual.default, write={**usual.write, "gguf": write}
    )


def tower_rules(
    eps: float,
    activation: str,
    class_token: bool,
    *,
    usual: tuple[int, int, int, int, int] = (768, 12, 12, 3072, 224),
    rotates: bool = False,
) -> tuple[HyperRule, ...]:
    """Return the rules by which a vision tower's hyperparameters are read, one for each.

    `eps` and `activation` are defaults. `class_token`: the tower has one. `usual`: width, layers,
    heads, inner width and image size where no key says them. `rotates`: q and k are rotated by the
    patch's row and column, else position embeddings are added to the patches.
    """
    width, layers, heads, ffn, image = usual
    return hyper_rules.hyper_table(
        tower_size_rule("hidden_size", "hidden_size", "vision.embedding_length", width),
        tower_size_rule("n_layers", "num_hidden_layers", "vision.block_count", layers),
        tower_size_rule("n_heads", "num_attention_heads", "vision.attention.head_count", heads),
        HyperRule("n_kv_heads", default=lambda hp: hp["n_heads"]),
        HyperRule("head_dim", default=lambda hp: hp["hidden_size"] // hp["n_heads"]),
        HyperRule("value_head_dim", default=lambda hp: hp["head_dim"]),
        tower_size_rule("ffn_size", "intermediate_size", "vision.feed_forward_length", ffn),
        hyper_rules.fixed("vocab_size", 0),
        hyper_rules.fixed("context_length", 0),
        HyperRule(
            "norm_eps",
            {"hf": ("layer_norm_eps",), "gguf": ("{arch}.vision.attention.layer_norm_epsilon",)},
            "positive",
            eps,
        ),
        activation_rule(activation),
        hyper_rules.fixed("tied_embeddings", True),
        *NO_ROPE,
        HyperRule("rope_layers", default=hyper_rules.per_layer(rotates)),
        tower_size_rule("image_size", "image_size", "vision.image_size", image),
        tower_size_rule("patch_size", "patch_size", "vision.patch_size", 32 if class_token else 16),
        hyper_rules.size("image_channels", "num_channels", default=3),
        hyper_rules.fixed("class_token", class_token),
        HyperRule("image_positions", default=_count_positions),
    )


def _evidence_of_names(*parts: str) -> Any:
    """Return an evidence function: whether a tensor name contains one of some texts."""

    def evidence(names: Collection[str], values: Mapping[str, Value]) -> bool:
        """Return whether any tensor name contains one of the texts.

        `values` (the metadata) is not used: every evidence function is given both.
        """
        return any(part in name for name in names for part in parts)

    return evidence


def evidence_of_projector(kind: str) -> Any:
    """Return an evidence function: whether a GGUF's projector is of type `kind`."""

    def evidence(names: Collection[str], values: Mapping[str, Value]) -> bool:
        """Return whether the GGUF's `clip.projector_type` is the expected one.

        `names` (the tensors') is not used: every evidence function is given both.
        """
        return values.get("clip.projector_type") == kind

    return evidence


# 0, 1, 2, ..., which CLIP's published files hold, and transformers makes anew (persistent=False).
POSITION_IDS = "embeddings.position_ids"
UNUSED = frozenset(
    """has_vision_encoder use_gelu use_silu projector_type vision.projector_type
    vision.projection_dim vision.image_mean vision.image_std projection_dim
    vision_use_head""".split()
)
_POSITIONS = single_row(
    "v.position_embd.weight",
    "embeddings.position_embedding.weight",
    "image_positions",
    "hidden_size",
)
_PATCHES = single_row("v.patch_embd.weight", "embeddings.patch_embedding.weight", *_PATCH)


def siglip_rows() -> Rows:
    """Return the tensor-table rows of siglip's tower without its pooling head."""
    return (
        _PATCHES,
        single_row("v.patch_embd.bias", "embeddings.patch_embedding.bias", *_WIDTH),
        _POSITIONS,
        *_layer_rows(),
        *_outer_norm_rows("v.post_ln", "post_layernorm"),
    )


def siglip_rules() -> tuple[HyperRule, ...]:
    """Return siglip's rules, one for every hyperparameter."""
    return tower_rules(1e-6, "gelu_tanh", class_token=False)


CLIP_VISION = names_only_spec(
    "clip_vision",
    make_tables(
        (
            single_row("v.class_embd", "embeddings.class_embedding", *_WIDTH),
            _PATCHES,
            _POSITIONS,
            *_outer_norm_rows("v.pre_ln", "pre_layrnorm"),
            *_layer_rows(),
            *_outer_norm_rows("v.post_ln", "post_layernorm"),
        )
    ),
    tower_rules(1e-5, "gelu_quick", class_token=True),
    evidence=_evidence_of_names("class_embd", "class_embedding"),
    ignored=UNUSED,
    section="vision_config",
    buffers={"hf": (POSITION_IDS,)},
)
SIGLIP_VISION = names_only_spec(
    "siglip_vision",
    make_tables((*siglip_rows(), *_pooling_head_rows())),
    siglip_rules(),
    ignored=UNUSED,
    section="vision_config",
    buffers={"hf": (POSITION_IDS,)},
)
