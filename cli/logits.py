"""`aprfmt logits`: the logits of every token, as a file, and the gate a working model passes."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import click

from aprfmt.base.outcome import Check, Report
from aprfmt.cli import check_output, options, render, run_options
from aprfmt.errors import UsageError

if TYPE_CHECKING:
    from aprfmt.compare.short_answer import Line
    from aprfmt.model.verdict import Pronounced


class LogitsResult(TypedDict):
    """What `aprfmt logits` says; `top` of the last row."""

    run: run_options.RunLocation
    tokens: dict[str, object]
    shape: list[int]
    dtype: str
    argmax: "run_options.TopToken | None"
    top: "list[run_options.TopToken]"
    gate: dict[str, object]
    output: str | None


@click.command("logits")
@options.gather_options(tokens=run_options.TokenOptions, where=run_options.WhereOptions)
@click.argument("model", type=options.MODEL_RUN)
@run_options.what
@click.option("--out", type=options.NamedPath(), help="Write float32 [tokens, vocab] .npy.")
@click.option(
    "--reference",
    type=options.NamedPath(),
    metavar="ANSWER",
    help="Compare log-probabilities with a server's answer (JSON of vLLM, SGLang, "
    "OpenAI-compatible) or a saved trace: a table by position.",
)
@click.option(
    "--load",
    "loaded",
    type=options.NamedPath(),
    metavar="ANSWER",
    help="With --reference: take this answer or trace, do not run MODEL.",
)
@click.option(
    "--answer-dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    help="Arithmetic that the answers were computed in, which they do not say.",
)
@click.option(
    "--exact",
    is_flag=True,
    help="With --reference: exit 1 if any bit differs, as when a batch changes a row.",
)
@options.accept()
@run_options.where
@options.arch
@options.force
@options.common
def command(
    model: str,
    out: Path | None,
    reference: Path | None,
    loaded: Path | None,
    answer_dtype: str | None,
    exact: bool,
    accept: tuple[str, ...],
    force: bool,
    tokens: run_options.TokenOptions,
    where: run_options.WhereOptions,
) -> int:
    """Compute the logits of every token, and judge the last row.

    --out FILE.npy writes them all, float32 [tokens, vocab]. Exit 1 if the last row has a NaN, an
    infinity, no spread or no peak.

    With --reference the log-probabilities are compared by token and position. Exit 1 if they differ
    by more than rounding, and the first position is named. Exit 2 if rounding in bfloat16 explains
    the difference, rounding in float32 does not, and the answer does not say its arithmetic.
    """
    if reference is not None:
        from aprfmt.cli import logprobs

        return logprobs.compare_logprob_sides(
            model, reference, loaded, tokens, where, out, answer_dtype, accept, exact
        )
    if exact:
        raise UsageError("--exact goes with --reference, which names what has to be equal")
    if answer_dtype is not None:
        raise UsageError("--answer-dtype goes with --reference, whose arithmetic it states")
    if loaded is not None:
        raise UsageError("--load goes with --reference, which names what it is compared with")
    import numpy as np

    from aprfmt.checks.records import pronounce_report
    from aprfmt.formats.npy import write_npy
    from aprfmt.inference.logits_checks import check_last_row

    options.check_new(force, out)
    # Judge the last row, as a working model's is spread and peaked.
    with run_options.open_session(model, where) as run:
        opened = run.model
        ids, text = run_options.token_ids(opened, tokens)
        run_options.warn_of_length(opened, ids)
        found = run.session.logits(ids)
        top = run_options.top_tokens(found[-1], opened)
        report = Report(str(opened.path), tuple(check_last_row(found)))
        verdict = pronounce_report(report, opened, accept=accept)
        body: LogitsResult = {
            "run": run_options.run_facts(run),
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
        said,
        verdict.exit,
        lambda: show(body, report.checks, verdict),
        answer=lambda: answer(body, ids, report, verdict),
    )


def show(body: LogitsResult, found: "tuple[Check, ...]", verdict: "Pronounced") -> None:
    """Print the run, the top tokens of the last row, the checks `found`, and the verdict.

    `body` is the JSON of `logits`.
    """
    render.line(run_options.run_headline(body["run"]), style="head")
    if body["output"]:
        shape = render.shape_text(body["shape"])
        render.line(f"{shape} float32 -> {render.escape(body['output'])}")
    run_options.show_top(body["top"], "top 5 of the last row (the first is the argmax)")
    check_output.show_checks(found)
    check_output.show_verdict(verdict)
    command = check_output.account_command(verdict, body["run"]["model"])
    if command:
        render.say(f"next: {command}", style="head")


def answer(
    body: LogitsResult, ids: Sequence[int], report: "Report", verdict: "Pronounced"
) -> "list[Line]":
    """Return the short answer as (text, style) lines: verdict, failed checks, top tokens, next.

    `body` is the JSON of `logits`, `ids` are the tokens, which the next command traces where a
    check failed.
    """
    best = ", ".join(
        f"{one['id']} {render.quote_token(one.get('piece', ''))} {one['logit']:.4f}"
        for one in body["top"]
    )
    lines = [
        check_output.verdict_line(verdict),
        *check_output.failure_lines(report.checks),
        (f"  {run_options.run_headline(body['run'])}", ""),
        (f"  top of the last row: {best}", ""),
    ]
    if body["output"]:
        shape = render.shape_text(body["shape"])
        lines.append((f"  {shape} float32 -> {body['output']}", ""))
    command = check_output.account_command(verdict, report.subject)
    if command:
        lines.append((f"next: {command}", "head"))
    if verdict.exit == 1:
        told = ",".join(map(str, ids))
        traced = f"aprfmt trace {shlex.quote(report.subject)} --payload --ids {told}"
        lines.append((f"next: {traced}", "head"))
    return lines
