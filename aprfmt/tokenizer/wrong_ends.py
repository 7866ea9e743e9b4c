"""Ids recorded as an end that no answer ends with: ordinary text, or a turn's beginning.

A generation that ends at ordinary text is cut there, and one that ends at what begins a turn runs
on to the next turn first. Some chat templates write nothing after an answer (GLM); their models do
stop where the next turn begins, and are left alone.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from aprfmt.errors import AprfmtError
from aprfmt.formats import suffix_to_write
from aprfmt.tokenizer.conversations import turn_tokens
from aprfmt.tokenizer.hf_json import id_list
from aprfmt.tokenizer.keys import (
    CONTROL,
    END_ROLES,
    END_TEXTS,
    GENERATION_CONFIG,
    IDS,
    NORMAL,
    USER_DEFINED,
)
from aprfmt.tokenizer.stored_tokenizer import StatedTokenizer

FILES = (GENERATION_CONFIG, "config.json")


@dataclass(frozen=True, slots=True)
class WrongEnd:
    """An id that `place` records as an end: what it is in words, and the `set` command for it."""

    place: str
    says: str
    command: str


def find_wrong_ends(side: StatedTokenizer) -> list[WrongEnd]:
    """Return the recorded ends of generations that are ordinary text or begin a turn.

    [] for a vocabulary without control tokens. Ids that have no token are left to other checks.
    """
    tokens, types = side.vocabulary.tokens, side.vocabulary.types
    if CONTROL not in types:
        return []
    special = {t: i for i, t in enumerate(tokens) if types[i] in (CONTROL, USER_DEFINED)}
    end, openings = None, frozenset[str]()
    if side.template is not None:
        try:
            where = side.carried.where
            end, openings = turn_tokens(side.template, side.special_token_texts, special, where)
        except AprfmtError:
            pass  # the check of the template says it
    found = []
    for place, ids in _recorded_ends(side):
        wrong = {}
        for i in ids:
            if not 0 <= i < len(tokens):
                continue
            if types[i] == NORMAL and tokens[i] not in END_TEXTS:
                wrong[i] = f"{i} is {tokens[i]!r}, a piece of ordinary text: answers are cut there"
            elif end is not None and tokens[i] in openings and special[end] not in ids:
                wrong[i] = f"{i} is {tokens[i]!r}, which begins a turn; {end!r} ends one"
        if wrong:
            command = _set_end_command(side, place, ids, wrong, special, end)
            found.append(WrongEnd(place, "; ".join(wrong.values()), command))
    return found


def _recorded_ends(side: StatedTokenizer) -> Iterator[tuple[str, list[int]]]:
    """Yield (key, ids) of every key that records an end: "FILE:KEY", or a key of a GGUF."""
    if side.uses_lists:
        stated = side.carried.token_ids()
        yield from ((IDS[role].gguf, [stated[role]]) for role in END_ROLES if role in stated)
        return
    config = side.carried.model.config or {}
    for file, values in zip(FILES, (side.carried.parse_file(FILES[0]), config), strict=True):
        ids = id_list(values.get("eos_token_id"))  # what is no id is left to another check
        if ids:
            yield f"{file}:eos_token_id", ids


def _set_end_command(
    side: StatedTokenizer,
    place: str,
    ids: list[int],
    wrong: dict[int, str],
    special: dict[str, int],
    end: str | None,
) -> str:
    """Return the command that records the right end at a key; "" if it is not known.

    The right one is the token that ends a turn, else the tokenizer's own end, else one of a known
    text.
    """
    eos = side.vocabulary.ids.get("eos")
    known = next((special[text] for text in END_TEXTS if text in special), None)
    right = special[end] if end is not None else known if eos in wrong or eos is None else eos
    if right is None:
        return ""
    kept = [i for i in ids if i not in wrong]
    value = right if len(ids) == 1 else list(dict.fromkeys([right, *kept]))
    model = side.carried.model
    path = Path(model.path if model.folder is None else model.folder.path)
    alone = model.folder is None
    fixed = f"{path.stem}-fixed{suffix_to_write(path)}" if alone else f"{path.name}-fixed"
    return (
        f"aprfmt set {quote(str(path))} {quote(f'{place}={json.dumps(value)}')} -o {quote(fixed)}"
    )
