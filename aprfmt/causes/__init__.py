"""The causes: what can make two models, runs or traces differ, in words and in what finds them.

A cause, or a family that is found in one way, is one module of `tensor/`, `tokenizer/`, `training/`
or `forward/`, and is in the table by being there. `CAUSE_ROWS` of a module are its causes in words;
`HYPOTHESES` are its functions, each with a rank, the reason for it and, where a cheap fact decides,
what it is for. Both are written in literals and read from the module's text: a module is imported
when the first of its functions is called. Other packages add rows through the entry-point group
`aprfmt.causes`. The *level* of a cause is the first stage of a comparison that shows it: identity,
configuration, tensors, forward pass, capture, gradient, update.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, Protocol, TypeVar

from aprfmt.base.registry import LazyFunction, Registry
from aprfmt.causes.row import Cause
from aprfmt.measure.verdicts import LEVELS

__all__ = [
    "CAUSES",
    "FOLDERS",
    "Cause",
    "causes_of",
    "describe",
    "find_cause",
    "hypotheses_of",
    "modules_of",
]

FOLDERS = ("", "tokenizer", "tensor", "training", "forward")  # "" is this folder

T = TypeVar("T")


class Ranked(Protocol):
    """A row that is tried in an order."""

    @property
    def rank(self) -> int:
        """The number by which a folder's table rows are ordered: the lowest is tried first."""


R = TypeVar("R", bound=Ranked)


@cache
def modules_of(folder: str) -> tuple[str, ...]:
    """Return the full import names of the modules in a folder of causes, sorted; imports nothing.

    `folder` is one of FOLDERS; "" is the package itself.
    """
    found = iter_modules([str(Path(__file__).parent / folder)])
    package = f"{__name__}.{folder}" if folder else __name__
    return tuple(sorted(f"{package}.{row.name}" for row in found if not row.ispkg))


def _read_rows(module: str, table: str, kind: type[T]) -> tuple[T, ...]:
    """Return the rows of one class in a module's table, read from its source, without an import.

    `table` is the name of the table, a tuple of calls of `kind`. The module is imported only
    where the table holds more than literals and names. () for a module without the table.
    """
    path = Path(__file__).parent.joinpath(*module.split(".")[2:]).with_suffix(".py")
    text = path.read_text("utf-8")
    if f"\n{table}" not in text:
        return ()
    try:
        return tuple(
            kind(
                *(_argument(module, text, node) for node in row.args),
                **{str(one.arg): _argument(module, text, one.value) for one in row.keywords},
            )
            for row in _calls_of(_assigned_expression(text, table))
            if isinstance(row.func, ast.Name) and row.func.id == kind.__name__
        )
    except (ValueError, SyntaxError):
        rows = getattr(import_module(module), table, ())
        return tuple(row for row in rows if isinstance(row, kind))


def _assigned_expression(text: str, name: str) -> ast.expr:
    """Return the expression (ast) that a module's text assigns to a name in its first column.

    ValueError if it assigns nothing to it.
    """
    found = re.search(rf"^{name}\b[^=\n]*= (\([^\n]*\)|\(\n.*?^\)|[^\n]*)", text, re.M | re.S)
    if found is None:
        raise ValueError(f"{name} is not assigned")
    return ast.parse(found[1], mode="eval").body


def _argument(module: str, text: str, node: ast.expr) -> Any:
    """Return the value of an argument of a table's row: a literal, or a function imported on call.

    `text` is the source of `module`, where a name in upper case is looked up as a constant.
    Raises ValueError for anything else.
    """
    if not isinstance(node, ast.Name):
        return ast.literal_eval(node)
    if node.id.isupper():
        return ast.literal_eval(_assigned_expression(text, node.id))
    return LazyFunction(f"{module}:{node.id}")


def _calls_of(node: ast.expr) -> list[ast.Call]:
    """Return the elements of a tuple display, all of which are calls; ValueError otherwise."""
    rows = node.elts if isinstance(node, ast.Tuple) else [node]
    calls = [row for row in rows if isinstance(row, ast.Call)]
    if len(calls) < len(rows):
        raise ValueError("a table whose rows are not written out")
    return calls


def causes_of(module: str) -> tuple[Cause, ...]:
    """Return the causes that a module states in words, in its order; does not import it."""
    return _read_rows(module, "CAUSE_ROWS", Cause)


def hypotheses_of(folder: str, kind: type[R]) -> tuple[R, ...]:
    """Return the rows of one kind in the HYPOTHESES of a folder's modules, lowest rank first.

    A row's function is imported with its module when it is first called.
    """
    found = [row for one in modules_of(folder) for row in _read_rows(one, "HYPOTHESES", kind)]
    return tuple(sorted(found, key=lambda row: row.rank))


@cache
def _all_causes() -> Registry[Cause]:
    """Return the registry of all causes by name, ours in the order of folders and modules."""
    rows = [row for folder in FOLDERS for module in modules_of(folder) for row in causes_of(module)]
    return Registry("causes", {}, held={row.name: row for row in rows})


class CauseTable(Mapping[str, Cause]):
    """All causes by name, ours in the order of folders and modules, then other packages'."""

    @property
    def own(self) -> tuple[str, ...]:
        """Names of the causes of this package, without those that entry points add."""
        return _all_causes().own

    def __getitem__(self, name: str) -> Cause:
        """Return the cause of this name; raise AprfmtError with similar names if there is none."""
        return _all_causes()[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of all causes, those of other packages included."""
        return iter(_all_causes())

    def __len__(self) -> int:
        """Return the number of causes, those of other packages included."""
        return len(_all_causes())

    def __contains__(self, name: object) -> bool:
        """Return whether there is a cause of this name."""
        return name in _all_causes()


CAUSES = CauseTable()


def find_cause(name: str) -> Cause | None:
    """Return the row of a cause; None for "", a difference without one, and for an unknown name."""
    return CAUSES[name] if name in CAUSES else None


def describe(name: str) -> str:
    """Return one paragraph about a cause: meaning, level, verdict, signature, confirmation.

    Raises AprfmtError for a name that is not in the table.
    """
    row = CAUSES[name]
    return (
        f"{row.means} Level: {row.level} ({LEVELS[row.level]}). Verdict: {row.verdict}. "
        f"Seen by: {row.signature} Confirmed when: {row.confirms}"
    )
