"""Progress: bytes, rate and time left on a terminal, nothing in a pipe; one line when interrupted.

Seen red: a line that says a percentage alone, an interrupted conversion that ends without a word.
"""

import io
import sys
from pathlib import Path

import pytest

from aprfmt.cli import render
from tests.cli.run import aprfmt


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_is_said_of_the_work() -> None:
    said = render.progress_text(1_350_000_000, 3_000_000_000, 5.0, "bytes")
    assert said == " 45 %, 1.4 GB of 3.0 GB, 270.0 MB/s, 6 s left"
    assert render.progress_text(3, 4, 600.0, "") == " 75 %, 3 min 20 s left"
    assert render.progress_text(4, 4, 1.0, "") == "100 %"
    assert render.progress_text(0, 4, 0.0, "") == "  0 %"
    assert render.duration_text(7500) == "2 h 5 min"


@pytest.mark.parametrize(("terminal", "quiet"), [(True, False), (True, True), (False, False)])
def test_only_a_terminal_sees_it_and_it_is_erased(
    terminal: bool, quiet: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    err = Terminal() if terminal else io.StringIO()
    now = iter(range(0, 100, 2))  # a clock of our own
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setattr("aprfmt.cli.render.time.monotonic", lambda: float(next(now)))
    monkeypatch.setattr(render, "wanted", lambda flag: quiet and flag == "quiet")
    with render.ProgressLine("convert", "bytes") as progress:
        progress(1_000_000, 4_000_000)
        progress(4_000_000, 4_000_000)
    if not terminal or quiet:
        assert err.getvalue() == ""
        return
    first, second, erased, end = err.getvalue().split("\r")[1:]
    assert first == "convert  25 %, 1.0 MB of 4.0 MB, 500.0 kB/s, 6 s left"
    assert second.rstrip() == "convert 100 %, 4.0 MB of 4.0 MB, 1.0 MB/s"
    assert len(second) == len(first) and not erased.strip() and not end


def test_an_interrupted_conversion_says_what_was_undone(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(self: render.ProgressLine, done: int, total: int) -> None:
        assert list(tmp_path.iterdir()), "nothing had been begun"
        raise KeyboardInterrupt

    monkeypatch.setattr(render.ProgressLine, "__call__", interrupt)
    done = aprfmt("convert", demo_model, tmp_path / "a.gguf")
    assert (done.code, done.out) == (130, "")
    (line,) = done.err.split("\n")[1:-1]  # click ends the line of ^C first
    assert "interrupted: unfinished output was removed" in line
    assert list(tmp_path.iterdir()) == []
