"""What is wrong with the recorded token ids of a run: padding, missing or repeated BOS.

A pass over wrong ids agrees with the model's pass over the same ids, so that no operation shows it.
Ids that somebody chose by hand are not judged: ids count as missing only where all others are what
the tokenizer makes of a text.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from aprfmt.causes.row import Cause
from aprfmt.errors import AprfmtError
from aprfmt.tokenizer.base import Tokenizer

CAUSE_ROWS = (
    Cause(
        "visible_padding", "capture", "bug",
        "Padding before the text is attended to: the run has no attention mask, or drops it.",
        "The recorded ids begin with padding, and the rows after it are those of a pass that "
        "sees it.",
        "The pass over all ids, padding too, agrees with the run.",
        next="nothing",
    ),
)  # fmt: skip

FEWEST = 8  # ids of a text that are told from chosen ones


@dataclass(frozen=True)
class WrongIds:
    """What is wrong with the ids of a run: the `cause`, a sentence, and the `right` ids.

    `missing`: ids are missing that the tokenizer puts there, which is no fault of ids that somebody
    chose by hand.
    """

    cause: str
    says: str
    right: tuple[int, ...]
    missing: bool = False


def leading_padding(tokenizer: Tokenizer, ids: Sequence[int]) -> int:
    """Return how many padding ids precede the text in `ids`; 0 where they may begin a text.

    A single id that is BOS or an end as well is no padding, nor is an id that the tokenizer
    itself puts before a text.
    """
    pad = tokenizer.pad_id
    count = next((at for at, i in enumerate(ids) if i != pad), len(ids))
    if pad is None or count == len(ids) or pad in tokenizer.prefix_ids:
        return 0
    before = tokenizer.prefix_ids
    if count > 1 or (before and tuple(ids[1:][: len(before)]) == before):
        return count
    begins = {tokenizer.bos_id, tokenizer.eos_id, *tokenizer.stop_ids, *_chat_begins(tokenizer)}
    return 0 if pad in begins else count


def _chat_begins(tokenizer: Tokenizer) -> list[int]:
    """Return a list of the first id of a chat by the template; [] without a usable template."""
    return _begun_chat(tokenizer)[:1]


def _begun_chat(tokenizer: Tokenizer) -> list[int]:
    """Return the ids of a short chat by the template; [] without a usable template."""
    try:
        return tokenizer.chat([{"role": "user", "content": "a"}])[1]
    except AprfmtError:
        return []


def repeated_beginning(
    tokenizer: Tokenizer, ids: Sequence[int]
) -> tuple[tuple[int, ...], int] | None:
    """Return (the ids that begin a text, how often they stand there) if that is more than once.

    They are what the tokenizer puts before a text, BOS, or the control token that the chat template
    begins with. None too for a BOS that is the id of padding, unless the tokenizer puts it.
    """
    before, bos = tokenizer.prefix_ids, tokenizer.bos_id
    ids = tuple(ids)
    first = before or ((bos,) if bos not in (None, tokenizer.pad_id) else ())
    if not _begins_with(ids, first, 2):
        first = ids[:1]
        if not _begins_with(ids, first, 2) or not tokenizer.engine.is_control(first[0]):
            return None
        chat = _begun_chat(tokenizer)
        if first[0] == tokenizer.pad_id or chat[:1] != [*first] or chat[1:2] == [*first]:
            return None
    many = next(n for n in range(2, len(ids) + 2) if not _begins_with(ids, first, n + 1))
    return first, many


def _begins_with(ids: tuple[int, ...], first: tuple[int, ...], many: int) -> bool:
    """Return whether `ids` begin with `first`, which is not empty, at least `many` times."""
    return bool(first) and ids[: many * len(first)] == first * many


def wrong_frame(tokenizer: Tokenizer, ids: Sequence[int]) -> WrongIds | None:
    """Return what is wrong with the ids put before a recorded text; None where nothing is.

    A beginning that stands there twice is wrong in any text. A missing or different one is wrong
    where the other ids are what the tokenizer makes of their own text, and the text is no chat,
    whose beginning the template writes.
    """
    before = tokenizer.prefix_ids
    ids = tuple(ids)
    size = len(before)
    # Twice: by the tokenizer and again by a template or an engine.
    repeated = repeated_beginning(tokenizer, ids)
    if repeated is not None:
        first, many = repeated
        return WrongIds(
            "add_bos",
            f"the recorded ids begin with {_ids_text(tokenizer, first)} {times_text(many)}; "
            + (
                "the tokenizer puts it once"
                if first == before
                else "no text begins so: the chat template and the engine put it"
            ),
            ids[(many - 1) * len(first) :],
        )
    if not before or ids[:size] == before or len(ids) < FEWEST:
        return None
    # Missing: the rest has to be the tokenizer's own.
    if _is_own_text(tokenizer, ids):
        return WrongIds(
            "add_bos",
            f"the recorded ids are those of a text without {_ids_text(tokenizer, before)}, which "
            "the tokenizer puts before it",
            (*before, *ids),
            missing=True,
        )
    other, rest = ids[:size], ids[size:]
    special = {i for role, i in tokenizer.ids.items() if role != "bos"}
    own = set(other) <= special and _is_own_text(tokenizer, rest)
    if own and not set(other) & {*_chat_begins(tokenizer)}:
        return WrongIds(
            "frame",
            f"the recorded ids begin with {_ids_text(tokenizer, other)} where the tokenizer puts "
            f"{_ids_text(tokenizer, before)}",
            (*before, *rest),
            missing=True,
        )
    return None


def _is_own_text(tokenizer: Tokenizer, ids: Sequence[int]) -> bool:
    """Return whether decoding the ids and encoding that text again gives the same ids."""
    if len(ids) < FEWEST or tokenizer.engine.is_control(ids[0]):
        return False
    ends = next(
        (n for n, i in enumerate(ids) if tokenizer.engine.is_control(i)), len(ids)
    )  # an end after the text is the run's own
    text = tokenizer.decode(ids[:ends])
    return ends >= FEWEST and tuple(tokenizer.encode(text, add_special=False)) == tuple(ids[:ends])


def _ids_text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Return ids with their tokens as text: `1 (<s>), 2 (</s>)`."""
    return ", ".join(f"{i} ({tokenizer.token(i)})" for i in ids)


def times_text(many: int) -> str:
    """Return how often in words: "twice", or "N times"."""
    return "twice" if many == 2 else f"{many} times"


def padding_sentence(tokenizer: Tokenizer, ids: Sequence[int], count: int) -> str:
    """Return the sentence that a run's ids begin with `count` ids of padding."""
    which = f"{ids[0]} ({tokenizer.token(ids[0])})"
    many = "an id" if count == 1 else f"{count} ids"
    return f"the recorded ids begin with {many} of padding, {which}"
