"""Progress: bytes, rate and time left on a terminal, nothing in a pipe; one line when interrupted.

Seen red: a line that says a percentage alone, an interrupted conversion that ends without a word.
"""

import io
import json
import os
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import click
import pytest

from aprfmt.cli import render
from tests.cli.run import ROOT, aprfmt
from tests.conftest import not_run
from tests.patience import PATIENCE


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
    monkeypatch.setattr(render, "is_flag_set", lambda flag: quiet and flag == "quiet")
    with render.ProgressLine("convert", "bytes") as progress:
        progress(1_000_000, 4_000_000)
        progress(4_000_000, 4_000_000)
    if not terminal or quiet:
        assert err.getvalue() == ""
        return
    first, second, erased, end = click.unstyle(err.getvalue()).split("\r")[1:]
    full = "\u2501" * 24
    assert first.startswith("convert \u2501") and second.startswith(f"convert {full} 100")
    assert first.endswith("  25 %, 1.0 MB of 4.0 MB, 500.0 kB/s, 6 s left")
    assert second.rstrip().endswith(" 100 %, 4.0 MB of 4.0 MB, 1.0 MB/s")
    assert len(second) == len(first) and not erased.strip() and not end


def test_each_line_is_on_the_terminal_when_its_function_returns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a command prints to stdout then stands behind an erased line, not before it."""
    there = io.BytesIO()

    class Buffered(io.TextIOWrapper):
        def isatty(self) -> bool:
            return True

    # A stream as a program around this one may open it: it holds all back until it is asked.
    monkeypatch.setattr(sys, "stderr", Buffered(io.BufferedWriter(there), "utf-8"))
    monkeypatch.setattr(render, "is_flag_set", lambda flag: False)
    line = render.StatusLine()
    line._ended.clear()
    line.counts("convert  45 %", 1.0)
    assert there.getvalue().decode() == "\rconvert  45 %"
    line.clear()
    assert there.getvalue().decode() == "\rconvert  45 %\r" + " " * 13 + "\r"
    line.counts("half", 2.0)
    line.end()
    assert there.getvalue().decode().endswith("\rhalf\r    \r")
    size = len(there.getvalue())
    line.clear()
    line.end()
    assert len(there.getvalue()) == size  # nothing is there to be erased
    render.ProgressLine("scan").say("one of two")
    assert there.getvalue()[size:].decode() == "scan: one of two\n"


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


# What is done first waits until the terminal has shown something: the first result comes after it.
CHILD = """
import importlib, sys
from aprfmt.cli import render
from aprfmt.cli.main import main

name, _, function = sys.argv.pop(1).rpartition(".")
module = importlib.import_module(name)
begin = getattr(module, function)
render.StatusLine.EVERY = 0.01

def wait(*arguments):
    print("opening", flush=True)
    assert sys.stdin.readline() == "shown\\n"
    render.StatusLine.EVERY = 1000.0  # nobody reads the terminal until the end
    setattr(module, function, begin)
    return begin(*arguments)

setattr(module, function, wait)
main(sys.argv[1:])
"""
OPENING = "aprfmt.model._open_file_or_index"
FIRST = {
    "scan": "aprfmt.fleet.run.find_models"
}  # what is done first, where that is not opening a model
LONG = {
    "diff": ["MODEL", "MODEL"],
    "hash": ["MODEL"],
    "inspect": ["MODEL"],
    "validate": ["MODEL"],
    "tensors": ["MODEL"],
    "convert": ["MODEL", "OUT"],
    "quantize": ["MODEL", "OUT", "--type", "Q8_0"],
    "parity": ["MODEL", "--between", "numpy:float64", "numpy", "--ids", "1,2,3"],
    "run": ["MODEL", "--ids", "1,2,3", "--max-tokens", "2"],
    "trace": ["MODEL", "--payload", "--ids", "1,2,3"],
    "eval": ["MODEL", "--ids", "1,2,3,4"],
    "export": ["MODEL", "-o", "OUT", "--to", "gguf"],
    "qa": ["MODEL", "--only", "metadata"],
    "diagnose": ["MODEL", "MODEL"],
    "scan": ["MODEL", "-o", "ROWS", "--checks", "layout"],
}


@pytest.mark.parametrize("name", LONG)
def test_a_terminal_sees_what_is_done_before_the_first_result(
    name: str, demo_model: Path, tmp_path: Path
) -> None:
    if not hasattr(os, "openpty"):
        not_run("there are no pseudo terminals here")
    places = {"MODEL": str(demo_model), "OUT": str(tmp_path / "out.gguf"),
              "ROWS": str(tmp_path / "rows.jsonl")}  # fmt: skip
    command = [places.get(word, word) for word in LONG[name]]
    ours, theirs = os.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, FIRST.get(name, OPENING), name, *command, "--json"],
        cwd=tmp_path, stderr=theirs,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    os.close(theirs)
    assert child.stdin is not None and child.stdout is not None
    try:
        assert child.stdout.readline() == "opening\n"
        seen = ""
        while f"\r{name}: " not in seen:
            seen += os.read(ours, 4096).decode()
        out, _ = child.communicate("shown\n", timeout=PATIENCE)
        assert json.loads(out)["command"] == name
        os.set_blocking(ours, False)
        try:
            while piece := os.read(ours, 4096).decode():
                seen += piece
        except OSError:  # the other end is closed
            pass
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
        os.close(ours)
    assert not seen.split("\r")[-1].strip(), "the line was left on the terminal"


class Pauses:
    """The event that ends a status line's thread: `rounds` times it is not set."""

    def __init__(self, rounds: int) -> None:
        self.left = rounds

    def wait(self, pause: float) -> bool:
        self.left -= 1
        return self.left < 0

    def is_set(self) -> bool:
        return self.left < 0

    def clear(self) -> None:
        raise AssertionError("nobody begins again")


def test_a_part_that_takes_long_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: 62 % for the 50 s in which differences were explained, a gate without its name."""
    err, now = Terminal(), [100.0]
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setattr("aprfmt.cli.render.time.monotonic", lambda: now[0])
    line = render.StatusLine()
    monkeypatch.setattr(render, "STATUS", line)

    def seen(rounds: int = 1) -> str:
        begin = len(err.getvalue())
        line._ended = Pauses(rounds)  # type: ignore[assignment]
        line._write_periodically(line._ended, 100.0)
        return click.unstyle(err.getvalue()[begin:]).strip()

    with render.ProgressLine("diff", then="explaining what differs") as progress:
        line._what, line._text, line._ended = "diff", "diff: comparing", Pauses(99)  # type: ignore[assignment]
        now[0] = 103.0
        progress(1, 4, "blk.0.attn_q.weight")
        assert " 25 %, 9 s left, blk.0.attn_q.weight" in err.getvalue()
        assert seen() == ""  # a moment ago
        now[0] = 105.0
        assert seen().startswith("diff 5 s ━") and "blk.0.attn_q" in err.getvalue()
        line._ended = Pauses(99)  # type: ignore[assignment]
        progress(4, 4)
        now[0] = 109.0
        assert seen() == "diff: explaining what differs, 9 s"


def test_every_command_says_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread begins before the function of the command is called, in all of them."""
    from importlib import import_module

    import click

    from aprfmt.cli.commands import COMMANDS

    began: list[str] = []

    def begin(self: object, what: str, doing: str) -> None:
        began.append(what)
        raise KeyboardInterrupt

    monkeypatch.setattr(render.StatusLine, "begin", begin)
    for name, row in COMMANDS.items():
        command = import_module(f"aprfmt.cli.{row.module}").command
        given = {each.name: each.get_default(click.Context(command)) for each in command.params}
        context = click.Context(command, info_name=name)
        context.params = {key: value for key, value in given.items() if key is not None}
        exposed = {each.name: given[each.name] for each in command.params if each.expose_value}
        with pytest.raises(KeyboardInterrupt), context:
            command.callback(**exposed)
    assert began == list(COMMANDS)


def test_a_pipe_and_quiet_see_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for terminal, quiet in ((False, False), (True, True)):
        err = Terminal() if terminal else io.StringIO()
        monkeypatch.setattr(sys, "stderr", err)
        monkeypatch.setattr(render, "is_flag_set", lambda flag, quiet=quiet: quiet)
        monkeypatch.setattr(
            render.StatusLine, "_write_periodically", lambda *_: pytest.fail("a thread began")
        )
        line = render.StatusLine()
        line.begin("diff", "reading")
        line.doing("comparing")
        line.end()
        assert err.getvalue() == ""


COUNTED = {
    "convert": ["MODEL", "OUT"],
    "quantize": ["MODEL", "OUT", "--type", "Q8_0"],
    "inspect": ["MODEL", "--html", "PAGE", "--stats"],
    "hash": ["MODEL"],
    "validate": ["MODEL"],
    "diff": ["MODEL", "MODEL", "-v"],
    "tensors": ["MODEL", "--stats"],
    "scan": ["MODEL", "-o", "ROWS", "--checks", "layout"],
}


@pytest.mark.parametrize("name", COUNTED)
def test_progress_grows_up_to_all(
    name: str, demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(
        render.ProgressLine, "__call__", lambda self, done, total: seen.append((done, total))
    )
    places = {"MODEL": demo_model, "OUT": tmp_path / "out.gguf", "PAGE": tmp_path / "page.html",
              "ROWS": tmp_path / "rows.jsonl"}  # fmt: skip
    assert aprfmt(name, *(places.get(word, word) for word in COUNTED[name])).code == 0
    assert seen
    for total, calls in groupby(seen, key=lambda row: row[1]):  # one after the other
        done = [each for each, _ in calls]
        assert done == sorted(done) and done[0] >= 0 and done[-1] == total


@pytest.mark.parametrize(
    ("after", "shown"),
    [((0.5, 0.9), 0), ((0.5, 1.0), 1), ((1.0, 1.05), 1), ((1.0, 1.1), 2), ((1.0, 1.05, 1.125), 2)],
)
@pytest.mark.parametrize("began", [0.0, 1000.0])
def test_it_is_shown_after_a_second_and_ten_times_a_second(
    began: float, after: tuple[float, ...], shown: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the clock shows when the work begins: it may count from when the machine began."""
    now = [began]
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr("aprfmt.cli.render.time.monotonic", lambda: now[0])
    seen: list[str] = []
    monkeypatch.setattr(render.STATUS, "counts", lambda text, at: seen.append(text))
    progress = render.ProgressLine("convert")
    for done, seconds in enumerate(after, 1):
        now[0] = began + seconds
        progress(done, 100)
    assert len(seen) == shown
    now[0] = began + 9
    progress(100, 100)
    assert len(seen) == shown + 1 and " 100 %" in click.unstyle(seen[-1])
