"""Tensors of torch.save as lazy tensors: mapped bytes, views made row by row, or none."""

import math
from typing import TYPE_CHECKING

from aprfmt.base.encodings import find_encoding
from aprfmt.base.protocols import ByteSource, LazyTensor, TensorInfo
from aprfmt.base.text_escape import shorten
from aprfmt.errors import TruncatedError, UnsupportedError, UsageError
from aprfmt.formats.mapped_file import DamagedTensor, StoredTensor
from aprfmt.formats.pytorch.pickle_values import DTYPES, TensorValue

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Bytes that a view may have more than the file: strides of 0 repeat a byte without end.
REPEATED = 64 << 20


class StridedTensor(LazyTensor):
    """A view of a storage whose elements are not in row-major order, or whose bits change.

    Its bytes are made when they are asked for, by slices of the first axis longer than one.
    """

    __slots__ = ("_file", "_place", "_swapped", "_value", "info")

    info: TensorInfo
    makes = True

    def __init__(
        self,
        file: ByteSource,
        info: TensorInfo,
        value: TensorValue,
        place: tuple[int, int],
        swapped: bool,
    ) -> None:
        """Take a described tensor; `place` are (start, stop) of its storage in the file.

        `swapped`: the file is big-endian.
        """
        self._file, self.info, self._value = file, info, value
        self._place, self._swapped = place, swapped

    def raw(self, start: int = 0, stop: int | None = None) -> memoryview:
        """Return bytes [start, stop) of the numbers in row-major, little-endian order.

        Raises ValueError for bytes outside the tensor, UsageError after the file was closed.
        """
        stop = self.info.nbytes if stop is None else stop
        if not 0 <= start <= stop <= self.info.nbytes:
            raise ValueError(f"{self.info.name}: bytes {start}..{stop} of {self.info.nbytes}")
        if start == stop:
            return memoryview(b"")
        size = DTYPES[self._value.dtype][1]
        axes = [(n, s) for n, s in zip(self._value.shape, self._value.stride, strict=True) if n > 1]
        stride, inner = (axes[0][1], axes[1:]) if axes else (1, [])
        row = size * math.prod(n for n, _ in inner)
        first, last = start // row, -(-stop // row)
        reach = sum((n - 1) * s for n, s in inner) + 1
        begin = self._place[0] + (self._value.offset + first * stride) * size
        end = begin + ((last - 1 - first) * stride + reach) * size
        try:
            held = self._file.view[begin:end]
        except ValueError:  # the view was released
            raise UsageError(
                f"{self._file.path}: is closed; read {self.info.name} before that"
            ) from None
        made = self._gather(held, [(last - first, stride), *inner], size)
        return memoryview(made).toreadonly().cast("B")[start - first * row : stop - first * row]

    def drop(self, start: int = 0, stop: int | None = None) -> None:
        """Release the pages of the whole storage: its rows may be anywhere in it."""
        self._file.drop(*self._place)

    def _gather(self, raw: memoryview, axes: list[tuple[int, int]], size: int) -> bytes:
        """Return the bytes of a strided view of `raw`, in row-major order.

        `axes` are (count, stride in elements), `size` is an element's bytes. Swaps bytes of
        big-endian files, and negates or conjugates as the tensor asks.
        """
        import numpy as np

        unit = np.dtype(f"u{size}") if size <= 8 else np.dtype((np.void, size))
        view: NDArray[np.void] = np.ndarray(
            tuple(n for n, _ in axes), unit, raw, strides=tuple(s * size for _, s in axes)
        )
        found = np.frombuffer(bytearray(view.tobytes()), np.uint8)
        dtype = self._value.dtype
        pair = dtype.startswith("complex")
        number = size // 2 if pair else size
        if self._swapped and number > 1:
            found = found.reshape(-1, number)[:, ::-1].reshape(-1)
        # Sign bits are flipped as integers, which keeps NaN bits.
        numbers = np.ascontiguousarray(found).view(f"<u{number}")
        sign = np.array(1 << (8 * number - 1), numbers.dtype)
        if "neg" in self._value.shifts:
            numbers = numbers ^ sign
        if "conj" in self._value.shifts and pair:
            numbers = numbers.copy()
            numbers[1::2] ^= sign
        return bytes(numbers.tobytes())


def tensor_info(name: str, value: TensorValue, where: str, start: int) -> TensorInfo:
    """Return the TensorInfo of a described tensor: shape, encoding, offset and size in bytes.

    `start` is the offset of its storage in the file. UnsupportedError for a single number of a
    dtype whose elements are packed in bytes.
    """
    code, size, last = DTYPES[value.dtype]
    row = find_encoding(code)
    shape = value.shape if last == 1 else (*value.shape, last)
    if row.block_size > 1:  # torch counts bytes
        if not shape:
            raise UnsupportedError(
                f"{where}: {name!r} is a single {value.dtype}; save it in a list"
            )
        shape = (*shape[:-1], shape[-1] * row.block_size)
    at = start + value.offset * size
    return TensorInfo(name, shape, code, at, row.nbytes(shape), row.row_bytes(shape))


def open_tensor(
    file: ByteSource,
    name: str,
    value: TensorValue,
    places: dict[str, tuple[int, int]],
    swapped: bool,
) -> LazyTensor:
    """Return the lazy tensor of a description; reading one without data raises.

    `places` are (start, stop) of storages by key. Raises TruncatedError where a storage is too
    short for it, UnsupportedError for a view that repeats bytes too often.
    """
    where = f"{file.path}: tensor {shorten(name, 100)!r}"
    count, size = math.prod(value.shape), DTYPES[value.dtype][1]
    if value.storage is None:
        info = tensor_info(name, value, str(file.path), 0)
        text = f"{where} has no data in the file (a meta tensor); save it with its data"
        return AbsentTensor(file, info, UnsupportedError(text))
    # The last element must be inside the storage.
    start, stop = places[value.storage.key]
    start += value.storage.start
    info = tensor_info(name, value, str(file.path), start)
    pairs = list(zip(value.shape, value.stride, strict=True))
    reach = value.offset + sum((n - 1) * s for n, s in pairs) + 1 if count else 0
    if reach * size > value.storage.nbytes or start + reach * size > stop:
        raise TruncatedError(
            f"{where} of shape {list(value.shape)[:8]} reaches to byte {reach * size} of storage "
            f"{shorten(value.storage.key, 40)!r}, which has {value.storage.nbytes} bytes"
        )
    # Bytes in order are mapped; anything else is made when it is read.
    units = size // 2 if value.dtype.startswith("complex") else size
    if not value.shifts and not (swapped and units > 1) and _is_contiguous(pairs):
        return StoredTensor(file, info)
    if info.nbytes > file.size + REPEATED:
        raise UnsupportedError(
            f"{where} repeats {value.storage.nbytes} stored bytes as {info.nbytes}; "
            f"at most {file.size + REPEATED} are made: save it with .contiguous()"
        )
    return StridedTensor(file, info, value, (start, stop), swapped)


def _is_contiguous(pairs: list[tuple[int, int]]) -> bool:
    """Return whether elements are in row-major order, or there are none.

    `pairs` are (size, stride) of the axes.
    """
    step = 1
    if any(n == 0 for n, _ in pairs):
        return True
    for count, stride in reversed(pairs):
        if count > 1 and stride != step:
            return False
        step *= count
    return True


class AbsentTensor(DamagedTensor):
    """A tensor that a file describes without having its bytes: reading it raises."""

    __slots__ = ()

    spoilt = False
