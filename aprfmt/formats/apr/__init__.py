"""APR v2, the container of the aprender project: read, and written with the same bytes.

Every file that is opened is tested for being APR, so what reads and writes it is imported only
once one is found.
"""

from aprfmt.base.registry import late
from aprfmt.formats import FormatSpec, ValueRules
from aprfmt.formats.apr import layout

_MAGICS = (layout.MAGIC, *layout.LEGACY_MAGICS, *layout.REFUSED_MAGICS)


def recognise(head: bytes, size: int) -> bool:
    """Say whether a file is APR of any kind, or the manifest of an APR set."""
    if head.startswith(_MAGICS):
        return True
    return head.lstrip()[:1] == b"{" and b'"shard_count"' in head and b'"filename"' in head


FORMAT = FormatSpec(
    name="apr",
    extensions=(".apr",),
    recognise=recognise,
    open_source=late("aprfmt.formats.apr.reader:open_source"),
    open_sink=late("aprfmt.formats.apr.writer:open_sink"),
    holds=layout.holds,
    style="hf",
    header_fields=late("aprfmt.formats.apr.fields:header_fields"),
    structure=late("aprfmt.formats.apr.parse:parse"),
    carries=True,
    max_name_bytes=layout.MAX_NAME_BYTES,
    max_dims=layout.MAX_DIMS,
    order=layout.order,
    rewrites=True,
    values=ValueRules(keys=late("aprfmt.formats.apr.metadata:keys")),
    checksum=late("aprfmt.formats.apr.source:footer_matches"),
    collects=True,
)
