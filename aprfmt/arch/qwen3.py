"""qwen3: llama with RMS norms on each query and key head before rope.

Source: docs/reference/architectures.md.
"""

from aprfmt.arch import hyper_rules, losses
from aprfmt.arch.qwen2 import WINDOW
from aprfmt.arch.rope_gguf import ROPE_TENSORS
from aprfmt.arch.sliding_window import IGNORED_WINDOW, window_rules
from aprfmt.arch.spec import ArchSpec, BlockSpec
from aprfmt.arch.tensor_rows import FUSED, attention, gated_mlp, make_tables, norm, with_model_rows

QK_NORMS = (
    *norm("attn_q_norm", "self_attn.q_norm", ("head_dim",)),
    *norm("attn_k_norm", "self_attn.k_norm", ("head_dim",)),
)

_TENSORS, _BINDINGS = make_tables(
    with_model_rows(
        *norm("attn_norm", "input_layernorm"),
        *attention(),
        *QK_NORMS,
        *norm("ffn_norm", "post_attention_layernorm"),
        *gated_mlp(),
    ),
    hf_more=FUSED,
)

QWEN3 = ArchSpec(
    name="qwen3",
    hyper=hyper_rules.hyper_table(
        hyper_rules.head_dim(128),
        hyper_rules.context_length(32768),
        *hyper_rules.attention_biases(),
        hyper_rules.fixed("qk_norm", True),
        *window_rules(WINDOW),
    ),
    tensors=_TENSORS,
    bindings=_BINDINGS,
    block=BlockSpec(qk_norm="head"),
    lost=(*losses.common_losses(), losses.ONE_BIAS_KEY, IGNORED_WINDOW),
    derived=ROPE_TENSORS,
)
