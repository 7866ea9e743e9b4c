"""The causes: what can make two models, runs or traces differ, in words and in what finds them.

A cause, or a family that is found in one way, is one module of `tensor/`, `tokenizer/`,
`training/` or `forward/`, and is in the table by being there. `CAUSE_ROWS` of a module are its
causes in words; `HYPOTHESES` are its functions, each with a rank and the reason for it. A folder's
modules are imported when what it looks at is found to differ, or when a cause is asked for that no
imported module has. Other packages add rows through the entry-point group `aprfmt.causes`.
"""

import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from aprfmt.base.registry import Registry
from aprfmt.causes.row import Cause
from aprfmt.measure.verdicts import LEVELS

__all__ = [
    "CAUSES",
    "JUDGED",
    "Cause",
    "describe",
    "hypotheses_of",
    "judging_sentences",
    "modules_of",
]

FOLDERS = ("", "tokenizer", "tensor", "training", "forward")  # "" is this folder
# A name is looked for in this order: what a training step did imports its own before it asks.
_SEARCHED = ("", "tokenizer", "tensor", "forward", "training")


@cache
def modules_of(folder: str) -> tuple[str, ...]:
    """Return the full import names of the modules in a folder of causes, sorted; imports nothing.

    `folder` is one of FOLDERS; "" is the package itself.
    """
    found = iter_modules([str(Path(__file__).parent / folder)])
    package = f"{__name__}.{folder}" if folder else __name__
    return tuple(sorted(f"{package}.{row.name}" for row in found if not row.ispkg))


class CauseTable(Mapping[str, Cause]):
    """All causes by name, ours in the order of folders and modules, then other packages'."""

    def __init__(self) -> None:
        """Start with no cause looked up; `_known` holds the rows found so far by name."""
        self._known: dict[str, Cause] = {}

    @property
    def own(self) -> tuple[str, ...]:
        """Names of the causes of this package, without those that entry points add."""
        return _load_all_causes().own

    def __getitem__(self, name: str) -> Cause:
        """Return the cause of this name; raise AprfmtError with similar names if there is none."""
        if name not in self._known:
            row = _find_cause_row(name) or _load_all_causes()[name]
            self._known[name] = row
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of all causes, those of other packages included."""
        return iter(_load_all_causes())

    def __len__(self) -> int:
        """Return the number of causes, those of other packages included."""
        return len(_load_all_causes())

    def __contains__(self, name: object) -> bool:
        """Return whether there is a cause of this name."""
        if name in self._known:
            return True
        return isinstance(name, str) and (
            _find_cause_row(name) is not None or name in _load_all_causes()
        )


def _find_cause_row(name: str) -> Cause | None:
    """Return this package's cause of a name, or None; imports modules only if it has to.

    Modules that are imported already are searched first, then each folder's modules are imported in
    the order of FOLDERS until one has the name.
    """
    for load in (False, True):
        for folder in _SEARCHED:
            for module in modules_of(folder):
                found = import_module(module) if load else sys.modules.get(module)
                for row in getattr(found, "CAUSE_ROWS", ()):
                    if row.name == name:
                        return row  # type: ignore[no-any-return]
    return None


@cache
def _load_all_causes() -> Registry[Cause]:
    """Return the registry of all causes by name; imports every module of every folder."""
    rows = [
        row
        for folder in FOLDERS
        for module in modules_of(folder)
        for row in getattr(import_module(module), "CAUSE_ROWS", ())
    ]
    return Registry("causes", {}, held={row.name: row for row in rows})


def hypotheses_of(folder: str) -> tuple[Any, ...]:
    """Return the HYPOTHESES of all modules of a folder, lowest rank first; imports the modules."""
    rows = [
        row
        for module in modules_of(folder)
        for row in getattr(import_module(module), "HYPOTHESES", ())
    ]
    return tuple(sorted(rows, key=lambda row: row.rank))


CAUSES = CauseTable()


# What judges a cause that a folder's modules find, so that it may be called confirmed.
JUDGED: Mapping[str, str] = {
    "": "what both files say of themselves: nothing is fitted",
    "tokenizer": "probe texts, conversations and ends: it is read in the files, and found on none "
    "of these",
    "tensor": "every value it speaks of: twice as many as numbers were read from them, and digits "
    "enough that none of the other guesses fits by chance",
    "training": "every element of the parameter: numbers are fitted on one half of them and judged "
    "on the other",
    "forward": "rows of the point that its numbers were not fitted to, with twice their digits, or "
    "other points that differed and agree",
}


def judging_sentences(name: str) -> tuple[str, ...]:
    """Return sentences that say which data confirm a cause, one for each folder that finds it.

    A cause that can only be located gets one sentence that says so.
    """
    if CAUSES[name].most == "located":
        return ("it is measured and never made again: located, not more",)
    found = []
    for folder in FOLDERS:
        modules = [import_module(module) for module in modules_of(folder)]
        rows = {row.name for module in modules for row in getattr(module, "CAUSE_ROWS", ())}
        tried = [row for module in modules for row in getattr(module, "HYPOTHESES", ())]
        by = {cause for row in tried for cause in getattr(row, "causes", None) or (row.cause,)}
        if name in rows or name in by:
            found.append(JUDGED[folder])
    return tuple(found)


def describe(name: str) -> str:
    """Return one paragraph about a cause: meaning, level, verdict, signature, confirmation.

    Raises AprfmtError for a name that is not in the table.
    """
    row = CAUSES[name]
    return (
        f"{row.means} Level: {row.level} ({LEVELS[row.level]}). Verdict: {row.verdict}. "
        f"Seen by: {row.signature} Confirmed when: {row.confirms}"
    )
