"""Seeded faults of stored tensors that were moved, cut, folded, merged or overwritten.

Each is made from the mathematics of a fault that converters and mergers really have, on sizes that
are no multiple of 32 where the architecture allows it. Controls are other spellings of the same
function, and copies that are meant to differ.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.diagnosis import files
from tests.diagnosis.fault import Fault, Pair
from tests.diagnosis.moved_edits import (
    GATE_UP,
    L1,
    L2,
    QKV,
    Edit,
    alternating,
    both,
    bytes_in,
    columns_in,
    copied_rows,
    every_layer,
    experts_dead,
    fifth_is_fourth,
    folded,
    grouped,
    half_as_bf16,
    head_is_embedding,
    in_q4,
    in_q8,
    in_shards,
    low_rank,
    mean,
    model,
    neighbours_bias,
    one_head_row,
    padded,
    pairs,
    parts_in,
    rotated,
    rows_in,
    scaled_pair,
    slice_early,
    smoothed,
    trained,
    zeros,
)


def moved(
    name: str,
    base: str,
    says: str,
    causes: str | Sequence[str],
    where: str | Sequence[str],
    edit: Edit | None = None,
    *,
    config: Any = None,
    verdict: str = "bug",
    confidence: str = "confirmed",
    prepare: Edit | None = None,
) -> Fault:
    """Return the fault of an edited copy; `prepare` edits the original before it is copied."""

    def make() -> Pair:
        source = model(base)
        if prepare is not None:
            source = files.copy(source, f"moved-{name}-a", tensors=prepare)
        return source, files.copy(source, f"moved-{name}", tensors=edit, config=config)

    def every(found: str | Sequence[str]) -> tuple[str, ...]:
        return (found,) if isinstance(found, str) else tuple(found)

    return Fault(name, base, says, make, every(causes), every(where), verdict, confidence)


Q1, K1, V1, O1 = (f"{L1}self_attn.{x}_proj.weight" for x in "qkvo")
UP1, GATE1, DOWN1 = (f"{L1}mlp.{x}_proj.weight" for x in ("up", "gate", "down"))
H1 = "transformer.h.1."

MOVED_FAULTS: tuple[Fault, ...] = (
    moved("qkv-grouped", "phi3", "fused rows by key head: its queries, key, value", "fused_order",
          ("L0.attn_q.weight", "L2.attn_v.weight"),
          every_layer(lambda at: rows_in(grouped(6, 3), at + QKV))),
    moved("qkv-per-head", "phi3-mha", "fused rows as [q k v] per head", "fused_order",
          "L1.attn_k.weight", rows_in(grouped(3, 3), L1 + QKV)),
    moved("qkv-as-kqv", "phi3", "fused rows as k, q, v", "fused_order", "L1.attn_q.weight",
          rows_in(parts_in(60, 30, 30, order=(1, 0, 2)), L1 + QKV)),
    moved("qkv-rotated", "phi3", "fused rows begin 7 later and come round", "row_offset",
          "L1.attn_q.weight", rows_in(rotated(7), L1 + QKV)),
    moved("gate-up-halves", "phi3", "up before gate", "swapped_tensors", "L0.ffn_gate.weight",
          every_layer(lambda at: rows_in(rotated(70), at + GATE_UP))),
    moved("gate-up-alternating", "phi3", "gate and up row by row", "fused_order",
          "L1.ffn_gate.weight", rows_in(alternating, L1 + GATE_UP)),
    moved("c-attn-per-head", "gpt2", "fused columns and biases as [q k v] per head", "fused_order",
          ("L1.attn_q.weight", "L1.attn_q.bias"),
          columns_in(grouped(5, 5), H1 + "attn.c_attn.weight", H1 + "attn.c_attn.bias")),
    moved("c-attn-bias-left", "gpt2", "fused columns as [q k v] per head, the biases not",
          "fused_order", "L1.attn_q.weight",
          columns_in(grouped(5, 5), H1 + "attn.c_attn.weight")),
    moved("c-attn-bias-only", "gpt2", "only the fused biases as [q k v] per head", "fused_order",
          "L1.attn_q.bias", columns_in(grouped(5, 5), H1 + "attn.c_attn.bias")),
    moved("bias-pairs-only", "llama-bias", "q biases as adjacent pairs, the weights not",
          "rope_pairing", "L0.attn_q.bias",
          every_layer(lambda at: rows_in(pairs(6), at + "self_attn.q_proj.bias"))),
    moved("weight-pairs-only", "qwen2", "q rows as adjacent pairs, the biases not",
          "rope_pairing", "L0.attn_q.weight",
          every_layer(lambda at: rows_in(pairs(7), at + "self_attn.q_proj.weight"))),
    moved("bias-zeroed", "qwen2", "every k bias is zero", "missing_bias", "L1.attn_k.bias",
          every_layer(lambda at: files.edit(at + "self_attn.k_proj.bias", lambda x: 0 * x))),
    moved("slice-early", "llama", "k and v cut one row too early", "row_offset",
          ("L1.attn_k.weight", "L1.attn_v.weight"), slice_early),
    moved("neighbour-rows", "llama", "20 rows of up are the next layer's", "wrong_rows",
          "L1.ffn_up.weight", copied_rows(UP1, slice(10, 30), f"{L2}mlp.up_proj.weight", 10)),
    moved("rows-repeated", "llama", "rows of the embedding repeated", "wrong_rows",
          "token_embd.weight",
          copied_rows("model.embed_tokens.weight", slice(40, 60), "model.embed_tokens.weight", 20)),
    moved("expert-twice", "qwen3_moe", "expert 4 has the bytes of expert 3", "wrong_rows",
          "L1.ffn_gate_exps.weight", fifth_is_fourth),
    moved("expert-dead", "qwen3_moe", "one expert is zero", "stale_tensor", "L1.ffn_up_exps.weight",
          experts_dead),
    moved("page-of-zeros", "llama-wide", "4096 bytes are zero", "bit_rot", "L1.ffn_up.weight",
          bytes_in(UP1, 8192, 12288, lambda rows: bytes(4096))),
    moved("page-of-another", "llama-wide", "4096 bytes of another tensor", "bit_rot",
          "L1.ffn_up.weight", bytes_in(UP1, 4096, 8192, lambda rows: rows[DOWN1][2][512:4608])),
    moved("tail-lost", "llama-wide", "four fifths of a tensor are zero, up to its end", "bit_rot",
          "L1.ffn_up.weight", files.raw(UP1, lambda data: data[:36000] + bytes(len(data) - 36000))),
    moved("late-from-the-middle", "llama-wide", "12 bytes more in the middle of a tensor",
          "byte_offset", "L1.ffn_up.weight",
          files.raw(UP1, lambda data: data[:50001] + bytes(12) + data[50001:-12])),
    moved("sectors-repeated", "llama-wide", "a sector stands in the next two as well", "bit_rot",
          "L1.ffn_up.weight",
          bytes_in(UP1, 1024, 2048, lambda rows: 2 * rows[UP1][2][512:1024])),
    moved("head-row", "llama", "one row of a head that equals the embedding", "bit_rot",
          "output.weight", one_head_row, prepare=head_is_embedding, confidence="unconfirmed"),
    Fault("merged-in-one-shard", "llama-wide", "an adapter merged into one of two shards",
          in_shards("merged-in-one-shard", "llama-wide",
                    low_rank(2, "self_attn.q_proj.weight", "self_attn.v_proj.weight",
                             only=(0, 1))),
          ("partial_merge",), ("L0.attn_q.weight", "L1.attn_v.weight")),
    moved("norm-folded-half", "llama", "norms folded, yet not set to one", "partial_fold",
          ("L0.attn_q.weight", "L2.ffn_up.weight"), folded(norms=False)),
    moved("norm-one-reader", "llama", "norms folded into gate alone and set to one",
          "partial_fold", "L0.ffn_norm.weight", folded(only=("mlp.gate_proj",), final=False)),
    moved("up-not-down", "llama", "rows of up scaled, columns of down not", "scale",
          "L0.ffn_up.weight", scaled_pair("mlp.up_proj", "mlp.down_proj", back=False)),
    moved("reciprocal", "llama", "norm weights inverted", "function_of", "L1.attn_norm.weight",
          files.edit(f"{L1}input_layernorm.weight", lambda x: 1 / x)),
    moved("sign-lost", "llama", "absolute values", "function_of", "L1.ffn_up.weight",
          files.edit(UP1, np.abs)),
    moved("squared", "llama", "squares", "function_of", "L1.ffn_norm.weight",
          files.edit(f"{L1}post_attention_layernorm.weight", np.square)),
    moved("minus-half", "llama", "a constant taken from a norm", "function_of",
          "L1.ffn_norm.weight",
          files.edit(f"{L1}post_attention_layernorm.weight", lambda x: x - np.float32(0.5))),
    moved("bias-of-a-neighbour", "qwen2", "the bias of the layer behind", "layer_order",
          ("L1.attn_v.bias", "L2.attn_v.bias"), neighbours_bias),
    moved("half-as-bf16", "llama", "F16 bits under the label of BF16, the source in F32",
          "dtype_mislabel", "L1.ffn_up.weight", half_as_bf16),
    moved("blocks-turned", "llama", "o transposed head by head", "transpose",
          "L1.attn_output.weight",
          files.edit(O1, lambda x: x.reshape(60, 6, 12).transpose(1, 2, 0).reshape(72, 60)
                     .reshape(60, 72))),
)  # fmt: skip

MOVED_CONTROLS: tuple[Fault, ...] = (
    moved("norms-folded", "llama", "every norm folded into what reads it", "norm_folded",
          ("L0.attn_norm.weight", "L1.ffn_up.weight", "output.weight"), folded(), verdict="same"),
    moved("norms-folded-gemma", "gemma", "norms folded, stored less one", "norm_folded",
          ("L0.attn_norm.weight", "L1.ffn_up.weight"), folded(1.0, final=False), verdict="same"),
    moved("norms-smoothed", "llama", "factors moved from norms into products", "scales_folded",
          ("L0.attn_norm.weight", "L1.attn_q.weight"), smoothed, verdict="same"),
    moved("up-and-down", "llama", "rows of up scaled, columns of down back", "scales_folded",
          ("L0.ffn_up.weight", "L0.ffn_down.weight"),
          scaled_pair("mlp.up_proj", "mlp.down_proj"), verdict="same"),
    moved("value-and-output", "qwen2", "rows of v scaled, columns of o back", "scales_folded",
          ("L0.attn_v.weight", "L0.attn_v.bias", "L0.attn_output.weight"),
          scaled_pair("self_attn.v_proj", "self_attn.o_proj", repeat=7), verdict="same"),
    moved("padded-zeros", "llama", "31 rows of zeros behind the vocabulary", "padded_vocabulary",
          ("token_embd.weight", "output.weight"), padded(31, zeros),
          config={"vocab_size": 128}, verdict="same"),
    moved("padded-mean", "qwen2", "15 rows of the mean behind the vocabulary",
          "padded_vocabulary", ("token_embd.weight",), padded(15, mean),
          config={"vocab_size": 112}, verdict="same"),
    Fault("norms-near-one-q4", "llama-64", "norms near one, quantized to Q4_0",
          in_q4("norms-near-one-q4"), ("quantisation",), ("L1.ffn_gate.weight",), "precision"),
    Fault("norms-folded-q8", "llama-64", "norms folded, then quantized to Q8_0",
          in_q8("norms-folded-q8", folded()), ("norm_folded", "quantisation"),
          ("L0.attn_norm.weight", "L1.ffn_up.weight"), "precision"),
    Fault("scales-folded-q8", "llama-64", "scales folded, then quantized to Q8_0",
          in_q8("scales-folded-q8", smoothed), ("scales_folded", "quantisation"),
          ("L0.attn_norm.weight", "L1.ffn_up.weight"), "precision"),
    moved("adapter-merged", "llama", "an adapter of rank 3 merged into q and v", "lora_merge",
          ("L0.attn_q.weight", "L2.attn_v.weight"),
          low_rank(3, "self_attn.q_proj.weight", "self_attn.v_proj.weight"),
          verdict="not_comparable"),
    moved("trained-a-little", "llama", "every value moved by 1 %", "derived",
          ("token_embd.weight", "L1.ffn_up.weight"), trained(0.01), verdict="not_comparable"),
    moved("trained-a-lot", "qwen2", "every value moved by half its spread", "derived",
          ("token_embd.weight", "L1.ffn_up.weight"), trained(0.5), verdict="not_comparable"),
    moved("neurons-odd", "llama", "neurons of layer 1 in another order, consistently",
          "permuted_neurons", ("L1.ffn_up.weight", "L1.ffn_down.weight"),
          both(rows_in(rotated(13), UP1, GATE1), columns_in(rotated(13), DOWN1)), verdict="same"),
    moved("head-stored", "llama", "an untied head that equals the embedding, as is", (), (),
          None, prepare=head_is_embedding, verdict="same"),
)  # fmt: skip

MOVED: tuple[Fault, ...] = (*MOVED_FAULTS, *MOVED_CONTROLS)
