"""Judges the reference run and another: points, fused operations, the verdict and why."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.base.outcome import Check, Outcome, Report
from aprfmt.inference.device import DeviceChoice
from aprfmt.inference.parity.parity_records import ExpertFlip, Losses, Operation, Outcomes
from aprfmt.inference.trace import Trace
from aprfmt.measure.distances import rel_l2
from aprfmt.measure.tolerances import AMPLIFIED, DISCRETE, MAX_LOGITS, loss_bound
from aprfmt.measure.traces import PointDiff, TraceDiff
from aprfmt.measure.verdicts import Verdict

if TYPE_CHECKING:
    from aprfmt.inference.replay.shadow import OperationResiduals

Numbers = NDArray[Any]


def check_fused(
    plain: Numbers | None, logits: Numbers, point: PointDiff, amplified: bool, where: str
) -> list[Check]:
    """Return [check of a run's logits without a recorder against the reference's].

    Without a recorder the run uses its fused operations. `plain` are its logits so, and there is no
    check if they are None. `logits` are the reference's; `point` compares them with the run's
    logits with a recorder, step by step. `amplified`: rounding was amplified in the whole runs,
    which widens the bound. `where` names the run.
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


def check_points(diff: TraceDiff, amplified: "OperationResiduals | None", where: str) -> Check:
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
    amplified: "OperationResiduals | None",
    flipped: bool,
    before: Mapping[str, int],
) -> tuple[Verdict, str]:
    """Return (verdict on a pair of runs, a sentence that says why).

    `diff` compares their points, `report` has the checks, `operations` ran alone on equal inputs;
    `amplified` are the residuals of operations in one pass, None if that was not run. `flipped`:
    tokens went to other experts; `before` has the points whose later rows were left out for that.
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
    """Return in words where both runs have the same NaN or infinities, "" if nowhere.

    Only points before the first that differs count: what NaN does to later points depends on the
    backend, and is no difference to look into.
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


def _all_right_text(found: "OperationResiduals") -> str:
    """Return in words that every operation is right, and how near the worst is to its bound."""
    residual, bound = found.found[found.worst_key]
    return (
        f"each of {len(found.found)} operations gives the reference's value on the run's own "
        f"inputs, {found.worst_key} at {residual:.3g} of {bound:.3g}"
    )


# A text shorter than this says little about a loss.
MIN_LABELS = 16


@dataclass(frozen=True)
class _Gate:
    """Makes the checks of one run, named by `where`."""

    where: str

    def make_check(
        self, name: str, passed: bool | None, found: str, expected: str, todo: str = ""
    ) -> Check:
        """Return one check; `passed` None: it could not be made, which is NOT_RUN.

        `found` and `expected` are its texts, `todo` is the advice if it failed.
        """
        outcome: Outcome = "NOT_RUN" if passed is None else "PASS" if passed else "FAIL"
        return Check(name, outcome, self.where, found, expected, todo if passed is False else "")


def check_outcomes(
    outcomes: Outcomes | None,
    losses: Losses,
    experts: Sequence[ExpertFlip],
    *,
    quantized: bool,
    text: bool,
    vocab: int,
    where: str,
) -> list[Check]:
    """Return the checks of two runs' predictions: loss always, logits too on quantized weights.

    Expert flips are checked too. `outcomes` compares the predictions of both runs, None if that was
    not possible. `vocab` is the number of tokens. `text` says that the ids are text; `where` names
    the run.
    """
    gate = _Gate(where)
    checks = []
    if experts:
        unexplained = [flip for flip in experts if not flip.explained]
        checks.append(
            gate.make_check(
                "experts",
                not unexplained,
                f"{len(experts)} tokens to other experts, {len(unexplained)} of them with a "
                "margin that rounding cannot close",
                "margins of at most twice the router's difference",
                "compare the router's inputs and its rule",
            )
        )
    if outcomes is None:
        found = "no logits on both sides"
        return [*checks, gate.make_check("logits", None, found, "logits of every row")]
    checks.append(_check_backend_loss(gate, losses))
    if quantized:
        checks += _check_quantized(gate, outcomes, text, vocab)
    return checks


def _check_backend_loss(gate: _Gate, losses: Losses) -> Check:
    """Return the check of a run's loss against the float64 loss of the same logits."""
    if losses.own is None or losses.forward is None or losses.own_off is None:
        return gate.make_check("own-loss", None, losses.why, "a run that computes a loss")
    bound = losses.own_bound or 0.0
    return gate.make_check(
        "own-loss",
        losses.own_off <= bound,
        f"{losses.own - losses.forward:+.3g} nats from the float64 loss, {losses.own_off:.3g} at "
        "the label that is furthest beyond rounding",
        f"at most {bound:.3g} nats there on the same logits",
        "the loss is wrong, not the forward",
    )


def _check_quantized(gate: _Gate, found: Outcomes, text: bool, vocab: int) -> list[Check]:
    """Return the checks of logits and losses on the rows that are comparable.

    `found` has the distance of the logits and both losses. `text` says that the ids are text.
    """
    rows = "over all rows" if found.rows is None else f"over the first {found.rows} rows"
    most = max(MAX_LOGITS, found.tolerance)
    checks = [
        gate.make_check(
            "quantized-logits", None if found.rel_l2 is None else found.rel_l2 <= most,
            f"no row before the flip of an expert ({found.rows})" if found.rel_l2 is None
            else f"relative L2 {found.rel_l2:.3g}",
            f"at most {most:g} {rows}", "find the first point that is off",
        )
    ]  # fmt: skip
    if found.reference is None or found.forward is None:
        return [*checks, gate.make_check("quantized-loss", None, "no label to score", "two tokens")]
    difference = found.forward - found.reference
    bound = loss_bound(found.tolerance, found.size)
    checks.append(
        gate.make_check(
            "quantized-loss",
            abs(difference) <= bound,
            f"{difference:+.4g} nats",
            f"at most {bound:.3g} nats apart {rows}: logits of size {found.size:.3g} within "
            f"{found.tolerance:.3g}",
            "find the first point that is off",
        )
    )
    return [*checks, _check_bounded(gate, found, text, vocab, bound)]


def _check_bounded(gate: _Gate, found: Outcomes, text: bool, vocab: int, bound: float) -> Check:
    """Return the check that a run is not worse than guessing where the reference is not.

    NOT_RUN for a short text or ids that are no text, or where the reference is worse than guessing
    too. `bound` is how far the two losses may be apart.
    """
    name, limit = "quantized-loss-bounded", math.log(vocab)
    assert found.forward is not None and found.reference is not None
    expected = f"below ln({vocab}) = {limit:.4f} nats"
    if not text or found.labels < MIN_LABELS:
        why = "ids that are not known to be text" if not text else f"{found.labels} labels"
        return gate.make_check(name, None, why, f"a text of at least {MIN_LABELS} labels")
    if found.forward >= limit and found.forward - found.reference <= bound:
        why = f"{found.forward:.4f} nats, the reference's {found.reference:.4f}"
        return gate.make_check(name, None, why, f"{expected}, for the reference at least")
    return gate.make_check(
        name,
        found.forward < limit,
        f"{found.forward:.4f} nats",
        expected,
        "the run does worse than guessing, and the reference does not",
    )
