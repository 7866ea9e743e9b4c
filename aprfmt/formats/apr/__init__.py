"""APR v2, the container of the aprender project: read, and written with the same bytes.

Listing files is the most frequent use, so code for writing and `hex` is imported only when needed.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from aprfmt.base.protocols import Region, Sink, Source
from aprfmt.formats import FormatSpec, ValueRules
from aprfmt.formats.apr.layout import (
    LEGACY_MAGICS,
    MAGIC,
    MAX_DIMS,
    MAX_NAME_BYTES,
    REFUSED_MAGICS,
    order,
)
from aprfmt.formats.damage import Structure
from aprfmt.formats.fields import HeaderField

_MAGICS = (MAGIC, *LEGACY_MAGICS, *REFUSED_MAGICS)


def recognise(head: bytes, size: int) -> bool:
    """Say whether a file is APR of any kind, or the manifest of an APR set."""
    if head.startswith(_MAGICS):
        return True
    return head.lstrip()[:1] == b"{" and b'"shard_count"' in head and b'"filename"' in head


def open_source(path: Path, *, partial: bool = False, damaged: bool = False) -> Source:
    """Open a file, any shard of a set, or its manifest; see `reader.open_source`."""
    from aprfmt.formats.apr import reader

    return reader.open_source(path, partial=partial, damaged=damaged)


def open_sink(path: Path, **options: Any) -> Sink:
    """Start writing `path`; the options are those of `writer.open_sink`."""
    from aprfmt.formats.apr import writer

    return writer.open_sink(path, **options)


def structure(buffer: Region, where: str, *, partial: bool = False) -> Structure:
    """Return the structure of one file; with `partial` of one that is cut, too."""
    from aprfmt.formats.apr.parse import parse

    return parse(buffer, where, partial=partial)


def header_fields(buffer: Region, where: str) -> Iterator[HeaderField]:
    """Yield the header of a file, field by field, with the bytes each stands in."""
    from aprfmt.formats.apr import fields

    return fields.header_fields(buffer, where)


def keys(architectures: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
    """Return the typed keys and their aliases."""
    from aprfmt.formats.apr.metadata import ALIASES, TYPED

    names = [key.name for key in TYPED]
    return dict.fromkeys([*names, *(alias for group in ALIASES.values() for alias in group)], ())


FORMAT = FormatSpec(
    name="apr",
    extensions=(".apr",),
    recognise=recognise,
    open_source=open_source,
    open_sink=open_sink,
    holds=lambda row: row.apr is not None,
    style="hf",
    header_fields=header_fields,
    structure=structure,
    carries=True,
    max_name_bytes=MAX_NAME_BYTES,
    max_dims=MAX_DIMS,
    order=order,
    rewrites=True,
    values=ValueRules(keys=keys),
    checksum=lambda source: source.footer_matches(),
    collects=True,
)
