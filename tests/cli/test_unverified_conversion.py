"""A conversion whose copy could not be held to its source in all is no success."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from aprfmt.cli import convert_run
from aprfmt.model.verdict import Pronounced


@pytest.mark.parametrize("code", [0, 1, 2])
def test_the_exit_code_is_that_of_the_verification(
    code: Literal[0, 1, 2], monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict = Pronounced("some word", "some sentence", code)
    report: Any = SimpleNamespace(pronounced=lambda accept: verdict, to_json=dict)
    monkeypatch.setattr(convert_run, "convert_with_warnings", lambda *given, **wishes: report)
    monkeypatch.setattr(convert_run, "show_report", lambda *given: None)
    assert convert_run.run_conversion(Path("a"), Path("b"), None) == code
