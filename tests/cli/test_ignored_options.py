"""Options of our own backends, given for another engine's run: said to be ignored, never silently.

Seen red: no warning for one of the two options, one for a run of ours, one without an option.
"""

import re
from pathlib import Path
from typing import Any

import pytest

from aprfmt.cli import run_options
from aprfmt.errors import AprfmtError
from aprfmt.inference.engines import ENGINES
from tests.cli.run import aprfmt

RUNS = [name for name in ENGINES if name in ("transformers", "llama.cpp")]
IGNORED = "--deterministic and --memory are for our own backends; ignored"


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def session(*of: Any, **named: Any) -> Any:
        raise AprfmtError("nothing is run")

    monkeypatch.setattr(run_options, "open_session", session)


def said(model: Path, *options: str) -> str:
    done = aprfmt("trace", model, "--payload", "--ids", "1,2", *options)
    assert done.code == 2 and "nothing is run" in done.err, done.err
    return done.err


@pytest.mark.parametrize("spelled", ["option", "name"])
@pytest.mark.parametrize("option", [("--deterministic",), ("--memory", "1G")], ids=lambda o: o[0])
@pytest.mark.parametrize("engine", RUNS)
def test_an_engine_is_warned_of(
    engine: str, option: tuple[str, ...], spelled: str, demo_model: Path
) -> None:
    model = demo_model if spelled == "option" else Path(f"{demo_model}@{engine}")
    named = ("--engine", engine) if spelled == "option" else ()
    err = said(model, *named, *option)
    assert len(re.findall(IGNORED, err)) == 1
    assert f"warning: {engine}" in err and "(aprfmt explain ignored_option)" in err


@pytest.mark.parametrize("options", [("--deterministic",), ("--memory", "1G"), ()], ids=str)
def test_our_own_backends_have_them(options: tuple[str, ...], demo_model: Path) -> None:
    assert "ignored" not in said(demo_model, *options)
    assert "ignored" not in said(Path(f"{demo_model}@numpy"), *options)


@pytest.mark.parametrize("engine", RUNS)
def test_an_engine_alone_is_not_warned_of(engine: str, demo_model: Path) -> None:
    assert "ignored" not in said(demo_model, "--engine", engine)


def test_both_engines_are_there() -> None:
    assert len(RUNS) == 2
