"""What `aprfmt step` prints: the verdict, causes, and tensors by role and layer."""

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

from aprfmt.base.protocols import Value
from aprfmt.cli import html_page, output_format, render
from aprfmt.compare.short_answer import Line, short_answer
from aprfmt.measure.named_causes import short_keys

if TYPE_CHECKING:
    from aprfmt.training.device_comparison import RunsReport
    from aprfmt.training.memory import StepMemory
    from aprfmt.training.report import StepReport, TensorStep


def show(report: "StepReport", verbose: bool) -> None:
    """Print the verdict, the causes and what moved; with `verbose` a table of all tensors."""
    found = report.pronounced
    headline = found.says, render.EXIT_STYLES[found.exit]
    facts = list(_facts(report))
    lines = short_answer(
        headline,
        report.causes,
        first_said=False,
        others=facts,
        unmended=unmended_text(report),
        commands=list(_next_commands(report, verbose)) if found.exit else (),
        names=output_format.shown_names(),
    )
    render.say_lines(lines)
    if verbose:
        _table(report)


def unmended_text(report: "StepReport") -> str:
    """Return the sentence that no command mends a step with a fault; "" for a step without one.

    What went wrong is in the trainer or its settings, not in a file that can be written again.
    """
    if report.pronounced.exit != 1 or any(cause.remedy for cause in report.causes):
        return ""
    return "no command mends it: the trainer has to be put right, and the step made again"


def _next_commands(report: "StepReport", verbose: bool) -> Iterator[str]:
    """Yield the next command: one that shows what was stored for the first tensor that differs.

    If no later weights are given, or no tensor differs, it is the same step with -v, which prints
    every tensor and why it was not compared; after that, one that shows what is known of the model.
    """
    first = next((row for row in report.tensors if row.verdict == "differs"), None)
    if first is not None and report.after is not None and report.adapter is None:
        both = f"{shlex.quote(report.model)} {shlex.quote(report.after)}"
        name = shlex.quote(first.names[0] if first.names else first.key)
        yield f"aprfmt diff {both} --tensor {name} -v"
    else:
        yield _more_command(report.model, verbose)


def _more_command(model: str, verbose: bool) -> str:
    """Return this command with -v; if it had that, the one that lists what the model holds."""
    account = f"aprfmt inspect {shlex.quote(model)} --account"
    return account if verbose else render.this_command("-v")


def _facts(report: "StepReport") -> Iterator[Line]:
    """Yield (line, style) on a step's loss, gradient norms, moved parameters and notes."""
    moved = [row for row in report.tensors if row.update is not None and row.update.moved]
    still = [row for row in report.tensors if row.update is not None and not row.update.moved]
    if report.loss is not None:
        yield f"  loss {report.loss:.6f} nats per label, on {report.computed_on}", ""
    if report.norms.gradient is not None:
        own = report.norms.computed
        here = "" if own is None else f", {own:.6g} computed here"
        yield f"  norm of all gradients {report.norms.gradient:.6g}{here}", ""
    elif report.norms.computed is not None:
        yield f"  norm of all gradients {report.norms.computed:.6g}, computed here", ""
    if moved:
        elements = sum(row.update.elements for row in moved if row.update)
        share = sum(row.update.moved for row in moved if row.update) / max(1, elements)
        norm = sum(row.update.norm**2 for row in moved if row.update) ** 0.5
        text = f"  moved: {len(moved)} tensors, {share:.1%} of their elements, norm {norm:.4g}"
        yield text, ""
    if still:
        yield f"  not moved: {len(still)} tensors: {short_keys(row.key for row in still)}", "warn"
    for text in report.notes:
        yield f"  {text}", ""


def _table(report: "StepReport") -> None:
    """Print a table with a row for every tensor."""
    render.table(
        [_cells(row) for row in report.tensors],
        ("tensor", "verdict", "weight", "gradient", "computed", "moved", "update", "step", "why"),
        "llrrrrrrl",
    )


def _cells(row: "TensorStep") -> tuple[str, ...]:
    """Return the cells of a tensor's row in the table; "-" for what is not known."""
    update = row.update
    return (
        row.key,
        row.verdict,
        _number(row.norm),
        _number(None if row.gradient is None else row.gradient.norm),
        _number(None if row.computed is None else row.computed.norm),
        "-" if update is None else f"{update.moved / max(1, update.elements):.1%}",
        _number(None if update is None else update.norm),
        _number(None if update is None else update.step),
        row.why,
    )


def _number(value: float | None) -> str:
    """Return a number with four digits, or "-" for None."""
    return "-" if value is None else f"{value:.4g}"


def page(body: Mapping[str, Value]) -> str:
    """Return the HTML page of a report; `body` is what `step --json` prints."""
    facts = {
        "before": body["model"],
        "after": body["after"],
        "adapter": body["adapter"],
        "optimizer": body["optimizer"],
        "loss": body["loss"],
        "verdict": body["says"],
    }
    return html_page.render_html(
        "Training step", facts, {"step": body}, (*html_page.REPORT, "step.js")
    )


def show_runs(report: "RunsReport", model: str, verbose: bool) -> None:
    """Print which run's gradients are wrong and where first; with `verbose` a table of all.

    `model` is the path that was given.
    """
    found = report.pronounced
    render.say(found.says, style=render.EXIT_STYLES[found.exit])
    render.say(f"  loss {report.loss:.6f} nats per label, in float64 on the cpu")
    for run in report.runs:
        text = f"  {run.run}: loss {run.loss:.6f}"
        if run.flips:
            text += f", its routers choose other experts at {len(run.flips)} points: not judged"
        elif run.first_wrong is not None:
            text += f", wrong first at {run.first_wrong}, {run.wrong} gradients in all"
        else:
            text += ", within what rounding explains"
        if run.update is not None:
            text += f"; the optimizer's first step is {run.update:.3g} from that of float64"
        render.say(text, style="bad" if run.first_wrong else "")
    if verbose:
        names = [run.run for run in report.runs]
        render.table(
            [
                (
                    row.key,
                    f"{row.size:.4g}",
                    *(f"{x:.3g}" for x in row.apart),
                    ", ".join(names[i] for i in row.wrong),
                )
                for row in report.gradients
            ],
            ("gradient", "norm", *names, "wrong"),
            "lr" + "r" * len(names) + "l",
        )
    if found.exit == 1:
        render.say("no command mends it: what a run computes is in no file", style="warn")
    if found.exit:
        render.say(f"next: {_more_command(model, verbose)}", style="head")


def report_memory(found: "StepMemory") -> int:
    """Print how much explaining a step would read and take of memory; return exit code 0."""
    size = render.size_text
    text = (
        f"{found.parameters} parameters: reads {size(found.read_bytes)}, takes at most "
        f"{size(found.peak_bytes)} of memory"
    )
    if found.backward_bytes is not None:
        text += f"; the gradients of the batch take at least {size(found.backward_bytes)}"
    if found.device_bytes is not None:
        text += f", and {size(found.device_bytes)} of the GPU's"
    if found.forward_bytes is not None:
        text += f"; differences of the batch's loss take {size(found.forward_bytes)}"
    return render.emit({"dry_run": asdict(found)}, 0, lambda: render.say(text))
