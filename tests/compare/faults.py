"""Seeded faults in the raw tensors of a small BF16 llama folder, and the cause of each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from aprfmt.causes.tensor import (
    arithmetic,
    byte_shifts,
    misplaced_rows,
    other_tensors,
    overwritten_bytes,
    rearrangements,
    stored_bytes,
    value_functions,
)
from tests.compare.damage import Change
from tests.conversion.folders import float_bytes

HIDDEN, HEADS, KV, LAYERS, VOCAB = 64, 4, 2, 3, 96
SIZE = HIDDEN // HEADS

LAYER = "model.layers.1."
Q, K = LAYER + "self_attn.q_proj.weight", LAYER + "self_attn.k_proj.weight"
OUT, UP = LAYER + "self_attn.o_proj.weight", LAYER + "mlp.up_proj.weight"
GATE, NORM = LAYER + "mlp.gate_proj.weight", LAYER + "input_layernorm.weight"
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
ROLES = {
    Q: "L1.attn_q.weight", K: "L1.attn_k.weight", OUT: "L1.attn_output.weight",
    UP: "L1.ffn_up.weight", GATE: "L1.ffn_gate.weight", NORM: "L1.attn_norm.weight",
    EMBEDDING: "token_embd.weight",
    HEAD: "output.weight",
}  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """A change of one tensor, the cause that must be found and a word of its evidence.

    `find` is the hypothesis that must find it; `quantized` says that it is found with the same
    cause if the other side is Q8_0.
    """

    name: str
    cause: str
    tensor: str
    change: Change
    find: Callable[..., Any]
    says: str
    quantized: bool = True
    confirmed: bool = True


def bits(data: dict[str, bytes], name: str) -> Any:
    """Return a copy of a tensor's 16-bit patterns as [rows, HIDDEN], or a vector."""
    found = np.frombuffer(data[name], np.uint16).copy()
    return found if name == NORM else found.reshape(-1, HIDDEN)


def values(data: dict[str, bytes], name: str) -> Any:
    """Return a tensor's values in float32."""
    return (bits(data, name).astype(np.uint32) << 16).view(np.float32)


def moved(name: str, move: Callable[[Any], Any]) -> Change:
    """Return a change that moves elements."""

    def change(data: dict[str, bytes]) -> None:
        data[name] = np.ascontiguousarray(move(bits(data, name))).tobytes()

    return change


def computed(name: str, compute: Callable[[Any], Any]) -> Change:
    """Return a change that computes, stored in BF16 again."""

    def change(data: dict[str, bytes]) -> None:
        found = np.ascontiguousarray(compute(values(data, name)), np.float32)
        data[name] = rounded(found)

    return change


def rounded(x: Any) -> bytes:
    """Return float32 values as BF16, to nearest even."""
    wide = x.view(np.uint32).astype(np.uint64)
    return bytes(((wide + 0x7FFF + (wide >> 16 & 1)) >> 16).astype("<u2").tobytes())


def raw(name: str, edit: Callable[[bytes], bytes]) -> Change:
    """Return a change of the bytes."""

    def change(data: dict[str, bytes]) -> None:
        data[name] = edit(data[name])

    return change


def flipped(at: int, bit: int) -> Callable[[bytes], bytes]:
    """Return an edit that flips one bit."""
    return lambda old: old[:at] + bytes([old[at] ^ 1 << bit]) + old[at + 1 :]


def exchanged(first: str, second: str) -> Change:
    """Return a change that gives two tensors each other's bytes."""

    def change(data: dict[str, bytes]) -> None:
        data[first], data[second] = data[second], data[first]

    return change


def copied(source: str, name: str) -> Change:
    """Return a change that gives one tensor another's bytes."""

    def change(data: dict[str, bytes]) -> None:
        data[name] = data[source]

    return change


def layers(data: dict[str, bytes]) -> None:
    """Exchange layers 1 and 2."""
    for name in list(data):
        if name.startswith(LAYER):
            exchanged(name, name.replace("layers.1.", "layers.2."))(data)


def through(name: str, encoding: str) -> Callable[[Any], Any]:
    """Return how values come back from an encoding."""
    from aprfmt.codecs import decode, encode

    return lambda x: decode(encoding, encode(encoding, x), x.shape)


def rows_of(move: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a move that acts on heads: [heads, size, columns] in and out."""
    return lambda x: move(x.reshape(-1, SIZE, HIDDEN)).reshape(-1, HIDDEN)


def _pairs(x: Any, heads: int) -> Any:
    """Rows of each head from split halves to adjacent pairs."""
    split = x.reshape(heads, 2, -1, HIDDEN)
    return split.swapaxes(1, 2).reshape(x.shape)


def _columns(x: Any) -> Any:
    return x.reshape(-1, HEADS, SIZE)[:, [2, 1, 0, 3]].reshape(-1, HIDDEN)


def _two_rows(x: Any) -> Any:
    x = x.copy()
    x[[5, 9]] = x[[9, 5]]
    return x


def _twice(x: Any) -> Any:
    x = x.copy()
    x[30:37] = x[10:17]
    return x


def other_layer(data: dict[str, bytes]) -> None:
    """Put rows 3 to 14 of the next layer into rows 8 to 19."""
    there, here = bits(data, UP.replace("layers.1.", "layers.2.")), bits(data, UP)
    here[8:20] = there[3:15]
    data[UP] = here.tobytes()


def overwritten(data: dict[str, bytes]) -> None:
    """Put 768 bytes of gate into up, at no row's beginning."""
    data[UP] = data[UP][:1000] + data[GATE][300:1068] + data[UP][1768:]


def _ulps(x: Any) -> Any:
    x = x.copy()
    x[::3] += 1
    return x


_SHUFFLED = np.random.default_rng(3).permutation(HIDDEN)
_FACTORS = 1 + np.arange(HIDDEN)[:, None] / 50

FAULTS = (
    Fault("bf16 read as f16", "dtype_mislabel", UP,
          computed(UP, lambda x: (x.view(np.uint32) >> 16).astype(np.uint16).view(np.float16)
                   .astype(np.float32)), stored_bytes.dtype_mislabel, "bits read as"),
    Fault("f16 under the label bf16", "dtype_mislabel", UP,
          raw(UP, lambda old: (np.frombuffer(old, np.uint16).astype(np.uint32) << 16)
              .view(np.float32).astype(np.float16).tobytes()), stored_bytes.dtype_mislabel,
          "read as"),
    Fault("bytes of values exchanged", "endianness", UP,
          raw(UP, lambda old: np.frombuffer(old, np.uint16).byteswap().tobytes()),
          stored_bytes.endianness, "other byte order", quantized=False),
    Fault("one bit", "bit_rot", UP, raw(UP, flipped(777, 3)), stored_bytes.bit_rot,
          "bit 11 of the BF16 value at [6, 4]", quantized=False),
    Fault("three bits", "bit_rot", UP,
          raw(UP, lambda old: flipped(5000, 1)(flipped(900, 6)(flipped(777, 3)(old)))),
          stored_bytes.bit_rot, "3 bits in 3 bytes differ", quantized=False),
    Fault("a lost page", "bit_rot", UP, raw(UP, lambda old: old[:1024] + bytes(512) + old[1536:]),
          stored_bytes.bit_rot, "bytes 1024 to 1535 are zero in B", quantized=False),
    Fault("an edited value", "bit_rot", UP,
          raw(UP, lambda old: old[:100] + b"\x55\xaa\x12\x99" * 4 + old[116:]),
          stored_bytes.bit_rot, "all other bytes are equal", quantized=False, confirmed=False),
    Fault("five bytes late", "byte_offset", UP, raw(UP, lambda old: old[5:] + b"12345"),
          byte_shifts.byte_offset, "begins 5 bytes too late", quantized=False),
    Fault("one value early", "byte_offset", Q, raw(Q, lambda old: b"??" + old[:-2]),
          byte_shifts.byte_offset, "2 bytes (1 values) too early"),
    Fault("three rows down", "row_offset", EMBEDDING, moved(EMBEDDING, lambda x: np.roll(x, 3, 0)),
          byte_shifts.byte_offset, "row i"),
    Fault("transposed", "transpose", UP, moved(UP, lambda x: x.T), rearrangements.transpose,
          "rows and columns exchanged"),
    Fault("adjacent pairs", "rope_pairing", Q, moved(Q, lambda x: _pairs(x, HEADS)),
          rearrangements.rearranged, "adjacent pairs in B"),
    Fault("pairs of too many heads", "gqa_mapping", K, moved(K, lambda x: _pairs(x, HEADS)),
          rearrangements.rearranged, "as if there were 4 heads of 8 rows; there are 2 of 16"),
    Fault("heads in another order", "head_order", Q,
          moved(Q, rows_of(lambda x: x[[1, 0, 2, 3]])), rearrangements.rearranged, "1, 0, 2, 3"),
    Fault("two key heads exchanged", "head_order", K, moved(K, lambda x: np.roll(x, 16, 0)),
          rearrangements.rearranged, "A's order, as numbers of B: 1, 0"),
    Fault("heads of the output product", "head_order", OUT, moved(OUT, _columns),
          rearrangements.rearranged, "2, 1, 0, 3"),
    Fault("query heads regrouped", "gqa_mapping", Q,
          moved(Q, rows_of(lambda x: x[[0, 2, 1, 3]])),
          rearrangements.rearranged, "grouped the other way"),
    Fault("rows shuffled", "row_offset", UP, moved(UP, lambda x: x[_SHUFFLED]),
          rearrangements.rearranged, "another order"),
    Fault("two rows exchanged", "row_offset", EMBEDDING, moved(EMBEDDING, _two_rows),
          rearrangements.rearranged, "5 of A is 9 of B"),
    Fault("gate and up exchanged", "swapped_tensors", UP, exchanged(UP, GATE),
          other_tensors.other_tensor, "are exchanged"),
    Fault("the embedding for the head", "tied_embedding", HEAD, copied(EMBEDDING, HEAD),
          other_tensors.other_tensor, "B's head has the values of the embedding"),
    Fault("layers exchanged", "layer_order", UP, layers, other_tensors.other_tensor,
          "layer 1 has the tensor of A's layer 2"),
    Fault("one added", "norm_offset", NORM, computed(NORM, lambda x: x + np.float32(1)),
          arithmetic.norm_offset, "plus 1"),
    Fault("one taken", "norm_offset", NORM, computed(NORM, lambda x: x - np.float32(1)),
          arithmetic.norm_offset, "minus 1"),
    Fault("scaled", "scale", UP, computed(UP, lambda x: x * np.float32(8)), arithmetic.scale,
          "sqrt(hidden_size)"),
    Fault("rows scaled", "scale", UP, computed(UP, lambda x: x * _FACTORS.astype(np.float32)),
          arithmetic.scale, "a factor of its own"),
    Fault("columns scaled", "scale", UP, computed(UP, lambda x: x * _FACTORS.T.astype(np.float32)),
          arithmetic.scale, "every column"),
    Fault("a unit in the last place", "rounding", UP, moved(UP, _ulps), arithmetic.rounding,
          "one unit in the last place of BF16", quantized=False),
    Fault("rounded to f8", "rounding", UP,
          computed(UP, lambda x: x.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)),
          arithmetic.rounding, "rounded to F8_E4M3", quantized=False),
    Fault("went through Q4_0", "quantisation", UP, computed(UP, through(UP, "Q4_0")),
          arithmetic.quantisation,
          "quantized to Q4_0 and decoded again / encoded 64 of 64 rows again: equal"),
    Fault("squares", "function_of", UP, computed(UP, np.square), value_functions.function_of,
          "the squares of A's", quantized=False),
    Fault("rows of another layer", "wrong_rows", UP, other_layer, misplaced_rows.misplaced,
          "rows 8-19: A's rows 3-14 of L2.ffn_up.weight"),
    Fault("rows twice", "wrong_rows", EMBEDDING, moved(EMBEDDING, _twice), misplaced_rows.misplaced,
          "rows 30-36: A's rows 10-16"),
    Fault("bytes of another tensor", "bit_rot", UP, overwritten, overwritten_bytes.ranges,
          "768 of 8192 bytes are overwritten, in 1 range", quantized=False),
    Fault("never filled", "stale_tensor", UP, raw(UP, lambda old: bytes(len(old))),
          other_tensors.one_value, "0 everywhere", confirmed=False),
    Fault("of another checkpoint", "stale_tensor", UP,
          computed(UP, lambda x: np.random.default_rng(8).standard_normal(x.shape)),
          other_tensors.stale_tensor, "another checkpoint", confirmed=False),
)  # fmt: skip


def float_row(x: Any) -> bytes:
    """Return values as BF16 bytes."""
    return float_bytes(np.ascontiguousarray(x, np.float32), "BF16")
