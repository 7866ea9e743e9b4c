"""`aprfmt diagnose`: where two models, traces or runs first differ, and why."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from aprfmt.cli import options, render

if TYPE_CHECKING:
    from aprfmt.diagnosis.found import Diagnosis

STYLES = {
    "same": "good", "precision": "good", "derived": "warn", "not_exercised": "bad", "bug": "bad",
    "not_comparable": "warn",
}  # fmt: skip


@click.command("diagnose")
@click.argument("a")
@click.argument("b")
@click.option("--model", metavar="MODEL", help="The weights that saved traces ran on.")
@click.option("--ids", metavar="IDS", help="Token ids: 1,2,3 or a .npy file (default: chosen).")
@click.option("--prompt", metavar="TEXT", help="Text instead of ids, tokenized as A does it.")
@click.option("--memory", callback=options.size, metavar="SIZE",
              help="Budget for decoded weights (2G).")  # fmt: skip
@options.html("Write a page: the chain of evidence, a map of all points.")
@options.arch
@options.force
@options.common
def command(
    a: str,
    b: str,
    model: str | None,
    ids: str | None,
    prompt: str | None,
    memory: int | None,
    html: Path | None,
    arch: str | None,
    force: bool,
    as_json: bool,
    quiet: bool,
) -> int:
    """Find where A and B first differ, and why.

    A and B are models in any format, runs (MODEL@torch:cpu:bfloat16, MODEL@transformers) or saved
    traces. The first line is the class with cause and place; then evidence, coverage (what was
    run, compared without a run, not reached) and the next step as a command.

    Exit 0: the same, or precision; 1: a bug, a difference that no probe reached, or a derived
    model (fine-tuned, merged); 2: they cannot be compared.
    """
    from aprfmt.cli.running import parse_ids
    from aprfmt.diagnosis import diagnose

    options.check_new(force, html)
    with render.Progress("diagnose", quiet) as progress:
        result = diagnose(
            a,
            b,
            model=model,
            ids=None if ids is None else parse_ids(ids),
            prompt=prompt,
            arch=arch,
            memory=memory,
            progress=progress,
            notice=progress.say,
        )
    if not as_json:
        show(result)
    body = result.to_json()
    if html is not None:
        from aprfmt.cli.diagnose_html import render_page
        from aprfmt.cli.html import write_page

        write_page(html, render_page(body), force)
        body["html"] = str(html)
    return render.emit("diagnose", result.exit_code, body, as_json)


def show(result: "Diagnosis") -> None:
    """Print the class, the causes, the evidence, the points, the coverage and the next steps."""
    from aprfmt.diagnosis import words

    render.line(render.escape(result.sentence), style=STYLES[result.kind])
    _lines(words.causes(result))
    _lines(words.evidence(result))
    _points(result)
    _lines(words.coverage(result))


def _lines(lines: Iterable[tuple[str, str]]) -> None:
    for text, style in lines:
        render.line(render.escape(text), style=style)


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
