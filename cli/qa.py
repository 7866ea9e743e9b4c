"""`aprfmt qa`: the gates together, to find out whether a file can be trusted."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from aprfmt.cli import options, render, running

if TYPE_CHECKING:
    from aprfmt.checks.records import QaReport

STYLES = {"PASS": "good", "FAIL": "bad", "NOT_RUN": "warn"}


@dataclass(frozen=True)
class Gates:
    """Which gates are asked, and what they hold the model against."""

    against: Path | None
    golden: Path | None
    random_weights: bool
    only: tuple[str, ...]
    skip: tuple[str, ...]
    min_run: int
    baseline: Path | None


@click.command("qa")
@options.gathered(gates=Gates, where=running.Where)
@click.argument("model")
@click.option("--against", metavar="OTHER", type=options.Place(),
              help="Another copy of the model: hold this one against it.")  # fmt: skip
@click.option("--also", multiple=True, metavar="RUN",
              help="Compare with this run too: torch, cuda, cuda:1, numpy::float64.")  # fmt: skip
@click.option("--golden", type=options.FILE, metavar="FILE.json",
              help="Prompts, answers and losses (default: golden.json beside it).")  # fmt: skip
@click.option("--random-weights", is_flag=True,
              help="The model is untrained: expect the losses of such a one.")  # fmt: skip
@click.option("--only", multiple=True, metavar="GATE", help="Ask only these gates.")
@click.option("--skip", multiple=True, metavar="GATE", help="Leave these gates out.")
@click.option("--min-run", type=click.IntRange(min=0), default=0, metavar="N",
              help="Fail if fewer than N gates gave an answer.")  # fmt: skip
@click.option("--baseline", type=options.FILE, metavar="FILE.json",
              help="Fail where a gate or number got worse than in this file.")  # fmt: skip
@click.option("--save-baseline", type=options.FILE, metavar="FILE.json",
              help="Write what was found as a baseline.")  # fmt: skip
@options.html("Write a page: the verdict, every gate with its checks and numbers.")
@running.where
@options.arch
@options.force
@options.common
def command(
    model: str, also: tuple[str, ...], gates: Gates, save_baseline: Path | None,
    html: Path | None, force: bool, as_json: bool, quiet: bool, where: running.Where,
) -> int:  # fmt: skip
    """Put a model through the gates, each PASS, FAIL or NOT-RUN.

    A NOT-RUN never counts as a pass. With --device the model runs there and device-parity holds
    it against numpy on the CPU. Exit 0: every gate that ran passed; 1: one failed, or fewer ran
    than --min-run; 2: nothing ran, or something asked for could not.
    """
    from aprfmt import qa
    from aprfmt.inference.device import parse_run

    options.check_new(force, save_baseline, html)
    request = where.request(model)
    if request.choice.why.startswith("auto"):
        render.warn(request.choice.why, "fallback")
    with render.Progress("qa", quiet) as bar:
        report = qa.run(
            request.model, progress=lambda gate, done, total: bar(done, total),
            choice=request.choice, also=tuple(parse_run(text) for text in also), arch=where.arch,
            threads=where.threads, memory=where.memory, deterministic=where.deterministic,
            allow_missing=where.allow_missing, **vars(gates),
        )  # fmt: skip
    if save_baseline is not None:
        qa.save_baseline(report, save_baseline, force=force)
    saved = None if save_baseline is None else str(save_baseline)
    if not as_json:
        show(report)
        if saved is not None:
            render.line(render.escape(f"baseline written to {saved}"))
    body = {**report.to_json(), "saved_baseline": saved}
    if html is not None:
        from aprfmt.cli import checks_html

        page = checks_html.of_gates(body, report.exit_code, report.sentence)
        checks_html.write_page(html, page, force)
        body["html"] = str(html)
    return render.emit("qa", report.exit_code, body, as_json)


def show(report: "QaReport") -> None:
    """Print a line for each gate, and what failed in it."""
    render.line(render.escape(f"{report.subject} on {report.choice}"), style="head")
    for gate in report.gates:
        took = f"{gate.seconds:6.2f} s" if gate.outcome != "NOT_RUN" else "        "
        text = f"{gate.outcome.replace('_', '-'):7} {gate.name:16} {took}  "
        if gate.outcome == "PASS":
            text += gate.proves
        elif gate.outcome == "NOT_RUN":
            text += gate.why
        else:
            text += f"{len(gate.failed)} of {len(gate.checks)} checks failed"
        render.line(render.escape(text), style=STYLES[gate.outcome])
        for each in gate.checks:
            if each.outcome == "FAIL" or (each.outcome == "NOT_RUN" and gate.outcome != "NOT_RUN"):
                todo = f"; {each.todo}" if each.todo else ""
                place = f" ({each.where})" if each.where else ""
                line = f"{each.name}{place}: {each.found}; expected {each.expected}{todo}"
                render.line(render.escape(f"        {each.outcome.replace('_', '-')} {line}"),
                            style=STYLES[each.outcome])  # fmt: skip
    style = {0: "good", 1: "bad", 2: "warn"}[report.exit_code]
    render.line(f"{report.outcome.replace('_', '-')}: {report.sentence}", style=style)
