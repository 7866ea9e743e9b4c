"""ministral3, and mistral3's text part: mistral whose queries may grow with the position.

The factor is 1 + beta*log(1 + floor(position / trained length)), after rope (`llama_4_scaling_beta`
in the rope object). Source: transformers' modeling_ministral3; the converter's mistral3.py,
llama.cpp's mistral3.cpp, which permutes Q and K like llama's.
"""

from dataclasses import replace

from aprfmt.arch import hyper_rules, losses
from aprfmt.arch.rope import rope_rules
from aprfmt.arch.rope_gguf import ROPE_TENSORS
from aprfmt.arch.rope_hf import ORIGINAL, HFRope, RopeDefaults
from aprfmt.arch.sliding_window import IGNORED_WINDOW, Window, window_rules
from aprfmt.arch.spec import ArchSpec, BlockSpec, Facts, HyperRule, Params
from aprfmt.arch.tensor_rows import FUSED, attention, gated_mlp, make_tables, norm, with_model_rows
from aprfmt.arch.value_checks import finite_number, whole_number
from aprfmt.base.protocols import Value

_ROPE = RopeDefaults(theta=1e6, log_mul=1.0)
_BETA = "llama_4_scaling_beta"


def _read_beta(facts: Facts, hp: Params) -> tuple[Value, str] | None:
    """Return (scale beta of the attention temperature, key) of the rope object, 0 as None.

    None without the key.
    """
    rope = HFRope(_ROPE, facts)
    rope.full.find("max_position_embeddings")  # published there too, and not used
    found = rope.full.find(_BETA)
    return None if found is None else (finite_number(*found) or None, found[1])


def _read_length(facts: Facts, hp: Params) -> tuple[Value, str] | None:
    """Return (trained length, None without attention temperature, key); None without the key."""
    found = HFRope(_ROPE, facts).full.find(ORIGINAL)
    if found is None:
        return None
    return (None if hp["temperature_scale"] is None else whole_number(*found, 1)), found[1]


def _default_length(hp: Params) -> int | None:
    """Return the length that rope was trained for; None without attention temperature."""
    if hp["temperature_scale"] is None:
        return None
    scaling: Params = hp["rope_scaling"] or {}
    length: int = scaling.get("original_context_length") or hp["context_length"]
    return length


def _write_rope(value: Value, hp: Params) -> Params:
    """Return config.json's {"rope_scaling": object} with beta, which transformers requires."""
    object_ = dict(_SCALING.write["hf"](value, hp)["rope_scaling"] or {"rope_type": "default"})
    object_.setdefault(ORIGINAL, hp["temperature_length"] or hp["context_length"])
    return {"rope_scaling": {**object_, _BETA: hp["temperature_scale"] or 0.0}}


_RULES = {rule.name: rule for rule in rope_rules(_ROPE)}
_SCALING = _RULES["rope_scaling"]
_RULES["rope_scaling"] = replace(_SCALING, write={**_SCALING.write, "hf": _write_rope})

_TENSORS, _BINDINGS = make_tables(
    with_model_rows(
        *norm("attn_norm", "input_layernorm"),
        *attention(bias=None, out_bias=None, permuted=True),
        *norm("ffn_norm", "post_attention_layernorm"),
        *gated_mlp(),
    ),
    hf_more=FUSED,
)

MINISTRAL3 = ArchSpec(
    name="ministral3",
    hyper=hyper_rules.hyper_table(
        hyper_rules.n_kv_heads(8),
        hyper_rules.head_dim(128),
        hyper_rules.context_length(262144),
        hyper_rules.norm_eps(1e-5),
        *_RULES.values(),
        hyper_rules.rope_style("half", permuted=True),
        *window_rules(Window(listed=False)),
        HyperRule(
            "temperature_scale",
            {"gguf": ("{arch}.attention.temperature_scale",)},
            "float",
            None,
            read={"hf": _read_beta},
            write={"hf": lambda value, hp: {}},
        ),
        HyperRule(
            "temperature_length",
            read={"hf": _read_length},
            write={"hf": lambda value, hp: {}},
            default=_default_length,
        ),
    ),
    tensors=_TENSORS,
    bindings=_BINDINGS,
    block=BlockSpec(temperature="all"),
    lost=(*losses.common_losses(), IGNORED_WINDOW),
    ignored=frozenset(
        "multimodal_projector_bias projector_hidden_act spatial_merge_size "
        "vision_feature_layer".split()
    ),
    derived=ROPE_TENSORS,
)
