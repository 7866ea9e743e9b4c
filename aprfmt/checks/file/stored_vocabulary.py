"""Reads the vocabulary of a model as it is stored, from metadata lists or tokenizer.json."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aprfmt.checks.records import NotRun
from aprfmt.errors import FormatError
from aprfmt.tokenizer.hf_json import effective_added_tokens, stored_vocab
from aprfmt.tokenizer.keys import MERGES, SCORES, TOKENS, TYPES
from aprfmt.tokenizer.stored_parts import Carried


@dataclass(frozen=True)
class StoredVocabulary:
    """A vocabulary as stored: `tokens` by id (None for an id without one), `where` it is, `merges`.

    `lists` are the lengths of lists that must be as long as the tokens. `plain` counts the ids up
    to the last token that was not added to the vocabulary. `dense` is False for a tokenizer.json,
    whose ids need not be dense.
    """

    where: str
    tokens: Sequence[str | None]
    merges: Sequence[tuple[str, str] | str] | None
    lists: Mapping[str, int]
    plain: int
    dense: bool


def read_vocabulary(carried: Carried) -> StoredVocabulary:
    """Return the stored vocabulary: the metadata's lists, else tokenizer.json.

    Raises FormatError for damaged ones, NotRun where neither holds tokens.
    """
    tokens = carried.list_value(TOKENS, str)
    if tokens:
        lists = {
            carried.key_text(key): length
            for key in (SCORES, TYPES)
            if (length := carried.list_length(key)) is not None
        }
        merges = carried.list_value(MERGES, str)
        return StoredVocabulary(carried.key_text(TOKENS), tokens, merges, lists, len(tokens), True)
    data = carried.parse_tokenizer_json()
    if data is None:
        raise NotRun("the model carries no list of tokens")
    return _vocabulary_from_json(carried, data)


def _vocabulary_from_json(carried: Carried, data: Mapping[str, Any]) -> StoredVocabulary:
    """Return the vocabulary of a parsed tokenizer.json; FormatError where it is damaged."""
    model = data.get("model")
    if not isinstance(model, Mapping):
        raise FormatError(f"{carried.origin}: has no object `model`; it is no tokenizer.json")
    known, scores = stored_vocab(model, carried.origin)
    by_id = {i: token for token, i in known.items()}
    if scores is not None:
        by_id = {i: row[0] for i, row in enumerate(model["vocab"])}
    count = len(model["vocab"])
    if len(by_id) != count:
        twice = f"{count} tokens have {len(by_id)} ids"
        raise FormatError(f"{carried.origin}: {twice}; every token has an id of its own")
    plain = max(by_id, default=-1) + 1
    by_id.update(
        (row["id"], row["content"]) for row in effective_added_tokens(data, carried, known)
    )
    merges = model.get("merges")
    if merges is not None and not isinstance(merges, list):
        raise FormatError(f"{carried.origin}: model.merges is {type(merges).__name__}, not a list")
    pairs = [tuple(row) if isinstance(row, list) else row for row in merges or ()]
    size = max(by_id, default=-1) + 1
    tokens = [by_id.get(i) for i in range(size)]
    return StoredVocabulary(
        carried.origin, tokens, pairs if merges is not None else None, {}, plain, False
    )
