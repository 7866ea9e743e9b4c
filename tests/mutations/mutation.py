"""A mutation: one place of one file that says something else; and how a row finds its place."""

import ast
import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Row:
    """A mutation written by hand.

    `old` stands exactly once in the file. `means` says what is wrong then, for a user. `tests` are
    globs of test files, or of tests (with `::`); for C and CUDA they decide, as no map says what
    reaches those.
    """

    id: str
    file: str
    old: str
    new: str
    means: str
    tests: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Mutation:
    """`text[start:start + len(old)]` of a file is `old` and becomes `new`."""

    id: str
    path: str
    start: int
    old: str
    new: str
    means: str
    tests: tuple[str, ...] = ()

    def applied(self, text: str) -> str:
        """Return the file's text with the mutation; ValueError where `old` is not there."""
        stop = self.start + len(self.old)
        if text[self.start : stop] != self.old:
            raise ValueError(f"{self.id}: {self.path} does not hold the old text at {self.start}")
        return text[: self.start] + self.new + text[stop:]

    def diff(self, text: str) -> str:
        """Return a unified diff of two lines of context."""
        before, after, name = text.splitlines(), self.applied(text).splitlines(), self.path
        return "\n".join(difflib.unified_diff(before, after, name, name, n=2, lineterm=""))


@dataclass(frozen=True, slots=True)
class Gone:
    """A row that has no place, or whose file would not parse: an error, never a pass."""

    id: str
    why: str


def locate(row: Row, texts: Mapping[str, str]) -> Mutation | Gone:
    """Find a row's place: in its file, or, where files were moved, in the one that has the text."""
    if texts.get(row.file, "").count(row.old) == 1:
        return _checked(row, row.file, texts[row.file])
    name = Path(row.file).name
    suffix = Path(row.file).suffix
    for candidates in (
        [path for path in texts if Path(path).name == name],
        [path for path in texts if Path(path).suffix == suffix],
    ):
        found = [path for path in candidates for _ in range(texts[path].count(row.old))]
        if len(found) == 1:
            return _checked(row, found[0], texts[found[0]])
        if len(found) > 1:
            where = ", ".join(sorted(set(found))[:3])
            return Gone(row.id, f"its old text stands {len(found)} times: {where}; make it longer")
    return Gone(row.id, f"its old text is in no file any more (last in {row.file}); write it anew")


def _checked(row: Row, path: str, text: str) -> Mutation | Gone:
    mutation = Mutation(row.id, path, text.index(row.old), row.old, row.new, row.means, row.tests)
    if row.old == row.new:
        return Gone(row.id, "its old and new text are the same")
    if path.endswith(".py"):
        try:
            ast.parse(mutation.applied(text))
        except SyntaxError as error:
            return Gone(row.id, f"{path} does not parse with it: {error.msg}")
    elif not row.tests:
        return Gone(row.id, f"{path} is no Python: name the test files that judge it")
    return mutation


def placed(rows: Iterable[Row], texts: Mapping[str, str]) -> list[Mutation | Gone]:
    """Locate every row; one whose id was there before is Gone."""
    found: list[Mutation | Gone] = []
    ids: set[str] = set()
    for row in rows:
        found.append(Gone(row.id, "this id stands twice") if row.id in ids else locate(row, texts))
        ids.add(row.id)
    return found
