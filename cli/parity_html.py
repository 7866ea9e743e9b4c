"""The page of `aprfmt parity --html`: every run against the first, point by point."""

from collections.abc import Mapping, Sequence
from typing import Any

from aprfmt.cli.diagnose_html import log_scale, point_places
from aprfmt.cli.report_html import report_page
from aprfmt.text import escape

KINDS = {"same": "good", "precision": "good", "bug": "bad", "not_comparable": "warn"}
WORDS = {
    "same": "The runs agree",
    "precision": "The runs agree within rounding",
    "bug": "The runs do not agree",
    "not_comparable": "The runs could not be compared",
}
GATES = {"PASS": "good", "FAIL": "bad", "NOT_RUN": "warn"}


def render_page(body: Mapping[str, Any]) -> str:
    """Return the page of what `parity --json` prints (Parity.to_json)."""
    names = [escape(run["requested"]) for run in body["runs"]]
    tokens = body["tokens"]
    facts: dict[str, object] = {
        "model": body["model"], "architecture": body["architecture"], "format": body["format"],
        "weights": ", ".join(f"{count} {name}" for name, count in
                             body["weights"]["encodings"].items()),
        "runs": ", ".join(run["requested"] for run in body["runs"]),
        "text": tokens["text"],
        "tokens": f"{len(tokens['ids'])}: {' '.join(map(str, tokens['ids'][:64]))}",
        "calibrated with": body["calibrated"],
    }  # fmt: skip
    data = {
        "verdict": {"text": escape(sentence(body)), "kind": KINDS[body["verdict"]]},
        "chain": [link for pair in body["pairs"] for link in chain(pair, names)],
        "maps": [found for pair in body["pairs"] if (found := pair_map(pair, names)) is not None],
        "tables": tables(body, names),
    }
    return report_page("Parity of runs", facts, data)


def sentence(body: Mapping[str, Any]) -> str:
    """Return the verdict in a sentence, with the first bad pair's cause."""
    worst = next((pair for pair in body["pairs"] if pair["verdict"] == body["verdict"]), None)
    if worst is None:
        return f"{WORDS[body['verdict']]}."
    if body["verdict"] in ("same", "precision"):
        return f"{WORDS[body['verdict']]}: {worst['cause'] or worst['verdict']}."
    cause = f" - {worst['cause']}" if worst["cause"] else ""
    found = worst["first_operation"]
    at = f"; the first operation that is wrong by itself is {found['key']}" if found else ""
    runs = body["runs"]
    which = f"{runs[worst['b']]['requested']} against {runs[worst['a']]['requested']}"
    return f"{WORDS[body['verdict']]}: {which}{cause}{at}."


def chain(pair: Mapping[str, Any], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return what was found of one pair, in the order of the evidence."""
    title = f"{names[pair['b']]} against {names[pair['a']]}: {pair['cause'] or pair['verdict']}"
    lines = [f"{pair['compared']} points compared"]
    if pair["first"]:
        lines.append(f"first point beyond its tolerance: {pair['first']}")
    links = [_link(title, KINDS[pair["verdict"]], pair["verdict"], lines)]
    for one in pair["operations"]:
        wrong = one["wrong"]
        alone = (
            f"{one['key']} on equal inputs: {_number(one['residual'])}, rounding may do "
            f"{_number(one['bound'])}"
        )
        lines = [
            f"in the whole runs {_number(one['output_rel_l2'])} apart, inputs "
            f"{_number(one['input_rel_l2'])} apart, gain {_number(one['gain'])}",
            f"inputs {', '.join(one['inputs'])}; weights {', '.join(one['weights']) or 'none'}",
        ]
        mark = "wrong by itself" if wrong else "fed wrong, or rounding"
        links.append(_link(alone, "bad" if wrong else "good", mark, lines))
    logits = pair["logits"]
    if logits is not None:
        lines = [
            f"relative L2 {_number(logits['rel_l2'])}, largest difference "
            f"{_number(logits['max_abs'])}",
            f"argmax equal in {logits['argmax']:.1%} of {logits['rows']} rows, top "
            f"{logits['k']} in {logits['top_k']:.1%}",
            f"KL mean {_number(logits['kl_mean'])}, largest {_number(logits['kl_max'])} nats; "
            f"loss {_number(logits['ce_a'])} | {_number(logits['ce_b'])} nats",
        ]
        bad = any(not flip["explained"] for flip in logits["flips"])
        links.append(_link("Logits", "bad" if bad else "dim", "logits", lines))
    return links


def _link(title: str, kind: str, mark: str, lines: Sequence[str]) -> dict[str, Any]:
    return {"title": escape(title), "kind": kind, "mark": mark,
            "lines": [escape(line) for line in lines]}  # fmt: skip


def _number(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def pair_map(pair: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any] | None:
    """Return the map of one pair, None where no point was compared."""
    points = [row for row in pair["points"] if row["rel_l2"] is not None]
    if not points:
        return None
    rows, columns, places = point_places([row["key"] for row in points])
    wrong = {one["key"] for one in pair["operations"] if one["wrong"]}
    cells = []
    for row, (at, column) in zip(points, places, strict=True):
        value = float(row["rel_l2"])
        lines = [
            f"relative L2 {_number(value)}, tolerance {_number(row['tolerance'])}: "
            f"{'beyond' if row['beyond'] else 'within'}",
            f"largest difference {_number(row['max_abs_diff'])} at {row['max_at']}",
        ]
        lines += [row["reason"]] if row.get("reason") else []
        lines += ["this operation is wrong by itself"] if row["key"] in wrong else []
        cells.append(
            {
                "row": at, "column": column, "text": "0" if value == 0 else f"{value:.2g}",
                "value": value or None, "title": escape(row["key"]),
                "lines": [escape(line) for line in lines], "flag": bool(row["beyond"]),
                "chosen": row["key"] == pair["first"],
            }
        )  # fmt: skip
    return {
        "title": f"{names[pair['b']]} against {names[pair['a']]}",
        "note": "Relative L2 distance by layer and point; red frames are beyond the point's "
        "tolerance.",
        "scale": log_scale([float(row["rel_l2"]) for row in points]),
        "rows": rows, "columns": [escape(name) for name in columns], "cells": cells,
    }  # fmt: skip


def _furthest(distances: Mapping[str, float]) -> tuple[str, float | None]:
    """Return the point with the largest distance, and the distance."""
    if not distances:
        return "", None
    key = max(distances, key=lambda name: distances[name])
    return escape(key), distances[key]


def tables(body: Mapping[str, Any], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the tables: runs, gates, tokens that flipped, and all points of every pair."""
    made = [
        {
            "title": "Runs", "note": "The first is the reference.", "left": 4,
            "columns": ["asked for", "ran", "weights", "first NaN or infinity", "points"],
            "rows": [
                [escape(run["requested"]), escape(run["ran"]), escape(run["weights"]),
                 escape(run["nonfinite"] or ""), run["points"]]
                for run in body["runs"]
            ],
        }
    ]  # fmt: skip
    oracles = [one for one in (body["noise"], *body["arbiter"]) if one is not None]
    if oracles:
        made.append(
            {
                "title": "Distances from an oracle", "left": 3,
                "note": "How far each run is from float weights or from float64 arithmetic.",
                "columns": ["run", "from", "furthest point", "relL2 there", "loss (nats)"],
                "rows": [
                    [names[one["of"]], escape(one["what"]), *_furthest(one["rel_l2"]), one["ce"]]
                    for one in oracles
                ],
            }
        )  # fmt: skip
    for pair in body["pairs"]:
        title = f"{names[pair['b']]} against {names[pair['a']]}"
        checks = pair["gate"]["checks"]
        if checks:
            made.append(
                {
                    "title": f"Gates: {title}", "note": "", "left": 5,
                    "columns": ["outcome", "check", "where", "found", "expected"],
                    "rows": [[row["outcome"], *(escape(str(row[name])) for name in
                              ("name", "where", "found", "expected"))] for row in checks],
                    "kinds": [GATES[row["outcome"]] for row in checks],
                }
            )  # fmt: skip
        flips = (pair["logits"] or {}).get("flips") or []
        if flips:
            made.append(
                {
                    "title": f"Tokens that flipped: {title}", "note": "", "left": 0,
                    "columns": ["position", "token", "other token", "margin", "other's margin",
                                "largest difference", "explained"],
                    "rows": [[row[name] if name != "explained" else str(row[name])
                              for name in ("position", "a", "b", "margin_a", "margin_b",
                                           "largest", "explained")] for row in flips],
                    "kinds": ["" if row["explained"] else "bad" for row in flips],
                }
            )  # fmt: skip
        made.append(
            {
                "title": f"All points: {title}",
                "note": "In execution order; click a heading to sort.", "left": 2,
                "columns": ["point", "note", "relL2", "tolerance", "max abs", "max over rms"],
                "rows": [
                    [escape(row["key"]), escape(row["why"]), row["rel_l2"], row["tolerance"],
                     row["max_abs_diff"], row.get("max_over_rms")]
                    for row in pair["points"]
                ],
                "kinds": ["bad" if row["beyond"] else "" for row in pair["points"]],
            }
        )  # fmt: skip
    return made
