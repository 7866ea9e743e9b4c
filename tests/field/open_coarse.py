"""Engines of which only layer outputs and logits are known."""

from tests.field import broken
from tests.field.foreign import LONG, attention, dump, layers_only, own_layer, setting
from tests.field.row import Row, fault

ROWS: tuple[Row, ...] = (
    fault("layers-gelu", "engine", "gemma2", "exact gelu, seen from layer outputs",
          "https://github.com/kyutai-labs/pocket-tts/pull/278",
          dump("gemma2", "layers-gelu", broken.activation("gelu"), keep=layers_only),
          "activation", ("activation", "L?.activation"), coarse=True),
    fault("layers-softmax", "engine", "llama", "sums over the first 32 keys, from layer outputs",
          "https://github.com/intel/torch-xpu-ops/issues/4772",
          dump("llama", "layers-softmax", attention(softmax=broken.partial_sums(32)), ids=LONG,
               keep=layers_only),
          "softmax_reduction", "softmax", coarse=True),
    fault("layers-residual", "engine", "llama",
          "the norm's result is the stream, from layer outputs",
          "https://github.com/Howuhh/faster-trajectory-transformer/issues/3",
          dump("llama", "layers-residual", own_layer(attn_from="normed"), keep=layers_only),
          "residual", ("residual", "L0.residual"), coarse=True),
    fault("layers-cache", "engine", "qwen3", "one layer's cache is late, seen from layer outputs",
          "https://github.com/paiml/realizar/issues/94",
          dump("qwen3", "layers-cache", broken.late(1), keep=layers_only),
          "kv_cache", ("L1.kv_cache", "L1.?_cache"), coarse=True),
    fault("layers-gate-up", "engine", "llama", "gate and up exchanged, seen from layer outputs",
          "https://github.com/tgo-app-dev/vpipe/issues/2",
          dump("llama", "layers-gate-up", broken.gate_and_up, keep=layers_only),
          "swapped_tensors", ("L?.ffn_gate.weight", "L?.ffn_up.weight"), coarse=True),
    fault("layers-scale", "engine", "granite",
          "1/sqrt(d) for the model's factor, from layer outputs",
          "https://github.com/ggml-org/llama.cpp/pull/9412",
          dump("granite", "layers-scale", setting("GraniteAttention",
               scaling=lambda a: a.head_dim**-0.5), keep=layers_only),
          "attention_scale", "attn_scale", coarse=True),
)  # fmt: skip
