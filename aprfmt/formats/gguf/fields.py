"""Lists the header of a GGUF file, field by field."""

from collections.abc import Iterator

from aprfmt.base.protocols import Region
from aprfmt.base.text_escape import shorten
from aprfmt.formats.cursor import Cursor
from aprfmt.formats.gguf.layout import MAGIC, encoding_of
from aprfmt.formats.gguf.parse import parse
from aprfmt.formats.header_field import HeaderField, sequential_fields


def header_fields(buffer: Region, where: str) -> Iterator[HeaderField]:
    """Yield the fields of magic, version and counts, every key's value, the tensor table.

    `buffer` is the whole file; `where` begins messages.
    """
    parsed = parse(buffer, where, damaged=True)
    tensors, keys = parsed.counts
    yield from sequential_fields(
        [
            ("magic", 4, MAGIC.decode()),
            ("version", 4, parsed.version),
            ("tensor_count", 8, tensors),
            ("key_count", 8, keys),
        ]
    )
    for key, field in parsed.metadata.fields.items():
        value = parsed.metadata[key]
        shown = shorten(value, 60) if isinstance(value, str) else shorten(repr(value), 60)
        yield HeaderField(field.start, field.end - field.start, f"{key} ({field.type})", shown)
    # The lines have no fixed length: each is read to find the next.
    cursor = Cursor(buffer, where, parsed.table[0])
    cursor.order = parsed.order
    for _ in range(tensors):
        start = cursor.offset
        raw = cursor.take(cursor.uint(8, "a name's length"), "a tensor name")
        name = str(raw, "utf-8", "backslashreplace")
        ndim = cursor.uint(4, "n_dims")
        *dims, kind, offset = (int(n) for n in cursor.unpack(f"{ndim}QIQ", "a tensor entry"))
        text = f"ggml_dims {dims}, {encoding_of(kind).name}, data offset {offset}"
        yield HeaderField(start, cursor.offset - start, f"tensor {name}", text)
    yield HeaderField(
        cursor.offset, parsed.data_offset - cursor.offset, "padding", f"to {parsed.alignment}"
    )
