"""Copies in encodings of few bits whose codes, scales or zero points are wrong."""

from tests.field import damage
from tests.field.converter import Wrong, converted
from tests.field.packed import awq, encoded, gptq
from tests.field.row import Row, fault

ROWS: tuple[Row, ...] = (
    fault("gptq-zeros-of-v2", "packed", "llama",
          "zero points of the second format, labelled the first",
          "https://github.com/vllm-project/vllm/pull/38966",
          encoded("gptq", "gptq-zeros-of-v2", encode=lambda w: gptq(w, minus=0), hidden_size=64,
                  intermediate_size=96),
          "zero_point", "L?.*.weight"),
    fault("gptq-v2-zeros-of-v1", "packed", "qwen3", "zero points of the first format under gptq_v2",
          "https://github.com/vllm-project/vllm/pull/26092",
          encoded("gptq-v2", "gptq-v2-zeros-of-v1", encode=gptq, arch="qwen3", hidden_size=96,
                  intermediate_size=160),
          "zero_point", "L?.*.weight"),
    fault("awq-in-plain-order", "packed", "llama",
          "codes packed one after another, not 0 2 4 6 1 3 5 7",
          "https://github.com/casper-hansen/AutoAWQ/issues/275",
          encoded("awq", "awq-in-plain-order", encode=lambda w: awq(
              w, order=range(8), zero_order=range(8)), hidden_size=64, intermediate_size=96),
          "packing_order", "L?.*.weight"),
    fault("awq-zeros-in-plain-order", "packed", "llama",
          "zero points packed without the interleave",
          "https://github.com/pie-project/pie/pull/491",
          encoded("awq", "awq-zeros-in-plain-order", encode=lambda w: awq(w, zero_order=range(8)),
                  hidden_size=96, intermediate_size=96),
          ("packing_order", "zero_point"), "L?.*.weight"),
    fault("awq-zero-underflow", "packed", "qwen2", "zero points less 1: 0 became 15",
          "https://github.com/ModelCloud/GPTQModel/pull/2351",
          encoded("awq", "awq-zero-underflow", damage.part("qzeros", damage.zero_minus_one),
                  arch="qwen2", hidden_size=64, intermediate_size=96),
          "zero_point", "L?.*.weight"),
    fault("fp8-scale-not-applied", "packed", "qwen3", "a scale of 1 for every tensor",
          "https://github.com/NVIDIA/Model-Optimizer/pull/1962",
          encoded("fp8-tensor", "fp8-scale-not-applied", damage.part("weight_scale", damage.ones),
                  arch="qwen3"),
          ("quant_scale", "scale"), "L?.*.weight"),
    fault("fp8-one-scale-for-all", "packed", "llama", "the first block's scale for all blocks",
          "https://github.com/onnxruntime/mobius/pull/653",
          encoded("fp8-block", "fp8-one-scale-for-all", damage.part(
              "weight_scale_inv", damage.shared), hidden_size=192, intermediate_size=320,
              num_hidden_layers=2),
          ("quant_scale", "scale"), "L?.*.weight"),
    fault("fp8-scale-rounded-late", "packed", "qwen3", "scales rounded to powers of two afterwards",
          "https://github.com/huggingface/transformers/pull/46763",
          encoded("fp8-block", "fp8-scale-rounded-late", damage.part(
              "weight_scale_inv", damage.power_of_two), arch="qwen3", hidden_size=160,
              intermediate_size=160, num_hidden_layers=2),
          ("quant_scale", "scale"), "L?.*.weight"),
    fault("packed-backwards", "packed", "llama", "eight codes of a word in the reverse order",
          "https://github.com/vllm-project/llm-compressor/issues/1613",
          encoded("packed", "packed-backwards", damage.part(
              "weight_packed", damage.nibbles_reversed), hidden_size=64, intermediate_size=96),
          ("packing_order", "endianness"), "L?.*.weight"),
    fault("q4_1-header-skipped", "packed", "llama", "codes begin where the block's minimum stands",
          "https://github.com/ml-explore/mlx/pull/3664",
          converted("llama", "q4_1-header-skipped", "Q4_1", Wrong(
              packed=damage.blocks(20, damage.header_skipped, "ffn_up")), hidden_size=64,
              intermediate_size=96),
          ("packing_order", "byte_offset", "quant_min"), "L?.ffn_up.weight"),
    fault("q8_0-scale-shared", "packed", "qwen3", "every block has the first one's scale",
          "https://github.com/1bit-MONSTER/1bit-MONSTER/issues/153",
          converted("qwen3", "q8_0-scale-shared", "Q8_0", Wrong(
              packed=damage.blocks(34, damage.first_scale)), hidden_size=64, intermediate_size=96),
          ("quant_scale", "scale"), ("L?.*.weight", "token_embd.weight")),
    fault("q5_0-block-late", "packed", "llama", "blocks of one tensor are one place late",
          "https://github.com/ikawrakow/ik_llama.cpp/pull/992",
          converted("llama", "q5_0-block-late", "Q5_0", Wrong(
              packed=damage.blocks(22, damage.block_late, "blk.1.ffn_down")), hidden_size=64,
              intermediate_size=96),
          ("byte_offset", "quant_scale", "row_offset", "wrong_rows"), "L1.ffn_down.weight"),
)  # fmt: skip
