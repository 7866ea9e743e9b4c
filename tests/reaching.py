"""Which test files reach a file of the product: `python -m tests --of PATH`.

Those that import its module, themselves or through other files of tests/, and those of the folder
or the name that mirrors it. Where there is none, those of the folder above: tests go over the rows
of a table. A test that gets there by a command alone is not seen: before a change is done,
`python -m tests` runs all.
"""

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
AT_THE_TOP = ("cli", "inference")  # imported as aprfmt.cli and aprfmt.inference


def tests_of(path: str) -> list[str]:
    """Return the test files for a file or folder of the product, as paths from the root, sorted.

    Raises FileNotFoundError where there is no such file.
    """
    target = (ROOT / path).resolve()
    if not target.exists():
        raise FileNotFoundError(f"{path}: not found below {ROOT}")
    inside = target.relative_to(ROOT)
    modules = {_module(each.relative_to(ROOT)) for each in [target, *target.rglob("*.py")]}
    found = {name for name in _imports() if _is_test(name) and modules & _closure(name)}
    parts = list(inside.with_suffix("").parts)[0 if inside.parts[0] in AT_THE_TOP else 1 :]
    mirror = ROOT.joinpath("tests", *parts)
    found |= {str(each.relative_to(ROOT)) for each in mirror.rglob("test_*.py")}
    same = mirror.with_name(f"test_{mirror.name}.py")
    found |= {str(same.relative_to(ROOT))} if same.is_file() else set()
    if not found:
        above = next(each for each in mirror.parents if each.is_dir())
        found = {str(each.relative_to(ROOT)) for each in above.glob("test_*.py")}
    return sorted(found)


def _is_test(name: str) -> bool:
    return Path(name).name.startswith("test_")


def _module(path: Path) -> str:
    """Return the dotted name of a file's module."""
    parts = [*path.with_suffix("").parts]
    if parts[0] in AT_THE_TOP:
        parts.insert(0, "aprfmt")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def _imports() -> Mapping[str, frozenset[str]]:
    """Return {file of tests/: every dotted name that it imports, or names in a text}."""
    return {
        str(path.relative_to(ROOT)): frozenset(_named(ast.parse(path.read_text())))
        for path in (ROOT / "tests").rglob("*.py")
    }


def _named(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{each.name}" for each in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value.startswith("aprfmt."):  # "module:function", as tables and patches have it
                yield node.value.partition(":")[0]


def _closure(name: str) -> set[str]:
    """Return what a file of tests/ imports, itself and by other files of tests/."""
    seen, left, found = {name}, [name], set[str]()
    while left:
        names = _imports()[left.pop()]
        found |= names
        files = {f"{each.replace('.', '/')}.py" for each in names if each.startswith("tests.")}
        new = files & _imports().keys() - seen
        seen |= new
        left += new
    return found
