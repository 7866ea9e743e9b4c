"""Bounds the memory and time of parsing a JSON text, by counting its punctuation first.

Every value, key and container becomes a Python object many times larger than its text: a hundred
megabytes of `[],[],` would take gigabytes and half a minute. All counting here uses operations on
whole buffers, which are fast.
"""

from typing import NamedTuple

from aprfmt.errors import FormatError

_WINDOW = 1 << 20  # bytes split at quotes at a time: bounds the pieces held at once
_NO_STRUCTURE = bytes(set(range(256)) - set(b'"[]{},:'))
_NO_BRACKETS = b",:"
_ONE_KIND = bytes.maketrans(b"{}", b"[]")


class Budget(NamedTuple):
    """How often a mark may occur: `free` times, and once more for every `each` bytes of text."""

    what: str
    marks: bytes
    free: int
    each: int


# Twice what real files have: a safetensors header has a colon every 13 bytes and a container every
# 17, the merges of a tokenizer.json have a container every 14. In memory an object takes 64 bytes,
# a key 170, a value 60.
BUDGETS: tuple[Budget, ...] = (
    Budget("values", b",", 4_000_000, 8),
    Budget("keys", b":", 1_000_000, 16),
    Budget("arrays and objects", b"[{", 1_000_000, 10),
    Budget("objects", b"{", 1_000_000, 40),
)


def check_json_limits(raw: bytes, where: str, max_depth: int) -> None:
    """Raise FormatError for too many values for the text's length, or nesting beyond `max_depth`.

    `where` begins the message.
    """
    passed = [_passed(budget, raw, len(raw)) for budget in BUDGETS]
    deep = raw.count(b"[") + raw.count(b"{") > max_depth
    if not any(passed) and not deep:
        return
    marks = _structure(raw)  # without what stands in strings
    for budget in BUDGETS:
        if found := _passed(budget, marks, len(raw)):
            raise FormatError(
                f"{where}: {found} {budget.what} in {len(raw)} bytes of JSON, the limit is "
                f"{_limit(budget, len(raw))}"
            )
    if deep:
        _check_depth(marks.translate(None, _NO_BRACKETS), where, max_depth)


def _limit(budget: Budget, size: int) -> int:
    return budget.free + size // budget.each


def _passed(budget: Budget, raw: bytes, size: int) -> int:
    """Return the number of marks, or 0 if it is within the budget."""
    limit = _limit(budget, size)
    if len(raw) <= limit:
        return 0
    found = sum(raw.count(budget.marks[at : at + 1]) for at in range(len(budget.marks)))
    return found if found > limit else 0


def _structure(raw: bytes) -> bytes:
    """Return the brackets, commas and colons outside strings, in order."""
    if b"\\" in raw:  # pairs first: what is left before a quote then escapes that quote
        raw = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    # Two adjacent quotes can be removed: an empty string, or one string's end and another's start.
    raw = raw.translate(None, _NO_STRUCTURE).replace(b'""', b"")
    if b'"' not in raw:
        return raw
    kept = []
    inside = 0
    for start in range(0, len(raw), _WINDOW):
        pieces = raw[start : start + _WINDOW].split(b'"')
        kept.append(b"".join(pieces[inside::2]))
        inside ^= (len(pieces) - 1) & 1
    return b"".join(kept)


def _check_depth(brackets: bytes, where: str, max_depth: int) -> None:
    """Remove innermost bracket pairs `max_depth` times; brackets left are too deep, or unmatched.

    The parser refuses unmatched brackets; here only too many open ones are an error.
    """
    left = brackets.translate(_ONE_KIND)
    for _ in range(max_depth):
        shorter = left.replace(b"[]", b"")
        if len(shorter) == len(left):
            break
        left = shorter
    if b"[]" in left or left.count(b"[") > max_depth:
        raise FormatError(f"{where}: JSON is nested deeper than the limit of {max_depth} levels")
