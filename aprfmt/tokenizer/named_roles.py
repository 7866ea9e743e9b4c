"""Special ids whose token is named as another role's, and ids that two files of one model state.

A vocabulary with `<s>`, `</s>` and `<unk>` says by these names which token begins a text, which
ends it, and which stands for an unknown piece. A special id (a *role*, such as bos) that is the id
of a token named as another role was written for another vocabulary: llama's ids 1, 2 and 0, say,
with a vocabulary that counts otherwise.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from aprfmt.tokenizer.hf_json import id_list, token_statements
from aprfmt.tokenizer.keys import CONTROL, END_ROLES, GENERATION_CONFIG, IDS, UNKNOWN, USER_DEFINED
from aprfmt.tokenizer.stored_tokenizer import StatedTokenizer

# Texts that begin and end a text, by the vocabulary that names both.
PAIRS = (
    ("<s>", "</s>"), ("<bos>", "<eos>"), ("<|begin_of_text|>", "<|end_of_text|>"),
    ("<|startoftext|>", "<|endoftext|>"), ("<|bos|>", "<|eos|>"), ("[BOS]", "[EOS]"),
    ("<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
)  # fmt: skip
UNKNOWN_TEXTS = ("<unk>", "[UNK]", "<|unk|>", "<UNK>")
FILES = ("config.json", GENERATION_CONFIG)

Meaning = Literal["begins a text", "ends a text", "stands for unknown pieces"]


@dataclass(frozen=True, slots=True)
class MisnamedRole:
    """A special id whose token's name is that of another role.

    `place` is the key that states it ("FILE:KEY", or a key of a GGUF) and `says` what is wrong, in
    words. `assignment` is the KEY=VALUE that mends it. `fails`: no reader is right with that id.
    """

    place: str
    says: str
    assignment: str
    fails: bool


def misnamed_roles(side: StatedTokenizer) -> list[MisnamedRole]:
    """Return the stated ids of bos, eos and unk whose token is named as that of another role.

    The vocabulary must have a token with the role's own name. An id that is also the end of a text
    may be named so, as one token is both in some models.
    """
    return find_misnamed(_stated_ids(side), side.vocabulary.tokens, side.vocabulary.types)


def find_misnamed(
    stated: Iterable[tuple[str, str, int]], tokens: Sequence[str], types: Sequence[int]
) -> list[MisnamedRole]:
    """Return those of the `stated` ids whose token is named as that of another role.

    `stated` are (key that states it, role, id). A vocabulary without a token named as the role
    shows no such id. `tokens` and `types` are those of a vocabulary by id, or of its first ids.
    """
    meanings = _meanings(tokens, types)
    own: dict[Meaning, int] = {}
    for i, meaning in meanings.items():
        own.setdefault(meaning, i)
    stated = list(stated)
    ends = {i for _, role, i in stated if role in END_ROLES}
    found = []
    for place, role, i in stated:
        due: Meaning | None = _MEANING_OF.get(role)
        meant = meanings.get(i)
        shared = role not in END_ROLES and i in ends and meant == "ends a text"
        if due is None or due not in own or meant in (None, due) or shared:
            continue
        right = own[due]
        says = f"{role} is {i}, {tokens[i]!r}, which {meant}; {tokens[right]!r} ({right}) {due}"
        value = json.dumps(tokens[right] if place.endswith("_token") else right)
        found.append(MisnamedRole(place, says, f"{place}={value}", role != "unk"))
    return found


_MEANING_OF: Mapping[str, Meaning] = {
    "bos": "begins a text",
    "unk": "stands for unknown pieces",
    **dict.fromkeys(END_ROLES, "ends a text"),
}


def _meanings(tokens: Sequence[str], types: Sequence[int]) -> dict[int, Meaning]:
    """Return {id: what its name says} of the special tokens with a name of PAIRS or UNKNOWN_TEXTS.

    The two tokens of a row of PAIRS count where the vocabulary has both: alone, `<|endoftext|>`
    says nothing.
    """
    kinds = (UNKNOWN, CONTROL, USER_DEFINED)
    special = {
        text: i for i, (text, kind) in enumerate(zip(tokens, types, strict=False)) if kind in kinds
    }
    found: dict[int, Meaning] = {}
    for begin, end in PAIRS:
        if begin in special and end in special:
            found[special[begin]] = "begins a text"
            found[special[end]] = "ends a text"
    known = (special[text] for text in UNKNOWN_TEXTS if text in special)
    return found | dict.fromkeys(known, "stands for unknown pieces")


def _stated_ids(side: StatedTokenizer) -> Iterator[tuple[str, str, int]]:
    """Yield (place, role, id) of every special id that files or metadata state.

    `place` is "FILE:KEY", or a key of a GGUF. Ids without a token are left to another check.
    """
    count = len(side.vocabulary.tokens)
    if side.uses_lists:
        for role, i in side.carried.token_ids().items():
            if i < count:
                yield IDS[role].gguf, role, i
        return
    ids = {text: i for i, text in enumerate(side.vocabulary.tokens)}
    for role, (text, place) in token_statements(side.carried).items():
        if text in ids:
            yield place.replace(": ", ":"), role, ids[text]
    for name in FILES:
        for role, each in _configured_ids(side, name).items():
            if len(each) == 1 and 0 <= each[0] < count:
                yield f"{name}:{role}_token_id", role, each[0]


def _configured_ids(side: StatedTokenizer, name: str) -> dict[str, list[int]]:
    """Return {role: ids} of bos and eos in config.json or generation_config.json."""
    parsed = side.carried.parse_file(name) if name != "config.json" else side.carried.model.config
    values = parsed or {}
    found = {role: id_list(values.get(f"{role}_token_id")) for role in ("bos", "eos")}
    return {role: ids for role, ids in found.items() if ids}


def contradicted_ids(side: StatedTokenizer) -> Iterator[tuple[str, str]]:
    """Yield (key, sentence) where the ids of config.json are not those of the tokenizer.

    Both are files of one folder. An id that generation_config.json lists does not contradict, as a
    model may have several ends. Nothing is yielded for a tokenizer of a GGUF's lists.
    """
    if side.uses_lists:
        return
    ids = {text: i for i, text in enumerate(side.vocabulary.tokens)}
    config, generation = (_configured_ids(side, name) for name in FILES)
    for role, (text, place) in token_statements(side.carried).items():
        own, stated = ids.get(text or ""), config.get(role, generation.get(role, []))
        if own is None or not stated or own in (*stated, *generation.get(role, [])):
            continue
        name = FILES[0] if role in config else FILES[1]
        texts = [repr(side.vocabulary.tokens[i]) for i in stated if 0 <= i < len(ids)]
        yield (
            f"{name}:{role}_token_id",
            f"{role} is {', '.join(map(str, stated))} ({', '.join(texts) or 'no token'}), and "
            f"{place} says {text!r} ({own})",
        )
