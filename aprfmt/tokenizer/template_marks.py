"""Control tokens that a chat template writes, and whether the tokenizer finds them whole.

A mark is a token that the template writes whole (`<|im_start|>`). It works only if the tokenizer
splits it off the text before everything else; otherwise it is cut into tokens of plain text.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from aprfmt.errors import AprfmtError
from aprfmt.tokenizer.base import Engine
from aprfmt.tokenizer.conversations import answer_end, named_tokens, render_conversations
from aprfmt.tokenizer.engine_defaults import TAKEN_FOR_CONTROL
from aprfmt.tokenizer.keys import CONTROL, UNKNOWN, USER_DEFINED
from aprfmt.tokenizer.loading import engine_of_lists, load_tokenizer
from aprfmt.tokenizer.stored_tokenizer import StatedTokenizer

# Texts in brackets in a template, such as <think>, <tool_call> or [INST].
_BRACKETED = re.compile(r"</?[^<>\s]{1,40}>|\[/?[A-Z_]{2,30}\]")
_WHOLE = (CONTROL, USER_DEFINED, UNKNOWN)


@dataclass(frozen=True, slots=True)
class Mark:
    """One token that a template names: its id, and whether a test conversation contains it.

    `split_whole`: it is split off a text before everything else.
    """

    text: str
    id: int
    written: bool
    split_whole: bool


@dataclass(frozen=True, slots=True)
class CutMark:
    """A mark that the tokenizer encodes as other ids. `pieces` are the texts of `ids`.

    `healed`: llama.cpp overrides its type, so that it is whole there.
    """

    mark: Mark
    ids: tuple[int, ...]
    pieces: tuple[str, ...]
    healed: bool

    @property
    def text(self) -> str:
        """What the mark is encoded as, in words."""
        if not self.ids:
            return f"{self.mark.text!r} ({self.mark.id}) is not split off whole"
        shown = " ".join(map(str, self.ids[:8]))
        return f"{self.mark.text!r} ({self.mark.id}) is cut into {shown} ({'|'.join(self.pieces)})"


def template_marks(side: StatedTokenizer) -> list[Mark]:
    """Return the tokens of a vocabulary that its chat template writes; [] without a template.

    [] too for a template that cannot be rendered: another check reports it.
    """
    template = side.template
    if template is None:
        return []
    try:
        texts = render_conversations(template, side.special_token_texts, side.carried.where)
    except AprfmtError:
        return []
    made = "\n".join(text for status, text in texts.values() if status == "ok")
    named = dict.fromkeys([*named_tokens(texts), *_BRACKETED.findall(made + template)])
    by_text = {token: i for i, token in enumerate(side.vocabulary.tokens)}
    whole = _tokens_split_off(side)
    return [
        Mark(text, by_text[text], text in made, text in whole) for text in named if text in by_text
    ]


def turn_end_of(side: StatedTokenizer, marks: list[Mark]) -> int | None:
    """Return the id of the mark that the template writes after an answer; None without one.

    `marks` are the template's marks.
    """
    if side.template is None or not marks:
        return None
    ids = {mark.text: mark.id for mark in marks}
    try:
        end = answer_end(side.template, side.special_token_texts, ids, side.carried.where)
    except AprfmtError:
        return None
    return None if end is None else ids[end]


def _tokens_split_off(side: StatedTokenizer) -> set[str]:
    """Return the texts of the tokens that are split off a text whole."""
    if not side.uses_lists:
        return {row["content"] for row in side.added_tokens}
    rows = zip(side.vocabulary.tokens, side.vocabulary.types, strict=True)
    return {token for token, kind in rows if kind in _WHOLE}


def cut_marks(side: StatedTokenizer, marks: list[Mark]) -> Iterator[CutMark]:
    """Yield those of the template's marks (`marks`) that the tokenizer does not keep whole.

    Only marks that may be split are encoded; one whose own id is among the result is whole. Where
    no engine can encode the text, every mark that may be split is yielded, with () as its ids.
    """
    doubtful = [mark for mark in marks if not mark.split_whole]
    if not doubtful:
        return
    engine = _reader_engine(side)
    for mark in doubtful:
        ids = () if engine is None else tuple(engine.encode(mark.text, False, True))
        if mark.id in ids:
            continue
        pieces = tuple((engine and engine.token(i)) or f"[{i}]" for i in ids[:8])
        healed = side.uses_lists and mark.text in TAKEN_FOR_CONTROL
        yield CutMark(mark, ids, pieces, healed)


def _reader_engine(side: StatedTokenizer) -> Engine | None:
    """Return the engine that the usual programs for the format encode with; None if unknown."""
    if not side.uses_lists:
        return load_tokenizer(side.carried.model).engine
    try:
        return engine_of_lists(side.vocabulary, side.carried.where) if side.encodes else None
    except AprfmtError:
        return None
