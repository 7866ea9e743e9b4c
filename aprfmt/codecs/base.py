"""What every codec has in common: the protocol, length checks, chunks and small arithmetic.

A codec knows bytes and numbers, no file and no tensor name. The numpy functions here are the
reference that every faster path is judged by.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from aprfmt.base.encodings import ENCODINGS, Encoding
from aprfmt.codecs.arithmetic import row_mean_square
from aprfmt.errors import CodecError

Bytes: TypeAlias = bytes | bytearray | memoryview
Array: TypeAlias = npt.NDArray[Any]
Blocks: TypeAlias = npt.NDArray[np.void]  # structured: one record a block
U8: TypeAlias = npt.NDArray[np.uint8]
Codes: TypeAlias = npt.NDArray[np.integer[Any]]
F32: TypeAlias = npt.NDArray[np.float32]
Fma: TypeAlias = Literal["fused", "strict"]

# Elements decoded at a time: large enough that numpy's cost a call vanishes, small
# enough that the temporaries of one chunk stay in the second-level cache.
CHUNK = 1 << 18
ENCODE_CHUNK = 1 << 16  # the searches hold several float64 arrays of this size


class Codec(Protocol):
    """Bytes to numbers and back; pure, so one instance serves every thread.

    `parts` names what `decode` reads: `""` is the main part, others are companion tensors by
    suffix. `dtype` is the numpy dtype of decoded arrays: float32 for everything quantized and for
    F16, BF16 and FP8; an encoding's own type for F32, F64, integers, BOOL and C64.
    """

    @property
    def name(self) -> str:
        """Key of dtypes.ENCODINGS."""
        ...

    @property
    def block_size(self) -> int:
        """Elements a block."""
        ...

    @property
    def type_size(self) -> int:
        """Bytes an encoded block."""
        ...

    @property
    def parts(self) -> tuple[str, ...]:
        """Suffixes that `decode` needs; `""` is the main part."""
        ...

    @property
    def dtype(self) -> str:
        """Dtype of decoded arrays, by numpy's name."""
        ...

    def decode(self, raw: Mapping[str, Bytes], out: Array) -> None:
        """Fill `out` (1-D, C-contiguous, of `dtype`, one entry an element).

        Raises CodecError when a part is missing or its length does not fit `out`.
        """
        ...

    def encode(
        self, x: Array, *, fma: Fma = "fused", importance: Array | None = None
    ) -> Mapping[str, bytes]:
        """Return the parts of `x` ([..., columns], float32 for lossy codecs).

        `importance` weighs columns (one float32 each). `fma` says whether multiply-adds are
        rounded once (fused, what ggml's own builds do) or twice (strict). Raises CodecError where
        the codec cannot encode, or cannot hold `x`.
        """
        ...


def part(name: str, raw: Mapping[str, Bytes], suffix: str = "") -> U8:
    """Return the bytes of one part as uint8, without copying; CodecError if it is missing."""
    if suffix not in raw:
        raise CodecError(
            f"{name}: part {suffix!r} is missing; found {', '.join(map(repr, raw)) or 'no part'}"
        )
    return np.frombuffer(raw[suffix], np.uint8) if len(raw[suffix]) else np.empty(0, np.uint8)


def check_length(name: str, found: int, expected: int, what: str) -> None:
    """Raise CodecError unless `found` bytes are what `what` takes."""
    if found != expected:
        raise CodecError(f"{name}: found {found} bytes, expected {expected} for {what}")


def check_out(name: str, out: Array, dtype: str) -> None:
    """Raise CodecError unless `out` is what the protocol promises the codec."""
    if out.ndim != 1 or not out.flags.c_contiguous or not out.flags.writeable:
        raise CodecError(
            f"{name}: the output must be a writeable, contiguous 1-D array, "
            f"found shape {list(out.shape)}"
        )
    if out.dtype.name != dtype:
        raise CodecError(f"{name}: decodes to {dtype}, the output is {out.dtype.name}")


def as_rows(name: str, x: Array, dtype: str = "float32") -> Array:
    """Return `x` as contiguous [rows, columns] of `dtype`, without copying where it already is.

    Raises CodecError for another dtype: a silent cast would hide a loss.
    """
    if x.dtype.name != dtype:
        raise CodecError(f"{name}: encodes {dtype}, found {x.dtype.name}; cast it first")
    columns = x.shape[-1] if x.ndim else 1
    rows = x.size // columns if columns else 0
    return np.ascontiguousarray(x).reshape(rows, columns)


def check_finite(name: str, x: Array) -> None:
    """Raise CodecError naming the first NaN or infinity: blocks have no way to hold one."""
    finite = np.isfinite(x)
    if not finite.all():
        index = int(np.argmin(finite.reshape(-1)))
        raise CodecError(
            f"{name}: element {index} is {x.reshape(-1)[index]}, a block holds finite numbers "
            "only; repair the weights or store the tensor as F32, F16 or BF16"
        )


class BlockCodec:
    """Encodings whose blocks hold everything they need: the GGML types and their like.

    A subclass gives `name`, `layout` (the byte map of a block, in file order) and
    `decode_blocks`; `encode_blocks` where there is an encoder.
    """

    name: ClassVar[str]
    layout: ClassVar[np.dtype[Any]]
    row: ClassVar[Encoding]
    block_size: ClassVar[int]
    type_size: ClassVar[int]
    parts: ClassVar[tuple[str, ...]] = ("",)
    dtype: ClassVar[str] = "float32"
    weighs_rows: ClassVar[bool] = False  # whether the encoder asks for `sigma2`

    def __init_subclass__(cls) -> None:
        if "name" not in cls.__dict__:
            return
        cls.row = ENCODINGS[cls.name]
        cls.block_size, cls.type_size = cls.row.block_size, cls.row.type_size
        assert cls.layout.itemsize == cls.type_size, f"{cls.name}: {cls.layout.itemsize} bytes"

    def decode_blocks(self, block: Blocks, out: F32) -> None:
        """Fill `out` [n, block_size] from `n` records."""
        raise NotImplementedError

    def encode_blocks(
        self, x: F32, block: Blocks, *, fused: bool, weights: F32 | None, sigma2: F32 | None
    ) -> None:
        """Fill `n` records from `x` [n, block_size].

        `weights` [n, block_size] is the importance of each element, None without an importance
        matrix; `sigma2` [n] then is the mean square of the row that the block stands in, for
        codecs that `weighs_rows`.
        """
        raise CodecError(f"{self.name}: there is no encoder; choose another encoding")

    def decode(self, raw: Mapping[str, Bytes], out: Array) -> None:
        """Fill float32 `out` from blocks in a row; what `out` leaves of the last one is dropped.

        Raises CodecError when the byte count does not fit the element count.
        """
        data = part(self.name, raw)
        check_out(self.name, out, self.dtype)
        blocks, short = divmod(out.size, self.block_size)
        expected = (blocks + (short > 0)) * self.type_size
        check_length(self.name, data.size, expected, f"{out.size} elements")
        records = data.view(self.layout)
        last = records[blocks:]
        records = records[:blocks]
        whole = out[: blocks * self.block_size].reshape(blocks, self.block_size)
        step = max(1, CHUNK // self.block_size)
        with np.errstate(all="ignore"):
            for start in range(0, blocks, step):
                self.decode_blocks(records[start : start + step], whole[start : start + step])
            if short:
                rest = np.empty((1, self.block_size), np.float32)
                self.decode_blocks(last, rest)
                out[blocks * self.block_size :] = rest[0, :short]

    def encode(
        self, x: Array, *, fma: Fma = "fused", importance: Array | None = None
    ) -> Mapping[str, bytes]:
        """Return whole blocks of float32 `x`; a flat codec pads the last one with zeros.

        Raises CodecError for a NaN or an infinity, or rows that are no whole number of blocks.
        """
        rows = as_rows(self.name, x)
        weights = self._weights(rows, importance)
        check_finite(self.name, rows)
        columns = rows.shape[1]
        if self.row.flat:
            padded = np.zeros(-(-rows.size // self.block_size) * self.block_size, np.float32)
            padded[: rows.size] = rows.reshape(-1)
            elements = padded.reshape(-1, self.block_size)
        elif columns % self.block_size:
            raise CodecError(
                f"{self.name} rows must be a multiple of {self.block_size} elements, "
                f"found {columns}"
            )
        else:
            elements = rows.reshape(-1, self.block_size)
        block = np.zeros(len(elements), self.layout)
        with np.errstate(all="ignore"):
            self._encode_chunks(rows, elements, block, fused(fma), weights)
        return {"": block.tobytes()}

    def _encode_chunks(
        self, rows: F32, elements: F32, block: Blocks, fuse: bool, weights: F32 | None
    ) -> None:
        step = max(1, ENCODE_CHUNK // self.block_size)
        tiles, sigma2 = None, None
        if weights is not None:
            tiles = weights.reshape(-1, self.block_size)
            if self.weighs_rows:
                sigma2 = row_mean_square(rows, fuse).repeat(len(tiles))
        for start in range(0, len(elements), step):
            at = slice(start, min(start + step, len(elements)))
            self.encode_blocks(
                elements[at],
                block[at],
                fused=fuse,
                weights=None if tiles is None else tiles[np.arange(start, at.stop) % len(tiles)],
                sigma2=None if sigma2 is None else sigma2[at],
            )

    def _weights(self, rows: F32, importance: Array | None) -> F32 | None:
        if importance is None or self.row.flat:
            return None
        weights: F32 = np.ascontiguousarray(importance, np.float32).reshape(-1)
        if weights.size != rows.shape[1]:
            raise CodecError(
                f"{self.name}: the importance matrix has {weights.size} columns, the tensor "
                f"{rows.shape[1]}; was it made for another model?"
            )
        check_finite(f"{self.name}: importance matrix", weights)
        return weights


def fused(fma: str) -> bool:
    """Return whether multiply-adds are rounded once; CodecError for another word."""
    if fma not in ("fused", "strict"):
        raise CodecError(f"fma {fma!r} is not known; expected 'fused' or 'strict'")
    return fma == "fused"


def half(values: Array) -> F32:
    """Return float16 scales [n] as float32 [n, 1], to stand beside a block's elements."""
    wide: F32 = values.astype(np.float32)
    return wide.reshape(-1, 1)


def pieces(
    codec: Codec,
    raw: Mapping[str, Bytes],
    shape: Sequence[int],
    room: int,
    row_bytes: int | None = None,
) -> Iterator[tuple[Mapping[str, Bytes], tuple[int, int], int]]:
    """Yield (parts, [rows, columns] they decode to, columns to keep) of about `room` elements.

    A codec whose parts do not simply follow each other gives them by `cut(raw, start, stop)`, at
    multiples of `granule(raw)`. Raises CodecError when lengths do not fit.
    """
    count, columns = math.prod(shape), shape[-1] if shape else 1
    main, block, size = part(codec.name, raw), codec.block_size, codec.type_size
    if row_bytes is not None and columns * size != row_bytes * block:
        rows, width = count // max(columns, 1), row_bytes // size * block
        check_length(codec.name, row_bytes, -(-columns // block) * size, f"{columns} elements")
        check_length(codec.name, main.size, rows * row_bytes, f"{rows} rows")
        step = max(1, room // max(width, 1))
        for start in range(0, rows, step):
            at = slice(start * row_bytes, (start + step) * row_bytes)
            yield {"": main[at].data}, (min(step, rows - start), width), columns
        return
    cut: Callable[..., Mapping[str, Bytes]] | None = getattr(codec, "cut", None)
    granule: Callable[..., int] | None = getattr(codec, "granule", None)
    unit = block if granule is None else granule(raw)
    if cut is None:
        check_length(codec.name, main.size, -(-count // block) * size, f"{count} elements")
    step = max(unit, room // unit * unit)
    for start in range(0, count, step):
        stop = min(start + step, count)
        if cut is not None:
            yield cut(raw, start, stop), (1, stop - start), stop - start
        else:
            at = slice(start // block * size, -(-stop // block) * size)
            yield {"": main[at].data}, (1, stop - start), stop - start
