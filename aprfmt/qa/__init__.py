"""The gates together, to find out whether a file can be trusted.

    report = aprfmt.qa.run("model.gguf")
    report.exit_code, report.gate("loss").outcome

Every gate answers PASS, FAIL or NOT_RUN. A NOT_RUN is never a pass.
"""

import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aprfmt.base.outcome import Check, Report
from aprfmt.errors import UsageError
from aprfmt.qa.gates import GATES, NAMES, GateSpec
from aprfmt.qa.records import (
    LEFT_OUT,
    Findings,
    GateResult,
    Measure,
    NotRunError,
    QaReport,
    check,
)

if TYPE_CHECKING:
    from aprfmt.qa.subject import Request, Subject

__all__ = ["GATES", "GateResult", "GateSpec", "Measure", "QaReport", "run", "save_baseline"]

Progress = Callable[[str, int, int], None]  # the gate that begins, gates done, gates in all


def run(
    model: "Path | str",
    *,
    only: Collection[str] = (),
    skip: Collection[str] = (),
    min_run: int = 0,
    progress: Progress | None = None,
    **options: Any,
) -> QaReport:
    """Put a model through the gates.

    `only` and `skip` are names of GATES; what is left out is in the report as NOT_RUN. Beside
    `only`, the gate whose own input is given (`also`, `against`, `baseline`) is asked too. With
    fewer than `min_run` answers the report fails. `options` are the fields of
    aprfmt.qa.subject.Request: arch, choice (where to run), also, against, golden, baseline,
    random_weights, threads, memory, deterministic. Raises UsageError for a name that is no gate,
    or for a gate left out whose input is given; BackendUnavailableError for a device that is not
    there; and what opening the model raises: FormatError, ArchError.
    """
    from aprfmt.qa.subject import Request, Subject

    for name in (*only, *skip):
        if name not in NAMES:
            raise UsageError(f"gate {name!r} is not known; known: {', '.join(NAMES)}")
    request = Request(Path(model), **options)
    asked = _asked(request, only, skip)
    backend = request.choice.open(  # a device that is not there is an error, no verdict
        deterministic=request.deterministic, threads=request.threads
    )
    with Subject.open(request) as subject:
        chosen = (asked if only else set(NAMES)) - set(skip)
        for at, spec in enumerate(GATES):
            if progress is not None:
                progress(spec.name, at, len(GATES))
            result = _run(spec, subject) if spec.name in chosen else _left_out(spec, LEFT_OUT)
            subject.done.append(replace(result, asked=spec.name in asked and spec.name in chosen))
        return QaReport(
            subject.where, request.choice, tuple(subject.done), min_run, dict(backend.facts())
        )


def save_baseline(report: QaReport, path: "Path | str", *, force: bool = False) -> None:
    """Write what a report found as a baseline file; OutputError where it exists."""
    from aprfmt.qa.baseline import save

    save(report, Path(path), force=force)


# Option -> the gate that it is the input of.
_INPUTS = {"also": "device-parity", "against": "format-parity", "baseline": "baseline"}


def _asked(request: "Request", only: Collection[str], skip: Collection[str]) -> set[str]:
    """Return the gates the user named, or gave the input of: they may not go missing silently.

    Raises UsageError where one of them is left out all the same.
    """
    asked = set(only)
    if request.golden and not only:  # beside --only its texts serve whichever gates were named
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


def _left_out(spec: GateSpec, why: str, seconds: float = 0.0) -> GateResult:
    return GateResult(spec.name, spec.requirements, spec.proves, "NOT_RUN", seconds, why=why)


def _run(spec: GateSpec, subject: "Subject") -> GateResult:
    """Ask one gate; an error inside it is a FAIL, never a skip."""
    lost = [name for name in spec.needs if subject.outcome_of(name) == "FAIL"]
    if lost:
        return _left_out(spec, f"{lost[0]} failed")
    began = time.perf_counter()
    try:
        findings = spec.load()(subject)
    except NotRunError as reason:
        return _left_out(spec, str(reason), time.perf_counter() - began)
    except Exception as error:
        findings = Findings([_error(spec, error)])
    checks = tuple(findings.checks)
    outcome = Report(spec.name, checks).outcome
    return GateResult(
        spec.name, spec.requirements, spec.proves, outcome, time.perf_counter() - began,
        checks, findings.measures, findings.details,
        _reason(checks) if outcome == "NOT_RUN" else "",
    )  # fmt: skip


def _error(spec: GateSpec, error: Exception) -> Check:
    from aprfmt.errors import AprfmtError

    known = isinstance(error, (AprfmtError, OSError))
    found = str(error) if known else f"{type(error).__name__}: {error}"
    todo = "see the message" if known else "run again with --debug, and report it as a bug"
    return check(f"{spec.name}-finishes", False, found, "an answer", todo)


def _reason(checks: tuple[Check, ...]) -> str:
    return "; ".join(each.found for each in checks) or "nothing was checked"
