"""A checkout small enough to try everything on: a product of two files and its tests."""

import shutil
import subprocess
from pathlib import Path

from tests.mutations.product import ROOT

SUMS = '''"""Sums."""

LIMIT = 3


def total(numbers):
    """Add up."""
    found = 0
    for number in numbers:
        found += number
    return found


def capped(numbers):
    """Add up to the limit."""
    if total(numbers) > LIMIT:
        return LIMIT
    return total(numbers)


def unused(number):
    """Nobody calls this."""
    return number + 1
'''

TESTS = """import subprocess
import sys
from functools import cache

import pytest

from aprfmt.sums import LIMIT, capped, total


@pytest.fixture(scope="module")
def three():
    return total([1, 2])


def test_total():
    assert total([1, 1]) == 2


def test_fixture(three):
    assert three == 3


def test_fixture_again(three):
    assert three != 4


@cache
def cached():
    return total([2, 2])


def test_cached():
    assert cached() == 4


def test_cached_again():
    assert cached() != 5


def test_limit():
    assert capped([LIMIT, 9]) == LIMIT


def test_process():
    code = "from aprfmt.sums import capped; print(capped([1]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "1\\n"


@pytest.mark.skip(reason="NOT-RUN")
def test_skipped():
    assert total([1]) == 1
"""


def checkout(place: Path) -> Path:
    """Make the checkout, with this package in it, as a git repository with nothing committed."""
    for name, text in {
        "aprfmt/__init__.py": '"""The product."""\n',
        "aprfmt/sums.py": SUMS,
        "tests/test_sums.py": TESTS,
        ".gitignore": "__pycache__/\nbuild/\n",
    }.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    here = place / "tests" / "mutations"
    shutil.copytree(ROOT / "tests" / "mutations", here, ignore=shutil.ignore_patterns("test_*"))
    subprocess.run(["git", "init", "-q"], cwd=place, check=True)
    return place
