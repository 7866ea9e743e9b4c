"""Decides whether an answer is gibberish, by its text and tokens; each sign is a sentence.

A working model's text in another script than its prompt's is no defect in itself, so the share of
non-ASCII characters counts only where the prompt has few of them.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from aprfmt.checks.bounds import GIBBERISH

SHOWN = 60  # characters of a repeated fragment in a message


def gibberish_signals(
    text: str,
    prompt: str = "",
    ids: Sequence[int] = (),
    spelled: Callable[[Sequence[int]], str] | None = None,
) -> list[str]:
    """Return a sentence for each sign that a text is gibberish; [] for ordinary text.

    Characters of another script are no sign where `prompt`, the question, has many too. `ids` are
    the tokens of the answer, and `spelled` returns their text, special tokens included: a loop of
    tokens that have no text, or broken characters, shows in them alone.
    """
    repeats = _repeated_fragment(text)
    if not repeats and spelled is not None:
        repeats = _repeated_tokens(ids, spelled)
    found = (
        _foreign_script(text, prompt),
        repeats,
        _broken_characters(text),
        _dominant_character(text),
        _trailing_blanks(text),
    )
    return [sentence for sentence in found if sentence]


def _foreign_script(text: str, prompt: str) -> str:
    """Return a sentence if most characters are not ASCII though the prompt's are; else ""."""
    if len(text) < GIBBERISH.foreign_length or _non_ascii_share(prompt) > GIBBERISH.foreign_share:
        return ""
    share = _non_ascii_share(text)
    return f"{share:.0%} of the characters are not ASCII" if share > GIBBERISH.foreign_share else ""


def _non_ascii_share(text: str) -> float:
    """Return the fraction of characters that are not ASCII; 0 for an empty text."""
    return sum(not char.isascii() for char in text) / len(text) if text else 0.0


def _repeated_fragment(text: str) -> str:
    """Return a sentence on a fragment that is there three times or more in a row; "" without one.

    Fragments have up to 16 bytes, or up to a quarter of the text. Runs of one byte (rules, indents)
    do not count, nor long fragments without a letter or a digit (rules of tables).
    """
    data = text.encode("utf-8", "surrogatepass")
    low, high = GIBBERISH.fragment
    for start, size, times in _find_loops(data, low, max(high, int(len(data) * GIBBERISH.longest))):
        fragment = data[start : start + size]
        shown = fragment.decode("utf-8", "replace")
        if len(set(fragment)) == 1 or (size > high and not any(map(str.isalnum, shown))):
            continue
        if _is_stuck(data, start, size, times) and not _is_number_or_rule(shown, times):
            return f"the fragment {quote_short(shown)} stands {times} times in a row"
    return ""


def _repeated_tokens(ids: Sequence[int], spelled: Callable[[Sequence[int]], str]) -> str:
    """Return a sentence on tokens that are repeated three times or more in a row; "" without any.

    The repeated fragment has up to a quarter of all tokens. `spelled` returns the text of tokens.
    """
    row = tuple(ids)
    for start, size, times in _find_loops(row, 1, int(len(row) * GIBBERISH.longest)):
        shown = spelled(row[start : start + size])
        if size * times < GIBBERISH.tokens or len(set(shown)) < 2:
            continue
        if _is_stuck(row, start, size, times) and not _is_number_or_rule(shown, times):
            many = "token" if size == 1 else "tokens"
            return f"{size} {many} {quote_short(shown)} stand {times} times in a row"
    return ""


def _is_stuck(row: Sequence[Any], start: int, size: int, times: int) -> bool:
    """Return whether a loop goes on to the end of an answer, or takes half of the answer.

    A sound answer may repeat a fragment in its midst: closing tags, a refrain. `row` has the
    answer's bytes or tokens; the loop begins at `start` and has `times` copies of `size` items.
    """
    rest = row[start + size * times :]
    return rest == row[start : start + len(rest)] or 2 * size * times >= len(row)


def _is_number_or_rule(fragment: str, times: int) -> bool:
    """Return whether a repeated fragment is inside a number or a drawn line.

    1,000,000,000 and - - - are such: the fragment has no letter, and its `times` copies are shorter
    than 32 characters.
    """
    return len(fragment) * times < GIBBERISH.line and not any(map(str.isalpha, fragment))


def _find_loops(row: Sequence[Any], low: int, high: int) -> Iterable[tuple[int, int, int]]:
    """Yield (start, size, times) of each fragment of `low` to `high` items that repeats in a row.

    `times` is at least GIBBERISH.times; the shortest fragments come first. Candidates are found by
    comparing items at multiples of the fragment's size, which finds every three copies in a row. A
    text of n items takes about n log n steps.
    """
    for size in range(low, min(high, len(row) // GIBBERISH.times) + 1):
        seen = 0  # the end of the last run that was measured
        for at in range(size, len(row) - size + 1, size):
            if at < seen or row[at] != row[at - size]:
                continue
            if row[at : at + size] != row[at - size : at]:
                continue
            start, end = at, at + size
            while start > size and row[start - 1] == row[start - 1 - size]:
                start -= 1
            while end < len(row) and row[end] == row[end - size]:
                end += 1
            seen = end
            times = (end - start) // size + 1
            if times >= GIBBERISH.times:
                yield start - size, size, times


def quote_short(text: str) -> str:
    """Return a text in quotes, cut to SHOWN characters."""
    return repr(text if len(text) <= SHOWN else text[:SHOWN] + "...")


def _broken_characters(text: str) -> str:
    """Return a sentence if a text has many U+FFFD; else ""."""
    whole = text.removesuffix("\ufffd")  # the last token may end inside a character
    count = whole.count("\ufffd")
    if count * GIBBERISH.broken_every > len(whole):
        return f"{count} broken characters (U+FFFD) in {len(text)}"
    return ""


def _dominant_character(text: str) -> str:
    """Return a sentence if nearly all of a text is one character; else ""."""
    dense = "".join(text.split())
    if len(dense) < GIBBERISH.same_length:
        return ""
    most = max(set(dense), key=dense.count)
    share = dense.count(most) / len(dense)
    return f"{share:.0%} of the text is {most!r}" if share >= GIBBERISH.same_share else ""


def _trailing_blanks(text: str) -> str:
    """Return a sentence if a text is only blanks, or at least half of it is blanks at its end.

    "" for another text, and for few blanks.
    """
    count = len(text) - len(text.rstrip())
    if count == len(text) and count >= GIBBERISH.same_length:
        return f"nothing but {count} blanks"
    if count >= GIBBERISH.blanks and 2 * count >= len(text):
        return f"the last {count} of {len(text)} characters are blanks"
    return ""
