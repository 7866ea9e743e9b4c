"""The pages of `aprfmt validate --html` and `aprfmt qa --html`: the verdict, then every check."""

from collections.abc import Mapping

from aprfmt.cli import html_page


def validation_page(body: Mapping[str, object]) -> str:
    """Return the HTML page of `validate`; `body` is what `--json` prints."""
    facts = {
        "file": body["subject"],
        "format": body["format"],
        "warnings": "fail (--strict)" if body["strict"] else None,
    }
    return html_page.render_html("Validation of a file", facts, {"report": body}, html_page.CHECKED)


def gates_page(body: Mapping[str, object], code: int, sentence: str) -> str:
    """Return the HTML page of `qa`; `body` is what `--json` prints.

    `code` is the exit code and `sentence` the words of the verdict.
    """
    facts = {
        "model": body["model"], "asked for": body["requested"], "ran on": body["ran"],
        "why": body["why"], "fewest gates": body["min_run"] or None,
        "baseline written": body["saved_baseline"],
    }  # fmt: skip
    data = {"gates": body["gates"], "code": code, "sentence": sentence, "outcome": body["outcome"]}
    return html_page.render_html("Gates of a model", facts, data, html_page.CHECKED)
