"""`aprfmt logits`: the logits of every token, as a file, and the gate a working model passes."""

from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import click

from aprfmt.cli import checks_show, options, render, running

if TYPE_CHECKING:
    from aprfmt.base.outcome import Check, Report
    from aprfmt.compare.short_answer import Line
    from aprfmt.model.ledger import Pronounced


class LogitsFound(TypedDict):
    """What `aprfmt logits` says; `top` of the last row."""

    run: running.WhereRan
    tokens: dict[str, object]
    shape: list[int]
    dtype: str
    argmax: "running.TopToken | None"
    top: "list[running.TopToken]"
    gate: dict[str, object]
    output: str | None


@click.command("logits")
@options.gathered(tokens=running.Tokens, where=running.WhereOptions)
@click.argument("model", type=options.MODEL_RUN)
@running.what
@click.option("--out", type=options.NamedPath(), help="Write float32 [tokens, vocab] .npy.")
@running.where
@options.arch
@options.force
@options.common
def command(
    model: str, out: Path | None, force: bool, tokens: running.Tokens, where: running.WhereOptions
) -> int:
    """Compute the logits of every token, and judge the last row.

    --out FILE.npy writes them all, float32 [tokens, vocab]. Exit 1 when the gate fails: a NaN or
    an infinity, no spread, no peak.
    """
    import numpy as np

    from aprfmt.base.outcome import Report
    from aprfmt.checks.records import pronounce_report
    from aprfmt.formats.npy import write_npy
    from aprfmt.inference.gates import rows_gate

    options.check_new(force, out)
    with running.session(model, where) as run:
        opened = run.model
        ids, text = running.token_ids(opened, tokens)
        running.warn_of_length(opened, ids)
        found = run.session.logits(ids)
        top = running.top_tokens(found[-1], opened)
        report = Report(str(opened.path), tuple(rows_gate(found)))
        verdict = pronounce_report(report, opened)
        body: LogitsFound = {
            "run": running.run_facts(run),
            "tokens": {"ids": ids, "text": text},
            "shape": list(found.shape),
            "dtype": "float32",
            "argmax": top[0] if top else None,
            "top": top,
            "gate": report.to_json(),
            "output": None if out is None else str(out),
        }
        if out is not None:
            write_npy(out, np.ascontiguousarray(found, np.float32), force)
    said = {**body, **verdict.to_json()}
    return render.emit(
        said, verdict.exit, lambda: show(body, report.checks, verdict),
        answer=lambda: answer(body, report, verdict),
    )  # fmt: skip


def show(body: LogitsFound, found: "tuple[Check, ...]", verdict: "Pronounced") -> None:
    """Print where it ran, the best tokens of the last row, the gate, and the verdict."""
    render.line(running.headline(body["run"]), style="head")
    if body["output"]:
        shape = render.shape_text(body["shape"])
        render.line(f"{shape} float32 -> {render.escape(body['output'])}")
    running.show_top(body["top"], "top 5 of the last row (the first is the argmax)")
    checks_show.show_checks(found)
    checks_show.show_verdict(verdict)


def answer(body: LogitsFound, report: "Report", verdict: "Pronounced") -> "list[Line]":
    """Return the verdict, what failed in the gate, and the best tokens of the last row."""
    best = ", ".join(
        f"{one['id']} {render.quoted(one.get('piece', ''))} {one['logit']:.4f}"
        for one in body["top"]
    )
    lines = [
        checks_show.verdict_line(verdict),
        *checks_show.failures(report.checks),
        (f"  {running.headline(body['run'])}", ""),
        (f"  top of the last row: {best}", ""),
    ]
    if body["output"]:
        shape = render.shape_text(body["shape"])
        lines.append((f"  {shape} float32 -> {body['output']}", ""))
    return lines
