"""The verdict of a command, its sentence and its exit code: `pronounce` alone decides them.

An *item* is one thing that a model is made of, or that was compared: a tensor, a key, a text, a
file.

No other function says equal, same, PASS, verified or complete. `aprfmt.base.exit_codes` has what
every exit code of the program means.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from aprfmt.errors import UsageError
from aprfmt.model.ledger import DIFFERING, LATE, OPEN, NotCompared

_SHOWN = 3  # groups of items that are named; more are counted
_ALIKE = 2  # items of a kind that are named; more are their count, and as many of them
_NUMBER = re.compile(r"\d+(\.\d+)?(e[-+]?\d+)?")


@dataclass(frozen=True, slots=True)
class VerdictWords:
    """The words of a verdict: if all agrees, if something does not, and if that is not known."""

    yes: str
    no: str
    undecided: str = "not decided"


@dataclass(frozen=True)
class Compared:
    """What a comparison established.

    `differs`: a difference, bug or failed check. `counts`: {what is counted: (compared, total)},
    such as {"tensors": (48, 50)}. `left`: what was not compared by meaning. `detail`: how the
    counted things compare, in words. `scope`: words for what was compared, where the counts do not
    say it. `of_a_model`: the comparison is about a known model; a tensor of one of two models that
    nothing reads then leaves the verdict open.
    """

    differs: bool
    counts: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    left: tuple[NotCompared, ...] = ()
    detail: str = ""
    scope: str = ""
    of_a_model: bool = True

    @property
    def counts_text(self) -> str:
        """The counts in words, such as "48 of 50 tensors"."""
        return ", ".join(
            f"{done} {name}" if done == every else f"{done} of {every} {name}"
            for name, (done, every) in self.counts.items()
            if every
        )


@dataclass(frozen=True)
class Pronounced:
    """A verdict: its word, the headline with what was compared, and the exit code."""

    word: str
    says: str
    exit: Literal[0, 1, 2]
    not_compared: tuple[NotCompared, ...] = ()  # less what was accepted

    def to_json(self) -> dict[str, Any]:
        """Return {"pronounced": ...}, the key that all commands' JSON has for a verdict."""
        return {"pronounced": asdict(self)}


UNREAD = "unread:"  # what a pattern of --accept begins with


def acceptance_predicate(patterns: Collection[str]) -> Callable[[NotCompared], bool]:
    """Return a function that says whether an item is accepted by one of the `unread:PATTERN`s.

    PATTERN is a glob, `re:REGEX`, or a plain name: that of an item, of a module or key above it
    (`model.layers.1` for `model.layers.1.mlp.bias`), or of a kind. It is matched with an item's
    name, its kind, and both with a space between. Raises UsageError for an invalid one.
    """
    unread = [each.removeprefix(UNREAD) for each in patterns if each.startswith(UNREAD)]
    if not unread:
        return lambda row: False
    from aprfmt.model.patterns import exact_predicate

    wanted = list(map(exact_predicate, unread))

    def accept(row: NotCompared) -> bool:
        """Return whether an accepted pattern matches an item that was not compared.

        It may match the name, the kind, or both with a space between. A plain pattern may also be
        the first dotted components of a name, except of a file's name.
        """
        names = [row.name, f"{row.kind} {row.name}", row.kind]
        return any(matches(name, row.kind != "file") for matches in wanted for name in names)

    return accept


def _refuse_unmatched(patterns: Collection[str], rows: Sequence[NotCompared]) -> None:
    """Raise UsageError for an `unread:PATTERN` that matches none of the items not compared."""
    for each in patterns:
        if each.startswith(UNREAD) and not any(map(acceptance_predicate([each]), rows)):
            from aprfmt.model.patterns import similar_names

            near = similar_names(each.removeprefix(UNREAD), [row.name for row in rows])
            raise UsageError(
                f"--accept {each}: no item that was not compared matches; "
                + (f"near names: {', '.join(near)}" if near else "there is none")
            )


def pronounce(words: VerdictWords, compared: Compared, accept: Collection[str] = ()) -> Pronounced:
    """Return the verdict over what was compared. Every command's verdict is made here.

    Exit code 1: a difference is established, or an item that can carry meaning is in one model
    only, or is unread and unequal. 2: there is no difference, but something that had to be compared
    could not be, or nothing was. 0: all that can carry meaning agrees; unread items are byte for
    byte equal, or accepted by `accept`, a list of `unread:PATTERN`. Items that a budget left out
    are never accepted. Raises UsageError for a pattern that matches none of the items.
    """
    _refuse_unmatched(accept, compared.left)
    # Sort what was not compared: accepted, differing, unreadable, equal, without effect.
    matches = acceptance_predicate(accept)
    passed = [row for row in compared.left if row.state != LATE and matches(row)]
    left = tuple(row for row in compared.left if row.state == LATE or not matches(row))
    apart = [row for row in left if row.state in DIFFERING]
    unreadable = [row for row in left if row.state in OPEN or (compared.of_a_model and row.is_open)]
    equal = [row for row in left if row.state in ("equal", "unread") and row not in unreadable]
    outside = _list_items("; not compared", [row for row in left if row.state == "no counterpart"])
    # How much was compared, as part of the headline.
    scope = compared.counts_text
    of = compared.scope or (f": {scope}" if scope else "")
    plain = f", {scope}" if scope else ""
    plain += f": {compared.detail}" if compared.detail else ""
    plain = compared.scope or plain
    counted = sum(done for done, _ in compared.counts.values())
    # 1: something differs.
    if compared.differs or apart:
        rest = _list_items("; not compared", [*apart, *unreadable])
        rest += _list_items("; accepted, not compared", passed) + _list_items(
            "; not read here", equal
        )
        rest += outside
        held = f", though {words.yes} in what was compared{of}" if counted else ""
        begin = f"{words.no}{plain if compared.differs else held}"
        return Pronounced(words.no, f"{begin}{rest}", 1, left)
    # 2: nothing differs, but something necessary could not be compared.
    known = [row for row in equal if row.state == "equal"]
    if unreadable or not (counted or known or passed):
        rest = _list_items("; could not be compared", unreadable)
        nothing = "" if rest or compared.scope else "; nothing was compared"
        return Pronounced(words.undecided, f"{words.undecided}{plain}{rest}{nothing}", 2, left)
    # 0: all agrees; the headline lists what was accepted or has no counterpart.
    if passed or outside:
        rest = _list_items("; accepted, not compared", passed) + _list_items(
            "; not read here", equal
        )
        rest += outside
        return Pronounced(words.yes, f"{words.yes} in what was compared{of}{rest}", 0, left)
    return Pronounced(
        words.yes, f"{words.yes}{plain}{_list_items('; not read here', equal)}", 0, left
    )


def items_clause(rows: Sequence[NotCompared], begin: str = "; not compared") -> str:
    """Return the end of a sentence that lists items not compared; "" if there are none."""
    equal = [row for row in rows if row.state == "equal"]
    others = [row for row in rows if row.state != "equal"]
    return _list_items(begin, others) + _list_items("; not read here, and equal", equal)


def _list_items(begin: str, rows: Sequence[NotCompared]) -> str:
    """Return a clause that lists items after the words `begin`; "" if there are none.

    A kind with more than two items is given by its count and two names. At most three groups are
    named, the others are counted.
    """
    if not rows:
        return ""
    groups: dict[tuple[str, str], list[NotCompared]] = {}
    for row in rows:
        groups.setdefault((row.kind, row.place), []).append(row)
    said: list[tuple[str, int]] = []  # and how many items each speaks of
    for (kind, place), same in groups.items():
        if len(same) <= _ALIKE:
            said += [(row.text, 1) for row in same]
            continue
        why = _reasons(same)
        named = ", ".join(row.name for row in same[:_ALIKE])
        said.append((f"{len(same)} {plural_of_kind(kind)}{place}: {named}, ...{why}", len(same)))
    left = sum(count for _, count in said[_SHOWN:])
    return f"{begin}: {'; '.join(text for text, _ in said[:_SHOWN])}" + (
        f"; {left} more" if left else ""
    )


def _reasons(rows: Sequence[NotCompared]) -> str:
    """Return why several items were not compared, as " (...)"; "" if no item has a reason.

    Reasons that differ only in numbers are counted as one, and the first item's is shown. Several
    reasons are listed with the number of their items.
    """
    kinds: dict[str, list[NotCompared]] = {}
    for row in rows:
        kinds.setdefault(_NUMBER.sub("0", row.why), []).append(row)
    kinds.pop("", None)
    every = sorted(kinds.values(), key=len, reverse=True)
    if not every:
        return ""
    if len(every) == 1 and len(every[0]) == len(rows):
        return f" ({every[0][0].why})"
    said = [f"{len(same)}: {same[0].why}" for same in every[:_SHOWN]]
    left = sum(map(len, every[_SHOWN:]))
    return f" ({'; '.join([*said, *([f'{left} for other reasons'] if left else [])])})"


def plural_of_kind(kind: str) -> str:
    """Return the plural of a kind's name: "index entries", "scales of activations"."""
    first, of, rest = kind.partition(" of ")
    several = re.sub(r"(?<=[^aeiou])y$", "ie", first) + "s"
    return f"{several}{of}{rest}"
