"""Tables with rules, panels and bars for a terminal, drawn by rich.

Nothing here is imported for a pipe, a file or an agent, which get plain aligned text (`render`).
Every text comes escaped, and is shown unchanged: no markup, no emoji names, no highlighting. A cell
that is too wide is folded; none is cut.
"""

import sys
from collections.abc import Mapping, Sequence
from io import BytesIO, TextIOWrapper
from typing import Literal

from rich import box
from rich.console import Console
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
GAP = 3  # columns between two columns of a table: two blanks of padding and its divider


def print_table(
    headers: Sequence[str], rows: Sequence[Sequence[str]], alignment: str, styles: Mapping[int, str]
) -> None:
    """Print a table; `alignment` has an `r` for a column of numbers, `styles` is {row: style}.

    `rows` are the cells.
    """
    room = _console().width
    widths = _column_widths(headers, rows, alignment, room)
    drawn = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
    for header, side, width in zip(headers, alignment, widths, strict=True):
        justify: Literal["left", "right"] = "right" if side == "r" else "left"
        drawn.add_column(Text(header), justify=justify, overflow="fold", width=width)
    for at, row in enumerate(rows):
        drawn.add_row(*map(Text, row), style=STYLES[styles.get(at, "")])
    # A terminal breaks longer lines by itself; rich would take whole columns out.
    _console(max(room, sum(widths) + GAP * len(widths))).print(drawn)


def _column_widths(
    headers: Sequence[str], rows: Sequence[Sequence[str]], alignment: str, total: int
) -> list[int]:
    """Return each column's width: its longest cell, or less for text where `total` is short.

    A column of text is folded to FOLDED columns at least; numbers are never folded. `alignment` has
    an `r` for a column of numbers; `total` is the terminal's width.
    """
    widths = [
        max(1, *(Text(row[i]).cell_len for row in (headers, *rows))) for i in range(len(headers))
    ]
    texts = [i for i, side in enumerate(alignment) if side != "r"]
    over = sum(widths) + GAP * (len(widths) - 1) - total
    while over > 0 and texts and max(widths[i] for i in texts) > FOLDED:
        widest = max(texts, key=lambda i: widths[i])
        cut = min(over, widths[widest] - FOLDED)
        widths[widest] -= cut
        over -= cut
    return widths


def print_panel(text: str, style: str) -> None:
    """Print a text in a frame of the given style."""
    _console().print(Panel(Text(text, STYLES[style]), border_style=STYLES[style], box=box.ROUNDED))


def draw_bar(done: int, total: int, *, colour: bool, encoding: str) -> str:
    """Return a progress bar of BAR columns, in characters that `encoding` has.

    `done` of `total` is its filled part. With `colour` it holds ANSI escapes.
    """
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


def _console(width: int | None = None) -> Console:
    """Return rich's console on stdout that prints text unchanged, `width` columns wide.

    None is the terminal's width.
    """
    return Console(
        width=width,
        file=sys.stdout,
        highlight=False,
        markup=False,
        emoji=False,
        force_terminal=True,
        color_system="standard",
    )
