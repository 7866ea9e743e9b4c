"""The page of `aprfmt scan --html`: damage, faults, copies, families, templates, every model."""

from typing import TYPE_CHECKING

from aprfmt.cli import html_page

if TYPE_CHECKING:
    from aprfmt.fleet.run import ScanReport


def render_page(report: "ScanReport", verdict: str) -> str:
    """Return the page of a ScanReport, `verdict` being its first line."""
    facts = {
        "results": report.out,
        "asked now": report.asked,
        "known before": report.kept,
        "left (budget)": report.left or "",
    }
    data = {"verdict": verdict, "found": report.to_json()}
    return html_page.render_html("Scan of models", facts, data, ("scan.html", "scan.js"))
