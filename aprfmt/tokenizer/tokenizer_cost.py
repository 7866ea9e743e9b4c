"""Judges from a tokenizer.json whether running it may need unbounded memory or time."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from aprfmt.errors import FormatError
from aprfmt.tokenizer.pre_tokenizers import PRE_TOKENIZERS

MOST_GROWTH = 256  # times the length of a text; the steps of tokenizers in use come to 12
MOST_STEPS = 64  # in one part
MOST_REPEATS = 4  # without bound in one alternative of a regex; those in use have 3
MOST_PATTERN = 20_000  # characters of a regex; DeepSeek's list of cased letters has 1,500
MOST_TOKEN = 10_000  # characters of one added token
MOST_FRAME = 1 << 12  # tokens that templates put around texts; those in use put three

PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_KEYS = (*PARTS, "added_tokens")
# Bytes that one byte may become. NFKC and NFKD: U+FDFA has 3 bytes and becomes 33.
_GROWTH = {"NFKC": 11, "NFKD": 11, "NFD": 3, "NFC": 3, "Precompiled": 11, "ByteLevel": 2,
           "Lowercase": 2, "Nmt": 1}  # fmt: skip
_AGAIN = re.compile(rf'"(?:{"|".join(_KEYS)})"\s*:\s*[\[{{]')
_ESCAPED = re.compile(r"\\u00(?:[46][1-9a-fA-F]|[57][0-9aA]|5[fF])")  # letters that need no escape
_BLANK = re.compile(r"\s*")


class _RepeatedKeyError(ValueError):
    """An object of the tokenizer.json has a key twice."""


def _unique_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return pairs as a dict; raises _RepeatedKeyError for a repeated key."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _RepeatedKeyError
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_unique_dict)


def unbounded_reason(text: str) -> str:
    """Return why a tokenizer.json may need unbounded memory or time; "" if nothing shows that.

    "" too for a text that is no tokenizer.json: the library says what is wrong with it.
    """
    try:
        parts = _parse_parts(text)
    except _RepeatedKeyError:
        return "a key stands twice, so it is not known which one counts"
    except RecursionError:
        return "its values are nested too deeply"
    except ValueError:
        return ""
    return unbounded_reason_of_parts(parts)


def unbounded_reason_of_parts(parts: Mapping[str, Any]) -> str:
    """Return why a parsed tokenizer.json may need unbounded memory or time; "" if it cannot."""
    return next(_unbounded_reasons(parts), "")


def count_template_tokens(parts: Mapping[str, Any]) -> int:
    """Return how many tokens the templates of a parsed tokenizer.json put around its texts.

    Each entry of a template stands for all ids of its special token, so that a short file can ask
    for any number of them.
    """
    return sum(map(_template_tokens, _leaf_steps(parts.get("post_processor"))))


def refuse_long_frame(parts: Mapping[str, Any], where: str) -> None:
    """Raise FormatError where a parsed tokenizer.json puts thousands of tokens around a text.

    `where` begins the message.
    """
    put = count_template_tokens(parts)
    if put > MOST_FRAME:
        raise FormatError(
            f"{where}: its post_processor puts {put:,} tokens around a text; the limit "
            f"is {MOST_FRAME:,}; it is broken or hostile"
        )


def refuse_long_frame_of_text(text: str, where: str) -> None:
    """Raise FormatError where the text of a tokenizer.json puts thousands of tokens around a text.

    `where` begins the message. For a text that is no tokenizer.json nothing is raised: the library
    says what is wrong with it.
    """
    try:
        parts = _parse_parts(text)
    except (ValueError, RecursionError):
        return
    refuse_long_frame(parts, where)


def _template_tokens(step: Mapping[str, Any]) -> int:
    """Return how many ids a TemplateProcessing puts around one text and around a pair."""
    named = step.get("special_tokens")
    sizes = {
        name: len(_as_list(entry.get("ids")))
        for name, entry in (named.items() if isinstance(named, Mapping) else ())
        if isinstance(entry, Mapping)
    }
    pieces = (
        piece.get("SpecialToken")
        for name in ("single", "pair")
        for piece in _as_list(step.get(name))
        if isinstance(piece, Mapping)
    )
    names = (piece.get("id") for piece in pieces if isinstance(piece, Mapping))
    return sum(sizes.get(name, 0) for name in names if isinstance(name, str))


def _parse_parts(text: str) -> Mapping[str, Any]:
    """Return {key: value} of a tokenizer.json, without "model" where it is the last key.

    A fast search tells whether other keys may follow the vocabulary; if so, all is parsed. Raises
    _RepeatedKeyError, or ValueError for damaged JSON.
    """
    found: dict[str, Any] = {}
    at = _index_after_mark(text, 0, "{")
    while True:
        key, at = _DECODER.raw_decode(text, _BLANK.match(text, at).end())  # type: ignore[union-attr]
        if key == "model":
            if _AGAIN.search(text, at) or _ESCAPED.search(text, at):
                break  # parts after the vocabulary, or spelled so that a search cannot tell
            return found
        value, at = _DECODER.raw_decode(text, _index_after_mark(text, at, ":"))
        if key in found:
            raise _RepeatedKeyError
        found[key] = value
        at = _BLANK.match(text, at).end()  # type: ignore[union-attr]
        if text[at : at + 1] != ",":
            break
        at += 1
    whole = _DECODER.decode(text)
    return whole if isinstance(whole, dict) else {}


def _index_after_mark(text: str, at: int, mark: str) -> int:
    """Return the index after `mark` and the blanks around it, which must be next at `at`.

    Raises ValueError for another character.
    """
    at = _BLANK.match(text, at).end()  # type: ignore[union-attr]
    if text[at : at + 1] != mark:
        raise ValueError(f"expected {mark} at {at}")
    return _BLANK.match(text, at + 1).end()  # type: ignore[union-attr]


def _unbounded_reasons(parts: Mapping[str, Any]) -> Iterator[str]:
    """Yield each reason why a tokenizer.json may need unbounded memory or time."""
    for name in PARTS:
        steps = list(_leaf_steps(parts.get(name)))
        if len(steps) > MOST_STEPS:
            yield f"{name} has {len(steps)} steps"
        growth = 1
        for step in steps:
            growth *= _growth_factor(step)
            pattern = _regex_of(step)
            why = "" if pattern is None or pattern in _known_regexes() else costly_reason(pattern)
            if why:
                yield f"{name}: a regex {why}"
        if growth > MOST_GROWTH:
            yield f"{name} may make a text {growth:,} times as long"
    for row in _as_list(parts.get("added_tokens")):
        content = row.get("content") if isinstance(row, Mapping) else None
        if isinstance(content, str) and len(content) > MOST_TOKEN:
            yield f"an added token has {len(content):,} characters"


@cache
def _known_regexes() -> frozenset[str]:
    """Return the regexes of the pre-tokenizers known by name, which are not judged."""
    steps = (step for row in PRE_TOKENIZERS.values() for step in row.steps)
    return frozenset(str(argument) for kind, argument in steps if kind == "split")


def _as_list(value: Any) -> Sequence[Any]:
    """Return the value if it is a list, else an empty list."""
    return value if isinstance(value, list) else []


def _leaf_steps(part: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a normalizer or pre-tokenizer; those inside sequences in order."""
    waiting = [part]
    while waiting:
        step = waiting.pop()
        if not isinstance(step, Mapping):
            continue
        inner = [
            each
            for value in step.values()
            for each in _as_list(value)
            if isinstance(each, Mapping) and "type" in each
        ]
        if inner:
            waiting += reversed(inner)
        else:
            yield step


def _growth_factor(step: Mapping[str, Any]) -> int:
    """Return by which factor, at most, a step of a tokenizer.json lengthens a text."""
    kind = step.get("type")
    if kind == "Replace":
        content, pattern = step.get("content"), step.get("pattern")
        put = len(content.encode("utf-8", "surrogatepass")) if isinstance(content, str) else 0
        text = pattern.get("String") if isinstance(pattern, Mapping) else None
        if isinstance(text, str) and text:
            return max(1, -(-put // len(text.encode("utf-8", "surrogatepass"))))
        return max(1, put + 1)  # a regex may match the empty text between any two characters
    if kind == "TemplateProcessing":
        rows = [row for name in ("single", "pair") for row in _as_list(step.get(name))]
        return max(
            1,
            sum(isinstance(row, Mapping) and "Sequence" in row for row in rows) // 3,
            max(len(rows), _template_tokens(step)) // MOST_STEPS,
        )
    return _GROWTH.get(str(kind), 1)


def _regex_of(step: Mapping[str, Any]) -> str | None:
    """Return the regex of a step's pattern; None for a step without one."""
    pattern = step.get("pattern")
    found = pattern.get("Regex") if isinstance(pattern, Mapping) else None
    return found if isinstance(found, str) else None


_QUANTIFIER = re.compile(r"[*+]|\{(\d*)(,?)(\d*)\}")
_MANY = 16  # a bounded repeat from here on counts as one without bound


def costly_reason(pattern: str) -> str:
    """Return why a regex may take exponential time, as far as its spelling shows; else "".

    Looked for are an unbounded repeat of something that has a repeat or a choice in it, many
    repeats in one alternative, references to earlier groups, and calls of groups.
    """
    if len(pattern) > MOST_PATTERN:
        return f"has {len(pattern):,} characters"
    # Of each open group: repeats of this alternative, most of one, whether there are several.
    open_: list[list[int]] = [[0, 0, 0]]
    at, last = 0, 0  # `last`: repeats inside what a quantifier at this place would repeat
    quantified = False  # whether a quantifier, which + makes possessive, is just before
    while at < len(pattern):
        char = pattern[at]
        quantified &= char == "+"
        if char == "\\":
            if pattern[at + 1 : at + 2] in tuple("123456789kg"):
                return "refers to a group"
            at, last = at + 2, 0
        elif char == "[":
            at, last = _end_of_class(pattern, at), 0
        elif char == "(":
            open_.append([0, 0, 0])
            at += 2 if pattern[at + 1 : at + 2] == "?" else 1
        elif char == ")":
            here, most, several = open_.pop() if len(open_) > 1 else [0, 0, 0]
            open_[-1][0] += max(here, most)
            last = max(here, most, several)  # two alternatives may match one text
            at += 1
        elif char == "|":
            open_[-1] = [0, max(open_[-1][:2]), 1]
            at, last = at + 1, 0
        else:
            found = _QUANTIFIER.match(pattern, at)
            if char == "+" and quantified:
                quantified = False  # a possessive quantifier: it tries less, not more
                at += 1
                continue
            quantified = char in "?*+"
            if found is None:
                at, last = at + 1, last if char == "?" else 0
                continue
            low, comma, high = found.group(1, 2, 3)
            most_times = int(high or low or 0)
            if char != "{" or (comma and not high) or most_times >= _MANY:
                if last:
                    return "repeats what has a repeat or a choice in it"
                open_[-1][0] += 1
                last = 1
            at = found.end()
        if max(open_[-1][:2]) > MOST_REPEATS:
            return f"has more than {MOST_REPEATS} repeats in one alternative"
    return ""


def _end_of_class(pattern: str, at: int) -> int:
    """Return the index after a character class that begins at `at` and may hold others."""
    depth = 0
    while at < len(pattern):
        if pattern[at] == "\\":
            at += 1
        elif pattern[at] == "[":
            depth += 1
        elif pattern[at] == "]":
            depth -= 1
            if depth == 0:
                return at + 1
        at += 1
    return at
