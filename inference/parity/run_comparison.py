"""Run one model several times and compare every run with the first, point by point."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.base.budget import Budget, BudgetSpent, end_where_time_is_over
from aprfmt.base.outcome import Report
from aprfmt.errors import UsageError
from aprfmt.inference.capture import POINTS, parse_key
from aprfmt.inference.device import DeviceChoice
from aprfmt.inference.parity.outcomes import (
    compare_experts,
    compare_logits,
    make_outcomes,
    mean_label_loss,
    measure_backend_loss,
)
from aprfmt.inference.parity.parity_records import (
    ExpertFlip,
    Losses,
    Parity,
    RunDistance,
    RunFacts,
    RunPair,
)
from aprfmt.inference.parity.request import ParityRequest
from aprfmt.inference.parity.verdict import (
    check_finite,
    check_fused,
    check_outcomes,
    check_points,
    judge_pair,
)
from aprfmt.inference.running import open_run
from aprfmt.inference.trace import Trace
from aprfmt.measure.distances import rel_l2
from aprfmt.measure.tolerances import CalibratedBound, weights_class_of
from aprfmt.measure.traces import TraceDiff, common_keys, compare_traces
from aprfmt.model import Model
from aprfmt.model.ledger import LATE, OF_A_PASS, NotCompared, make_ledger

if TYPE_CHECKING:
    from aprfmt.inference.parity.cell import OperationCell
    from aprfmt.inference.parity.parity_records import Operation
    from aprfmt.inference.replay.shadow import OperationResiduals

Numbers = NDArray[Any]
PLAIN_ROWS = 64
ARBITER = DeviceChoice("arbiter", "numpy", "cpu", "float64", "float64 arbiter")


@np.errstate(all="ignore")  # what is not finite is named with its place, not warned of
def compare_choices(
    model: Model, choices: Sequence[DeviceChoice], request: ParityRequest, base: Model | None = None
) -> Parity:
    """Return the comparison of all runs of `model` with the first, one run for each choice.

    `base` is the model before quantization: the reference runs it too, for the distance that
    quantization alone makes. Raises UsageError for fewer than two runs, BackendUnavailableError
    for one that cannot be run here, BudgetSpent where the bytes of the budget suffice for none.
    """
    if len(choices) < 2:
        raise UsageError(f"{len(choices)} run to compare; give at least two: --between cpu torch")
    with ExitStack() as stack:
        budget = request.budget or Budget()
        every = choices
        ran: list[RunResult] = []
        nbytes = sum(tensor.info.nbytes for tensor in model.source.tensors.values())
        for choice in every:
            if not budget.has_room(nbytes):
                if not ran:
                    raise BudgetSpent(
                        f"{model.path}: a run reads {nbytes} bytes: {budget.reason}; nothing is "
                        "compared"
                    )
                break
            one = _run_in_time(stack, budget, model, choice, request)
            if one is None:
                break
            ran.append(one)
        choices = every[: len(ran)]
        late = [NotCompared("run", str(each), LATE, budget.reason) for each in every[len(ran) :]]
        traces = [each.trace for each in ran]
        runs = [
            _run_facts(choice, trace, request)
            for choice, trace in zip(choices, traces, strict=True)
        ]
        pairs = [
            _compare_pair(model, choices, ran, index, request) for index in range(1, len(choices))
        ]
        # How far quantization alone moves the reference.
        noise = None
        finer, whose = base, "" if base is None else f"{base.path}, before quantization"
        if request.through is not None:
            finer, whose = model, f"the weights before {request.through}"
        if finer is not None:
            plain = replace(request, through=None)
            before = _run_in_time(stack, budget, finer, every[0], plain)
            if before is None or not ran:
                late.append(NotCompared("run", whose, LATE, budget.reason))
            else:
                noise = measure_run_distance(0, whose, traces[0], before.trace, request)
        # How far each run is from a float64 run.
        arbiter: list[RunDistance] = []
        exact = None
        if request.arbiter:
            exact = _run_in_time(stack, budget, model, ARBITER, request)
            if exact is None:
                late.append(NotCompared("run", str(ARBITER), LATE, budget.reason))
        if exact is not None:
            arbiter = [
                measure_run_distance(i, "numpy:cpu:float64", trace, exact.trace, request)
                for i, trace in enumerate(traces)
            ]
        encodings = Counter(tensor.encoding for tensor in model.roles.values())
        return Parity(
            str(model.path),
            model.spec.name,
            model.format,
            request.ids,
            request.text,
            weights_class_of(model),
            dict(encodings),
            request.through,
            tuple(runs),
            tuple(pairs),
            noise,
            tuple(arbiter),
            request.calibrated_by,
            int(model.hyper["vocab_size"]),
            (*late, *make_ledger(model, OF_A_PASS).not_compared),
        )


def _run_in_time(
    stack: ExitStack, budget: Budget, model: Model, choice: DeviceChoice, request: ParityRequest
) -> "RunResult | None":
    """Return a run that `stack` closes; None where the budget's time is over before its end."""
    with budget.in_force():
        end_where_time_is_over()
        return stack.enter_context(run_once(model, choice, request))
    return None


@dataclass(frozen=True)
class RunResult:
    """A run's trace, and the logits of its last PLAIN_ROWS rows without a recorder.

    While a trace is recorded every operation runs step by step; users run fused operations. `plain`
    is None for an engine, whose recorded pass is the one that users run.
    """

    trace: Trace
    plain: Numbers | None


def fused_rows(tokens: int) -> range:
    """Return the last PLAIN_ROWS rows, whose logits are computed without a recorder too."""
    return range(max(0, tokens - PLAIN_ROWS), tokens)


@contextmanager
def run_once(model: Model, choice: DeviceChoice, request: ParityRequest) -> Iterator[RunResult]:
    """Yield the trace of one run of the request's ids, and logits computed without recording.

    The trace has logits of every row. The others are of `fused_rows`, None for an engine.
    """
    asked = request.with_choice(choice)
    with open_run(asked, model) as run, run.trace(facts={"through": request.through}) as trace:
        rows = list(fused_rows(len(request.ids)))
        plain = None if run.own is None else run.own.prefill(request.ids, rows)
        yield RunResult(trace, plain)


def _run_facts(choice: DeviceChoice, trace: Trace, request: ParityRequest) -> RunFacts:
    """Return what a report says about a run: what ran, where, on which weights.

    `choice` is what the run was asked to be, `trace` its trace.
    """
    backend: Any = trace.run.get("backend")
    unknown: Any = trace.run.get("unknown")
    via: Any = trace.run.get("via")
    return RunFacts(
        choice.requested,
        str(choice),
        choice.why,
        dict(backend or {}),
        "as stored" if request.through is None else f"through {request.through} and back",
        len(trace.records),
        trace.nonfinite,
        via,
        unknown,
    )


def _compare_pair(
    model: Model,
    choices: Sequence[DeviceChoice],
    ran: Sequence[RunResult],
    index: int,
    request: ParityRequest,
) -> RunPair:
    """Return the comparison of run number `index` of `ran` with the first.

    `choices` are the runs' backends and devices, in the order of `ran`.
    """
    # All points, and whether a difference is only amplified rounding.
    a, b = ran[0].trace, ran[index].trace
    flips = compare_experts(a, b)
    moe = bool(model.hyper["n_experts"])
    diff, before = compare_runs(a, b, flips, request.calibrated, moe, request.by_position)
    x, y = a.recorded_values("logits"), b.recorded_values("logits")
    point = next((p for p in diff.points if p.key == "logits"), None)
    amplified = _judge_amplified(model, choices[0], a, b, diff, request)
    if amplified is not None and point is not None and point.rel_l2 is not None:
        point = replace(point, tolerance=max(point.tolerance, point.rel_l2), beyond=False)
    within = point is not None and not point.beyond and not point.why
    # The logits, what they predict, and the loss in the run's own arithmetic.
    logits, judged, losses = None, None, Losses(None, None, None, "no logits on both sides")
    if x is not None and y is not None and x.shape == y.shape and point is not None:
        logits = compare_logits(x, y, request.ids, within)
        judged = make_outcomes(x, y, request.ids, point, before.get("logits"))
        backend = None if choices[index].is_engine else choices[index].open()
        found = measure_backend_loss(backend, y, request.ids)
        losses = Losses(logits.ce_a, logits.ce_b, found.nats, found.why, found.off, found.bound)
    # Single operations on equal inputs, then the checks and the verdict.
    operations: Sequence[Operation] = ()
    cell: OperationCell | None = None
    beyond = [each for each in diff.points if each.beyond and "qkv" not in each.key]
    # A value that the type cannot hold is no fault of the operation.
    if beyond and not choices[0].is_engine and not diff.overflow:
        from aprfmt.inference.parity.operations import run_single_operations

        sides = choices[0], choices[index]
        amplifies = amplified is not None
        operations, cell = run_single_operations(model, *sides, a, b, beyond, request, amplifies)
    checks = [check_points(diff, amplified, str(choices[index]))]
    if x is not None and point is not None and not flips:
        for each in (0, index) if index == 1 else (index,):
            checks += check_fused(
                ran[each].plain, x, point, amplified is not None, str(choices[each])
            )
    checks += check_outcomes(
        judged,
        losses,
        flips,
        quantized=request.through is not None or weights_class_of(model) == "quantized",
        text=request.text is not None,
        vocab=int(model.hyper["vocab_size"]),
        where=str(choices[index]),
    )
    checks += check_finite(((a, choices[0]), (b, choices[index])))
    report = Report(f"{choices[index]} against {choices[0]}", tuple(checks))
    verdict, cause = judge_pair(diff, report, operations, amplified, bool(flips), before)
    recorded = (
        b.recorded_values(cell.key) if cell is not None and choices[index].is_engine else None
    )
    if recorded is not None and cell is not None and cell.rows:
        recorded = recorded[..., list(cell.rows)]
    return RunPair(
        0,
        index,
        diff,
        logits,
        tuple(flips),
        losses,
        tuple(operations),
        report,
        verdict,
        cause,
        cell,
        recorded,
        before,
    )


def _judge_amplified(
    model: Model, first: DeviceChoice, a: Trace, b: Trace, diff: TraceDiff, request: ParityRequest
) -> "OperationResiduals | None":
    """Return the residuals of `b`'s operations if all are right though points differ.

    Then the difference is rounding that later operations amplified. `first` is the backend of the
    reference `a`, on which the operations run. None if no point is beyond tolerance, an operation
    is wrong, a NaN is in one run only, or the reference is an engine.
    """
    broken = any(p.nonfinite is not None and p.nonfinite.alone for p in diff.points)
    if diff.first is None or first.is_engine or broken:
        return None
    from aprfmt.inference.parity.operations import judge_operations

    reference = request.with_choice(first).open_backend()
    found = judge_operations(model, reference, a, b, request)
    return found if found.all_right else None


def compare_runs(
    a: Trace,
    b: Trace,
    flips: Sequence[ExpertFlip],
    calibrated: Sequence[CalibratedBound],
    moe: bool,
    positions: bool = False,
) -> tuple[TraceDiff, dict[str, int]]:
    """Return (comparison of `b` with the reference `a`, {key: position its rows end before}).

    Rows after an explained expert flip are left out. A token that rounding sent to other experts is
    another computation from there on, and so is every token that attends to it: only earlier
    positions are compared after that layer. The dict has the keys whose rows end earlier so. `moe`
    says whether the model has experts, `calibrated` are bounds in place of the table's. With
    `positions` each position is compared too.
    """
    limits: dict[int, int] = {}
    for flip in flips:
        layer = parse_key(flip.key)[1]
        if flip.explained:
            limits[layer] = min(limits.get(layer, flip.position), flip.position)
    limited = {key: _comparable_rows(key, limits) for key in common_keys(b, a)}
    before = {key: limit for key, limit in limited.items() if limit is not None}
    found = compare_traces(b, a, moe=moe, calibrated=calibrated, before=before, positions=positions)
    return found, before


def _comparable_rows(key: str, limits: Mapping[int, int]) -> int | None:
    """Return the position before which rows of a key are comparable, None for all rows.

    `limits` are the first positions with other experts, by layer.
    """
    name = key.rpartition(".")[2]
    if not limits or name.startswith("embd"):
        return None
    order = list(POINTS)
    if "." not in key:
        return min(limits.values())
    layer = int(key.partition(".")[0][1:])
    at = order.index(name) if name in order else order.index("q")
    earlier = [
        limit
        for other, limit in limits.items()
        if other < layer or (other == layer and at >= order.index("experts"))
    ]
    return min(earlier, default=None)


def measure_run_distance(
    number: int, what: str, run: Trace, exact: Trace, request: ParityRequest
) -> RunDistance:
    """Return the relative L2 distance of `run` from `exact` at each point, and of the losses.

    `number` is the run's number, `what` a description of the two runs. The loss is that of the
    request's ids.
    """
    found: dict[str, float] = {}
    for key in common_keys(run, exact):
        x, y = run.recorded_values(key), exact.recorded_values(key)
        if x is not None and y is not None and x.size == y.size:
            found[key] = rel_l2(x, y)
    x, y = run.recorded_values("logits"), exact.recorded_values("logits")
    ce = None
    if x is not None and y is not None:
        mine, other = mean_label_loss(x, request.ids), mean_label_loss(y, request.ids)
        ce = None if mine is None or other is None else mine - other
    return RunDistance(number, what, found, ce)
