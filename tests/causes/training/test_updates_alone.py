"""Every hypothesis about an update is asked about one matrix that torch's optimizers stepped.

Each row is a step that departs in one thing from the stated recipe. What is expected is every
sentence that is true of it, of all rows of the table: no other statement may give the weights.
Seen red: a guess left out, a bound moved, a rate exchanged, the wrong moments, in each module.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from aprfmt.causes.training import momentum
from aprfmt.causes.training.clipping import (
    CLIPS,
    Clipping,
    scaled_bound,
    tensor_clipping,
    value_clipping,
)
from aprfmt.causes.training.frozen_parameters import _must_move, guess_cut_shard
from aprfmt.causes.training.optimizers import Moments, parse_recipe
from aprfmt.causes.training.other_weights import guess_other_weights
from aprfmt.causes.training.step_case import StepCase
from aprfmt.causes.training.step_size import AVERAGE
from aprfmt.causes.training.table import UPDATES

Array = NDArray[Any]
LR, WD = 2e-4, 0.1
ROWS, COLUMNS = 24, 40
UNUSED = slice(18, 24)  # rows of no token in the batch: their gradient is zero
STATED = f"adamw:lr={LR},step=1"


def weight() -> Array:
    """Return the weights before the first step, float32."""
    return np.random.default_rng(1).normal(0, 0.02, (ROWS, COLUMNS)).astype(np.float32)


def gradient(step: int) -> Array:
    """Return the gradient of a step; some elements are as small as epsilon."""
    rng = np.random.default_rng(100 + step)
    found = rng.normal(0, 1e-3, (ROWS, COLUMNS)) * 10.0 ** -rng.uniform(0, 4, (ROWS, COLUMNS))
    found[UNUSED] = 0
    return found.astype(np.float32)


def stepped(
    rule: str,
    settings: Mapping[str, Any],
    steps: int = 1,
    *,
    change: Callable[[Array], Array] = lambda gradient: gradient,
    start: Array | None = None,
    dtype: str = "float32",
) -> tuple[Array, Array, list[dict[str, Array]]]:
    """Return (before, after) of the last step of torch's optimizer, and its states after each."""
    torch = pytest.importorskip("torch", reason="NOT-RUN: torch is not installed")
    kind = getattr(torch, dtype)
    first = torch.from_numpy((weight() if start is None else start).copy()).to(kind)
    held = torch.nn.Parameter(first)
    if rule not in ("SparseAdam", "Muon"):
        settings = {**settings, "foreach": False}
    optimizer = getattr(torch.optim, rule)([held], **settings)
    states: list[dict[str, Array]] = []
    before = held.detach().clone()
    for step in range(1, steps + 1):
        before = held.detach().clone()
        given = torch.from_numpy(change(gradient(step)).astype(np.float32)).to(kind)
        if rule == "SparseAdam":
            rows = torch.arange(UNUSED.start)
            given = torch.sparse_coo_tensor(
                rows[None], given[rows], given.shape, check_invariants=True
            )
        held.grad = given
        optimizer.step()
        state = optimizer.state.get(held, {})
        states.append(
            {
                key: torch.as_tensor(value).detach().double().numpy().copy()
                for key, value in state.items()
                if value is not None
            }
        )
    return before.float().numpy(), held.detach().float().numpy(), states


def moments_of(state: Mapping[str, Array], step: int, *, after: bool) -> Moments:
    """Return torch's state of a parameter as moments."""
    first = state.get("exp_avg", state.get("momentum_buffer"))
    second = state.get("exp_avg_sq")
    return Moments(
        None if first is None else first.reshape(-1),
        None if second is None else second.reshape(-1),
        step,
        after,
    )


def case_of(
    made: tuple[Array, Array, list[dict[str, Array]]],
    knows: str,
    *,
    step: int = 1,
    encoding: str = "F32",
    vector: bool = False,
    others: Mapping[str, float] | None = None,
) -> StepCase:
    """Return the elements of a step with what is known: "gradient", "before", "after", "signs"."""
    before, after, states = made
    known = knows.split()
    moments = None
    if "after" in known:
        moments = moments_of(states[-1], step, after=True)
    elif "before" in known:
        moments = moments_of(states[-2], step - 1, after=False)
    return StepCase(
        "k", vector, before.astype(np.float64).reshape(-1), after.astype(np.float64).reshape(-1),
        (encoding, encoding), np.repeat(np.arange(ROWS), COLUMNS),
        gradient=gradient(step).astype(np.float64).reshape(-1) if "gradient" in known else None,
        moments=moments, signs="signs" in known, shape=before.shape, others=others or {},
    )  # fmt: skip


def true_of(case: StepCase, stated: str) -> set[str]:
    """Return what the table says of a case that is right, each with its cause."""
    recipe = parse_recipe(stated)
    guesses = [guess for row in UPDATES for guess in row.find(case, recipe)]
    return {f"{guess.cause}: {guess.says}" for guess in guesses if guess.right(case)}


def by_hand(rule: Callable[[Array, Array], Array]) -> Any:
    """Return a first step in float64 of a rule of weight and gradient, with what torch gives."""
    before = weight().astype(np.float64)
    after = before + rule(before, gradient(1).astype(np.float64))
    return before.astype(np.float32), after.astype(np.float32), [{}]


L = LR * 1e4  # a rate whose SGD step is as long as Adam's
OWN = float(np.linalg.norm(gradient(1).astype(np.float64)))
NORM = 3 * OWN  # of this gradient and all others
CLIP = 0.25 * OWN  # below both
B1, B2, EPS = 0.9, 0.999, 1e-8
ADAM = {"lr": LR, "weight_decay": 0.0}
DECAYS = {"lr": LR, "weight_decay": WD}
MOMENTUM = {"lr": L, "momentum": 0.9}
COARSE = (weight().view(np.uint32) & 0xFFFF0000).view(np.float32)  # exact in bfloat16


def sgd(
    settings: Mapping[str, Any], stated: str, knows: str = "gradient", steps: int = 3
) -> tuple[StepCase, str]:
    """Return a step of torch's SGD and what is stated of it beside the rate."""
    made = stepped("SGD", settings, steps)
    return case_of(made, knows, step=steps), f"sgd:lr={L}{stated}"


def unlike(rule: str, settings: Mapping[str, Any], stated: str, knows: str, **more: Any) -> Any:
    """Return a first step of torch's optimizer and what is stated of it."""
    return case_of(stepped(rule, settings), knows, **more), stated


def clipped(how: Callable[[Array], Array], stated: str = f"clip={CLIP!r}") -> tuple[StepCase, str]:
    """Return SGD's step of a gradient that was changed, with the norms that are known."""
    made = stepped("SGD", {"lr": L}, change=how)
    others = {"norm": NORM, "own_norm": OWN}
    return case_of(made, "gradient", others=others), f"sgd:lr={L},{stated}"


def third(rule: Callable[[Array, Array], Array]) -> tuple[StepCase, str]:
    """Return a third step that is made of Adam's moments by a rule, and its state is known."""
    before, _, states = stepped("AdamW", ADAM, 3)
    made = before + rule(states[-1]["exp_avg"], states[-1]["exp_avg_sq"])
    return (case_of((before, made.astype(np.float32), states), "after", step=3), f"adamw:lr={LR}")


def corrected(first: Array, second: Array, step: int) -> Array:
    """Return Adam's step, its moments corrected for a number of steps."""
    found: Array = -LR * (first / (1 - B1**step)) / (np.sqrt(second / (1 - B2**step)) + EPS)
    return found


def third_of_older(rate: float) -> tuple[StepCase, str]:
    """Return a third step whose second moment is corrected for a rate; the state is of before."""
    before, _, states = stepped("AdamW", ADAM, 3)
    m, v = states[-1]["exp_avg"], states[-1]["exp_avg_sq"]
    made = before - LR * (m / (1 - B1**3)) / (np.sqrt(v / (1 - rate**3)) + EPS)
    return (
        case_of((before, made.astype(np.float32), states), "gradient before", step=3),
        f"adamw:lr={LR}",
    )


def resumed(
    first: float = 1.0, second: float = 1.0, step: int = 3, kept: str = "float64", own: bool = True
) -> tuple[StepCase, str]:
    """Return a third step whose older moments were multiplied, or rounded, or not advanced."""
    torch = pytest.importorskip("torch", reason="NOT-RUN: torch is not installed")
    before, _, states = stepped("AdamW", ADAM, 3)
    m, v, g = states[1]["exp_avg"], states[1]["exp_avg_sq"], gradient(3).astype(np.float64)
    if own:
        m, v = B1 * m * first + (1 - B1) * g, B2 * v * second + (1 - B2) * g * g
    v = torch.from_numpy(v).float().to(getattr(torch, kept)).double().numpy()
    made = (before + corrected(m, v, step)).astype(np.float32)
    return case_of((before, made, states), "gradient before", step=3), f"adamw:lr={LR}"


def with_epsilon(eps: float) -> tuple[StepCase, str]:
    """Return a third step whose epsilon is another number."""
    return third(lambda m, v: -LR * (m / (1 - B1**3)) / (np.sqrt(v / (1 - B2**3)) + eps))


def counted_later(step: int) -> tuple[StepCase, str]:
    """Return a third step whose moments were corrected for another number of steps."""
    return third(lambda m, v: corrected(m, v, step))


def counted(step: int) -> tuple[StepCase, str]:
    """Return a first step of Adam whose moments were corrected as at a later one."""
    made = by_hand(lambda w, g: corrected((1 - B1) * g, (1 - B2) * g * g, step))
    return case_of(made, "gradient"), STATED


def decayed(share: float, knows: str) -> tuple[StepCase, str]:
    """Return a first step of AdamW whose weights shrink by a share."""
    made = by_hand(lambda w, g: -LR * g / (np.abs(g) + EPS) - share * w)
    return case_of(made, knows), f"{STATED},wd={WD}"


def in_adam(g: Array) -> Array:
    """Return Adam's first step, without decay."""
    found: Array = -LR * g / (np.abs(g) + EPS)
    return found


def in_lion(g: Array) -> Array:
    """Return Lion's first step, without decay."""
    return -LR * np.sign(g)


def in_sgd(g: Array) -> Array:
    """Return SGD's step, without decay."""
    return -L * g


def decayed_last(step: Callable[[Array], Array], stated: str) -> tuple[StepCase, str]:
    """Return a first step whose weights decay by 2 times the rate after it."""
    made = by_hand(lambda w, g: (w + step(g)) * (1 - LR * 2) - w)
    return case_of(made, "gradient"), stated


def other_rate(factor: float, wd: float) -> tuple[StepCase, str]:
    """Return a first step of AdamW at a rate that is nearly the stated one."""
    made = by_hand(lambda w, g: factor * (in_adam(g) - LR * wd * w))
    return case_of(made, "gradient"), f"{STATED},wd={wd}"


def scaled(factor: float) -> tuple[StepCase, str]:
    """Return AdamW's step of a gradient that was multiplied."""
    return case_of(stepped("AdamW", ADAM, change=lambda g: g * factor), "gradient"), STATED


def partly(still: Any) -> tuple[StepCase, str]:
    """Return AdamW's step, some rows as they were."""
    before, after, states = stepped("AdamW", ADAM)
    after[still] = before[still]
    return case_of((before, after, states), "gradient"), STATED


def transposed() -> tuple[StepCase, str]:
    """Return the step of a gradient that was written by columns."""
    turned = gradient(1).T.reshape(ROWS, COLUMNS).astype(np.float64)
    made = by_hand(lambda w, g: -LR * turned / (np.abs(turned) + EPS))
    return case_of(made, "gradient"), STATED


def lion(b1: float, knows: str) -> tuple[StepCase, str]:
    """Return a later step of Lion (Chen et al. 2023) with a momentum of its own."""
    held = np.random.default_rng(5).normal(0, 1e-4, (ROWS, COLUMNS))
    g = gradient(1).astype(np.float64)
    made = by_hand(lambda w, g: -LR * np.sign(b1 * held + (1 - b1) * g) - LR * WD * w)
    states = [{"exp_avg": held}, {"exp_avg": 0.99 * held + 0.01 * g}]
    return case_of((*made[:2], states), knows), f"lion:lr={LR},wd={WD}"


def in_bfloat16(lr: float, wd: float, knows: str) -> tuple[StepCase, str]:
    """Return a step of torch's AdamW on weights that are held in bfloat16."""
    settings = {"lr": lr, "weight_decay": wd}
    made = stepped("AdamW", settings, start=COARSE, dtype="bfloat16")
    return case_of(made, knows, encoding="BF16"), f"adamw:lr={lr},wd={wd},step=1"


ONCE = CLIP / (NORM + 1e-6)
ADAMW = f"{STATED},wd={WD}"
NOT_NESTEROV = "momentum: the momentum is not Nesterov's"
COUPLED = "decay_coupled: the decay is added to the gradient (coupled, as Adam's L2 regularization)"
STEPPED = (
    "decay_coupled: weights without a gradient do not shrink, or move by whole steps towards zero: "
    "the decay is added to the gradient, as Adam's L2 regularization is"
)
APART = "decay_coupled: the decay is taken from the weight (decoupled, as AdamW does)"
LAST = (
    "decay_order: the weight decays after its step and not before it: the step, too, decays by "
    "0.0004 of itself"
)
APART_LAST = "decay_coupled: the decay is taken from the weight (decoupled), after its step"
NONE = f"decay_missing: no decay; {LR * WD:g} of the weight is stated (lr times wd)"
STALE = "stale_moments: the moments do not have this step's gradient"
AS_TENSORFLOW = (
    "epsilon_place: epsilon is added before the second moment is corrected, as TensorFlow does"
)
PLAIN = (
    "other_optimizer: the update is the gradient times a rate, as plain gradient descent (SGD) "
    "makes it; stated is adamw"
)
TOO_COARSE = "update_rounded_away: BF16 rounds most of the step away"
DEPARTURES: dict[str, tuple[Callable[[], tuple[StepCase, str]], tuple[str, ...]]] = {
    "upwards": (
        lambda: sgd({"lr": L, "maximize": True}, "", steps=1),
        ("step_sign: the step goes up the gradient",),
    ),
    "no Nesterov": (
        lambda: sgd(MOMENTUM, ",momentum=0.9,nesterov=1", "gradient after"), (NOT_NESTEROV,)
    ),
    "no Nesterov, state before": (  # whose buffer and gradient are the same number
        lambda: sgd(MOMENTUM, ",momentum=0.9,nesterov=1", "gradient before"), (NOT_NESTEROV, STALE)
    ),
    "no Nesterov, state alone": (
        lambda: sgd(MOMENTUM, ",momentum=0.9,nesterov=1", "after"), (NOT_NESTEROV,)
    ),
    "Nesterov": (
        lambda: sgd({**MOMENTUM, "nesterov": True}, ",momentum=0.9", "gradient before"),
        ("momentum: the momentum is Nesterov's",),
    ),
    "Nesterov, state alone": (
        lambda: sgd({**MOMENTUM, "nesterov": True}, ",momentum=0.9", "after"), ()
    ),
    "damped": (
        lambda: sgd({**MOMENTUM, "dampening": 0.9}, ",momentum=0.9", "gradient before"),
        ("momentum: the gradient is damped by the momentum, 0.9",),
    ),
    "no momentum": (
        lambda: (
            case_of((*stepped("SGD", {"lr": L}, 3)[:2], stepped("SGD", MOMENTUM, 3)[2]),
                    "gradient before", step=3),
            f"sgd:lr={L},momentum=0.9",
        ),
        ("momentum: the step is the gradient without its momentum",),
    ),
    "a tenth of the rate": (
        lambda: unlike("AdamW", {**DECAYS, "lr": LR / 10}, ADAMW, "gradient"),
        ("step_factor: step and decay are 1/10 of the expected ones: the rate is 2e-05, "
         "stated is 0.0002",),
    ),
    "twice the rate": (
        lambda: unlike("AdamW", {**DECAYS, "lr": LR * 2}, ADAMW, "gradient"),
        ("step_factor: step and decay are 2 times the expected ones: the rate is 0.0004, "
         "stated is 0.0002", "step_twice: the step was taken twice, its decay too"),
    ),
    "twice, and the state has the rate": (
        lambda: unlike("AdamW", {**DECAYS, "lr": LR * 2}, ADAMW, "gradient", others={"rate": LR}),
        ("step_twice: the step was taken twice, its decay too",),
    ),
    "twice, and the state has twice the rate": (
        lambda: unlike(
            "AdamW", {**DECAYS, "lr": LR * 2}, ADAMW, "gradient", others={"rate": 2 * LR}),
        ("step_factor: step and decay are 2 times the expected ones: the rate is 0.0004, "
         "stated is 0.0002",),
    ),
    "half of SGD's": (
        lambda: sgd({"lr": L / 2}, "", steps=1),
        ("step_factor: the step is 1/2 of the expected one",),
    ),
    "1.7 times SGD's": (
        lambda: sgd({"lr": L * 1.7}, "", steps=1),
        ("step_factor: the step is 1.7 times the expected one",),
    ),
    "not clipped by value": (
        lambda: clipped(lambda g: g, "clip_value=0.001"),
        ("clip_missing: no element was clipped, and some are above the bound 0.001",),
    ),
    "clipped twice": (
        lambda: clipped(lambda g: g * ONCE**2),
        (f"clip_twice: the gradients were clipped twice, by {ONCE:.4g} each time",
         f"step_factor: the step is {ONCE**2:.3g} times the expected one, as of clipping to "
         f"{CLIP:g} by a norm of {CLIP / ONCE**2:.4g}; that of all is {NORM:.4g}{AVERAGE}"),
    ),
    "clipped by its own norm": (
        lambda: clipped(lambda g: g * CLIP / (OWN + 1e-6)),
        # Nine gradients of one norm: a third of the norm of all is that of each.
        (f"clip_by_tensor: each gradient was clipped by its own norm to {CLIP:g}",
         f"clip_by_part: the gradients were clipped by the norm of 1/9 of all, {NORM / 3:.4g}, to "
         f"{CLIP:g}, and not by that of all, {NORM:.4g}"),
    ),
    "clipped by value": (
        lambda: clipped(lambda g: np.clip(g, -1e-3, 1e-3)),
        ("clip_by_value: each element was clipped to 0.001, not the norm of all",),
    ),
    "no decay": (lambda: unlike("AdamW", ADAM, ADAMW, "gradient"), (NONE,)),
    "no decay, sizes": (lambda: unlike("AdamW", ADAM, ADAMW, "signs"), (NONE,)),
    "Adam for AdamW": (lambda: unlike("Adam", DECAYS, ADAMW, "gradient"), (COUPLED,)),
    "Adam for AdamW, sizes": (lambda: unlike("Adam", DECAYS, ADAMW, "signs"), (STEPPED,)),
    "AdamW for Adam": (
        lambda: unlike("AdamW", DECAYS, ADAMW.replace("adamw", "adam"), "gradient"), (APART,)
    ),
    "norms decay": (
        lambda: unlike("AdamW", DECAYS, f"{ADAMW},decay_on=matrices", "gradient", vector=True),
        ("decay_on_norms: norms or biases decay by 2e-05 of the weight",),
    ),
    **{
        f"decay last, {stated}": (partial(decayed_last, rule, stated), (says,))
        for rule, stated, says in (
            (in_adam, f"{STATED},wd=2", LAST),
            (in_lion, f"lion:lr={LR},step=1,wd=2", LAST),
            (in_adam, f"adam:lr={LR},step=1,wd=2", APART_LAST),
            (in_sgd, f"sgd:lr={L},wd={2 * LR / L}", APART_LAST),
        )
    },
    **{
        f"a rate of {factor} and {wd} of decay": (
            partial(other_rate, factor, wd),
            (f"step_factor: step and decay are {factor} times the expected ones: the rate is "
             f"{rate}, stated is 0.0002",),
        )
        for factor, rate, wd in ((0.9997, 0.0001999, 2.0), (1.0004, 0.0002001, WD))
    },
    "SparseAdam for Adam": (  # its epsilon, too
        lambda: (
            case_of(stepped("SparseAdam", {"lr": LR}, 3), "gradient before", step=3),
            f"adam:lr={LR}",
        ),
        (AS_TENSORFLOW,),
    ),
    "dense for sparse": (
        lambda: unlike("AdamW", DECAYS, f"adamw:lr={LR},wd={WD},sparse=1", "gradient"),
        ("rows_moved: rows without a gradient moved: the optimizer is dense, and sparse is "
         "stated",),
    ),
    "frozen": (
        lambda: partly(slice(None)),
        ("frozen: did not move, though its step is larger than what its type rounds away",),
    ),
    "three rows frozen": (
        lambda: partly([0, 3, 4]), ("rows_frozen: rows did not move: 0, 3, 4",)
    ),
    "eight rows frozen": (
        lambda: partly(slice(8)), ("rows_frozen: rows did not move: 0, 1, 2, 3, ...",)
    ),
    "nine rows frozen": (lambda: partly(slice(9)), ("rows_frozen: many rows did not move",)),
    "no correction": (
        lambda: third(lambda m, v: -LR * m / (np.sqrt(v) + EPS)),
        ("bias_correction: neither moment is corrected for having begun at zero",),
    ),
    "the first corrected": (
        lambda: third(lambda m, v: -LR * (m / (1 - B1**3)) / (np.sqrt(v) + EPS)),
        ("bias_correction: the first moment alone is corrected for having begun at zero, the "
         "second is not",),
    ),
    "the second corrected": (
        lambda: third(lambda m, v: -LR * m / (np.sqrt(v / (1 - B2**3)) + EPS)),
        ("bias_correction: the second moment alone is corrected for having begun at zero, the "
         "first is not", f"step_factor: the step is {1 - B1**3:.3g} times the expected one"),
    ),
    "epsilon inside": (
        lambda: third(lambda m, v: -LR * (m / (1 - B1**3)) / np.sqrt(v / (1 - B2**3) + EPS)),
        ("epsilon_place: epsilon stands inside the root",),
    ),
    "epsilon before the correction": (
        lambda: third(
            lambda m, v: -LR * (m / (1 - B1**3)) * np.sqrt(1 - B2**3) / (np.sqrt(v) + EPS)),
        (AS_TENSORFLOW,),
    ),
    "beta 1 of 0.95": (
        lambda: third(lambda m, v: -LR * (m / (1 - 0.95**3)) / (np.sqrt(v / (1 - B2**3)) + EPS)),
        ("betas: beta 1 is 0.95, stated is 0.9",
         f"step_factor: the step is {(1 - B1**3) / (1 - 0.95**3):.3g} times the expected one"),
    ),
    "beta 2 of 0.99": (
        lambda: third(lambda m, v: -LR * (m / (1 - B1**3)) / (np.sqrt(v / (1 - 0.99**3)) + EPS)),
        ("betas: beta 2 is 0.99, stated is 0.999",),
    ),
    "corrected for another beta 2": (
        lambda: third_of_older(0.95),
        ("bias_correction: the moments are made with beta 2 of 0.999, as stated, and corrected for "
         "one of 0.95",),
    ),
    "betas exchanged": (
        lambda: (
            case_of(stepped("AdamW", {**ADAM, "betas": (B2, B1)}, 3), "gradient before", step=3),
            f"adamw:lr={LR}",
        ),
        ("betas: the rates of the moments are exchanged: 0.999 and 0.9",),
    ),
    "moments of before the step": (
        lambda: resumed(step=2, own=False), (STALE,)
    ),
    "the first moment lost": (
        lambda: resumed(first=0), ("moments_lost: the first moment was zero, not the saved one",)
    ),
    "the second moment lost": (
        lambda: resumed(second=0), ("moments_lost: the second moment was zero, not the saved one",)
    ),
    "both moments lost": (
        lambda: resumed(0, 0), ("moments_lost: both moments were zero, not the saved ones",)
    ),
    "the count began anew": (
        lambda: resumed(step=1),
        ("step_count: the correction is that of step 1; the moments are of step 2",),
    ),
    "the second moment in F16": (
        lambda: resumed(kept="float16"), ("moment_rounded: the second moment is kept in F16",)
    ),
    "the second moment in BF16": (
        lambda: resumed(kept="bfloat16"), ("moment_rounded: the second moment is kept in BF16",)
    ),
    "a first step as the 33rd": (lambda: counted(33), ()),
    "the gradient of the columns": (
        transposed, ("update_transposed: the update is that of the transposed gradient",)
    ),
    "Lion with its rates exchanged": (
        lambda: lion(0.99, "gradient before"),
        ("betas: the rates of the moments are exchanged: 0.99 and 0.9",),
    ),
    "Lion upwards": (
        lambda: (
            case_of(by_hand(lambda w, g: LR * np.sign(g)), "gradient"), f"lion:lr={LR},step=1"
        ),
        ("step_sign: the step goes up the gradient",),
    ),
    "too coarse, sizes": (lambda: in_bfloat16(2e-5, WD, "signs"), (TOO_COARSE,)),
    "decay too small for the type": (
        lambda: in_bfloat16(1e-3, 1.0, "gradient"),
        ("decay_missing: no decay; 0.001 of the weight is stated (lr times wd)",
         "decay_rounded_away: BF16 rounds the decay away: 0.001 of a weight is too little"),
    ),
    **{
        f"epsilon of {eps:g}": (
            partial(with_epsilon, eps), (f"epsilon_value: epsilon is {eps:g}, stated is 1e-08",)
        )
        for eps in (1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-9, 1e-10)
    },
    **{
        f"counted {step}": (
            partial(counted_later, step),
            (f"step_count: the correction is that of step {step}; the moments are of step 3",),
        )
        for step in (1, 2, 4, 5, 10, 100, 1000)
    },
    **{
        f"a first step as the {step}th": (
            partial(counted, step),
            (f"step_count: the moments are corrected as at step {step}, and this is the first",),
        )
        for step in (2, 3, 31, 32)
    },
    **{
        f"decay of {share:g}, {knows}": (
            partial(decayed, share, knows), (f"decay_factor: the weight decays by {says}",)
        )
        for knows in ("gradient", "signs")
        for share, says in (
            (WD, "wd itself, without lr"),
            (LR * WD * 2, "twice lr times wd"),
            (LR * WD / 2, "half of lr times wd"),
            (LR * WD * 3, "6e-05; 2e-05 is stated (lr times wd)"),
        )
    },
    "plain descent for AdamW": (
        lambda: unlike("SGD", {"lr": L}, STATED, "gradient"), (PLAIN,)
    ),
    "plain descent that decays for Lion": (
        lambda: (case_of(by_hand(lambda w, g: -L * g - 0.01 * w), "gradient"),
                 f"lion:lr={LR},wd={WD},step=1"),
        ("other_optimizer: the update is the gradient times a rate, as plain gradient descent "
         "(SGD) makes it; stated is lion",),
    ),
    "Adafactor for AdamW": (
        lambda: unlike("Adafactor", {"lr": LR, "weight_decay": 0.0}, STATED, "gradient"),
        ("other_optimizer: the update is Adafactor's: the second moment has rank one; stated is "
         "adamw",),
    ),
    "Adafactor that decays for SGD": (
        lambda: unlike("Adafactor", DECAYS, f"sgd:lr={L},wd={WD}", "gradient"),
        ("other_optimizer: the update is Adafactor's: the second moment has rank one; stated is "
         "sgd",),
    ),
    **{
        f"Muon for {rule}": (
            partial(unlike, "Muon", {"lr": LR, "weight_decay": 0.0}, f"{rule},step=1", "gradient"),
            ("other_optimizer: the update is Muon's: that of the gradient made orthogonal; stated "
             f"is {rule.partition(':')[0]}",),
        )
        for rule in (f"adamw:lr={LR}", f"sgd:lr={L}", f"lion:lr={LR}")
    },
    "signs for SGD": (
        lambda: (case_of(by_hand(lambda w, g: -LR * np.sign(g)), "gradient"), f"sgd:lr={L}"),
        ("other_optimizer: the update is of one size everywhere, as Lion's is, or Adam's first; "
         "stated is sgd",),
    ),
    **{
        f"a gradient {says}": (
            partial(scaled, factor),
            (f"gradient_scaled: the optimizer had {says} the gradient that was given",
             # Below epsilon Adam's step is a rate times the gradient.
             *((PLAIN,) if factor < 1e-6 else ())),
        )
        for factor, says in (
            (2.0, "2 times"), (32.0, "32 times"), (64.0, "64 times"), (1000.0, "1000 times"),
            (0.5, "1/2 of"), (1 / 31, "1/31 of"), (2.0**-24, "1/16777216 of"),
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("label", DEPARTURES)
def test_what_the_table_says_of_a_departure_is_true_and_all(label: str) -> None:
    make, says = DEPARTURES[label]
    case, stated = make()
    fit = case.fit(parse_recipe(stated))
    assert fit is None or not fit.right
    assert true_of(case, stated) == set(says)


def right(
    rule: str, settings: Mapping[str, Any], stated: str, knows: str, steps: int
) -> tuple[StepCase, str]:
    """Return the last of some steps of torch's optimizer, as it is stated."""
    case = case_of(stepped(rule, settings, steps), knows, step=steps)
    return case, f"{stated},step={steps}"


RIGHT: dict[str, Callable[[], tuple[StepCase, str]]] = {
    **{
        f"{rule} {knows} step {steps}, {stated}": partial(
            right, rule, settings, stated, knows, steps
        )
        for rule, settings, stated in (
            ("SGD", {"lr": L}, f"sgd:lr={L}"),
            ("SGD", {**DECAYS, "lr": L}, f"sgd:lr={L},wd={WD}"),
            ("SGD", {**MOMENTUM, "nesterov": True}, f"sgd:lr={L},momentum=0.9,nesterov=yes"),
            ("SGD", {**MOMENTUM, "dampening": 0.4}, f"sgd:lr={L},momentum=0.9,dampening=0.4"),
            ("Adam", DECAYS, f"adam:learning_rate={LR},weight_decay={WD}"),
            ("AdamW", {**DECAYS, "betas": (0.8, 0.95), "eps": 1e-5},
             f"ADAMW:lr={LR},wd={WD},beta1=0.8,beta2=0.95,epsilon=1e-5"),
            ("SparseAdam", {"lr": LR}, f"adam:lr={LR},sparse=1"),
        )
        for knows, steps in (("gradient", 1), ("gradient before", 3), ("gradient after", 3))
        if not (rule == "SGD" and "momentum" not in settings and steps == 3)
    },
    "sizes of AdamW": lambda: unlike("AdamW", DECAYS, ADAMW, "signs"),
    "sizes of Adam": lambda: unlike("Adam", ADAM, f"adam:lr={LR},step=1", "signs"),
    "norms that do not decay": lambda: unlike(
        "AdamW", ADAM, f"{ADAMW},decay_on=matrices", "gradient", vector=True),
    "norms that decay": lambda: unlike(
        "AdamW", DECAYS, f"{ADAMW},decay_on=all", "gradient", vector=True),
    "clipped by value": lambda: clipped(lambda g: np.clip(g, -1e-3, 1e-3), "clip_value=1e-3"),
    "Lion, state before": lambda: lion(0.9, "gradient before"),
    "Lion, state after": lambda: lion(0.9, "gradient after"),
}  # fmt: skip


@pytest.mark.parametrize("label", RIGHT)
def test_the_stated_recipe_gives_torchs_step_and_no_neighbour_does(label: str) -> None:
    """Neither with a rate nor with a decay that is a hundredth off."""
    case, stated = RIGHT[label]()
    recipe = parse_recipe(stated)
    fit = case.fit(recipe)
    assert fit is not None and fit.right
    for field in ("lr", "decay_factor") if recipe.decays(case.vector) else ("lr",):
        if case.signs or (field == "decay_factor" and recipe.adds_decay_to_gradient):
            continue
        other = case.fit(replace(recipe, **{field: getattr(recipe, field) * 1.02}))
        assert other is not None and not other.right, field


def test_what_a_type_rounds_away_is_said_of_a_step_that_arrives_in_part() -> None:
    """The gradient gives every weight, rounded: what is wrong is the type."""
    case, stated = in_bfloat16(1e-5, WD, "gradient")
    said = {line for line in true_of(case, stated) if line.startswith("update_")}
    assert said == {TOO_COARSE}
    case, stated = in_bfloat16(1e-3, 0.0, "gradient")
    assert not {line for line in true_of(case, stated) if "rounds" in line}


OF_MOMENTS = {"bias_correction", "moments_lost", "step_count", "moment_rounded"}
OF_ADAM = {*OF_MOMENTS, "epsilon_place", "epsilon_value", "gradient_scaled"}
LACKS = {
    "sgd:lr=2.0": {*OF_ADAM, "betas", "momentum", "step_twice", "decay_coupled"},
    "sgd:lr=2.0,momentum=0.9": {*OF_ADAM, "betas", "step_twice"},
    "sgd:lr=2.0,clip=1": {*OF_ADAM, "betas", "momentum"},
    f"lion:lr={LR},step=1": {*OF_ADAM, "momentum", "clip_missing"},
    f"adamw:lr={LR},step=1": {"momentum", "clip_missing", "decay_missing", "rows_moved"},
    f"adam:lr={LR},step=1,sparse=1": {"momentum", "decay_coupled"},
}


@pytest.mark.parametrize("stated", LACKS)
def test_nothing_is_asked_of_a_rule_that_has_no_such_part(stated: str) -> None:
    case, recipe = partly([0])[0], parse_recipe(stated)
    asked = {guess.cause for row in UPDATES for guess in row.find(case, recipe)}
    assert "step_sign" in asked and asked & LACKS[stated] == set()
    sizes = replace(case, gradient=None, signs=True)
    asked = {guess.cause for row in UPDATES for guess in row.find(sizes, recipe)}
    told = {
        "step_sign",
        "epsilon_place",
        "epsilon_value",
        "frozen",
        "rows_frozen",
        "gradient_scaled",
    }
    assert asked & told == set()


@pytest.mark.parametrize("shape", [(1, 40), (40, 1), (1, 1), (2, 20), (8, 5)])
def test_a_transposed_gradient_is_told_of_matrices_alone(shape: tuple[int, int]) -> None:
    """Moments that are transposed are, too; a row or a column is its own."""
    rng = np.random.default_rng(2)
    before, first, second = rng.normal(size=(3, *shape))
    first, second = first * 1e-3, second**2 * 1e-6

    def turned(values: Array) -> Array:
        return values.T.reshape(shape)

    after = before + corrected(turned(first), turned(second), 3)
    case = StepCase(
        "k", False, before.reshape(-1), after.reshape(-1), ("F64", "F64"),
        np.repeat(np.arange(shape[0]), shape[1]), shape=shape,
        moments=Moments(first.reshape(-1), second.reshape(-1), 3),
    )  # fmt: skip
    said = {line for line in true_of(case, f"adamw:lr={LR}") if line.startswith("update_tr")}
    assert bool(said) == (1 not in shape)


@pytest.mark.parametrize("scale", [2.0**7, 2.0**16, 2.0**24])
@pytest.mark.parametrize("bound", [1.0, 0.3])
def test_a_bound_over_a_loss_scale_is_told_from_any_other(bound: float, scale: float) -> None:
    assert scaled_bound(bound / scale, CLIPS) == (bound, scale)
    assert scaled_bound(bound / scale * (1 + 9e-6), CLIPS) == (bound, scale)
    for other in (bound / scale * (1 + 2e-5), bound / scale * (1 - 2e-5), 0.77 / scale):
        assert scaled_bound(other, CLIPS) is None
    assert scaled_bound(0.5 / scale, (0.5, 1.0)) == (  # one is likelier than a half
        (1.0, 2 * scale) if scale < 2.0**24 else (0.5, scale)
    )


WRITTEN = (
    (float(np.float32(0.03)), "each element was clipped to 0.03"),
    (float(np.float32(0.0013)), "each element was clipped to 0.0013"),
    (0.00390625 * 3, None),  # a number that nobody writes
    (1.0 / 2**10, "each element was clipped to 1 while a loss scale of 1024 was on"),
    (0.010009765625, "each element was clipped to 0.01"),  # in bfloat16
    (0.0100021362304688, "each element was clipped to 0.01"),  # in float16
)


@pytest.mark.parametrize(("bound", "says"), WRITTEN)
def test_a_clipping_by_value_is_a_number_that_somebody_wrote(
    bound: float, says: str | None
) -> None:
    computed = np.concatenate(
        [np.linspace(-0.9, 0.9, 31) * bound, [bound * 4] * 5, [-bound * 9] * 3]
    )

    def pair(given: Array) -> Any:
        near = partial(np.allclose, rtol=1e-6, atol=0)
        return SimpleNamespace(given=given, computed=computed, near=near)

    right = np.clip(computed, -bound, bound)
    found = value_clipping({"k": pair(right), "other": pair(right)})
    assert (found and found.says) == says
    inside = replace(Clipping("norm", 0.5), scale=4.0)
    assert (
        inside.says == "the norm of all gradients was clipped to 0.5 while a loss scale of 4 was on"
    )
    wrong = right.copy()
    wrong[3] *= 1.01
    assert value_clipping({"k": pair(right), "other": pair(wrong)}) is None
    few: Any = computed[:-1]  # seven at the bound say nothing
    seven: Any = SimpleNamespace(given=np.clip(few, -bound, bound), computed=few, near=np.allclose)
    assert value_clipping({"k": seven}) is None
    assert value_clipping({}) is None
    assert value_clipping({"k": pair(np.zeros_like(computed))}) is None
    assert value_clipping({"k": pair(np.where(right > 0, np.inf, right))}) is None


@pytest.mark.parametrize("encoding", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("times", [0.5, 1.0, 1.0 + 2.0**-20, 2.0])
def test_a_step_must_be_seen_that_is_longer_than_a_spacing(times: float, encoding: str) -> None:
    """One exactly as long may be rounded away; numpy says how far the next number is."""
    kind = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}[encoding]
    before = np.array([1.0, 1.5, 0.25, -3.0])
    spacing = np.abs(np.spacing(before.astype(kind)).astype(np.float64))
    rate = 2.0**-10
    signs = np.array([1, -1, 1, -1])
    for which in ([True] * 4, [False, True, False, False]):
        gradient = np.where(which, signs * spacing * times / rate, 0.0)
        case = StepCase(
            "k", False, before, before, (encoding, encoding), np.arange(4), gradient=gradient
        )
        found = _must_move(case, parse_recipe(f"sgd:lr={rate!r}"))
        if times > 1:
            assert found is not None and found.tolist() == list(which)
        else:
            assert found is None


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_is_used_otherwise_in_so_many_ways(nesterov: bool, gradient: bool) -> None:
    """Without a gradient only what the weights alone show is asked."""
    stated = parse_recipe("sgd:lr=0.1,momentum=0.9")
    names = ("nesterov", "momentum", "dampening", "growing")
    for dampening in (0.0, 0.5):
        recipe = replace(stated, nesterov=nesterov, dampening=dampening)
        case: Any = SimpleNamespace(gradient=np.ones(1) if gradient else None)
        asked = [
            {name: getattr(one.recipe, name) for name in names}
            for one in momentum.guess_momentum(case, recipe)
        ]
        own = dict(zip(names, (nesterov, 0.9, dampening, False), strict=True))
        expected = [own | {"nesterov": not nesterov}] if gradient or nesterov else []
        expected += [own | {"momentum": 0.0}, own | {"growing": True}] if gradient else []
        expected += [own | {"dampening": 0.9}] if not dampening else []
        assert asked == expected
        assert not list(momentum.guess_momentum(case, replace(recipe, momentum=0.0)))


# --- gradients that were scaled each by its own norm ----------------------------------------------


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("bound", [0.01, 1.0, 40.0])
def test_gradients_that_have_one_norm_were_clipped_each_by_its_own(
    bound: float, coarse: bool
) -> None:
    """Within a share of the bound, whatever its size; those below it are as they were."""
    directions = {
        name: np.random.default_rng(n).normal(size=(4, 5)) for n, name in enumerate("abcde")
    }
    sizes = dict(zip(directions, (2.0, 3.0, 5.0, 7.0, 0.5), strict=True))
    computed = {
        name: made * (sizes[name] * bound / float(np.linalg.norm(made)))
        for name, made in directions.items()
    }

    def clipped(**norms: float) -> Any:
        """Return what is said where `norms` are given, in bounds; the others as clipped."""
        cases: Any = {}
        for name, right in computed.items():
            size = norms.get(name, min(1.0, sizes[name])) * bound / float(np.linalg.norm(right))
            cases[name] = SimpleNamespace(
                given=right * size,
                computed=right,
                coarse=coarse,
                right=abs(size - 1) < 1e-9,
                near=lambda x, y: bool(np.linalg.norm(x - y) <= 0.02 * np.linalg.norm(y)),
            )
        return tensor_clipping(cases)

    says = f"each gradient was clipped by its own norm to {bound:.4g}"
    assert clipped() == (says, ("a", "b", "c", "d"))
    room = 1e-2 if coarse else 2e-4
    assert clipped(a=1 - 0.9 * room) == (says, ("a", "b", "c", "d"))
    assert clipped(a=1 - 1.1 * room) is None and clipped(d=1 - 1.1 * room) is None
    assert clipped(e=0.45) is None  # smaller than computed, and below the bound
    assert clipped(a=2.0) is None and clipped(a=2.0, b=3.0) is None  # as they were
    assert clipped(c=5.0, d=7.0) is None
    scaled = f"each gradient was scaled to the norm {bound:.4g} by its own, smaller ones too"
    assert clipped(e=1.0) == (scaled, tuple(computed))
    three = {name: one for name, one in computed.items() if name in "abe"}
    computed.clear()
    computed.update(three)
    assert clipped() is None  # two norms that are equal may be by chance
    assert clipped(e=1.0) == (scaled, ("a", "b", "e"))


@pytest.mark.parametrize(
    ("first", "stop", "says"),
    [
        (125, 720, "from column 5 of row 3"),
        (0, 125, "to before column 5 of row 3"),
        (125, 245, "from column 5 of row 3 to before column 5 of row 6"),
        (120, 240, None),  # whole rows
        (700, 720, "from column 20 of row 17"),
    ],
)
def test_a_shard_that_ends_inside_a_row_did_not_move(
    first: int, stop: int, says: str | None
) -> None:
    before, after, states = stepped("AdamW", ADAM)
    after.reshape(-1)[first:stop] = before.reshape(-1)[first:stop]
    case = case_of((before, after, states), "gradient")
    recipe = parse_recipe(STATED)
    found = [guess for guess in guess_cut_shard(case, recipe) if guess.right(case)]
    words = "elements did not move {}, as of a shard that is cut inside a row"
    assert [guess.says for guess in found] == ([] if says is None else [words.format(says)])
    assert not list(guess_cut_shard(replace(case, shape=None), recipe))
    after.reshape(-1)[10 if first else 500] += LR  # another element is wrong as well
    other = case_of((before, after, states), "gradient")
    assert not [guess for guess in guess_cut_shard(other, recipe) if guess.right(other)]


def test_a_right_step_or_one_that_moved_has_no_shard_that_stood_still() -> None:
    before, after, states = stepped("AdamW", ADAM)
    recipe = parse_recipe(STATED)
    assert not list(guess_cut_shard(case_of((before, after, states), "gradient"), recipe))
    after.reshape(-1)[125:] += 2 * LR
    assert not list(guess_cut_shard(case_of((before, after, states), "gradient"), recipe))


def test_a_step_from_other_weights_goes_far_in_no_direction_of_the_rule() -> None:
    before, after, states = stepped("AdamW", ADAM)
    noise = np.random.default_rng(9).normal(0, 1, before.shape).astype(np.float32)
    step = after - before

    def said(made: Array, knows: str = "gradient", stated: str = STATED) -> list[Any]:
        case = case_of((before, made.astype(np.float32), states), knows)
        return list(guess_other_weights(case, parse_recipe(stated)))

    rng = np.random.default_rng(3)
    some = sum(np.sign(rng.normal(0, 1, before.shape)) for _ in range(6))  # steps not made
    stale = (after - 0.6 * LR * some).astype(np.float32)
    (found,) = said(stale - 3 * step)  # of masters that lack some steps, partly along this one
    assert (found.cause, found.most) == ("other_weights", "located")
    both = after + 30 * step + 0.3 * before  # a factor of both is a rate and a decay
    assert not said(both)
    for size in (5.0, 30.0):  # masters of another checkpoint, near and far
        (found,) = said(after + size * LR * noise)
        assert (found.cause, found.most) == ("other_weights", "located")
    right = after, before + 20 * step, before - 20 * step, after + 2 * LR * noise, 0.9 * before
    assert not any(said(made) for made in right)
    far = after + 30 * LR * noise
    assert not said(after + 1e3 * LR * noise)  # another weight altogether
    assert not said(far, "signs") and not said(far, stated=f"sgd:lr={L}")
    assert not said(far, stated="adamw:lr=0,step=1")
