"""Show a result in a notebook: a small card of plain HTML, all text of files escaped.

A card has a title, a verdict, facts, and tables of a few rows. Nothing is fetched, nothing runs;
colours are in borders only, so that text keeps those of the notebook's theme.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

from aprfmt.base.text_escape import escape_html

ROWS = 8  # of a table
LONGEST = 200  # characters of a cell
Tone = Literal["", "good", "warn", "bad"]


@dataclass(frozen=True)
class Table:
    """The first rows of a table with its headings; `count` is the number of all rows."""

    head: Sequence[str]
    rows: Sequence[Sequence[object]]
    count: int


@dataclass(frozen=True)
class Card:
    """What is shown of one result; `kind` colours the verdict.

    Facts that are empty or None are left out.
    """

    title: str
    verdict: str = ""
    kind: Tone = ""
    facts: Sequence[tuple[str, object]] = ()
    tables: Sequence[Table] = field(default_factory=tuple)

    def html(self) -> str:
        """Return the card as HTML, with its style sheet."""
        parts = [_element("b", escape_html(self.title, LONGEST))]
        if self.verdict:
            parts.append(_element("p", escape_html(self.verdict, 3 * LONGEST), self.kind))
        known = [(name, value) for name, value in self.facts if value not in ("", None)]
        if known:
            parts.append(_table((), [(name, value) for name, value in known]))
        for table in self.tables:
            if table.rows:
                shown = [list(row) for row in table.rows[:ROWS]]
                more = table.count - len(shown)
                parts.append(_table(table.head, [*shown, *([[f"... {more} more"]] * (more > 0))]))
        return _element("style", _style()) + _element("div", "".join(parts), "aprfmt")


@cache
def _style() -> str:
    """Return the style sheet of cards."""
    from importlib.resources import files

    return (files("aprfmt.base") / "notebook.css").read_text(encoding="utf-8")


def _element(tag: str, inner: str, name: str = "") -> str:
    """Return an HTML element; `inner` is HTML, `name` its class or ""."""
    attribute = f' class="{name}"' if name else ""
    return f"<{tag}{attribute}>{inner}</{tag}>"


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return an HTML table of escaped cells; without headings the first cell of each row is one."""
    lines = ["".join(_element("th", escape_html(name)) for name in head)] if head else []
    for row in rows:
        cells = [escape_html(str(cell), LONGEST) for cell in row]
        tags = ["th" if not head and not at else "td" for at in range(len(cells))]
        lines.append("".join(_element(tag, cell) for tag, cell in zip(tags, cells, strict=True)))
    return _element("table", "".join(_element("tr", line) for line in lines))
