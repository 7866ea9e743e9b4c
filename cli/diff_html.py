"""The page of `aprfmt diff --html`: what differs and why, layer by role, and where inside."""

from collections.abc import Sequence
from typing import Any

from aprfmt.cli.render import shape_text
from aprfmt.cli.report_html import report_page
from aprfmt.text import escape

SHOWN = 3  # tensors of a finding whose own numbers are shown in the chain
IMAGES = 6  # difference images a page holds
KINDS = {
    "SAME_BYTES": "good",
    "SAME_VALUES": "good",
    "WITHIN": "warn",
    "DIFFERENT": "bad",
    "SHAPE_DIFFERS": "bad",
    "UNREADABLE": "bad",
    "ONLY_IN_A": "warn",
    "ONLY_IN_B": "warn",
}
SHORT = {
    "SAME_BYTES": "=",
    "SAME_VALUES": "= values",
    "SHAPE_DIFFERS": "shape",
    "UNREADABLE": "unread",
    "ONLY_IN_A": "A only",
    "ONLY_IN_B": "B only",
}


def render_page(report: Any, code: int) -> str:
    """Return the page of a DiffReport whose exit code is `code`."""
    data = {
        "verdict": {"text": escape(verdict(report, code)), "kind": ("good", "bad", "bad")[code]},
        "chain": chain(report),
        "maps": [layer_map(report.tensors)] if report.tensors else [],
        "images": [image(one) for one in report.images],
        "tables": tables(report),
    }
    return report_page("Comparison of two models", {"A": report.a, "B": report.b}, data)


def verdict(report: Any, code: int) -> str:
    """Return the verdict in one sentence: the first cause, or how many tensors do what."""
    said = ", ".join(f"{count} {name}" for name, count in report.counts.items() if count)
    counted = f"{len(report.tensors)} tensors: {said}" if report.tensors else "no tensor compared"
    start = ("Equal", "Different", "A tensor could not be read")[code]
    fields = [row.name for row in (*report.hyperparameters, *report.tokenizer) if row.decisive]
    if report.findings:
        first = report.findings[0]
        sure = "" if first.confirmed else " (unconfirmed)"
        rest = len(report.findings) - 1
        more = f", and {rest} more finding{'s' if rest > 1 else ''}" if rest else ""
        return f"{start} - {first.cause}{sure}: {first.text}{more}. {counted}."
    if fields:
        return f"{start} - {', '.join(fields[:4])} differ. {counted}."
    return f"{start}. {counted}."


def chain(report: Any) -> list[dict[str, Any]]:
    """Return the findings, then what else decides, as links of the chain."""
    links: list[dict[str, Any]] = []
    by_key = {tensor.key: tensor for tensor in report.tensors}
    for title, rows in (
        ("Hyperparameters that change the forward pass", report.hyperparameters),
        ("Tokenizer", report.tokenizer),
    ):
        lines = [f"{row.name}: {row.a} | {row.b}" for row in rows if row.decisive]
        if lines:
            links.append(_link(title, "bad", "differs", lines))
    for found in report.findings:
        first = by_key[found.keys[0]].explanation
        lines = [
            f"{key}: {text}"
            for key in found.keys[: 1 if found.cause == "layer_order" else SHOWN]
            for text in by_key[key].explanation.evidence
            if text not in found.text
        ]
        if first.residual_after is not None:
            before = "shapes differ" if first.residual_before is None else first.residual_before
            lines.append(
                f"distance {_number(before)} as stored, {_number(first.residual_after)} with the "
                "cause taken away"
            )
        kind, mark = ("bad", "confirmed") if found.confirmed else ("warn", "unconfirmed")
        links.append(_link(f"{found.cause}: {found.text}", kind, mark, lines))
    lines = [
        f"{row.verdict} {row.key}"
        for row in report.worst()
        if KINDS[row.verdict] == "bad" and row.explanation is None
    ]
    if lines:
        more = [f"... {len(lines) - 12} more"] if len(lines) > 12 else []
        title = f"{len(lines)} tensor{'s' if len(lines) > 1 else ''} that no cause explains"
        links.append(_link(title, "bad", "unexplained", [*lines[:12], *more]))
    return links


def _link(title: str, kind: str, mark: str, lines: Sequence[str]) -> dict[str, Any]:
    return {"title": escape(title), "kind": kind, "mark": mark,
            "lines": [escape(str(line)) for line in lines]}  # fmt: skip


def layer_map(tensors: Sequence[Any]) -> dict[str, Any]:
    """Return the map: a row a layer, a column a role, a cell a tensor."""
    from aprfmt.compare.explain.elsewhere import split_role

    rows: dict[int | None, int] = {}
    columns: dict[str, int] = {}
    placed = []
    for tensor in tensors:
        layer, role = split_role(tensor.key)
        placed.append((layer, role, tensor))
    for layer in sorted({layer for layer, _, _ in placed}, key=lambda n: -1 if n is None else n):
        rows[layer] = len(rows)
    for _, role, _ in placed:
        columns.setdefault(role, len(columns))
    worst = _worst(tensors)
    cells = [
        {
            "row": rows[layer],
            "column": columns[role],
            "text": _short(tensor),
            "kind": KINDS[tensor.verdict],
            "title": escape(tensor.key),
            "lines": [escape(line) for line in describe(tensor)],
            "chosen": tensor is worst,
        }
        for layer, role, tensor in placed
    ]
    return {
        "title": "Tensors by layer and role",
        "note": "Green is equal, amber within rounding or on one side only, red different; the "
        "number is the relative L2 distance. Click a cell for what is known of it.",
        "rows": ["model" if layer is None else f"L{layer}" for layer in rows],
        "columns": [escape(role.removesuffix(".weight")) for role in columns],
        "cells": cells,
    }


def _worst(tensors: Sequence[Any]) -> Any:
    order = [row for row in tensors if KINDS[row.verdict] == "bad"]
    return max(order, key=lambda row: row.stats.rel_l2 if row.stats else 0.0, default=None)


def _short(tensor: Any) -> str:
    if tensor.verdict in SHORT:
        return SHORT[tensor.verdict]
    return _number(tensor.stats.rel_l2) if tensor.stats is not None else tensor.verdict.lower()


def _number(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def describe(tensor: Any) -> list[str]:
    """Return everything known of a pair, a line each."""
    lines = [
        f"{tensor.verdict}{f' ({tensor.cause})' if tensor.cause else ''}",
        f"{tensor.name_a or '-'} | {tensor.name_b or '-'}",
        f"{tensor.encoding_a or '-'} {shape_text(tensor.shape_a)} | "
        f"{tensor.encoding_b or '-'} {shape_text(tensor.shape_b)}",
    ]
    if tensor.layout:
        lines.append(", ".join(tensor.layout))
    stats = tensor.stats
    if stats is not None:
        lines.append(
            f"{stats.changed} of {stats.count} values differ, relative L2 {stats.rel_l2:.4g}, "
            f"cosine {stats.cosine:.9f}, largest difference {stats.max_abs_diff:.6g} at "
            f"{'-' if stats.max_at is None else list(stats.max_at)}, {stats.ulp} ulp"
        )
        if stats.nan_a or stats.nan_b or stats.inf_a or stats.inf_b:
            lines.append(
                f"NaN {stats.nan_a} | {stats.nan_b}, infinity {stats.inf_a} | {stats.inf_b}"
            )
    if tensor.steps_off is not None:
        lines.append(f"at most {tensor.steps_off:.3g} steps of the coarser encoding apart")
    if tensor.first_byte is not None:
        lines.append(f"first differing byte {tensor.first_byte}")
    lines += [f"{one.side.upper()}: {one.text}" for one in tensor.derivations]
    found = tensor.explanation
    if found is not None:
        lines.append(f"{'confirmed' if found.confirmed else 'unconfirmed'} {found.cause}:")
        lines += found.evidence
    return lines


def image(found: Any) -> dict[str, Any]:
    """Return an image of the page."""
    note = (
        f"[{found.rows}, {found.columns}], a cell is {found.height} x {found.width} values; its "
        "number is the root mean square of A - B over that of all of A"
    )
    return {
        "title": escape(found.key), "note": note, "rows": found.rows, "columns": found.columns,
        "height": found.height, "width": found.width, "cells": [list(row) for row in found.cells],
    }  # fmt: skip


def tables(report: Any) -> list[dict[str, Any]]:
    """Return the tables: tensors worst first, and the fields that differ."""
    made: list[dict[str, Any]] = []
    if report.tensors:
        rows, kinds = [], []
        for tensor in report.worst():
            stats = tensor.stats
            rows.append(
                [
                    tensor.verdict, tensor.key, tensor.cause,
                    f"{tensor.encoding_a or '-'} | {tensor.encoding_b or '-'}",
                    shape_text(tensor.shape_a or tensor.shape_b),
                    None if stats is None else stats.rel_l2,
                    None if stats is None else stats.changed,
                    None if stats is None else stats.max_abs_diff,
                    None if stats is None else stats.cosine,
                    None if stats is None else stats.ulp,
                ]
            )  # fmt: skip
            kinds.append("" if KINDS[tensor.verdict] == "good" else KINDS[tensor.verdict])
        made.append(
            _table(
                "All tensors", "Worst first; click a heading to sort.",
                ["verdict", "role", "cause", "encodings", "shape", "relL2", "changed", "max abs",
                 "cosine", "ulp"],
                5, rows, kinds,
            )
        )  # fmt: skip
    for title, fields in (
        ("Hyperparameters that differ", report.hyperparameters),
        ("Tokenizer facts that differ", report.tokenizer),
        ("Metadata that differs", report.metadata),
    ):
        if fields:
            cells = [
                [row.name, _cut(row.a), _cut(row.b), row.origin_a, row.origin_b] for row in fields
            ]
            kinds = ["bad" if row.decisive else "" for row in fields]
            note = "Red ones change the forward pass or the token ids."
            columns = ["name", "A", "B", "from (A)", "from (B)"]
            made.append(_table(title, note, columns, 5, cells, kinds))
    if report.notes:
        made.append(_table("Notes", "", ["note"], 1, [[note] for note in report.notes], []))
    return made


def _cut(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 300 else text[:297] + "..."


def _table(
    title: str, note: str, columns: Sequence[str], left: int, rows: Sequence[Sequence[Any]],
    kinds: Sequence[str],
) -> dict[str, Any]:  # fmt: skip
    safe = [[escape(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
    return {"title": title, "note": note, "columns": list(columns), "left": left, "rows": safe,
            "kinds": list(kinds)}  # fmt: skip
