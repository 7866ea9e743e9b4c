"""Copies in encodings of few bits whose codes, scales or zero points are wrong.

Frozen: see `tests.field`. Not to be looked at while the diagnosis is worked on.
"""

from tests.field import damage
from tests.field.converter import Wrong, converted
from tests.field.packed import encoded
from tests.field.row import Row, fault

ROWS: tuple[Row, ...] = (
    fault("gptq-index-not-sorted", "packed", "llama", "the order of columns is of another layout",
          "https://github.com/AutoGPTQ/AutoGPTQ/issues/198",
          encoded("gptq", "gptq-index-not-sorted", damage.act_order_lost, hidden_size=64,
                  intermediate_size=96),
          ("group_index", "quant_scale", "packing_order"), "L?.*.weight"),
    fault("fp8-scale-inverted", "packed", "llama", "the multiplier is stored as its reciprocal",
          "https://github.com/ggml-org/llama.cpp/pull/21095",
          encoded("fp8-block", "fp8-scale-inverted", damage.part(
              "weight_scale_inv", damage.reciprocal), hidden_size=64, intermediate_size=160),
          ("quant_scale", "scale", "function_of"), "L?.*.weight"),
    fault("fp8-blocks-moved", "packed", "llama", "scales of the next row of blocks",
          "https://github.com/NVIDIA/TensorRT-Model-Connect/pull/1115",
          encoded("fp8-block", "fp8-blocks-moved", damage.part(
              "weight_scale_inv", damage.next_block), hidden_size=192, intermediate_size=320,
              num_hidden_layers=2),
          ("quant_scale", "scale"), "L?.*.weight"),
    fault("nf4-offset-lost", "packed", "llama", "the mean of the nested scales is lost",
          "https://github.com/bitsandbytes-foundation/bitsandbytes/pull/1971",
          encoded("nf4-nested", "nf4-offset-lost", damage.nested_offset_lost, hidden_size=64,
                  intermediate_size=96),
          ("nested_offset", "quant_scale"), "L?.*.weight"),
    fault("mlx-bias-lost", "packed", "qwen3", "the affine minimum has lost its sign",
          "https://github.com/ml-explore/mlx/pull/3664",
          encoded("mlx", "mlx-bias-lost", damage.part("biases", lambda x: -x), arch="qwen3",
                  hidden_size=64, intermediate_size=96),
          ("quant_min", "zero_point"), "L?.*.weight"),
    fault("q4_0-linear-nibbles", "packed", "llama", "neighbours in a byte, where ggml has halves",
          "https://github.com/kekzl/imp/pull/567",
          converted("llama", "q4_0-linear-nibbles", "Q4_0", Wrong(
              packed=damage.blocks(18, damage.linear_nibbles(2))), hidden_size=64,
              intermediate_size=96),
          ("packing_order", "endianness"), ("L?.*.weight", "token_embd.weight")),
    fault("q4_k-d-and-dmin", "packed", "llama", "d and dmin of each superblock exchanged",
          "https://github.com/paiml/aprender/pull/2115",
          converted("llama", "q4_k-d-and-dmin", "Q4_K", Wrong(
              packed=damage.blocks(144, damage.halves_exchanged)), hidden_size=256,
              intermediate_size=256, num_hidden_layers=2),
          ("quant_min", "quant_scale"), ("L?.*.weight", "token_embd.weight")),
    fault("q4_k-minimum-added", "packed", "qwen3", "the minimum is added, not subtracted",
          "https://github.com/paiml/aprender/pull/1924",
          converted("qwen3", "q4_k-minimum-added", "Q4_K", Wrong(
              packed=damage.blocks(144, damage.minimum_negated)), hidden_size=256,
              intermediate_size=256, num_hidden_layers=2),
          "quant_min", ("L?.*.weight", "token_embd.weight")),
)  # fmt: skip
