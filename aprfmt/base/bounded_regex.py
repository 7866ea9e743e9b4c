"""Regular expressions out of files, matched in a time that a hostile one cannot run away with.

Python's own engine tries every choice again from every earlier one. Here the places at which a part
of the pattern can end are kept instead, once for every place it can begin at, so that the work is
bounded by the pattern's length times the square of the name's. Simple patterns on short names,
which are all that checkpoints have, go to Python's engine.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from re import _constants, _parser  # type: ignore[attr-defined]
from typing import Any

from aprfmt.errors import CodecError

LONGEST = 256  # bytes of a name that patterns are matched with
MOST = 1024  # characters of a pattern
_REPEATS = 2  # without bound, none inside another: at worst the square of the name's length
_COUNT = 64  # the largest number a bounded repeat may have

Node = tuple[Any, Any]
_Ends = frozenset[int]


def matches_start(pattern: str, name: str) -> bool:
    """Say whether `pattern` matches at the start of `name`, as `re.match` does.

    Raises CodecError for a pattern that is wrong, is too long, or looks back or behind; names that
    are longer than any tensor's match nothing.
    """
    if len(name) > LONGEST:
        return False
    return _compiled(pattern)(name)


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> Callable[[str], bool]:
    if len(pattern) > MOST:
        raise CodecError(f"pattern of {len(pattern)} characters; expected at most {MOST}")
    try:
        tree = _parser.parse(pattern)
        if tree.state.flags & ~re.UNICODE:
            raise CodecError(f"pattern {pattern!r} sets flags, which is not read here")
        _check(tree, pattern)
        if _unbounded(tree) <= _REPEATS:
            compiled = re.compile(pattern)
            return lambda name: compiled.match(name) is not None
    except (re.error, RecursionError, OverflowError) as error:
        raise CodecError(f"pattern {pattern!r} is no regular expression: {error}") from None
    return lambda name: bool(_Matcher(name).sequence(_list(tree), [0]))


_REPEAT = (_constants.MAX_REPEAT, _constants.MIN_REPEAT)
_ONE = (_constants.LITERAL, _constants.NOT_LITERAL, _constants.ANY, _constants.IN)


def _inner(node: Node) -> list[Iterable[Node]]:
    """Return the sequences inside a node."""
    op, value = node
    if op in _REPEAT:
        return [value[2]]
    if op is _constants.BRANCH:
        return list(value[1])
    if op is _constants.SUBPATTERN:
        return [value[3]]
    if op in (_constants.ASSERT, _constants.ASSERT_NOT):
        return [value[1]]
    return []


def _check(nodes: Iterable[Node], pattern: str) -> None:
    """Raise CodecError for a construct that is not supported here."""
    for node in nodes:
        op, value = node
        known = op in (*_REPEAT, *_ONE, _constants.BRANCH, _constants.SUBPATTERN, _constants.AT)
        ahead = op in (_constants.ASSERT, _constants.ASSERT_NOT) and value[0] == 1
        if not known and not ahead:
            raise CodecError(f"pattern {pattern!r} uses {str(op).lower()}, which is not read here")
        if op in _REPEAT and value[1] is not _constants.MAXREPEAT and value[1] > _COUNT:
            raise CodecError(f"pattern {pattern!r} repeats more than {_COUNT} times")
        if op in _REPEAT and value[0] > _COUNT:
            raise CodecError(f"pattern {pattern!r} repeats more than {_COUNT} times")
        if op is _constants.SUBPATTERN and (value[1] or value[2]):
            raise CodecError(f"pattern {pattern!r} sets flags, which is not read here")
        for inner in _inner(node):
            _check(inner, pattern)


def _unbounded(nodes: Iterable[Node]) -> int:
    """Return the number of repeats, counting one inside another as too many."""
    count = 0
    for node in nodes:
        inside = sum(_unbounded(inner) for inner in _inner(node))
        if node[0] in _REPEAT and node[1][1] != 1:
            count += 1 + inside * (_REPEATS + 1)
        else:
            count += inside
    return count


class _Matcher:
    """Where parts of a pattern can end in one name, by part and by where they begin."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._kept: dict[tuple[int, int], _Ends] = {}

    def sequence(self, nodes: Sequence[Node], starts: Iterable[int]) -> _Ends:
        """Return where nodes, one after the other, can end."""
        ends = frozenset(starts)
        for node in nodes:
            if not ends:
                break
            ends = frozenset().union(*(self._ends(node, start) for start in ends))
        return ends

    def _ends(self, node: Node, start: int) -> _Ends:
        key = (id(node), start)
        if key not in self._kept:
            self._kept[key] = self._found(node, start)
        return self._kept[key]

    def _found(self, node: Node, start: int) -> _Ends:
        op, value = node
        if op in _ONE:
            fits = start < len(self.name) and _single(node)(self.name[start])
            return frozenset((start + 1,)) if fits else frozenset()
        if op in _REPEAT:
            return self._repeated(value, start)
        if op is _constants.BRANCH:
            return frozenset().union(*(self.sequence(_list(one), [start]) for one in value[1]))
        if op is _constants.SUBPATTERN:
            return self.sequence(_list(value[3]), [start])
        if op is _constants.AT:
            return frozenset((start,)) if self._at(value, start) else frozenset()
        there = bool(self.sequence(_list(value[1]), [start]))
        return frozenset((start,)) if there is (op is _constants.ASSERT) else frozenset()

    def _repeated(self, value: Any, start: int) -> _Ends:
        least, most, inner = value
        nodes = _list(inner)
        ends = frozenset((start,))
        for _ in range(least):
            ends = self.sequence(nodes, ends)
        fresh, left = ends, len(self.name) + 1 if most is _constants.MAXREPEAT else most - least
        while fresh and left:
            fresh, left = self.sequence(nodes, fresh) - ends, left - 1
            ends |= fresh
        return ends

    def _at(self, what: Any, start: int) -> bool:
        if what in (_constants.AT_BEGINNING, _constants.AT_BEGINNING_STRING):
            return start == 0
        if what is _constants.AT_END_STRING:
            return start == len(self.name)
        if what is _constants.AT_END:
            return start >= len(self.name.removesuffix("\n"))
        around = self.name[max(0, start - 1) : start], self.name[start : start + 1]
        if not self.name and what is _constants.AT_NON_BOUNDARY:
            return re.match(r"\B", "") is not None  # Python 3.14 decided it anew
        edge = _word(around[0]) != _word(around[1])
        return edge is (what is _constants.AT_BOUNDARY)


def _word(char: str) -> bool:
    return char.isalnum() or char == "_"


def _list(nodes: Any) -> list[Node]:
    """Return the nodes of a sequence, always the same objects."""
    found: list[Node] = nodes.data if isinstance(nodes, _parser.SubPattern) else nodes
    return found


@lru_cache(maxsize=4096)
def _class(text: str) -> Callable[[str], bool]:
    compiled = re.compile(text, re.DOTALL)
    return lambda char: compiled.match(char) is not None


_CATEGORIES: dict[Any, str] = {
    _constants.CATEGORY_DIGIT: r"\d", _constants.CATEGORY_NOT_DIGIT: r"\D",
    _constants.CATEGORY_SPACE: r"\s", _constants.CATEGORY_NOT_SPACE: r"\S",
    _constants.CATEGORY_WORD: r"\w", _constants.CATEGORY_NOT_WORD: r"\W",
}  # fmt: skip


def _single(node: Node) -> Callable[[str], bool]:
    """Return what says whether a character is one that a node of one character matches."""
    op, value = node
    if op is _constants.LITERAL:
        return lambda char: ord(char) == value
    if op is _constants.NOT_LITERAL:
        return lambda char: ord(char) != value
    if op is _constants.ANY:
        return lambda char: char != "\n"
    return lambda char: _in(value, char)


def _in(items: Sequence[Node], char: str) -> bool:
    wanted = True
    for op, value in items:
        if op is _constants.NEGATE:
            wanted = False
        elif op is _constants.LITERAL and ord(char) == value:
            return wanted
        elif op is _constants.RANGE and value[0] <= ord(char) <= value[1]:
            return wanted
        elif op is _constants.CATEGORY and _class(_CATEGORIES[value])(char):
            return wanted
    return not wanted
