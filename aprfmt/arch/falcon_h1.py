"""falcon_h1: attention and a mamba2 mixer side by side in every layer.

Every projection has a factor in config.json; llama.cpp's converter multiplies them into the
weights, which rounds them. The weights are kept as they are here, and a GGUF is warned of unless
all factors are 1. Sources: transformers' modeling_falcon_h1; the gguf package's name map; the
converter's falcon_h1.py.
"""

from collections.abc import Mapping

from aprfmt.arch import rules
from aprfmt.arch.mamba import bias_rules, expanded, head_rules, mamba2_mixer, state_rules
from aprfmt.arch.named import named
from aprfmt.arch.rope import rope_rules
from aprfmt.arch.rope_gguf import ROPE_TENSORS
from aprfmt.arch.rope_hf import Rope
from aprfmt.arch.rows import LAYER, RoleRow, around, attention, gated_mlp, norm, tables
from aprfmt.arch.spec import Binding, Facts, HyperRule, Loss
from aprfmt.arch.values import number
from aprfmt.base.protocols import Value

Params = Mapping[str, Value]
_FACTORS = (
    "attention_in_multiplier", "attention_out_multiplier", "key_multiplier",
    "ssm_in_multiplier", "ssm_out_multiplier", "lm_head_multiplier", "embedding_multiplier",
    "mlp_multipliers", "ssm_multipliers",
)  # fmt: skip


def _read(facts: Facts, hp: Params) -> tuple[Value, str] | None:
    """Return the factors other than 1, in the order of their names."""
    found: dict[str, list[float]] = {}
    for key in _FACTORS:
        stated = facts.first(key)
        if stated is not None:
            several = stated[0] if isinstance(stated[0], (list, tuple)) else [stated[0]]
            found[key] = [number(factor, key) for factor in several]
    other = {key: factors for key, factors in found.items() if any(x != 1 for x in factors)}
    return None if not other else (other, next(iter(other)))


def _write(value: Value, hp: Params) -> Params:
    each = {key: list(factors) for key, factors in (value or {}).items()}
    return {key: x if key.endswith("multipliers") else x[0] for key, x in each.items()}


FALCON_H1 = named(
    "falcon_h1",
    tables(
        around(
            *norm("attn_norm", "input_layernorm"),
            *attention(),
            *mamba2_mixer(LAYER + "mamba"),
            # The gguf package's map names it without a suffix here, and llama.cpp asks for that.
            RoleRow("ffn_norm.weight", "pre_ff_layernorm.weight", ("hidden_size",),
                gguf="ffn_norm"),
            *gated_mlp(bias="mlp_bias", module="feed_forward"),
            final="model.final_layernorm",
        ),
        gguf_more=(Binding(("blk.{L}.ffn_norm.weight",), ("ffn_norm.weight",)),),
    ),
    rules.hyper_table(
        rules.n_kv_heads(8),
        rules.ffn_size(14336),
        rules.context_length(8192),
        rules.norm_eps(1e-5),
        *rules.attention_biases(),
        rules.mlp_bias(hf="mlp_bias"),
        *rope_rules(Rope(theta=100000.0)),
        HyperRule("ssm_layers", default=rules.per_layer(True)),
        expanded("mamba_expand", "mamba_d_ssm"),
        *head_rules("mamba_n_heads", "mamba_n_groups", 128, 1),
        *state_rules("mamba_d_state", "mamba_d_conv", 256),
        *bias_rules("mamba_conv_bias", "mamba_proj_bias"),
        rules.flag("ssm_norm", False, "mamba_rms_norm", present=("ssm_norm.weight",)),
        HyperRule("folded_factors", default=None, read={"hf": _read}, write={"hf": _write}),
    ),
    lost=(
        Loss(
            "gguf", "folded_factors", lambda hp: bool(hp["folded_factors"]),
            "llama.cpp expects the weights multiplied by these factors, and has no key for them: "
            "it would run this file without them",
        ),
        Loss(
            "gguf", "ssm_norm", lambda hp: hp["ssm_norm"],
            "llama.cpp applies the mixers' norm behind the gate, this model before it",
        ),
    ),
    derived=ROPE_TENSORS,
)  # fmt: skip
