"""Steps with one mistake each, and steps that are right: what the judged set is made of."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.training.steps import (
    B1,
    B2,
    DOWN,
    EMBED,
    EPS,
    HEAD,
    LR,
    Q1,
    WD,
    Made,
    Values,
    adamw,
    adamw_all,
    clip_rows,
    decaying_groups,
    gradients,
    moments,
    right,
    rounded,
    sgd,
    stepped,
    torch_steps,
    weights,
)

ALL = 21  # parameters of the tiny model
NORMS = 5
STATED = f"adamw:lr={LR},wd={WD},step=1"
SGD = "sgd:lr=0.5"


@dataclass(frozen=True)
class StepFault:
    """A mistake: what makes the step, the cause it is, and how many parameters it is in."""

    name: str
    cause: str
    make: Callable[[], Made]
    tensors: int = ALL
    level: str = "confirmed"


def given(after: Values, **more: Any) -> Made:
    """Return a first step with its gradients."""
    return Made(after, STATED, grads=gradients(1), **more)


def norm() -> float:
    """Return the norm over all gradients of the first step."""
    return float(np.sqrt(sum(np.square(g.astype(np.float64)).sum() for g in gradients(1).values())))


def by_sgd(factor: Callable[[str], float], clip: float | None = None) -> Made:
    """Return an SGD step in which each gradient has a factor of its own."""
    after = {
        name: (w.astype(np.float64) - 0.5 * factor(name) * gradients(1)[name]).astype(np.float32)
        for name, w in weights().items()
    }
    stated = SGD if clip is None else f"{SGD},clip={clip}"
    return Made(after, stated, grads=gradients(1))


def in_few_bits(
    narrow: Callable[[NDArray[Any]], NDArray[Any]],
    wd: float = WD,
    lr: float = 50 * LR,
    stated: float = WD,
) -> Made:
    """Return a long step of AdamW, float32 weights after it made BF16 by `narrow`.

    `wd` is the decay that was made, `stated` the one that is said.
    """
    after = {
        name: narrow((w + right(w, gradients(1)[name], lr, wd)).astype(np.float32))
        for name, w in weights().items()
    }
    optimizer = f"adamw:lr={lr},wd={stated},step=1"
    return Made(after, optimizer, grads=gradients(1), encoding="BF16")


def clipped_rows(clip: float | None) -> Made:
    """Return an SGD step whose gradients are clipped by the norms of their rows."""
    grads = clip_rows(gradients(1))
    after = {n: (w - np.float32(0.5) * grads[n]).astype(np.float32) for n, w in weights().items()}
    stated = SGD if clip is None else f"{SGD},clip={clip}"
    return Made(after, stated, grads=gradients(1))


def by_numbers(optimizer: str, only: str = "", unit: float = WD / 1000) -> Made:
    """Return a step whose decay is `unit` times the parameter's number, not times the weight.

    `only` names the one parameter that has it. The others have their given gradient.
    """
    after = {}
    for number, (name, w) in enumerate(weights().items(), 1):
        added = 0.0 if only not in ("", name) else unit * number
        g, x = gradients(1)[name].astype(np.float64), w.astype(np.float64)
        if optimizer.startswith("sgd"):
            after[name] = x - 0.5 * (g + added)
        elif optimizer.startswith("adamw"):
            after[name] = x + right(x, g, wd=0.0) - LR * added
        else:
            after[name] = x + right(x, g + added, wd=0.0)
    moved = {name: x.astype(np.float32) for name, x in after.items()}
    return Made(moved, optimizer, grads=gradients(1))


def by_signs(optimizer: str) -> Made:
    """Return an SGD step with L1 regularization."""
    after = {
        name: (w - 0.5 * (gradients(1)[name] + 1e-4 * np.sign(w))).astype(np.float32)
        for name, w in weights().items()
    }
    return Made(after, optimizer, grads=gradients(1))


def own_norm(name: str) -> float:
    """Return the norm of a gradient."""
    return float(np.linalg.norm(gradients(1)[name].astype(np.float64)))


def largest() -> float:
    """Return the largest element of all gradients of the first step."""
    return max(float(np.abs(g).max()) for g in gradients(1).values())


def sizes() -> float:
    """Return the sum of the sizes of all elements of the first step's gradients."""
    return float(sum(np.abs(g).sum(dtype=np.float64) for g in gradients(1).values()))


CLIP = 0.005


def uncorrected(correction: str) -> Values:
    """Return a first step of AdamW without one of the corrections of its moments, or both."""
    one = 1 - B1 if correction in ("both", "first") else 1.0
    two = 1 - B2 if correction in ("both", "second") else 1.0

    def rule(w: Any, g: Any) -> Any:
        m, v = (1 - B1) * g / one, (1 - B2) * g * g / two
        return -LR * m / (np.sqrt(v) + EPS) - (LR * WD * w if w.ndim > 1 else 0)

    return stepped(rule)


def decayed(share: float) -> Callable[[Any, Any], Any]:
    """Return a rule of AdamW whose matrices decay by another share."""
    return lambda w, g: right(w, g, wd=0.0) - (share * w if w.ndim > 1 else 0)


def second_step(rule: Callable[[Any, Any, Any, Any], Any]) -> Made:
    """Return a step 3 with the state of after it: `rule(w, m, v)` is given corrected moments."""
    first, second = moments(3)
    after = {}
    for name, w in weights().items():
        w = w.astype(np.float64)
        decay = LR * WD * w if w.ndim > 1 else 0
        after[name] = (w + rule(name, w, first[name], second[name]) - decay).astype(np.float32)
    state = {f"{name}.exp_avg": each.astype(np.float32) for name, each in first.items()}
    state |= {f"{name}.exp_avg_sq": each.astype(np.float32) for name, each in second.items()}
    return Made(after, f"adamw:lr={LR},wd={WD},step=3", state=state)


def corrected(m: Any, v: Any, step: int) -> Any:
    """Return Adam's step of moments, corrected for a number of steps."""
    return -LR * (m / (1 - B1**step)) / (np.sqrt(v / (1 - B2**step)) + EPS)


def stale() -> Made:
    """Return a second step that was made of the moments of the first."""
    steps, state = torch_steps(adamw, 1)
    first, second = moments(1)
    after = {}
    for name, w in steps[0].items():
        decay = LR * WD * w if w.ndim > 1 else 0
        after[name] = (w + corrected(first[name], second[name], 1) - decay).astype(np.float32)
    return Made(
        after, f"adamw:lr={LR},wd={WD},step=2", before=steps[0], grads=gradients(2), state=state
    )


def exchanged() -> Made:
    """Return a second step whose moments were made with beta 2 for beta 1, and back."""
    steps, state = torch_steps(adamw, 1)
    after = {}
    for name, w in steps[0].items():
        g = gradients(2)[name].astype(np.float64)
        m = B2 * state[f"{name}.exp_avg"].astype(np.float64) + (1 - B2) * g
        v = B1 * state[f"{name}.exp_avg_sq"].astype(np.float64) + (1 - B1) * g * g
        step = -LR * (m / (1 - B2**2)) / (np.sqrt(v / (1 - B1**2)) + EPS)
        after[name] = (w + step - (LR * WD * w if w.ndim > 1 else 0)).astype(np.float32)
    return Made(
        after, f"adamw:lr={LR},wd={WD},step=2", before=steps[0], grads=gradients(2), state=state
    )


def other_beta() -> Made:
    """Return a second step of another beta 2 than is stated, with the state of the first."""
    steps, _ = torch_steps(partial(adamw, betas=(B1, 0.95)), 2)
    _, state = torch_steps(partial(adamw, betas=(B1, 0.95)), 1)
    return Made(
        steps[1], f"adamw:lr={LR},wd={WD},step=2", before=steps[0], grads=gradients(2), state=state
    )


def momentum(after: dict[str, Any], stated: str) -> Made:
    """Return a second step of SGD with momentum."""
    steps, _ = torch_steps(lambda t, p: sgd(t, p, **after), 2)
    _, held = torch_steps(lambda t, p: sgd(t, p, momentum=0.9), 1)
    return Made(
        steps[1], f"{stated},step=2", before=steps[0], grads=gradients(2),
        state=held | {"step": np.asarray([1.0])},
    )  # fmt: skip


def in_bfloat16(lr: float, wd: float = WD, scale: float = 1.0) -> Values:
    """Return a step of torch's AdamW on weights in bfloat16."""

    def make(torch: Any, parameters: list[Any]) -> Any:
        made = adamw(torch, parameters, lr=lr, foreach=False)
        made.param_groups[0]["weight_decay"] = wd
        return made

    return torch_steps(make, dtype="bfloat16", scale=scale)[0][0]


def frozen(*names: str) -> Values:
    """Return the right step, some parameters as they were."""
    after = torch_steps(adamw)[0][0]
    return after | {name: weights()[name] for name in names}


def rows_frozen() -> Values:
    """Return the right step, the first rows of the head as they were."""
    after = torch_steps(adamw)[0][0]
    head = after[HEAD].copy()
    head[:5] = weights()[HEAD][:5]
    return after | {HEAD: head}


def with_nan() -> Values:
    """Return the right step with one NaN."""
    after = torch_steps(adamw)[0][0]
    broken = after[DOWN].copy()
    broken[3, 5] = np.nan
    return after | {DOWN: broken}


def l2(torch: Any, parameters: list[Any]) -> Any:
    """Return torch's Adam, whose decay is added to the gradient; norms do not decay."""
    return torch.optim.Adam(decaying_groups(parameters), lr=LR)


FAULTS = (
    StepFault("no correction", "bias_correction", lambda: given(uncorrected("none"))),
    StepFault("no correction, sizes", "bias_correction", lambda: Made(uncorrected("none"))),
    StepFault("first corrected alone", "bias_correction", lambda: given(uncorrected("first"))),
    StepFault("second corrected alone", "bias_correction", lambda: given(uncorrected("second"))),
    StepFault("epsilon inside the root", "epsilon_place", lambda: given(stepped(
        lambda w, g: -LR * g / np.sqrt(g * g + EPS) - (LR * WD * w if w.ndim > 1 else 0)))),
    StepFault("epsilon before the correction", "epsilon_place", lambda: given(stepped(
        lambda w, g: -LR * g / (np.abs(g) + EPS / np.sqrt(1 - B2))
        - (LR * WD * w if w.ndim > 1 else 0)))),
    StepFault("another epsilon", "epsilon_value", lambda: second_step(
        lambda name, w, m, v: -LR * (m / (1 - B1**3)) / (np.sqrt(v / (1 - B2**3)) + 1e-6))),
    StepFault("plain descent", "other_optimizer", lambda: given(stepped(
        lambda w, g: -0.5 * g)), level="explained"),
    StepFault("no decay", "decay_missing", lambda: given(stepped(decayed(0.0))), ALL - NORMS),
    StepFault("no decay, sizes", "decay_missing", lambda: Made(stepped(decayed(0.0))),
              ALL - NORMS),
    StepFault("decay without the rate", "decay_factor", lambda: given(stepped(decayed(WD))),
              ALL - NORMS),
    StepFault("half the decay", "decay_factor", lambda: given(stepped(decayed(LR * WD / 2))),
              ALL - NORMS),
    StepFault("half the decay, sizes", "decay_factor",
              lambda: Made(stepped(decayed(LR * WD / 2))), ALL - NORMS),
    StepFault("a thirtieth of the decay", "decay_factor",
              lambda: given(stepped(decayed(LR * WD / 30))), ALL - NORMS),
    StepFault("a decay that nothing states", "decay_factor", lambda: Made(
        stepped(right), f"adamw:lr={LR},step=1", grads=gradients(1)), ALL - NORMS),
    StepFault("a decay that nothing states, sizes", "decay_factor", lambda: Made(
        stepped(right), f"adamw:lr={LR},step=1"), ALL - NORMS),
    StepFault("a rate of 0 stated", "step_factor", lambda: Made(
        stepped(right), f"adamw:lr=0,wd={WD},step=1", grads=gradients(1))),
    StepFault("a rate of 0 stated, SGD", "step_factor", lambda: Made(
        torch_steps(sgd)[0][0], "sgd:lr=0", grads=gradients(1))),
    StepFault("Adam for AdamW", "decay_coupled", lambda: given(torch_steps(l2)[0][0]),
              ALL - NORMS),
    StepFault("AdamW for Adam", "decay_coupled", lambda: Made(
        torch_steps(adamw)[0][0], STATED.replace("adamw", "adam"), grads=gradients(1)),
        ALL - NORMS),
    StepFault("Adam for AdamW, sizes", "decay_coupled", lambda: Made(torch_steps(l2)[0][0]),
              ALL - NORMS),
    StepFault("decay last", "decay_order", lambda: Made(stepped(
        lambda w, g: right(w, g, wd=0.0) - 2 * LR * (w + right(w, g, wd=0.0))),
        f"adamw:lr={LR},wd=2,step=1,decay_on=all", grads=gradients(1))),
    StepFault("a constant for the decay, SGD", "decay_constant",
              lambda: by_numbers(f"{SGD},wd={WD / 1000}")),
    StepFault("a constant for the decay, AdamW", "decay_constant",
              lambda: by_numbers(STATED, unit=WD)),
    StepFault("a constant for the decay, Adam", "decay_constant",
              lambda: by_numbers(f"adam:lr={LR},wd={WD / 1000},step=1")),
    StepFault("a constant in one tensor", "decay_constant",
              lambda: by_numbers(SGD, Q1), 1),
    StepFault("a constant in one tensor, Adam", "decay_constant",
              lambda: by_numbers(f"adam:lr={LR},step=1", Q1, 1e-5), 1),
    StepFault("signs for the decay", "decay_of_signs", lambda: by_signs(f"{SGD},wd={WD / 1000}")),
    StepFault("a decay of the other sign in the gradient", "decay_factor", lambda: Made(
        stepped(lambda w, g: right(w, g - WD * w, wd=0.0)), f"adam:lr={LR},wd={WD},step=1",
        grads=gradients(1))),
    StepFault("norms decay", "decay_on_norms", lambda: Made(
        torch_steps(adamw_all)[0][0], f"{STATED},decay_on=matrices", grads=gradients(1)), NORMS),
    StepFault("upwards", "step_sign", lambda: given(stepped(
        lambda w, g: LR * g / (np.abs(g) + EPS) - (LR * WD * w if w.ndim > 1 else 0)))),
    StepFault("taken twice", "step_twice", lambda: given(stepped(lambda w, g: 2 * right(w, g))),
              level="explained"),
    StepFault("a tenth of the rate", "step_factor",
              lambda: Made(stepped(lambda w, g: right(w, g, LR / 10)))),
    StepFault("a group of ten times the rate", "step_factor",
              lambda: Made(stepped(lambda w, g: right(w, g, LR * 10), (EMBED, HEAD))), 2),
    StepFault("an accumulation of 4", "step_factor", lambda: by_sgd(lambda name: 0.25)),
    StepFault("a loss scale", "step_factor", lambda: by_sgd(lambda name: 1024.0)),
    StepFault("not clipped", "clip_missing", lambda: by_sgd(lambda name: 1.0, CLIP)),
    StepFault("clipped twice", "clip_twice",
              lambda: by_sgd(lambda name: (CLIP / (norm() + 1e-6)) ** 2, CLIP)),
    StepFault("clipped by tensor", "clip_by_tensor",
              lambda: by_sgd(lambda name: min(1.0, CLIP / (own_norm(name) + 1e-6)), CLIP)),
    StepFault("clipped by the largest element", "clip_other_norm",
              lambda: by_sgd(lambda name: 0.25 * largest() / (largest() + 1e-6), largest() / 4)),
    StepFault("clipped by the sum of sizes", "clip_other_norm",
              lambda: by_sgd(lambda name: CLIP / (sizes() + 1e-6), CLIP)),
    StepFault("clipped by rows", "clip_by_tensor", lambda: clipped_rows(1.0), 16),
    StepFault("clipped by rows, which nothing states", "clip_by_tensor",
              lambda: clipped_rows(None), 16, level="explained"),
    StepFault("another factor for each", "step_factor",
              lambda: by_sgd(lambda name: 1 + 0.1 * (1 + list(weights()).index(name)), CLIP * 1e4),
              level="explained"),
    StepFault("a gradient of 8 times the size", "gradient_scaled",
              lambda: given(torch_steps(adamw, scale=8.0)[0][0])),
    StepFault("a gradient of 1/1024", "gradient_scaled",
              lambda: given(torch_steps(adamw, scale=1 / 1024)[0][0])),
    StepFault("frozen", "frozen", lambda: given(frozen(Q1)), 1),
    StepFault("norms frozen", "frozen", lambda: given(frozen("model.norm.weight")), 1),
    StepFault("rows frozen", "rows_frozen", lambda: given(rows_frozen()), 1),
    StepFault("old moments", "stale_moments", stale),
    StepFault("the count began anew", "step_count",
              lambda: second_step(lambda name, w, m, v: corrected(m, v, 1))),
    StepFault("the count is off by one", "step_count",
              lambda: second_step(lambda name, w, m, v: corrected(m, v, 4))),
    StepFault("no correction at step 3", "bias_correction", lambda: second_step(
        lambda name, w, m, v: -LR * m / (np.sqrt(v) + EPS))),
    StepFault("epsilon inside at step 3", "epsilon_place", lambda: second_step(
        lambda name, w, m, v: -LR * (m / (1 - B1**3)) / np.sqrt(v / (1 - B2**3) + EPS))),
    StepFault("betas exchanged", "betas", exchanged),
    StepFault("another beta at the second step", "betas", other_beta),
    StepFault("Nesterov", "momentum", lambda: momentum(
        {"momentum": 0.9, "nesterov": True}, f"{SGD},momentum=0.9")),
    StepFault("no momentum", "momentum", lambda: momentum({}, f"{SGD},momentum=0.9")),
    StepFault("transposed", "update_transposed", lambda: given(
        torch_steps(adamw)[0][0] | {Q1: (weights()[Q1] + right(
            weights()[Q1].astype(np.float64), gradients(1)[Q1].T.astype(np.float64))
        ).astype(np.float32)}), 1),
    StepFault("swallowed", "update_rounded_away", lambda: Made(
        in_bfloat16(1e-5), "adamw:lr=1e-5,wd=0.1,step=1", grads=gradients(1), encoding="BF16"),
        ALL - NORMS),
    StepFault("swallowed, of a large gradient", "update_rounded_away", lambda: Made(
        in_bfloat16(1e-5, scale=100.0), "adamw:lr=1e-5,wd=0.1,step=1", encoding="BF16",
        grads={name: g * np.float32(100) for name, g in gradients(1).items()}), ALL - NORMS),
    StepFault("swallowed, sizes", "update_rounded_away", lambda: Made(
        in_bfloat16(2e-5), "adamw:lr=2e-5,wd=0.1,step=1", encoding="BF16"), ALL - NORMS,
        "explained"),
    StepFault("decay swallowed", "decay_rounded_away", lambda: Made(
        in_bfloat16(1e-3, 1.0), "adamw:lr=1e-3,wd=1,step=1", grads=gradients(1), encoding="BF16"),
        ALL - NORMS, "explained"),  # no decay at all gives the same bits
    StepFault("cut off", "update_cut_off", lambda: in_few_bits(
        lambda x: (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)), ALL - NORMS),
    StepFault("five times the decay in bfloat16", "",
              lambda: in_few_bits(rounded, 5 * WD), ALL - NORMS, "located"),
    StepFault("three times the decay in bfloat16", "",
              lambda: in_few_bits(rounded, 3 * WD), ALL - NORMS, "located"),
    StepFault("a quarter of a large decay in bfloat16", "",
              lambda: in_few_bits(rounded, 2.5, lr=1e-3, stated=10.0), ALL - NORMS, "located"),
    StepFault("a NaN", "nonfinite", lambda: given(with_nan()), 1, "located"),
)  # fmt: skip


def lion() -> Values:
    """Return a first step of Lion."""
    return stepped(lambda w, g: -LR * np.sign(g) - LR * WD * w)


def finer(values: Values) -> Values:
    """Return weights that were stepped in float32, as bfloat16 stores them."""
    return {name: rounded(each) for name, each in values.items()}


def later(**more: Any) -> Made:
    """Return a third step of AdamW with its state."""
    steps, state = torch_steps(adamw, 3)
    return Made(steps[2], f"adamw:lr={LR},wd={WD}", before=steps[1], state=state, **more)


def before_it() -> Made:
    """Return a third step with its gradients and the state of after the second."""
    steps, _ = torch_steps(adamw, 3)
    _, state = torch_steps(adamw, 2)
    stated = f"adamw:lr={LR},wd={WD},step=3"
    return Made(steps[2], stated, before=steps[1], grads=gradients(3), state=state)


UNDECIDED: dict[str, Callable[[], Made]] = {
    "a tenth of the rate or a correction, without decay": lambda: Made(
        stepped(lambda w, g: right(w, g, LR / 10, 0.0)), f"adam:lr={LR},step=1",
        grads=gradients(1)),
    "ten times the gradient or a tenth of epsilon": lambda: given(
        torch_steps(adamw, scale=10.0)[0][0]),
    "no decay or a coupled one, all rows in use": lambda: Made(
        stepped(decayed(0.0)) | {EMBED: stepped(right)[EMBED], HEAD: stepped(right)[HEAD]}),
}  # fmt: skip


def by_state(**settings: Any) -> Made:
    """Return a third step with the state of it."""
    steps, state = torch_steps(lambda t, p: adamw(t, p, **settings), 3)
    return Made(steps[2], f"adamw:lr={LR},wd={WD}", before=steps[1], state=state)


def uncounted(settings: dict[str, Any], more: str = "") -> Made:
    """Return a second step of SGD with the state of before it, as torch saves that."""
    made = momentum(settings, f"{SGD},momentum=0.9{more}")
    assert made.state is not None
    return replace(made, state={key: x for key, x in made.state.items() if key != "step"})


def at_rate(lr: float, wd: float) -> Made:
    """Return torch's AdamW at a rate of fine-tuning: 1 - lr * wd is then a coarse float32."""
    made = torch_steps(lambda t, p: adamw_all(t, p, lr=lr, weight_decay=wd))
    return Made(made[0][0], f"adamw:lr={lr:g},wd={wd:g},step=1,decay_on=all", grads=gradients(1))


def wide(torch: Any, parameters: list[Any]) -> Any:
    """Return torch's AdamW at a rate that bfloat16 shows."""
    return adamw_all(torch, parameters, lr=0.01, weight_decay=0)


INNOCENTS: dict[str, Callable[[], Made]] = {
    "AdamW, sizes": lambda: Made(torch_steps(adamw)[0][0]),
    "AdamW, sizes, no step said": lambda: Made(torch_steps(adamw)[0][0], f"adamw:lr={LR},wd={WD}"),
    "AdamW with gradients": lambda: given(torch_steps(adamw)[0][0]),
    "AdamW, foreach": lambda: given(
        torch_steps(lambda t, p: adamw(t, p, foreach=True))[0][0]),
    "AdamW over all parameters": lambda: given(torch_steps(adamw_all)[0][0]),
    "AdamW over all parameters, sizes": lambda: Made(torch_steps(adamw_all)[0][0]),
    "a third step by its state": later,
    "Adam": lambda: Made(
        torch_steps(l2)[0][0], STATED.replace("adamw", "adam"), grads=gradients(1)),
    "clipped, which Adam does not show": lambda: Made(
        torch_steps(adamw, clip=CLIP)[0][0], f"{STATED},clip={CLIP}", grads=gradients(1)),
    "AdamW by one loop": lambda: given(
        torch_steps(lambda t, p: adamw(t, p, foreach=False))[0][0]),
    "clipped, and not said": lambda: Made(
        torch_steps(adamw, clip=1.0, scale=100.0)[0][0], STATED,
        grads={name: g * np.float32(100) for name, g in gradients(1).items()}),
    "a third step by its gradients and the state of before it": lambda: before_it(),
    "amsgrad by its state": lambda: by_state(amsgrad=True),
    "bfloat16 beside float32, sizes": lambda: Made(
        finer(torch_steps(adamw)[0][0]), encoding="BF16"),
    "bfloat16 beside float32": lambda: given(finer(torch_steps(adamw)[0][0]), encoding="BF16"),
    "bfloat16 gradients": lambda: Made(
        torch_steps(adamw)[0][0], STATED,
        grads={name: rounded(g) for name, g in gradients(1).items()}),
    "SGD": lambda: Made(torch_steps(sgd)[0][0], SGD, grads=gradients(1)),
    "SGD, clipped": lambda: Made(
        torch_steps(sgd, clip=CLIP)[0][0], f"{SGD},clip={CLIP}", grads=gradients(1)),
    "SGD, clipped by the largest element, and not said": lambda: Made(
        by_sgd(lambda name: 0.1 / (largest() + 1e-8)).after, SGD,
        grads={name: g * np.float32(100) for name, g in gradients(1).items()}),
    "SGD, clipped by the sum of sizes, and not said": lambda: Made(
        by_sgd(lambda name: 10 / (sizes() + 1e-8)).after, SGD,
        grads={name: g * np.float32(100) for name, g in gradients(1).items()}),
    "SGD with momentum": lambda: momentum({"momentum": 0.9}, f"{SGD},momentum=0.9"),
    "SGD, a state before that counts no steps": lambda: uncounted({"momentum": 0.9}),
    "SGD, Nesterov, a state before that counts no steps": lambda: uncounted(
        {"momentum": 0.9, "nesterov": True}, ",nesterov=true"),
    "SGD, Nesterov": lambda: momentum(
        {"momentum": 0.9, "nesterov": True}, f"{SGD},momentum=0.9,nesterov=true"),
    **{
        f"AdamW over all, lr {lr:g}, wd {wd:g}": partial(at_rate, lr, wd)
        for lr in (1e-6, 1e-5, 2e-5, 1e-4) for wd in (0.01, 0.1)
    },
    "AdamW in bfloat16": lambda: Made(
        torch_steps(wide, dtype="bfloat16")[0][0], "adamw:lr=0.01,wd=0,step=1",
        grads=gradients(1), encoding="BF16"),
    "Lion": lambda: Made(lion(), f"lion:lr={LR},wd={WD}", grads=gradients(1)),
    "Lion, sizes": lambda: Made(lion(), f"lion:lr={LR},wd={WD}"),
}  # fmt: skip
