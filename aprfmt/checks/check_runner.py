"""Runs one row of the table of checks, and makes an answer of its result, error and time.

A *row* of the table of checks is one check or gate: its name, what a PASS proves, its function and
what it needs.
"""

import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from aprfmt.base.budget import TimeOver
from aprfmt.base.outcome import Check, check, verdict
from aprfmt.checks.context import CheckContext
from aprfmt.checks.records import (
    LISTED,
    SHOWN,
    Answer,
    CheckFinding,
    NotRun,
    Result,
    list_names,
    to_check,
)
from aprfmt.checks.table import CHECKS, CheckRow
from aprfmt.errors import AprfmtError, UnsupportedError


def run_check(row: CheckRow, context: CheckContext, *, strict: bool = False) -> Answer:
    """Return the answer of one check on a model; with `strict` its warnings are failures.

    `row` is the check in the table.
    """
    began = time.perf_counter()
    context.running = row.name
    result, why = check_result(row, context)
    return make_answer(row, result, why, time.perf_counter() - began, strict=strict)


def check_result(row: CheckRow, context: CheckContext) -> tuple[Result, str]:
    """Return (the result of a check's function, why it did not run or "" where it did).

    `row` is the check in the table. A gate that raises has failed, and so has a check of another
    package, which also fails with TypeError if it returned anything but a Result. An error that an
    earlier check reported fails no other check: those do not run. A check of `validate` does not
    run on what is not supported. An exception of aprfmt's own checks that is no AprfmtError is
    raised, since it is a bug. TimeOver is raised too where the budget ends.
    """
    if row.formats and context.model.format not in row.formats:
        return Result(), f"a check of {' and '.join(row.formats)} files"
    try:
        with np.errstate(all="ignore"):  # damaged values are findings, no warnings of Python's
            result = row.load()(context)
        if not isinstance(result, Result):
            raise TypeError(f"{row.run} returned {type(result).__name__}; expected a Result")
        return result, ""
    except TimeOver:
        raise
    except NotRun as stop:
        return Result(findings=stop.findings), str(stop)
    except Exception as error:
        if row.of_file and isinstance(error, UnsupportedError):
            return Result(), str(error)
        if isinstance(error, AprfmtError):
            first = context.reported_by(error)
            if first != context.running:
                return Result(), f"it needs what {first} failed for: {error}"
        if row.of_file:
            if isinstance(error, AprfmtError):
                return Result(findings=[error_finding(error)]), ""
            if row.own:
                raise
        return Result(checks=[_failed_check(row, error)]), ""


def repeat_result(
    context: CheckContext, check_name: str, name: str, *, strict: bool = True
) -> Iterator[Check]:
    """Yield the result of a check of `validate` as one Check of a `qa` gate, named `name`.

    `check_name` is the name of the check in `validate`. All its findings are joined in one line.
    Yields nothing if the check is not for the model's format.
    """
    row = next(row for row in CHECKS if row.name == check_name)
    if row.formats and context.model.format not in row.formats:
        return
    result, why = check_result(row, context)
    summary = to_check(name, result, why, strict)
    if why:
        yield summary
        return
    places: dict[tuple[str, str], list[str]] = {}
    for one in result.findings:
        places.setdefault((one.found, one.expected), []).append(one.where)
    said = [
        f"{where[0]}: {found}" if len(where) == 1 else f"{found} {list_names(where)}"
        for (found, _), where in places.items()
    ]
    found = "; ".join([*filter(None, [result.found]), *said[:LISTED]])
    expected = "; ".join(list(dict.fromkeys(each for _, each in places))[:LISTED])
    yield replace(summary, where="", found=found or "none", expected=expected or row.proves)


def make_answer(
    row: CheckRow, result: Result, why: str, seconds: float = 0.0, *, strict: bool = False
) -> Answer:
    """Return the answer that a check's result makes; `why` says why it did not run, or is "".

    `row` is the check in the table, `seconds` the time it took. With `strict` a warning fails.
    """
    checks = tuple(result.checks)
    if row.of_file or result.found or result.findings:
        checks = (*checks, to_check(row.name, result, why, strict))
    outcome = verdict(checks)
    if outcome == "NOT_RUN" and not why:
        why = "; ".join(each.found for each in checks) or "nothing was checked"
    return Answer(
        row.name,
        row.proves,
        outcome,
        seconds,
        checks,
        result.measures,
        result.details,
        why,
        findings=tuple(result.findings[:SHOWN]),
    )


def error_finding(error: AprfmtError) -> CheckFinding:
    """Return an error of the library as a finding; its place is the text before the first colon."""
    where, _, found = str(error).partition(": ")
    return CheckFinding(where, found or str(error), "what the format and its users agree on")


def _failed_check(row: CheckRow, error: Exception) -> Check:
    """Return the failed Check `NAME-finishes` of a row whose function raised `error`."""
    known = isinstance(error, (AprfmtError, OSError))
    found = str(error) if known else f"{type(error).__name__}: {error}"
    todo = "see the message" if known else "run again with --debug, and report it as a bug"
    if not row.own:
        todo = f"see {row.run}, which another package offers"
    return check(f"{row.name}-finishes", False, found, "an answer", todo)
