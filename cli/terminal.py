"""What only a terminal shows: tables with rules, panels and bars, drawn by rich.

Nothing here is imported for a pipe, a file or an agent, which get plain aligned text (`render`).
Every text comes escaped, and is shown as it is: no markup, no emoji names, no highlighting. A cell
that is too wide goes on below; none is cut.
"""

import sys
from collections.abc import Mapping, Sequence
from io import BytesIO, TextIOWrapper

from rich import box
from rich.console import Console, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

# The styles of `render.STYLES` in rich's words.
STYLES: Mapping[str, str] = {
    "": "", "bad": "bold red", "warn": "yellow", "good": "green", "dim": "dim", "head": "bold",
}  # fmt: skip
BAR = 24  # columns of a bar
FOLDED = 24  # columns of a folded column of text, at least, where a text is as long
GAP = 2  # columns between two columns of a table


def print_table(
    headers: Sequence[str], rows: Sequence[Sequence[str]], alignment: str, styles: Mapping[int, str]
) -> None:
    """Print a table; `alignment` has an `r` for a column of numbers, `styles` those of rows."""
    drawn = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
    least = 0
    for i, (header, side) in enumerate(zip(headers, alignment, strict=True)):
        number = side == "r"
        longest = max(Text(text).cell_len for text in (header, *(row[i] for row in rows)))
        width = longest if number else min(longest, FOLDED)
        drawn.add_column(
            Text(header), justify="right" if number else "left", overflow="fold", no_wrap=number,
            min_width=width,
        )  # fmt: skip
        least += width + GAP
    for at, row in enumerate(rows):
        drawn.add_row(*map(Text, row), style=STYLES[styles.get(at, "")])
    _print(drawn, least)


def print_panel(text: str, style: str) -> None:
    """Print a text in a frame of a style."""
    _print(Panel(Text(text, STYLES[style]), border_style=STYLES[style], box=box.ROUNDED))


def draw_bar(done: int, total: int, *, colour: bool, encoding: str) -> str:
    """Return a bar of 24 columns that shows how far the work is, in characters of an encoding."""
    raw = BytesIO()
    out = TextIOWrapper(raw, encoding, newline="")
    console = Console(
        file=out,
        width=BAR,
        force_terminal=True,
        color_system="standard" if colour else None,
        no_color=not colour,
        legacy_windows=False,
    )
    console.print(ProgressBar(total=max(total, 1), completed=done if total else 1), end="")
    out.flush()
    text = raw.getvalue().decode(encoding)
    return text + " " * (BAR - Text.from_ansi(text).cell_len)  # without colours the rest is empty


def _print(what: RenderableType, least: int = 0) -> None:
    """Print on the terminal's columns, or on `least` of them: it then breaks lines by itself."""
    console = Console(
        file=sys.stdout, highlight=False, markup=False, emoji=False, force_terminal=True
    )
    console.print(what, width=max(console.width, least), crop=False)
