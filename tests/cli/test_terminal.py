"""What a terminal shows: nothing is cut, nothing of a file is taken for markup, a pipe stays plain.

Seen red: cells cut with an ellipsis, a name in brackets taken for a colour, rich in a pipe.
"""

import io
import re
import sys
from collections.abc import Callable

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.text import Text

from aprfmt.cli import output_format, render, terminal

ROWS = [("a[red]b[/red]", "1,234"), (":smile:", "5"), ("blk.0.attn_q.weight", "777")]


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def terminal_of(monkeypatch: pytest.MonkeyPatch, columns: int) -> Terminal:
    """Return what stands for the terminal from now on; pytest sets stdout again for each phase."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys, "stdout", found := Terminal())
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(output_format, "answer_format", lambda: "human")
    return found


def test_a_table_has_a_rule_and_shows_text_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    out = terminal_of(monkeypatch, 80)
    render.table(ROWS, ("name", "bytes"), "lr", {1: "bad"})
    shown = click.unstyle(out.getvalue())
    for name, count in ROWS:
        assert re.search(rf"{re.escape(name)} +{count}", shown), shown
    assert "\u2500" in shown and "\x1b[" in out.getvalue()


def test_each_row_has_its_own_style_and_the_others_have_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first, one in the middle and the last; a style goes by the row's place from 0."""
    styles = {0: "bad", 2: "warn", 3: "good"}
    out = terminal_of(monkeypatch, 80)
    terminal.print_table(
        ("name", "n"), [("a", "1"), ("b", "2"), ("c", "3"), ("d", "4")], "lr", styles
    )
    _, _, *lines = out.getvalue().rstrip("\n").split("\n")
    colours = [re.findall(r"\x1b\[([\d;]*)m", line) for line in lines]
    assert [click.unstyle(line).split() for line in lines] == [
        ["a", "1"], ["b", "2"], ["c", "3"], ["d", "4"],
    ]  # fmt: skip
    assert [set(found) - {"0"} for found in colours] == [{"1;31"}, set(), {"33"}, {"32"}]


def test_a_pipe_gets_the_columns_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "aprfmt.cli.terminal")
    render.table(ROWS[1:], ("name", "bytes"), "lr", {1: "bad"})
    render.say_verdict("PASS: all", "good")
    assert capsys.readouterr().out.splitlines() == [
        "name                 bytes",
        ":smile:                  5",
        "blk.0.attn_q.weight    777",
        "PASS: all",
    ]
    assert "aprfmt.cli.terminal" not in sys.modules


def test_no_colour_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    out = terminal_of(monkeypatch, 80)
    monkeypatch.setenv("NO_COLOR", "1")
    render.table(ROWS, ("name", "bytes"), "lr")
    assert out.getvalue().startswith("name")


def test_a_verdict_stands_in_a_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    out = terminal_of(monkeypatch, 60)
    render.say_verdict("FAIL: [bold]no[/bold] " + "word " * 30, "bad")
    shown = click.unstyle(out.getvalue())
    assert shown.startswith("\u256d") and "[bold]no[/bold]" in shown and shown.count("word") == 30


@given(st.lists(st.text("abc-[]/: .", min_size=1, max_size=90), min_size=1, max_size=4),
       st.integers(30, 100))  # fmt: skip
def test_no_cell_is_cut(names: list[str], width: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", out := Terminal())
        patch.setenv("COLUMNS", str(width))
        terminal.print_table(("name", "n"), [(name, "12") for name in names], "lr", {})
    lines = click.unstyle(out.getvalue()).splitlines()[2:]
    assert all(len(line) <= width for line in lines)
    seen = "".join(line for line in lines).replace(" ", "")
    assert sorted(seen) == sorted("".join(f"{name}12" for name in names).replace(" ", ""))


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "ascii"])
def test_a_bar_has_its_width_in_every_encoding(encoding: str) -> None:
    for done, total in ((0, 9), (4, 9), (9, 9), (0, 0)):
        for colour in (True, False):
            drawn = terminal.draw_bar(done, total, colour=colour, encoding=encoding)
            drawn.encode(encoding)
            assert len(click.unstyle(drawn)) == terminal.BAR and "\n" not in drawn
    filled = [click.unstyle(terminal.draw_bar(n, 9, colour=False, encoding=encoding)).rstrip()
              for n in range(10)]  # fmt: skip
    assert sorted(filled, key=len) == filled and len(filled[9]) > len(filled[1])


@pytest.mark.parametrize("width", [20, 60, 80, 200])
def test_a_narrow_terminal_keeps_every_column(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers are not folded, and names beside them do not give way to them."""
    out = terminal_of(monkeypatch, width)
    headers = ("layer", "point", *(f"number{i}" for i in range(10)))
    rows = [(f"L{i}", f"ffn_gate_{i}", *(f"-{i}.0123456" for _ in range(10))) for i in range(3)]
    terminal.print_table(headers, rows, "ll" + "r" * 10, {1: "bad"})
    lines = [Text.from_ansi(line).plain.split() for line in out.getvalue().splitlines()]
    assert lines[0] == [*headers] and lines[2:] == [[*row] for row in rows]


def shown_panel() -> None:
    render.say_verdict("FAIL: one", "bad")


def shown_table() -> None:
    render.table(ROWS, ("name", "bytes"), "lr")


@pytest.mark.parametrize("show", [shown_panel, shown_table, lambda: render.line("a line")])
def test_a_line_of_progress_is_gone_before_anything_is_printed(
    show: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = terminal_of(monkeypatch, 60)
    cleared: list[str] = []
    monkeypatch.setattr(render.STATUS, "clear", lambda: cleared.append(out.getvalue()))
    show()
    assert cleared and cleared[0] == "" and out.getvalue()
