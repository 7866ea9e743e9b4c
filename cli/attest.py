"""`aprfmt attest`: whether a quantized model is what its base gives, byte for byte."""

import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from aprfmt.base.budget import Budget
from aprfmt.cli import options, render
from aprfmt.compare.short_answer import Line, short_answer
from aprfmt.errors import UsageError

if TYPE_CHECKING:
    from aprfmt.attestation import Attestation

_TENSOR_STYLES = {"not reproduced": "bad", "not tried": "warn", "not reached": "warn"}


@click.command("attest")
@options.model("quantized")
@click.option(
    "--from",
    "base",
    type=options.PathOrAddress(),
    metavar="BASE",
    required=True,
    help="The model that it is said to be made of.",
)
@click.option(
    "--type",
    "scheme",
    metavar="T",
    help="The type it was quantized as, where nothing in the file says it.",
)
@click.option(
    "--imatrix",
    type=options.NamedPath(),
    metavar="FILE",
    help="The importance matrix that was used.",
)
@options.drop
@click.option(
    "-o",
    "--output",
    type=options.FILE,
    metavar="FILE",
    help="Write what was found as an in-toto statement (JSON).",
)
@click.option(
    "--check",
    type=options.NamedPath(),
    metavar="STATEMENT",
    help="Compare the result with the statement of an earlier run.",
)
@options.accept()
@options.budget
@options.verbose("Every tensor with what became of it.")
@options.arch
@options.force
@options.common
def command(
    quantized: Path,
    base: Path,
    scheme: str | None,
    imatrix: Path | None,
    drop: tuple[str, ...],
    output: Path | None,
    check: Path | None,
    accept: tuple[str, ...],
    budget: Budget | None,
    verbose: bool,
    arch: str | None,
    force: bool,
) -> int:
    """Make every tensor of QUANTIZED again from BASE, and compare the stored bytes.

    The encodings are the file's own. Its record and its tensors say how they were made. Exit 0:
    every tensor was reproduced, and hyperparameters and tokenizer are the base's; 1: one was not,
    or STATEMENT says otherwise; 2: none differs, but one could not be tried.
    """
    from aprfmt.attestation import attest
    from aprfmt.attestation.statement import read_statement, write_statement

    if budget is not None and (output is not None or check is not None):
        raise UsageError("a statement is of the whole model; leave --budget out")
    options.check_new(force, output)
    statement = None if check is None else read_statement(check)
    with render.ProgressLine("attest") as progress:
        found = attest(
            quantized,
            base,
            scheme=scheme,
            imatrix=imatrix,
            drop=drop,
            arch=arch,
            check=statement,
            checked=None if check is None else str(check),
            budget=budget,
            progress=progress,
        )
    found = replace(found, accept=accept)
    if output is not None:
        write_statement(found.statement, output, force=force)
    body = {**found.to_json(), "statement": None if output is None else str(output)}
    return render.emit(body, found.exit_code, lambda: show(found, output, verbose))


def show(found: "Attestation", written: Path | None, verbose: bool) -> None:
    """Print the verdict, the tensors that were not reproduced, and the statement's path.

    `verbose` prints every tensor. `written` is the path of the statement, None where none was
    written. `found` is the attestation.
    """
    verdict = found.pronounced
    headline = verdict.says, render.EXIT_STYLES[verdict.exit]
    lines = list(_difference_lines(found, verbose))
    if found.remark:
        lines.insert(0, (f"  remark: {found.remark}", "warn"))
    if written is not None:
        lines.append((f"  statement written to {written}", ""))
    commands = []
    if verdict.exit:
        commands = [f"aprfmt diagnose {shlex.quote(found.base)} {shlex.quote(found.model)}"]
    if verbose:
        shown = [headline, *lines, *((f"next: {text}", "head") for text in commands)]
    else:
        shown = short_answer(headline, (), first_said=True, others=lines, commands=commands)
    render.say_lines(shown)


def _difference_lines(found: "Attestation", show_all: bool) -> "Iterator[Line]":
    """Yield a (text, style) line for each tensor, differing field and fault of the statement.

    Reproduced tensors are left out unless `show_all`. `found` is the attestation.
    """
    for row in found.tensors:
        if row.state == "reproduced" and not show_all:
            continue
        name = row.tensor or ", ".join(row.names)
        role = f" ({row.key})" if row.key != name else ""
        text = f"  {row.state}: {name}{role}, {row.encoding}: {row.why or row.how}"
        yield text, _TENSOR_STYLES.get(row.state, "")
    for one in found.fields:
        sides = render.sides_text(one.name, one.a, one.b)
        yield f"  differs: {one.name}: {sides}", "bad"
    for text in found.faults:
        yield f"  {found.checked}: {text}", "bad"
