"""The page of `aprfmt diagnose --html`: the verdict, its chain of evidence, layer by point."""

from collections.abc import Mapping, Sequence
from typing import Any

from aprfmt.cli.report_html import report_page
from aprfmt.text import escape

KINDS = {"same": "good", "precision": "good", "bug": "bad", "not_comparable": "warn"}
MARKS = {"confirmed": "bad", "ambiguous": "warn", "unconfirmed": "warn"}


def render_page(body: Mapping[str, Any]) -> str:
    """Return the page of what `diagnose --json` prints (Diagnosis.to_json)."""
    maps = []
    for measure, title, note in (
        ("direct", "Distance of A and B, layer by point",
         "Relative L2 distance of the two runs; red frames are beyond the point's tolerance."),
        ("shadow", "Distance of each operation on its own input",
         "What the operation adds by itself: the other side's operation on this side's input. "
         "A point that is far apart above and equal here was only fed wrong."),
    ):  # fmt: skip
        found = point_map(body["points"], measure, title, note, body["first"])
        if found is not None:
            maps.append(found)
    data = {
        "verdict": {"text": escape(body["sentence"]), "kind": KINDS[body["verdict"]]},
        "chain": chain(body),
        "maps": maps,
        "tables": tables(body),
    }
    ids = body["ids"]
    facts: dict[str, object] = {
        "A": body["a"], "B": body["b"], "verdict": body["verdict"], "cause": body["cause"],
        "confidence": body["confidence"], "first capture point": body["first"],
        "tokens": f"{len(ids)}: {' '.join(map(str, ids[:64]))}" if ids else None,
        **{str(name): value for name, value in body["facts"].items()
           if isinstance(value, str | int | float)},
    }  # fmt: skip
    return report_page("Diagnosis", facts, data)


def chain(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the causes with what confirms them, then the evidence in the order it was found."""
    links = []
    for cause in body["causes"]:
        lines = [f"where: {', '.join(cause['where'][:8])}"] if cause["where"] else []
        if len(cause["where"]) > 8:
            lines[0] += f" and {len(cause['where']) - 8} more"
        if cause["first"]:
            lines.append(f"first seen at {cause['first']}")
        if cause["residual_before"] is not None:
            of = f" of {cause['of']}" if cause["of"] else ""
            lines.append(
                f"distance{of} {_number(cause['residual_before'])} as it is, "
                f"{_number(cause['residual_after'])} with the cause taken away"
            )
        if cause["values"]:
            lines.append(", ".join(f"{k} = {_number(v)}" for k, v in cause["values"].items()))
        if cause["also"]:
            lines.append(f"explained as well by {', '.join(cause['also'])}")
        if cause["means"]:
            lines.append(cause["means"])
        side = f" in {cause['side']}" if cause["side"] else ""
        kind = MARKS[cause["confidence"]] if cause["verdict"] == "bug" else "good"
        name = f"{cause['cause'] or 'unknown cause'}{side}: "
        links.append(
            {
                "title": escape(name + cause["says"].removeprefix(f"{cause['cause']}: ")),
                "kind": kind, "mark": cause["confidence"],
                "lines": [escape(line) for line in lines],
            }
        )  # fmt: skip
    for row in body["evidence"]:
        lines = [", ".join(row["where"][:8])] if row["where"] else []
        number = "" if row["number"] is None else f" ({_number(row['number'])})"
        links.append(
            {
                "title": escape(f"{row['says']}{number}"), "kind": "dim", "mark": row["level"],
                "lines": [escape(line) for line in lines],
            }
        )  # fmt: skip
    return links


def _number(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_number(one)}" for name, one in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def point_map(
    points: Sequence[Mapping[str, Any]], measure: str, title: str, note: str, first: str | None
) -> dict[str, Any] | None:
    """Return a map, a row a layer and a column a point; None where nothing was measured."""
    known = [row for row in points if row[measure] is not None]
    if not known:
        return None
    rows, columns, places = point_places([row["key"] for row in known])
    cells: list[dict[str, Any]] = []
    for row, (at, column) in zip(known, places, strict=True):
        value = float(row[measure])
        lines = [
            f"A to B {_number(row['direct'])}, on its own input {_number(row['shadow'])}, gain "
            f"over the layer's input {_number(row['gain'])}",
            f"tolerance {_number(row['tolerance'])}: {'beyond' if row['beyond'] else 'within'}",
            *([f"the operation is {row['side']}'s"] if row["side"] else []),
            *([row["note"]] if row["note"] else []),
        ]
        cells.append(
            {
                "row": at, "column": column,
                "text": "0" if value == 0 else f"{value:.2g}", "value": value or None,
                "title": escape(row["key"]), "lines": [escape(line) for line in lines],
                "flag": bool(row["beyond"]), "chosen": measure == "direct" and row["key"] == first,
            }
        )  # fmt: skip
    return {
        "title": title, "note": note, "scale": log_scale([float(row[measure]) for row in known]),
        "rows": rows,
        "columns": [escape(name) for name in columns], "cells": cells,
    }  # fmt: skip


def point_places(keys: Sequence[str]) -> tuple[list[str], list[str], list[tuple[int, int]]]:
    """Return the rows (layers), the columns (points) and each key's (row, column) of a map."""
    from aprfmt.compare.explain.elsewhere import split_role

    split = [split_role(key) for key in keys]
    layers = sorted({layer for layer, _ in split}, key=lambda n: -1 if n is None else n)
    points = list(dict.fromkeys(point for _, point in split))
    names = ["model" if layer is None else f"L{layer}" for layer in layers]
    return names, points, [(layers.index(layer), points.index(point)) for layer, point in split]


def log_scale(values: Sequence[float]) -> dict[str, Any]:
    """Return a logarithmic scale over what is finite and above 0."""
    import math

    found = [value for value in values if value > 0 and math.isfinite(value)]
    high = max(found, default=1.0)
    low = max(min(found, default=high), high * 1e-10)
    return {"low": low, "high": high, "log": True, "label": "relative L2, logarithmic"}


def tables(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tables: all points, and what was and was not checked."""
    made = []
    if body["points"]:
        made.append(
            {
                "title": "All capture points",
                "note": "In execution order; click a heading to sort.",
                "columns": ["point", "side", "note", "A to B", "own input", "gain", "tolerance"],
                "left": 3,
                "rows": [
                    [escape(row["key"]), row["side"], escape(row["note"]), row["direct"],
                     row["shadow"], row["gain"], row["tolerance"]]
                    for row in body["points"]
                ],
                "kinds": ["bad" if row["beyond"] else "" for row in body["points"]],
            }
        )  # fmt: skip
    for title, rows in (("Checked", body["checked"]), ("Not checked", body["not_checked"])):
        if rows:
            made.append(
                {"title": title, "note": "", "columns": ["what"], "left": 1,
                 "rows": [[escape(str(row))] for row in rows]}
            )  # fmt: skip
    return made
