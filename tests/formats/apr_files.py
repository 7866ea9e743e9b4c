"""APR v2 files put together by hand, byte for byte, without the package under test."""

import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

METADATA: dict[str, Any] = {
    "model_type": "t",
    "license": None,
    "data_source": None,
    "data_license": None,
    "total_size": 0,
    "param_count": 0,
}


@dataclass(frozen=True)
class Tensor:
    """An index entry with its bytes; `size` and `offset` default to the right values."""

    name: bytes
    shape: tuple[int, ...] = (4,)
    code: int = 0
    data: bytes = b"\x00\x00\x80\x3f" * 4
    offset: int | None = None
    size: int | None = None
    ndim: int | None = None
    name_length: int | None = None

    def entry(self, offset: int) -> bytes:
        """Return the index entry."""
        ndim = len(self.shape) if self.ndim is None else self.ndim
        length = len(self.name) if self.name_length is None else self.name_length
        return (
            struct.pack("<H", length)
            + self.name
            + struct.pack("<BB", self.code, ndim)
            + struct.pack(f"<{len(self.shape)}Q", *self.shape)
            + struct.pack(
                "<QQ",
                offset if self.offset is None else self.offset,
                len(self.data) if self.size is None else self.size,
            )
        )


@dataclass(frozen=True)
class AprFile:
    """A file; every header field can be overridden, and every part replaced."""

    tensors: Sequence[Tensor] = (Tensor(b"a"), Tensor(b"b"))
    metadata: bytes | Mapping[str, Any] = field(default_factory=lambda: dict(METADATA))
    magic: bytes = b"APR\0"
    version: tuple[int, int] = (2, 0)
    flags: int = 0x0400
    fields: Mapping[str, int] = field(default_factory=dict)
    reserved: bytes = bytes(20)
    checksum: int | None = None
    index: bytes | None = None
    gap: bytes = b""  # between index and data
    footer: bytes | None = None

    def but(self, **changes: Any) -> "AprFile":
        """Return a copy with fields replaced."""
        return replace(self, **changes)

    def build(self) -> bytes:
        """Return the file's bytes, with true checksums unless they are given."""
        metadata = self.metadata
        if not isinstance(metadata, bytes):
            metadata = json.dumps(metadata, separators=(",", ":"), ensure_ascii=False).encode()
        data, entries = b"", b""
        for tensor in self.tensors:
            entries += tensor.entry(len(data))
            data += padded(tensor.data)
        index = entries if self.index is None else self.index
        index_offset = 64 + len(padded(metadata))
        fields = {
            "count": len(self.tensors),
            "metadata_offset": 64,
            "metadata_size": len(metadata),
            "index_offset": index_offset,
            "data_offset": index_offset + len(padded(index)) + len(self.gap),
            **self.fields,
        }
        head = struct.pack(
            "<4sBBHIQIQQ",
            self.magic,
            *self.version,
            self.flags,
            fields["count"],
            fields["metadata_offset"],
            fields["metadata_size"],
            fields["index_offset"],
            fields["data_offset"],
        )
        assert len(head) == 40 and len(self.reserved) == 20
        crc = zlib.crc32(head + self.reserved) if self.checksum is None else self.checksum
        head += struct.pack("<I", crc) + self.reserved
        body = head + padded(metadata) + padded(index) + self.gap + data
        footer = struct.pack("<I", zlib.crc32(body)) if self.footer is None else self.footer
        return body + footer


def padded(data: bytes) -> bytes:
    """Return `data` with zeros up to a multiple of 64."""
    return data + bytes(-len(data) % 64)


def sealed(data: bytes) -> bytes:
    """Return a file with header and footer checksums that fit its bytes."""
    crc = zlib.crc32(data[:40] + data[44:64])
    body = data[:40] + struct.pack("<I", crc) + data[44:-4]
    return body + struct.pack("<I", zlib.crc32(body))


def header_field(data: bytes, name: str) -> int:
    """Return an integer of the header."""
    fmt, at = {
        "count": ("<I", 8),
        "metadata_offset": ("<Q", 12),
        "metadata_size": ("<I", 20),
        "index_offset": ("<Q", 24),
        "data_offset": ("<Q", 32),
        "checksum": ("<I", 40),
    }[name]
    value: int = struct.unpack_from(fmt, data, at)[0]
    return value
