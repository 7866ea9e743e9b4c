"""What a target format's conventions took away, written down so that the way back restores it.

A GGUF stores norms as float32 (gemma's with one added). Two records under `aprfmt.source.*` undo
that exactly: `encodings` names the encoding a role had in the source, and `restore` holds, for
values that narrowing does not give back bit for bit, the source's own bits: sparse as
[index, bits] pairs, or the whole tensor as base64 where most elements need it.
"""

import base64
import json
from collections.abc import Mapping
from typing import Any

from aprfmt.errors import CodecError, FormatError
from aprfmt.tensor import Value

ENCODINGS_KEY = "aprfmt.source.encodings"
RESTORE_KEY = "aprfmt.source.restore"
_SPARSE_SHARE = 8  # at most one element in eight is stored as a pair; beyond that, all of them


class Restoration:
    """Per role key: the source encoding, and the bits that narrowing alone does not give back."""

    def __init__(self) -> None:
        self.encodings: dict[str, str] = {}
        self.patches: dict[str, Value] = {}

    def record(self, key: str, encoding: str, source_bits: Any, narrowed_bits: Any) -> None:
        """Note a role's encoding and the elements where `narrowed_bits` is not `source_bits`.

        Both are unsigned integer arrays of one shape: the stored patterns in the source, and what
        undoing the target's layout and narrowing again would give.
        """
        import numpy as np

        self.encodings[key] = encoding
        source, narrowed = source_bits.reshape(-1), narrowed_bits.reshape(-1)
        wrong = np.flatnonzero(source != narrowed)
        if not wrong.size:
            return
        if wrong.size * _SPARSE_SHARE <= source.size:
            self.patches[key] = [[int(i), int(source[i])] for i in wrong]
        else:
            little = source.astype(source.dtype.newbyteorder("<"))
            self.patches[key] = base64.b64encode(little.tobytes()).decode()

    def metadata(self) -> dict[str, Value]:
        """Return the two keys, each only if it says something."""
        found: dict[str, Value] = {}
        if self.encodings:
            found[ENCODINGS_KEY] = json.dumps(self.encodings, separators=(",", ":"))
        if self.patches:
            found[RESTORE_KEY] = json.dumps(self.patches, separators=(",", ":"))
        return found


def read_restoration(metadata: Mapping[str, Value], where: str) -> Restoration:
    """Read the records of a file of ours; FormatError where they are damaged."""
    from aprfmt.formats.jsonio import loads

    found = Restoration()
    for key, target in ((ENCODINGS_KEY, found.encodings), (RESTORE_KEY, found.patches)):
        text = metadata.get(key)
        if text is None:
            continue
        value = (
            loads(text.encode(), f"{where}: {key}", max_bytes=64 << 20)
            if isinstance(text, str)
            else text
        )
        if not isinstance(value, Mapping):
            raise FormatError(f"{where}: {key} holds no JSON object; it is damaged")
        target.update(value)
    return found


def restore_bits(bits: Any, patch: Value, where: str) -> Any:
    """Return `bits` (unsigned integers, any shape) with the recorded source bits put back."""
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
        raise CodecError(f"{where}: its record under {RESTORE_KEY} is damaged: {error}") from error
    return result
