"""Every row of every table has a test in the fast set, named by the row."""

import os
import re
import subprocess
import sys
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path

import pytest

from aprfmt.arch import ARCHS
from aprfmt.base.encodings import ENCODINGS
from aprfmt.base.outcome import Outcome
from aprfmt.causes import CAUSES, describe
from aprfmt.checks import validate
from aprfmt.checks.gates import running as qa
from aprfmt.checks.table import CHECKS
from aprfmt.cli.commands import COMMANDS
from aprfmt.cli.explain import all_topics
from aprfmt.codecs import CODECS
from aprfmt.formats import FORMATS
from aprfmt.inference.backends import BACKENDS
from aprfmt.inference.engines import ENGINES
from tests.cli.run import aprfmt
from tests.patience import PATIENCE

# One process asks all of them: collecting the fast set and asking every check cost seconds.
pytestmark = pytest.mark.xdist_group("rows")

ROOT = Path(__file__).resolve().parent.parent
TABLES: Mapping[str, Collection[str]] = {
    "architectures": ARCHS.own, "backends": BACKENDS.own, "causes": CAUSES.own,
    "checks": [row.name for row in CHECKS], "codecs": CODECS.own, "commands": tuple(COMMANDS),
    "encodings": tuple(ENCODINGS), "engines": ENGINES.own, "formats": FORMATS.own,
}  # fmt: skip
WHOLE = 5000  # tests: a collection of more is one of the whole suite
# Gates that have nothing to ask of the shipped model by itself: the input they want.
WANTS = {"device-parity": "another device", "baseline": "a baseline file"}


@cache
def outcomes(model: Path) -> Mapping[str, Outcome]:
    """Return what every check says of a model."""
    answers = [*validate(model, against=model, second_reader=True).answers, *qa.run(model).answers]
    return {answer.name: answer.outcome for answer in answers}


@pytest.mark.parametrize("name", TABLES["checks"])
def test_a_check_finds_nothing_wrong_with_the_shipped_model(name: str, demo_model: Path) -> None:
    row = next(row for row in CHECKS if row.name == name)
    absent = name in WANTS or (bool(row.formats) and "safetensors" not in row.formats)
    found = outcomes(demo_model)[name]
    assert found == "PASS" or (found == "NOT_RUN" and name != "layout"), found
    assert not absent or found == "NOT_RUN"


@pytest.mark.parametrize("name", TABLES["encodings"])
def test_an_encoding_is_explained_and_has_its_codec_or_says_why_not(name: str) -> None:
    row = ENCODINGS[name]
    assert all_topics()["encoding"][name]
    assert (name in CODECS) == row.known or not row.ggml, name


@pytest.mark.parametrize("name", TABLES["causes"])
def test_a_cause_is_a_word_that_is_explained_with_what_to_do(name: str) -> None:
    done, cause = aprfmt("explain", name), CAUSES[name]
    assert done.code == 0 and name in done.out
    assert re.fullmatch(r"[a-z0-9_]+", name) and cause.name == name
    assert all_topics()["cause"][name] == describe(name) and len(describe(name).split()) > 5


@pytest.mark.parametrize("table", TABLES)
def test_the_fast_set_names_every_row(table: str, request: pytest.FixtureRequest) -> None:
    words = fast_words(request.session)
    missing = [row for row in TABLES[table] if row not in words]
    assert len(TABLES[table]) > 1 and not missing


@cache
def fast_words(session: pytest.Session) -> frozenset[str]:
    """Return the words of all ids of fast tests' parameters, those of this file left out.

    A run of all tests knows them; one of a few asks a process that collects the others.
    """
    nodes = [each.nodeid for each in session.items if each.get_closest_marker("slow") is None]
    if len(nodes) < WHOLE:
        nodes = collected()
    ids = [
        line.partition("[")[2].rpartition("]")[0]
        for line in nodes
        if not line.startswith("tests/test_rows.py::test_the_fast_set")
    ]
    return frozenset(word for each in ids for word in (each, *re.split(r"[-:/ ,=]", each)))


def collected() -> list[str]:
    """Return the ids of all fast tests."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "not slow", "tests"],
        cwd=ROOT,
        env=os.environ | {"PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if "::" in line]
    assert len(lines) > WHOLE, done.stdout[-500:]
    return lines
