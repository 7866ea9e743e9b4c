"""GGUF, the container of llama.cpp: versions 2 and 3 read, version 3 written.

Listing a file is what this package does most, so what only writing or `hex` needs is imported then.
"""

from pathlib import Path
from typing import Any

from aprfmt.base.protocols import Sink
from aprfmt.formats import FormatSpec, ValueRules
from aprfmt.formats.gguf.fields import header_fields
from aprfmt.formats.gguf.known_keys import keys
from aprfmt.formats.gguf.layout import ARRAY, MAGIC, MAX_DIMS, MAX_NAME_BYTES, TYPE_BY_NAME
from aprfmt.formats.gguf.parse import parse
from aprfmt.formats.gguf.reader import open_source


def open_sink(path: Path, **options: Any) -> Sink:
    """Start writing `path`; the options are those of `writer.open_sink`."""
    from aprfmt.formats.gguf import writer

    return writer.open_sink(path, **options)


def takes(value: Any) -> bool:
    """Say whether a plain value fits a GGUF key: text, numbers, and arrays of one kind of them."""
    if isinstance(value, list):
        return bool(value) and len({type(item) for item in value}) == 1 and takes(value[0])
    return isinstance(value, (str, int, float))


FORMAT = FormatSpec(
    name="gguf",
    extensions=(".gguf",),
    recognise=lambda head, size: head.startswith(MAGIC),
    open_source=open_source,
    open_sink=open_sink,
    holds=lambda row: row.ggml is not None,
    style="gguf",
    header_fields=header_fields,
    structure=parse,
    vectors_f32=True,
    takes=takes,
    values=ValueRules(tuple(n for n in TYPE_BY_NAME if n != ARRAY.name), keys, own=("split.",)),
    collects=True,
    max_name_bytes=MAX_NAME_BYTES,
    max_dims=MAX_DIMS,
)
