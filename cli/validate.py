"""`aprfmt validate`: every byte of a model; PASS, FAIL or NOT-RUN for each check."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from aprfmt.base.budget import Budget
from aprfmt.cli import check_output, check_page, options, render
from aprfmt.cli.captured_activations import refuse_captures
from aprfmt.cli.ci_reports import append_verdict_case, cases_of_validation
from aprfmt.cli.html_page import add_page

if TYPE_CHECKING:
    from aprfmt.compare.short_answer import Line


@click.command("validate")
@options.model()
@click.option("--strict", is_flag=True, help="Warnings fail, too.")
@click.option(
    "--against",
    metavar="SRC",
    type=options.PathOrAddress(),
    help="What MODEL was made of: nothing of it may be lost.",
)
@click.option(
    "--second-reader", is_flag=True, help="The official library (gguf, safetensors) reads it, too."
)
@options.allow_missing
@options.accept()
@options.budget
@options.verbose("Every check, those that passed too.")
@options.html("Write a page: the verdict, every check with what it found.")
@options.arch
@options.force
@options.common_ci
def command(
    model: Path,
    strict: bool,
    against: Path | None,
    second_reader: bool,
    allow_missing: tuple[str, ...],
    accept: tuple[str, ...],
    budget: Budget | None,
    verbose: bool,
    html: Path | None,
    arch: str | None,
    force: bool,
) -> int:
    """Check every byte of MODEL: checksums, values, scales, completeness, tokenizer, claims.

    A damaged file is reported as far as it can be read. Exit 0: nothing failed; 1: a check failed;
    2: there is no such file, it is no model, or nothing ran.
    """
    from aprfmt.checks import validate

    options.check_new(force, html)
    refuse_captures(model, arch=arch)
    with render.ProgressLine("validate", "bytes") as progress:
        report = validate(
            model,
            arch=arch,
            strict=strict,
            allow_missing=allow_missing,
            against=against,
            second_reader=second_reader,
            accept=accept,
            budget=budget,
            progress=progress,
        )
    body = report.to_json()
    add_page(body, html, force, lambda: check_page.validation_page(body))
    code = report.exit_code

    def lines() -> "list[Line]":
        """Return the validation's short answer as (text, style) lines."""
        return check_output.validation_answer(report, None if against is None else str(against))

    def show() -> None:
        """Print every check of the file with `verbose`, else the short answer."""
        if verbose:
            check_output.show_validation(report)
        else:
            passed = check_output.count_passed(report.checks)
            skipped = check_output.skipped_checks(report)
            check_output.show_short(lines(), passed, "checks", skipped)

    return render.emit(
        body,
        code,
        show,
        answer=lines,
        cases=lambda: append_verdict_case(cases_of_validation(body), code, report.subject),
    )
