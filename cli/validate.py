"""`aprfmt validate`: every byte of a model; PASS, FAIL or NOT-RUN for each check."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from aprfmt.cli import options, render

if TYPE_CHECKING:
    from aprfmt.checks.records import Finding, Validation


_STYLES = {"PASS": "good", "FAIL": "bad", "NOT_RUN": "dim"}
_LINES = 20  # findings printed for one check; --json has more


@click.command("validate")
@options.model()
@click.option("--strict", is_flag=True, help="Warnings fail, too.")
@click.option("--against", metavar="SRC", type=options.Place(),
              help="What MODEL was made of: nothing of it may be lost.")  # fmt: skip
@options.allow_missing
@options.html("Write a page: the verdict, every check with what it found.")
@options.arch
@options.force
@options.common
def command(
    model: Path,
    strict: bool,
    against: Path | None,
    allow_missing: tuple[str, ...],
    html: Path | None,
    arch: str | None,
    force: bool,
    as_json: bool,
    quiet: bool,
) -> int:
    """Check every byte of MODEL: checksums, values, scales, completeness, tokenizer, claims.

    A damaged file is reported as far as it can be read. Exit 0: nothing failed; 1: a check failed;
    2: there is no such file, it is no model, or nothing ran.
    """
    from aprfmt.checks import validate

    options.check_new(force, html)
    with render.Progress("validate", quiet, "bytes") as progress:
        report = validate(
            model, arch=arch, strict=strict, allow_missing=allow_missing, against=against,
            progress=progress,
        )  # fmt: skip
    if not as_json:
        show(report)
    body = report.to_json()
    if html is not None:
        from aprfmt.cli import checks_html

        checks_html.write_page(html, checks_html.of_file(body), force)
        body["html"] = str(html)
    return render.emit("validate", report.exit_code, body, as_json)


def show(report: "Validation") -> None:
    """Print a line a check, its findings under it, and the verdict."""
    from aprfmt.base.outcome import count_outcomes

    width = max(len(check.name) for check in report.checks)
    for check in report.checks:
        word = check.outcome.replace("_", "-")
        said = "" if check.outcome == "FAIL" else render.escape(check.found, 300)
        render.line(
            f"{word:7}  {check.name:{width}}  {said}".rstrip(), style=_STYLES[check.outcome]
        )
        noted = [one.finding for one in report.findings if one.check == check.name]
        for finding in noted[:_LINES]:
            render.line("         " + render.escape(_sentence(finding, report.strict), 1000))
        if len(noted) > _LINES:
            render.line(f"         ... {len(noted) - _LINES} more (--json)")
    counts = count_outcomes(report.checks)
    verdict = report.outcome.replace("_", "-")
    render.line(
        f"{verdict}: {counts['PASS']} passed, {counts['FAIL']} failed, "
        f"{counts['NOT_RUN']} not run, {len(report.warnings)} warnings",
        style=_STYLES[report.outcome],
    )


def _sentence(finding: "Finding", strict: bool) -> str:
    level = "" if strict or finding.level == "fail" else "warning: "
    parts = [f"{finding.where}: {finding.found}", f"expected {finding.expected}", finding.todo]
    return level + " - ".join(part for part in parts if part)
