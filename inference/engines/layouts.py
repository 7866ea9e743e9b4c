"""Layouts in which engines store a point's value, and how each becomes ours: [tokens, ...].

A *layout* is a list of named steps, applied in order; `shape` and the like are those of the point.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.errors import FormatError

Numbers = NDArray[Any]


@dataclass(frozen=True)
class PointLayout:
    """A point's value in our layout: its shape in a pass over all tokens."""

    shape: tuple[int, ...]
    tokens: int


def _drop_batch_axis(x: Numbers, target: PointLayout) -> Numbers:
    """Return `x` without leading axes of size 1 that the target does not have."""
    while x.ndim > 1 and x.shape[0] == 1 and x.ndim > len(target.shape):
        x = x[0]
    return x


def _read_flat(x: Numbers, target: PointLayout) -> Numbers:
    """Return `x` reshaped to [tokens, ...] of the target, values in their order in memory.

    It is returned unchanged if its size is no whole number of the target's rows.
    """
    width = int(np.prod(target.shape[1:]))
    return x.reshape(-1, *target.shape[1:]) if width and x.size % width == 0 else x


def _read_heads_first(x: Numbers, target: PointLayout) -> Numbers:
    """Return [tokens, heads, dim] of [heads, tokens, dim]; ValueError without heads."""
    if len(target.shape) != 3:
        raise ValueError("heads_first: the point has no axis of heads")
    _, heads, dim = target.shape
    return np.ascontiguousarray(x.reshape(heads, -1, dim).swapaxes(0, 1))


def _read_transposed(x: Numbers, target: PointLayout) -> Numbers:
    """Return [tokens, ...] of [width, tokens], as column-major libraries print it."""
    width = int(np.prod(target.shape[1:]))
    return np.ascontiguousarray(x.reshape(width, -1).T).reshape(-1, *target.shape[1:])


def _read_dims_first(x: Numbers, target: PointLayout) -> Numbers:
    """Return [tokens, heads, dim] of [tokens, dim, heads]; ValueError without heads."""
    if len(target.shape) != 3:
        raise ValueError("dims_first: the point has no axis of heads")
    _, heads, dim = target.shape
    return np.ascontiguousarray(x.reshape(-1, dim, heads).swapaxes(1, 2))


def _read_adjacent_pairs(x: Numbers, target: PointLayout) -> Numbers:
    """Return `x` in the target's shape, with adjacent rotated pairs moved into split halves."""
    y = x.reshape(-1, *target.shape[1:])
    return np.concatenate([y[..., 0::2], y[..., 1::2]], axis=-1)


def _cut_columns(x: Numbers, target: PointLayout) -> Numbers:
    """Return `x` without columns after the point's width: a padded vocabulary."""
    return x[..., : int(np.prod(target.shape[1:]))]


STEPS: Mapping[str, Callable[[Numbers, PointLayout], Numbers]] = {
    "unbatch": _drop_batch_axis,
    "reshape": _read_flat,
    "heads_first": _read_heads_first,
    "dims_first": _read_dims_first,
    "transpose": _read_transposed,
    "adjacent_pairs": _read_adjacent_pairs,
    "cut_columns": _cut_columns,
}

# The chains that are tried for a mapping, the plainest first.
CHAINS: tuple[tuple[str, ...], ...] = (
    ("unbatch", "reshape"),
    ("unbatch", "heads_first"),
    ("unbatch", "transpose"),
    ("unbatch", "dims_first"),
    ("unbatch", "reshape", "adjacent_pairs"),
    ("unbatch", "heads_first", "adjacent_pairs"),
)
PADDED = ("unbatch", "cut_columns", "reshape")  # of logits with columns after the vocabulary


def apply_layout(x: Numbers, chain: Sequence[str], target: PointLayout, where: str) -> Numbers:
    """Return values in our layout; FormatError for an unknown step or one that does not fit.

    `chain` are names of STEPS, applied in order. `where` is for messages.
    """
    for name in chain:
        if name not in STEPS:
            raise FormatError(
                f"{where}: layout {name[:40]!r} is not known; expected one of {', '.join(STEPS)}"
            )
        try:
            x = STEPS[name](x, target)
        except ValueError as error:
            raise FormatError(
                f"{where}: {list(x.shape)} cannot be read as {name} of {list(target.shape)}: "
                f"{error}"
            ) from None
    return x
