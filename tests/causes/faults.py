"""Changes of the raw tensors of a small BF16 llama folder, of which seeded faults are made."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

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


def rows_of(move: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a move that acts on heads: [heads, size, columns] in and out."""
    return lambda x: move(x.reshape(-1, SIZE, HIDDEN)).reshape(-1, HIDDEN)


def float_row(x: Any) -> bytes:
    """Return values as BF16 bytes."""
    return float_bytes(np.ascontiguousarray(x, np.float32), "BF16")
