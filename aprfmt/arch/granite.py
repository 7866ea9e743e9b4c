"""granite 3 and its mixture: llama with factors on embedding, scores, block outputs and logits.

`logits_scaling` and GGUF's `logit_scale` are divisors here (a factor for cohere). Source:
docs/reference/architectures.md; llama.cpp's granite.cpp.
"""

from dataclasses import replace

from aprfmt.arch import hyper_rules, losses, moe
from aprfmt.arch.joining_steps import Split
from aprfmt.arch.rope_gguf import ROPE_TENSORS
from aprfmt.arch.spec import MISSING, ArchSpec, Binding, BlockSpec, HyperRule
from aprfmt.arch.tensor_rows import (
    FUSED,
    LAYER,
    RoleRow,
    attention,
    experts,
    gated_mlp,
    make_tables,
    norm,
    with_model_rows,
)

_TENSORS, _BINDINGS = make_tables(
    with_model_rows(
        *norm("attn_norm", "input_layernorm"),
        *attention(permuted=True),
        *norm("ffn_norm", "post_attention_layernorm"),
        *gated_mlp(bias="mlp_bias"),
    ),
    hf_more=FUSED,
)


def _factor_rule(name: str, hf: str, gguf: str) -> HyperRule:
    """Return the rule for a factor, 1 without a key; an APR file must have it."""
    keys = {"hf": (hf,), "gguf": (f"{{arch}}.{gguf}",)}
    return HyperRule(name, keys, "float", 1.0, {"apr": MISSING})


FACTORS = (
    replace(
        hyper_rules.attn_scale(gguf_default=hyper_rules.default_attn_scale),
        keys={"hf": ("attention_multiplier",), "gguf": ("{arch}.attention.scale",)},
        default=1.0,
        default_in={"gguf": hyper_rules.default_attn_scale, "apr": MISSING},
        write={},
    ),
    _factor_rule("embedding_scale", "embedding_multiplier", "embedding_scale"),
    _factor_rule("residual_scale", "residual_multiplier", "residual_scale"),
    HyperRule(
        "logit_scale",
        {"hf": ("logits_scaling",), "gguf": ("{arch}.logit_scale",)},
        "float",
        1.0,
        {"gguf": MISSING, "apr": MISSING},
        inverse_in=("hf", "gguf"),
    ),
)

GRANITE = ArchSpec(
    name="granite",
    hyper=hyper_rules.hyper_table(
        *hyper_rules.attention_biases(),
        hyper_rules.mlp_bias(),
        hyper_rules.rope_style("half", permuted=True),
        *FACTORS,
    ),
    tensors=_TENSORS,
    bindings=_BINDINGS,
    block=BlockSpec(),
    lost=(*losses.common_losses(), losses.ONE_BIAS_KEY),
    derived=ROPE_TENSORS,
)

_IN, _OUT = LAYER + "block_sparse_moe.input_linear", LAYER + "block_sparse_moe.output_linear"
_HALVES = (Split(("moe_ffn_size", "moe_ffn_size"), axis=1),)
_GATE_UP = ("ffn_gate_exps.weight", "ffn_up_exps.weight")
# transformers 5 has other names in memory.
MEMORY = (
    Binding((LAYER + "block_sparse_moe.experts.gate_up_proj",), _GATE_UP, _HALVES),
    Binding((LAYER + "block_sparse_moe.experts.down_proj",), ("ffn_down_exps.weight",)),
    Binding((LAYER + "block_sparse_moe.router.weight",), ("ffn_gate_inp.weight",)),
)
_MOE_TENSORS, _MOE_BINDINGS = make_tables(
    with_model_rows(
        *norm("attn_norm", "input_layernorm"),
        *attention(permuted=True),
        *norm("ffn_norm", "post_attention_layernorm"),
        RoleRow(
            "ffn_gate_inp.weight",
            "block_sparse_moe.router.layer.weight",
            ("n_experts", "hidden_size"),
            "moe_layers",
        ),
        *experts()[0],
    ),
    hf_first=(
        Binding((_IN + ".weight",), _GATE_UP, _HALVES),
        Binding((_OUT + ".weight",), ("ffn_down_exps.weight",)),
    ),
    hf_more=(*MEMORY, *FUSED),
)

GRANITEMOE = ArchSpec(
    name="granitemoe",
    hyper=hyper_rules.hyper_table(
        *hyper_rules.attention_biases(),
        hyper_rules.rope_style("half", permuted=True),
        *FACTORS,
        *moe.expert_count_rules(8, 2, "num_local_experts num_experts"),
        moe.expert_size_rule("intermediate_size"),
        moe.all_moe_layers_rule(),
        hyper_rules.fixed("router", "softmax_topk"),
        hyper_rules.fixed("norm_topk", True),
    ),
    tensors=_MOE_TENSORS,
    bindings=_MOE_BINDINGS,
    block=BlockSpec(),
    lost=(*losses.common_losses(), losses.ONE_BIAS_KEY),
    derived=ROPE_TENSORS,
)
