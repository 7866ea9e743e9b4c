"""The same batch's gradients on several devices, compared backward from the loss.

A float64 pass on the CPU is the arbiter: it says of each run how far it is from the truth, and so
which of two that differ is wrong. What rounding alone does is measured, not guessed: a run is held
to the distance of a CPU pass in its own dtype, and in few bits to that of passes that round at
random, whatever other runs there are. No run is called wrong before such passes have shown how far
rounding moves its gradients.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.errors import UsageError
from aprfmt.inference.batch import Batch
from aprfmt.inference.capture import point_instances
from aprfmt.inference.gradients.adapter_pairs import AdapterPair
from aprfmt.inference.gradients.backend import GradientBackend
from aprfmt.inference.gradients.batch_gradients import BatchGradients, batch_gradients
from aprfmt.inference.gradients.rounding_noise import FEW_BITS, MOST, NoisyPasses, largest_distance
from aprfmt.model import Model

Array = NDArray[Any]
# Unit roundoff of each dtype.
UNIT: Mapping[str, float] = {
    "float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11,
}  # fmt: skip
# What a right backward of one layer is within in any order of adding, in units of roundoff. A run
# that is further off has its rounding measured, whatever the CPU's pass in its dtype gives.
ROOM = 16.0
HALF = 0.5  # of a gradient: a run this near float64's has not lost it
UNROUTED = 2  # passes that all choose other experts: the rounding of one choice is not seen then
# A gradient smaller than this share of the largest is what rounding leaves of zero.
NOTHING = 1e-12


# The step that an optimizer makes of (a gradient, the norm of all gradients), in its shape.
StepOf = Callable[[Array, float], Array]


@dataclass(frozen=True)
class GradientRun:
    """One way to compute the gradients: where, and in which dtype.

    `opens` gives the backend, where it is not the usual one.
    """

    device: str
    dtype: str
    opens: Callable[[str, str], GradientBackend] = field(default=GradientBackend, repr=False)

    def __str__(self) -> str:
        """Return the run as --between takes it, `cpu:float32`."""
        return f"{self.device}:{self.dtype}"


@dataclass(frozen=True)
class GradientGap:
    """One gradient in all runs: `key` of a point or of a parameter.

    `distances` are the runs' relative distances from float64, `allowed` what each may be off by,
    and `wrong` the runs that are further off. `size` is the norm of the float64 gradient. `update`
    are the L2 distances of the runs' optimizer steps from float64's, and `step` is the norm of
    that; () and None for points, and where no optimizer was given. Where rounding alone may be as
    large as the gradient (`allowed` of 1 or more), a run further off than HALF is not judged.
    """

    key: str
    parameter: bool
    size: float
    distances: tuple[float, ...]
    allowed: tuple[float, ...]
    update: tuple[float, ...] = ()
    step: float | None = None

    @property
    def wrong(self) -> tuple[int, ...]:
        """The numbers of runs whose gradient is NaN or further from float64's than it may be."""
        return tuple(run for run in range(len(self.distances)) if self.exceeds(run))

    @property
    def lost(self) -> tuple[int, ...]:
        """The numbers of the runs of whose gradient rounding may have left nothing.

        A run that came within HALF of float64's gradient has kept it, however far it may be off.
        """
        every = enumerate(zip(self.distances, self.allowed, strict=True))
        return tuple(
            run for run, (off, allowed) in every
            if allowed >= 1 and off > HALF and run not in self.wrong
        )  # fmt: skip

    def exceeds(self, run: int) -> bool:
        """Return whether a run's gradient is NaN or further from float64's than rounding allows.

        False where rounding at random gave NaN (`allowed` is infinite): no distance is too large.
        """
        off, allowed = self.distances[run], self.allowed[run]
        return not (off <= allowed or math.isinf(allowed))


@dataclass(frozen=True)
class GradientsBetween:
    """Runs of one batch, and every gradient that was compared, in backward order.

    `losses` are the runs', `loss` float64's. `open` are keys whose gradient is zero but for
    rounding, which no distance is taken of, `missing` those that a run has no gradient of. `flips`
    are routers that chose other experts than float64: the runs compute another function there, and
    gradients are not held against each other.
    """

    runs: tuple[GradientRun, ...]
    loss: float
    losses: tuple[float, ...]
    gaps: tuple[GradientGap, ...]
    open: tuple[str, ...]
    flips: Mapping[int, tuple[str, ...]]
    missing: tuple[str, ...] = ()

    def first(self, run: int) -> str | None:
        """Return the first key, backward from the loss, where run number `run` is wrong.

        None if it is wrong nowhere.
        """
        return next((gap.key for gap in self.gaps if run in gap.wrong), None)

    @property
    def wrong(self) -> tuple[int, ...]:
        """The numbers of runs with a wrong gradient.

        A run whose router chose other experts is left out.
        """
        every = range(len(self.runs))
        return tuple(run for run in every if run not in self.flips and self.first(run) is not None)

    @property
    def agrees(self) -> bool:
        """Whether every run's gradients agree with float64's, and all could be compared.

        False also if no gradient was compared, a router chose other experts, or rounding may be as
        large as a gradient.
        """
        whole = not self.flips and not any(gap.lost for gap in self.gaps)
        return bool(self.gaps) and whole and not self.wrong and not self.missing


def gradients_between(
    model: Model,
    batch: Batch,
    runs: Sequence[GradientRun],
    *,
    points: Collection[str] | None = None,
    trained: Collection[str] | None = None,
    pairs: Sequence[AdapterPair] = (),
    step_of: StepOf | None = None,
) -> GradientsBetween:
    """Return a batch's gradients in every run, each compared with float64 on the CPU.

    `points` are keys of the capture points to compare too, None for all. `trained` are stored names
    of the parameters that train; None: all, or with `pairs` (an adapter's LoRA pairs) these alone.
    `step_of` gives the optimizer's step of a gradient. Raises UsageError for fewer than two runs.
    """
    if len(runs) < 2:
        raise UsageError(f"{len(runs)} run to compare; give at least two: --between cpu cuda")

    def compute_run(run: GradientRun) -> BatchGradients:
        """Return the batch's gradients as one run computes them, on its device and in its dtype."""
        return batch_gradients(
            model,
            batch,
            points=points,
            trained=trained,
            pairs=pairs,
            backend=run.opens(run.device, run.dtype),
        )

    exact = compute_run(GradientRun("cpu", "float64"))
    every = [compute_run(run) for run in runs]
    # What rounding does in each dtype, on the CPU; a run that is this pass is not made twice.
    references = {"float64": exact}
    for run, made in zip(runs, every, strict=True):
        if run == GradientRun("cpu", run.dtype):
            references.setdefault(run.dtype, made)
    for run in runs:
        if run.dtype not in references:
            references[run.dtype] = compute_run(GradientRun("cpu", run.dtype))
    # Keys in backward order: points from the loss on, then parameters.
    order = [key for key in point_instances(model.spec.block, model.hyper, model.roles)][::-1]
    keys = [(key, False) for key in order if key in exact.points]
    keys += [(key, True) for key in _in_backward_order(exact.keys)]
    floors = {parameter: _zero_norm(exact, parameter) for parameter in (False, True)}
    gaps, left, missing = [], [], []
    for key, parameter in keys:
        truth = _value(exact, key, parameter)
        found = [_value(each, key, parameter) for each in every]
        size = float(np.linalg.norm(truth)) if truth is not None else 0.0
        if truth is None or any(x is None for x in found):
            missing.append(key)
            continue
        if size <= floors[parameter]:
            left.append(key)
            continue
        # Each run may be as far from float64 as rounding in its dtype explains.
        distances = tuple(_relative_distance(x, truth, size) for x in found)
        allowed = []
        for run in runs:
            if run.dtype in FEW_BITS:
                allowed.append(UNIT[run.dtype])  # what storing the gradient leaves
                continue
            value = _value(references[run.dtype], key, parameter)
            usual = 0.0 if value is None else _relative_distance(value, truth, size)
            one = ROOM * UNIT[run.dtype]
            own = run == GradientRun("cpu", run.dtype)
            allowed.append(one if own else MOST * min(usual, one))
        gap = GradientGap(key, parameter, size, distances, tuple(allowed))
        if step_of is not None and parameter:
            wanted = step_of(truth, exact.norm)
            of_runs = zip(found, every, strict=True)
            steps = [step_of(x, run.norm) for x, run in of_runs if x is not None]
            distances = tuple(float(np.linalg.norm(x - wanted)) for x in steps)
            gap = replace(gap, update=distances, step=float(np.linalg.norm(wanted)))
        gaps.append(gap)
    flips = {
        number: flipped
        for number, each in enumerate(every)
        if (flipped := flipped_routers(each.values, exact.values))
    }
    # What a run may be off by where it is further off: passes that round at random say.
    passes = {
        run.dtype: NoisyPasses(partial(compute_run, GradientRun("cpu", run.dtype))) for run in runs
    }
    for number, run in enumerate(runs):
        if number not in flips:
            gaps = _with_measured_rounding(gaps, number, references[run.dtype], passes[run.dtype])
    return GradientsBetween(
        tuple(runs),
        exact.loss,
        tuple(each.loss for each in every),
        tuple(gaps),
        tuple(left),
        flips,
        tuple(missing),
    )


def _with_measured_rounding(
    gaps: Sequence[GradientGap],
    run: int,
    reference: BatchGradients,
    noisy: Iterable[BatchGradients],
) -> list[GradientGap]:
    """Return the gaps with run number `run`'s allowed distance raised to the measured rounding.

    Only gaps that exceed theirs change. Measured is the largest distance of the `noisy` passes from
    `reference`, all right passes in the run's dtype; not their distance from float64, since an
    operation that the CPU computes wrongly in that dtype is in both. No further pass is made once
    all gaps are explained. Passes in which routers chose other experts come last, as they compute
    another function; if the first UNROUTED of them all do, a gradient of few bits may be off by
    what one layer's rounding leaves.
    """
    found, wide = list(gaps), ROOM * UNIT[reference.dtype]
    flipped: list[BatchGradients] = []

    def raise_allowances(least: Callable[[GradientGap], float]) -> bool:
        """Raise the allowed distances of gaps beyond theirs; return whether some still are."""
        for at, gap in enumerate(found):
            if gap.exceeds(run):
                allowed = [*gap.allowed]
                allowed[run] = max(allowed[run], least(gap))
                found[at] = replace(gap, allowed=tuple(allowed))
        return any(gap.exceeds(run) for gap in found)

    def explained_distance(other: BatchGradients, gap: GradientGap) -> float:
        """Return the relative distance that rounding explains, by one of the noisy passes."""
        one, two = (_value(each, gap.key, gap.parameter) for each in (reference, other))
        return largest_distance(one, two, reference.dtype) / gap.size

    beyond = any(gap.exceeds(run) for gap in found)
    for number, other in enumerate(noisy if beyond else ()):
        if flipped_routers(other.values, reference.values):
            flipped.append(other)
            if len(flipped) == number + 1 == UNROUTED:
                beyond = raise_allowances(lambda gap: wide)
        else:
            beyond = raise_allowances(partial(explained_distance, other))
        if not beyond:
            break
    for other in flipped if beyond else ():
        if not (beyond := raise_allowances(partial(explained_distance, other))):
            break
    return found


def _zero_norm(exact: BatchGradients, parameter: bool) -> float:
    """Return the norm below which a gradient counts as zero with rounding.

    It is NOTHING times the largest norm of all parameters' gradients (`parameter`), or of all
    points'.
    """
    mine = (*exact.by_role.values(), *exact.adapter.values())
    sizes = [float(np.linalg.norm(x)) for x in (mine if parameter else exact.points.values())]
    return NOTHING * max(sizes, default=0.0)


def _in_backward_order(keys: Collection[str]) -> list[str]:
    """Return parameters' keys in backward order: what follows the layers, the last layer first.

    The token table comes last.
    """

    def place(key: str) -> tuple[bool, int]:
        """Return a parameter's sort key: higher layers first, the token table last."""
        head = key.partition(".")[0]
        layer = int(head[1:]) if head[:1] == "L" and head[1:].isdecimal() else 1 << 30
        return (key.startswith("token_embd"), -layer)

    return sorted(keys, key=place)


def _value(found: BatchGradients, key: str, parameter: bool) -> Array | None:
    """Return a run's gradient of the parameter or the capture point `key`; None without one."""
    if not parameter:
        return found.points.get(key)
    return found.gradient(key) if key in found.keys else None


def _relative_distance(x: Array | None, truth: Array, size: float) -> float:
    """Return |x - truth| over `size`, the norm of truth; NaN for no array or another shape."""
    if x is None or x.shape != truth.shape:
        return float("nan")
    return float(np.linalg.norm(x - truth)) / size


def flipped_routers(values: Mapping[str, Array], truth: Mapping[str, Array]) -> tuple[str, ...]:
    """Return the keys of the routers that chose other experts than float64 for some token.

    `values` and `truth` are captured values of points; the order of a token's experts is ignored.
    """
    return tuple(
        key
        for key, ids in truth.items()
        if key.endswith(".experts")
        and not np.array_equal(np.sort(ids, -1), np.sort(values.get(key, ids), -1))
    )
