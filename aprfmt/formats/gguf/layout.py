"""The layout of a GGUF file: header, value types, tensor entries; for reader and writer.

Source: the GGUF page of the ggml project (docs/gguf.md) and what its C reader enforces
(ggml/src/gguf.cpp). Versions 2 and 3 have one layout; 3 says that big-endian files exist.

    magic "GGUF" | u32 version | u64 tensor count | u64 key count
    keys:    string key | u32 value type | value
    tensors: string name | u32 n_dims | u64 dims[n_dims] (fastest first) | u32 type | u64 offset
    padding to the alignment | data; offsets count from here

A string is a u64 length and UTF-8 bytes without a terminator. An array is a u32 element type, a
u64 count and the elements; an element that is an array brings its own type and count.
"""

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from aprfmt.base.encodings import BY_GGML, Encoding, unknown_encoding
from aprfmt.formats import BEGINNINGS

(MAGIC,) = BEGINNINGS["gguf"]
VERSIONS = (2, 3)
VERSION = 3  # what is written
HEADER_SIZE = 24
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
BYTE_ORDERS: dict[str, str] = {"<": "little", ">": "big"}
ALIGNMENT_KEY = "general.alignment"

MAX_DIMS = 4  # GGML_MAX_DIMS
MAX_NAME_BYTES = 63  # GGML_MAX_NAME counts the final NUL
MAX_KEY_BYTES = 65_535  # docs/gguf.md; tensor names are held to it as well before they are decoded
MAX_INT64 = (1 << 63) - 1  # C readers hold dims and element counts in int64_t

SMALLEST_KEY = 8 + 1 + 4 + 1  # one letter, type, one byte
SMALLEST_TENSOR = 8 + 4 + 4 + 8  # no name, no dims
SMALLEST_ARRAY = 4 + 8


@dataclass(frozen=True, slots=True)
class ValueType:
    """A metadata value type: its id, and for fixed-size ones the struct letter and the size."""

    name: str
    id: int
    letter: str = ""
    size: int = 0  # of one element at least, where the size is not fixed

    @property
    def fixed(self) -> bool:
        """True for numbers and bools, False for strings and arrays, whose size varies."""
        return self.letter != ""


def _number_type(name: str, id: int, letter: str) -> ValueType:
    """Return the value type of a number, its size derived from the struct letter."""
    return ValueType(name, id, letter, struct.calcsize(f"<{letter}"))


STRING = ValueType("string", 8, size=8)
ARRAY = ValueType("array", 9, size=SMALLEST_ARRAY)
BOOL = _number_type("bool", 7, "?")
FLOAT32 = _number_type("float32", 6, "f")
_TYPES = (
    _number_type("uint8", 0, "B"),
    _number_type("int8", 1, "b"),
    _number_type("uint16", 2, "H"),
    _number_type("int16", 3, "h"),
    _number_type("uint32", 4, "I"),
    _number_type("int32", 5, "i"),
    FLOAT32,
    BOOL,
    STRING,
    ARRAY,
    _number_type("uint64", 10, "Q"),
    _number_type("int64", 11, "q"),
    _number_type("float64", 12, "d"),
)
TYPE_BY_ID: dict[int, ValueType] = {row.id: row for row in _TYPES}
TYPE_BY_NAME: dict[str, ValueType] = {row.name: row for row in _TYPES}

# Keys that say how one file of a split belongs to the others.
SPLIT_NO, SPLIT_COUNT, SPLIT_TENSORS = "split.no", "split.count", "split.tensors.count"
SPLIT_TYPES: dict[str, str] = {SPLIT_NO: "uint16", SPLIT_COUNT: "uint16", SPLIT_TENSORS: "int32"}
MAX_SPLITS = 65_535  # split.count is a u16
_SPLIT_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5,})-of-(?P<count>\d{5,})\.gguf", re.DOTALL)


def split_name(stem: str, number: int, count: int) -> str:
    """Return the name of a shard; `number` counts from 0, names count from 1."""
    return f"{stem}-{number + 1:05d}-of-{count:05d}.gguf"


def parse_split_name(name: str) -> tuple[str, int, int] | None:
    """Return (stem, number from 0, count) of a shard's file name, None for other names."""
    match = _SPLIT_NAME.fullmatch(name)
    if match is None:
        return None
    found = match["stem"], int(match["number"]) - 1, int(match["count"])
    return found if split_name(*found) == name else None


def align_size(count: int, alignment: int) -> int:
    """Return `count` rounded up to a multiple of `alignment`."""
    return -(-count // alignment) * alignment


def encoding_of(ggml_id: int) -> Encoding:
    """Return the encoding of a ggml type id; an unknown one is named like `type#142`."""
    return BY_GGML.get(ggml_id) or unknown_encoding(ggml_id)


def pack_header(tensors: int, keys: int) -> bytes:
    """Return the 24 little-endian header bytes of a file of the version we write."""
    return struct.pack("<4sIQQ", MAGIC, VERSION, tensors, keys)


def pack_string(raw: bytes) -> bytes:
    """Return a string's stored bytes: its length, then its bytes."""
    return struct.pack("<Q", len(raw)) + raw


def pack_tensor(name: bytes, shape: Sequence[int], ggml_id: int, data_offset: int) -> bytes:
    """Return the bytes of a tensor's line in the table.

    `shape` is row-major, `data_offset` counts from the data section.
    """
    dims = tuple(reversed(shape))
    tail = struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, ggml_id, data_offset)
    return pack_string(name) + tail
