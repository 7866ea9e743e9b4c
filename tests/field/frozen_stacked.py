"""Engines with two to four faults at once.

Frozen: see `tests.field`. Not to be looked at while the diagnosis is worked on.
"""

from tests.field import broken
from tests.field.foreign import attention, dump, frequencies, plain_frequencies, slots_only
from tests.field.row import Row, cause, fault

ROWS: tuple[Row, ...] = (
    fault("two-ropes-wrong", "engine", "llama-llama3",
          "adjacent pairs, and llama3 scaling left out",
          "https://github.com/NeuraLegion/shainet/pull/111",
          dump("llama-llama3", "two-ropes-wrong", broken.pairs(), frequencies(plain_frequencies())),
          [cause("rope_pairing", "rope_style"), cause("rope_scaling", "rope_scaling")]),
    fault("positions-and-cache", "engine", "qwen3",
          "positions one too far, and a layer's cache late",
          "https://github.com/microsoft/onnxruntime-genai/pull/2354 "
          "https://github.com/tanishqkumar/ssd/issues/23",
          dump("qwen3", "positions-and-cache", broken.positions_from(1, 9), broken.late(2)),
          [cause(("positions", "kv_cache")), cause("kv_cache", ("L2.kv_cache", "L2.?_cache"))]),
    fault("window-and-activation", "engine", "mistral",
          "one more than the window, and gelu for silu",
          "https://github.com/huggingface/transformers/issues/39408 "
          "https://github.com/paiml/aprender/pull/2096",
          dump("mistral", "window-and-activation", attention(mask=broken.windowed(9)),
               broken.activation("gelu_pytorch_tanh"), keep=slots_only),
          [cause("sliding_window", "sliding_window"),
           cause("activation", ("activation", "L?.activation"))], coarse=True),
)  # fmt: skip
