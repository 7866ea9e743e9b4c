"""APR v2, the container of the aprender project: read, and written with the same bytes.

Every file that is opened is tested for being APR, so what reads and writes it is imported only
once one is found.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aprfmt.base.protocols import Region, Sink, Source
from aprfmt.formats import FormatSpec, ValueRules
from aprfmt.formats.apr import layout
from aprfmt.formats.fields import HeaderField

if TYPE_CHECKING:
    from aprfmt.formats.damage import Structure

_MAGICS = (layout.MAGIC, *layout.LEGACY_MAGICS, *layout.REFUSED_MAGICS)


def recognise(head: bytes, size: int) -> bool:
    """Say whether a file is APR of any kind, or the manifest of an APR set."""
    if head.startswith(_MAGICS):
        return True
    return head.lstrip()[:1] == b"{" and b'"shard_count"' in head and b'"filename"' in head


def open_source(path: Path, *, partial: bool = False, damaged: bool = False) -> Source:
    """Open a file and the set it is of; see `reader.open_source`."""
    from aprfmt.formats.apr import reader

    return reader.open_source(path, partial=partial, damaged=damaged)


def structure(view: Region, where: str, /, *, partial: bool = False) -> "Structure":
    """Read one file's header; see `parse.parse`."""
    from aprfmt.formats.apr import parse

    return parse.parse(view, where, partial=partial)


def header_fields(view: Region, where: str) -> Iterator[HeaderField]:
    """Yield the header field by field; see `fields.header_fields`."""
    from aprfmt.formats.apr import fields

    return fields.header_fields(view, where)


def open_sink(path: Path, **options: Any) -> Sink:
    """Start writing `path`; the options are those of `writer.open_sink`."""
    from aprfmt.formats.apr import writer

    return writer.open_sink(path, **options)


def keys(architectures: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
    """Return the typed keys and their aliases."""
    from aprfmt.formats.apr.metadata import ALIASES, TYPED

    names = [key.name for key in TYPED]
    return dict.fromkeys([*names, *(alias for group in ALIASES.values() for alias in group)], ())


def footer_matches(source: Source) -> bool | None:
    """Compare an open file's bytes with its footer; None for a source of no file."""
    from aprfmt.formats.apr.source import AprSource

    return source.footer_matches() if isinstance(source, AprSource) else None


FORMAT = FormatSpec(
    name="apr",
    extensions=(".apr",),
    recognise=recognise,
    open_source=open_source,
    open_sink=open_sink,
    holds=layout.holds,
    style="hf",
    header_fields=header_fields,
    structure=structure,
    carries=True,
    max_name_bytes=layout.MAX_NAME_BYTES,
    max_dims=layout.MAX_DIMS,
    order=layout.order,
    rewrites=True,
    values=ValueRules(keys=keys),
    checksum=footer_matches,
    collects=True,
)
