"""`aprfmt qa`: the gates together, to find out whether a file can be trusted."""

from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

import click

from aprfmt.base.budget import Budget
from aprfmt.cli import check_output, check_page, options, render, run_options
from aprfmt.cli.captured_activations import refuse_captures
from aprfmt.cli.ci_reports import append_verdict_case, cases_of_gates
from aprfmt.cli.html_page import add_page

if TYPE_CHECKING:
    from aprfmt.compare.short_answer import Line


class QaArguments(TypedDict):
    """What is handed on to `aprfmt.checks.gates.running.run` as it was given."""

    against: Path | None
    golden: Path | None
    random_weights: bool
    only: tuple[str, ...]
    skip: tuple[str, ...]
    min_run: int
    baseline: Path | None
    accept: tuple[str, ...]
    budget: Budget | None


@click.command("qa")
@options.gather_options(where=run_options.WhereOptions)
@click.argument("model", type=options.MODEL_RUN)
@click.option(
    "--against",
    metavar="OTHER",
    type=options.PathOrAddress(),
    help="Compare with another copy of the model.",
)
@click.option(
    "--also",
    multiple=True,
    metavar="RUN",
    help="Compare with this run too: torch, cuda, cuda:1, numpy::float64.",
)
@click.option(
    "--golden",
    type=options.FILE,
    metavar="FILE.json",
    help="Prompts, answers and losses (default: golden.json next to it).",
)
@click.option(
    "--random-weights",
    is_flag=True,
    help="The model is untrained: expect the losses of an untrained model.",
)
@click.option("--only", multiple=True, metavar="GATE", help="Ask only these gates.")
@click.option("--skip", multiple=True, metavar="GATE", help="Leave these gates out.")
@click.option(
    "--fail-on",
    type=click.Choice(["failure", "warning"]),
    default="failure",
    show_default=True,
    help="What makes a gate fail.",
)
@click.option(
    "--min-run",
    type=options.WholeNumber(0),
    default=0,
    metavar="N",
    help="Fail if fewer than N gates gave an answer.",
)
@click.option(
    "--baseline",
    type=options.FILE,
    metavar="FILE.json",
    help="Fail where a gate or number got worse than in this file.",
)
@click.option(
    "--save-baseline",
    type=options.FILE,
    metavar="FILE.json",
    help="Write what was found as a baseline.",
)
@options.accept()
@options.budget
@options.verbose("Every gate, those that passed too, with what it took.")
@options.html("Write a page: the verdict, every gate with its checks and numbers.")
@run_options.where
@options.arch
@options.force
@options.common_ci
def command(
    model: str,
    also: tuple[str, ...],
    fail_on: str,
    save_baseline: Path | None,
    verbose: bool,
    html: Path | None,
    force: bool,
    where: run_options.WhereOptions,
    **asked: Unpack[QaArguments],
) -> int:
    """Put a model through the gates, each PASS, FAIL or NOT-RUN.

    A NOT-RUN never counts as a pass. With --device the model runs there, and device-parity
    compares it with numpy on the CPU. Exit 0: every gate that ran passed; 1: one failed, or fewer
    ran than --min-run; 2: nothing ran, or a requested gate could not run.
    """
    from aprfmt.checks.gates import running as qa
    from aprfmt.inference.device import parse_run

    options.check_new(force, save_baseline, html)
    refuse_captures(model, arch=where.arch)
    request, others = where.request(model), tuple(parse_run(text) for text in also)
    for choice in (request.choice, *others):
        choice.refuse_missing_gpu()  # before torch is imported, which takes seconds
    if request.choice.why.startswith("auto"):
        render.warn(request.choice.why, "fallback")
    with render.ProgressLine("qa") as bar:
        report = qa.run(
            request.model,
            progress=lambda gate, done, total: bar(done, total, gate),
            choice=request.choice,
            also=others,
            arch=where.arch,
            threads=where.threads,
            memory=where.memory,
            deterministic=where.deterministic,
            allow_missing=where.allow_missing,
            strict=fail_on == "warning",
            **asked,
        )
    if save_baseline is not None:
        qa.save_baseline(report, save_baseline, force=force)
    saved = None if save_baseline is None else str(save_baseline)
    body = {**report.to_json(), "saved_baseline": saved}
    code = report.exit_code
    sentence = report.pronounced.says.partition(": ")[2]
    add_page(body, html, force, lambda: check_page.gates_page(body, code, sentence))

    def lines() -> "list[Line]":
        """Return the gates' short answer as (text, style) lines."""
        other = None if asked["against"] is None else str(asked["against"])
        chosen = [
            word
            for option, gates in (("--only", asked["only"]), ("--skip", asked["skip"]))
            for gate in gates
            for word in (option, gate)
        ]
        return check_output.gates_answer(report, saved, other, chosen)

    def show() -> None:
        """Print every gate's outcome with `verbose`, else the short answer."""
        if verbose:
            check_output.show_gates(report, saved)
        else:
            passed = sum(gate.outcome == "PASS" for gate in report.gates)
            skipped = check_output.skipped_gates(report)
            check_output.show_short(lines(), passed, "gates", skipped)

    return render.emit(
        body,
        code,
        show,
        answer=lines,
        cases=lambda: append_verdict_case(cases_of_gates(body), code, report.subject),
    )
