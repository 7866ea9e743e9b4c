"""One role of a model, with the file's layout steps undone on demand."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from aprfmt.base.encodings import encoding as encoding_row
from aprfmt.base.protocols import LazyTensor, Value, damage_of
from aprfmt.errors import ArchError, FormatError
from aprfmt.tensors.views import decode_tensor

if TYPE_CHECKING:
    from aprfmt.arch.bind import Group
    from aprfmt.arch.spec import HyperParams, Move


@dataclass(frozen=True, slots=True)
class Run:
    """`nbytes` stored bytes of `tensor` from byte `start`."""

    tensor: LazyTensor
    start: int
    nbytes: int


class LogicalTensor:
    """One role of the model, with the file's layout steps undone on demand.

    `stored` are the tensors it is made of, `runs` the byte runs that are its bytes when the steps
    only move rows (None where a step changes values or the encoding cannot be cut that way).
    """

    def __init__(
        self,
        key: str,
        group: "Group",
        stored: Sequence[LazyTensor],
        hp: "HyperParams",
        record: "tuple[str, Value] | None" = None,
    ) -> None:
        self.key = key
        self.group = group
        self.stored = tuple(stored)
        self._hp = hp
        self._record = record
        self._index = group.roles.index(key)
        shapes = [tensor.info.shape for tensor in stored]
        for step in group.binding.steps:
            try:
                shapes = step.shapes(shapes, hp)
            except ArchError as error:
                raise ArchError(f"{self.stored[0].info.name}: {error}") from error
        self.shape = tuple(shapes[self._index])

    @property
    def encodings(self) -> tuple[str, ...]:
        """The encodings of the stored tensors, each once, in order."""
        return tuple(dict.fromkeys(tensor.info.encoding for tensor in self.stored))

    @property
    def encoding(self) -> str:
        """The one encoding of the stored tensors; mixed experts give `A+B`."""
        return "+".join(self.encodings)

    @property
    def steps(self) -> tuple[str, ...]:
        """Names of the layout steps between file and logical tensor."""
        return tuple(str(step) for step in self.group.binding.steps)

    @property
    def damage(self) -> str:
        """Why the bytes it is made of cannot be read; "" where nothing is wrong."""
        return next((found for tensor in self.stored if (found := damage_of(tensor))), "")

    @cached_property
    def moves(self) -> "list[Move] | None":
        """Runs of stored elements, or None where a step has to decode.

        Raises FormatError for a damaged tensor, whose shape may be anything.
        """
        if self.damage:
            raise FormatError(self.damage)
        from aprfmt.arch.moves import compose
        from aprfmt.arch.spec import Move

        shapes = [tensor.info.shape for tensor in self.stored]
        moves = [[Move(i, 0, math.prod(shape))] for i, shape in enumerate(shapes)]
        for step in self.group.binding.steps:
            outer = step.moves(shapes, self._hp)
            if outer is None:
                return None
            moves = compose(outer, moves)
            shapes = step.shapes(shapes, self._hp)
        return moves[self._index]

    @cached_property
    def runs(self) -> list[Run] | None:
        """Byte runs that make up this tensor undecoded, or None."""
        if len(self.encodings) != 1 or any(tensor.parts for tensor in self.stored):
            return None
        moves = self.moves
        return None if moves is None else element_runs(self.stored, moves)

    @property
    def whole(self) -> LazyTensor | None:
        """The one stored tensor whose bytes are exactly this tensor's, if it is so."""
        if len(self.stored) != 1:
            return None
        moves = self.moves
        tensor = self.stored[0]
        if moves is None or len(moves) != 1 or moves[0].start != 0:
            return None
        return tensor if moves[0].count == math.prod(tensor.info.shape) else None

    @cached_property
    def _restored(self) -> Any:
        """The source's own bits, if the file records them and they fit what it stores; else None.

        The record is believed only if widening the bits and applying the layout steps again gives
        exactly the stored numbers: a tensor edited since then is read as it stands.
        """
        if self._record is None or len(self.group.roles) != 1 or len(self.stored) != 1:
            return None
        import numpy as np

        from aprfmt.codecs import decode, encode
        from aprfmt.tensors.restore import restore_bits

        name, patch = self._record
        logical = [decode_tensor(self.stored[0])]
        stored = logical[0]
        for step in self.group.binding.steps:
            logical = step.undo(logical, self._hp)
        narrow = np.frombuffer(encode(name, logical[0].astype(np.float32))[""], np.uint8)
        size = encoding_row(name).type_size
        bits = restore_bits(narrow.view(f"<u{size}"), patch, self.stored[0].info.name)
        wide = decode(name, {"": bits.tobytes()}, self.shape)
        again = [wide]
        for step in reversed(self.group.binding.steps):
            again = step.apply(again, self._hp)
        same = np.array_equal(again[0].view(np.uint32), stored.view(np.uint32))
        return bits.tobytes() if same else None

    @property
    def restored(self) -> str:
        """The encoding the file says this tensor had in its source, where it can be restored."""
        return self._record[0] if self._record is not None and self._restored is not None else ""

    def raw(self) -> bytes | memoryview | None:
        """Return the logical tensor's bytes in its own (or its restored) encoding, if it has any.

        None where a layout step changes values and nothing restores the source's bits.
        """
        if self.restored:
            return bytes(self._restored)
        if self.runs is None:
            return None
        return gather(self.runs, 0, sum(run.nbytes for run in self.runs))

    def numpy(self) -> Any:
        """Return the decoded logical tensor (float32 for quantized encodings)."""
        if self._record is not None and self._restored is not None:
            from aprfmt.codecs import decode

            return decode(self._record[0], {"": self._restored}, self.shape)
        whole = self.whole
        if whole is not None:
            return decode_tensor(whole).reshape(self.shape)
        if self.runs is not None:
            from aprfmt.codecs import decode

            raw = b"".join(run.tensor.raw(run.start, run.start + run.nbytes) for run in self.runs)
            return decode(self.encoding, {"": raw}, self.shape)
        arrays = [decode_tensor(tensor) for tensor in self.stored]
        for step in self.group.binding.steps:
            arrays = step.undo(arrays, self._hp)
        return arrays[self._index].reshape(self.shape)

    def decode_rows(self, start: int, stop: int) -> Any:
        """Return rows [start, stop) of the tensor seen as [rows, last axis], decoded."""
        columns = self.shape[-1] if self.shape else 1
        runs = self.runs
        row = encoding_row(self.encoding) if len(self.encodings) == 1 else None
        row_bytes = row.row_bytes(self.shape) if row is not None else None
        if runs is None or row_bytes is None:
            return self.numpy().reshape(-1, columns)[start:stop]
        from aprfmt.codecs import decode

        raw = gather(runs, start * row_bytes, stop * row_bytes)
        return decode(self.encoding, {"": raw}, (stop - start, columns))

    def drop(self) -> None:
        """Release the mapped pages of the stored tensors."""
        for tensor in self.stored:
            tensor.drop()


def gather(runs: Sequence[Run], start: int, stop: int) -> bytes | memoryview:
    """Return bytes [start, stop) of the concatenated runs; a view where one run holds them."""
    pieces: list[memoryview] = []
    at = 0
    for run in runs:
        low, high = max(start, at), min(stop, at + run.nbytes)
        if low < high:
            pieces.append(run.tensor.raw(run.start + low - at, run.start + high - at))
        at += run.nbytes
        if at >= stop:
            break
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def element_runs(stored: "Sequence[LazyTensor]", moves: "Sequence[Move]") -> list[Run] | None:
    """Turn runs of elements into runs of bytes; None where a block would be cut."""
    runs: list[Run] = []
    for move in moves:
        info = stored[move.source].info
        if move.start == 0 and move.count == math.prod(info.shape):
            runs.append(Run(stored[move.source], 0, info.nbytes))
            continue
        row = encoding_row(info.encoding)
        if not row.known or row.flat or move.start % row.block_size or move.count % row.block_size:
            return None
        if info.nbytes * row.block_size != math.prod(info.shape) * row.type_size:
            return None  # padded rows: elements and bytes do not run in step
        start = move.start // row.block_size * row.type_size
        size = move.count // row.block_size * row.type_size
        last = runs[-1] if runs else None
        if last and last.tensor is stored[move.source] and last.start + last.nbytes == start:
            runs[-1] = Run(last.tensor, last.start, last.nbytes + size)
        else:
            runs.append(Run(stored[move.source], start, size))
    return runs
