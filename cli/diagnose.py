"""`aprfmt diagnose`: where two models, traces or runs first differ, and why."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from aprfmt.cli import options, render

if TYPE_CHECKING:
    from aprfmt.diagnosis.found import CauseFound, Diagnosis

STYLES = {
    "same": "good", "precision": "good", "derived": "warn", "not_exercised": "bad", "bug": "bad",
    "not_comparable": "warn",
}  # fmt: skip
MOST = 24  # lines of evidence shown; --json has all
# What differs between two sentences that say one thing of several places.
PLACES = re.compile(r"\bL?\d[\w.+-]*")


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
    """Print the class, the causes, the evidence, the coverage and the next steps."""
    render.line(render.escape(result.sentence), style=STYLES[result.kind])
    for finding in result.findings:
        _finding(finding, finding is result.lead)
    _listed("evidence", [f"{row.level:8}  {row.says}" for row in result.evidence])
    _points(result)
    coverage = result.coverage
    _listed("run", coverage.run)
    _listed("compared, not run", coverage.compared)
    _listed("not reached", coverage.not_reached)
    _listed("checked", result.checked)
    _listed("not checked", result.not_checked)
    _listed("next", result.next)


def _listed(title: str, rows: Sequence[str]) -> None:
    """Print lines under a title; those that differ in places and numbers only are one line."""
    lines: dict[str, list[str]] = {}
    for text in dict.fromkeys(rows):
        lines.setdefault(text if title == "next" else PLACES.sub("#", text), []).append(text)
    if lines:
        render.line(title, style="head")
    for same in list(lines.values())[:MOST]:
        more = f" (and {len(same) - 1} more like this)" if len(same) > 1 else ""
        render.line(render.escape(f"  {same[0]}{more}"))
    if len(lines) > MOST:
        render.line(f"  ... {len(lines) - MOST} more (--json)", style="dim")


def _finding(finding: "CauseFound", lead: bool) -> None:
    """Print a finding; the first line has said already what the lead says."""
    side = f" in {finding.side}" if finding.side else ""
    name = finding.cause or "unknown cause"
    reached = ", not exercised" if finding.exercised == "not_exercised" else ""
    says = "" if lead else f": {finding.says.removeprefix(f'{name}: ')}"
    render.line(
        render.escape(f"  {name}{side} ({finding.confidence}{reached}){says}"), style="head"
    )
    where = ", ".join(finding.where[:4])
    if len(finding.where) > 4:
        where += f", ... {len(finding.where) - 4} more"
    if where:
        render.line(render.escape(f"      where: {where}"))
    if finding.residual_before is not None:
        after = "-" if finding.residual_after is None else f"{finding.residual_after:.3g}"
        of = f" ({finding.of})" if finding.of else ""
        render.line(
            render.escape(
                f"      residual: {finding.residual_before:.3g} before, {after} after{of}"
            )
        )
    if finding.kl_before is not None and finding.exercised == "shows":
        after = "-" if finding.kl_after is None else f"{finding.kl_after:.3g}"
        render.line(
            f"      KL of the next token: {finding.kl_before:.3g} nats before, {after} after"
        )


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
