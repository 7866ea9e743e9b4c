"""Gates that compare one model with itself: in other formats, and on other devices."""

from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.base.outcome import Check, check, not_run
from aprfmt.checks.check_runner import repeat_result
from aprfmt.checks.gates.forward import float_bits
from aprfmt.checks.gates.model_under_test import ModelUnderTest
from aprfmt.checks.records import Measure, NotRun, Result, list_names
from aprfmt.checks.table import ACCOUNTED
from aprfmt.compare import DiffReport, diff_models
from aprfmt.errors import ArchError, BackendUnavailableError, ConversionError, UnsupportedError
from aprfmt.formats import writable_formats
from aprfmt.inference.device import DeviceChoice, choose_device
from aprfmt.inference.loss import compare_distributions, cross_entropy
from aprfmt.inference.session import Session
from aprfmt.inference.trace import KeptValues
from aprfmt.measure import tolerances
from aprfmt.measure.distances import rel_l2
from aprfmt.measure.nonfinite import count_nonfinite
from aprfmt.measure.records import EQUAL
from aprfmt.measure.traces import compare_traces
from aprfmt.model import Model
from aprfmt.tensors import norms

Numbers = NDArray[Any]
TOP = 5  # tokens whose order two devices must share, near ties aside
# Standard deviations that rounding may move one logit: of a million normal numbers one is beyond 5.
LARGEST_DEVIATION = 6.0
TODO = "aprfmt parity and aprfmt diagnose name the operation"
_CLOSE = (*EQUAL, "WITHIN")
FINITE = "aprfmt trace names the first point that is not finite"


# --- formats ----------------------------------------------------------------------------------


def check_format_parity(subject: ModelUnderTest) -> Result:
    """Return a Result whose checks pass if copies in other formats give equal bits.

    Compared are tensors, capture points and logits. The copy of `--against` is compared too; it may
    be in a coarser encoding.
    """
    checks: list[Check] = []
    mine = _PassResult.of(subject, subject.model)
    for name in writable_formats(own=True):
        if name == subject.model.format:
            continue
        try:
            copy = subject.copy(name)
        except (ArchError, ConversionError, UnsupportedError) as error:
            checks.append(not_run(f"{name}-converts", str(error)))  # the format cannot hold it
            continue
        checks += _check_copy(subject, mine, copy, name)
    if subject.other is not None:
        subject.source = subject.other
        checks += repeat_result(
            subject, ACCOUNTED, "against-accounted", strict=subject.request.strict
        )
        checks += _check_against(subject, mine, subject.other)
    return Result(checks=checks)


class _PassResult:
    """Hashes of all capture points of a pass over the probe, and its logits [tokens, vocab]."""

    @classmethod
    def of(cls, subject: ModelUnderTest, model: Model) -> "_PassResult":
        """Return the result of a pass over the probe, in a new session of the model."""
        with subject.open_session(model) as session:
            return cls(session, subject.probe)

    def __init__(self, session: Session, ids: list[int]) -> None:
        """Run the token ids through a session: once for the points' hashes, once for all logits."""
        trace = session.trace(
            ids, tuple(session.points), hashes=True, stop=False, logits_rows="all"
        )
        self.hashes = {key: record.sha256 for key, record in trace.records.items()}
        self.logits: Numbers = session.logits(ids)


def _check_copy(
    subject: ModelUnderTest, mine: _PassResult, copy: Model, name: str
) -> Iterator[Check]:
    """Yield the checks that a converted copy has equal tensors, facts, points and logits.

    `mine` is the pass of the model under test, `name` the copy's format.
    """
    report = diff_models(subject.model, copy, explain=False)
    yield _check_tensors(
        report,
        f"{name}-bytes",
        EQUAL,
        "SAME_BYTES or SAME_VALUES for every tensor",
        "aprfmt diff names the tensors and the first byte",
    )
    yield _check_facts(report, name)
    theirs = _PassResult.of(subject, copy)
    yield from _check_passes(mine, theirs, name)


def _check_tensors(
    report: DiffReport, name: str, fine: Collection[str], expected: str, todo: str
) -> Check:
    """Return the check `name`, that every tensor's verdict in `report` is one of `fine`.

    Verdicts on other items than tensors do not count. `expected` and `todo` are texts of the check.
    """
    wrong = [t.key for t in report.worst() if t.verdict not in fine]
    said = ", ".join(f"{count} {verdict}" for verdict, count in report.counts.items() if count)
    return check(
        name,
        not wrong and bool(report.tensors) and not report.damage,
        said + (f": {list_names(wrong)}" if wrong else ""),
        expected,
        todo,
    )


def _check_facts(report: DiffReport, name: str) -> Check:
    """Return the Check that hyperparameters and token ids of both models are equal.

    `name` begins the check's name.
    """
    rows = [row for row in (*report.hyperparameters, *report.tokenizer) if row.decisive]
    found = [f"{row.name} {row.a!r} | {row.b!r}" for row in rows]
    return check(
        f"{name}-facts",
        not found,
        list_names(found) if found else "equal",
        "equal hyperparameters and token ids",
        "aprfmt diff --only hyperparameters",
    )


def _check_passes(mine: _PassResult, theirs: _PassResult, name: str) -> Iterator[Check]:
    """Yield the checks that two passes have equal bits at every point, and equal logits.

    `mine` is the pass of the model under test, `theirs` the copy's. `name` begins the names of the
    checks.
    """
    wrong = [key for key, digest in mine.hashes.items() if theirs.hashes.get(key) != digest]
    yield check(
        f"{name}-points",
        not wrong and mine.hashes.keys() == theirs.hashes.keys(),
        f"{len(mine.hashes) - len(wrong)} of {len(mine.hashes)} points equal"
        + (f", the first other one {wrong[0]}" if wrong else ""),
        "equal bits at every capture point",
        "aprfmt diagnose names the cause",
    )
    same = mine.logits.shape == theirs.logits.shape and bool(
        np.array_equal(float_bits(mine.logits), float_bits(theirs.logits))
    )
    yield check(
        f"{name}-logits",
        same,
        "equal bits" if same else "other logits",
        "equal logits for every token",
        "see the first point that differs",
    )


def _check_against(subject: ModelUnderTest, mine: _PassResult, other: Model) -> Iterator[Check]:
    """Yield the checks that the copy of --against is equal, or the same in a coarser encoding.

    `mine` is the pass of the model under test.
    """
    report = diff_models(subject.model, other, explain=False)
    yield _check_facts(report, "against")
    yield _check_tensors(
        report,
        "against-tensors",
        _CLOSE,
        "every tensor equal, or within rounding of the coarser encoding",
        f"aprfmt diff {subject.where} {other.path}",
    )
    theirs = _PassResult.of(subject, other)
    same = all(t.verdict in EQUAL for t in report.tensors)
    if same and not any(row.decisive for row in report.hyperparameters):
        yield from _check_passes(mine, theirs, "against")
    elif mine.logits.shape == theirs.logits.shape:
        yield _check_coarser_loss(mine.logits, theirs.logits, subject.probe[1:])


def _check_coarser_loss(mine: Numbers, theirs: Numbers, labels: list[int]) -> Check:
    """Return the check that a coarser encoding costs no more loss than it may.

    The difference is no rounding of a run, so no tolerance of runs applies. `labels` are the tokens
    after each row. `mine` and `theirs` are logits [tokens, vocab] of the model under test and of
    the copy.
    """
    expected = f"at most {tolerances.MAX_CE_LOSSY} nats apart"
    odd = count_nonfinite(mine, theirs)
    if odd is not None:
        return check(
            "against-loss",
            False,
            f"logits: {odd.text('this model', 'the other')}",
            f"finite logits, {expected}",
            FINITE,
        )
    far = compare_distributions(theirs[:-1], mine[:-1], labels)
    change = _mean_loss(mine, labels) - _mean_loss(theirs, labels)
    return check(
        "against-loss",
        abs(change) <= tolerances.MAX_CE_LOSSY,
        f"{change:+.4f} nats, KL {far.kl:.4g}, top token equal in {far.top1:.0%}",
        expected,
        "aprfmt diagnose names the cause",
    )


def _mean_loss(logits: Numbers, labels: list[int]) -> float:
    """Return the mean cross entropy in nats of logits [tokens, vocab] without the last row.

    `labels` are the tokens after each row.
    """
    return float(np.mean(cross_entropy(logits[:-1], labels)))


# --- devices ----------------------------------------------------------------------------------


def check_device_parity(subject: ModelUnderTest) -> Result:
    """Return a Result whose checks compare points, logits and loss on every device asked for.

    `measures` has the distance of logits for each device. Raises NotRun where there is only one
    device.
    """
    request = subject.request
    others = list(request.also)
    reference = choose_device()  # numpy on the CPU, float32
    if (request.choice.backend, request.choice.device) != (reference.backend, reference.device):
        others.insert(0, reference)
    if not others:
        raise NotRun("one device only; name another: --also torch, --also cuda")
    checks: list[Check] = []
    measures: dict[str, Measure] = {}
    for choice in others:
        try:
            session = subject.open_session(subject.model, choice)
        except BackendUnavailableError as error:
            checks.append(not_run(f"{choice}-runs", str(error)))
            continue
        with session:
            found, measures[f"relL2 {choice}"] = _compare_devices(subject, session, choice)
        checks += found
    return Result(checks=checks, measures=measures)


def _compare_devices(
    subject: ModelUnderTest, other: Session, choice: DeviceChoice
) -> tuple[list[Check], Measure]:
    """Return (checks of one device against the model's session, relative L2 of their logits).

    `other` is a session on the device `choice`.
    """
    ids = subject.probe
    mine, theirs = subject.session, other
    a, b = mine.logits(ids).astype(np.float64), theirs.logits(ids).astype(np.float64)
    moe = bool(subject.model.hyper["n_experts"])
    bound = tolerances.run_tolerance(mine.backend.dtype, theirs.backend.dtype, moe=moe)
    checks, distance = _check_logits_close(a, b, ids[1:], bound, str(choice))
    first = _first_differing_point(mine, theirs, ids, moe, str(choice))
    checks.append(
        check(
            f"{choice}-points",
            first is None,
            f"first beyond its bound: {first or 'none'}",
            "every capture point inside its bound",
            TODO,
        )
    )
    unit = "relative L2 of all logits"
    return checks, Measure(distance, unit, bound.rel_l2, "absolute", bound.reason)


def _check_logits_close(
    a: Numbers, b: Numbers, labels: list[int], bound: tolerances.Tolerance, other: str
) -> tuple[list[Check], float]:
    """Return (checks of logits `a` against the reference `b`, their relative L2).

    A NaN or infinity fails, even where both have it, and the other checks are NOT_RUN, for it has
    no distance and no loss. `labels` are the tokens after each row, `bound` is the tolerance,
    `other` names the reference.
    """
    within = f"at most {bound.rel_l2:g} ({bound.reason})"
    odd = count_nonfinite(a, b)
    if odd is not None:
        found = f"logits: {odd.text('this run', other)}"
        why = "logits that are not finite"
        return [
            check(f"{other}-logits", False, found, f"finite logits, relL2 {within}", FINITE),
            *(not_run(f"{other}-{name}", why) for name in ("cosine", "top", "loss")),
        ], float("inf")
    norm, distance = norms.exact_norm(b), rel_l2(a, b)
    cosine = float(np.sum(a * b) / (norms.exact_norm(a) * norm)) if norm and a.any() else 0.0
    # What the allowed distance makes of it.
    straight = min(tolerances.MIN_COSINE, 1 - bound.rel_l2**2 / 2)
    flipped = _flipped_rows(a, b, bound.rel_l2)
    change = _mean_loss(a, labels) - _mean_loss(b, labels)
    size = norm / float(np.sqrt(b.size))
    most = tolerances.device_loss_bound(bound.rel_l2, size)
    return [
        check(f"{other}-logits", distance <= bound.rel_l2, f"relL2 {distance:.3g}", within, TODO),
        check(
            f"{other}-cosine", cosine >= straight, f"{cosine:.9f}", f"at least {straight:.6g}", TODO
        ),
        check(
            f"{other}-top",
            not flipped,
            list_names([f"position {i}" for i in flipped]),
            f"the same {TOP} likeliest tokens, ties by rounding aside",
            TODO,
        ),
        check(
            f"{other}-loss",
            abs(change) <= most,
            f"{change:+.3g} nats",
            f"at most {most:.3g} nats apart: logits of size {size:.3g} within {bound.rel_l2:g}",
            TODO,
        ),
    ], distance


def _flipped_rows(a: Numbers, b: Numbers, rel_l2: float) -> list[int]:
    """Return the indices of rows in which the likeliest tokens of `a` are not among those of `b`.

    `a` and `b` are logits [tokens, vocab], `rel_l2` is their tolerance. Logits of `b` count as
    equal where rounding within the tolerance can exchange them: each may be off by
    LARGEST_DEVIATION times `rel_l2` of the row's root mean square.
    """
    rows = []
    for at, (x, y) in enumerate(zip(a, b, strict=True)):
        slack = 2 * LARGEST_DEVIATION * rel_l2 * float(np.sqrt(np.mean(np.square(y))))
        edge = np.sort(y)[-min(TOP, len(y))]
        best_x = np.argsort(-x, kind="stable")[:TOP]
        if float(np.min(y[best_x])) < edge - slack or float(y[best_x[0]]) < float(y.max()) - slack:
            rows.append(at)
    return rows


def _first_differing_point(
    mine: Session, theirs: Session, ids: list[int], moe: bool, other: str
) -> str | None:
    """Return the first capture point beyond its tolerance, in words; None where there is none.

    Of values that are finite in one of the two only, index, count and values are said too. `mine`
    and `theirs` are sessions, `other` names the second; `moe` says that the model has experts.
    """
    traces = []
    for session in (mine, theirs):
        kept = KeptValues()
        traces.append(
            session.trace(
                ids,
                tuple(session.points),
                keep=kept.keep,
                fetch=kept.fetch,
                stop=False,
                logits_rows="all",
            )
        )
    found = compare_traces(traces[0], traces[1], moe=moe)
    odd = next((row.nonfinite for row in found.points if row.key == found.first), None)
    if odd is None or not odd.alone:
        return found.first
    return f"{found.first}, {odd.text('this run', other)}"
