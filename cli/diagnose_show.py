"""What `aprfmt diagnose` prints: the answer; with -v a report, and a table of points in it."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from aprfmt.cli import output_format, render

if TYPE_CHECKING:
    from aprfmt.diagnosis.found import Diagnosis

STYLES = {
    "same": "good", "precision": "good", "derived": "warn", "not_exercised": "bad", "bug": "bad",
    "not_comparable": "warn",
}  # fmt: skip


def show(result: "Diagnosis", verbose: bool = False) -> None:
    """Print the answer in a few lines; `verbose`: evidence, points, coverage, all next steps."""
    from aprfmt.diagnosis import words

    if not verbose:
        _lines(words.first_lines(result, STYLES[result.kind], output_format.shown_names()))
        return
    render.say(result.sentence, style=STYLES[result.kind])
    _lines(words.causes(result))
    _lines(words.evidence(result))
    _points(result)
    _lines(words.coverage(result))


def _lines(lines: Iterable[tuple[str, str]]) -> None:
    for text, style in lines:
        render.say(text, style=style)


def _points(result: "Diagnosis") -> None:
    """Print the points around the first divergence, and the worst ones."""
    at = next((i for i, row in enumerate(result.points) if row.key == result.first), None)
    if at is None:
        return
    render.line("points around the first divergence", style="head")
    rows = [
        (
            ("> " if row.key == result.first else "  ") + row.key,
            _number(row.direct),
            _number(row.shadow),
            _number(row.gain),
            _number(row.tolerance),
            "beyond" if row.beyond else "",
        )
        for row in result.points[max(0, at - 3) : at + 4]
    ]
    render.table(rows, ("  point", "A to B", "own input", "gain", "tolerance", ""), "lrrrr")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
