"""qwen3-moe: qwen3 with experts, and layers without.

Source: docs/reference/architectures.md.
"""

from aprfmt.arch import hyper_rules, losses, moe
from aprfmt.arch.qwen2_moe import DENSE, DENSE_LOSS, EXPERT_BINDINGS, EXPERTS, ROUTER
from aprfmt.arch.qwen3 import QK_NORMS
from aprfmt.arch.sliding_window import IGNORED_WINDOW, Window, window_rules
from aprfmt.arch.spec import ArchSpec, BlockSpec
from aprfmt.arch.tensor_rows import FUSED, attention, make_tables, norm, with_model_rows

_TENSORS, _BINDINGS = make_tables(
    with_model_rows(
        *norm("attn_norm", "input_layernorm"),
        *attention(),
        *QK_NORMS,
        *norm("ffn_norm", "post_attention_layernorm"),
        *DENSE,
        ROUTER,
        *EXPERTS,
    ),
    hf_first=EXPERT_BINDINGS,
    hf_more=FUSED,
)

QWEN3_MOE = ArchSpec(
    name="qwen3_moe",
    hyper=hyper_rules.hyper_table(
        hyper_rules.n_kv_heads(4),
        hyper_rules.context_length(32768),
        *hyper_rules.attention_biases(),
        hyper_rules.fixed("qk_norm", True),
        *window_rules(Window(listed=False, switch=True)),
        *moe.expert_count_rules(128, 8),
        moe.expert_size_rule(hf_default=768),
        moe.sparse_layers_rule(),
        moe.norm_topk_rule(False, gguf=True),
    ),
    tensors=_TENSORS,
    bindings=_BINDINGS,
    block=BlockSpec(qk_norm="head"),
    lost=(
        *losses.common_losses(),
        losses.ONE_BIAS_KEY,
        IGNORED_WINDOW,
        DENSE_LOSS,
        moe.norm_topk_loss(True),
    ),
    ignored=frozenset({"max_window_layers"}),
)
