"""Carry a GGUF's token scores and types through formats that have no keys for them.

A GGUF has a score and a type for every token. tokenizer.json has neither for a BPE: scores are made
again from the order of merges, and types from what is an added token. The loader of a GGUF may use
both, so those of the source are kept under one key of safetensors' `__metadata__`, or of an APR's,
as {"tokens": SHA-256, "spaced": ids, "scores": ..., "types": ...}: little-endian float32 and int32,
compressed by zlib, as base64. They come back only to the very tokens they were of. A blank is
U+2581 in most tokens of SentencePiece and a space in user-defined ones: `spaced` are those of the
source that have a space, since its types need not be what a tokenizer.json makes them.
"""

import base64
import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from aprfmt.base.protocols import TypedValue, Value
from aprfmt.errors import FormatError
from aprfmt.formats.gguf.value_encoding import is_list
from aprfmt.model.carried_files import json_object
from aprfmt.tokenizer import keys
from aprfmt.tokenizer.vocabulary import BLANK

if TYPE_CHECKING:
    from aprfmt.model import Model

KEY = "aprfmt.gguf_vocabulary"
_LISTS = {"scores": (keys.SCORES, "<f4"), "types": (keys.TYPES, "<i4")}
_MOST = 1 << 24  # tokens


def vocabulary_record(model: "Model") -> str | None:
    """Return a GGUF's scores and types as JSON text, or the text that a model carries of them.

    None without either. An APR made from a GGUF has both lists under its own keys.
    """
    of_gguf = keys.APR_GGUF in model.metadata
    if model.key_style != "gguf" and not of_gguf:
        carried = model.metadata.get(KEY)
        return carried if isinstance(carried, str) else None
    tokens = model.metadata.get(keys.TOKENS.apr if of_gguf else keys.TOKENS.gguf)
    if not is_list(tokens):
        return None
    spaced = [i for i, token in enumerate(tokens) if " " in token]
    if _spell_blanks(tokens, spaced) != list(tokens):
        return None  # blanks of both kinds in one token
    found: dict[str, Any] = {"tokens": _token_digest(tokens), "spaced": spaced}
    for name, (key, kind) in _LISTS.items():
        values = model.metadata.get(key.apr if of_gguf else key.gguf)
        if is_list(values) and len(values) == len(tokens):
            raw = np.asarray(values, kind).tobytes()
            found[name] = base64.b64encode(zlib.compress(raw)).decode("ascii")
    return json.dumps(found) if len(found) > 2 else None


def restored_vocabulary(
    model: "Model", made: Mapping[str, Value | TypedValue]
) -> dict[str, Value | TypedValue]:
    """Return the GGUF keys of tokens, scores and types that a model carries; {} without a record.

    `made` are the keys of the GGUF to be written; they must have the tokens of the record. Raises
    FormatError for a damaged record.
    """
    text = model.metadata.get(KEY)
    tokens = made.get(keys.TOKENS.gguf)
    if model.key_style == "gguf" or not isinstance(text, str) or not isinstance(tokens, TypedValue):
        return {}
    where = f"{model.path}: {KEY}"
    record = json_object(text, where)
    if not is_list(tokens.value) or record.get("tokens") != _token_digest(tokens.value):
        return {}  # tokens were added or taken away since: what is made of these is right
    spaced = record.get("spaced")
    if not isinstance(spaced, list) or not all(type(i) is int for i in spaced):
        raise FormatError(f"{where}: spaced is no list of token ids; it is damaged")
    found: dict[str, Value | TypedValue] = {
        keys.TOKENS.gguf: TypedValue(_spell_blanks(tokens.value, spaced), keys.TOKENS.type)
    }
    for name, (key, kind) in _LISTS.items():
        if name in record:
            found[key.gguf] = TypedValue(
                _unpack_numbers(record[name], kind, len(tokens.value), where), key.type
            )
    return found


def _unpack_numbers(text: object, kind: str, count: int, where: str) -> list[float] | list[int]:
    """Return the numbers of a list in a record; FormatError unless there are `count` of them.

    No more bytes than these take are decompressed.
    """
    size = count * np.dtype(kind).itemsize
    try:
        packed = base64.b64decode(str(text), validate=True)
        raw = zlib.decompressobj().decompress(packed, size + 1)
    except (ValueError, zlib.error) as error:
        raise FormatError(f"{where}: holds no compressed numbers: {error}") from None
    if count > _MOST or len(raw) != size:
        raise FormatError(
            f"{where}: holds {len(raw)} bytes or more for {count} tokens; it is damaged"
        )
    found: list[float] | list[int] = np.frombuffer(raw, kind).tolist()
    return found


def _spell_blanks(tokens: Sequence[str], spaced: Sequence[int]) -> list[str]:
    """Return tokens with a space for U+2581 in those of the ids `spaced`; the others unchanged."""
    ids = frozenset(spaced)
    return [
        token.replace(BLANK, " ") if i in ids else token.replace(" ", BLANK)
        for i, token in enumerate(tokens)
    ]


def _token_digest(tokens: Sequence[str]) -> str:
    """Return the SHA-256 of tokens as hex; a space and U+2581 count as the same."""
    total = hashlib.sha256()
    for token in tokens:
        total.update(json.dumps(token.replace(BLANK, " ")).encode("ascii") + b"\n")
    return total.hexdigest()
