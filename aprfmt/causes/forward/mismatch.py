"""The first capture point that differs, what the reference computed there, and trial changes.

The *view* of a point is its value in the reference next to the trace's. A *change* is a hypothesis
applied to the reference.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.causes import find_cause
from aprfmt.causes.row import LAST
from aprfmt.errors import AprfmtError
from aprfmt.inference.replay.patched_model import MOVES, OperationCall, PatchedModel
from aprfmt.inference.replay.recorded_trace import NO_VALUES, RecordedTrace
from aprfmt.inference.replay.shadow import (
    ShadowPass,
    ShadowPoint,
    run_shadow_pass,
    run_shadow_point,
)
from aprfmt.measure.distances import rel_l2
from aprfmt.measure.log_softmax import shift_logits_onto
from aprfmt.measure.short_numbers import short_numbers
from aprfmt.measure.tolerances import BASE
from aprfmt.measure.verdicts import Certainty

Array = NDArray[Any]
Layers = frozenset[int] | None  # None: all
Patch = Callable[[PatchedModel, Layers], PatchedModel]
EXACT = BASE["float32"].rel_l2 / 10  # what rounding alone leaves of a number that is right
ROUNDER = 1.1  # a shorter number may fit this much worse than the best one
PATIENCE = 8  # steps after which a number must have halved the distance


@dataclass(frozen=True)
class Change:
    """A hypothesis with its values filled in: a change with which the reference may give the trace.

    `make(patched, layers)` applies it in these layers (None: all; ignored unless `scoped`). `where`
    are tensor keys, hyperparameters or operations; scoped ones get a layer as prefix. `drop` are
    keys of the trace that, by the hypothesis, were taken at another point or on other rows.
    `general` marks a change that fits any value of its kind (frequencies solved one by one): it is
    an answer only if no other change fits. `of_values` marks a change that says what came out and
    not what an operation did: a change of an operation that explains as much is the answer.
    `earlier`: what it does reads values of earlier layers. `most` is how sure it can make a cause:
    less where values that were taken at another point follow from no relation, or only some of
    them do. `gives` is the point's value by the change, where the trace's own is dropped and no
    pass has it.
    """

    cause: str
    says: str
    where: tuple[str, ...]
    make: Patch = lambda patched, layers: patched
    values: Mapping[str, Any] = field(default_factory=dict)
    scoped: bool = True
    drop: frozenset[str] = frozenset()
    general: bool = False
    of_values: bool = False
    earlier: bool = False
    most: Certainty = "confirmed"
    gives: Array | None = None

    @property
    def is_of_recording(self) -> bool:
        """Whether it says that right values were recorded elsewhere, and not computed otherwise."""
        row = find_cause(self.cause)
        return row is not None and row.level == "capture"


# Hyperparameters that no single layer reads.
OF_THE_PASS = (
    "embedding_scale", "logit_scale", "final_softcap", "position_offset", "pooling",
)  # fmt: skip


def hyper_change(cause: str, says: str, **values: Any) -> Change:
    """Return the change of model hyperparameters to `values`; `says` is the sentence about it.

    It can be applied to single layers, unless a value is one of the whole pass or a list by
    layer.
    """
    whole = any(name in OF_THE_PASS or name.endswith("_layers") for name in values)
    return Change(
        cause, says, tuple(values), lambda patched, layers: patched.with_hyper(layers, **values),
        values, scoped=not whole,
    )  # fmt: skip


@dataclass(frozen=True)
class Mismatch:
    """The first point that the reference, on the trace's own input, does not reproduce.

    `plain` are the reference's own values by key, `found` the pass that showed the divergence.
    `fitting`: numbers may be improved until they fit, which takes many passes and fits most things.
    `first_row`: changes are judged by the point's first row alone, that of the first token.
    """

    patched: PatchedModel
    recorded: RecordedTrace
    view: ShadowPoint
    found: ShadowPass
    plain: Mapping[str, Array]
    fitting: bool = True
    first_row: bool = False

    # --- what the reference did -------------------------------------------------------------

    def call(self, *ops: str) -> OperationCall | None:
        """Return the last call of an operation in `ops` since the trace's last recorded point.

        None without such a call.
        """
        for call in reversed(self.view.calls):
            if call.op in ops:
                return call
        return None

    def calls(self, *ops: str) -> list[OperationCall]:
        """Return the calls of operations in `ops` since the trace's last recorded point.

        They are in the order of execution.
        """
        return [call for call in self.view.calls if call.op in ops]

    def gives_point_value(self, call: OperationCall | None) -> bool:
        """Return whether an operation call's result is itself the value of the differing point."""
        return call is not None and self.recorded_result(call) is not None

    def recorded_result(self, call: OperationCall) -> Array | None:
        """Return the recorded value of a call's result, in the result's shape, or None.

        The result must be the whole point, or the last elements of its last axis (MLA's rotated
        elements).
        """
        result, mine = self.array(call.result), self.view.mine
        if result.size == mine.size and np.array_equal(result.reshape(mine.shape), mine):
            return self.view.theirs.reshape(result.shape)
        width = result.shape[-1]
        if result.shape[:-1] == mine.shape[:-1] and width < mine.shape[-1]:
            if np.array_equal(mine[..., -width:], result):
                return self.view.theirs[..., -width:]
        return None

    def array(self, x: Any) -> Array:
        """Return an array of the backend, which may be on a device, as a numpy array."""
        return np.asarray(self.patched.backend.to_numpy(x))

    @cached_property
    def rows(self) -> Array:
        """Numbers of the point's rows that the trace has, int array."""
        seen = self.view.recorded
        assert seen is not None
        return np.arange(self.view.mine.shape[self.view.axis]) if seen.rows is None else seen.rows

    @cached_property
    def recorded_rows(self) -> tuple[Array, Array]:
        """(The reference's values, the trace's values) of the point, only rows that the trace has.

        In all other rows the view has the reference's own values in place of the trace's.
        """
        view = self.view
        return np.take(view.mine, self.rows, view.axis), np.take(view.theirs, self.rows, view.axis)

    @cached_property
    def tokens(self) -> int:
        """Number of tokens of the pass."""
        return len(self.patched.ids)

    @property
    def layer(self) -> int:
        """Layer of the divergence; -1 for a point outside the layers."""
        return self.view.layer

    def distance_from_trace(self, other: Array) -> float:
        """Return the relative L2 distance of `other`, a value for the point, from the trace's."""
        return self.view.distance(other.reshape(self.view.mine.shape))

    def agree(self, mine: Array, theirs: Array) -> bool:
        """Return whether the relative L2 distance of two arrays is within the point's tolerance."""
        return rel_l2(mine, theirs) <= self.view.tolerance

    def distances_by_row(self, view: ShadowPoint) -> Array:
        """Return each row's relative L2 distance of a computed point from the trace, [tokens]."""
        axis, own, other = view.axis, view.mine, view.theirs
        if view.recorded is not None and view.recorded.normalized:
            own = shift_logits_onto(own, other)
        mine, theirs = (np.moveaxis(x, axis, 0) for x in (own, other))
        mine, theirs = mine.reshape(len(mine), -1), theirs.reshape(len(theirs), -1)
        norm = np.maximum(np.linalg.norm(theirs, axis=1), 1e-30)
        out: Array = np.linalg.norm(mine - theirs, axis=1) / norm
        return out

    def judged_by_first_row(self) -> "Mismatch | None":
        """Return the same mismatch with changes judged by the first row alone.

        Neither masks nor rotations act on the first token, so its row tells other changes from
        them. None where the trace lacks rows, or the first one agrees.
        """
        if len(self.rows) != self.tokens:
            return None
        residual = float(self.distances_by_row(self.view)[0])
        if not residual > self.view.tolerance:
            return None
        return replace(self, view=replace(self.view, residual=residual), first_row=True)

    # --- trying -----------------------------------------------------------------------------

    def without(self, drop: Iterable[str]) -> RecordedTrace:
        """Return the recorded trace as if it lacked the points with the keys `drop`."""
        chosen = self.recorded.without | set(drop)
        if chosen == self.recorded.without:
            return self.recorded
        return self.recorded.ignoring(chosen)

    def attempt(self, change: Change, layers: Layers = None) -> ShadowPoint | None:
        """Return the differing point computed with a change; None if it cannot be applied.

        `layers` are those that the change is applied in; None for all.
        """
        return self.attempt_all([(change, layers)])

    def attempt_all(self, changes: Sequence[tuple[Change, Layers]]) -> ShadowPoint | None:
        """Return the differing point computed with several changes; None if they cannot be applied.

        Each item is (change, layers it is applied in; None: all). Products of earlier layers are
        skipped where the trace has the stream that enters this layer and no change affects
        earlier layers.
        """
        patched, key = self.patched, self.view.key
        for change, layers in changes:
            patched = change.make(patched, layers)
        recorded = self.without([key for change, _ in changes for key in change.drop])
        here = computed_layer(self)
        entering = recorded.value_of(f"L{here - 1}.out") if here > 0 else None
        skips = not any(change.earlier for change, _ in changes)
        if skips and entering is not None and entering.rows is None:
            patched = _skip_earlier_products(patched, here)
        instance = patched.points.get(key)
        # If its operation is left out, a point equals the point before it.
        before_it = "" if instance is None else instance.alias_of
        try:
            if not before_it and not self.view.base:
                seen = run_shadow_point(patched, recorded, key)
                return None if seen is None else replace(seen, tolerance=self.view.tolerance)
            found = run_shadow_pass(patched, recorded, self.view.base if before_it else key).views
        except (AprfmtError, ValueError):  # the model lacks what the change reads, or other shapes
            return None
        return found.get(key) or found.get(before_it)

    def trial(self, change: Change) -> float:
        """Return the differing point's relative L2 distance from the trace under a change.

        Infinite if the change cannot be applied.
        """
        view = self.attempt(change)
        if view is not None and view.residual is None and view.note == NO_VALUES:
            return 0.0  # the change gives the zeros that the trace has and the model had not
        if view is None or view.residual is None or math.isnan(view.residual):
            return math.inf
        return float(self.distances_by_row(view)[0]) if self.first_row else view.residual

    def best_number(
        self, make: Callable[[float], Change], values: Iterable[float]
    ) -> Iterator[Change]:
        """Yield changes with the number that brings the point nearest to the trace.

        `make` gives the change for a number; each of `values` is tried. Numbers with few digits
        come first. Where numbers are fitted, the best is improved between its neighbours by
        golden section, in logarithms. Nothing is yielded unless the residual falls to half.
        """
        # Try the given numbers.
        tried = sorted({float(value) for value in values})
        scores = {value: self.trial(make(value)) for value in tried}
        if not scores:
            return
        best = min(scores, key=lambda value: scores[value])
        assert self.view.residual is not None
        if scores[best] <= self.view.tolerance:  # a known number, which needs no rounding
            yield make(best)
            return
        # Improve the best one between its neighbours.
        if self.fitting and best > 0:
            at = tried.index(best)
            low = tried[at - 1] if at and tried[at - 1] > 0 else best / 4
            high = tried[at + 1] if at + 1 < len(tried) else best * 4
            best, scores[best] = self._golden_section(make, low, high, best, scores[best])
        if scores.get(best, math.inf) > 0.5 * self.view.residual:
            return
        yield from self.rounded_change(make, best)

    def _golden_section(
        self, make: Callable[[float], Change], low: float, high: float, best: float, score: float
    ) -> tuple[float, float]:
        """Return (number, its residual) of the best number from `low` to `high`, by golden section.

        `best` and `score` are the best number so far and its residual. The search is in
        logarithms. It ends early where it does not halve the residual.
        """
        ratio = (math.sqrt(5) - 1) / 2
        assert self.view.residual is not None
        # Search in logarithms, since numbers span many sizes.
        a, b = math.log(low), math.log(high)
        c, d = b - ratio * (b - a), a + ratio * (b - a)
        fc, fd = self.trial(make(math.exp(c))), self.trial(make(math.exp(d)))
        # Stop when it is exact, or when patience has not halved the distance.
        for step in range(40):
            value, found = (math.exp(c), fc) if fc < fd else (math.exp(d), fd)
            if found < score:
                best, score = value, found
            near = score <= self.view.tolerance and b - a < 1e-4
            if b - a < 1e-7 or near or (step > PATIENCE and score > 0.5 * self.view.residual):
                break
            if fc < fd:
                b, d, fd = d, c, fc
                c = b - ratio * (b - a)
                fc = self.trial(make(math.exp(c)))
            else:
                a, c, fc = c, d, fd
                d = a + ratio * (b - a)
                fd = self.trial(make(math.exp(d)))
        return best, score

    def rounded_change(self, make: Callable[[float], Change], value: float) -> Iterator[Change]:
        """Yield the change for the number with fewest digits that still fits, near `value`.

        It is the change for `value` itself if no shorter number fits.
        """
        # A tolerance admits numbers that are visibly off; what they leave looks like another fault
        # later, or hides that another rule fits better.
        bound = min(self.view.tolerance, max(EXACT, ROUNDER * self.trial(make(value))))
        for candidate in short_numbers(value):
            change = make(candidate)
            if self.trial(change) <= bound:
                yield change
                return
        yield make(value)


def differing_rows(case: Mismatch, view: ShadowPoint | None = None) -> Array:
    """Return the numbers of the rows that differ from the trace by more than rounding.

    They are those of the point, as it is computed without a change; `view`: with one.
    """
    apart = case.distances_by_row(case.view if view is None else view)
    return np.flatnonzero(apart > 2 * case.view.tolerance)


def spanned_layers(case: Mismatch) -> frozenset[int]:
    """Return the layers whose operations lie between the trace's last points and this one."""
    layers = {call.location.layer for call in case.view.calls if call.op not in MOVES}
    return frozenset(layer for layer in layers if 0 <= layer < case.patched.n_layers)


def computed_layer(case: Mismatch) -> int:
    """Return the one layer whose computation may be wrong at a diverging point; -1 for others.

    It is the point's own layer. The final norm and the logits have none: theirs is the last layer
    if the operations since the last recorded value are in no other, and -1 if they are in several.
    """
    if case.layer >= 0:
        return case.layer
    after_layers = any(call.location.layer >= case.patched.n_layers for call in case.view.calls)
    spanned = spanned_layers(case) if after_layers else frozenset()
    return next(iter(spanned)) if len(spanned) == 1 else -1


def _skip_earlier_products(patched: PatchedModel, layer: int) -> PatchedModel:
    """Return the model that skips the matrix products of the layers before `layer`.

    The trace's values replace the points of these layers, so the results are not needed.
    """

    def zeros(op: Any, at: Any, x: Any, w: Any, bias: Any, **kwargs: Any) -> Any:
        """Return zeros [tokens, rows of `w`] in place of a product whose result is not needed."""
        return patched.backend.zeros((len(x), w.n_rows))

    before = frozenset(range(layer))
    return patched.with_op("linear", zeros, before).with_op("router", zeros, before)


def change_head_fields(patched: PatchedModel, layers: Layers, **values: Any) -> PatchedModel:
    """Return the model whose attention in `layers` uses Heads with the fields `values` replaced.

    A value may be a function from the layer's Heads, as earlier changes left them, to the new
    value.
    """

    def override(op: Any, at: Any, *args: Any) -> Any:
        """Return attention's operation with the changed fields of its last operand, a Heads."""
        *first, heads = args
        settled = {
            name: value(heads) if callable(value) else value for name, value in values.items()
        }
        if "mask" in settled:
            settled["causal"] = None  # the mask says the same
        return op(*first, replace(heads, **settled))

    return patched.with_ops(("scores", "probs"), override, layers, of_operands=True)


@dataclass(frozen=True)
class Hypothesis:
    """A row of the table of hypotheses: a cause, and the function that proposes changes for it.

    Rows are tried by `rank`, the lowest first; `because` is the reason for it. Rows of other
    packages come after ours.
    """

    cause: str
    propose: Callable[[Mismatch], Iterator[Change]]
    rank: int = LAST
    because: str = "offered by another package"


@dataclass(frozen=True, slots=True)
class FittedNumber:
    """A row of the table of numbers that are fitted next to other changes: a cause, and its change.

    `make(patched, number)` returns the change of the whole pass to a number. With `by_rope` it is
    `make(patched, kind, number)`, which is fitted for each kind of rope by itself. Rows are tried
    by `rank`, the lowest first; `because` is the reason for it.
    """

    cause: str
    make: Callable[..., Change]
    rank: int
    because: str
    by_rope: bool = False
