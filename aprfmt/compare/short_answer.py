"""The first lines of an answer, for a person, an agent and a log: what `diff` and `diagnose` print.

Verdict, cause, place, how sure and how large, what was not compared, and the next command: at most
LINES lines, each a (text, style). Everything else comes with `-v`, in the page and as JSON.
"""

import re
from collections.abc import Iterator, Sequence

from aprfmt.measure.named_causes import NAMED, NamedCause

LINES = 12
ALIKE = 3  # lines of one kind; more are one line with a count
COMMANDS = 2
# What differs between two sentences that say one thing of several places.
PLACES = re.compile(r"\bL?\d[\w.+-]*")

Line = tuple[str, str]


def merge_alike(rows: Sequence[Line], most: int = ALIKE) -> list[Line]:
    """Return lines in order, those that differ in places and numbers only as one with a count.

    Up to `most` of a kind stay as they are.
    """
    kinds: dict[str, list[Line]] = {}
    for row in dict.fromkeys(rows):
        kinds.setdefault(PLACES.sub("#", row[0]), []).append(row)
    found: list[Line] = []
    for same in kinds.values():
        if len(same) <= most:
            found += same
        else:
            text, style = same[0]
            found.append((f"{text} (and {len(same) - 1} more like this)", style))
    return found


def cause_lines(
    causes: Sequence[NamedCause], *, first_said: bool, names: int = NAMED
) -> Iterator[Line]:
    """Yield the first cause with its place, certainty and effect, then the others in a line each.

    `first_said`: the line of the verdict has the first one's sentence already. `names`: so many of
    a place's names are shown.
    """
    for at, one in enumerate(causes[:1]):
        name = one.cause or "unknown cause"
        if at or not first_said:
            yield f"  {name}: {one.says}", "bad"
        if one.where:
            yield f"      where: {one.place(names)}", ""
        effect = f"; {one.effect.says}" if one.effect.says else ""
        yield f"      {one.sure}{effect}", ""
    yield from merge_alike(
        [
            (f"  {one.cause or 'unknown cause'} ({one.sure}): {one.says}", "warn")
            for one in causes[1:]
        ]
    )


def short_answer(
    headline: Line,
    causes: Sequence[NamedCause],
    *,
    first_said: bool,
    others: Sequence[Line] = (),
    left: Sequence[str] = (),
    unrun: Sequence[str] = (),
    unmended: str = "",
    commands: Sequence[str] = (),
    names: int = NAMED,
) -> list[Line]:
    """Return at most LINES lines.

    `others` are differences that are no causes, a line each; `left` is what was not compared, in
    words, `unrun` what was compared by its values alone, and no pass reached, `unmended` the
    sentence about what no command mends. What does not fit is
    counted: the verdict, the first cause, what was not compared and the commands always do.
    """
    end: list[Line] = []
    for title, rows in (("not compared", left), ("not reached by a pass", unrun)):
        if rows:
            more = f"; {len(rows) - 1} more (-v)" if len(rows) > 1 else ""
            end.append((f"{title}: {rows[0]}{more}", "warn"))
    end += [(unmended, "warn")] if unmended else []
    end += [(f"next: {text}", "head") for text in commands[:COMMANDS]]
    if len(commands) > COMMANDS:
        end.append((f"      ... {len(commands) - COMMANDS} more commands (-v)", "dim"))
    middle = [*cause_lines(causes, first_said=first_said, names=names), *merge_alike(others)]
    room = LINES - 1 - len(end)
    if len(middle) > room:
        hidden = len(middle) - (room - 1)
        middle = [*middle[: room - 1], (f"  ... {hidden} more lines (-v)", "dim")]
    return [headline, *middle, *end]
