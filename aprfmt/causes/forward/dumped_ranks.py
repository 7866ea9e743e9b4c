"""Finds what one dump contradicts itself in: its ranks, and its requests with the same tokens."""

from collections.abc import Iterator, Mapping
from typing import Any

from aprfmt.causes.row import Cause
from aprfmt.inference.trace import Trace
from aprfmt.measure.findings import Finding
from aprfmt.measure.repeated_tokens import repeated_tokens

CAUSE_ROWS = (
    Cause(
        "ranks_differ", "forward", "bug",
        "Ranks hold different values where every rank computes the same: another weight, or a "
        "sum over ranks that one of them did not get.",
        "A norm's result or a sum after its all-reduce is not equal on all ranks.",
        "None: the ranks' own values are compared with one another.",
    ),
    Cause(
        "requests_differ", "forward", "bug",
        "Two requests of one dump have the same tokens and other values: what is computed of a "
        "request depends on its batch, or on its place in it.",
        "The rows of the same tokens are beyond tolerance apart.",
        "None: the requests' own values are compared with each other.",
    ),
)  # fmt: skip


def differing_ranks(traces: Mapping[str, Trace]) -> Iterator[Finding]:
    """Yield a finding for each trace whose ranks differ in values that every rank computes.

    `traces` is {side, "A" or "B": trace}. Only the first differing array is reported; later ones
    follow from it.
    """
    for label, trace in traces.items():
        dump: Any = trace.run.get("dump")
        rows = dump.get("unequal", ()) if isinstance(dump, Mapping) else ()
        if not rows:
            continue
        first, names = rows[0], tuple(dict.fromkeys(row["name"] for row in rows))
        more = f", and so in {len(names) - 1} arrays after it" if len(names) > 1 else ""
        yield Finding(
            "ranks_differ",
            f"{first['name']} (pass {first['pass']}): {first['says']}{more}",
            "forward",
            "bug",
            names,
            False,
            "",
            first["apart"],
            None,
            first["name"],
            {"axis": first["axis"], "ranks": list(first["ranks"])},
            label,
        )


def differing_requests(traces: Mapping[str, Trace]) -> Iterator[Finding]:
    """Yield a finding for each trace whose requests with the same tokens have different values.

    `traces` is {side, "A" or "B": trace}. Only values beyond their tolerance count. The finding
    describes the first two such requests, and counts the others.
    """
    for label, trace in traces.items():
        pairs = [one for one in repeated_tokens(trace) if one.beyond]
        if not pairs:
            continue
        first = pairs[0]
        more = f"; {len(pairs) - 1} more pairs differ so" if len(pairs) > 1 else ""
        yield Finding(
            "requests_differ",
            f"{first.says}{more}",
            "forward",
            "bug",
            first.beyond,
            False,
            first.first,
            first.apart,
            None,
            first.first,
            {"requests": first.requests, "tokens": first.tokens},
            label,
        )
