"""What a row says: two sides, where the fault was met, and which answers are right."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

from aprfmt.measure.findings import Finding

Pair = tuple[object, object]
Names = str | Sequence[str]
# engine: another computation, seen through a trace. file: weights or metadata as other tools write
# them. packed: an encoding of few bits. tokens: tokenizer, template, generation. config: keys.
Kind = Literal["engine", "file", "packed", "tokens", "config", "control"]
KINDS: tuple[Kind, ...] = ("engine", "file", "packed", "tokens", "config", "control")
NO_THREAD = "none found"


@dataclass(frozen=True)
class Cause:
    """One seeded cause: any of `names` is right, at any place of the patterns `where`.

    The first name is what the matrix counts it as. Without patterns every place is right. `alike`:
    the names give the same values at all points of the dump, so all are named and none confirmed.
    """

    names: tuple[str, ...]
    where: tuple[str, ...] = ()
    alike: bool = False

    def named(self, name: str) -> bool:
        """Say whether a finding's cause is one of ours."""
        return name in self.names

    def placed(self, places: Sequence[str]) -> bool:
        """Say whether one of a finding's places is one of ours."""
        if not self.where:
            return True
        return any(fnmatchcase(place, pattern) for place in places for pattern in self.where)

    def settled(self, finding: Finding) -> bool:
        """Say whether a finding of this cause leaves nothing open that the dump could decide."""
        if not self.alike:
            return finding.confidence == "confirmed"
        named = {finding.cause, *finding.also}
        return finding.confidence == "ambiguous" and named == set(self.names)


@dataclass(frozen=True)
class Row:
    """One row: `make()` gives A, which is right, and B.

    `verdicts` are the right ones, the best first; `thread` the addresses of where it was met,
    separated by blanks. `coarse`: few points only. `options` go to `diagnose`.
    """

    name: str
    base: str
    says: str
    thread: str
    kind: Kind
    make: Callable[[], Pair]
    causes: tuple[Cause, ...] = ()
    verdicts: tuple[str, ...] = ("bug",)
    coarse: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def control(self) -> bool:
        """Nothing is broken: a verdict of a bug here is a false alarm."""
        return self.kind == "control"

    @property
    def frozen(self) -> bool:
        """Never looked at, and never tuned to."""
        return is_frozen(self.name)

    @property
    def counted_as(self) -> str:
        """The seeded cause in the matrix."""
        return self.causes[0].names[0] if self.causes else "none"


def is_frozen(name: str) -> bool:
    """Say whether a row of this name belongs to the frozen third."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % 3 == 0


def cause(names: Names, where: Names = (), *, alike: bool = False) -> Cause:
    """Return a seeded cause; names and places are one or several, `alike` as in Cause."""
    return Cause(_all(names), _all(where), alike)


def fault(
    name: str,
    kind: Kind,
    base: str,
    says: str,
    thread: str,
    make: Callable[[], Pair],
    names: Names | Cause | Sequence[Cause],
    where: Names = (),
    *,
    verdicts: Names = "bug",
    coarse: bool = False,
    **options: Any,
) -> Row:
    """Return the row of a fault; `names` are names of one cause, or all causes of a stack."""
    if isinstance(names, Cause):
        causes: tuple[Cause, ...] = (names,)
    elif isinstance(names, str):
        causes = (cause(names, where),)
    else:
        several = tuple(names)
        given = tuple(each for each in several if isinstance(each, Cause))
        words = tuple(each for each in several if isinstance(each, str))
        causes = given or (cause(words, where),)
    return Row(name, base, says, thread, kind, make, causes, _all(verdicts), coarse, options)


def control(
    name: str,
    base: str,
    says: str,
    make: Callable[[], Pair],
    names: Names,
    *,
    verdicts: Names,
    thread: str = "",
    coarse: bool = False,
    **options: Any,
) -> Row:
    """Return the row of a pair with nothing wrong; `names` may all be said of it."""
    causes = (cause(names),) if names else ()
    return Row(name, base, says, thread, "control", make, causes, _all(verdicts), coarse, options)


def _all(names: Names) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)
