"""`aprfmt scan`: many models, one row for every question of every model."""

import os
from pathlib import Path

import click

from aprfmt.cli import options, render
from aprfmt.cli.ci_reports import agree_with_verdict, cases_of_scan
from aprfmt.cli.html_page import add_page
from aprfmt.cli.scan_html import render_page
from aprfmt.cli.scan_show import answer, show, verdict
from aprfmt.errors import UsageError


@click.command("scan")
@click.argument("roots", nargs=-1, metavar="ROOT...")
@click.option("--list", "listed", type=options.NamedPath(), metavar="FILE",
              help="More roots: one a line; # begins a remark, - is stdin.")  # fmt: skip
@click.option("--checks", multiple=True, metavar="NAME", help="Ask only this; a check of "
              "`validate`, digests, template, encodings, support.")  # fmt: skip
@click.option("-o", "--output", type=options.FILE, show_default=True,
              default=Path("aprfmt-scan.jsonl"),
              help="Rows: .jsonl, or .parquet (needs the extra fleet).")  # fmt: skip
@click.option("--jobs", type=options.WORKERS, help="Processes; the machine's cores by default.")
@click.option("--ray", metavar="ADDRESS", is_flag=False, flag_value="",
              help="Ask on a Ray cluster instead (needs the extra fleet).")  # fmt: skip
@click.option("--unit-time", type=options.RealNumber(0, options.YEAR, min_open=True), default=600.0,
              show_default=True,
              help="Seconds that one question of one model may take.")  # fmt: skip
@click.option("--unit-memory", callback=options.parse_size, default="4G", show_default=True,
              help="Memory that one question may take.")  # fmt: skip
@click.option("--max-time", type=options.RealNumber(0, options.YEAR, min_open=True),
              help="Begin nothing new after so many seconds.")  # fmt: skip
@click.option(
    "--max-bytes", callback=options.parse_size, help="Begin models of so many bytes at most."
)
@click.option("--max-requests", type=options.WholeNumber(1),
              help="Begin no model after so many requests over the network.")  # fmt: skip
@click.option("--no-families", "families", is_flag=True, callback=options.negate_flag,
              help="Do not prove which quantized models derive from which others.")  # fmt: skip
@click.option("--html", type=options.FILE, help="Write the summary as one page.")
@options.force
@options.common_ci
def command(
    roots: tuple[str, ...], listed: Path | None, checks: tuple[str, ...], output: Path,
    jobs: int | None, ray: str | None, unit_time: float, unit_memory: int, max_time: float | None,
    max_bytes: int | None, max_requests: int | None, families: bool, html: Path | None, force: bool,
) -> int:  # fmt: skip
    """Check every model under each ROOT: folders, hub caches, Ollama's store, files, addresses.

    Rows are added to the results as they come; what stands there is not asked again, so that a
    second scan does what is new or changed. Exit 0: nothing failed; 1: a check of a model failed;
    2: something could not be asked, or not be answered.
    """
    from aprfmt.fleet.run import ScanBudget, ScanRequest, scan
    from aprfmt.fleet.workers import Limits

    options.check_new(force, html)
    request = ScanRequest(
        collect_roots(roots, listed), output, checks, jobs or os.cpu_count() or 1,
        Limits(unit_time, unit_memory),
        ScanBudget(max_time, max_bytes, max_requests), ray, families,
    )  # fmt: skip
    with render.ProgressLine("scan") as progress:
        report = scan(request, progress)
    body = report.to_json()
    add_page(body, html, force, lambda: render_page(report, verdict(report)))
    code = report.exit_code
    return render.emit(
        body, code, lambda: show(report), answer=lambda: answer(report),
        cases=lambda: agree_with_verdict(cases_of_scan(body), code, str(output)),
    )  # fmt: skip


def collect_roots(roots: tuple[str, ...], listed: Path | None) -> tuple[str, ...]:
    """Return the roots of the command line and of a list; UsageError where there are none."""
    from aprfmt.model.hf_folder import read_text

    text = ""
    if listed is not None:
        text = options.read_stdin("--list") if str(listed) == "-" else read_text(listed)
    lines = [line.partition(" #")[0].strip() for line in text.splitlines()]
    found = (*roots, *(line for line in lines if line and not line.startswith("#")))
    if not found:
        raise UsageError("nothing to scan; give a ROOT, or --list FILE")
    return found
