"""Runs the gates of `qa` on a model, to find out whether a file can be trusted.

    report = run("model.gguf")
    report.exit_code, report.gate("loss").outcome

Every gate answers PASS, FAIL or NOT_RUN. A NOT_RUN is never a pass. The gates are the rows of
aprfmt.checks.table that need more than a file.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from aprfmt.base.budget import Budget
from aprfmt.base.sequences import listed
from aprfmt.checks.check_runner import make_answer, run_check
from aprfmt.checks.gates.baseline_file import write_baseline
from aprfmt.checks.gates.model_under_test import ModelUnderTest, QaRequest, RequestOptions
from aprfmt.checks.records import LEFT_OUT, Answer, QaReport, Result
from aprfmt.checks.table import BASELINE, CONTRACT, CheckRow, gates
from aprfmt.errors import UsageError
from aprfmt.remote.paths import parse_location

__all__ = ["QaReport", "gates", "run", "save_baseline"]


class QaOptions(RequestOptions, total=False):
    """The keyword arguments of `aprfmt.qa`: which gates run, and on what."""

    only: Collection[str]
    skip: Collection[str]
    min_run: int


GateProgress = Callable[[str, int, int], None]  # the gate that begins, gates done, gates in all


def run(
    model: Path | str,
    *,
    only: Collection[str] = (),
    skip: Collection[str] = (),
    min_run: int = 0,
    progress: GateProgress | None = None,
    **options: Unpack[RequestOptions],
) -> QaReport:
    """Return the answers of all gates on a model.

    `only` and `skip` are names of gates; the others are in the report as NOT_RUN. In addition to
    `only`, the gate whose own input is given (`also`, `against`, `baseline`) is run too. With fewer
    than `min_run` answers the report fails. `options` are the fields of
    aprfmt.checks.gates.model_under_test.QaRequest: arch, choice (where to run), also, against,
    golden, baseline, random_weights, threads, memory, deterministic, strict (warnings fail, too),
    accept (`unread:PATTERN`s of items that no gate fails for), budget (gates that do not begin in
    its time are NOT_RUN, and the verdict is open). Raises UsageError for a name that is no gate, or
    for a gate left out whose input is given; BackendUnavailableError for a device that is not
    there; and what opening the model raises: FormatError, ArchError.
    """
    only, skip = listed(only), listed(skip)
    rows = gates()
    names = [row.name for row in rows]
    for name in (*only, *skip):
        if name not in names:
            raise UsageError(f"gate {name!r} is not known; known: {', '.join(names)}")
    request = QaRequest(parse_location(model), **options)
    asked = _required_gates(request, only, skip)
    budget = request.budget or Budget()
    backend = request.choice.open(  # a device that is not there is an error, no verdict
        deterministic=request.deterministic, threads=request.threads
    )
    with ModelUnderTest.open(request) as subject:
        chosen = (asked if only else set(names)) - set(skip)
        tensors = subject.model.source.tensors.values()
        nbytes = sum(tensor.info.nbytes for tensor in tensors)  # of which a pass reads all
        for at, row in enumerate(rows):
            if progress is not None:
                progress(row.name, at, len(rows))
            wanted = row.name in chosen
            late = wanted and not (
                budget.has_time()
                and budget.has_room(nbytes * (row.needs in ("session", "baseline")))
            )
            found = make_answer(row, Result(), budget.reason)
            if not late:
                with budget.in_force() as reading:
                    found = _run_gate(row, subject, wanted)
                late = reading.over
            wanted = wanted and (late or row.name in asked)
            subject.done.append(replace(found, asked=wanted))
        return QaReport(
            subject.where,
            tuple(subject.done),
            request.choice,
            min_run,
            dict(backend.facts()),
            subject.ledger,
            request.accept,
        )


def _run_gate(row: CheckRow, subject: ModelUnderTest, wanted: bool) -> Answer:
    """Return a gate's answer; NOT_RUN if it is not `wanted`, or the tensor contract failed.

    `row` is the gate in the table.
    """
    if not wanted:
        return make_answer(row, Result(), LEFT_OUT)
    if row.needs == "session" and subject.outcome_of(CONTRACT) == "FAIL":
        return make_answer(row, Result(), f"{CONTRACT} failed")
    return run_check(row, subject, strict=subject.request.strict)


def save_baseline(report: QaReport, path: Path | str, *, force: bool = False) -> None:
    """Write a report as a baseline file; OutputError where it exists, unless `force`."""
    write_baseline(report, Path(path), force=force)


# Option -> the gate that it is the input of.
_INPUTS = {"also": "device-parity", "against": "format-parity", "baseline": BASELINE}


def _required_gates(request: QaRequest, only: Collection[str], skip: Collection[str]) -> set[str]:
    """Return the gates that the user named or gave the input of, which must not stay NOT_RUN.

    Raises UsageError where one of them is skipped all the same.
    """
    asked = set(only)
    if request.golden and not only:  # with --only its texts serve whichever gates were named
        asked.add("golden-output")
    for option, name in _INPUTS.items():
        if not getattr(request, option):
            continue
        if name in skip:
            raise UsageError(
                f"--skip {name} leaves out the gate that --{option} is for; leave out one of them"
            )
        asked.add(name)
    return asked
