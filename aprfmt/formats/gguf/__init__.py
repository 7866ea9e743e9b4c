"""GGUF, the container of llama.cpp: versions 2 and 3 read, version 3 written.

Every file that is opened is tested for being GGUF, so what reads and writes it is imported only
once one is found.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aprfmt.base.protocols import Region, Sink, Source
from aprfmt.formats import FormatSpec, ValueRules
from aprfmt.formats.fields import HeaderField
from aprfmt.formats.gguf.layout import ARRAY, MAGIC, MAX_DIMS, MAX_NAME_BYTES, TYPE_BY_NAME

if TYPE_CHECKING:
    from aprfmt.formats.damage import Structure


def open_source(path: Path, *, partial: bool = False, damaged: bool = False) -> Source:
    """Open a file and the set it is of; see `reader.open_source`."""
    from aprfmt.formats.gguf import reader

    return reader.open_source(path, partial=partial, damaged=damaged)


def structure(view: Region, where: str, /, *, partial: bool = False) -> "Structure":
    """Read one file's header; see `parse.parse`."""
    from aprfmt.formats.gguf import parse

    return parse.parse(view, where, partial=partial)


def header_fields(view: Region, where: str) -> Iterator[HeaderField]:
    """Yield the header field by field; see `fields.header_fields`."""
    from aprfmt.formats.gguf import fields

    return fields.header_fields(view, where)


def open_sink(path: Path, **options: Any) -> Sink:
    """Start writing `path`; the options are those of `writer.open_sink`."""
    from aprfmt.formats.gguf import writer

    return writer.open_sink(path, **options)


def keys(architectures: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
    """Return the keys that readers know; see `known_keys.keys`."""
    from aprfmt.formats.gguf import known_keys

    return known_keys.keys(architectures)


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
    structure=structure,
    vectors_f32=True,
    takes=takes,
    values=ValueRules(tuple(n for n in TYPE_BY_NAME if n != ARRAY.name), keys, own=("split.",)),
    collects=True,
    max_name_bytes=MAX_NAME_BYTES,
    max_dims=MAX_DIMS,
)
