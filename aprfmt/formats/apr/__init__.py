"""APR v2, the container of the aprender project: read, and written with the same bytes.

A file that begins like one is tested for being APR: what reads and writes it is imported only
once one is found.
"""

from aprfmt.base.registry import LazyFunction
from aprfmt.formats import FormatSpec, ValueRules
from aprfmt.formats.apr import layout

_MAGICS = (layout.MAGIC, *layout.LEGACY_MAGICS, *layout.REFUSED_MAGICS)


def recognise(head: bytes, size: int) -> bool:
    """Return whether a file is APR of any kind, or the manifest of an APR set.

    `size` is not used: all formats have a function of this signature.
    """
    if head.startswith(_MAGICS):
        return True
    return head.lstrip()[:1] == b"{" and b'"shard_count"' in head and b'"filename"' in head


FORMAT = FormatSpec(
    name="apr",
    extensions=(".apr",),
    recognise=recognise,
    open_source=LazyFunction("aprfmt.formats.apr.reader:open_source"),
    open_sink=LazyFunction("aprfmt.formats.apr.writer:open_sink"),
    holds=layout.can_store,
    style="hf",
    header_fields=LazyFunction("aprfmt.formats.apr.fields:header_fields"),
    structure=LazyFunction("aprfmt.formats.apr.parse:parse"),
    carries=True,
    max_name_bytes=layout.MAX_NAME_BYTES,
    max_dims=layout.MAX_DIMS,
    order=layout.storage_order,
    rewrites=True,
    values=ValueRules(keys=LazyFunction("aprfmt.formats.apr.metadata:typed_keys")),
    checksum=LazyFunction("aprfmt.formats.apr.source:footer_matches"),
    collects=True,
)
