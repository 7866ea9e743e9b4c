"""Compute the rows and columns of a shape, and the index that a slice's text means."""

import math
from collections.abc import Sequence

from aprfmt.errors import UsageError


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return (rows, columns) of a tensor seen as [rows, last axis]; a scalar is one row of one."""
    return math.prod(shape[:-1]), shape[-1] if shape else 1


def parse_slice(text: str, shape: tuple[int, ...]) -> tuple[int | slice, ...]:
    """Return a NumPy index for a text such as `0:4,:8`.

    Raises UsageError where the text is no slice, does not fit the shape, or selects nothing.
    """
    index: list[int | slice] = []
    for axis, part in enumerate(text.split(",")):
        # One number or up to three, as in Python.
        fields = part.strip().split(":")
        try:
            numbers = [int(field) if field.strip() else None for field in fields]
        except ValueError:
            raise UsageError(f"--slice {text!r}: {part!r} is no number or range") from None
        if axis >= len(shape) or len(numbers) > 3:
            raise UsageError(f"--slice {text!r}: does not fit shape {list(shape)}")
        # A single index, or a range that must select something.
        if len(numbers) == 1:
            at = numbers[0]
            if at is None or not -shape[axis] <= at < shape[axis]:
                raise UsageError(f"--slice {text!r}: {part!r} is outside axis of {shape[axis]}")
            index.append(at)
        else:
            if numbers[2:] == [0]:
                raise UsageError(f"--slice {text!r}: a step of 0")
            found = slice(*numbers)
            if shape[axis] and not range(*found.indices(shape[axis])):
                raise UsageError(
                    f"--slice {text!r}: {part!r} selects nothing of axis {axis}, which has "
                    f"entries 0 to {shape[axis] - 1}"
                )
            index.append(found)
    return tuple(index)
