"""Weights in GPU memory as stored in the file, decoded panel by panel into a reused buffer.

A *panel* is some rows of a weight that are decoded together. A *block* is a quantization block.
*Coded* is a bitsandbytes 4-bit weight, which stores codes and scales apart.

Weights without a GPU kernel, or not stored row by row, are decoded on the CPU and placed in the
dtype of the arithmetic; `on_cpu` lists their encodings.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from aprfmt.base.encodings import ENCODINGS
from aprfmt.inference.fast.cuda import memory
from aprfmt.inference.fast.cuda.arrays import Flat
from aprfmt.inference.fast.cuda.decode import DECODED, decode, decode_coded
from aprfmt.inference.fast.cuda.host_uploads import HostUploads
from aprfmt.inference.rows import as_floats

if TYPE_CHECKING:
    from aprfmt.codecs.bnb4 import CodedParts
    from aprfmt.inference.backends.base import Backend
    from aprfmt.inference.weights import Weight

# Decoded bytes per panel of an encoded weight.
PANEL_BYTES = 256 << 20
# Encodings that are plain arrays of a dtype and need no decoding.
PLAIN: Mapping[str, str] = {
    "F32": "float32", "F64": "float64", "BF16": "bfloat16", "F16": "float16",
}  # fmt: skip


@dataclass(frozen=True)
class Dense:
    """A decoded weight [rows, columns] in the dtype of the arithmetic."""

    values: Any


@dataclass(frozen=True)
class PlacedBlocks:
    """A weight's stored bytes in GPU memory: whole rows, each of whole quantization blocks."""

    encoding: str
    raw: Any  # uint8
    row_bytes: int

    def decode_rows(self, start: int, stop: int, out: Flat) -> None:
        """Decode rows [start, stop) into `out`."""
        size = (stop - start) * self.row_bytes
        decode(
            self.encoding,
            Flat(memory.pointer(self.raw) + start * self.row_bytes, size, "uint8"),
            out,
        )


@dataclass(frozen=True)
class CodedWeight:
    """A bitsandbytes 4-bit weight in GPU memory, its absmax decoded to float32 on the CPU.

    `packed` holds the nibbles, `code` the 16 values, `saved` the dtype the weight was saved from.
    """

    packed: Any
    absmax: Any
    code: Any
    blocksize: int
    saved: str
    columns: int

    def decode_rows(self, start: int, stop: int, out: Flat) -> None:
        """Decode rows [start, stop) into `out`; start is a multiple of `granule`."""
        first, count = start * self.columns, (stop - start) * self.columns
        blocks = -(-count // self.blocksize)
        decode_coded(
            Flat(memory.pointer(self.packed) + first // 2, -(-count // 2), "uint8"),
            Flat(memory.pointer(self.absmax) + 4 * (first // self.blocksize), blocks, "float32"),
            Flat(memory.pointer(self.code), 16, "float32"),
            out,
            blocksize=self.blocksize,
            saved=self.saved,
        )

    def select_rows(self, index: Any) -> "CodedWeight | None":
        """Return a weight that has only the rows `index`.

        None if a row does not consist of whole blocks, as it then shares one with the next row.
        """
        if self.columns % self.blocksize:
            return None
        packed = self.packed.reshape(-1, self.columns // 2)[index]
        return replace(
            self,
            packed=packed,
            absmax=self.absmax.reshape(len(self.packed) * 2 // self.columns, -1)[index],
        )

    @property
    def granule(self) -> int:
        """The smallest number of rows after which a row begins at a quantization block again."""
        return self.blocksize // int(np.gcd(self.blocksize, self.columns))


Placed = Dense | PlacedBlocks | CodedWeight


@dataclass
class Placer:
    """Places weights in the GPU memory of a backend.

    `resident_bytes` counts the bytes that stay there, `streamed` the placements for one use only
    because the budget is spent, `on_cpu` {key: encoding} of weights that were decoded on the CPU.
    """

    backend: "Backend"
    uploads: HostUploads
    resident_bytes: int = 0
    streamed: int = 0
    on_cpu: dict[str, str] = field(default_factory=dict)
    _buffers: list[Any] = field(default_factory=list)  # recorded passes use old ones
    _ready: "WeakKeyDictionary[Weight, Placed]" = field(default_factory=WeakKeyDictionary)

    def place(self, w: "Weight") -> Placed:
        """Return a weight in GPU memory.

        It stays there if the budget allows that; otherwise this copy is for one use.
        """
        placed = self._ready.get(w)
        if placed is None:
            placed, make = self._try_to_hold(w)
            if placed is None:
                self.streamed += 1
                return make()
            self._ready[w] = placed
        return placed

    def place_within_budget(self, w: "Weight") -> Placed | None:
        """Return a weight in GPU memory if the budget lets it stay there, else None."""
        return self._try_to_hold(w)[0]

    def gather(self, w: "Weight", ids: Any) -> Any:
        """Return rows `ids` of an embedding table in the backend's dtype: [n, columns].

        If the table does not fit the budget, only these rows are copied to the GPU.
        """
        placed = self.place_within_budget(w)
        if placed is None:
            rows = [w.rows(int(i), int(i) + 1) for i in ids]
            return self.backend.array(np.concatenate(rows))
        index, dtype = self.uploads.row_numbers(ids), self.backend.dtype
        if isinstance(placed, Dense):
            return placed.values[index]
        out = memory.array_module().empty((len(ids), w.n_columns), memory.STORED[dtype])
        to = Flat(memory.pointer(out), int(out.size), dtype)
        if isinstance(placed, CodedWeight):
            rows_alone = placed.select_rows(index)
            if rows_alone is None:
                return self._gather_panels(w, placed, ids, out)
            rows_alone.decode_rows(0, len(ids), to)
        else:
            raw = placed.raw.reshape(w.n_rows, -1)[index]
            replace(placed, raw=raw).decode_rows(0, len(ids), to)
        return out

    def _gather_panels(self, w: "Weight", placed: Placed, ids: Any, out: Any) -> Any:
        """Fill `out` with rows `ids` of a table by decoding whole panels of it; return `out`.

        Used where a row does not begin at a quantization block, so that it cannot be decoded alone.
        """
        self.uploads.refuse_in_recording("rows are chosen on the host")
        for start, stop, panel in self.panels(w, placed, self.backend.dtype):
            here = np.flatnonzero((ids >= start) & (ids < stop))
            rows = self._buffers[-1][: panel.count * out.itemsize].view(out.dtype)
            table = rows.reshape(stop - start, w.n_columns)
            if len(here):
                out[memory.copy_to_gpu(here)] = table[
                    memory.copy_to_gpu(np.asarray(ids)[here] - start)
                ]
        return out

    def _try_to_hold(self, w: "Weight") -> tuple[Placed | None, Callable[[], Placed]]:
        """Return (the weight kept in GPU memory, a function that places it for one use).

        The first is None if the weight does not fit the budget.
        """
        coded = w.bnb4_parts()
        if coded is not None:
            size = coded.packed.nbytes + coded.absmax.nbytes
            return self._hold_within_budget(w, size, lambda: self._place_coded(w, coded))
        raw = w.stored_bytes() if self._is_placed_as_stored(w.encoding) else None
        if raw is not None:
            return self._hold_within_budget(w, len(raw), lambda: self._place_stored(w, raw))
        held = w.placed_on(self.backend)
        if w.encoding not in PLAIN:
            self.on_cpu[w.key] = w.encoding
        shape = (w.n_rows, w.n_columns)

        def place_once() -> Placed:
            """Return the weight decoded on the CPU and copied to the device, for one use."""
            return Dense(self.backend.array(as_floats(w.numpy())).reshape(shape))

        return (None if held is None else Dense(held.reshape(shape))), place_once

    def _is_placed_as_stored(self, encoding: str) -> bool:
        """Return whether weights of an encoding are uploaded as their stored bytes.

        So are encodings that the GPU decodes, and floats of the backend's dtype.
        """
        return encoding in DECODED or PLAIN.get(encoding) == self.backend.dtype

    def _hold_within_budget(
        self, w: "Weight", size: int, make: Callable[[], Placed]
    ) -> tuple[Placed | None, Callable[[], Placed]]:
        """Return (the weight kept in GPU memory, or None if it does not fit the budget; `make`).

        `size` is the bytes that the budget counts. `make` uploads the weight, and is also what a
        caller uses for a single use.
        """

        def make_and_count() -> Placed:
            """Return the weight placed by `make`; add its bytes to `resident_bytes`."""
            self.resident_bytes += size
            return make()

        return w.place_encoded(self.backend, size, make_and_count), make

    def _place_stored(self, w: "Weight", raw: bytes | memoryview) -> Placed:
        """Copy a weight's stored bytes to the GPU: plain floats decoded, others in their blocks."""
        data = np.frombuffer(raw, np.uint8)
        plain = PLAIN.get(w.encoding)
        if plain == self.backend.dtype:
            stored = data.view(memory.STORED[plain]) if _is_aligned(data, plain) else data.copy()
            placed: Placed = Dense(
                memory.copy_to_gpu(stored.view(memory.STORED[plain])).reshape(w.n_rows, w.n_columns)
            )
        else:
            row = ENCODINGS[w.encoding]
            size = w.n_columns // row.block_size * row.type_size
            placed = PlacedBlocks(w.encoding, memory.copy_to_gpu(data), size)
        w.release_pages()
        return placed

    def _place_coded(self, w: "Weight", coded: "CodedParts") -> Placed:
        """Copy a bitsandbytes 4-bit weight to the GPU still packed, and return it.

        Copied are its codes, its absmax (a scale for each block) and its code table.
        """
        placed = CodedWeight(
            memory.copy_to_gpu(coded.packed),
            memory.copy_to_gpu(coded.absmax),
            memory.copy_to_gpu(coded.code),
            coded.blocksize,
            coded.dtype,
            w.n_columns,
        )
        w.release_pages()
        return placed

    def panels(self, w: "Weight", placed: Placed, dtype: str) -> Iterator[tuple[int, int, Flat]]:
        """Yield (start, stop, rows [stop - start, columns] in `dtype`) of a weight, in order.

        Rows are decoded into a buffer that each panel overwrites. A decoded weight comes whole; it
        must be of `dtype`.
        """
        if isinstance(placed, Dense):
            yield 0, w.n_rows, Flat(memory.pointer(placed.values), int(placed.values.size), dtype)
            return
        item = np.dtype(memory.STORED[dtype]).itemsize
        step = max(1, PANEL_BYTES // (item * max(w.n_columns, 1)))
        if isinstance(placed, CodedWeight):
            granule = placed.granule
            step = -(-step // granule) * granule
        step = min(step, w.n_rows)
        buffer = self._decode_buffer(step * w.n_columns * item)
        for start in range(0, w.n_rows, step):
            stop = min(start + step, w.n_rows)
            out = Flat(memory.pointer(buffer), (stop - start) * w.n_columns, dtype)
            placed.decode_rows(start, stop, out)
            yield start, stop, out

    def _decode_buffer(self, size: int) -> Any:
        """Return the decode buffer, at least `size` bytes; old ones stay for recorded passes."""
        if not self._buffers or self._buffers[-1].size < size:
            self._buffers.append(memory.array_module().empty(size, "uint8"))
        return self._buffers[-1]


def _is_aligned(data: Any, dtype: str) -> bool:
    """Return whether bytes begin at a multiple of the item size of `dtype`."""
    return int(data.ctypes.data) % np.dtype(memory.STORED[dtype]).itemsize == 0
