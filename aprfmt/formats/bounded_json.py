"""Reads and writes JSON with limits: all JSON that comes out of a file is read here.

Python's own parser does the work. This module adds limits (bytes, depth, digits) and rules that
the parser does not check: UTF-8 without a byte-order mark, no duplicate keys (compared after
unescaping), no NaN or Infinity, no number beyond float64, no lone surrogates, nothing after the
value.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

from aprfmt.base.garbage_collector import pause_collector
from aprfmt.base.text_escape import shorten
from aprfmt.errors import ConversionError, FormatError

_WINDOW = 1 << 20  # bytes split at quotes at a time: bounds the pieces held at once
_NO_STRUCTURE = bytes(set(range(256)) - set(b'"[]{},:'))
_NO_BRACKETS = b",:"
_ONE_KIND = bytes.maketrans(b"{}", b"[]")


class Budget(NamedTuple):
    """How often characters such as commas may occur: `free` times, and more in a longer text.

    One more is allowed for each `bytes_per_mark` bytes of text. `what` names the characters.
    """

    what: str
    marks: bytes
    free: int
    bytes_per_mark: int


# Twice what real files have: a safetensors header has a colon every 13 bytes and a container every
# 17, the merges of a tokenizer.json have a container every 14. In memory an object takes 64 bytes,
# a key 170, a value 60.
BUDGETS: tuple[Budget, ...] = (
    Budget("values", b",", 4_000_000, 8),
    Budget("keys", b":", 1_000_000, 16),
    Budget("arrays and objects", b"[{", 1_000_000, 10),
    Budget("objects", b"{", 1_000_000, 40),
)


def check_json_limits(raw: "bytes | memoryview", where: str, max_depth: int) -> None:
    """Raise FormatError for too many values for the text's length, or nesting beyond `max_depth`.

    `where` begins the message. The text is checked in windows, so that little memory is needed.
    """
    over = any(_exceeds_budget(budget, raw) for budget in BUDGETS)
    deep = sum(piece.count(b"[") + piece.count(b"{") for piece in _windows(raw)) > max_depth
    if not over and not deep:
        return
    found = [0] * len(BUDGETS)
    brackets: list[bytes] = []
    room = max(_budget_limit(budget, len(raw)) for budget in BUDGETS)  # more are refused anyway
    for marks in _structure(raw):
        found = [
            count + _count_marks(budget, marks)
            for count, budget in zip(found, BUDGETS, strict=True)
        ]
        if deep and max(found) <= room:
            brackets.append(marks.translate(None, _NO_BRACKETS))
    for count, budget in zip(found, BUDGETS, strict=True):
        if count > _budget_limit(budget, len(raw)):
            raise FormatError(
                f"{where}: {count} {budget.what} in {len(raw)} bytes of JSON, the limit is "
                f"{_budget_limit(budget, len(raw))}"
            )
    if deep:
        _check_depth(b"".join(brackets), where, max_depth)


def _windows(raw: "bytes | memoryview") -> Iterator[bytes]:
    """Yield a text in windows of _WINDOW bytes."""
    for start in range(0, len(raw), _WINDOW):
        yield bytes(raw[start : start + _WINDOW])


def _budget_limit(budget: Budget, size: int) -> int:
    """Return how many of a budget's characters (such as commas) `size` bytes of text may have."""
    return budget.free + size // budget.bytes_per_mark


def _exceeds_budget(budget: Budget, raw: "bytes | memoryview") -> bool:
    """Return whether a text has more of a budget's characters, strings included, than it may."""
    limit = _budget_limit(budget, len(raw))
    return len(raw) > limit < sum(_count_marks(budget, piece) for piece in _windows(raw))


def _count_marks(budget: Budget, text: bytes) -> int:
    """Return how many of a budget's characters a text has."""
    return sum(text.count(budget.marks[at : at + 1]) for at in range(len(budget.marks)))


def _structure(raw: "bytes | memoryview") -> Iterator[bytes]:
    """Yield the brackets, commas and colons outside strings, in order, as bytes per window."""
    start = inside = 0
    while start < len(raw):
        piece = bytes(raw[start : start + _WINDOW])
        # A window ends before a backslash whose character would stand in the next one.
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2 and start + len(piece) < len(raw):
            piece = piece[:-1] or bytes(raw[start : start + 2])
        start += len(piece)
        if b"\\" in piece:  # pairs first: what is left before a quote then escapes that quote
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        # Two adjacent quotes can be removed: an empty string, or one's end and another's start.
        strings = piece.translate(None, _NO_STRUCTURE).replace(b'""', b"").split(b'"')
        yield b"".join(strings[inside::2])
        inside ^= (len(strings) - 1) & 1


def _check_depth(brackets: bytes, where: str, max_depth: int) -> None:
    """Raise FormatError if brackets are nested deeper than `max_depth`.

    Innermost pairs are removed `max_depth` times; pairs left are too deep. Unmatched brackets are
    the parser's to refuse; here only too many open ones are an error.
    """
    left = brackets.translate(_ONE_KIND)
    for _ in range(max_depth):
        shorter = left.replace(b"[]", b"")
        if len(shorter) == len(left):
            break
        left = shorter
    if b"[]" in left or left.count(b"[") > max_depth:
        raise FormatError(f"{where}: JSON is nested deeper than the limit of {max_depth} levels")


MAX_DEPTH = 64
MAX_DIGITS = 400  # float64 ends at 309 digits; also keeps int() far from its quadratic cost
_BOM = b"\xef\xbb\xbf"
_DIGITS = bytes.maketrans(b"123456789", b"000000000")
_LONG = b"0" * (MAX_DIGITS + 1)  # without such a run of digits, int() need not be guarded
_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_SURROGATE = re.compile("[\ud800-\udfff]")
_NAMES = {float("inf"): "Infinity", float("-inf"): "-Infinity"}


def loads(
    data: bytes | bytearray | memoryview | str,
    where: str,
    *,
    max_bytes: int,
    max_depth: int = MAX_DEPTH,
    duplicates: Literal["refuse", "last", "mark"] = "refuse",
    nonfinite: bool = False,
    surrogates: bool = False,
) -> Any:
    """Return the one JSON value of `data`; `where` begins every message.

    A str with lone surrogates is refused as not UTF-8. With `duplicates="last"` the last of equal
    keys wins; with "mark" it does too, and such an object becomes a DuplicateKeys. `nonfinite`
    allows NaN and the infinities, `surrogates` allows lone surrogate escapes. Byte offsets in
    messages count from `data`'s start. Raises FormatError.
    """
    if isinstance(data, str):
        data = data.encode("utf-8", "surrogatepass")
    if len(data) > max_bytes:
        raise FormatError(f"{where}: {len(data)} bytes of JSON, the limit is {max_bytes}")
    raw = memoryview(data)
    if bytes(raw[: len(_BOM)]) == _BOM:
        raise FormatError(f"{where}: starts with a byte-order mark at byte 0; JSON has none")
    check_json_limits(raw, where, max_depth)
    try:
        text = str(raw, "utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(
            f"{where}: byte 0x{raw[error.start]:02x} at byte {error.start} is not UTF-8"
        ) from None
    decoder = json.JSONDecoder(
        object_pairs_hook=_DUPLICATES[duplicates](where),
        parse_constant=None if nonfinite else _constant_refuser(where),
        parse_int=_integer_parser(where) if _has_long_number(raw) else None,
        parse_float=None if nonfinite else _finite_float_parser(where),
    )
    try:
        with pause_collector():  # parsing makes no cycles, and the walks double its time
            value = decoder.decode(text)
    except json.JSONDecodeError as error:
        from aprfmt.formats.foreign_formats import HEAD, download_left

        left = download_left(bytes(raw[:HEAD]))
        if left:
            raise FormatError(f"{where}: is {left}") from None
        offset = len(text[: error.pos].encode("utf-8", "surrogatepass"))
        raise FormatError(f"{where}: not JSON at byte {offset}: {error.msg}") from None
    if not surrogates and _ESCAPED_SURROGATE.search(raw):
        _check_surrogates(bytes(raw), where)
    return value


def load_file(path: Path, max_bytes: int, **options: Any) -> Any:
    """Return the JSON value of a regular file; `options` are those of `loads`."""
    from aprfmt.formats.mapped_file import open_bytes

    with closing(open_bytes(path)) as file:
        return loads(file.view[: max_bytes + 1], str(path), max_bytes=max_bytes, **options)


def dumps(value: Any, where: str = "JSON") -> str:
    """Return `value` as compact JSON: keys in their order, non-ASCII raw, encodable as UTF-8.

    Lone surrogates, which UTF-8 cannot express, are written as escapes. NaN and the infinities,
    which JSON cannot express, raise ConversionError.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:
        found = _find_nonfinite(value)
        if found is None:
            raise  # a circular reference: a bug of the caller
        raise ConversionError(
            f"{where}: {found}, which JSON cannot hold; leave it out or store it as a string"
        ) from None
    return _SURROGATE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _refuse_duplicates(where: str) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    """Return an object hook that raises FormatError if a key occurs twice."""

    def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """Return the dict of a JSON object's (key, value) pairs; FormatError for a repeated key."""
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            again = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise FormatError(
                f"{where}: key '{shorten(again, 80)}' stands twice in one JSON object; "
                "it is not known which of the two counts"
            )
        return result

    return build


class DuplicateKeys(dict[str, Any]):
    """A JSON object in which keys occur more than once (`keys_twice`); the last value counts."""

    keys_twice: frozenset[str] = frozenset()


def _mark_duplicates(where: str) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    """Return an object hook that turns an object with duplicate keys into a DuplicateKeys.

    `where` is not used: hooks that raise need it for their message.
    """

    def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """Return the dict of a JSON object's (key, value) pairs; a DuplicateKeys if keys repeat."""
        result = dict(pairs)
        if len(result) == len(pairs):
            return result
        doubled = DuplicateKeys(result)
        counts = Counter(key for key, _ in pairs)
        doubled.keys_twice = frozenset(key for key, count in counts.items() if count > 1)
        return doubled

    return build


_DUPLICATES: dict[str, Callable[[str], Any]] = {
    "refuse": _refuse_duplicates,
    "last": lambda where: None,
    "mark": _mark_duplicates,
}


def _has_long_number(raw: memoryview) -> bool:
    """Return whether a text has more than MAX_DIGITS digits in a row, inside strings or outside."""
    before = b""
    for piece in _windows(raw):
        digits = before + piece.translate(_DIGITS)
        if _LONG in digits:
            return True
        before = digits[-MAX_DIGITS:]
    return False


def _integer_parser(where: str) -> Callable[[str], int]:
    """Return a function that parses a JSON integer; FormatError beyond MAX_DIGITS digits."""

    def parse(text: str) -> int:
        """Return the int of a JSON number's text; FormatError for too many digits."""
        if len(text) > MAX_DIGITS:
            raise FormatError(
                f"{where}: an integer of {len(text)} digits, the limit is {MAX_DIGITS}"
            )
        return int(text)

    return parse


def _finite_float_parser(where: str) -> Callable[[str], float]:
    """Return a function that parses a JSON number; FormatError for one beyond float64."""

    def parse(text: str) -> float:
        """Return the float of a JSON number's text; FormatError where it would be infinite."""
        value = float(text)
        if value in _NAMES:
            raise FormatError(f"{where}: the number {shorten(text, 40)} is beyond float64")
        return value

    return parse


def _constant_refuser(where: str) -> Callable[[str], NoReturn]:
    """Return a function that raises FormatError for NaN or Infinity."""

    def refuse(name: str) -> NoReturn:
        """Raise FormatError for NaN or Infinity (`name`) in a text: JSON has neither."""
        raise FormatError(f"{where}: {name} stands for a number; JSON has no such number")

    return refuse


def _check_surrogates(raw: bytes, where: str) -> None:
    r"""Raise FormatError for lone surrogate escapes, which UTF-8 cannot express.

    Valid escapes are replaced by blanks, which keeps offsets. Escaped backslashes are replaced
    first, so that every `\u` that remains is an escape.
    """
    blanked = _PAIR.sub(b" " * 12, raw.replace(b"\\\\", b"  "))
    lone = _ESCAPED_SURROGATE.search(blanked)
    if lone is not None:
        escape = str(raw[lone.start() : lone.start() + 6], "ascii", "replace")
        raise FormatError(
            f"{where}: {escape} at byte {lone.start()} is half of a surrogate pair, not a character"
        )


def _find_nonfinite(value: Any) -> str | None:
    """Return "PATH is NaN" (or infinite) for the first number that JSON cannot hold, or None."""
    stack: list[tuple[str, Any]] = [("$", value)]
    while stack:
        path, item = stack.pop()
        if isinstance(item, dict):
            stack.extend((f"{path}.{key}", child) for key, child in reversed(item.items()))
        elif isinstance(item, list | tuple):
            numbered = list(enumerate(item))
            stack.extend((f"{path}[{i}]", child) for i, child in reversed(numbered))
        elif isinstance(item, float) and not math.isfinite(item):
            return f"{path} is {_NAMES.get(item, 'NaN')}"
    return None
