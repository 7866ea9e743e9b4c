"""GGUF, the container of llama.cpp: versions 2 and 3 read, version 3 written.

A file that begins like one is tested for being GGUF: what reads and writes it is imported only
once one is found.
"""

from typing import Any

from aprfmt.base.registry import LazyFunction
from aprfmt.formats import FormatSpec, ValueRules
from aprfmt.formats.gguf.layout import ARRAY, MAGIC, MAX_DIMS, MAX_NAME_BYTES, TYPE_BY_NAME

_KEYS = LazyFunction("aprfmt.formats.gguf.known_keys:known_keys")


def can_store_value(value: Any) -> bool:
    """Return whether a plain value fits a GGUF key: text, number, or list of one kind of them."""
    if isinstance(value, list):
        return (
            bool(value) and len({type(item) for item in value}) == 1 and can_store_value(value[0])
        )
    return isinstance(value, (str, int, float))


FORMAT = FormatSpec(
    name="gguf",
    extensions=(".gguf",),
    recognise=lambda head, size: head.startswith(MAGIC),
    open_source=LazyFunction("aprfmt.formats.gguf.reader:open_source"),
    open_sink=LazyFunction("aprfmt.formats.gguf.writer:open_sink"),
    holds=lambda row: row.ggml is not None,
    style="gguf",
    header_fields=LazyFunction("aprfmt.formats.gguf.fields:header_fields"),
    structure=LazyFunction("aprfmt.formats.gguf.parse:parse"),
    vectors_f32=True,
    takes=can_store_value,
    values=ValueRules(
        tuple(n for n in TYPE_BY_NAME if n != ARRAY.name), _KEYS, writer_keys=("split.",)
    ),
    collects=True,
    max_name_bytes=MAX_NAME_BYTES,
    max_dims=MAX_DIMS,
)
