"""opt: learned positions that begin at row 2, a plain MLP with relu, biases everywhere.

The 350M form embeds in fewer elements than the stream has, with a projection on either side, and
normalises the sums instead of what is read. llama.cpp has no form of them. Source: transformers'
modeling_opt.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from aprfmt.arch import hyper_rules
from aprfmt.arch.gpt2 import NO_ROPE
from aprfmt.arch.required_values import divided_head_dim_rule
from aprfmt.arch.spec import ArchSpec, BlockSpec, Facts, HyperRule
from aprfmt.arch.tensor_rows import KV, Q, RoleRow, linear, make_tables, norm, with_model_rows
from aprfmt.base.protocols import Value
from aprfmt.errors import ArchError

_O = "model.decoder.layers.{L}."
_BIAS = "attention_bias"
_NARROW = ("vocab_size", "embedding_width")


def _opt_rows(attention_norm: str, mlp_norm: str) -> tuple[RoleRow, ...]:
    """Return the tensor-table rows of the position table and of a layer.

    The arguments are the roles of the two norms, which say whether they come before or after.
    """
    return (
        RoleRow(
            "position_embd.weight",
            "model.decoder.embed_positions.weight",
            ("context_length+2", "hidden_size"),
            layered=False,
        ),
        *norm(attention_norm, _O + "self_attn_layer_norm", bias=True),
        *linear("attn_q", _O + "self_attn.q_proj", Q, "hidden_size", bias=_BIAS),
        *linear("attn_k", _O + "self_attn.k_proj", KV, "hidden_size", bias=_BIAS),
        *linear("attn_v", _O + "self_attn.v_proj", KV, "hidden_size", bias=_BIAS),
        *linear(
            "attn_output", _O + "self_attn.out_proj", "hidden_size", Q, bias="attention_out_bias"
        ),
        *norm(mlp_norm, _O + "final_layer_norm", bias=True),
        *linear("ffn_up", _O + "fc1", "ffn_size", "hidden_size", bias="mlp_bias"),
        *linear("ffn_down", _O + "fc2", "hidden_size", "ffn_size", bias="mlp_bias"),
    )


_TENSORS, _BINDINGS = make_tables(
    with_model_rows(
        *_opt_rows("attn_norm", "ffn_norm"),
        embed="model.decoder.embed_tokens",
        final="model.decoder.final_layer_norm",
        norm_bias=True,
    )
)
_SMALL = make_tables(
    (
        RoleRow("token_embd.weight", "model.decoder.embed_tokens.weight", _NARROW, layered=False),
        RoleRow("embd_in.weight", "model.decoder.project_in.weight",
            ("hidden_size", "embedding_width"), layered=False),
        *_opt_rows("attn_output_norm", "layer_output_norm"),
        RoleRow("head_in.weight", "model.decoder.project_out.weight",
            ("embedding_width", "hidden_size"), layered=False),
        RoleRow("output.weight", "lm_head.weight", _NARROW, "!tied_embeddings", layered=False),
    )
)  # fmt: skip


def _check_usual(value: Value, facts: Facts, hp: Mapping[str, Value]) -> str:
    """Return ""; ArchError for the layout of the 350M model or of old checkpoints.

    Those have projections around the embedding, norms after the sums, or no last norm.
    """
    width = facts.first("word_embed_proj_dim")
    if width is not None and width[0] != hp["hidden_size"]:
        raise ArchError(
            f"{width[1]}: is {width[0]}; expected {hp['hidden_size']}: projections after the "
            "embedding are not known"
        )
    _require_values(facts, {"do_layer_norm_before": True, "_remove_final_layer_norm": False})
    return ""


def _check_small(value: Value, facts: Facts, hp: Mapping[str, Value]) -> str:
    """Return ""; ArchError for a model that has the 350M form's projections but not its norms."""
    _require_values(facts, {"do_layer_norm_before": False})
    facts.first("_remove_final_layer_norm")  # there is none after a sum that is normalised
    return ""


def _require_values(facts: Facts, wanted: Mapping[str, bool]) -> None:
    """Raise ArchError if a boolean key of config.json differs from the one wanted."""
    for key, usual in {**wanted, "layer_norm_elementwise_affine": True}.items():
        found = facts.first(key)
        if found is not None and found[0] is not usual:
            raise ArchError(f"{key}: is {found[0]}; expected {usual}: no other is known")


def _has_projections(names: Collection[str], values: Mapping[str, Value]) -> bool:
    """Return whether tensor names show projections around the embedding: the 350M form.

    `values` (the metadata) is not used: every evidence function is given both.
    """
    ends = ("project_in.weight", "project_out.weight", "embd_in.weight", "head_in.weight")
    return any(name.endswith(ends) for name in names)


_EPS = hyper_rules.norm_eps(1e-5)  # config.json has no key for it


def _opt_rules(
    check: Callable[[Value, Facts, Mapping[str, Value]], str], *more: HyperRule
) -> tuple[HyperRule, ...]:
    """Return the hyperparameter rules of one of the two layouts of opt.

    `check` raises ArchError for the other one. `more` replace or add to the rules.
    """
    return hyper_rules.hyper_table(
        replace(hyper_rules.hidden_size(768), shape=hyper_rules.axis("position_embd.weight", 1)),
        hyper_rules.n_layers(12),
        hyper_rules.n_heads(12),
        hyper_rules.n_kv_heads(hf=""),
        divided_head_dim_rule(),
        hyper_rules.ffn_size(3072, "ffn_dim"),
        hyper_rules.vocab_size(50272),
        hyper_rules.context_length(2048),
        HyperRule("position_offset", default=2),
        replace(_EPS, keys={"apr": _EPS.keys["apr"]}),
        hyper_rules.activation("relu", "activation_function"),
        hyper_rules.tied_embeddings(True),
        hyper_rules.flag(_BIAS, True, "enable_bias", present=("attn_q.bias",)),
        hyper_rules.flag(
            "attention_out_bias", True, "enable_bias", present=("attn_output.bias",), written=False
        ),
        hyper_rules.flag("mlp_bias", True, "enable_bias", present=("ffn_up.bias",), written=False),
        *NO_ROPE,
        HyperRule("parallel_residual", default=False, check=check),
        *more,
    )


_IGNORED = frozenset({"dropout", "activation_dropout", "layerdrop", "init_std", "prefix"})
OPT = ArchSpec(
    name="opt",
    hyper=_opt_rules(_check_usual),
    tensors=_TENSORS,
    bindings={"hf": _BINDINGS["hf"]},
    block=BlockSpec(norm="layer", position="learned", mlp="plain"),
    ignored=_IGNORED,
)
OPT_350M = ArchSpec(
    name="opt_350m",
    hyper=_opt_rules(
        _check_small,
        HyperRule(
            "embedding_width",
            {"hf": ("word_embed_proj_dim",)},
            "size",
            shape=hyper_rules.axis("token_embd.weight", 1),
            shape_wins=True,
            write={
                "hf": lambda value, hp: {
                    "word_embed_proj_dim": value,
                    "do_layer_norm_before": False,
                }
            },
        ),
    ),
    tensors=_SMALL[0],
    bindings={"hf": _SMALL[1]["hf"]},
    block=BlockSpec(norm="layer", placement="after", position="learned", mlp="plain"),
    ignored=_IGNORED,
    evidence=_has_projections,
)
