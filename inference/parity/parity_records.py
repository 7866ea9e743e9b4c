"""Records of what parity finds: runs, pairs, flips, losses, operations; and their JSON.

A *run* is the model on one backend or engine. A *pair* is the reference run and one other run. A
*cell* is one operation cut out of the model with its inputs and weights.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from aprfmt.base.outcome import Check, Report
from aprfmt.measure.traces import TraceDiff
from aprfmt.measure.verdicts import Verdict
from aprfmt.model.ledger import NotCompared
from aprfmt.model.verdict import Compared, Pronounced, VerdictWords, pronounce

if TYPE_CHECKING:
    from aprfmt.inference.parity.cell import OperationCell


@dataclass(frozen=True)
class RunFacts:
    """One run: what was asked for, what ran, and on which weights.

    `weights` says how the weights came to the run: as stored, or through an encoding and back.
    `nonfinite` is the first point with a NaN or an infinity. `unknown` are names of a foreign
    engine that are no point of ours, with the reason.
    """

    requested: str
    ran: str
    why: str
    backend: Mapping[str, Any]
    weights: str
    points: int
    nonfinite: str | None
    via: str | None = None
    unknown: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Flip:
    """A token whose argmax differs: by how much each run preferred its own, in logits.

    `largest` is the largest difference of a logit in that row; `explained` says that the logits are
    within their tolerance, so that rounding may turn a margin this small. `a` and `b` are the ids
    of the two argmax tokens, `margin_a` and `margin_b` the margins of each run.
    """

    position: int
    a: int
    b: int
    margin_a: float
    margin_b: float
    largest: float
    explained: bool


@dataclass(frozen=True)
class LogitsDiff:
    """The reference's logits `a` and another run's `b` over the same rows.

    `argmax` is the fraction of rows whose best token agrees, `top_k` that of the k best tokens;
    `kl_*` the divergence of b from a in nats; `ce_*` the mean loss of the next ids in nats, None
    for a single token. `rel_l2` is the relative L2 distance of all logits, `max_abs` the largest
    difference of one, `flips` are the rows whose argmax differs.
    """

    rows: int
    rel_l2: float
    max_abs: float
    argmax: float
    k: int
    top_k: float
    flips: tuple[Flip, ...]
    kl_mean: float
    kl_max: float
    ce_a: float | None
    ce_b: float | None

    @property
    def ce_difference(self) -> float | None:
        """The loss of b minus that of a in nats, None for a single token."""
        return None if self.ce_a is None or self.ce_b is None else self.ce_b - self.ce_a


@dataclass(frozen=True)
class ExpertFlip:
    """A token that went to other experts.

    `gap` is by how much the reference's router preferred the expert it lost (logits), `largest` the
    largest difference of a router logit there; a gap that two such differences can close is
    `explained` by rounding. `key` is the point of the router, `gone` and `came` are the numbers of
    the experts that only the reference or only the other run chose.
    """

    key: str
    position: int
    gone: tuple[int, ...]
    came: tuple[int, ...]
    gap: float | None
    largest: float | None
    explained: bool


@dataclass(frozen=True)
class Losses:
    """A pair's losses in nats, computed in three ways: they show what a difference comes from.

    `reference`: logits of the reference, loss in float64. `forward`: logits of the other run, loss
    in float64. `own`: logits of the other run and its loss in its own arithmetic, None with `why`.
    `own_off` is how far that is off at the label furthest beyond rounding, `own_bound` what
    rounding may do.
    """

    reference: float | None
    forward: float | None
    own: float | None
    why: str = ""
    own_off: float | None = None
    own_bound: float | None = None


@dataclass(frozen=True)
class Outcomes:
    """What the outer gates judge: the logits of the rows that are comparable, and their losses.

    `rows` is how many rows there are before the first token that rounding sent to other experts,
    None for all. `rel_l2` and `tolerance` are the logits', `size` the root mean square of the
    reference's. The losses are of `labels` labels, in nats; None where there is no row or label.
    """

    rows: int | None
    rel_l2: float | None
    tolerance: float
    size: float
    reference: float | None
    forward: float | None
    labels: int


@dataclass(frozen=True)
class Operation:
    """The operation that makes a point, alone, on equal inputs in both runs.

    `residual` is the relative L2 distance of its two results, `bound` what rounding may do;
    `input_rel_l2` is how far the inputs were apart in the whole runs and `gain` output over input.
    `shadow`: the other run is an engine, so its own inputs went through the reference's operation.
    """

    key: str
    residual: float
    bound: float
    wrong: bool
    inputs: tuple[str, ...]
    weights: tuple[str, ...]
    input_rel_l2: float | None
    output_rel_l2: float
    gain: float | None
    shadow: bool


@dataclass(frozen=True)
class RunPair:
    """One run compared with the reference.

    `first` is the first point beyond its tolerance, `operations` what was found by running single
    operations of such points on equal inputs, `first_operation` the first that is wrong by itself.
    `cell` reproduces it, and is no part of the JSON. `a` and `b` are the numbers of the two runs.
    """

    a: int
    b: int
    diff: TraceDiff
    logits: LogitsDiff | None
    experts: tuple[ExpertFlip, ...]
    losses: Losses
    operations: tuple[Operation, ...]
    report: Report
    verdict: Verdict
    cause: str
    cell: "OperationCell | None" = None
    recorded: Any = None  # an engine's own values of the cell's point
    compared_before: Mapping[str, int] | None = None

    @property
    def first(self) -> str | None:
        """The key of the first point beyond its tolerance, None if all are within."""
        return self.diff.first

    @property
    def first_operation(self) -> Operation | None:
        """The first operation that is wrong on equal inputs, None if none is."""
        return next((operation for operation in self.operations if operation.wrong), None)

    def to_json(self) -> dict[str, Any]:
        """Return the pair as plain data for JSON."""
        found = self.first_operation
        return {
            "a": self.a,
            "b": self.b,
            "verdict": self.verdict,
            "cause": self.cause,
            **self.diff.to_json(),
            "logits": None
            if self.logits is None
            else asdict(self.logits) | {"ce_difference": self.logits.ce_difference},
            "experts": [asdict(flip) for flip in self.experts],
            "losses": asdict(self.losses) | {"unit": "nats"},
            "operations": [asdict(operation) for operation in self.operations],
            "first_operation": None if found is None else asdict(found),
            "compared_before": dict(self.compared_before or {}),
            "gate": self.report.to_json(),
        }


@dataclass(frozen=True)
class RunDistance:
    """How far one run is from another, by point, without a verdict: the float64 arbiter."""

    of: int
    what: str
    rel_l2: Mapping[str, float]
    ce: float | None


@dataclass(frozen=True)
class Parity:
    """All runs of one model, each compared with the first."""

    model: str
    architecture: str
    format: str
    ids: tuple[int, ...]
    text: str | None
    weights_class: str
    encodings: Mapping[str, int]
    through: str | None
    runs: tuple[RunFacts, ...]
    pairs: tuple[RunPair, ...]
    noise: RunDistance | None
    arbiter: tuple[RunDistance, ...]
    calibrated: str | None
    vocab: int
    left: tuple[NotCompared, ...] = ()  # of the model: what nothing reads
    accept: tuple[str, ...] = ()  # unread:PATTERN of those that the user accepts

    @property
    def conclusion(self) -> Pronounced:
        """The verdict over the points compared, and what of the model was not compared."""
        return self.conclude_pairs(self.verdict, self.pairs)

    def conclude_pairs(self, verdict: Verdict, pairs: Sequence[RunPair]) -> Pronounced:
        """Return the verdict as it is announced: word, headline, exit code, what was left out.

        `verdict` is that of `pairs`. The first pair with this verdict gives the cause.
        """
        agrees = verdict in ("same", "precision")
        words = VerdictWords(verdict if agrees else "same", "bug", "not_comparable")
        cause = next((pair.cause for pair in pairs if pair.verdict == verdict), "")
        compared = sum(pair.diff.compared for pair in pairs)
        counts = {"points": (compared, compared)}
        scope = f": {cause}" if cause else ""
        compared_points = Compared(verdict == "bug", counts, self.left, scope=scope)
        return pronounce(words, compared_points, self.accept)

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of the pairs: same, precision, not_comparable, then bug."""
        order: tuple[Verdict, ...] = ("same", "precision", "not_comparable", "bug")
        return max((pair.verdict for pair in self.pairs), key=order.index, default="not_comparable")

    @property
    def exit_code(self) -> int:
        """0 for same or precision, 1 for a point beyond tolerance, 2 if nothing was compared."""
        return self.conclusion.exit

    @property
    def checks(self) -> tuple[Check, ...]:
        """The checks of all pairs, in order."""
        return tuple(check for pair in self.pairs for check in pair.report.checks)

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as plain data for JSON."""
        return {
            "verdict": self.verdict,
            **self.conclusion.to_json(),
            "model": self.model,
            "architecture": self.architecture,
            "format": self.format,
            "tokens": {"ids": list(self.ids), "text": self.text},
            "weights": {
                "class": self.weights_class,
                "encodings": dict(self.encodings),
                "through": self.through,
            },
            "runs": [asdict(run) for run in self.runs],
            "pairs": [pair.to_json() for pair in self.pairs],
            "noise": None if self.noise is None else asdict(self.noise),
            "arbiter": [asdict(distance) for distance in self.arbiter],
            "calibrated": self.calibrated,
            "vocab_size": self.vocab,
        }
