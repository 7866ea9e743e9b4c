"""Compares the ranks of one dump with each other, where every rank computes the same values."""

from collections.abc import Iterator, Mapping
from typing import Any

from aprfmt.inference.trace import Trace
from aprfmt.measure.findings import Finding


def differing_ranks(traces: Mapping[str, Trace]) -> Iterator[Finding]:
    """Yield a finding for each trace whose ranks differ in values that every rank computes.

    `traces` is by side. Only the first differing array is reported; later ones follow from it.
    """
    for label, trace in traces.items():
        dump: Any = trace.run.get("dump")
        rows = dump.get("unequal", ()) if isinstance(dump, Mapping) else ()
        if not rows:
            continue
        first, names = rows[0], tuple(dict.fromkeys(row["name"] for row in rows))
        more = f", and so in {len(names) - 1} arrays behind it" if len(names) > 1 else ""
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
