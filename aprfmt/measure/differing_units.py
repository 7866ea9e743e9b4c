"""Finds the rows, or the experts, whose stored bytes differ between two tensors."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from aprfmt.errors import AprfmtError
from aprfmt.measure.row_reader import RowReader
from aprfmt.tensors.view import View

SLICE = 1 << 24  # bytes compared together


def differing_units(sides: Sequence[Any], count: int) -> list[int]:
    """Return the numbers of the rows or experts whose stored bytes differ between two tensors.

    `count` is their number in the tensor. [] if the tensor has no plain bytes, or cannot be split
    into `count` equal parts.
    """
    readers = [RowReader(side) for side in sides]
    try:
        sizes = {reader.row_bytes for reader in readers}
    except AprfmtError:
        return []
    if len(sizes) != 1 or None in sizes or not count or readers[0].rows % count:
        return []
    rows = readers[0].rows // count
    size = rows * (readers[0].row_bytes or 1)
    step = max(1, SLICE // max(size, 1))
    found: list[int] = []
    for start in range(0, count, step):
        stop = min(count, start + step)
        raw = [
            np.frombuffer(bytes(reader.bytes.window(start * size, stop * size)), np.uint8)
            for reader in readers
        ]
        apart = (raw[0] != raw[1]).reshape(stop - start, -1).any(-1)
        found += (np.flatnonzero(apart) + start).tolist()
    for reader in readers:
        reader.drop()
    return found


def differing_names(one: View, other: View) -> tuple[str, ...]:
    """Return the stored names of the parts of `one` whose bytes differ from those of `other`.

    A part is one of the tensors that a stack is stored as, such as that of an expert. All names are
    returned where the tensor is no stack of one stored tensor for each number of its first axis,
    the two have other shapes or encodings, or no part differs.
    """
    names = one.names
    if len(names) < 2 or one.shape != other.shape or one.encoding != other.encoding:
        return names
    if one.shape[0] != len(names):
        return names
    return tuple(names[unit] for unit in differing_units((one, other), len(names))) or names
