"""A tensor as users see it: facts at once; bytes, rows and numbers when asked for.

A *part* is one of the stored tensors of a packed weight: codes, scales and so on. A *run* is
consecutive stored bytes.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from aprfmt.base.budget import end_where_time_is_over
from aprfmt.base.encodings import find_encoding as encoding_row
from aprfmt.base.protocols import LazyTensor, Value, raw_parts, tensor_damage
from aprfmt.errors import ArchError, CodecError, FormatError, UnsupportedError
from aprfmt.tensors.runs import ByteRun, RunBytes, all_runs, element_runs

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from aprfmt.arch.binding import BoundGroup
    from aprfmt.arch.spec import LayoutStep, Move
    from aprfmt.codecs.lattice import Lattice
    from aprfmt.tensors.packed_rows import PackedRows


def decode_tensor(tensor: LazyTensor) -> "NDArray[Any]":
    """Return a stored tensor's numbers as a row-major array of its shape.

    The dtype is float32 for everything quantized, F16, BF16 and FP8, else that of the stored
    numbers. Errors name the tensor.
    """
    from aprfmt.codecs import decode

    info = tensor.info
    try:
        if tensor.decode is not None:
            return tensor.decode()
        parts = raw_parts(tensor)
        if len(parts) > 1:
            from aprfmt.codecs.scale_checks import check_block_scales

            check_block_scales(parts)
        return decode(info.encoding, parts, info.shape, row_bytes=info.row_bytes)
    except (CodecError, UnsupportedError) as error:
        raise type(error)(f"{info.name}: {error}") from error


def decode_rows(
    encoding: str, data: RunBytes, start: int, stop: int, columns: int, row_bytes: int | None = None
) -> "NDArray[Any]":
    """Return rows [start, stop) of the bytes `data`, decoded, [rows, columns].

    `row_bytes` is the length of a padded row; None where rows take no more than their blocks.
    """
    from aprfmt.codecs import decode

    size = row_bytes or encoding_row(encoding).row_bytes((columns,))
    assert size is not None, f"{encoding}: rows of {columns} cannot be cut"
    raw = data.window(start * size, stop * size)
    return decode(encoding, raw, (stop - start, columns), row_bytes=row_bytes)


# What is public of a tensor (docs/reference/api.md), and `dir` shows.
PUBLIC = (
    "damage", "encoding", "name", "names", "nbytes", "numpy", "offset", "raw", "role", "shape",
    "steps", "torch",
)  # fmt: skip


class View:
    """One tensor of a model, whether it is a stored one or made of some by layout steps.

    `stored` are the tensors it is made of. A stored tensor under its own name has no `role` and no
    steps; a role has the `group` of roles it is stored with, and the file's layout steps are
    undone on demand. `record` is the encoding it had in the file's source, and what narrowing to
    that does not give back.
    """

    def __init__(
        self,
        *stored: LazyTensor,
        role: str | None = None,
        group: "BoundGroup | None" = None,
        hp: Mapping[str, Value] | None = None,
        record: "tuple[str, Value] | None" = None,
    ) -> None:
        """Set the stored tensors and, for a role, the group and the hyperparameters of its layout.

        `record` is (encoding in the file's source, record of its bits), None where there is none.
        Raises ArchError where the layout steps do not fit the stored shapes.
        """
        self.stored = stored
        self.role = role
        self.group = group
        self._hp: Mapping[str, Value] = {} if hp is None else hp
        self._record = record
        self._index = 0 if group is None or role is None else group.roles.index(role)
        self.layout: tuple[LayoutStep, ...] = () if group is None else group.binding.steps
        shapes = [tensor.info.shape for tensor in stored]
        for step in self.layout:
            try:
                shapes = step.shapes(shapes, self._hp)
            except ArchError as error:
                raise ArchError(f"{stored[0].info.name}: {error}") from error
        self.shape = tuple(shapes[self._index])

    def in_group(self, group: "BoundGroup") -> "View":
        """Return a View of the same role and stored tensors, with the layout steps of `group`."""
        return View(*self.stored, role=self.role, group=group, hp=self._hp, record=self._record)

    # --- facts ------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The role, or the file's own name of a stored tensor."""
        return self.stored[0].info.name if self.role is None else self.role

    @property
    def names(self) -> tuple[str, ...]:
        """The names in the file of the stored tensors that this one is made of."""
        return tuple(tensor.info.name for tensor in self.stored)

    @property
    def encodings(self) -> tuple[str, ...]:
        """The encodings of the stored tensors, each once, in order."""
        if len(self.stored) == 1:
            return (self.stored[0].info.encoding,)
        return tuple(dict.fromkeys(tensor.info.encoding for tensor in self.stored))

    @property
    def encoding(self) -> str:
        """Key of ENCODINGS, or `type#142` for an unknown type; mixed experts give `A+B`."""
        return "+".join(self.encodings)

    @property
    def nbytes(self) -> int:
        """Number of stored bytes (of the main part, where there are companions)."""
        return sum(tensor.info.nbytes for tensor in self.stored)

    @property
    def offset(self) -> int:
        """Offset of the first byte in the file that holds it."""
        return self.stored[0].info.offset

    @property
    def parts(self) -> Mapping[str, LazyTensor]:
        """Companion tensors by suffix; empty for most."""
        return self.stored[0].parts if len(self.stored) == 1 else {}

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles in the same stored tensors, this one included; () for a stored tensor."""
        return () if self.group is None else self.group.roles

    @property
    def sizes(self) -> Mapping[str, Value]:
        """The hyperparameters that the layout steps use; {} for a stored tensor."""
        return self._hp

    @property
    def steps(self) -> tuple[str, ...]:
        """Names of the layout steps between the file and this tensor."""
        return tuple(map(str, self.layout))

    @property
    def damage(self) -> str:
        """Why the stored bytes cannot be read; "" where nothing is wrong."""
        return next((found for tensor in self.stored if (found := tensor_damage(tensor))), "")

    def __repr__(self) -> str:
        from aprfmt.base.object_repr import short_repr

        return short_repr(self, self.name, list(self.shape), self.encoding)

    def __dir__(self) -> list[str]:
        from aprfmt.base.object_repr import public_dir

        return public_dir(self, PUBLIC)

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows."""
        from aprfmt.tensors.card import tensor_card

        return tensor_card(self)

    # --- bytes ------------------------------------------------------------------------------

    @cached_property
    def moves(self) -> "Sequence[Move] | None":
        """Runs of stored elements that make up this tensor, or None where a step has to decode.

        Raises FormatError for a damaged tensor, whose shape may be anything.
        """
        if self.damage:
            raise FormatError(self.damage)
        from aprfmt.arch.element_moves import chain_steps

        shapes = [[tensor.info.shape for tensor in self.stored]]
        for step in self.layout[:-1]:
            shapes.append(step.shapes(shapes[-1], self._hp))
        moves = chain_steps(self.layout, shapes, self._hp, back=False)
        if moves is None:
            return None
        return moves[self._index]

    @property
    def whole(self) -> LazyTensor | None:
        """The one stored tensor whose bytes are exactly this tensor's, or None."""
        if len(self.stored) != 1 or not self.layout:
            return self.stored[0] if len(self.stored) == 1 else None
        moves, tensor = self.moves, self.stored[0]
        if moves is None or len(moves) != 1 or moves[0].start != 0:
            return None
        return tensor if moves[0].count == math.prod(tensor.info.shape) else None

    @cached_property
    def runs(self) -> Sequence[ByteRun] | None:
        """Runs of stored bytes that make up this tensor.

        None where a layout step changes values or would cut blocks, and for a packed weight in
        several stored tensors.
        """
        if len(self.encodings) != 1 or any(tensor.parts for tensor in self.stored):
            return None
        if not self.layout and len(self.stored) == 1:
            return [ByteRun(self.stored[0], 0, self.nbytes)]
        return None if self.moves is None else element_runs(self.stored, self.moves)

    @cached_property
    def data(self) -> RunBytes | None:
        """The concatenated bytes of `runs`; None where there are no runs."""
        return None if self.runs is None else RunBytes(self.runs)

    @cached_property
    def row_bytes(self) -> int | None:
        """Bytes of one row of the last axis; None where `data` cannot be cut into rows."""
        return None if self.data is None else encoding_row(self.encoding).row_bytes(self.shape)

    @cached_property
    def stored_row_bytes(self) -> int | None:
        """Bytes from one stored row to the next, padding included; None if rows cannot be cut."""
        whole = self.whole if self.row_bytes is None and self.data is not None else None
        same = whole is not None and whole.info.shape == self.shape
        return whole.info.row_bytes if whole is not None and same else self.row_bytes

    def stored_runs(self) -> list[ByteRun]:
        """Return runs of all bytes that this tensor is stored in, all parts included."""
        return [run for tensor in self.stored for run in all_runs(tensor)]

    def raw(self, start: int = 0, stop: int | None = None) -> memoryview:
        """Return bytes [start, stop) of the tensor, in its own (or its restored) encoding.

        Where the bytes are one range of the file it is a read-only view of that, valid until the
        model is closed. Raises CodecError where there is no single byte string.
        """
        if self.restored_bits is not None:
            return memoryview(self.restored_bits)[start:stop]
        if self.whole is not None:
            return self.whole.raw(start, stop)
        if self.data is None:
            raise CodecError(
                f"{self.name}: {self.encoding} stored as {', '.join(self.names)} gives no single "
                "byte string; read its values"
            )
        return memoryview(self.data.window(start, len(self.data) if stop is None else stop))

    def raw_rows(self, start: int, stop: int) -> Mapping[str, bytes | memoryview] | None:
        """Return {suffix: stored bytes} of rows [start, stop), or of all if rows cannot be cut out.

        None for several stored tensors whose bytes cannot be joined.
        """
        if self.data is None:
            return raw_parts(self.stored[0]) if len(self.stored) == 1 else None
        if self.row_bytes is None:
            return {"": self.data.window(0, len(self.data))}
        return {"": self.data.window(start * self.row_bytes, stop * self.row_bytes)}

    def drop(self) -> None:
        """Release the mapped pages of the stored tensors, and cached results."""
        for name in ("lattice", "by_rows"):
            self.__dict__.pop(name, None)
        for tensor in self.stored:
            tensor.drop()

    # --- what a conversion took away --------------------------------------------------------

    @cached_property
    def restored_bits(self) -> bytes | None:
        """The source's own bits, if the file records them and they fit what it stores; else None.

        The record is believed only if widening the bits and applying the layout steps again gives
        exactly the stored numbers. A tensor edited since then is read as it is stored.
        """
        if self._record is None or len(self.roles) != 1 or len(self.stored) != 1:
            return None
        import numpy as np

        from aprfmt.codecs import decode, encode
        from aprfmt.tensors.restoration import restore_bits

        name, patch = self._record
        logical = [decode_tensor(self.stored[0])]
        stored = logical[0]
        for step in self.layout:
            logical = step.undo(logical, self._hp)
        narrow = np.frombuffer(encode(name, logical[0].astype(np.float32))[""], np.uint8)
        size = encoding_row(name).type_size
        bits = restore_bits(narrow.view(f"<u{size}"), patch, self.stored[0].info.name)
        again = [decode(name, bits.tobytes(), self.shape)]
        for step in reversed(self.layout):
            again = step.apply(again, self._hp)
        same = np.array_equal(again[0].view(np.uint32), stored.view(np.uint32))
        found: bytes = bits.tobytes()
        return found if same else None

    @property
    def restored(self) -> str:
        """The encoding that the tensor had in the file's source, if it can be restored; else ""."""
        return "" if self._record is None or self.restored_bits is None else self._record[0]

    # --- numbers ----------------------------------------------------------------------------

    def numpy(self) -> "NDArray[Any]":
        """Return the decoded values, row-major, as a new array (float32 for what is quantized)."""
        from aprfmt.codecs import decode

        if self._record is not None and self.restored_bits is not None:
            return decode(self._record[0], self.restored_bits, self.shape)
        if self.whole is not None:
            return decode_tensor(self.whole).reshape(self.shape)
        if self.data is not None:
            return decode(self.encoding, self.data.window(0, len(self.data)), self.shape)
        return self.undo_layout([decode_tensor(tensor) for tensor in self.stored])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> "NDArray[Any]":
        """Return the decoded values for `np.asarray`; NumPy's protocol.

        Decoding makes a new array, so `copy=False` raises ValueError, as NumPy asks.
        """
        if copy is False:
            raise ValueError(f"{self.name}: {self.encoding} is decoded to a new array; copy=False")
        values = self.numpy()
        return values if dtype is None else values.astype(dtype, copy=False)

    def __dlpack__(self, **wishes: Any) -> Any:
        """Return the decoded values as a DLPack capsule (`torch.from_dlpack`); CPU, new memory.

        Raises BufferError for copy=False: stored values are decoded, which makes a copy.
        """
        if wishes.get("copy") is False:
            raise BufferError(f"{self.name}: {self.encoding} is decoded to new memory; copy=False")
        return self.numpy().__dlpack__(**wishes)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return where `__dlpack__` puts values: kDLCPU, device 0."""
        return 1, 0

    def undo_layout(self, arrays: "list[NDArray[Any]]") -> "NDArray[Any]":
        """Return this tensor's array: `arrays` of the stored tensors, their layout steps undone."""
        for step in self.layout:
            arrays = step.undo(arrays, self._hp)
        return arrays[self._index].reshape(self.shape)

    @cached_property
    def by_rows(self) -> "PackedRows | None":
        """An object that decodes rows of packed weights; None for others, or if steps cut rows.

        Raises FormatError for a damaged tensor.
        """
        if self._record is not None or any(tensor.packed is None for tensor in self.stored):
            return None
        from aprfmt.tensors.packed_rows import packed_rows

        return packed_rows(self.stored, self.moves, self.shape)

    @cached_property
    def lattice(self) -> "Lattice | None":
        """The quantization steps and ranges of a packed weight's elements; None for others.

        Raises CodecError for parts that do not fit.
        """
        if any(tensor.packed is None for tensor in self.stored):
            return None
        from aprfmt.tensors.packed_rows import lattice_of

        return lattice_of(self.stored, self.undo_layout)

    def rows(self, start: int, stop: int) -> "NDArray[Any]":
        """Return rows [start, stop) of the tensor seen as [rows, last axis], decoded.

        Where rows cannot be cut out of the stored bytes, the whole tensor is decoded to get them.
        """
        from aprfmt.base.shapes import matrix_shape

        rows, columns = matrix_shape(self.shape)
        if self.by_rows is not None:
            return self.by_rows.rows(start, stop)
        if self.data is None or self.stored_row_bytes is None:
            return self.numpy().reshape(rows, columns)[start:stop]
        return decode_rows(self.encoding, self.data, start, stop, columns, self.stored_row_bytes)

    def chunks(self, elements: int) -> "Iterator[tuple[int, int, NDArray[Any]]]":
        """Yield (first row, end, values) over all rows, about `elements` elements at a time.

        Values are [rows, last axis].
        """
        from aprfmt.base.shapes import matrix_shape

        rows, columns = matrix_shape(self.shape)
        step = max(1, elements // max(columns, 1))
        by_rows = self.stored_row_bytes is not None or self.by_rows is not None
        held = None if by_rows else self.numpy().reshape(rows, columns)
        for start in range(0, rows, step):
            end_where_time_is_over()
            stop = min(rows, start + step)
            yield start, stop, self.rows(start, stop) if held is None else held[start:stop]

    def torch(self) -> Any:
        """Return the decoded values as a new torch tensor on the CPU.

        F16, BF16 and FP8 come in torch's own dtype, bit for bit; other encodings as `numpy()` gives
        them. Raises BackendUnavailableError without torch.
        """
        from aprfmt.tensors.as_torch import as_torch

        return as_torch(self)

    def __getitem__(self, at: Any) -> Any:
        """Return `numpy()[at]`, decoding only the rows that the first index or slice names.

        Encodings whose blocks run across row ends are decoded whole. Raises IndexError as numpy
        does.
        """
        first, rest = (at[0], at[1:]) if isinstance(at, tuple) and at else (at, ())
        count = self.shape[0] if self.shape else 0
        separable = self.stored_row_bytes is not None or self.by_rows is not None
        if not isinstance(first, int | slice) or not count or not separable:
            return self.numpy()[at]
        if isinstance(first, int):
            if not -count <= first < count:
                raise IndexError(f"{self.name}: index {first}; axis 0 has {count} rows")
            return self._entries(first % count, first % count + 1)[(0, *rest)]
        places = range(*first.indices(count))
        ends = (places[0], places[-1]) if places else ()
        low, high = (min(ends), max(ends) + 1) if ends else (0, 0)
        entries = self._entries(low, high)
        if high:
            entries = entries[first.indices(count)[0] - low :: first.step or 1]
        return entries[(slice(None), *rest)] if rest else entries

    def _entries(self, low: int, high: int) -> "NDArray[Any]":
        """Return entries [low, high) of the first axis, decoded.

        For a vector the blocks that hold them are decoded.
        """
        if len(self.shape) > 1:
            each = math.prod(self.shape[1:-1])
            return self.rows(low * each, high * each).reshape(high - low, *self.shape[1:])
        assert self.data is not None
        block = encoding_row(self.encoding).block_size
        first = low // block
        held = decode_rows(self.encoding, self.data, first, -(-high // block), block)
        return held.reshape(-1)[low - first * block : high - first * block]


def stored_by_name(views: Iterable[View]) -> dict[str, LazyTensor]:
    """Return {stored name: tensor} of all that some weights are stored in, each once.

    The parts of a packed weight are there one by one, in the order of their suffixes.
    """
    found = {}
    for view in views:
        for tensor in view.stored:
            for part in [tensor.parts[s] for s in sorted(tensor.parts)] or [tensor]:
                found[part.info.name] = part
    return found


def is_zero(view: View) -> bool:
    """Return whether a tensor is zero in every element; values are read some at a time."""
    return not any(values.any() for _, _, values in view.chunks(1 << 16))
