"""The page of `aprfmt diff --html`: what differs and why, layer by role, and where inside."""

import shlex
from collections.abc import Sequence
from dataclasses import asdict

from aprfmt.cli import html_page
from aprfmt.compare import DiffReport
from aprfmt.measure.records import FieldDiff

IMAGES = 6  # difference images a page holds
LONGEST = 300  # characters of a field's value in the tables


def render_page(report: DiffReport, code: int) -> str:
    """Return the page of a DiffReport whose exit code is `code`."""
    fields = ("hyperparameters", "tokenizer", "metadata")
    found = report.to_json() | {name: _fields(getattr(report, name)) for name in fields}
    data = {
        "code": code,
        "command": shlex.join(["aprfmt", "diagnose", report.a, report.b]) if code == 1 else None,
        "found": found,
        "worst": [tensor.key for tensor in report.worst()],
        "images": [asdict(image) for image in report.images],
    }
    facts = {"A": report.a, "B": report.b}
    return html_page.render_html(
        "Comparison of two models", facts, data, (*html_page.REPORT, "diff.js")
    )


def _fields(rows: Sequence[FieldDiff]) -> list[dict[str, object]]:
    """Return fields with their values as texts, cut for a table; `whole` where it decides."""
    return [
        {
            **asdict(row),
            "a": _cut(str(row.a)),
            "b": _cut(str(row.b)),
            "whole": f"{row.name}: {row.a} | {row.b}" if row.decisive else "",
        }
        for row in rows
    ]


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."
