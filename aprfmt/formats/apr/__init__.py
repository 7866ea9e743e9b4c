"""APR v2, the container of the aprender project: read, and written with the same bytes.

Listing files is the most frequent use, so code for writing and `hex` is imported only when needed.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aprfmt.base.protocols import Sink, Source
from aprfmt.formats import FormatSpec, ValueRules
from aprfmt.formats.apr import layout
from aprfmt.formats.apr.fields import header_fields
from aprfmt.formats.apr.metadata import ALIASES, TYPED
from aprfmt.formats.apr.parse import parse
from aprfmt.formats.apr.reader import open_source
from aprfmt.formats.apr.source import AprSource

_MAGICS = (layout.MAGIC, *layout.LEGACY_MAGICS, *layout.REFUSED_MAGICS)


def recognise(head: bytes, size: int) -> bool:
    """Say whether a file is APR of any kind, or the manifest of an APR set."""
    if head.startswith(_MAGICS):
        return True
    return head.lstrip()[:1] == b"{" and b'"shard_count"' in head and b'"filename"' in head


def open_sink(path: Path, **options: Any) -> Sink:
    """Start writing `path`; the options are those of `writer.open_sink`."""
    from aprfmt.formats.apr import writer

    return writer.open_sink(path, **options)


def keys(architectures: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
    """Return the typed keys and their aliases."""
    names = [key.name for key in TYPED]
    return dict.fromkeys([*names, *(alias for group in ALIASES.values() for alias in group)], ())


def footer_matches(source: Source) -> bool | None:
    """Compare an open file's bytes with its footer; None for a source of no file."""
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
    structure=parse,
    carries=True,
    max_name_bytes=layout.MAX_NAME_BYTES,
    max_dims=layout.MAX_DIMS,
    order=layout.order,
    rewrites=True,
    values=ValueRules(keys=keys),
    checksum=footer_matches,
    collects=True,
)
