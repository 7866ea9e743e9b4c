"""The page of `aprfmt trace --html`: heat map, histogram of a cell, sortable table."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from aprfmt.cli import html

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array
    from aprfmt.compare.traces import TraceDiff
    from aprfmt.inference.trace import Trace

BINS = 48
CHUNK = 1 << 18  # values put into bins at a time

STATISTICS = ("std", "mean", "min", "max", "absmax", "l2", "zeros", "nan", "inf")


class Histograms:
    """Histograms of the finite values of every record, taken as they come."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, Any]] = {}

    def add(self, key: str, values: "Array") -> None:
        """Count values into BINS equal parts of their range."""
        found = histogram(values)
        if found is not None:
            self.found[key] = found


def histogram(values: "Array") -> dict[str, Any] | None:
    """Return {low, high, counts} of the finite values; None where there is none."""
    import numpy as np

    flat = np.asarray(values).reshape(-1)
    flat = flat[np.isfinite(flat)]
    if not flat.size:
        return None
    low, high = float(flat.min()), float(flat.max())
    if low == high:
        return {"low": low, "high": high, "counts": [int(flat.size)]}
    counts = np.zeros(BINS, np.int64)
    for start in range(0, flat.size, CHUNK):
        share = (flat[start : start + CHUNK].astype(np.float64) - low) / (high - low)
        counts += np.bincount(np.minimum((share * BINS).astype(np.int64), BINS - 1), minlength=BINS)
    return {"low": low, "high": high, "counts": counts.tolist()}


def render_page(
    trace: "Trace", body: Mapping[str, Any], histograms: Histograms, difference: "TraceDiff | None"
) -> str:
    """Return the page of a trace: `body` is what `--json` prints, `difference` a TraceDiff."""
    from aprfmt.inference.capture import POINTS

    points = {} if difference is None else {point.key: point for point in difference.points}
    cells = []
    for record in body["records"]:
        if record["stats"] is None:
            continue
        point = points.get(record["key"])
        row = POINTS.get(record["point"])
        cells.append(
            {
                **{name: record[name] for name in
                   ("key", "point", "layer", "shape", "count", "dtype", "form", "device")},
                "says": "" if row is None else row.sentence,
                "stats": {name: record["stats"][name] for name in STATISTICS},
                "rel": None if point is None else point.rel_l2,
                "fault": (row is None or row.finite)
                and record["stats"]["nan"] + record["stats"]["inf"] > 0,
                "beyond": point is not None and point.beyond,
                "histogram": histograms.found.get(record["key"]),
            }
        )  # fmt: skip
    reference = body.get("reference")
    data = {
        "statistics": [*(["relL2"] if points else []), *STATISTICS], "cells": cells,
        "nonfinite": body["nonfinite"], "observations": body["observations"],
        "reference": reference and {name: reference[name] for name in ("first", "compared")},
        "top": (body["logits"] or {}).get("top") or [],
    }  # fmt: skip
    name = str(trace.run.get("model") or trace.run.get("path") or "a saved trace")
    parts = ("trace.css", "trace.html", "trace.js")
    return html.page(f"Trace of {name}", facts(trace, body), data, parts)


def facts(trace: "Trace", body: Mapping[str, Any]) -> dict[str, object]:
    """Return what identifies the run."""
    run, ids = trace.run, trace.run.get("ids")
    backend = run.get("backend") or {}
    more = " ..." if ids is not None and len(ids) > html.IDS else ""
    return {
        "architecture": run.get("architecture"),
        "ran on": ":".join(str(backend[key]) for key in ("backend", "device", "dtype")
                           if key in backend),
        "prompt": run.get("prompt"),
        "tokens": None if ids is None else html.ids_text(ids) + more,
        "reference": (body.get("reference") or {}).get("against"),
        "aprfmt": run.get("aprfmt"),
    }  # fmt: skip
