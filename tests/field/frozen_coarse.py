"""Engines of which only layer outputs and logits are known.

Frozen: see `tests.field`. Not to be looked at while the diagnosis is worked on.
"""

from tests.field import broken
from tests.field.foreign import (
    attention,
    dump,
    frequencies,
    layers_only,
    plain_frequencies,
    setting,
    weights,
)
from tests.field.row import Row, fault

ROWS: tuple[Row, ...] = (
    fault("layers-theta", "engine", "llama", "another base, seen from layer outputs",
          "https://github.com/Luce-Org/lucebox/pull/447",
          dump("llama", "layers-theta", frequencies(plain_frequencies(1e5)), keep=layers_only),
          "rope_theta", "rope_theta", coarse=True),
    fault("layers-gqa", "engine", "llama", "key heads tiled, seen from layer outputs",
          "https://github.com/apple/axlearn/pull/842",
          dump("llama", "layers-gqa", attention(repeat="tile"), keep=layers_only,
               num_attention_heads=6, num_key_value_heads=2, head_dim=12),
          "gqa_mapping", "n_kv_heads", coarse=True),
    fault("layers-mask", "engine", "qwen3", "no causal mask, seen from layer outputs",
          "https://github.com/osaurus-ai/vmlx-swift/pull/185",
          dump("qwen3", "layers-mask", attention(mask=broken.no_mask), keep=layers_only),
          "mask", "mask", coarse=True),
    fault("layers-eps", "engine", "llama", "another epsilon, seen from layer outputs",
          "https://github.com/ggml-org/llama.cpp/pull/2384",
          dump("llama", "layers-eps", setting("RMSNorm", variance_epsilon=5e-6), keep=layers_only),
          "norm_eps", "norm_eps", coarse=True),
    fault("layers-bias", "engine", "qwen2", "no q, k, v bias, seen from layer outputs",
          "https://github.com/EricLBuehler/candle-vllm/pull/167",
          dump("qwen2", "layers-bias", *(weights(f"{p}_proj.bias", lambda x: 0 * x) for p in "qkv"),
               keep=layers_only),
          "missing_bias", "L?.attn_?.bias", coarse=True),
    fault("layers-window", "engine", "mistral", "a window of one more, seen from layer outputs",
          "https://github.com/ml-explore/mlx-lm/pull/390",
          dump("mistral", "layers-window", attention(mask=broken.windowed(9)), keep=layers_only),
          "sliding_window", "sliding_window", coarse=True),
    fault("layers-scaling", "engine", "llama-llama3", "no llama3 scaling, seen from layer outputs",
          "https://github.com/jmaczan/tiny-vllm/pull/1",
          dump("llama-llama3", "layers-scaling", frequencies(plain_frequencies()),
               keep=layers_only),
          "rope_scaling", "rope_scaling", coarse=True),
)  # fmt: skip
