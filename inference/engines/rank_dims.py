"""The notation of dimensions that says along which of them ranks hold parts of an array.

`t h[tp] d`: three dimensions, the second divided among tensor-parallel ranks. `t[cp:zigzag] h`
is in halves from both ends, `t h[tp:partial]` are summands. SGLang's dumper writes these
(sglang/srt/debug_utils/comparator/dims_spec), and wrote `h(tp)`, `s(cp,zigzag)`, `h(tp,partial)`
before. What stands after `#` is a remark.
"""

import re
from dataclasses import dataclass
from typing import Literal

from aprfmt.base.dump_names import AXES
from aprfmt.errors import FormatError

How = Literal["parts", "zigzag", "partial"]
_QUALIFIERS: dict[str, How] = {
    "sharded": "parts",
    "natural": "parts",
    "zigzag": "zigzag",
    "partial": "partial",
}
_DIM = re.compile(
    r"(?:\((?P<joined>[^()]+)\)|(?P<name>[A-Za-z_]\w*|1))"
    r"(?:\[(?P<new>[^\]]+)\]|\((?P<old>[^()]+)\))?"
)
_LONGEST = 1000


@dataclass(frozen=True)
class Division:
    """How ranks of an axis divide an array: along which dimension, and in what order."""

    axis: str
    dimension: int
    how: How = "parts"


def parse_dims(text: str, where: str) -> tuple[Division, ...]:
    """Return how an array is divided; () for one that every rank holds whole.

    `text` is such as 't h[tp] d'. `where` is for messages. FormatError for what cannot be parsed.
    """
    found: list[Division] = []
    body = text.partition("#")[0].strip()
    if not body or len(body) > _LONGEST:
        raise FormatError(f"{where}: dims {text[:80]!r}; expected dimensions such as 't h[tp] d'")
    for number, token in enumerate(re.findall(r"\([^()]+\)\S*|\S+", body)):
        match = _DIM.fullmatch(token)
        if match is None:
            raise FormatError(
                f"{where}: dims {text[:80]!r}: {token[:40]!r}; expected a name, and after it the "
                "axes that divide it, such as h[tp]"
            )
        if match["new"]:
            found += _parse_brackets(match["new"], number, f"{where}: dims {text[:80]!r}")
        elif match["old"]:
            found += _parse_parentheses(match["old"], number, f"{where}: dims {text[:80]!r}")
    return tuple(found)


def _parse_brackets(text: str, number: int, where: str) -> list[Division]:
    """Return the divisions of dimension `number` in the new notation, such as `cp:zigzag,sp`.

    FormatError if an axis or qualifier is unknown; `where` is for the message.
    """
    found = []
    for part in text.split(","):
        axis, _, said = part.strip().partition(":")
        words = [_parse_qualifier(word.strip(), where) for word in said.split("+") if word.strip()]
        kinds = [word for word in dict.fromkeys(words) if word != "parts"]
        if len(kinds) > 1:
            raise FormatError(
                f"{where}: {part.strip()[:40]!r}: summands whose order is another, too, are not "
                "put together; dump them after the reduction"
            )
        how: How = kinds[0] if kinds else "parts"
        found.append(Division(_parse_axis(axis, where), number, how))
    return found


def _parse_parentheses(text: str, number: int, where: str) -> list[Division]:
    """Return [the division] of dimension `number` in the old notation, such as `cp,zigzag`.

    FormatError if the axis or a qualifier is unknown; `where` is for the message.
    """
    words = [word.strip() for word in text.split(",")]
    how: How = "parts"
    for word in words[1:]:
        how = _parse_qualifier(word, where)
    return [Division(_parse_axis(words[0], where), number, how)]


def _parse_axis(word: str, where: str) -> str:
    """Return an axis without its prefix ("attn_tp" is "tp"); FormatError if unknown."""
    if word not in AXES:
        raise FormatError(f"{where}: axis {word[:20]!r}; expected one of {', '.join(AXES)}")
    return AXES[word]


def _parse_qualifier(word: str, where: str) -> How:
    """Return how ranks divide a dimension, by a word such as zigzag; FormatError if unknown."""
    if word not in _QUALIFIERS:
        raise FormatError(f"{where}: {word[:20]!r}; expected one of {', '.join(_QUALIFIERS)}")
    return _QUALIFIERS[word]
