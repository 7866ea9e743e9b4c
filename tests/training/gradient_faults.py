"""Gradients with one mistake each, and gradients that are right, beside those computed here."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.model import open_model
from aprfmt.training.parameters import pair_parameters
from aprfmt.training.reference_gradients import BatchNumbers
from aprfmt.training.report import StepReport
from aprfmt.training.step import explain_step
from tests.training.steps import (
    DOWN,
    HEAD,
    LR,
    Q1,
    WD,
    Make,
    Values,
    adamw,
    clip_rows,
    gradients,
    rounded,
    save,
    save_arrays,
    sgd,
    torch_steps,
    weights,
)

ALL = 21
K0, O1 = "model.layers.0.self_attn.k_proj.weight", "model.layers.1.self_attn.o_proj.weight"


@dataclass
class Computed:
    """Gradients as `aprfmt.inference` gives them, from a list that is known."""

    values: Values
    names: dict[str, str]  # role key -> stored name
    loss: float = 3.5
    how: str = "torch:cpu:float64"
    scored: int = 9

    @cached_property
    def keys(self) -> Collection[str]:
        """The roles."""
        return tuple(self.names)

    def gradient(self, key: str) -> NDArray[Any]:
        """Return one of them, float64."""
        return self.values[self.names[key]].astype(np.float64)

    def gradient_near(self, key: str, given: NDArray[Any]) -> NDArray[Any]:
        """Return the gradient: no token is padding."""
        return self.gradient(key)

    def rounding(self, key: str) -> float | None:
        """Return None: nothing was measured."""
        return None


@dataclass(frozen=True)
class GradientFault:
    """A mistake: what makes the trainer's gradients of the right ones, and what it is called.

    `optimizer` and `state` are what is said of the optimizer.
    """

    name: str
    cause: str
    make: Callable[[Values], Values]
    tensors: int = ALL
    level: str = "confirmed"
    says: str = ""
    optimizer: str | None = None
    state: Callable[[], Values] | None = None


@dataclass(frozen=True)
class Setting:
    """What else is said of the batch, by its numbers."""

    facts: BatchNumbers = field(
        default_factory=lambda: BatchNumbers({"labels / samples": 7.0}, frozenset(range(30)))
    )


SIZE = 100.0  # of all gradients: their norm is then above what trainers clip to


def right_gradients() -> Values:
    """Return the gradients that are computed here."""
    return {name: g * np.float32(SIZE) for name, g in gradients(1).items()}


def report_of(
    folder: Path,
    given: Values,
    encoding: str = "F32",
    right: Values | None = None,
    trained_in: str | None = None,
    optimizer: str | None = None,
    state: Values | None = None,
) -> StepReport:
    """Return what is said of gradients that a trainer gave for the tiny model.

    `right` are those of a model whose head is the table of tokens. `optimizer` and `state` are what
    is said of the optimizer.
    """
    folder.mkdir(exist_ok=True)
    before = save(folder / "before", weights(), encoding, tied=right is not None)
    with open_model(before) as model:
        names = {row.key: row.names[0] for row in pair_parameters(model, None).rows}
    grads = save_arrays(folder / "grads.npz", given)
    computed = Computed(right_gradients() if right is None else right, names)
    kept = None if state is None else save_arrays(folder / "state.npz", state)
    return explain_step(
        before,
        grads=(grads,),
        computed=computed,
        facts=Setting().facts,
        trained_in=trained_in,
        optimizer=optimizer,
        optimizer_state=kept,
    )


def times(factor: float, *names: str) -> Callable[[Values], Values]:
    """Return what scales some gradients, all where none is named."""
    return lambda g: {n: v * (factor if not names or n in names else 1.0) for n, v in g.items()}


def with_one(
    name: str, change: Callable[[NDArray[Any]], NDArray[Any]]
) -> Callable[[Values], Values]:
    """Return what changes one gradient."""
    return lambda g: g | {name: np.ascontiguousarray(change(g[name].copy()))}


def to_norm(bound: float, up: bool = False) -> Callable[[Values], Values]:
    """Return what scales each gradient down to a norm, by its own; smaller ones up to it, too."""

    def scale(g: Values) -> Values:
        norms = {n: float(np.linalg.norm(v.astype(np.float64))) for n, v in g.items()}
        return {n: v * np.float32(bound / norms[n] if up else min(1.0, bound / norms[n]))
                for n, v in g.items()}  # fmt: skip

    return scale


def state_of(make: Make) -> Callable[[], Values]:
    """Return what makes an optimizer's state of after one step, whose gradients are others."""
    return lambda: torch_steps(make, 1, grads=lambda _: gradients(2))[1]


def by_order(g: Values) -> Values:
    """Return gradients that each have a factor of their own."""
    return {n: v * np.float32(1 + 0.1 * (1 + at)) for at, (n, v) in enumerate(g.items())}


def clipped_to(bound: float, size: Callable[[NDArray[Any]], float]) -> Callable[[Values], Values]:
    """Return what clips all gradients by a number of all their elements, [n]."""
    return lambda g: times(
        bound / size(np.concatenate([v.reshape(-1).astype(np.float64) for v in g.values()]))
    )(g)


def without_head(values: NDArray[Any]) -> NDArray[Any]:
    """Return a gradient whose third head has none."""
    values[32:48] = 0
    return values


def without_columns(values: NDArray[Any]) -> NDArray[Any]:
    """Return a gradient of the attention's output whose second head has none."""
    values[:, 16:32] = 0
    return values


def without_some(values: NDArray[Any]) -> NDArray[Any]:
    """Return a gradient whose first rows have none."""
    values[:3] = 0
    return values


def noisy(share: float) -> Callable[[Values], Values]:
    """Return what adds rounding to every gradient."""

    def add(g: Values) -> Values:
        rng = np.random.default_rng(7)
        return {n: (v * (1 + rng.normal(0, share, v.shape))).astype(np.float32)
                for n, v in g.items()}  # fmt: skip

    return add


GRADIENT_FAULTS = (
    GradientFault("zero", "gradient_zero", with_one(Q1, np.zeros_like), 1),
    GradientFault("sign", "gradient_sign", times(-1.0)),
    GradientFault("accumulation", "gradient_factor", times(0.25), says="1/4"),
    GradientFault("loss scale", "gradient_factor", times(65536.0), says="loss scale"),
    GradientFault(
        "samples for labels",
        "gradient_factor",
        times(7.0),
        level="explained",
        says="labels / samples",
    ),
    GradientFault("one layer", "gradient_factor", times(0.5, K0, DOWN), 2, says="1/2"),
    GradientFault("a factor near one", "gradient_factor", times(1.0005), says="1.0005 times"),
    GradientFault(
        "clipped by own norms", "clip_by_tensor", to_norm(1.0), 15, "explained", "norm to 1,"
    ),
    GradientFault(
        "scaled by own norms",
        "clip_by_tensor",
        to_norm(1.0, True),
        level="explained",
        says="scaled to the norm 1",
    ),
    GradientFault(
        "a factor for each", "gradient_factor", by_order, level="explained", says="21 factors"
    ),
    GradientFault(
        "by own norms, where the norm of all is stated",
        "clip_by_tensor",
        to_norm(1.0),
        15,
        optimizer="sgd:lr=0.5,clip=1",
    ),
    GradientFault(
        "clipped by rows", "clip_by_tensor", clip_rows, level="explained", says="to 0.01 of"
    ),
    GradientFault(
        "by rows, where the norm of all is stated",
        "clip_by_tensor",
        clip_rows,
        says="AGC",
        optimizer="sgd:lr=0.5,clip=1",
    ),
    GradientFault(
        "by the largest element, where the norm is stated",
        "clip_other_norm",
        clipped_to(0.05, lambda x: float(np.abs(x).max())),
        optimizer="sgd:lr=0.5,clip=0.05",
    ),
    GradientFault(
        "by a norm that two ranks of equal gradients added up",
        "clip_by_part",
        clipped_to(1.0, lambda x: 2**0.5 * float(np.linalg.norm(x))),
        optimizer="sgd:lr=0.5,clip=1",
        says="all counted 2 times",
    ),
    GradientFault(
        "by two norms added up, to half of the stated one",
        "clip_by_part",
        clipped_to(1.0, lambda x: 2 * float(np.linalg.norm(x))),
        optimizer="sgd:lr=0.5,clip=1",
        level="explained",
        says="or by the norm of all to 0.5, and not to the stated 1",
    ),
    GradientFault(
        "clipped to a usual bound that is not the stated one",
        "gradient_factor",
        clipped_to(0.5, lambda x: float(np.linalg.norm(x))),
        optimizer="sgd:lr=0.5,clip=3.7",
    ),
    GradientFault(
        "by value, where the norm is stated",
        "clip_by_value",
        lambda g: {n: np.clip(v, -0.01, 0.01) for n, v in g.items()},
        optimizer="sgd:lr=0.5,clip=0.01",
    ),
    GradientFault(
        "of the step before",
        "gradient_stale",
        lambda g: gradients(2),
        optimizer=f"adamw:lr={LR},wd={WD},step=2",
        state=state_of(adamw),
    ),
    GradientFault(
        "not set to zero",
        "gradient_not_zeroed",
        lambda g: {n: v + gradients(2)[n] for n, v in g.items()},
        optimizer="sgd:lr=0.5,momentum=0.9,step=2",
        state=state_of(partial(sgd, momentum=0.9)),
    ),
    GradientFault("transposed", "gradient_transposed", with_one(DOWN, lambda g: g.T), 1),
    GradientFault("a head", "gradient_part", with_one(Q1, without_head), 1, says="head 2: none"),
    GradientFault("a head of the output", "gradient_part", with_one(O1, without_columns), 1),
    GradientFault("rows", "gradient_rows", with_one(HEAD, without_some), 1),
    GradientFault("another order", "", with_one(Q1, lambda g: g[::-1]), 1, "located"),
)
GRADIENT_INNOCENTS: dict[str, tuple[Callable[[Values], Values], str]] = {
    "as computed": (lambda g: g, "F32"),
    "float32": (noisy(1e-5), "F32"),
    "bfloat16": (noisy(1e-2), "BF16"),
    "saved in bfloat16": (lambda g: {n: rounded(v) for n, v in g.items()}, "F32"),
    "after clipping to 1": (clipped_to(1.0, lambda x: float(np.linalg.norm(x))), "F32"),
    "after clipping by the largest element": (
        clipped_to(0.05, lambda x: float(np.abs(x).max())), "F32"),
    "after clipping by the sum of sizes": (
        clipped_to(10.0, lambda x: float(np.abs(x).sum())), "F32"),
}  # fmt: skip
