"""The first lines that `diff` and `diagnose` print, at most 12: (text, style) each.

Verdict, cause, where it is (its places), certainty and size, what was not compared, and the next
command. Everything else comes with `-v`, in the page and as JSON.
"""

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from aprfmt.base.sequences import NAMED
from aprfmt.base.text_escape import shorten_names

if TYPE_CHECKING:
    from aprfmt.measure.named_causes import NamedCause

LINES = 12
ALIKE = 3  # lines of one kind; more are one line with a count
COMMANDS = 2
# What differs between two sentences that say one thing of several places.
PLACES = re.compile(r"\bL?\d[\w.+-]*")

Line = tuple[str, str]


def merge_similar_lines(rows: Sequence[Line]) -> list[Line]:
    """Return lines in order, with lines that differ only in places and numbers merged into one.

    Up to ALIKE similar lines stay separate; more become the first line and a count.
    """
    kinds: dict[str, list[Line]] = {}
    for row in dict.fromkeys(rows):
        kinds.setdefault(PLACES.sub("#", row[0]), []).append(row)
    found: list[Line] = []
    for same in kinds.values():
        if len(same) <= ALIKE:
            found += same
        else:
            text, style = same[0]
            found.append((f"{text} (and {len(same) - 1} more like this)", style))
    return found


def cause_lines(
    causes: "Sequence[NamedCause]", *, first_said: bool, names: int = NAMED, first_token: str = ""
) -> Iterator[Line]:
    """Yield (text, style): the first cause in several lines, then each other cause in one.

    `first_said`: the line of the verdict already has the first one's sentence. `names` is how many
    of a cause's places are named. `first_token` is the sentence about the first token that differs,
    said after the first cause.
    """
    for at, one in enumerate(causes[:1]):
        name = one.cause or "unknown cause"
        if at or not first_said:
            yield f"  {name}: {one.says}", "bad"
        if one.where:
            yield f"      where: {one.places_text(names)}", ""
        effect = f"; {one.effect.text}" if one.effect.text else ""
        yield f"      {one.certainty_text}{effect}", ""
    if first_token:
        yield f"      {first_token}", ""
    yield from merge_similar_lines(
        [
            (f"  {one.cause or 'unknown cause'} ({one.certainty_text}): {one.says}", "warn")
            for one in causes[1:]
        ]
    )


def short_answer(
    headline: Line,
    causes: "Sequence[NamedCause]",
    *,
    first_said: bool,
    others: Sequence[Line] = (),
    not_compared: Sequence[str] = (),
    unrun: Sequence[str] = (),
    unmended: str = "",
    commands: Sequence[str] = (),
    source: str = "",
    names: int = NAMED,
    first_token: str = "",
) -> list[Line]:
    """Return the short answer, at most LINES lines of (text, style).

    `first_said`: the headline already has the first cause's sentence. `others` are differences that
    are no causes, a line each. `not_compared` are sentences on what was not compared, `unrun` on
    what was compared by values and never run. `unmended` says what no command repairs. `source` is
    the path of A, from which a command may only write B again. `names` is how many of a cause's
    places are named. `first_token` is the sentence about the first token that differs, or "". What
    does not fit is counted: the verdict, the first cause, what was not compared and the commands
    are always shown. Long names are shortened, except in commands.
    """
    end: list[Line] = []
    for title, rows in (("not compared", not_compared), ("not reached by a pass", unrun)):
        if rows:
            more = f"; {len(rows) - 1} more (-v)" if len(rows) > 1 else ""
            end.append((f"{title}: {rows[0]}{more}", "warn"))
    if commands and source and not unmended:
        from aprfmt.measure.named_causes import written_again_text

        unmended = written_again_text(commands[:COMMANDS], source)
    end += [(unmended, "warn")] if unmended else []
    ways = [(f"next: {text}", "head") for text in commands[:COMMANDS]]
    if len(commands) > COMMANDS:
        ways.append((f"      ... {len(commands) - COMMANDS} more commands (-v)", "dim"))
    middle = [
        *cause_lines(causes, first_said=first_said, names=names, first_token=first_token),
        *merge_similar_lines(others),
    ]
    room = LINES - 1 - len(end) - len(ways)
    if len(middle) > room:
        hidden = len(middle) - (room - 1)
        middle = [*middle[: room - 1], (f"  ... {hidden} more lines (-v)", "dim")]
    said = [headline, *middle, *end]
    return [*((shorten_names(text), style) for text, style in said), *ways]
