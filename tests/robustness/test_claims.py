"""Every promise of the pages about hostile files and addresses names tests that are there and run.

Seen red: a test renamed, one that no run of `python -m tests` takes.
"""

import ast
import re

import pytest

from tests.conftest import ROOT
from tests.scope import LONG, family_of

NOTES = ROOT / "docs" / "notes" / "robustness.md"
PROMISES = ROOT / "docs" / "explanation" / "hostile_files.md"
ROWS = [line for line in NOTES.read_text().splitlines() if "::test_" in line and line[:2] == "| "]


def functions_of(file: str) -> set[str]:
    """Return the functions of a test file, without importing it."""
    body = ast.parse((ROOT / "tests" / file).read_text()).body
    return {node.name for node in body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split(" | ")[0].removeprefix("| "))
def test_a_claim_is_tried_in_every_run(row: str) -> None:
    names = re.findall(r"`([\w/]+\.py)::(test_\w+)`", row)
    assert names
    for file, function in names:
        assert function in functions_of(file), (file, function)
        assert f"tests/{file}::{function}" not in LONG, "left out of every sampled run"
        family = family_of(f"tests/{file}", function)
        assert family is None or family.unit is None, "its first variant is always taken"


def test_every_promise_has_its_claim() -> None:
    numbers = set(re.findall(r"^\| (P\d+) \|", PROMISES.read_text(), re.MULTILINE))
    held = {number for row in ROWS for number in re.findall(r"\bP\d+\b", row)}
    assert len(numbers) == 15 and numbers <= held
