"""Lists the header, metadata and index of an APR v2 file, field by field."""

from collections.abc import Iterator

from aprfmt.base.protocols import Region
from aprfmt.base.text_escape import shorten
from aprfmt.formats.apr.layout import HEADER_SIZE
from aprfmt.formats.apr.parse import parse
from aprfmt.formats.cursor import Cursor
from aprfmt.formats.header_field import HeaderField, sequential_fields


def header_fields(buffer: Region, where: str) -> Iterator[HeaderField]:
    """Yield the fields of the 64 header bytes, the metadata, every index entry, the footer.

    `buffer` is the whole file; `where` begins messages.
    """
    parsed = parse(buffer, where, damaged=True)
    header = parsed.header
    flags = f"0x{header.flags:04x} {' '.join(header.flag_names)}".strip()
    crc = f"0x{header.checksum:08x}"
    if header.checksum != header.computed_checksum:
        crc += f", computed 0x{header.computed_checksum:08x}"
    yield from sequential_fields(
        [
            ("magic", 4, repr(header.magic)[2:-1]),
            ("version_major", 1, header.major),
            ("version_minor", 1, header.minor),
            ("flags", 2, flags),
            ("tensor_count", 4, header.tensor_count),
            ("metadata_offset", 8, header.metadata_offset),
            ("metadata_size", 4, header.metadata_size),
            ("tensor_index_offset", 8, header.index_offset),
            ("data_offset", 8, header.data_offset),
            ("checksum", 4, crc),
            ("reserved", HEADER_SIZE - 44, header.reserved.hex()),
        ]
    )
    text = str(parsed.metadata_raw[:240], "utf-8", "replace")
    yield HeaderField(header.metadata_offset, header.metadata_size, "metadata", shorten(text, 60))
    # The entries have no fixed length: each is skipped to find the next.
    cursor = Cursor(parsed.buffer, where, header.index_offset)
    for entry in parsed.entries:
        start = cursor.offset
        cursor.skip(cursor.uint(2, "a name's length"), "a name")
        _, ndim = cursor.take(2, "dtype and ndim")
        cursor.skip(8 * ndim + 16, "shape and extent")
        info = entry.info
        text = (
            f"code {entry.code} ({info.encoding}), {list(info.shape)}, "
            f"offset {info.offset - header.data_offset}, {info.nbytes} bytes"
        )
        yield HeaderField(start, cursor.offset - start, f"tensor {info.name}", text)
    if parsed.footer == "present":
        found = int.from_bytes(parsed.buffer[parsed.end : parsed.end + 4], "little")
        yield HeaderField(parsed.end, 4, "footer", f"CRC-32 0x{found:08x}")
