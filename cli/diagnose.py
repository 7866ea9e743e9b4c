"""`aprfmt diagnose`: where two models, traces or runs first differ, and why."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from aprfmt.cli import options, render

if TYPE_CHECKING:
    from aprfmt.diagnosis.found import CauseFound, Diagnosis

STYLES = {"same": "good", "precision": "good", "bug": "bad", "not_comparable": "warn"}
MOST = 24  # lines of evidence shown; --json has all


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
    traces. Exit 0: the same, or rounding; 1: a bug, named; 2: they cannot be compared.
    """
    from aprfmt.cli.running import parse_ids
    from aprfmt.diagnosis import diagnose

    options.check_new(force, html)
    result = diagnose(
        a,
        b,
        model=model,
        ids=None if ids is None else parse_ids(ids),
        prompt=prompt,
        arch=arch,
        memory=memory,
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
    """Print the verdict, the causes, the chain of evidence, and what was not looked at."""
    render.line(render.escape(result.sentence), style=STYLES[result.verdict])
    for finding in result.findings:
        _finding(finding)
    if result.evidence:
        render.line("evidence", style="head")
    for row in result.evidence[:MOST]:
        render.line(render.escape(f"  {row.level:8}  {row.says}"))
    if len(result.evidence) > MOST:
        render.line(f"  ... {len(result.evidence) - MOST} more (--json)", style="dim")
    _points(result)
    for title, rows in (("checked", result.checked), ("not checked", result.not_checked)):
        if rows:
            render.line(title, style="head")
        for text in rows[:MOST]:
            render.line(render.escape(f"  {text}"))
        if len(rows) > MOST:
            render.line(f"  ... {len(rows) - MOST} more (--json)", style="dim")


def _finding(finding: "CauseFound") -> None:
    side = f" in {finding.side}" if finding.side else ""
    name = finding.cause or "unknown cause"
    render.line(
        render.escape(f"  {name}{side} ({finding.confidence}): {finding.says}"), style="head"
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
