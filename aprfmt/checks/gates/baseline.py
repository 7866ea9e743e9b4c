"""The gate that compares a model's gates and numbers with those of a baseline file."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from aprfmt.base.outcome import Check, check, not_run
from aprfmt.checks.gates.model_under_test import ModelUnderTest
from aprfmt.checks.records import LEFT_OUT, Answer, NotRun, Result
from aprfmt.inference.loss import is_in_bits


def check_baseline(subject: ModelUnderTest) -> Result:
    """Return a Result whose checks fail for each gate or number worse than in the baseline.

    Raises NotRun where no baseline was given.
    """
    if subject.baseline is None:
        raise NotRun("no baseline was given; make one with --save-baseline FILE")
    return Result(checks=list(compare_baseline(subject.baseline, subject.done)))


def compare_baseline(before: Mapping[str, Any], now: Iterable[Answer]) -> Iterable[Check]:
    """Yield a check for each gate of a baseline, and for each number of the gates that ran.

    A gate that passed before and is missing, or no longer passes, is a FAIL. A gate that was not
    asked for this time is NOT_RUN. `before` is {gate: its outcome and measures}. `now` are the
    answers of this run.
    """
    results = {gate.name: gate for gate in now}
    for name, old in before.items():
        gate = results.get(name)
        if gate is not None and gate.why == LEFT_OUT:
            yield not_run(f"{name}-outcome", LEFT_OUT)
            continue
        outcome = "absent" if gate is None else gate.outcome
        worse = old.get("outcome") == "PASS" and outcome != "PASS"
        yield check(
            f"{name}-outcome",
            not worse,
            outcome,
            f"{old.get('outcome')} as before",
            "see the gate above",
        )
        if gate is None or gate.outcome == "NOT_RUN":
            continue
        for key, row in old["measures"].items():
            yield _check_measure(key, row, gate)


def _check_measure(key: str, row: Mapping[str, Any], gate: Answer) -> Check:
    """Return a Check that passes if a number is within its tolerance of the baseline's.

    `row` is the baseline's record of the number, `gate` the answer that may have it now. `key` is
    the name of the number.
    """
    measure = gate.measures.get(key)
    unit, old = row.get("unit", ""), row["value"]
    if old is None or measure is None:
        same = old is None and (measure is None or not math.isfinite(measure.value))
        found = "absent" if measure is None else f"{measure.value:.6g} {unit}"
        return check(key, same, found, f"{old} {unit}", "the model or the golden file changed")
    if unit and unit != measure.unit:
        return check(
            key,
            False,
            f"{measure.value:.6g} {measure.unit}",
            f"{old:.6g} {unit}",
            f"state it in {measure.unit}",
        )
    allowed = row["tolerance"] * (abs(old) if row["kind"] == "relative" else 1)
    within = abs(measure.value - old) <= allowed
    todo = "the model got another one: aprfmt diff OLD NEW"
    if not within and measure.unit.startswith("nats") and is_in_bits(old, measure.value):
        todo = (
            f"{old:.6g} is {old / measure.value:.4f} times the measured nats: a loss in bits; "
            "state it in nats"
        )
    return check(
        key,
        within,
        f"{measure.value:.6g} {unit}",
        f"{old:.6g} {unit}, off by at most {allowed:.3g}: {row.get('reason', '')}",
        todo,
    )
