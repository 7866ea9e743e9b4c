"""The page of `aprfmt diagnose --html`: the verdict, its chain of evidence, layer by point."""

from collections.abc import Mapping

from aprfmt.base.protocols import Value
from aprfmt.cli import html_page


def render_page(body: Mapping[str, Value]) -> str:
    """Return the page of what `diagnose --json` prints (Diagnosis.to_json)."""
    facts = {
        "A": body["a"], "B": body["b"],
        "tokens": html_page.ids_text(body["ids"]) if body["ids"] else None,
        **{str(name): value for name, value in body["facts"].items()
           if isinstance(value, str | int | float)},
    }  # fmt: skip
    data = {"found": {**body, "findings": [_measured(one) for one in body["findings"]]}}
    return html_page.render_html("Diagnosis", facts, data, (*html_page.REPORT, "diagnose.js"))


def _measured(finding: Mapping[str, Value]) -> dict[str, Value]:
    """Return a finding with its `values` as words, and those that are sentences as `details`."""
    values = dict(finding["values"])
    details = dict.fromkeys(text for tensor in values.pop("evidence", ()) for text in tensor)
    return {
        **finding,
        "values": [f"{name} = {_text(value)}" for name, value in values.items()],
        "details": list(details),
    }


def _text(value: object) -> str:
    """Return a value that a cause was solved for; JSON would not tell 1.0 from 1."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_text(one)}" for name, one in value.items())
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
