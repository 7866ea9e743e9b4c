"""The base classes of codecs, length checks, chunks and small arithmetic that all codecs share.

A *block* is the elements that are encoded together; as bytes it is a record of a structured array.

A *part* is one of the tensors that a weight is stored as, named by its suffix; the *main part*
holds the codes.

A codec knows bytes and numbers, no file and no tensor name. The numpy functions here are the
reference that every faster path is judged by.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from aprfmt.base.encodings import ENCODINGS, Encoding, block_members
from aprfmt.codecs.arithmetic import row_mean_square
from aprfmt.codecs.parallel import parallel_decode
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


class Codec:
    """The base class of codecs: bytes to numbers and back, without state.

    One instance serves every thread. A subclass gives `name` (key of the encoding table) and
    `decode`. `parts` names what `decode` reads: `""` is the main part, others are companion tensors
    by suffix; `optional_parts` are those that may exist as well. `dtype` is the numpy dtype of
    decoded arrays: float32 for everything quantized and for F16, BF16 and FP8; an encoding's own
    type for F32, F64, integers, BOOL and C64.
    """

    name: str
    parts: tuple[str, ...] = ("",)
    optional_parts: tuple[str, ...] = ()
    dtype: str = "float32"
    layout: ClassVar[np.dtype[Any] | None] = None  # of one block, where it has members

    @property
    def row(self) -> Encoding:
        """The encoding's row of the table of encodings."""
        return ENCODINGS[self.name]

    @property
    def block_size(self) -> int:
        """Elements in a block."""
        return self.row.block_size

    @property
    def type_size(self) -> int:
        """Bytes of an encoded block."""
        return self.row.type_size

    def of_rows(self, columns: int) -> "Codec":
        """Return the codec for a tensor whose rows have `columns` elements.

        The base returns itself. Encodings that store something for each row return another codec.
        """
        return self

    def decode(self, raw: Mapping[str, Bytes], out: Array) -> None:
        """Fill `out` (1-D, C-contiguous, of `dtype`) with the decoded elements of the parts `raw`.

        Raises CodecError when a part is missing or its length does not fit `out`. Subclasses
        implement it: this one raises NotImplementedError.
        """
        raise NotImplementedError

    def encode(
        self, x: Array, *, fma: Fma = "fused", importance: Array | None = None
    ) -> Mapping[str, bytes]:
        """Return {suffix: bytes} of `x` ([..., columns], float32 for lossy codecs).

        `importance` weighs columns (one float32 each). `fma` says whether multiply-adds are rounded
        once (fused, what ggml's own builds do) or twice (strict). Raises CodecError where the codec
        cannot encode, or cannot hold `x`.
        """
        raise CodecError(f"{self.name}: there is no encoder; choose another encoding")

    @property
    def has_encoder(self) -> bool:
        """Whether `encode` can make bytes; many encodings can only be decoded."""
        return type(self).encode is not Codec.encode

    def with_options(self, **options: Any) -> "Codec":
        """Return a codec that encodes with these options.

        Raises CodecError for options it does not take.
        """
        raise CodecError(f"{self.name}: takes no options, found {', '.join(options)}")

    def steps(self, raw: Mapping[str, Bytes], count: int) -> F32 | None:
        """Return float32 [count]: for each element the largest quantization step of its block.

        A step is the distance between two neighbouring values that the block can hold. None where
        no step is known. `diff` bounds the error of an encoding by it.
        """
        return None

    def largest_steps(self, raw: Mapping[str, Bytes], count: int) -> F32 | None:
        """Return float32 [blocks]: the largest of `steps` in each block; None if unknown.

        `count` elements are whole blocks.
        """
        found = self.steps(raw, count)
        if found is None:
            return None
        largest: F32 = found.reshape(-1, self.block_size).max(axis=1)
        return largest

    def granule(self, raw: Mapping[str, Bytes], count: int) -> int:
        """Return at which elements `cut` may start: at each multiple of this number.

        Raises CodecError where the bytes of `raw` do not fit `count` elements.
        """
        expected = -(-count // self.block_size) * self.type_size
        check_length(self.name, part_bytes(self.name, raw).size, expected, f"{count} elements")
        return self.block_size

    def main(self, raw: Mapping[str, Bytes], out: Array) -> U8:
        """Return the bytes of the main part as uint8, to be decoded into `out`.

        Raises CodecError where `out` has another dtype or layout, or the bytes do not fit its
        length.
        """
        check_out(self.name, out, self.dtype)
        self.granule(raw, out.size)
        return part_bytes(self.name, raw)

    def cut(self, raw: Mapping[str, Bytes], start: int, stop: int) -> Mapping[str, Bytes]:
        """Return {suffix: bytes} of a tensor that has only elements [start, stop) of this one.

        `start` is a multiple of `granule`.
        """
        block, size = self.block_size, self.type_size
        return {
            "": part_bytes(self.name, raw)[start // block * size : -(-stop // block) * size].data
        }

    def finish(self, raw: Mapping[str, Bytes], out: Array) -> None:
        """Apply parts other than the main one to the decoded blocks in `out`, in place.

        Native kernels read the main part alone and call it afterwards. The base has no such parts.
        """

    def decode_native(
        self, kernels: ModuleType, raw: Mapping[str, Bytes], out: Array, threads: int, store: int
    ) -> None:
        """Fill `out` as `decode` does, by the native kernel of this encoding where there is one.

        `kernels` is the native extension, `store` how the kernel writes (`parallel.STORE_FRESH` or
        `STORE_BY_SIZE`).
        """
        kernel = kernels.KERNELS.get(self.name)
        if kernel is None:
            self.decode(raw, out)
            return
        main = part_bytes(self.name, raw)
        parallel_decode(kernel, main, out, self.block_size, self.type_size, threads, store)
        self.finish(raw, out)

    def encode_native(
        self, kernels: ModuleType, x: Array, *, fma: Fma, importance: Array | None
    ) -> Mapping[str, bytes]:
        """Return what `encode` returns, made by the native encoder where there is one.

        `kernels` is the native extension; `fma` and `importance` as in `encode`.
        """
        encoder: Callable[..., Mapping[str, bytes]] | None = kernels.ENCODERS.get((self.name, fma))
        if encoder is None:
            return self.encode(x, fma=fma, importance=importance)
        return encoder(x, importance=importance)

    # What follows is for weights stored in several tensors, whose row has a `claim`.

    def shape_of(self, raw: Mapping[str, Bytes]) -> tuple[int, ...]:
        """Return the shape of a weight stored in several parts.

        `raw` needs to hold only the part whose suffix is the encoding's `claim`. The base raises
        CodecError, because plain blocks do not say their weight's shape.
        """
        raise CodecError(f"{self.name}: its parts do not say the weight's shape")

    def needed(self, raw: Mapping[str, Bytes]) -> Sequence[str]:
        """Return the suffixes of the parts that must exist.

        `raw` needs to hold only the part whose suffix is the encoding's `claim`.
        """
        return self.parts

    def stored_as(self, parts: Iterable[str]) -> Mapping[str, str]:
        """Return {suffix: encoding of the stored tensor} in the order of `parts`.

        The base returns U8 for all.
        """
        return dict.fromkeys(parts, "U8")

    def config(self, options: Mapping[str, Any], left_out: Sequence[str]) -> Mapping[str, Any]:
        """Return the `quantization_config` section of a model packed with `options`.

        `left_out` are the modules that could be packed and are not. The base returns {}: no
        section.
        """
        return {}


def block_dtype(layout: str) -> np.dtype[Any]:
    """Return the numpy dtype of one block of a `layout` of the encoding table, little-endian."""
    rows: list[tuple[str, np.dtype[Any], tuple[int, ...]]] = []
    for name, count, kind in block_members(layout):
        if ":" in kind:
            inner = block_dtype(kind)
        else:
            inner = np.dtype(("u1", int(kind[1])) if kind[0] == "w" else f"<{kind}")
        rows.append((name, inner, (count,) if count else ()))
    return np.dtype(rows)


def part_bytes(name: str, raw: Mapping[str, Bytes], suffix: str = "") -> U8:
    """Return the bytes of the part `suffix` as uint8, without copying.

    Raises CodecError if it is missing.
    """
    if suffix not in raw:
        raise CodecError(
            f"{name}: part {suffix!r} is missing; found {', '.join(map(repr, raw)) or 'no part'}"
        )
    return np.frombuffer(raw[suffix], np.uint8) if len(raw[suffix]) else np.empty(0, np.uint8)


def check_length(name: str, found: int, expected: int, what: str) -> None:
    """Raise CodecError unless `found` bytes equal the `expected` bytes of `what` (words)."""
    if found != expected:
        raise CodecError(f"{name}: found {found} bytes, expected {expected} for {what}")


def check_out(name: str, out: Array, dtype: str) -> None:
    """Raise CodecError unless `out` is a writeable, contiguous 1-D array of `dtype`.

    `name` is the encoding, which begins the message.
    """
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
    """Raise CodecError naming the first NaN or infinity of `x`: blocks cannot hold one.

    `name` is the encoding, which begins the message.
    """
    finite = np.isfinite(x)
    if not finite.all():
        index = int(np.argmin(finite.reshape(-1)))
        raise CodecError(
            f"{name}: element {index} is {x.reshape(-1)[index]}, a block holds finite numbers "
            "only; repair the weights or store the tensor as F32, F16 or BF16"
        )


_HALF_UNIT = np.float32(2.0**-11)  # of a float16, relative to it
_CODES = np.float32(31)  # the highest code of blocks with an offset


class BlockCodec(Codec):
    """The base class of encodings whose blocks hold everything they need, such as the GGML types.

    A subclass gives `name` and `decode_blocks`; `encode_blocks` where there is an encoder, and
    `step` (the member that is a block's step) or `block_steps` where a step is known, and `offset`
    (the float16 member that is added) as well. The members
    of a block are those of the layout in the encoding table.
    """

    layout: ClassVar[np.dtype[Any]]
    step: ClassVar[str] = ""
    offset: ClassVar[str] = ""
    weighs_rows: ClassVar[bool] = False  # whether the encoder asks for `sigma2`

    def __init_subclass__(cls) -> None:
        """Set the subclass's `layout` from its row of the encoding table, and check its size."""
        if "name" not in cls.__dict__:
            return
        row = ENCODINGS[cls.name]
        if row.layout:
            cls.layout = block_dtype(row.layout)
        assert cls.layout.itemsize == row.type_size, f"{cls.name}: {cls.layout.itemsize} bytes"

    def decode_blocks(self, block: Blocks, out: F32) -> None:
        """Fill `out` [n, block_size] from `n` blocks.

        Subclasses implement it: this one raises NotImplementedError.
        """
        raise NotImplementedError

    def encode_blocks(
        self, x: F32, block: Blocks, *, fused: bool, weights: F32 | None, sigma2: F32 | None
    ) -> None:
        """Fill `n` blocks from `x` [n, block_size].

        `weights` [n, block_size] is the importance of each element, None without an importance
        matrix. `sigma2` [n] is the mean square of the row that contains the block; it is None
        without `weights`, or where the codec's `weighs_rows` is False. `fused` rounds multiply-adds
        once. Raises CodecError unless a subclass implements it: most encodings have no encoder.
        """
        raise CodecError(f"{self.name}: there is no encoder; choose another encoding")

    @property
    def has_encoder(self) -> bool:
        """Whether the subclass defines `encode_blocks` or `encode` itself."""
        own = type(self)
        return (
            own.encode_blocks is not BlockCodec.encode_blocks or own.encode is not BlockCodec.encode
        )

    def block_steps(self, block: Blocks) -> F32 | None:
        """Return float32 [n]: the largest distance between neighbouring values of each block.

        Where the rounding of a large offset may move a value by more than half that distance, half
        the distance plus the offset's rounding error is returned instead. None where the encoding
        has no member that is its step.
        """
        if not self.step:
            return None
        found: F32 = np.abs(block[self.step].astype(np.float32))
        if self.offset:
            rounded = np.abs(block[self.offset].astype(np.float32)) + _CODES * found
            found = np.maximum(found, found / 2 + _HALF_UNIT * rounded)
        return found

    def steps(self, raw: Mapping[str, Bytes], count: int) -> F32 | None:
        """Return float32 [count]: each block's step, repeated for its elements; None if unknown."""
        found = self.block_steps(part_bytes(self.name, raw).view(self.layout))
        return None if found is None else found.repeat(self.block_size)[:count]

    def largest_steps(self, raw: Mapping[str, Bytes], count: int) -> F32 | None:
        """Return float32 [blocks]: each block's step; None if unknown.

        `count` elements are whole blocks.
        """
        if type(self).steps is not BlockCodec.steps:  # a block has more steps than one
            return super().largest_steps(raw, count)
        found = self.block_steps(part_bytes(self.name, raw).view(self.layout))
        return None if found is None else found.reshape(-1)[: count // self.block_size]

    def decode(self, raw: Mapping[str, Bytes], out: Array) -> None:
        """Fill float32 `out` from consecutive blocks.

        Elements of the last block beyond `out` are dropped. Raises CodecError when the byte count
        does not fit the element count.
        """
        records = self.main(raw, out).view(self.layout)
        blocks, short = divmod(out.size, self.block_size)
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
        """Return {"": bytes} of float32 `x` in whole blocks; a flat codec pads the last with zeros.

        Raises CodecError for a NaN or an infinity, or rows that are not a whole number of blocks.
        """
        rows = as_rows(self.name, x)
        weights = self._check_importance(rows, importance)
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
            self._encode_chunks(rows, elements, block, is_fused(fma), weights)
        return {"": block.tobytes()}

    def _encode_chunks(
        self, rows: F32, elements: F32, block: Blocks, fuse: bool, weights: F32 | None
    ) -> None:
        """Fill the blocks `block` from `elements` [blocks, block_size], some at a time.

        `weights` [columns] is the importance of each column, repeated for every row here. `rows` is
        only read for the mean square of each row, where the codec `weighs_rows`.
        """
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

    def _check_importance(self, rows: F32, importance: Array | None) -> F32 | None:
        """Return the importance as float32 [columns]; None without one, or for a flat encoding.

        A flat encoding's blocks run across rows. Raises CodecError where the importance has another
        number of columns, a NaN or an infinity.
        """
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


def is_fused(fma: str) -> bool:
    """Return whether `fma` is "fused" (multiply-adds rounded once) rather than "strict".

    Raises CodecError for another word.
    """
    if fma not in ("fused", "strict"):
        raise CodecError(f"fma {fma!r} is not known; expected 'fused' or 'strict'")
    return fma == "fused"


def scale_column(values: Array) -> F32:
    """Return float16 scales [n] as float32 [n, 1], to broadcast over the elements of a block."""
    wide: F32 = values.astype(np.float32)
    return wide.reshape(-1, 1)


def largest_steps(block: Blocks, scales: Array) -> F32:
    """Return float32 [n]: each superblock's largest step, |d| times its largest |scale|.

    `scales` are [n, k].
    """
    d, largest = np.abs(block["d"].astype(np.float32)), np.abs(scales.astype(np.float32))
    found: F32 = d * largest.max(axis=1)
    return found


def is_padded(row: Encoding, columns: int, row_bytes: int) -> bool:
    """Return whether rows of `row_bytes` bytes have padding after their `columns` elements."""
    return (row_bytes - row.row_header) * row.block_size != columns * row.type_size


def split_parts(
    codec: Codec,
    raw: Mapping[str, Bytes],
    shape: Sequence[int],
    elements: int,
    row_bytes: int | None = None,
) -> Iterator[tuple[Mapping[str, Bytes], tuple[int, int], int]]:
    """Yield (parts, (rows, columns) they decode to, columns to keep), some rows of a weight each.

    The parts are {suffix: bytes} of about `elements` elements. With padded rows (`row_bytes`) the
    last columns are padding. Raises CodecError when lengths do not fit.
    """
    count, columns = math.prod(shape), shape[-1] if shape else 1
    block, size = codec.block_size, codec.type_size
    if row_bytes is not None and is_padded(codec.row, columns, row_bytes):
        rows, width = count // max(columns, 1), row_bytes // size * block
        check_length(codec.name, row_bytes, -(-columns // block) * size, f"{columns} elements")
        main = part_bytes(codec.name, raw)
        check_length(codec.name, main.size, rows * row_bytes, f"{rows} rows")
        step = max(1, elements // max(width, 1))
        for start in range(0, rows, step):
            at = slice(start * row_bytes, (start + step) * row_bytes)
            yield {"": main[at].data}, (min(step, rows - start), width), columns
        return
    unit = codec.granule(raw, count)
    step = max(unit, elements // unit * unit)
    for start in range(0, count, step):
        stop = min(start + step, count)
        yield codec.cut(raw, start, stop), (1, stop - start), stop - start
