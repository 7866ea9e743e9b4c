"""Finds the users of code outside functions: a constant, a row of a table, a field's default."""

import ast
import re
from collections.abc import Iterable, Mapping
from functools import cache

from tests.mutations.source import Definition, Source

STEPS = 3  # a constant in a row of a table, in a mapping made of the table, in a function


def bound(source: Source, place: int) -> set[str]:
    """Return the names that the statement around a place outside of functions gives a value."""
    found: set[str] = set()
    body = source.tree.body
    while True:
        around = [each for each in body if source.span(each)[0] <= place < source.span(each)[1]]
        if not around:
            return found
        statement = around[0]
        found |= _names(statement)
        if not isinstance(statement, (ast.ClassDef, ast.If, ast.Try)):
            return found
        body = statement.body


def _names(statement: ast.stmt) -> set[str]:
    if isinstance(statement, Definition):
        return {statement.name}
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, (ast.AnnAssign, ast.AugAssign)):
        targets = [statement.target]
    else:
        return set()
    return {node.id for each in targets for node in ast.walk(each) if isinstance(node, ast.Name)}


def users(names: Iterable[str], sources: Mapping[str, Source]) -> set[int]:
    """Return the blocks that mention a name, or one that was made of it outside of functions."""
    wanted, known, blocks = set(names), set[str](), set[int]()
    for _ in range(STEPS):
        further: set[str] = set()
        for source in sources.values():
            for place in _places(wanted - known, source.text):
                block = source.block_at(place)
                if block is None:
                    further |= bound(source, place)
                else:
                    blocks.add(block.number)
        known |= wanted
        wanted = further
    return blocks


@cache
def run_at_import(source: Source) -> set[str]:
    """Return the functions of a file that run while it is imported, by their qualified names.

    They are those that statements outside functions call, and what these call in turn.
    """
    calls: dict[str, set[str]] = {}
    for place, name in _called(source):
        block = source.block_at(place)
        calls.setdefault("" if block is None else block.function, set()).add(name)
    own = {each.function for each in source.blocks}
    found, wanted = set[str](), calls.get("", set())
    while wanted:
        found |= wanted
        wanted = set().union(*(calls.get(name, set()) for name in wanted & own)) - found
    return found & own


def _called(source: Source) -> list[tuple[int, str]]:
    """Return (place, name) of every call of a plain name."""
    return [
        (source.span(node)[0], node.func.id)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]


def mentioned(names: Iterable[str], texts: Mapping[str, str]) -> set[str]:
    """Return the test files that mention a name."""
    return {path for path, text in texts.items() if _places(set(names), text)}


def _places(names: set[str], text: str) -> list[int]:
    if not names:
        return []
    pattern = "|".join(re.escape(name) for name in sorted(names))
    return [match.start() for match in re.finditer(rf"\b(?:{pattern})\b", text)]
