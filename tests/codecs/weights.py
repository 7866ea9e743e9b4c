"""Packed weights made of arrays, without a file."""

from collections.abc import Mapping

from aprfmt.codecs.dialect import StoredPart
from aprfmt.codecs.dialects import DIALECTS
from aprfmt.codecs.lattice import PackedWeight
from tests.codecs.packing import Array
from tests.conversion.dialect_folders import stored_row


def packed(dialect: str, config: Mapping[str, object], parts: dict[str, Array]) -> PackedWeight:
    """Return a weight as it is stored."""
    stored = {}
    for suffix, held in parts.items():
        encoding, shape, raw = stored_row(held)
        stored[suffix] = StoredPart(raw, encoding, shape)
    return PackedWeight(DIALECTS[dialect], stored, config)
