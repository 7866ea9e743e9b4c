"""One name, one meaning: no class or type of the product shares its name with another thing."""

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINKS = ("aprfmt/cli/", "aprfmt/inference/")
# An array is numpy's, or of whatever library the backend uses.
SHARED = frozenset({"Array"})


def types(name: str, text: str) -> Iterator[tuple[str, str]]:
    """Yield the names of a module's classes and type aliases, and what each one is."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            yield node.name, f"the class in {name}"
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if (
                    isinstance(target, ast.Name)
                    and target.id[0].isupper()
                    and not target.id.isupper()
                ):
                    yield target.id, ast.unparse(node.value).replace("npt.", "").replace("np.", "")


def ambiguous(modules: Mapping[str, str]) -> dict[str, set[str]]:
    """Return what names with more than one meaning stand for, by name."""
    found = defaultdict(set)
    for name, text in modules.items():
        for word, meaning in types(name, text):
            found[word].add(meaning)
    return {word: meanings for word, meanings in found.items() if len(meanings) > 1}


def test_names_of_types_mean_one_thing() -> None:
    modules = {
        name: path.read_text(encoding="utf-8")
        for folder in ("aprfmt", "cli", "inference")
        for path in (ROOT / folder).rglob("*.py")
        if not (name := path.relative_to(ROOT).as_posix()).startswith(LINKS)
    }
    assert ambiguous(modules).keys() == SHARED


def test_a_second_meaning_is_seen() -> None:
    one, two = "class Row: ...\nPart = list[int]\n", "class Row: ...\nPart = list[int]\nLIMIT = 3\n"
    assert ambiguous({"a.py": one, "b.py": two}).keys() == {"Row"}
    assert ambiguous({"a.py": "Part: TypeAlias = bytes", "b.py": one}).keys() == {"Part"}
