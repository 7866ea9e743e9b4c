"""Forward passes of two models, stage by stage, with all points compared.

A *part* is the weights and hyperparameters of B that one finding is about. A *stage* is the
embedding, one layer, or the head. A *blend* is B with some parts replaced by A's. A and B are the
two models, runs or traces that are compared; a *side* is one of them.

A pass starts at the first stage that differs from A's, on A's own stream, and ends where no later
stage differs and the stream is A's to the bit. Points are compared as they come, so that no more
than one layer of each side is in memory.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.diagnosis.blended_model import Blend, count_stages
from aprfmt.diagnosis.progress import ProgressReporter, multiplications_per_token
from aprfmt.diagnosis.records import Touched
from aprfmt.inference.backends import BACKENDS
from aprfmt.inference.forward import Span, StageOutput, arrays_between_stages
from aprfmt.inference.replay.patched_model import PassLocation, PatchedModel
from aprfmt.inference.replay.shadow import PointRecorder
from aprfmt.inference.weights import Holder, free_budget
from aprfmt.measure.nonfinite import NonFinite
from aprfmt.measure.softmax import log_softmax
from aprfmt.measure.traces import PointDiff, RunPair
from aprfmt.model import Model

Array = NDArray[Any]
MOST_HELD = 5 << 28  # bytes of decoded weights that are kept; others are decoded at each use
LOOKS = 4  # stages that differ inside the bound whose points are compared
ROWS_AT_ONCE = 8  # rows of logits whose probabilities are compared together


@dataclass(frozen=True)
class Probe:
    """Token ids, the rows whose logits are compared (None: all), and the reason for the probe."""

    ids: tuple[int, ...]
    rows: tuple[int, ...] | None = None
    why: str = ""

    @property
    def count(self) -> int:
        """The number of the probe's rows whose logits are compared."""
        return len(self.ids) if self.rows is None else len(self.rows)


@dataclass(frozen=True)
class PassResult:
    """How far a pass's logits are from A's, and the first point that differs.

    `distance` is relative L2, a fraction of the norm of A's: 0 where both are all zeros, infinite
    where only one side is not finite. `kl` is the mean divergence of the next token's probabilities
    in nats, None where values are not finite. `first` is the first point beyond its tolerance.
    `exact`: equal bits.
    """

    distance: float
    kl: float | None = None
    first: str = ""
    odd: NonFinite | None = None
    exact: bool = False
    points: Mapping[str, PointDiff] = field(default_factory=dict)


MISFIT = object()  # in place of a pass whose weights do not fit together
SAME = PassResult(0.0, 0.0, exact=True)


class _PointValues(PointRecorder):
    """Records the values of all points, or of the chosen experts only."""

    def __init__(self, patched: PatchedModel, layer: int, keep: bool) -> None:
        """Record all points of `layer` if `keep`, else only the chosen experts and margins."""
        super().__init__(patched)
        self.keep, self.at = keep, PassLocation("", layer)

    def capture(self, point: str, layer: int, x: Any) -> Any:
        """Return `x` unchanged; store a copy if this point is recorded."""
        if self.keep or point in ("experts", "router_margin"):
            return super().capture(point, layer, x)
        self.calls = []
        self.set_location(point, layer)
        return x


class PairedPass:
    """Two models and their passes; `routed` are the experts that the passes chose, by layer."""

    def __init__(
        self,
        a: Model,
        b: Model,
        equal: frozenset[str],
        pair: RunPair,
        dtype: str,
        memory: int | None = None,
        reporter: ProgressReporter | None = None,
    ) -> None:
        """Prepare the passes; `memory` is the bytes for decoded weights, None for a default.

        `reporter` tells a user how far they are; None tells nobody.
        """
        self.reporter = reporter or ProgressReporter()
        self.a, self.b, self.equal, self.pair, self.dtype = a, b, equal, pair, dtype
        self.holder = Holder(min(free_budget(), MOST_HELD) if memory is None else memory)
        self.backend = BACKENDS["numpy"]("cpu", dtype)
        self.stages = count_stages(a, b)
        self.routed: dict[int, set[int]] = {}
        self.flops = 0.0  # multiplications and additions of all passes so far
        self._streams: dict[Probe, list[Any]] = {}
        self._blends: list[Blend] = []
        self._layer = multiplications_per_token(a) / max(1, int(a.hyper["n_layers"]))
        self.mine = self._make_blend(None)

    def blend(self, parts: Sequence[Touched]) -> Blend:
        """Return B with the weights and hyperparameters of these parts replaced by A's."""
        return self._make_blend(parts)

    def _make_blend(self, parts: Sequence[Touched] | None) -> Blend:
        """Return B with the weights and hyperparameters of `parts` replaced by A's.

        None: A itself.
        """
        made = Blend(self.a, self.b, self.equal, self.holder, parts)
        self._blends.append(made)
        return made

    def close(self) -> None:
        """Stop reading weights ahead. Call before the models are closed."""
        for made in self._blends:
            made.weights.close()

    def pass_flops(self, probe: Probe, start: int = 0) -> float:
        """Return about how many multiplications and additions a pass takes from `start` on.

        `start` is the number of a stage of the pass.
        """
        hp, layers = self.a.hyper, self.stages - 1 - max(start, 1)
        head = probe.count * float(hp["vocab_size"]) * float(hp["hidden_size"])
        return 2.0 * (len(probe.ids) * self._layer * max(layers, 0) + head)

    def run_stage(
        self, blend: Blend, probe: Probe, stage: int, stream: Any, keep: bool
    ) -> tuple[Any, dict[str, Array]]:
        """Run one stage of model `blend` on a probe; return (stream or logits, {point: values}).

        `stream` is the hidden states that enter the stage, None for stage 0. Without `keep` only
        the chosen experts are recorded. They are added to `routed`.
        """
        patched = PatchedModel(blend.spec, blend.hp, blend.weights, self.backend, probe.ids)
        recorder = _PointValues(patched, max(0, stage - 1), keep)
        x = patched.run(
            recorder, "all" if probe.rows is None else probe.rows, Span(stage, stage + 1, stream)
        )
        for key, values in recorder.values.items():
            if key.endswith(".experts"):
                used = self.routed.setdefault(int(key[1:].partition(".")[0]), set())
                used.update(np.unique(values).tolist())
        return x, recorder.values

    def stage_inputs(self, probe: Probe) -> list[Any]:
        """Return what enters each stage (some layers) of A's pass on a probe, then A's logits.

        It is computed once for each probe.
        """
        if probe not in self._streams:
            found: list[Any] = [None]
            for stage in range(self.stages):
                found.append(self.run_stage(self.mine, probe, stage, found[-1], False)[0])
            self._streams[probe] = found
            self.flops += self.pass_flops(probe)
        return self._streams[probe]

    def run_and_compare_points(self, blend: Blend, probe: Probe) -> PassResult:
        """Run A and a blend stage by stage; return the result with every point compared.

        The distance is infinite if the shapes of the blend's parts do not fit together.
        """
        streams: list[Any] = [None]
        y: Any = None
        points: dict[str, PointDiff] = {}
        self.flops += 2 * self.pass_flops(probe)
        self.reporter.announce_passes(2 * self.pass_flops(probe))
        for stage in range(self.stages):
            self.reporter.report_progress(stage, self.stages)
            x, mine = self.run_stage(self.mine, probe, stage, streams[-1], True)
            streams.append(x)
            try:
                y, theirs = (y, {}) if y is MISFIT else self.run_stage(blend, probe, stage, y, True)
            except (ValueError, IndexError):
                y, theirs = MISFIT, {}
            points |= compare_passes(self.pair, mine, theirs, self.dtype)
        self._streams[probe] = streams
        first = next((point.key for point in points.values() if point.beyond), "")
        if y is MISFIT:
            return PassResult(math.inf, first=first, points=points)
        return self._make_result(streams[-1], y, first, points)

    def run_from_first_difference(self, blend: Blend, probe: Probe) -> PassResult:
        """Return the result of a blend, run only from the first stage that differs from A.

        It is SAME, for equal logits, as soon as a stage's input equals A's and no later stage
        differs. The distance is infinite if the shapes of the blend's parts do not fit together.
        `points` is empty.
        """
        if not blend.own:
            return SAME
        streams = self.stage_inputs(probe)
        start = blend.own[0]
        x, first, looks = streams[start], "", LOOKS
        for stage in range(start, self.stages):
            if stage > blend.own[-1] and stages_equal(x, streams[stage]):
                return SAME
            try:
                x, theirs = self.run_stage(blend, probe, stage, x, not first)
            except (ValueError, IndexError):
                return PassResult(math.inf, first=first)  # these parts alone do not fit together
            if not first and self._stage_differs(x, streams[stage + 1], looks > 0):
                looks -= 1
                _, mine = self.run_stage(self.mine, probe, stage, streams[stage], True)
                points = compare_passes(self.pair, mine, theirs, self.dtype)
                first = next((point.key for point in points.values() if point.beyond), "")
        self.flops += self.pass_flops(probe, start)
        return self._make_result(streams[-1], x, first, {})

    def count_rerouted_tokens(
        self, keys: Collection[str], rounded: Collection[str], probe: Probe
    ) -> dict[int, tuple[int, int]]:
        """Return {layer: (tokens that B's weights `keys` reroute, those that they surely reroute)}.

        Rerouted tokens go to other experts. All else is A's, also what enters each layer. Layers
        without such a token are left out. A token is sure where the gap of A's router scores is
        over TIMES what rounding moves such gaps: that is measured in a pass with a bfloat16
        stream and B's weights `rounded`.
        """
        from aprfmt.diagnosis.accumulated_rounding import TIMES

        blend, sound = self._with_alone(keys), self._with_alone(rounded)
        streams, found = self.stage_inputs(probe), dict[int, tuple[int, int]]()
        y: Any = None
        for stage in range(max(blend.own, default=-1) + 1):
            y, moved = self.run_stage(sound, probe, stage, y, False)
            y = round_stream(y, "bfloat16")
            if stage not in blend.own:
                continue
            mine, theirs = (
                self.run_stage(side, probe, stage, streams[stage], False)[1]
                for side in (self.mine, blend)
            )
            chosen, margin = f"L{stage - 1}.experts", f"L{stage - 1}.router_margin"
            self.flops += 2 * self.pass_flops(probe) / self.stages
            if chosen not in mine or chosen not in theirs:
                continue
            x, other = (np.sort(side[chosen], -1) for side in (mine, theirs))
            if x.shape != other.shape:
                continue
            flips = (x != other).any(-1)
            gaps = np.float64(mine[margin]).reshape(len(flips), -1).min(-1)
            apart = np.abs(np.float64(moved[margin]).reshape(len(flips), -1).min(-1) - gaps).max()
            if flips.any():
                found[stage - 1] = int(flips.sum()), int((flips & (gaps > TIMES * apart)).sum())
        self.flops += self.pass_flops(probe)
        return found

    def _with_alone(self, keys: Collection[str]) -> Blend:
        """Return A with B's weights of these role keys."""
        every = dict.fromkeys((*self.a.roles, *self.b.roles))
        kept = tuple(key for key in every if key not in keys)
        return self.blend([Touched(tuple(self.a.hyper), kept)])

    def _stage_differs(self, x: Any, y: Any, any_at_all: bool) -> bool:
        """Return whether two outputs of a stage differ beyond the bound, or in shape.

        Compared are the streams and all else that later layers share. With `any_at_all`
        any difference counts, as in a mask of chosen keys.
        """
        mine, theirs = arrays_between_stages(x), arrays_between_stages(y)
        if [one.shape for one in mine] != [one.shape for one in theirs]:
            return True
        for one, other in zip(mine, theirs, strict=True):
            if one.dtype == bool:
                if not np.array_equal(one, other):
                    return True
                continue
            found = measure_point(self.pair, "out", self.dtype, one, other)
            if found.beyond or (any_at_all and bool(found.rel_l2)):
                return True
        return False

    def _make_result(
        self, mine: Array, theirs: Array, first: str, points: Mapping[str, PointDiff]
    ) -> PassResult:
        """Return the comparison of A's logits (`mine`) with those of a blend of A and B (`theirs`).

        `first` is the first point beyond its tolerance. The distance is infinite if shapes
        differ.
        """
        mine, theirs = shared_columns(mine, theirs)
        if mine.shape != theirs.shape:
            return PassResult(math.inf, first=first, points=points)
        found = points.get("logits") or measure_point(self.pair, "logits", self.dtype, theirs, mine)
        odd = found.nonfinite
        alone = odd is not None and odd.alone > 0
        return PassResult(
            math.inf if alone else found.rel_l2 or 0.0,
            None if odd is not None else kl_divergence(mine, theirs),
            first,
            odd,
            np.array_equal(mine, theirs),
            points,
        )


def stages_equal(x: Any, y: Any) -> bool:
    """Return whether two outputs of a stage are equal: streams and all that later layers share."""
    mine, theirs = arrays_between_stages(x), arrays_between_stages(y)
    return len(mine) == len(theirs) and all(map(np.array_equal, mine, theirs))


def round_stream(carried: Any, dtype: str) -> Any:
    """Return the output of a stage with its stream rounded to a shorter float type.

    What later layers share apart from the stream stays as it is.
    """
    from aprfmt.causes.forward.rounding import round_to_type

    if isinstance(carried, StageOutput):
        return replace(carried, stream=round_to_type(carried.stream, dtype))
    return round_to_type(carried, dtype)


def compare_passes(
    pair: RunPair, mine: Mapping[str, Array], theirs: Mapping[str, Array], dtype: str
) -> dict[str, PointDiff]:
    """Return {key: PointDiff} of every point that both passes have, in order.

    `mine` and `theirs` are {key: values} of A's and of B's pass, computed in `dtype`; `pair` has
    the tolerances. Values of other sizes are infinitely far apart. Logits are compared over the ids
    that both have: a padded vocabulary adds some.
    """
    found: dict[str, PointDiff] = {}
    for key in (key for key in mine if key in theirs):
        x, y = mine[key], theirs[key]
        if key == "logits":
            x, y = shared_columns(x, y)
        if x.size == y.size:
            found[key] = measure_point(pair, key, dtype, y, x)
        else:
            bound = pair.threshold_of(key, (dtype, dtype)).rel_l2
            found[key] = PointDiff(key, math.inf, None, None, bound, True)
    return found


def measure_point(
    pair: RunPair, key: str, dtype: str, actual: Array, reference: Array
) -> PointDiff:
    """Return how far B's value of a point, `actual`, is from A's, which is the reference.

    Distances are relative to A's norm, which stays the same while parts of B are replaced. In the
    counts of NaN and infinities `a` is the reference's.
    """
    found = pair.compare(key, (dtype, dtype), actual, reference)
    return found.with_sides_exchanged


def shared_columns(mine: Array, theirs: Array) -> tuple[Array, Array]:
    """Return (A's logits `mine`, B's `theirs`), cut to the token ids that both sides have."""
    few = min(mine.shape[-1], theirs.shape[-1])
    return mine[..., :few], theirs[..., :few]


def kl_divergence(mine: Array, theirs: Array) -> float:
    """Return the mean KL(A || B) of next-token probabilities, in nats.

    `mine` are A's logits, `theirs` B's, both [tokens, vocabulary].
    """
    total, rows = 0.0, len(mine)
    for start in range(0, rows, ROWS_AT_ONCE):
        parts = (x[start : start + ROWS_AT_ONCE] for x in (mine, theirs))
        p, q = (log_softmax(part.astype(np.float64)) for part in parts)
        total += float((np.exp(p) * (p - q)).sum())
    return max(0.0, total / max(rows, 1))
