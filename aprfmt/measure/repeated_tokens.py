"""Requests of one dump that have the same tokens, compared with each other: batch invariance.

The values of a request should not depend on the other requests of its batch, nor on its place
among them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from aprfmt.base.protocols import Value
from aprfmt.measure.trace_view import TraceLike


@dataclass(frozen=True, slots=True)
class RepeatedTokens:
    """Two requests of a dump with the same tokens: at which points their values differ.

    `requests` names both, `tokens` is how many tokens they share from the first on. `compared` is
    the number of points with values of both. `unequal` are the keys of those with a value that
    differs, `beyond` of those beyond their tolerance, in execution order. `apart` is the relative
    L2 at the first of `beyond`, else of `unequal`; 0 without any.
    """

    requests: str
    tokens: int
    compared: int
    unequal: tuple[str, ...]
    beyond: tuple[str, ...]
    apart: float

    @property
    def first(self) -> str:
        """Key of the first point where the requests differ, beyond tolerance if any is; else ""."""
        return next(iter((*self.beyond, *self.unequal)), "")

    @property
    def says(self) -> str:
        """A sentence that names both requests and says where their values differ, and how far."""
        begin = f"{self.requests} have the same {self.tokens} tokens"
        if not self.unequal:
            return f"{begin}: every value of {self.compared} points is equal"
        differing = self.beyond or self.unequal
        how = "beyond tolerance" if self.beyond else "within tolerance"
        return (
            f"{begin}: values differ {how} at {len(differing)} of {self.compared} points, first at "
            f"{self.first} ({self.apart:.3g} apart)"
        )

    def differs(self, exact: bool) -> bool:
        """Return whether a value of the two differs: beyond tolerance, or at all if `exact`."""
        return bool(self.unequal if exact else self.beyond)


def repeated_tokens(*traces: TraceLike) -> tuple[RepeatedTokens, ...]:
    """Return the pairs of requests with the same tokens in the engine dumps that traces are of.

    A pair's values were compared when its dump was opened. () for traces that are of no dump.
    """
    found = []
    for trace in traces:
        dump = trace.run.get("dump")
        rows = dump.get("repeats", ()) if isinstance(dump, Mapping) else ()
        found += [_of_json(row) for row in rows]
    return tuple(found)


def _of_json(row: Mapping[str, Value]) -> RepeatedTokens:
    """Return the RepeatedTokens of an entry of "repeats" in a trace's facts of its run."""
    return RepeatedTokens(
        str(row["requests"]),
        int(row["tokens"]),
        int(row["compared"]),
        tuple(map(str, row["unequal"])),
        tuple(map(str, row["beyond"])),
        float(row["apart"]),
    )
