"""Damage to packed weights: what their writers or readers did wrongly with codes and scales."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.field.packed import Parts

Array = Any
Damage = Callable[[str, Parts], Parts]


def part(name: str, change: Callable[[Any], Any], only: str = "") -> Damage:
    """Return damage to one stored tensor of every weight, or of those whose module has `only`."""

    def run(module: str, parts: Parts) -> Parts:
        return parts | {name: change(parts[name])} if only in module else parts

    return run


def reciprocal(x: Any) -> Any:
    """Return 1 / x, in x's type."""
    return (1 / x.float()).to(x.dtype)


def ones(x: Any) -> Any:
    """Return a scale that is not applied."""
    return x * 0 + 1


def shared(x: Any) -> Any:
    """Return the first scale everywhere."""
    return x * 0 + x.reshape(-1)[0]


def next_block(x: Any) -> Any:
    """Return scales that belong to the next row of blocks."""
    return x.roll(-1, 0)


def power_of_two(x: Any) -> Any:
    """Return scales rounded up to powers of two, behind the codes' back."""
    return x.log2().ceil().exp2()


def without(name: str) -> Damage:
    """Return damage that leaves a stored tensor out."""
    return lambda module, parts: {key: value for key, value in parts.items() if key != name}


def zero_minus_one(x: Any) -> Any:
    """Return packed zero points less 1, of which 0 becomes 15."""
    words = x.numpy().view(np.uint32)
    nibbles = [((words >> (4 * i)) & 15) for i in range(8)]
    made = sum(
        ((nibble - 1) & 15).astype(np.uint32) << np.uint32(4 * i)
        for i, nibble in enumerate(nibbles)
    )
    return _as(x, np.asarray(made, np.uint32).view(np.int32))


def nibbles_reversed(x: Any) -> Any:
    """Return words whose eight codes stand the other way round."""
    words = x.numpy().view(np.uint32)
    made = sum(
        ((words >> np.uint32(4 * i)) & np.uint32(15)) << np.uint32(28 - 4 * i) for i in range(8)
    )
    return _as(x, np.asarray(made, np.uint32).view(x.numpy().dtype))


def _as(x: Any, made: Array) -> Any:
    import torch

    return torch.from_numpy(np.ascontiguousarray(made.reshape(x.shape)))


def act_order_lost(module: str, parts: Parts) -> Parts:
    """Return GPTQ parts whose groups are of sorted columns, with an index in plain order."""
    import torch

    order = torch.randperm(len(parts["g_idx"]), generator=torch.Generator().manual_seed(1))
    return parts | {"g_idx": parts["g_idx"][order]}


def nested_offset_lost(module: str, parts: Parts) -> Parts:
    """Return NF4 parts whose state says that the scales' mean is 0."""
    import json

    import torch

    name = next(key for key in parts if "quant_state" in key)
    state = json.loads(bytes(parts[name].numpy()).decode())
    state["nested_offset"] = 0.0
    raw = json.dumps(state).encode()
    return parts | {name: torch.tensor(list(raw), dtype=torch.uint8)}


# --- blocks of GGUF types -----------------------------------------------------------------------


def blocks(size: int, change: Callable[[Array], Array], only: str = "") -> Callable[..., Array]:
    """Return damage to a tensor's blocks of `size` bytes: `change` gets [n, size]."""

    def run(name: str, raw: Array) -> Array:
        if only not in name or raw.dtype != np.uint8 or raw.shape[-1] % size:
            return raw
        return change(raw.reshape(-1, size).copy()).reshape(raw.shape)

    return run


def halves_exchanged(rows: Array) -> Array:
    """Exchange the first two 16-bit numbers of each block: d and dmin."""
    rows[:, :4] = rows[:, [2, 3, 0, 1]]
    return rows


def minimum_negated(rows: Array) -> Array:
    """Negate the second 16-bit number of each block."""
    rows[:, 3] ^= 0x80
    return rows


def linear_nibbles(start: int) -> Callable[[Array], Array]:
    """Return a change that stores neighbours in a byte, where the halves of a block are."""

    def change(rows: Array) -> Array:
        packed = rows[:, start:]
        codes = np.concatenate([packed & 15, packed >> 4], 1)
        rows[:, start:] = codes[:, ::2] | codes[:, 1::2] << 4
        return rows

    return change


def first_scale(rows: Array) -> Array:
    """Give every block the first one's scale."""
    rows[:, :2] = rows[0, :2]
    return rows


def block_late(rows: Array) -> Array:
    """Write every block one place late."""
    return np.roll(rows, 1, 0)


def header_skipped(rows: Array) -> Array:
    """Write codes two bytes early, over the block's second number's place."""
    rows[:, 2:] = np.concatenate([rows[:, 4:], rows[:, 2:4]], 1)
    return rows
