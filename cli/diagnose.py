"""`aprfmt diagnose`: where two models, traces or runs first differ, and why."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from aprfmt.base.budget import Budget
from aprfmt.base.protocols import Value
from aprfmt.cli import html_page, options, output_format, render
from aprfmt.cli.html_page import add_page

if TYPE_CHECKING:
    from aprfmt.diagnosis.records import Diagnosis


def render_page(body: Mapping[str, Value]) -> str:
    """Return the HTML page of a diagnosis; `body` is what `--json` prints."""
    facts = {
        "A": body["a"], "B": body["b"],
        "tokens": html_page.ids_text(body["ids"]) if body["ids"] else None,
        **{str(name): value for name, value in body["facts"].items()
           if isinstance(value, str | int | float)},
    }  # fmt: skip
    data = {"found": {**body, "findings": [_finding_for_page(one) for one in body["findings"]]}}
    return html_page.render_html("Diagnosis", facts, data, (*html_page.REPORT, "diagnose.js"))


def _finding_for_page(finding: Mapping[str, Value]) -> dict[str, Value]:
    """Return a finding for the HTML page: `values` as texts "NAME = VALUE", evidence in `details`.

    `details` lists the sentences of evidence once each.
    """
    values = dict(finding["values"])
    details = dict.fromkeys(text for tensor in values.pop("evidence", ()) for text in tensor)
    return {
        **finding,
        "values": [f"{name} = {_solved_text(value)}" for name, value in values.items()],
        "details": list(details),
    }


def _solved_text(value: object) -> str:
    """Return a solved value as text; None is "-", and a float has four digits.

    The page gets texts, since JSON in a browser does not distinguish 1.0 from 1.
    """
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_solved_text(one)}" for name, one in value.items())
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


STYLES = {
    "same": "good", "precision": "good", "derived": "warn", "not_exercised": "bad", "bug": "bad",
    "not_comparable": "warn",
}  # fmt: skip


def show(result: "Diagnosis", verbose: bool = False) -> None:
    """Print the answer in a few lines; `verbose` adds evidence, points and coverage."""
    from aprfmt.diagnosis import diagnosis_text

    if not verbose:
        render.say_lines(
            diagnosis_text.first_lines(result, STYLES[result.kind], output_format.shown_names())
        )
        return
    render.say(result.sentence, style=STYLES[result.kind])
    render.say_lines(diagnosis_text.cause_lines(result))
    render.say_lines(diagnosis_text.evidence_lines(result))
    _print_points(result)
    render.say_lines(diagnosis_text.coverage_lines(result))


def _print_points(result: "Diagnosis") -> None:
    """Print a table of the capture points around the first divergence, if there is one."""
    at = next((i for i, row in enumerate(result.points) if row.key == result.first), None)
    if at is None:
        return
    render.line("points around the first divergence", style="head")
    rows = [
        (
            ("> " if row.key == result.first else "  ") + row.key,
            render.number_text(row.direct),
            render.number_text(row.shadow),
            render.number_text(row.gain),
            render.number_text(row.tolerance),
            "beyond" if row.beyond else "",
        )
        for row in result.points[max(0, at - 3) : at + 4]
    ]
    render.table(rows, ("  point", "A to B", "own input", "gain", "tolerance", ""), "lrrrr")


@click.command("diagnose")
@click.argument("a", type=options.MODEL_RUN)
@click.argument("b", type=options.MODEL_RUN)
@click.option("--model", metavar="MODEL", help="The weights that saved traces ran on.")
@click.option("--adapter", metavar="ADAPTER", help="The LoRA adapter that a trace's run served.")
@click.option("--ids", metavar="IDS", help="Token ids: 1,2,3, a .npy or .pt (default: chosen).")
@click.option("--prompt", metavar="TEXT", help="Text instead of ids, tokenized as A does it.")
@click.option(
    "--memory", callback=options.parse_size, metavar="SIZE", help="Budget for decoded weights (2G)."
)
@options.accept()
@options.budget
@options.verbose("Evidence, points, what was checked, every next step.")
@options.html("Write a page: the chain of evidence, a map of all points.")
@options.arch
@options.force
@options.common
def command(
    a: str,
    b: str,
    model: str | None,
    adapter: str | None,
    ids: str | None,
    prompt: str | None,
    memory: int | None,
    accept: tuple[str, ...],
    budget: Budget | None,
    verbose: bool,
    html: Path | None,
    arch: str | None,
    force: bool,
) -> int:
    """Find where A and B first differ, and why.

    A and B are models in any format, runs (MODEL@torch:cpu:bfloat16, MODEL@transformers) or saved
    traces. It prints the class with the cause, the place in the file's own names, how sure and how
    large, what was not compared, and the next command; -v has evidence and coverage.

    Exit 0: the same, or precision; 1: a bug, a difference that no probe reached, a derived model
    (fine-tuned, merged), or something that nothing reads on one side only; 2: they cannot be
    compared, or not in all that counts.
    """
    from aprfmt.cli.run_options import parse_ids
    from aprfmt.diagnosis import diagnose

    options.check_new(force, html)
    with render.ProgressLine("diagnose") as progress:
        result = diagnose(
            a,
            b,
            model=model,
            adapter=adapter,
            ids=None if ids is None else parse_ids(ids),
            prompt=prompt,
            arch=arch,
            memory=memory,
            budget=budget,
            progress=progress,
            notice=progress.say,
        )
    result = replace(result, accept=accept)
    body = result.to_json()
    add_page(body, html, force, lambda: render_page(body))
    return render.emit(body, result.exit_code, lambda: show(result, verbose))
