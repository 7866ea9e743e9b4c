"""`aprfmt scan`: many models, one row for every question of every model."""

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from aprfmt.base.protocols import Value
from aprfmt.cli import html_page, options, render
from aprfmt.cli.ci_reports import append_verdict_case, cases_of_scan
from aprfmt.cli.html_page import add_page
from aprfmt.errors import UsageError

if TYPE_CHECKING:
    from aprfmt.compare.short_answer import Line
    from aprfmt.fleet.run import ScanReport


def render_page(report: "ScanReport", verdict: str) -> str:
    """Return the HTML page of a scan; `verdict` is the text of its first line."""
    facts = {
        "results": report.out,
        "asked now": report.asked,
        "known before": report.kept,
        "left (budget)": report.left or "",
    }
    data = {"verdict": verdict, "found": report.to_json()}
    return html_page.render_html("Scan of models", facts, data, ("scan.html", "scan.js"))


DERIVED = "encoded again"  # the proof of a quantized model
_LINES = 20  # of each list; --json and the results have all


def show(report: "ScanReport") -> None:
    """Print the verdict, damage, duplicate tensors, families, and templates that differ."""
    found = report.found
    style = "bad" if found["counts"]["FAIL"] else "warn" if report.exit_code else "good"
    render.line(verdict_text(report), style=style)
    _print_list("damage", [_damage_text(row) for row in found["damage"]], "bad")
    copies = found["copies"]
    if copies["tensors"]:
        render.line(
            f"{copies['tensors']} tensors stored more than once: {copies['bytes']:,} bytes "
            "could be saved",
            style="head",
        )
    _print_list(
        "families",
        [
            f"{row['model']}: {'from' if row['proof'] == DERIVED else 'like'} {row['base']}: "
            f"{row['found']}"
            for row in found["families"]
        ],
    )
    _print_list(
        "vocabularies with several templates",
        [
            "; ".join(f"{one['models']} like {one['example']}" for one in row["templates"])
            for row in found["templates"]
        ],
    )
    left = f", {report.left} left (budget)" if report.left else ""
    render.line(
        f"{report.asked} asked now, {report.kept} known before{left}; rows in "
        f"{render.escape(str(report.out))}"
    )


def answer(report: "ScanReport") -> "list[Line]":
    """Return the short answer as (text, style) lines: verdict, damage, copies, next command."""
    from aprfmt.compare.short_answer import merge_similar_lines

    found = report.found
    lines: list[Line] = [(verdict_text(report), "bad" if report.exit_code else "good")]
    lines += merge_similar_lines([(f"  {_damage_text(row)}", "bad") for row in found["damage"]])
    copies = found["copies"]
    if copies["tensors"]:
        size = render.size_text(copies["bytes"])
        lines.append((f"{copies['tensors']} tensors stored more than once: {size}", ""))
    lists = {"families": found["families"],
             "vocabularies with several templates": found["templates"]}  # fmt: skip
    lines += [(f"{title}: {len(rows)} (--json)", "") for title, rows in lists.items() if rows]
    left = f", {report.left} left (budget)" if report.left else ""
    lines.append((f"{report.asked} asked now{left}; rows in {report.out}", ""))
    if found["damage"]:
        model = shlex.quote(found["damage"][0]["model"])
        lines.append((f"next: aprfmt validate {model}", "head"))
    elif weights := [row["model"] for row in found["unread"] if row["weights"]]:
        lines.append((f"next: aprfmt inspect {shlex.quote(weights[0])} --account", "head"))
    return lines


def verdict_text(report: "ScanReport") -> str:
    """Return the verdict's line: the outcome, and how many answers of each kind."""
    return report.pronounced.says


def _damage_text(row: Mapping[str, Value]) -> str:
    """Return one line on an answer that is no pass: outcome, model, check, the first finding.

    `row` is one of the summary's `damage`.
    """
    first = next(iter(row["findings"]), None)
    said = f"{first['where']}: {first['found']}" if first else row["found"]
    return f"{row['outcome']} {row['model']}: {row['check']}: {said}"


def _print_list(title: str, lines: list[str], style: str = "") -> None:
    """Print a title with the number of lines, then the first of them; nothing for no lines."""
    if not lines:
        return
    render.line(f"{title}: {len(lines)}", style="head")
    for line in render.first_rows(lines, _LINES, "  "):
        render.line("  " + render.escape(line, 1000), style=style)


@click.command("scan")
@click.argument("roots", nargs=-1, metavar="ROOT...")
@click.option(
    "--list",
    "listed",
    type=options.NamedPath(),
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
    show_default=True,
    default=Path("aprfmt-scan.jsonl"),
    help="Rows: .jsonl, or .parquet (needs the extra fleet).",
)
@click.option("--jobs", type=options.WORKERS, help="Processes; the machine's cores by default.")
@click.option(
    "--ray",
    metavar="ADDRESS",
    is_flag=False,
    flag_value="",
    help="Ask on a Ray cluster instead (needs the extra fleet).",
)
@click.option(
    "--unit-time",
    type=options.RealNumber(0, options.YEAR, min_open=True),
    default=600.0,
    show_default=True,
    help="Seconds that one question of one model may take.",
)
@click.option(
    "--unit-memory",
    callback=options.parse_size,
    default="4G",
    show_default=True,
    help="Memory that one question may take.",
)
@click.option(
    "--max-time",
    type=options.RealNumber(0, options.YEAR, min_open=True),
    help="Begin nothing new after so many seconds.",
)
@click.option(
    "--max-bytes", callback=options.parse_size, help="Begin models of so many bytes at most."
)
@click.option(
    "--max-requests",
    type=options.WholeNumber(1),
    help="Begin no model after so many requests over the network.",
)
@click.option(
    "--no-families",
    "families",
    is_flag=True,
    callback=options.negate_flag,
    help="Do not prove which quantized models derive from which others.",
)
@options.accept()
@click.option("--html", type=options.FILE, help="Write the summary as one page.")
@options.force
@options.common_ci
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
    accept: tuple[str, ...],
    html: Path | None,
    force: bool,
) -> int:
    """Check every model under each ROOT: folders, hub caches, Ollama's store, files, addresses.

    Rows are added to the results as they come. A question that has a row is not asked again, so a
    second scan checks only what is new or changed. Exit 0: nothing failed; 1: a check of a model
    failed; 2: something could not be asked, or not be answered.
    """
    from aprfmt.fleet.run import ScanBudget, ScanRequest, scan
    from aprfmt.fleet.workers import Limits

    options.check_new(force, html)
    request = ScanRequest(
        collect_roots(roots, listed),
        output,
        checks,
        jobs or os.cpu_count() or 1,
        Limits(unit_time, unit_memory),
        ScanBudget(max_time, max_bytes, max_requests),
        ray,
        families,
        accept,
    )
    with render.ProgressLine("scan") as progress:
        report = scan(request, progress)
    body = report.to_json()
    add_page(body, html, force, lambda: render_page(report, verdict_text(report)))
    code = report.exit_code
    return render.emit(
        body,
        code,
        lambda: show(report),
        answer=lambda: answer(report),
        cases=lambda: append_verdict_case(cases_of_scan(body), code, str(output)),
    )


def collect_roots(roots: tuple[str, ...], listed: Path | None) -> tuple[str, ...]:
    """Return the roots of the command line and of --list; UsageError where there are none.

    `listed` is the file of --list, a root a line; - is stdin.
    """
    from aprfmt.model.hf_folder import read_text

    text = ""
    if listed is not None:
        text = options.read_stdin("--list") if str(listed) == "-" else read_text(listed)
    lines = [line.partition(" #")[0].strip() for line in text.splitlines()]
    found = (*roots, *(line for line in lines if line and not line.startswith("#")))
    if not found:
        raise UsageError("nothing to scan; give a ROOT, or --list FILE")
    return found
