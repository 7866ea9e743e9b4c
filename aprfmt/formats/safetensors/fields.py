"""Lists the header of a safetensors file, field by field."""

from collections.abc import Iterator

from aprfmt.base.protocols import Region
from aprfmt.base.text_escape import shorten
from aprfmt.formats.header_field import HeaderField
from aprfmt.formats.safetensors.layout import PREFIX
from aprfmt.formats.safetensors.parse import parse


def header_fields(buffer: Region, where: str) -> Iterator[HeaderField]:
    """Yield the fields of the header's length, its JSON, its padding, and of every tensor.

    `buffer` is the whole file; `where` begins messages.
    """
    parsed = parse(buffer, where, damaged=True)
    raw = bytes(parsed.header_raw[PREFIX:])
    spelled = raw.rstrip(b" ")
    yield HeaderField(0, PREFIX, "header_size", str(parsed.header_size))
    text = str(spelled[:240], "utf-8", "replace")
    yield HeaderField(PREFIX, len(spelled), "header", shorten(text, 60))
    if len(raw) > len(spelled):
        yield HeaderField(PREFIX + len(spelled), len(raw) - len(spelled), "padding", "spaces")
    for info in sorted(parsed.infos.values(), key=lambda info: (info.offset, info.nbytes)):
        row = f"{info.encoding} {list(info.shape)}, {info.nbytes} bytes"
        yield HeaderField(info.offset, info.nbytes, f"tensor {info.name}", row)
