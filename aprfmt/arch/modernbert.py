"""modernbert: an encoder with norms before, rope, and windows on two of three layers.

The first layer has no norm before attention. A window is `local_attention` wide, half of it on
either side. Gate and up are one matrix, in GGUF too. Sources: transformers' modeling_modernbert;
the gguf package's name map; llama.cpp's modern-bert.cpp.
"""

from dataclasses import replace

from aprfmt.arch import hyper_rules
from aprfmt.arch.encoders import BLOCK, embedding_rows, encoder_rules, encoder_spec
from aprfmt.arch.fused_projection import GGUF_FUSED, IN_ORDER, fused_bindings, fused_rows
from aprfmt.arch.layer_kinds import write_kinds
from aprfmt.arch.phi3 import GATE_UP, IN_GATE_UP
from aprfmt.arch.rope import rope_rules
from aprfmt.arch.rope_hf import RopeDefaults
from aprfmt.arch.sliding_window import KINDS
from aprfmt.arch.spec import Binding, Facts, Found, HyperRule, Params
from aprfmt.arch.tensor_rows import Q, RoleRow, linear, make_tables, norm
from aprfmt.arch.value_checks import listed_kinds, sequence, whole_number
from aprfmt.base.protocols import Value
from aprfmt.errors import ArchError

_M = "layers.{L}."
_EVERY = "global_attn_every_n_layers"
_PATTERN = "{arch}.attention.sliding_window_pattern"


def _layers_of_step(step: int, hp: Params) -> tuple[bool, ...]:
    """Return one boolean a layer: a window in all but the first of every `step`."""
    return tuple(i % step > 0 for i in range(hp["n_layers"]))


def _read_window_layers(facts: Facts, hp: Params) -> Found:
    """Return (which layers have a window, key) of config.json's list or step; else None.

    Raises ArchError for a kind of layer that is not known.
    """
    kinds, step = facts.first("layer_types"), facts.first(_EVERY)
    if kinds is None:
        return None if step is None else (_layers_of_step(whole_number(*step, 1), hp), step[1])
    listed = listed_kinds(*kinds, hp["n_layers"], KINDS)
    return tuple(KINDS[kind] for kind in listed), kinds[1]


def _read_window_layers_gguf(facts: Facts, hp: Params) -> Found:
    """Return (which layers have a window, key) of a GGUF's list or step; None without the key."""
    found = facts.first(_PATTERN)
    if found is None:
        return None
    if isinstance(found[0], int) and not isinstance(found[0], bool):
        return _layers_of_step(whole_number(*found, 1), hp), found[1]
    return tuple(bool(each) for each in sequence(*found, hp["n_layers"])), found[1]


def _write_window_layers_gguf(value: Value, hp: Params) -> Params:
    """Return GGUF's {key: step}, or the list where no step expresses it."""
    steps = [n for n in range(1, hp["n_layers"] + 1) if value == _layers_of_step(n, hp)]
    return {_PATTERN: steps[0] if steps else list(value)}


def _check_no_biases(value: Value, facts: Facts, hp: Params) -> str:
    """Return ""; ArchError for a model with biases, which no published one has."""
    for key in ("norm_bias", "attention_bias", "mlp_bias"):
        found = facts.first(key) if facts.style == "hf" else None
        if found is not None and found[0]:
            raise ArchError(f"{key}: is {found[0]}; expected False: such biases are not known")
    return ""


_WINDOWS = (
    HyperRule(
        "sliding_window",
        {"hf": ("local_attention",), "gguf": ("{arch}.attention.sliding_window",)},
        "size",
        128,
    ),
    HyperRule(
        "window_layers",
        read={"hf": _read_window_layers, "gguf": _read_window_layers_gguf},
        write={"hf": write_kinds(KINDS), "gguf": _write_window_layers_gguf},
        default=lambda hp: _layers_of_step(3, hp),
    ),
)

MODERNBERT = encoder_spec(
    "modernbert",
    make_tables(
        (
            *embedding_rows("embeddings.tok_embeddings", normed="embeddings.norm", bias=False),
            *norm("attn_norm", _M + "attn_norm", needs="attn_norm_layers"),
            *fused_rows(None),
            *linear("attn_output", _M + "attn.Wo", "hidden_size", Q),
            *norm("ffn_norm", _M + "mlp_norm"),
            *(RoleRow(role, "", ("ffn_size", "hidden_size"), gguf="") for role in GATE_UP),
            *linear("ffn_down", _M + "mlp.Wo", "hidden_size", "ffn_size"),
            *norm("output_norm", "final_norm", layered=False),
        ),
        hf_first=(
            *fused_bindings(_M + "attn.Wqkv", IN_ORDER, ("weight",)),
            Binding((_M + "mlp.Wi.weight",), GATE_UP, IN_GATE_UP),
        ),
        gguf_first=(*GGUF_FUSED[:1], Binding(("blk.{L}.ffn_up.weight",), GATE_UP, IN_GATE_UP)),
    ),
    encoder_rules(
        replace(
            hyper_rules.norm_eps(1e-5, "norm_eps", "layer_norm_epsilon"), check=_check_no_biases
        ),
        hyper_rules.activation("gelu", "hidden_activation"),
        # The width of the MLP is not a width of its first matrix.
        hyper_rules.size(
            "ffn_size", "intermediate_size", "feed_forward_length", "intermediate_size"
        ),
        HyperRule("attn_norm_layers", default=lambda hp: (False, *(True,) * (hp["n_layers"] - 1))),
        *_WINDOWS,
        *rope_rules(
            RopeDefaults(
                theta=160000.0,
                theta_local=10000.0,
                local_key="local_rope_theta",
                base_key="global_rope_theta",
            )
        ),
        hyper_rules.rope_style("half"),
        HyperRule("rope_layers", default=hyper_rules.per_layer(True)),
    ),
    replace(BLOCK, placement="pre", position="rope", mlp="gated", softmax_cast="float32"),
    more_ignored="""classifier_activation classifier_bias classifier_pooling decoder_bias
        deterministic_flash_attn embedding_dropout initializer_cutoff_factor mlp_dropout
        reference_compile repad_logits_with_grad sparse_pred_ignore_index sparse_prediction""",
)
