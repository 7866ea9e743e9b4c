"""Judges a pair of runs: its points, its fused form, and the verdict with a sentence why."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.base.outcome import Check, Report
from aprfmt.inference.device import DeviceChoice
from aprfmt.inference.parity.cells import Operation
from aprfmt.inference.replay.shadow import OperationResiduals
from aprfmt.inference.trace import Trace
from aprfmt.measure.distances import rel_l2
from aprfmt.measure.tolerances import AMPLIFIED, DISCRETE
from aprfmt.measure.traces import PointDiff, TraceDiff
from aprfmt.measure.verdicts import Verdict

Numbers = NDArray[Any]


def check_fused(
    plain: Numbers | None, logits: Numbers, point: PointDiff, amplified: bool, where: str
) -> list[Check]:
    """Return [check of a run's logits without a recorder against the reference's].

    Without a recorder the run uses its fused operations. No check if `plain`, these logits, is
    None. `logits` are the reference's, `point` is their comparison step by step. `amplified`:
    rounding was amplified in the whole runs, which widens the bound. `where` names the run.
    """
    if plain is None:
        return []
    apart = rel_l2(plain, logits[len(logits) - len(plain) :])
    bound = point.tolerance * (AMPLIFIED if amplified else 1.0)
    passed = apart <= bound
    return [
        Check(
            "fused-form",
            "PASS" if passed else "FAIL",
            where,
            f"logits without a recorder at relative L2 {apart:.3g}",
            f"at most {bound:.3g} from the reference step by step",
            ""
            if passed
            else "a fused operation of this run is wrong: step by step it agrees"
            if not point.beyond
            else "see the points",
        )
    ]


def check_points(diff: TraceDiff, amplified: OperationResiduals | None, where: str) -> Check:
    """Return the check that every point is within its tolerance.

    `amplified` are the residuals of the run's operations if all of these are right: points beyond
    their tolerance then pass, as amplified rounding. It is None otherwise. `where` names the run.
    """
    if not diff.compared:
        return Check("points", "NOT_RUN", where, "no point on both sides", "at least one")
    beyond = [point for point in diff.points if point.beyond]
    if not beyond:
        return Check("points", "PASS", where, f"{diff.compared} points within", "all within")
    first = beyond[0]
    if amplified is not None:
        return Check(
            "points",
            "PASS",
            where,
            f"{len(beyond)} of {diff.compared} points beyond what whole runs may differ by, the "
            f"first {first.key} at relative L2 {first.rel_l2:.3g}; {_all_right_text(amplified)}",
            "all within, or every operation right on the run's own inputs",
        )
    odd = _one_sided_nonfinite_text(first)
    return Check(
        "points",
        "FAIL",
        where,
        f"{len(beyond)} of {diff.compared} points beyond, the first {first.key} at relative L2 "
        f"{first.rel_l2:.3g}{odd}",
        f"at most {first.tolerance:.3g} ({first.reason})",
        "write a reproduction with --bundle FILE",
    )


def judge_pair(
    diff: TraceDiff,
    report: Report,
    operations: Sequence[Operation],
    amplified: OperationResiduals | None,
    flipped: bool,
    before: Mapping[str, int],
) -> tuple[Verdict, str]:
    """Return (verdict on a pair of runs, a sentence that says why).

    `diff` compares their points, `report` has the checks, `operations` ran alone on equal inputs;
    `amplified` are the residuals of operations in one pass, None if that was not run. `flipped`:
    tokens went to other experts; `before` has the points that were cut for that.
    """
    if not diff.compared:
        return "not_comparable", "no point has values on both sides"
    # A failed check: name what fails first, the operation rather than the point.
    if report.outcome == "FAIL":
        if spread := _nonfinite_alike_text(diff):
            return "bug", f"finite: {spread}"
        if diff.overflow:
            return "bug", f"{diff.overflow}: run it in bfloat16 or float32"
        wrong = next((operation for operation in operations if operation.wrong), None)
        if wrong is not None:
            odd = _one_sided_nonfinite_text(
                next((point for point in diff.points if point.key == wrong.key), None)
            )
            return "bug", f"the operation that makes {wrong.key} is wrong on equal inputs{odd}"
        first = next((point for point in diff.points if point.beyond), None)
        if first is not None and _one_sided_nonfinite_text(first):
            return "bug", f"{first.key} is not finite{_one_sided_nonfinite_text(first)}"
        if diff.first is not None:
            return "bug", (
                f"{diff.first} is beyond its tolerance; every operation taken alone is within its "
                "own: the difference was there before, or grew on the way"
            )
        failed = next(check for check in report.checks if check.outcome == "FAIL")
        return "bug", f"{failed.name}: {failed.found}"
    # No check failed: equal bits, or rounding of one kind or another.
    if all(point.bits for point in diff.points if not point.why):
        return "same", "every value is equal to the bit"
    if amplified is not None:
        return (
            "precision",
            f"rounding, amplified: {diff.first} is beyond; {_all_right_text(amplified)}",
        )
    if flipped:
        return "precision", f"rounding sent tokens to other experts; {len(before)} points cut"
    return "precision", "rounding, within tolerance at every point"


def check_finite(runs: Sequence[tuple[Trace, DeviceChoice]]) -> list[Check]:
    """Return a failed check for every run with a NaN or an infinity, naming the first point."""
    checks = []
    for trace, choice in runs:
        key = trace.nonfinite
        if not key:
            continue
        values = trace.recorded_values(key)
        at = ""
        if values is not None:
            bad = np.argwhere(~np.isfinite(values))
            at = f": {len(bad)} of {values.size} values, the first at {bad[0].tolist()}"
        checks.append(
            Check(
                "finite",
                "FAIL",
                str(choice),
                f"NaN or infinity first at {key}{at}",
                "finite values",
                "trace that run with --points all",
            )
        )
    return checks


def _nonfinite_alike_text(diff: TraceDiff) -> str:
    """Return where both runs are equally not finite before the first point that differs.

    "" if nowhere. What NaN does to later points depends on the backend, and is no difference to
    look into.
    """
    for point in diff.points:
        if point.beyond:
            return ""
        if point.nonfinite is not None and point.key.rpartition(".")[2] not in DISCRETE:
            return f"{point.key}: {point.nonfinite.text('this run', 'the reference')}"
    return ""


def _one_sided_nonfinite_text(point: PointDiff | None) -> str:
    """Return in words where only one run is not finite at a point, "" where none is."""
    odd = None if point is None else point.nonfinite
    return f"; {odd.text('this run', 'the reference')}" if odd is not None and odd.alone else ""


def _all_right_text(found: OperationResiduals) -> str:
    """Return in words that every operation is right, and how near the worst is to its bound."""
    residual, bound = found.found[found.worst_key]
    return (
        f"each of {len(found.found)} operations gives the reference's value on the run's own "
        f"inputs, {found.worst_key} at {residual:.3g} of {bound:.3g}"
    )
