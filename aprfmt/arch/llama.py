"""llama (the base case), mistral (with windows) and mixtral (with experts).

GGUF calls all three `llama` and has Q and K in adjacent pairs. Source:
docs/reference/architectures.md.
"""

from collections.abc import Collection, Mapping

from aprfmt.arch import hyper_rules, losses, moe
from aprfmt.arch.joining_steps import Stacked
from aprfmt.arch.rope import rope_rules
from aprfmt.arch.rope_gguf import ROPE_TENSORS
from aprfmt.arch.rope_hf import RopeDefaults
from aprfmt.arch.sliding_window import IGNORED_WINDOW, Window, window_rules
from aprfmt.arch.spec import ArchSpec, Binding, BlockSpec
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
from aprfmt.base.protocols import Value

_NORMS = norm("attn_norm", "input_layernorm"), norm("ffn_norm", "post_attention_layernorm")

_TENSORS, _BINDINGS = make_tables(
    with_model_rows(*_NORMS[0], *attention(permuted=True), *_NORMS[1], *gated_mlp(bias="mlp_bias")),
    hf_more=FUSED,
)

LLAMA = ArchSpec(
    name="llama",
    hyper=hyper_rules.hyper_table(
        *hyper_rules.attention_biases(),
        hyper_rules.mlp_bias(),
        hyper_rules.rope_style("half", permuted=True),
    ),
    tensors=_TENSORS,
    bindings=_BINDINGS,
    block=BlockSpec(),
    lost=(*losses.common_losses(), losses.ONE_BIAS_KEY),
    derived=ROPE_TENSORS,
)

_MISTRAL_TENSORS, _MISTRAL_BINDINGS = make_tables(
    with_model_rows(
        *_NORMS[0], *attention(bias=None, out_bias=None, permuted=True), *_NORMS[1], *gated_mlp()
    ),
    hf_more=FUSED,
)


def _has_window_key(names: Collection[str], values: Mapping[str, Value]) -> bool:
    """Return whether a GGUF has a window's size and no experts: the model is mistral."""
    return bool(values.get("llama.attention.sliding_window")) and not moe.has_router(names, values)


MISTRAL = ArchSpec(
    name="mistral",
    hyper=hyper_rules.hyper_table(
        hyper_rules.n_kv_heads(8),
        hyper_rules.context_length(4096 * 32),
        hyper_rules.rope_style("half", permuted=True),
        *window_rules(Window(hf_default=4096, listed=False)),
    ),
    tensors=_MISTRAL_TENSORS,
    bindings=_MISTRAL_BINDINGS,
    block=BlockSpec(),
    lost=(*losses.common_losses(), IGNORED_WINDOW),
    derived=ROPE_TENSORS,
    evidence=_has_window_key,
)

_EXPERTS, _EXPERT_BINDINGS = experts("block_sparse_moe.experts", "w1", "w3", "w2")
_ROUTER = RoleRow(
    "ffn_gate_inp.weight", "block_sparse_moe.gate.weight", ("n_experts", "hidden_size"),
    "moe_layers",
)  # fmt: skip

_MIXTRAL_TENSORS, _MIXTRAL_BINDINGS = make_tables(
    with_model_rows(
        *_NORMS[0],
        *attention(bias=None, out_bias=None, permuted=True),
        *_NORMS[1],
        _ROUTER,
        *_EXPERTS,
    ),
    hf_first=_EXPERT_BINDINGS,
    # transformers 5 calls the module `mlp` in memory.
    hf_more=(Binding((LAYER + "mlp.gate.weight",), ("ffn_gate_inp.weight",)), *FUSED),
    # The first mixtral GGUF files have one tensor per expert.
    gguf_more=tuple(
        Binding(
            (f"blk.{{L}}.ffn_{name}.{{E}}.weight",),
            (f"ffn_{name}_exps.weight",),
            (Stacked("n_experts"),),
        )
        for name in ("gate", "up", "down")
    ),
)

MIXTRAL = ArchSpec(
    name="mixtral",
    hyper=hyper_rules.hyper_table(
        hyper_rules.n_kv_heads(8),
        hyper_rules.context_length(4096 * 32),
        hyper_rules.norm_eps(1e-5),
        *rope_rules(RopeDefaults(theta=1e6)),
        hyper_rules.rope_style("half", permuted=True),
        *window_rules(Window(listed=False)),
        *moe.expert_count_rules(8, 2, "num_local_experts num_experts"),
        moe.expert_size_rule("intermediate_size"),
        moe.all_moe_layers_rule(),
        hyper_rules.fixed("norm_topk", True),
    ),
    tensors=_MIXTRAL_TENSORS,
    bindings=_MIXTRAL_BINDINGS,
    block=BlockSpec(router_cast="logits"),
    lost=(*losses.common_losses(), IGNORED_WINDOW),
    derived=ROPE_TENSORS,
    evidence=moe.has_router,
)
