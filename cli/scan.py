"""`aprfmt scan`: many models, one row for every question of every model."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aprfmt.cli import options, render
from aprfmt.errors import UsageError

if TYPE_CHECKING:
    from aprfmt.fleet.run import ScanReport

DERIVED = "encoded again"  # the proof of a quantized model
_LINES = 20  # of each list; --json and the results have all


@click.command("scan")
@click.argument("roots", nargs=-1, metavar="ROOT...")
@click.option(
    "--list",
    "listed",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="More roots: one a line; # begins a remark, - is stdin.",
)
@click.option(
    "--checks",
    multiple=True,
    metavar="NAME",
    help="Ask only this; a check of `validate`, digests, template, encodings, support.",
)
@click.option(
    "-o",
    "--output",
    type=options.FILE,
    default=Path("aprfmt-scan.jsonl"),
    show_default=True,
    help="Rows: .jsonl, or .parquet (needs aprfmt[fleet]).",
)
@click.option("--jobs", type=click.IntRange(1), help="Processes; the machine's cores by default.")
@click.option(
    "--ray",
    metavar="ADDRESS",
    is_flag=False,
    flag_value="",
    help="Ask on a Ray cluster instead (needs aprfmt[fleet]).",
)
@click.option(
    "--unit-time",
    type=click.FloatRange(0, min_open=True),
    default=600.0,
    show_default=True,
    help="Seconds that one question of one model may take.",
)
@click.option(
    "--unit-memory",
    callback=options.size,
    default="4G",
    show_default=True,
    help="Memory that one question may take.",
)
@click.option(
    "--max-time",
    type=click.FloatRange(0, min_open=True),
    help="Begin nothing new after so many seconds.",
)
@click.option("--max-bytes", callback=options.size, help="Begin models of so many bytes at most.")
@click.option(
    "--max-requests",
    type=click.IntRange(1),
    help="Begin no model after so many requests over the network.",
)
@click.option(
    "--no-families",
    "families",
    is_flag=True,
    callback=options.negated,
    help="Do not prove which quantized models derive from which others.",
)
@click.option("--html", type=options.FILE, help="Write the summary as one page.")
@options.force
@options.common
def command(
    roots: tuple[str, ...],
    listed: Path | None,
    checks: tuple[str, ...],
    output: Path,
    jobs: int | None,
    ray: str | None,
    unit_time: float,
    unit_memory: int,
    max_time: float | None,
    max_bytes: int | None,
    max_requests: int | None,
    families: bool,
    html: Path | None,
    force: bool,
    as_json: bool,
    quiet: bool,
) -> int:
    """Check every model under each ROOT: folders, hub caches, Ollama's store, files, addresses.

    Rows are added to the results as they come; what stands there is not asked again, so that a
    second scan does what is new or changed. Exit 0: nothing failed; 1: a check of a model failed;
    2: something could not be asked, or not be answered.
    """
    from aprfmt.fleet.run import Budget, ScanRequest, scan
    from aprfmt.fleet.workers import Limits

    options.check_new(force, html)
    request = ScanRequest(
        every_root(roots, listed), output, checks, jobs or os.cpu_count() or 1,
        Limits(unit_time, unit_memory),
        Budget(max_time, max_bytes, max_requests), ray, families,
    )  # fmt: skip
    with render.Progress("scan", quiet) as progress:
        report = scan(request, progress)
    body = report.to_json()
    if html is not None:
        from aprfmt.cli.html import write_page
        from aprfmt.cli.scan_html import render_page

        write_page(html, render_page(report, verdict(report)), force)
        body["html"] = str(html)
    if not as_json:
        show(report)
    return render.emit("scan", report.exit_code, body, as_json)


def every_root(roots: tuple[str, ...], listed: Path | None) -> tuple[str, ...]:
    """Return the roots of the command line and of a list; UsageError where there are none."""
    from aprfmt.model.hf_folder import read_text

    text = ""
    if listed is not None:
        text = options.stdin("--list") if str(listed) == "-" else read_text(listed)
    lines = [line.partition(" #")[0].strip() for line in text.splitlines()]
    found = (*roots, *(line for line in lines if line and not line.startswith("#")))
    if not found:
        raise UsageError("nothing to scan; give a ROOT, or --list FILE")
    return found


def show(report: "ScanReport") -> None:
    """Print the verdict, then what is damaged, stored twice, derived and drifted."""
    found = report.found
    style = "bad" if found["counts"]["FAIL"] else "warn" if report.exit_code else "good"
    render.line(verdict(report), style=style)
    _listed("damage", [_damage(row) for row in found["damage"]], "bad")
    copies = found["copies"]
    if copies["tensors"]:
        render.line(f"{copies['tensors']} tensors stored more than once: {copies['bytes']:,} bytes "
                    "could be saved", style="head")  # fmt: skip
    _listed("families", [
        f"{row['model']}: {'from' if row['proof'] == DERIVED else 'like'} {row['base']}: "
        f"{row['found']}" for row in found["families"]
    ])  # fmt: skip
    _listed("vocabularies with several templates", [
        "; ".join(f"{one['models']} like {one['example']}" for one in row["templates"])
        for row in found["templates"]
    ])  # fmt: skip
    left = f", {report.left} left (budget)" if report.left else ""
    render.line(
        f"{report.asked} asked now, {report.kept} known before{left}; rows in "
        f"{render.escape(str(report.out))}"
    )


def verdict(report: "ScanReport") -> str:
    """Return the first line: the outcome, and how many answers of which kind."""
    counts = report.found["counts"]
    word = "FAIL" if counts["FAIL"] else "NOT-RUN" if report.exit_code else "PASS"
    return (
        f"{word}: {len(report.found['models'])} models: {counts['PASS']} answers passed, "
        f"{counts['FAIL']} failed, {counts['NOT_RUN']} not run, {counts['ERROR']} errors"
    )


def _damage(row: dict[str, Any]) -> str:
    first = next(iter(row["findings"]), None)
    said = f"{first['where']}: {first['found']}" if first else row["found"]
    return f"{row['outcome']} {row['model']}: {row['check']}: {said}"


def _listed(title: str, lines: list[str], style: str = "") -> None:
    if not lines:
        return
    render.line(f"{title}: {len(lines)}", style="head")
    for line in lines[:_LINES]:
        render.line("  " + render.escape(line, 1000), style=style)
    if len(lines) > _LINES:
        render.line(f"  ... {len(lines) - _LINES} more (--json)", style="dim")
