"""Weights and metadata as converters and scripts wrote them wrongly.

Frozen: see `tests.field`. Not to be looked at while the diagnosis is worked on.
"""

from tests.field import edits
from tests.field.converter import Wrong, converted
from tests.field.hf import edited, on
from tests.field.row import Row, fault

ROWS: tuple[Row, ...] = (
    fault("keys-permuted-by-ratio", "file", "llama", "k rows permuted for n_heads/n_kv_heads heads",
          "https://github.com/ggml-org/llama.cpp/pull/3364",
          converted("llama", "keys-permuted-by-ratio", wrong=Wrong(
              k_heads=lambda heads, kv_heads: heads // kv_heads), num_attention_heads=6,
              num_key_value_heads=2, head_dim=12),
          ("gqa_mapping", "rope_pairing"), "L?.attn_k.weight"),
    fault("bias-left-unpermuted", "file", "llama-bias", "q and k rows permuted, their biases not",
          "https://github.com/ggml-org/llama.cpp/pull/7481",
          converted("llama-bias", "bias-left-unpermuted", wrong=Wrong(permute_bias=False)),
          ("rope_pairing", "fused_order"), ("L?.attn_q.bias", "L?.attn_k.bias")),
    fault("no-rope-freqs", "file", "llama-llama3", "the tensor of divisors is not written",
          "https://github.com/ikawrakow/ik_llama.cpp/pull/402",
          converted("llama-llama3", "no-rope-freqs", wrong=Wrong(freqs=False)),
          "rope_scaling", "rope_scaling"),
    fault("one-not-added", "file", "gemma", "norms are written without their 1",
          "https://github.com/ggml-org/llama.cpp/pull/5631",
          converted("gemma", "one-not-added", "F32", Wrong(plus=0.0), weights="bfloat16"),
          "norm_offset", "L?.attn_norm.weight"),
    fault("queries-concatenated-unsorted", "file", "llama", "parts of q in another order than of k",
          "https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/2013",
          edited("llama", "queries-concatenated-unsorted", on(edits.Q, edits.rows([1, 0]))),
          ("head_order", "row_offset", "fused_order"), "L?.attn_q.weight"),
    fault("shard-ends-early", "file", "llama",
          "what lies past the end of a short file reads as zeros",
          "https://github.com/osaurus-ai/vmlx-swift/pull/217",
          edited("llama", "shard-ends-early", on("2.mlp.up_proj.weight", edits.zeros_from(0.37)),
                 num_attention_heads=3, num_key_value_heads=1, head_dim=20),
          ("bit_rot", "stale_tensor"), "L2.ffn_up.weight"),
    fault("every-expert-the-last", "file", "qwen3_moe", "each expert overwrote the one before",
          "https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/1871",
          edited("qwen3_moe", "every-expert-the-last", edits.experts_reordered([5] * 6)),
          ("wrong_rows", "expert_order"), "L?.ffn_*_exps.weight"),
    fault("head-not-the-trained-one", "file", "llama",
          "a tied model saved with the untrained matrix",
          "https://github.com/Lightning-AI/litgpt/issues/1727",
          edited("llama", "head-not-the-trained-one", on("embed_tokens.weight", lambda x: (
              edits.drawn(x, 4))), tied=True),
          "stale_tensor", ("token_embd.weight", "output.weight")),
    fault("qkv-by-key-group", "file", "phi3-plain", "q, k and v of each key head's group together",
          "https://github.com/NVIDIA-NeMo/Emerging-Optimizers/issues/56",
          edited("phi3-plain", "qkv-by-key-group", on("qkv_proj.weight", edits.by_group(4, 2, 16))),
          ("fused_order",), ("L?.attn_*", "*qkv*")),
    fault("gate-up-by-eight", "file", "phi3-plain", "gate and up in turns of eight rows",
          "https://github.com/NVIDIA/Megatron-LM/issues/7576",
          edited("phi3-plain", "gate-up-by-eight", on("gate_up_proj.weight", edits.interleaved(8))),
          ("fused_order",), ("L?.ffn_*", "*gate_up*")),
    fault("norm-of-another-place", "file", "gemma2",
          "the norm before the MLP is the one behind attention",
          "https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/4201",
          edited("gemma2", "norm-of-another-place", edits.norm_of_another_place),
          ("wrong_rows", "copied_tensor"), "L?.ffn_norm.weight"),
)  # fmt: skip
