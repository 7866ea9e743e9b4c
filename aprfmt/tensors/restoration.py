"""Record the bits that a target format's conventions lose, so that converting back restores them.

A GGUF stores norms as float32 (gemma's with one added). Records under `aprfmt.source.*` undo that
exactly: `encodings` names the encoding a role had in the source, and `restore` holds, for values
that narrowing does not give back bit for bit, the source's own bits: sparse as [index, bits] pairs,
or the whole tensor as base64 where most elements need it. The other way round, `stored` holds the
bits a GGUF had where taking one away and adding it again loses them.
"""

import base64
import json
from collections.abc import Mapping
from typing import Any

from aprfmt.base.protocols import Value
from aprfmt.errors import CodecError, FormatError

ENCODINGS_KEY = "aprfmt.source.encodings"
RESTORE_KEY = "aprfmt.source.restore"
STORED_KEY = "aprfmt.source.stored"
_SPARSE_SHARE = 8  # at most one element in eight is stored as a pair; beyond that, all of them


class Restoration:
    """By role key: the source's encoding, and the bits that narrowing alone does not restore."""

    def __init__(self) -> None:
        """Start with no records."""
        self.encodings: dict[str, str] = {}
        self.patches: dict[str, Value] = {}
        self.stored: dict[str, Value] = {}

    def record_stored(self, key: str, source_bits: Any, again: Any) -> None:
        """Record a role's stored bits where undoing and applying its layout steps changes them.

        `source_bits` are the stored bits, `again` those after undoing and applying the steps; both
        are unsigned integers of one shape.
        """
        patch = _difference_patch(source_bits.reshape(-1), again.reshape(-1))
        if patch is not None:
            self.stored[key] = patch

    def record(self, key: str, encoding: str, source_bits: Any, narrowed_bits: Any) -> None:
        """Record a role's encoding, and the elements where `narrowed_bits` is not `source_bits`.

        Both are unsigned integer arrays of one shape: the stored patterns in the source, and what
        undoing the target's layout and narrowing again would give.
        """
        self.encodings[key] = encoding
        patch = _difference_patch(source_bits.reshape(-1), narrowed_bits.reshape(-1))
        if patch is not None:
            self.patches[key] = patch

    def metadata(self) -> dict[str, Value]:
        """Return {metadata key: JSON} of the records that are not empty."""
        found: dict[str, Value] = {}
        if self.encodings:
            found[ENCODINGS_KEY] = json.dumps(self.encodings, separators=(",", ":"))
        if self.patches:
            found[RESTORE_KEY] = json.dumps(self.patches, separators=(",", ":"))
        if self.stored:
            found[STORED_KEY] = json.dumps(self.stored, separators=(",", ":"))
        return found


def _difference_patch(source: Any, made: Any) -> Value | None:
    """Return the record that turns the flat bits `made` into `source`; None if they are equal.

    It is a list of [index, bits] pairs, or base64 of all bits where many differ.
    """
    import numpy as np

    wrong = np.flatnonzero(source != made)
    if not wrong.size:
        return None
    if wrong.size * _SPARSE_SHARE <= source.size:
        return [[int(i), int(source[i])] for i in wrong]
    little = source.astype(source.dtype.newbyteorder("<"))
    return base64.b64encode(little.tobytes()).decode()


def read_restoration(metadata: Mapping[str, Value], where: str) -> Restoration:
    """Return the records in a file's metadata; FormatError where they are damaged."""
    from aprfmt.formats.bounded_json import loads

    found = Restoration()
    records = (
        (ENCODINGS_KEY, found.encodings),
        (RESTORE_KEY, found.patches),
        (STORED_KEY, found.stored),
    )
    for key, target in records:
        text = metadata.get(key)
        if text is None:
            continue
        value = (
            loads(text, f"{where}: {key}", max_bytes=64 << 20) if isinstance(text, str) else text
        )
        if not isinstance(value, Mapping):
            raise FormatError(f"{where}: {key} holds no JSON object; it is damaged")
        target.update(value)
    return found


def restore_bits(bits: Any, patch: Value, where: str) -> Any:
    """Return a copy of `bits` with the recorded source bits put back.

    `bits` are unsigned integers of any shape, `patch` is the record, `where` the tensor's name for
    the error. Raises CodecError where the record is damaged.
    """
    import numpy as np

    result = bits.copy()
    flat = result.reshape(-1)
    try:
        if isinstance(patch, str):
            raw = base64.b64decode(patch, validate=True)
            flat[:] = np.frombuffer(raw, flat.dtype.newbyteorder("<"))
        elif patch is not None:
            pairs = np.asarray(patch, dtype=np.int64).reshape(-1, 2)
            flat[pairs[:, 0]] = pairs[:, 1].astype(flat.dtype)
    except (ValueError, IndexError, OverflowError, TypeError) as error:
        raise CodecError(
            f"{where}: its record under aprfmt.source.* is damaged: {error}"
        ) from error
    return result
