"""The seeded faults of all causes, from the files that have a cause's own name."""

from importlib import import_module
from pathlib import Path
from typing import Any

from aprfmt.causes import modules_of

HERE = Path(__file__).parent
# Of one tensor; of a pair of models, and of the trace of an engine, for `diagnose`.
KINDS = ("FAULTS", "FILE_FAULTS", "ENGINE_FAULTS")


def files_of(folder: str) -> list[str]:
    """Return the names of a folder's files of seeded faults; files of tests are not among them.

    In the folder of all causes, "", which has other files too, they are those that have the name
    of a module of causes.
    """
    paths = (HERE / folder).glob("*.py")
    names = {path.stem for path in paths if not path.stem.startswith("test_")}
    if not folder:
        names &= {name.rpartition(".")[2] for name in modules_of("")}
    return sorted(names)


def seeded(folder: str, kind: str) -> tuple[Any, ...]:
    """Return the faults of one kind in the order of files; a file with none of any kind raises."""
    found: list[Any] = []
    for name in files_of(folder):
        module = import_module(".".join(filter(None, ("tests.causes", folder, name))))
        if not any(hasattr(module, each) for each in KINDS):
            raise AttributeError(f"{module.__name__} has none of {', '.join(KINDS)}")
        found += getattr(module, kind, ())
    return tuple(found)
