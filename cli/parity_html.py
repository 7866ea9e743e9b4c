"""The page of `aprfmt parity --html`: every run against the first, point by point."""

from collections.abc import Mapping
from typing import Any

from aprfmt.cli import html


def render_page(body: Mapping[str, Any]) -> str:
    """Return the page of what `parity --json` prints (Parity.to_json)."""
    tokens, encodings = body["tokens"], body["weights"]["encodings"]
    facts = {
        "model": body["model"], "architecture": body["architecture"], "format": body["format"],
        "weights": ", ".join(f"{count} {name}" for name, count in encodings.items()),
        "runs": ", ".join(run["requested"] for run in body["runs"]), "text": tokens["text"],
        "tokens": html.ids_text(tokens["ids"]), "calibrated with": body["calibrated"],
    }  # fmt: skip
    return html.page("Parity of runs", facts, {"found": body}, (*html.REPORT, "parity.js"))
