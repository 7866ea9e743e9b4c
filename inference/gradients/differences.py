"""A given gradient checked by central differences: forward passes in float64, no backward.

A *part* of a weight is the rows of one head or the matrix of one expert, or one of eight ranges of
rows.

For a random direction v, (L(W + e v) - L(W - e v)) / 2e is <dL/dW, v>. For a given gradient g of
independent normal v, the residual of <g, v> is normal with the size |dL/dW - g|, so one direction
measures how far g is off, whatever is wrong with it. Two passes a direction, restarted at the first
layer that reads W. A suspected mistake is a map T: <T(g), v> fits every direction at once, up to
one factor, and directions that the factor was not read from.

No torch: the numpy backend runs every architecture with a forward pass.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from aprfmt.arch.role_vocabulary import split_key
from aprfmt.errors import UsageError
from aprfmt.inference.backends import BACKENDS
from aprfmt.inference.batch import Batch
from aprfmt.inference.forward import Span
from aprfmt.inference.gradients.documents import Reduction, documents
from aprfmt.inference.gradients.finite_weights import check_finite_base, check_finite_before
from aprfmt.inference.loss import log_probabilities
from aprfmt.inference.session import load_forward
from aprfmt.inference.weights import Weights, model_weights
from aprfmt.model import Model
from aprfmt.model.completeness import check_predicts, check_runnable

Array = NDArray[Any]
Wrong = Literal["", "zero", "sign", "factor", "transposed", "parts", "other"]

STEP = 3e-5  # |e v| over |W|: truncation and rounding of float64 are then both near 1e-9
# A second, shorter step where the first disagrees: a kink that the way crosses (a clip, a top-k, an
# expert's choice) is wrong by its share of the way, so the two differ by 15/16 of it.
FINE = STEP / 16
DIRECTIONS = 3  # random directions; two tell a factor from anything else, others confirm it
INSIDE = 6  # directions inside a part that is said to be right
# Few directions say the size of a residual roughly: (so many, sure to be right below, sure to be
# wrong above), both as a share of the tolerance. Between them more directions are taken.
SURE = ((DIRECTIONS, 1 / 3, 3.0), (12, 0.75, 1.6), (48, 1.0, 1.0))
SIGMAS = 3.0  # deviations that a factor measured along a few directions may be off by
# What a right gradient's residual is below, relative to the gradient, in float64.
RESIDUAL = 1e-5
SEED = 20


class BatchLoss:
    """The loss of a batch as a function of one weight, in float64 on the numpy backend.

    Holds the input of every stage of the pass (forward.Span), so that for a changed weight only the
    layers from its own on are run. `first` has for each role the stage that reads it first.
    """

    def __init__(self, model: Model, batch: Batch, reduction: Reduction = "tokens") -> None:
        """Run the batch once, and store the input of every stage and the loss.

        Raises UsageError or ArchError for a model that cannot be run, and UsageError for weights
        that make the loss NaN or infinite.
        """
        check_runnable(model.resolution, model.path)
        check_predicts(model.spec, str(model.path))
        self._model = model
        self._backend = BACKENDS["numpy"]("cpu", "float64")
        self._forward = load_forward(model.spec)
        self._weights = self._open_weights(model)
        self._documents = documents(batch, reduction)
        self._entering: list[list[Any]] = []
        self.first: dict[str, int] = {}
        with np.errstate(invalid="ignore", over="ignore"):  # of infinite weights, refused below
            for _ in self._documents:
                self._entering.append(self._stages(len(self._entering)))
            self.loss = self._total(self._weights, int(model.hyper["n_layers"]) + 1)
        if not math.isfinite(self.loss):
            check_finite_base(model)

    def _open_weights(self, model: Model) -> Weights:
        """Return the weights that the passes run with."""
        return model_weights(model)

    def _stages(self, number: int) -> list[Any]:
        """Return the input of every stage for document `number`; None enters the first.

        It is recorded in `first` which stage reads a weight first.
        """
        found: list[Any] = [None]
        last = int(self._model.hyper["n_layers"]) + 1
        for stage in range(last + 1):
            before = set(self._weights.unused_keys())
            left = self._run(self._weights, number, Span(stage, stage + 1, found[-1]))
            for key in before.difference(self._weights.unused_keys()):
                self.first.setdefault(key, stage)
            if stage < last:
                found.append(left)
        return found

    def _run(self, weights: Weights, number: int, span: Span) -> Any:
        """Return what the stages of `span` give for document `number`, run with `weights`.

        That is logits of the scored tokens, or the input of the next stage.
        """
        document = self._documents[number]
        rows = [int(row) for row in np.flatnonzero(document.labels >= 0)]
        return self._forward(
            self._backend,
            self._model.spec,
            self._model.hyper,
            weights,
            document.ids,
            logits_rows=rows,
            span=span,
        )

    def _total(self, weights: Weights, start: int) -> float:
        """Return the loss of the batch in nats, run from stage `start` on with `weights`."""
        losses = []
        for number, document in enumerate(self._documents):
            logits = self._run(weights, number, Span(start, None, self._entering[number][start]))
            labels = document.labels[document.labels >= 0]
            logs = log_probabilities(np.asarray(logits))
            losses.append(-float(logs[np.arange(len(labels)), labels].sum()) * document.weight)
        return math.fsum(losses)

    def values(self, role: str) -> Array:
        """Return a role's weight as float64 numbers.

        Raises UsageError if the pass does not read it, and where it is not finite.
        """
        if role not in self.first:
            raise UsageError(
                f"{self._model.path}: no weight {role!r} that the pass reads; expected a role such "
                f"as {min(self.first)!r}"
            )
        found = np.asarray(self._weights[role].numpy(), np.float64)
        check_finite_before(self._model.roles[role], found)
        return found

    def loss_with(self, role: str, values: Array) -> float:
        """Return the loss in nats with `values` in place of one role's weight."""
        changed = self._changed_weights(role, values)
        weights = self._weights.with_arrays(changed)
        for key in self.first:
            if key not in changed and key in weights:
                weights.use_handle(key, self._weights[key])
        return self._total(weights, self.first[role])

    def _changed_weights(self, role: str, values: Array) -> Mapping[str, Array]:
        """Return the weights by role key that `values` in place of one parameter's change."""
        return {role: values}

    def along(self, role: str, direction: Array, step: float = STEP) -> float:
        """Return the loss's derivative along a direction of one weight, by a central difference.

        That is <dL/dW, direction>, from two passes; 0.0 for a direction of zero. `step` is how far
        the weight is moved, relative to its norm.
        """
        values = self.values(role)
        size = float(np.linalg.norm(direction))
        if not size:
            return 0.0
        typical = float(np.linalg.norm(values)) or math.sqrt(values.size) * 1e-2
        far = step * typical / size
        higher = self.loss_with(role, values + far * direction)
        lower = self.loss_with(role, values - far * direction)
        return (higher - lower) / (2 * far)

    def rounding(self, role: str, direction: Array, step: float = STEP) -> float:
        """Return how much float64's rounding of the loss may change a derivative by differences.

        The derivative is along `direction` of the weight of a role, from losses `step` times the
        weight's norm away.
        """
        values = self.values(role)
        typical = float(np.linalg.norm(values)) or math.sqrt(values.size) * 1e-2
        far = step * typical / max(float(np.linalg.norm(direction)), 1e-300)
        return 32 * float(np.spacing(abs(self.loss))) / far

    def close(self) -> None:
        """Release the weights."""
        self._weights.close()


@dataclass(frozen=True)
class PartCheck:
    """The check of one part of a weight: the loss's derivative along a direction inside the part.

    `agrees` is whether the given gradient has the same derivative in all directions that were
    tried, `seen` whether the part has a gradient that can be measured.
    """

    part: str
    found: float
    given: float
    agrees: bool
    seen: bool = True


@dataclass(frozen=True)
class GradientCheck:
    """A given gradient of one weight against the loss's derivatives along random directions.

    `apart` is the estimate of |dL/dW - g| over the larger of |g| and what the derivatives say of
    |dL/dW|, which is `size`, and `floor` how small it can be measured. `agrees` means nothing
    unless `measured`. `wrong` names the mistake that all directions agree on: g is `factor` times
    the true gradient (`sign`: -1; `transposed`: after transposing). `parts` are those that were
    checked one by one.
    """

    role: str
    found: tuple[float, ...]
    given: tuple[float, ...]
    apart: float
    floor: float
    agrees: bool
    wrong: Wrong = ""
    factor: float | None = None
    parts: tuple[PartCheck, ...] = ()
    size: float = 0.0
    factor_room: float = 0.0
    nearest: tuple[float, float] | None = None

    @property
    def measured(self) -> bool:
        """Whether the derivatives are well above float64's rounding of the loss."""
        return self.floor < 0.1

    @property
    def says(self) -> str:
        """What the given gradient is, in words, such as `2 times the true gradient`."""
        if self.agrees and not self.measured:
            return "too small to be measured by differences"
        named = [each.part for each in self.parts if not each.agrees]
        turned = ", transposed" if self.wrong == "transposed" else ""
        words: Mapping[Wrong, str] = {
            "": "the gradient of this loss",
            "zero": "zero, and the true gradient is not",
            "sign": "minus the true gradient",
            "factor": f"{self.factor:.6g} times the true gradient" if self.factor else "",
            "transposed": f"{self.factor:.6g} times the true gradient{turned}"
            if self.factor
            else "",
            "parts": f"wrong in {', '.join(named[:6])}; right elsewhere",
            "other": f"not the gradient of this loss, {self.apart:.2g} off",
        }
        if self.nearest is not None:
            near = f"; nearest: {self.nearest[0]:.3g} times it, which leaves {self.nearest[1]:.2g}"
            return words[self.wrong] + near
        return words[self.wrong]


Maps = Sequence[tuple[Wrong, Callable[[Array], "Array | None"]]]


# Weights that have a row for each token.
_BY_TOKEN = ("token_embd.weight", "output.weight")


def _transpose_square(g: Array) -> "Array | None":
    """Return a square matrix transposed; None for any other array."""
    return np.ascontiguousarray(g.T) if g.ndim == 2 and g.shape[0] == g.shape[1] else None


_MAPS: Maps = (("factor", lambda g: g), ("transposed", _transpose_square))


def check_gradient(
    loss: BatchLoss,
    role: str,
    given: Array,
    *,
    tolerance: float = RESIDUAL,
    directions: int = DIRECTIONS,
    parts: Mapping[str, Array] | None = None,
) -> GradientCheck:
    """Return how a given gradient, in the role's layout, compares with the loss's derivatives.

    `tolerance` is relative: what the arithmetic that made the gradient may be off by. `directions`
    random directions are tried, two passes each, and more where these leave it open. `parts` are
    masks of the weight by name (`parts_of`): where the gradient is wrong and neither a factor nor
    transposing makes it right, each part is tried by itself, along a few directions inside it.
    Raises UsageError for another shape, and for a gradient that is not finite.
    """
    values = loss.values(role)
    if given.shape != values.shape:
        raise UsageError(
            f"{role}: the gradient is {list(given.shape)}; expected {list(values.shape)}, as the "
            "weight"
        )
    g = np.asarray(given, np.float64)
    if not np.isfinite(g).all():
        raise UsageError(
            f"{role}: {int((~np.isfinite(g)).sum())} elements of the gradient are not finite; "
            "expected numbers"
        )
    # Derivatives along random directions: measured, and those that the given gradient claims.
    rng = np.random.default_rng([SEED, values.size])
    lines = [rng.standard_normal(values.shape) for _ in range(directions)]
    found = np.array([loss.along(role, line) for line in lines])
    claimed = np.array([float(np.vdot(g, line)) for line in lines])
    noise = max(loss.rounding(role, line) for line in lines)
    true_size = float(np.sqrt(np.mean(found**2)))
    size = max(float(np.linalg.norm(g)), true_size)
    residual = float(np.sqrt(np.mean((found - claimed) ** 2)))
    # Where they differ a shorter step is taken: a kink on the way may be the reason.
    step = STEP
    if residual > tolerance * size + noise:
        step = FINE
        fine = np.array([loss.along(role, line, FINE) for line in lines])
        bent = float(np.abs(fine - found).max()) / 4
        found = fine
        noise = max(*(loss.rounding(role, line, FINE) for line in lines), bent)
        residual = float(np.sqrt(np.mean((found - claimed) ** 2)))
    for number, (count, low, high) in enumerate(SURE):
        share = max(0.0, residual - noise) / (tolerance * size) if size else 0.0
        if share <= low or share >= high or len(lines) < count:
            break
        more = [rng.standard_normal(values.shape) for _ in range(SURE[number + 1][0] - count)]
        lines += more
        found = np.append(found, [loss.along(role, line, step) for line in more])
        claimed = np.append(claimed, [float(np.vdot(g, line)) for line in more])
        residual = float(np.sqrt(np.mean((found - claimed) ** 2)))
    true_size = float(np.sqrt(np.mean(found**2)))
    if residual <= tolerance * size + noise:
        apart = residual / size if size else 0.0
        return _make_check(role, found, claimed, apart, noise, size, agrees=True)
    # The gradient is wrong: look for one mistake that fits every direction, else part by part.
    apart = residual / size
    if not g.any():
        return _make_check(role, found, claimed, apart, noise, size, wrong="zero")
    bound, nearest = tolerance * true_size + noise, None
    for wrong, turn in _MAPS:
        other = turn(g)
        if other is None:
            continue
        fit = np.array([float(np.vdot(other, line)) for line in lines])
        share = float(np.vdot(fit, found) / np.vdot(fit, fit))
        # The true gradient is `share` times the turned one; a share that is noise fits nothing.
        if len(found) < 2 or abs(share) * np.linalg.norm(fit) <= 100 * noise:
            continue
        off = float(np.sqrt(np.mean((found - share * fit) ** 2)))
        # A map that leaves as much as there was before it says nothing.
        if off > max(residual / 4, 2 * noise):
            continue
        # What it leaves may be rounding alone, along directions that it was not read from.
        left = _left_over(loss, role, share * other, step, bound, rng)
        if left > bound:
            if wrong == "factor":
                nearest = 1 / share, left / true_size
            continue
        factor = 1 / share
        named: Wrong = wrong
        if wrong == "factor" and abs(factor + 1) < 100 * tolerance:
            named = "sign"
        room = SIGMAS * abs(factor) * max(left, noise) / true_size / len(found) ** 0.5
        made = _make_check(role, found, claimed, apart, noise, size, wrong=named, factor=factor)
        return replace(made, factor_room=room)
    looked = _check_parts(loss, role, g, parts or {}, tolerance, rng)
    some = {each.agrees for each in looked if each.seen} == {True, False}
    made = _make_check(
        role, found, claimed, apart, noise, size, wrong="parts" if some else "other", parts=looked
    )
    return replace(made, nearest=nearest)


def _left_over(
    loss: BatchLoss, role: str, gradient: Array, step: float, bound: float, rng: Any
) -> float:
    """Return the RMS difference of a gradient's and the loss's derivatives on random lines.

    `step` is how far the weight is moved, relative to its norm. Lines are added until it is clear
    whether the result is below `bound`.
    """
    rest: list[float] = []
    found = 0.0
    for count, low, high in SURE:
        for _ in range(count - len(rest)):
            line = rng.standard_normal(gradient.shape)
            rest.append(loss.along(role, line, step) - float(np.vdot(gradient, line)))
        found = float(np.sqrt(np.mean(np.square(rest))))
        if found <= low * bound or found >= high * bound:
            break
    return found


def _make_check(
    role: str,
    found: Array,
    given: Array,
    apart: float,
    noise: float,
    size: float,
    *,
    agrees: bool = False,
    wrong: Wrong = "",
    factor: float | None = None,
    parts: tuple[PartCheck, ...] = (),
) -> GradientCheck:
    """Return the GradientCheck of these values, with its `floor` computed.

    `found` are the measured derivatives and `noise` their rounding, `given` are those of the given
    gradient, `size` is the norm of the true gradient. The other arguments are the check's fields.
    """
    floor = noise / size if size else 0.0
    return GradientCheck(
        role,
        tuple(map(float, found)),
        tuple(map(float, given)),
        apart,
        floor,
        agrees,
        wrong,
        factor,
        parts,
        size,
    )


def _check_parts(
    loss: BatchLoss, role: str, g: Array, parts: Mapping[str, Array], tolerance: float, rng: Any
) -> tuple[PartCheck, ...]:
    """Return a check of the gradient of each part of a weight, along random directions inside it.

    `g` is the given gradient, `parts` are {name: mask of the weight}.
    """
    looked = []
    for name, mask in parts.items():
        agrees, seen = True, False
        # One direction is right by chance now and then; a part without a gradient shows nothing.
        for _ in range(INSIDE):
            line = np.where(mask, rng.standard_normal(g.shape), 0.0)
            here, given = loss.along(role, line), float(np.vdot(g, line))
            noise = loss.rounding(role, line)
            bound = tolerance * max(float(np.linalg.norm(g[mask])), abs(here))
            agrees = abs(here - given) <= bound + noise
            seen = seen or max(abs(here), abs(given)) > 10 * noise
            if not agrees:
                break
        looked.append(PartCheck(name, here, given, agrees, seen))
    return tuple(looked)


def parts_of(
    model: Model, role: str, shape: Sequence[int], padding: Collection[int] = ()
) -> dict[str, Array]:
    """Return {name: mask of the weight} of its experts, heads or key-value heads.

    Other weights are cut into eight ranges of rows. In the token table and in the head the rows of
    `padding`, the ids of a batch that stand at padding alone, are a part of their own.
    """
    hp, name = model.hyper, split_key(role)[1]
    heads = {
        "attn_q": ("head", int(hp["n_heads"]), 0),
        "attn_k": ("kv head", int(hp["n_kv_heads"]), 0),
        "attn_v": ("kv head", int(hp["n_kv_heads"]), 0),
        "attn_output": ("head", int(hp["n_heads"]), 1),
    }
    stem = name.rpartition(".")[0]
    word, count, axis = heads.get(stem, ("rows", 0, 0))
    if "_exps" in name:
        word, count, axis = "expert", shape[0], 0
    if not count or len(shape) <= axis or shape[axis] % count:
        word, count, axis = "rows", min(8, shape[0]), 0
    edges = np.linspace(0, shape[axis], count + 1).astype(int)
    found = {}
    for number, (start, stop) in enumerate(pairwise(edges)):
        mask = np.zeros(tuple(shape), bool)
        mask[(slice(None),) * axis + (slice(start, stop),)] = True
        label = f"{word} {number}" if word != "rows" else f"rows {start} to {stop - 1}"
        found[label] = mask
    if name in _BY_TOKEN and padding:
        rows = np.zeros(tuple(shape), bool)
        rows[[*padding]] = True
        found = {label: mask & ~rows for label, mask in found.items()}
        found["the rows of padding"] = rows
    return {label: mask for label, mask in found.items() if mask.any()}
