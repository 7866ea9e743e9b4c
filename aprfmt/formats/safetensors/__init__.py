"""safetensors, the container of the Hugging Face Hub: files, and sharded models by their index.

Listing files is the most frequent use, so code for writing and `hex` is imported only when needed.
"""

from aprfmt.base.registry import LazyFunction
from aprfmt.formats import FormatSpec, ValueRules
from aprfmt.formats.safetensors.layout import can_store, fill_header, is_json, storage_order
from aprfmt.formats.safetensors.parse import parse
from aprfmt.formats.safetensors.reader import open_source


def recognise(head: bytes, size: int) -> bool:
    """Return whether a file is safetensors, whole or damaged, or the index of a sharded model.

    A file begins with the header's length in eight bytes; in a text file these eight bytes would
    be a number larger than any file. `size` is not used.
    """
    if is_json(head):
        return b'"weight_map"' in head and b".safetensors" in head
    if head[8:].lstrip()[:1] != b"{":
        return False
    return not all(32 <= byte < 127 or byte in b"\t\r\n" for byte in head[:8])


FORMAT = FormatSpec(
    name="safetensors",
    extensions=(".safetensors",),
    recognise=recognise,
    open_source=open_source,
    open_sink=LazyFunction("aprfmt.formats.safetensors.writer:open_sink"),
    holds=can_store,
    keeps=True,
    style="hf",
    header_fields=LazyFunction("aprfmt.formats.safetensors.fields:header_fields"),
    structure=parse,
    fill=fill_header,
    order=storage_order,
    rewrites=True,
    collects=True,
    weights_name="model.safetensors",
    takes=lambda value: isinstance(value, str),
    values=ValueRules(keys=lambda architectures: {"format": ()}),
)
