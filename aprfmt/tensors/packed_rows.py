"""Decode rows of a tensor that is made of rows of packed weights."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from aprfmt.base.protocols import LazyTensor
from aprfmt.errors import CodecError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from aprfmt.arch.spec import Move
    from aprfmt.codecs.lattice import Lattice
    from aprfmt.codecs.weight_layout import WeightLayout

_SPREAD = 4  # rows decoded for one that is wanted, at most, where they do not stand together


class PackedRows:
    """Rows that are stored in the packed tensors `stored`, decoded on request.

    `tensor` and `row` [rows] are, for each row, the index of its tensor and its row there. The
    layout of the weight that was read last is cached: its scales have been read and checked.
    """

    def __init__(
        self, stored: Sequence[LazyTensor], tensor: "NDArray[Any]", row: "NDArray[Any]"
    ) -> None:
        """Set the tensors and, for each row, the index of its tensor and its row there."""
        self._stored, self._tensor, self._row = stored, tensor, row
        self._latest: tuple[int, WeightLayout] | None = None

    def rows(self, start: int, stop: int) -> "NDArray[Any]":
        """Return rows [start, stop), new float32 [rows, columns].

        Raises CodecError with the tensor's name.
        """
        columns = self._stored[0].info.shape[-1]
        out = np.empty((stop - start, columns), np.float32)
        tensor, row = self._tensor[start:stop], self._row[start:stop]
        ends = np.flatnonzero(np.diff(tensor)) + 1
        for first, last in zip([0, *ends], [*ends, len(tensor)], strict=True):
            if first < last:
                self._decode_into(out[first:last], int(tensor[first]), row[first:last])
        return out

    def _decode_into(self, out: "NDArray[Any]", which: int, row: "NDArray[Any]") -> None:
        """Fill `out` with the rows `row` of stored tensor number `which`.

        Raises CodecError, with the tensor's name, for codes and scales that cannot be decoded.
        """
        name = self._stored[which].info.name
        try:
            laid = self._layout(which)
            low, high = int(row.min()), int(row.max()) + 1
            if high - low > _SPREAD * len(row):
                ends = np.flatnonzero(np.diff(row) != 1) + 1
                for first, last in zip([0, *ends], [*ends, len(row)], strict=True):
                    laid.decode_into(out[first:last], int(row[first]))
            elif high - low == len(row) and (np.diff(row) == 1).all():
                laid.decode_into(out, low)
            else:
                out[:] = laid.decode(low, high)[row - low]
        except CodecError as error:
            raise CodecError(f"{name}: {error}") from error

    def _layout(self, which: int) -> "WeightLayout":
        """Return the layout of stored tensor number `which`; that of the last one is cached."""
        latest = self._latest
        if latest is None or latest[0] != which:
            packed = self._stored[which].packed
            assert packed is not None
            laid = packed().laid_out()
            assert laid is not None
            latest = self._latest = which, laid
        return latest[1]


def packed_rows(
    stored: Sequence[LazyTensor], moves: "Sequence[Move] | None", shape: Sequence[int]
) -> PackedRows | None:
    """Return an object that decodes rows of a tensor of `shape` made from packed ones.

    `moves` say which elements of the tensors `stored` it has, in order. None where a tensor is not
    packed, has no elements, or a move has only some of a row.
    """
    columns = shape[-1] if len(shape) > 1 else 0
    if (
        moves is None
        or not columns
        or not all(
            tensor.packed is not None and tensor.info.shape[-1:] == (columns,) for tensor in stored
        )
    ):
        return None
    table = np.array([(move.source, move.start, move.count) for move in moves], np.int64)
    if not table.size or (table[:, 1:] % columns).any():
        return None
    source, start, count = table[:, 0], table[:, 1] // columns, table[:, 2] // columns
    ends = np.cumsum(count)
    within = np.arange(ends[-1]) - np.repeat(ends - count, count)
    return PackedRows(stored, np.repeat(source, count), np.repeat(start, count) + within)


def lattice_of(
    stored: Sequence[LazyTensor], undone: "Callable[[list[NDArray[Any]]], NDArray[Any]]"
) -> "Lattice | None":
    """Return the Lattice of a tensor made from packed ones; None if one of them has none.

    It has the distance to a neighbouring value, and the range, of each element. `undone` undoes
    the layout steps on arrays of the stored tensors.
    """
    from aprfmt.codecs.lattice import join_lattices

    found = []
    for tensor in stored:
        assert tensor.packed is not None
        packed = tensor.packed()
        one = packed.lattice(packed.decode())
        if one is None:
            return None
        found.append(one)
    return join_lattices(found, undone)
