"""A Python file's text with its tree: places as offsets, and runs of statements as blocks."""

import ast
import hashlib
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

_COMPOUND = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match, ast.AsyncFor, ast.AsyncWith)
Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef


@dataclass(frozen=True, slots=True)
class Block:
    """Statements of a function that run one after the other, or the body of a lambda.

    `number` depends on path, function and order alone: edits of other functions leave it.
    """

    path: str
    function: str
    start: int
    stop: int
    number: int
    expression: bool = False

    def __contains__(self, place: int) -> bool:
        return self.start <= place < self.stop


class Source:
    """One file. Raises SyntaxError if it is not Python."""

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self.text = text
        self.tree = ast.parse(text)
        lines = [f"{line}\n" for line in text.split("\n")]
        self._raw = [line.encode() for line in lines]
        self._lines = [0, *itertools.accumulate(map(len, lines))]

    def offset(self, line: int, column: int) -> int:
        """Return the place of a line (from 1) and a column in UTF-8 bytes, as the tree has them."""
        return self._lines[line - 1] + len(self._raw[line - 1][:column].decode())

    def span(self, node: ast.expr | ast.stmt | ast.keyword | ast.excepthandler) -> tuple[int, int]:
        """Return where a node starts and ends; decorators belong to what they decorate."""
        line, column = node.lineno, node.col_offset
        for decorator in getattr(node, "decorator_list", ()):
            if decorator.lineno < line:
                line, column = decorator.lineno, max(decorator.col_offset - 1, 0)
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self.offset(line, column), self.offset(node.end_lineno, node.end_col_offset)

    def of(self, node: ast.expr | ast.stmt) -> str:
        """Return the text of a node."""
        start, stop = self.span(node)
        return self.text[start:stop]

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """Every block of every function and lambda, in no particular order."""
        return tuple(self._blocks(self.tree, ""))

    def block_at(self, place: int) -> Block | None:
        """Return the smallest block around a place; None outside of functions.

        A default value or a decorator is outside of the function it belongs to.
        """
        around = [block for block in self.blocks if place in block]
        return min(around, key=lambda block: block.stop - block.start, default=None)

    def _blocks(self, node: ast.AST, inside: str) -> Iterator[Block]:
        order: Counter[str] = Counter()
        for function, child in _named(node, inside):
            if isinstance(child, Function):
                for run in self._runs(_undocumented(child.body)):
                    yield self._block(function, order[function], run[0], run[-1])
                    order[function] += 1
            elif isinstance(child, ast.Lambda):
                body = child.body
                yield self._block(function, order[function], body, body, expression=True)
                order[function] += 1

    def _block(
        self,
        function: str,
        order: int,
        first: ast.expr | ast.stmt,
        last: ast.expr | ast.stmt,
        *,
        expression: bool = False,
    ) -> Block:
        key = f"{self.path}\0{function}\0{order}".encode()
        number = int.from_bytes(hashlib.sha256(key).digest()[:6], "little")
        start, stop = self.span(first)[0], self.span(last)[1]
        return Block(self.path, function, start, stop, number, expression)

    def _runs(self, body: Sequence[ast.stmt]) -> Iterator[list[ast.stmt]]:
        """Cut a body behind each compound statement: what follows one may never be reached."""
        run: list[ast.stmt] = []
        for statement in body:
            run.append(statement)
            if isinstance(statement, _COMPOUND):
                yield run
                run = []
        if run:
            yield run
        for statement in body:
            for inner in self._inner(statement):
                yield from self._runs(inner)

    def _inner(self, statement: ast.stmt) -> Iterator[list[ast.stmt]]:
        """Give the bodies of a compound statement, and those of its elifs, nested in the tree."""
        for body in _bodies(statement):
            if self.text.startswith("elif", self.span(body[0])[0]):
                yield from self._inner(body[0])
            else:
                yield body


def _named(node: ast.AST, inside: str) -> Iterator[tuple[str, ast.AST]]:
    """Give every node below one with the qualified name of the function around or of itself.

    What stands in an f-string is left out: its places are not those of the file.
    """
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.JoinedStr):
            continue
        name = inside
        if isinstance(child, Definition):
            name = f"{inside}.{child.name}" if inside else child.name
        yield name, child
        yield from _named(child, name)


def _undocumented(body: Sequence[ast.stmt]) -> Sequence[ast.stmt]:
    first = body[0]
    is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return body[1:] if is_text else body


def _bodies(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    """Give the bodies of a compound statement; those of a definition are not its own."""
    if not isinstance(statement, _COMPOUND):
        return
    for field in ("body", "orelse", "finalbody"):
        body = getattr(statement, field, None)
        if body:
            yield body
    for part in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
        yield part.body
