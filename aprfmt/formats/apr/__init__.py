"""APR v2, the container of the aprender project: read, and written with the same bytes.

Every file that is opened is tested for being APR, so what reads and writes it is imported only
once one is found.
"""

from aprfmt.base.registry import lazy_function
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
    open_source=lazy_function("aprfmt.formats.apr.reader:open_source"),
    open_sink=lazy_function("aprfmt.formats.apr.writer:open_sink"),
    holds=layout.can_store,
    style="hf",
    header_fields=lazy_function("aprfmt.formats.apr.fields:header_fields"),
    structure=lazy_function("aprfmt.formats.apr.parse:parse"),
    carries=True,
    max_name_bytes=layout.MAX_NAME_BYTES,
    max_dims=layout.MAX_DIMS,
    order=layout.storage_order,
    rewrites=True,
    values=ValueRules(keys=lazy_function("aprfmt.formats.apr.metadata:typed_keys")),
    checksum=lazy_function("aprfmt.formats.apr.source:footer_matches"),
    collects=True,
)
