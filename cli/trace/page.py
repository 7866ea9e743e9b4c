"""The HTML page of `aprfmt trace --html`: heat map, histogram of a cell, sortable table.

A *cell* of the heat map is one layer at one token position, or at a group of positions.
"""

import shlex
from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np

from aprfmt.base.protocols import Value
from aprfmt.cli import html_page
from aprfmt.cli.histograms import Histogram, histogram
from aprfmt.codecs.base import Array
from aprfmt.inference.capture import POINTS
from aprfmt.inference.trace import Trace
from aprfmt.measure.traces import TraceDiff, position_axis

T = TypeVar("T")
STATISTICS = ("std", "mean", "min", "max", "absmax", "l2", "zeros", "nan", "inf")


MOST = 256  # positions of a heat map; of more, the largest of each group


class Histograms:
    """Collects a histogram of each record's finite values, and the size of each row.

    `found` is {key: histogram}. `rows` is {key: root mean square of each token position's values}.
    """

    def __init__(self) -> None:
        """Start without records."""
        self.found: dict[str, Histogram] = {}
        self.rows: dict[str, list[float]] = {}

    def add(self, key: str, values: Array) -> None:
        """Add a record's histogram and row sizes.

        `key` is the capture point of `values`.
        """
        found = histogram(values)
        if found is not None:
            self.found[key] = found
        self.rows[key] = row_sizes(key, values)


def row_sizes(key: str, values: Array) -> list[float]:
    """Return the root mean square of each token position's values; [] without such an axis.

    NaN counts as infinite. `key` is the capture point of `values`.
    """
    array, axis = np.asarray(values), position_axis(key.rpartition(".")[2])
    if array.ndim <= axis or not array.size:
        return []
    rows = np.moveaxis(array, axis, 0).reshape(array.shape[axis], -1)
    with np.errstate(all="ignore"):
        sizes = np.sqrt(np.mean(np.square(rows, dtype=np.float64), axis=1))
    return [float(size) for size in np.where(np.isnan(sizes), np.inf, sizes)]


def heat_maps(
    rows: Mapping[str, Sequence[float | None]],
    positions: Mapping[str, Sequence[int]],
    bounds: Mapping[str, tuple[float, bool]],
) -> tuple[list[dict[str, object]], list[str]]:
    """Return (a heat map for each capture point, the names of their columns).

    `rows` are numbers of each position by key (`L3.attn_out`), `positions` the token positions that
    they are of. Only keys with the commonest list of positions are shown. `bounds` is {key:
    (tolerance, whether beyond)}. More than MOST positions are grouped, and the largest of each
    group is shown.
    """
    kept = {key: tuple(positions[key]) for key in rows if len(positions[key]) == len(rows[key]) > 1}
    if not kept:
        return [], []
    every = list(kept.values())
    shown = max(set(every), key=every.count)
    group = -(-len(shown) // MOST)
    by_point: dict[str, list[str]] = {}
    for key in kept:
        if kept[key] == shown:
            by_point.setdefault(key.rpartition(".")[2], []).append(key)
    names = [
        str(part[0]) if len(part) == 1 else f"{part[0]} to {part[-1]}"
        for part in _split_groups(shown, group)
    ]
    return [
        {
            "point": point,
            "rows": [key.rpartition(".")[0] or "model" for key in keys],
            "values": [
                [_largest_number(part) for part in _split_groups(rows[key], group)] for key in keys
            ],
            "tolerances": [bounds.get(key, (None, False))[0] for key in keys],
            "beyond": [bounds.get(key, (None, False))[1] for key in keys],
        }
        for point, keys in by_point.items()
    ], names


def _split_groups(values: Sequence[T], size: int) -> list[Sequence[T]]:
    """Return a sequence cut into groups of `size` items, the last of which may have fewer."""
    return [values[start : start + size] for start in range(0, len(values), size)]


def _largest_number(values: Sequence[float | None]) -> float | None:
    """Return the largest number, rounded to four digits; None where there is none."""
    known = [value for value in values if value is not None]
    return float(f"{max(known):.4g}") if known else None


def render_page(
    trace: Trace, body: Mapping[str, Value], histograms: Histograms, difference: TraceDiff | None
) -> str:
    """Return the HTML page of a trace; `body` is what `--json` prints.

    `difference` is the comparison with a reference, or None. `histograms` are those of the recorded
    values.
    """
    points = {} if difference is None else {point.key: point for point in difference.points}
    cells = []
    for record in body["records"]:
        if record["stats"] is None:
            continue
        point = points.get(record["key"])
        row = POINTS.get(record["point"])
        cells.append(
            {
                **{
                    name: record[name]
                    for name in (
                        "key",
                        "point",
                        "layer",
                        "shape",
                        "count",
                        "dtype",
                        "form",
                        "device",
                    )
                },
                "says": "" if row is None else row.sentence,
                "stats": {name: record["stats"][name] for name in STATISTICS},
                "rel": None if point is None else point.rel_l2,
                "tolerance": None if point is None else point.tolerance,
                "fault": (row is None or row.finite)
                and record["stats"]["nan"] + record["stats"]["inf"] > 0,
                "beyond": point is not None and point.beyond,
                "histogram": histograms.found.get(record["key"]),
            }
        )
    reference = body.get("reference")
    spots = {row["key"]: row["positions"] or () for row in body["records"]}
    bounds = {key: (point.tolerance, point.beyond) for key, point in points.items()}
    apart = {key: point.by_position for key, point in points.items() if point.by_position}
    known = {key: sizes for key, sizes in histograms.rows.items() if key in spots}
    data = {
        "statistics": [*(["relL2"] if points else []), *STATISTICS],
        "cells": cells,
        "nonfinite": body["nonfinite"],
        "observations": body["observations"],
        "reference": reference and {name: reference[name] for name in ("first", "compared")},
        "command": _diagnose_command(trace, reference),
        "top": (body["logits"] or {}).get("top") or [],
        "heats": [
            {"what": what, "label": label, "heats": maps, "positions": positions}
            for what, label, found, held in (
                ("distance from the reference", "relative L2", apart, bounds),
                ("size of the values", "root mean square", known, {}),
            )
            for maps, positions in [
                heat_maps(found, {key: spots.get(key, ()) for key in found}, held)
            ]
        ],
    }
    name = str(trace.run.get("model") or trace.run.get("path") or "a saved trace")
    parts = html_page.TRACE
    return html_page.render_html(f"Trace of {name}", run_identity(trace, body), data, parts)


def _diagnose_command(trace: Trace, reference: Mapping[str, Value] | None) -> str | None:
    """Return the command that finds the cause of a difference; None without a model's name.

    `reference` is the JSON of the comparison, or None.
    """
    name = trace.run.get("model") or trace.run.get("path")
    if reference is None or name is None:
        return None
    return shlex.join(["aprfmt", "diagnose", str(reference["against"]), str(name)])


def run_identity(trace: Trace, body: Mapping[str, Value]) -> dict[str, object]:
    """Return {label: value} of what identifies the run: architecture, device, tokens, version.

    `body` is the JSON of the trace.
    """
    run, ids = trace.run, trace.run.get("ids")
    backend = run.get("backend") or {}
    more = " ..." if ids is not None and len(ids) > html_page.IDS else ""
    return {
        "architecture": run.get("architecture"),
        "ran on": ":".join(
            str(backend[key]) for key in ("backend", "device", "dtype") if key in backend
        ),
        "prompt": run.get("prompt"),
        "tokens": None if ids is None else html_page.ids_text(ids) + more,
        "reference": (body.get("reference") or {}).get("against"),
        "aprfmt": run.get("aprfmt"),
    }
