"""The layout of an APR v2 file: header, flags, index entries, dtype codes; for reader and writer.

Layout source: the public APR v2 description of the aprender project (format module and its
contract file `apr-format-v2.yaml`). Integers are little-endian, offsets count from the start of
the file unless stated; a tensor's `offset` in the index counts from `data_offset`.
"""

import math
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from aprfmt.base.encodings import ENCODINGS, Encoding
from aprfmt.base.protocols import TensorInfo

MAGIC = b"APR\0"
# Writers of January 2026 used these magics with the same 64-byte header; other containers use them
# too, and only the header's CRC tells which it is.
LEGACY_MAGICS = (b"APR2", b"APRN")
REFUSED_MAGICS: dict[bytes, str] = {
    b"APRN": "an APR v1 file (MessagePack and bincode); convert it to v2 with the apr tool",
    b"APR1": "the simple APR1 container; convert it to APR v2 with the tool that wrote it",
    b"APR2": "an APR2 file without a v2 header checksum: another container of that name "
    "(a bundle, a tuner cache), or a damaged model",
    b"APR\x02": "a magic that only documents name and no writer writes",
}
VERSION = (2, 0)
ALIGNMENT = 64

_HEADER = struct.Struct("<4sBBHIQIQQI20s")
HEADER_SIZE = _HEADER.size
assert HEADER_SIZE == 64
CRC_AT = 40  # u32, over header[0:40] + header[44:64]

FLAGS: dict[int, str] = {
    0x0001: "LZ4_COMPRESSED",
    0x0002: "ZSTD_COMPRESSED",
    0x0004: "ENCRYPTED",
    0x0008: "SIGNED",
    0x0010: "SHARDED",
    0x0020: "QUANTIZED",
    0x0040: "HAS_FILTERBANK",
    0x0080: "HAS_MODEL_CARD",
    0x0100: "STREAMING",
    0x0200: "HAS_VOCAB",
    0x0400: "LAYOUT_ROW_MAJOR",
    0x0800: "LAYOUT_COLUMN_MAJOR",
}
BITS: dict[str, int] = {name: bit for bit, name in FLAGS.items()}
COMPRESSED = BITS["LZ4_COMPRESSED"] | BITS["ZSTD_COMPRESSED"]

# Smallest entry: u16 name length, u8 dtype, u8 ndim, u64 offset, u64 size.
ENTRY_SIZE = 20
MAX_NAME_BYTES = 256  # the reference writer cuts longer names silently; ours raises
MAX_DIMS = 8  # the reference writer's limit

# Dtype codes to their possible meanings, the likeliest first; `size` in the index decides. The two
# code bases of early 2026 use codes 2, 3 and 6 to 14 differently.
CODES: dict[int, tuple[str, ...]] = {
    0: ("F32",),
    1: ("F16",),
    2: ("BF16", "Q4_0"),
    3: ("F64", "Q4_1"),
    4: ("I32",),
    5: ("I64",),
    6: ("I8", "Q5_0"),
    7: ("U8", "Q5_1"),
    8: ("APR_Q4", "Q8_0", "Q4_K"),
    9: ("APR_Q8", "Q8_1", "Q6_K"),
    10: ("Q2_K", "Q8_0"),
    11: ("Q3_K", "Q4_0"),
    12: ("Q4_K", "Q5_K"),
    13: ("Q5_K", "Q3_K"),
    14: ("Q6_K", "Q2_K"),
    30: ("BF16",),
    128: ("APR_Q4",),
    129: ("APR_Q8",),
}
_SUPERBLOCK = 256  # K-quants: the only blocks whose rows a writer pads


def can_store(row: Encoding) -> bool:
    """Return whether the format has a dtype code for an encoding."""
    return row.apr is not None


def align_size(count: int) -> int:
    """Return `count` rounded up to the next multiple of 64."""
    return -(-count // ALIGNMENT) * ALIGNMENT


def padding_bytes(count: int) -> bytes:
    """Return the zero bytes that pad `count` bytes to a multiple of 64."""
    return bytes(align_size(count) - count)


@dataclass(frozen=True, slots=True)
class Header:
    """The first 64 bytes of an APR v2 file.

    Offsets are bytes from the start of the file, `metadata_size` is in bytes. `checksum` is the
    header's.
    """

    magic: bytes
    major: int
    minor: int
    flags: int
    tensor_count: int
    metadata_offset: int
    metadata_size: int
    index_offset: int
    data_offset: int
    checksum: int
    reserved: bytes

    @classmethod
    def unpack(cls, raw: bytes | memoryview) -> "Header":
        """Return the header in its 64 bytes."""
        return cls(*_HEADER.unpack(raw))

    def pack(self) -> bytes:
        """Return the 64 bytes of the header, with its `checksum` field as it is, right or wrong."""
        return _HEADER.pack(
            self.magic,
            self.major,
            self.minor,
            self.flags,
            self.tensor_count,
            self.metadata_offset,
            self.metadata_size,
            self.index_offset,
            self.data_offset,
            self.checksum,
            self.reserved,
        )

    @property
    def computed_checksum(self) -> int:
        """The CRC-32 (zlib's) that the header's bytes have, without its checksum field."""
        raw = self.pack()
        return zlib.crc32(raw[CRC_AT + 4 :], zlib.crc32(raw[:CRC_AT]))

    def with_checksum(self) -> "Header":
        """Return a copy of the header with its checksum computed."""
        return replace(self, checksum=self.computed_checksum)

    @property
    def flag_names(self) -> tuple[str, ...]:
        """The names of the flag bits that are set; undefined bits as `0x1000`."""
        bits = (1 << at for at in range(16) if self.flags >> at & 1)
        return tuple(FLAGS.get(bit, f"0x{bit:04x}") for bit in bits)


def fresh_header(flags: int, count: int, metadata_size: int, index_size: int) -> Header:
    """Return the header, with its checksum, that the reference writer makes for these sizes.

    `count` is the number of tensors, `metadata_size` and `index_size` are in bytes.
    """
    index_offset = HEADER_SIZE + align_size(metadata_size)
    return Header(
        MAGIC,
        *VERSION,
        flags,
        count,
        HEADER_SIZE,
        metadata_size,
        index_offset,
        index_offset + align_size(index_size),
        0,
        bytes(20),
    ).with_checksum()


def pack_entry(
    name: bytes, code: int, shape: Sequence[int], data_offset: int, nbytes: int
) -> bytes:
    """Return the bytes of one index entry; `data_offset` counts from the header's data_offset.

    `code` is the dtype's code, `nbytes` the size of the tensor's data.
    """
    return struct.pack(
        f"<H{len(name)}sBB{len(shape)}QQQ",
        len(name),
        name,
        code,
        len(shape),
        *shape,
        data_offset,
        nbytes,
    )


@dataclass(frozen=True, slots=True)
class PossibleSize:
    """One possible size in bytes of a shape: rows padded to whole superblocks, or flat.

    `row_bytes` is None if rows do not begin at whole blocks.
    """

    nbytes: int
    row_bytes: int | None


def possible_sizes(row: Encoding, shape: Sequence[int]) -> tuple[PossibleSize, ...]:
    """Return the sizes that APR writers give a tensor of `shape`, the preferred one first.

    In a 2-D K-quant every row is padded. Every other tensor is cut into blocks regardless of rows,
    and only the last block is padded: its rows can be moved undecoded (`row_bytes`) only if a row
    is a whole number of blocks.
    """
    count = math.prod(shape)
    flat_bytes = row.header * (count > 0) + -(-count // row.block_size) * row.type_size
    flat = PossibleSize(flat_bytes, row.row_bytes(shape))
    if row.block_size != _SUPERBLOCK or len(shape) != 2:
        return (flat,)
    row_bytes = -(-shape[1] // _SUPERBLOCK) * row.type_size
    padded = PossibleSize(shape[0] * row_bytes, row_bytes)
    return (padded, flat) if padded != flat else (padded,)


def resolve_encoding(
    code: int, shape: Sequence[int], nbytes: int
) -> tuple[str, PossibleSize] | None:
    """Return (encoding, size) that a dtype code means for this shape and size in bytes.

    None if no meaning of the code fits.
    """
    for name in CODES.get(code, ()):
        for fit in possible_sizes(ENCODINGS[name], shape):
            if fit.nbytes == nbytes:
                return name, fit
    return None


def expected_sizes(code: int, shape: Sequence[int]) -> str:
    """Return the bytes that a code means for a shape, for a message: `F64 16, Q4_1 20`."""
    found: list[str] = []
    for name in CODES[code]:
        sizes = sorted({fit.nbytes for fit in possible_sizes(ENCODINGS[name], shape)})
        found.append(f"{name} {' or '.join(map(str, sizes))}")
    return ", ".join(found)


def storage_order(infos: Iterable[TensorInfo]) -> list[TensorInfo]:
    """Return the tensors in the order the reference's in-memory writer stores them: by name."""
    return sorted(infos, key=lambda info: info.name.encode("utf-8", "surrogatepass"))
