"""The seeded faults of all causes, from the files that have a cause's own name."""

from importlib import import_module
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
KINDS = ("FAULTS", "FILE_FAULTS")  # of one tensor, and of a pair of models for `diagnose`


def files_of(folder: str) -> list[str]:
    """Return the names of a folder's files of seeded faults; files of tests are not among them."""
    paths = (HERE / folder).glob("*.py")
    return sorted(path.stem for path in paths if not path.stem.startswith("test_"))


def seeded(folder: str, kind: str) -> tuple[Any, ...]:
    """Return the faults of one kind in the order of files; a file with none of any kind raises."""
    found: list[Any] = []
    for name in files_of(folder):
        module = import_module(f"tests.causes.{folder}.{name}")
        if not any(hasattr(module, each) for each in KINDS):
            raise AttributeError(f"{module.__name__} has none of {', '.join(KINDS)}")
        found += getattr(module, kind, ())
    return tuple(found)
