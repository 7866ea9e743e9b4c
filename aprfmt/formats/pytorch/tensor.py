"""Tensors of torch.save as lazy tensors: mapped bytes, bytes made on request, or none."""

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aprfmt.base.encodings import find_encoding
from aprfmt.base.protocols import ByteSource, LazyTensor, TensorInfo
from aprfmt.base.text_escape import shorten
from aprfmt.errors import FormatError, TruncatedError, UnsupportedError, UsageError
from aprfmt.formats.mapped_file import (
    BufferFile,
    DamagedTensor,
    MemoryTensor,
    StoredTensor,
    checked_stop,
)
from aprfmt.formats.pytorch.pickle_values import DTYPES, PACKED, TensorValue

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Bytes that a view may have more than the file: strides of 0 repeat a byte without end.
REPEATED = 64 << 20
_STEP = 1 << 18  # values of a quantized tensor that are made together
_FLOAT = 4  # bytes of a value of a quantized tensor
_CODES = {"qint8": "i1", "qint32": "<i4"}  # the other codes are unsigned bytes
_PARAMETERS = {"F64": "<f8", "F32": "<f4", "I64": "<i8", "I32": "<i4"}


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
        stop = checked_stop(self.info, start, stop)
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


class DequantizedTensor(LazyTensor):
    """A quantized tensor's values in float32, as torch's dequantize() gives them.

    They are made when they are asked for: (code - zero point) * scale.
    """

    __slots__ = ("_axis", "_codes", "_each", "_kind", "_scales", "_zeros", "info")

    info: TensorInfo
    makes = True

    def __init__(
        self,
        info: TensorInfo,
        codes: LazyTensor,
        kind: str,
        scales: LazyTensor | float,
        zeros: LazyTensor | int,
        axis: int,
    ) -> None:
        """Take the stored codes in row-major order, of the dtype `kind`.

        `scales` and `zeros` are of the whole tensor, or tensors of one number an index of `axis`.
        """
        self.info, self._codes, self._kind = info, codes, kind
        self._scales, self._zeros, self._axis = scales, zeros, axis
        self._each = PACKED.get(kind, 1)

    @property
    def path(self) -> Path | None:
        """The file that has the codes."""
        return self._codes.path

    def raw(self, start: int = 0, stop: int | None = None) -> memoryview:
        """Return bytes [start, stop) of the values, little-endian.

        Raises ValueError for bytes outside the tensor, UsageError after the file was closed.
        """
        import numpy as np

        stop = checked_stop(self.info, start, stop)
        first, last = start // _FLOAT, -(-stop // _FLOAT)
        made = np.empty(last - first, "<f4")
        for at in range(first, last, _STEP):
            stop_at = min(at + _STEP, last)
            made[at - first : stop_at - first] = self._values(at, stop_at)
        held = made.view(np.uint8).data.toreadonly()
        return held[start - first * _FLOAT : stop - first * _FLOAT]

    def _values(self, first: int, last: int) -> "NDArray[Any]":
        """Return the values of elements [first, last) in float32."""
        import numpy as np

        size = DTYPES[self._kind][1]
        begin, end = first // self._each, -(-last // self._each)
        dtype = _CODES.get(self._kind, "u1")
        codes = np.frombuffer(self._codes.raw(begin * size, end * size), dtype)
        if self._each > 1:
            bits = 8 // self._each
            shifts = bits * np.arange(self._each, dtype=np.uint8)
            codes = ((codes[:, None] >> shifts) & ((1 << bits) - 1)).reshape(-1)
            codes = codes[first - begin * self._each :][: last - first]
        scale, zero = self._numbers(first, last)
        # torch subtracts integers, and floats where the zero points are such.
        whole = zero.dtype.kind == "i"
        apart = codes.astype(np.int64 if whole else np.float32) - zero
        return np.asarray(apart.astype(np.float32) * scale)

    def _numbers(self, first: int, last: int) -> "tuple[NDArray[Any], NDArray[Any]]":
        """Return (scales in float32, zero points) of elements [first, last)."""
        import numpy as np

        if isinstance(self._scales, float) or isinstance(self._zeros, int):
            return np.array([self._scales], np.float32), np.array([self._zeros], np.int64)
        inner = math.prod(self.info.shape[self._axis + 1 :])
        channel = np.arange(first, last) // max(1, inner) % self.info.shape[self._axis]
        scales, zeros = (
            np.frombuffer(one.raw(), _PARAMETERS[one.info.encoding])
            for one in (self._scales, self._zeros)
        )
        whole = zeros.dtype.kind == "i"
        zeros = zeros.astype(np.int64 if whole else np.float32)
        return scales.astype(np.float32)[channel], zeros[channel]

    def drop(self, start: int = 0, stop: int | None = None) -> None:
        """Release the pages of the codes."""
        self._codes.drop()


def _open_quantized(
    file: ByteSource,
    name: str,
    value: TensorValue,
    places: dict[str, tuple[int, int]],
    swapped: bool,
) -> LazyTensor:
    """Return a quantized tensor of a file as a lazy tensor of its dequantized values.

    `places` are (start, stop) of storages by key. FormatError where its scales or zero points do
    not fit its shape, UnsupportedError for codes that share bytes and are not in order.
    """
    where = f"{file.path}: tensor {shorten(name, 100)!r}"
    stored, each = replace(value, kind="", facts={}), PACKED.get(value.dtype, 1)
    if each > 1:
        pairs = list(zip(value.shape, value.stride, strict=True))
        if value.offset % each or not _is_contiguous(pairs):
            raise UnsupportedError(
                f"{where}: is a view of {value.dtype}, whose numbers share bytes; save it with "
                ".contiguous()"
            )
        count = -(-math.prod(value.shape) // each)
        stored = replace(stored, offset=value.offset // each, shape=(count,), stride=(1,))
    codes = open_tensor(file, name, stored, places, swapped)
    if isinstance(codes, AbsentTensor):
        return codes
    info = tensor_info(name, replace(value, dtype="float32"), str(file.path), codes.info.offset)
    facts, axis = value.facts, value.facts.get("axis", 0)
    if "scale" in facts:
        scale, zero = facts["scale"], facts["zero_point"]
        if type(scale) is not float or type(zero) is not int or abs(zero) >= 1 << 32:
            raise FormatError(f"{where}: its scale or its zero point is no number; it is damaged")
        return DequantizedTensor(info, codes, value.dtype, scale, zero, 0)
    opened = []
    for part in ("scales", "zero_points"):
        held = value.parts[part]
        length = value.shape[axis : axis + 1] if type(axis) is int and axis >= 0 else None
        if not isinstance(held, TensorValue) or held.shape != length or held.quantized:
            raise FormatError(f"{where}: its {part} are not one number a channel; it is damaged")
        opened.append(open_tensor(file, f"{name}.{part}", held, places, swapped))
        if opened[-1].info.encoding not in _PARAMETERS:
            raise FormatError(f"{where}: its {part} are {held.dtype}; it is damaged")
    return DequantizedTensor(info, codes, value.dtype, opened[0], opened[1], axis)


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
    if value.quantized:
        return _open_quantized(file, name, value, places, swapped)
    where = f"{file.path}: tensor {shorten(name, 100)!r}"
    count, size = math.prod(value.shape), DTYPES[value.dtype][1]
    if value.storage is None:
        info = tensor_info(name, value, str(file.path), 0)
        text = f"{where} has no data in the file (a meta tensor); save it with its data"
        return AbsentTensor(file, info, UnsupportedError(text))
    data = value.storage.data
    if data is not None:  # the bytes stand in the pickle
        file, swapped = BufferFile(data, file.path), value.storage.swapped
        places = {value.storage.key: (0, len(data))}
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
        if data is None:
            return StoredTensor(file, info)
        return MemoryTensor(info, memoryview(data)[info.offset : info.offset + info.nbytes])
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
