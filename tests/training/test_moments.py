"""Gradients beside the optimizer's state of after the step: are they the ones in its moments?"""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprfmt.causes.training.clipping import clip_factor
from aprfmt.training.report import StepReport
from tests.training.steps import (
    LR,
    Q1,
    WD,
    Made,
    Values,
    adam_all,
    adamw,
    gradients,
    right,
    rounded,
    sgd,
    torch_steps,
    weights,
)

ADAMW = f"adamw:lr={LR},wd={WD}"


RULES: dict[str, tuple[Any, str]] = {
    "adamw": (adamw, ADAMW),
    "adam": (adam_all, f"adam:lr={LR},wd={WD},decay_on=all"),
    "sgd": (partial(sgd, momentum=0.9), "sgd:lr=0.5,momentum=0.9"),
}


def report_of(
    folder: Path, rule: str, step: int, grads: Values, clip: float | None = None, scale: float = 1.0
) -> StepReport:
    """Return what is said of a step of torch with the state of after it, and these gradients."""
    make, stated = RULES[rule]
    steps, state = torch_steps(make, step, clip=clip, scale=scale)
    if rule == "sgd":
        state |= {"step": np.asarray([float(step)])}
    made = Made(steps[-1], f"{stated},step={step}", grads=grads, state=state)
    return (replace(made, before=steps[-2]) if step > 1 else made).report(folder)


def other(seed: int = 9) -> Values:
    """Return gradients of the same sizes that are none of this step."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.permutation(g.reshape(-1)).reshape(g.shape) for name, g in gradients(1).items()
    }


@pytest.mark.parametrize("rule", RULES)
def test_the_gradient_of_a_first_step_is_in_its_moments(rule: str, tmp_path: Path) -> None:
    report = report_of(tmp_path, rule, 1, gradients(1))
    assert report.causes == () and report.exit_code == 0, report.pronounced.says
    assert not [one for one in report.left if one.kind == "gradient"]


@pytest.mark.parametrize("rule", RULES)
def test_another_gradient_is_not_in_the_moments(rule: str, tmp_path: Path) -> None:
    """Seen red: `agrees in what was compared`, exit 0, with gradients of noise."""
    report = report_of(tmp_path, rule, 1, other())
    assert report.exit_code == 1
    assert "the one in the optimizer's moments" in report.causes[0].says


def test_one_wrong_gradient_is_placed(tmp_path: Path) -> None:
    report = report_of(tmp_path, "adamw", 1, dict(gradients(1)) | {Q1: other()[Q1]})
    assert report.exit_code == 1
    assert [one.where for one in report.causes] == [(Q1,)]


@pytest.mark.parametrize(
    ("factor", "words"), [(8.0, "8 times"), (1 / 1024, "1/1024 of"), (-1.0, "-1 times")]
)
def test_a_factor_between_gradient_and_moments_is_named(
    factor: float, words: str, tmp_path: Path
) -> None:
    """The optimizer had `factor` times the gradient that was saved."""
    grads = {name: (g / factor).astype(np.float32) for name, g in gradients(1).items()}
    report = report_of(tmp_path, "adamw", 1, grads)
    assert [one.cause for one in report.causes] == ["gradient_scaled"]
    assert f"the optimizer had {words} the gradient" in report.causes[0].says


@pytest.mark.parametrize("name", ["clipped", "bfloat16"])
def test_clipping_and_rounding_between_gradient_and_moments_is_no_alarm(
    name: str, tmp_path: Path
) -> None:
    grads = dict(gradients(1))
    scale, clip = (100.0, 1.0) if name == "clipped" else (1.0, None)
    grads = {key: g * np.float32(scale) for key, g in grads.items()}
    if name == "bfloat16":
        grads = {key: rounded(g) for key, g in grads.items()}
    report = report_of(tmp_path, "adamw", 1, grads, clip, scale)
    assert report.causes == () and report.exit_code == 0, report.pronounced.says
    assert ("clipped to the norm 1" in " ".join(report.notes)) == (name == "clipped")


@pytest.mark.parametrize("clip", [None, 0.7])
@pytest.mark.parametrize("rule", RULES)
def test_a_later_gradient_beside_the_moments_leaves_it_open(
    rule: str, clip: float | None, tmp_path: Path
) -> None:
    """Seen red: exit 0 over gradients that nothing was held to."""
    scale = 1.0 if clip is None else 100.0
    grads = {name: g * np.float32(scale) for name, g in gradients(3).items()}
    report = report_of(tmp_path, rule, 3, grads, clip, scale)
    assert report.causes == () and report.exit_code == 2, report.pronounced.says


def test_a_later_gradient_that_the_moments_exclude_is_a_difference(tmp_path: Path) -> None:
    make, _ = RULES["adamw"]
    steps, state = torch_steps(make, 3)
    stated = f"{ADAMW},step=3,clip=1000"
    for number, (grads, code) in enumerate(((gradients(3), 2), (other(), 1))):
        made = Made(steps[2], stated, before=steps[1], grads=dict(grads), state=state)
        report = made.report(tmp_path / str(number))
        assert report.exit_code == code, report.pronounced.says


def clipped(kind: str, step: int) -> Values:
    """Return the gradients of a step, a thousand times, clipped to 1 in one way."""
    grads = {name: g * np.float32(1000) for name, g in gradients(step).items()}
    norms = {name: float(np.linalg.norm(g)) for name, g in grads.items()}
    norm = clip_factor(1.0, math.hypot(*norms.values()))
    sizes = [np.abs(g) for g in grads.values()]
    factors = {
        "norm": norm,
        "twice": norm * norm,
        "largest": clip_factor(1.0, max(float(each.max()) for each in sizes)),
        "sum": clip_factor(1.0, float(sum(each.sum(dtype=np.float64) for each in sizes))),
        "none": 1.0,
    }
    return {
        name: (factors.get(kind, clip_factor(1.0, norms[name])) * g).astype(np.float32)
        for name, g in grads.items()
    }


CLIPPED = {
    "norm": ("", ""),
    "twice": ("clip_twice", "clipped twice"),
    "largest": ("clip_other_norm", "the largest element"),
    "sum": ("clip_other_norm", "the sum of the sizes"),
    "own": ("clip_by_tensor", "by its own norm to 1"),
    "none": ("clip_missing", "were not clipped"),
}


@pytest.mark.parametrize("kind", CLIPPED)
def test_the_largest_gradient_that_the_moments_admit_says_how_it_was_clipped(
    kind: str, tmp_path: Path
) -> None:
    """Of step 3, with the state of after it. Seen red: "its gradient is not in the moments"."""
    steps, state = torch_steps(adamw, 3, grads=partial(clipped, kind))
    grads = {name: g * np.float32(1000) for name, g in gradients(3).items()}
    stated = f"{ADAMW},step=3,clip=1"
    report = Made(steps[2], stated, before=steps[1], grads=grads, state=state).report(tmp_path)
    cause, says = CLIPPED[kind]
    assert report.exit_code == (1 if cause else 2)
    assert [(one.cause, one.level) for one in report.causes] == [(cause, "explained")] * bool(cause)
    assert all(says in one.says for one in report.causes)


def test_moments_that_admit_all_gradients_say_nothing_of_clipping(tmp_path: Path) -> None:
    """Gradients of noise are excluded, and no clipping of them is in the moments."""
    steps, state = torch_steps(adamw, 3, grads=partial(clipped, "norm"))
    grads = {name: g * np.float32(1000) for name, g in other().items()}
    made = Made(steps[2], f"{ADAMW},step=3,clip=1", before=steps[1], grads=grads, state=state)
    report = made.report(tmp_path)
    assert report.exit_code == 1 and [one.cause for one in report.causes] == [""]


def lion_step(b1: float, b2: float, steps: int = 3) -> tuple[Values, Values, Values]:
    """Return the weights before and after the last of Lion's steps, and its moments before it."""
    before, after = weights(), weights()
    state = {name: np.zeros_like(w) for name, w in before.items()}
    kept = state
    for number in range(1, steps + 1):
        before, kept = after, state
        grads = gradients(number)
        after = {
            name: (w - LR * np.sign(b1 * state[name] + (1 - b1) * grads[name])).astype(np.float32)
            for name, w in before.items()
        }
        state = {n: (b2 * m + (1 - b2) * grads[n]).astype(np.float32) for n, m in state.items()}
    return before, after, {f"{name}.exp_avg": m for name, m in kept.items()}


def step_of(rule: str, number: int) -> Made:
    """Return a step of a rule whose number nothing says, with its gradients."""
    if rule == "lion":
        before, after, _ = lion_step(0.9, 0.99, number)
        return Made(after, f"lion:lr={LR}", before=before, grads=gradients(number))
    make, stated = RULES[rule]
    steps, _ = torch_steps(make, number)
    before = weights() if number == 1 else steps[-2]
    return Made(steps[-1], stated, before=before, grads=gradients(number))


@pytest.mark.parametrize("rule", [*RULES, "lion"])
@pytest.mark.parametrize(("number", "code"), [(1, 0), (3, 2)])
def test_a_right_step_is_not_accused_of_its_number(
    rule: str, number: int, code: int, tmp_path: Path
) -> None:
    """Seen red: a later step compared as the first, which it is not, and said to differ."""
    report = step_of(rule, number).report(tmp_path)
    assert (report.causes, report.exit_code) == ((), code), report.pronounced.says
    assert any("compared as the first" in note for note in report.notes) == (number == 1)


def test_a_mistake_in_a_step_of_no_number_is_named(tmp_path: Path) -> None:
    """It gives the first step, and so says that it is one; what agrees says so, too."""
    made = replace(step_of("adamw", 1), optimizer=f"adamw:lr={2 * LR},wd={WD}")
    (cause,) = made.report(tmp_path / "rate").causes
    assert cause.cause == "step_factor" and "1/2" in cause.says
    noise = np.random.default_rng(8).normal(0, LR, made.after[Q1].shape).astype(np.float32)
    made = step_of("adamw", 1)
    made = replace(made, after=dict(made.after) | {Q1: made.before[Q1] + noise})
    report = made.report(tmp_path / "one")
    assert report.exit_code == 1 and [one.where for one in report.causes] == [(Q1,)]


@pytest.mark.parametrize("rule", ["sgd", "lion"])
def test_a_momentum_that_was_lost_is_named_by_the_step(rule: str, tmp_path: Path) -> None:
    """As Adam's moments are. Seen red: a later step of momentum left open, whatever it is."""
    number, made = 3, step_of(rule, 1)
    made = replace(made, optimizer=f"{made.optimizer},step={number}")
    (cause,) = made.report(tmp_path / "lost").causes
    assert (cause.cause, cause.level) == ("moments_lost", "confirmed")
    assert "the momentum was zero" in cause.says
    right = step_of(rule, number)
    right = replace(right, optimizer=f"{right.optimizer},step={number}")
    assert right.report(tmp_path / "right").exit_code == 2


@pytest.mark.parametrize(("b1", "b2", "says"), [(0.95, 0.99, "beta 1 is 0.95"), (0.9, 0.99, "")])
def test_another_beta_of_lion_is_named(b1: float, b2: float, says: str, tmp_path: Path) -> None:
    """Of vectors too, by what matrices show. Seen red: few signs of a norm fit some beta 2."""
    before, after, state = lion_step(b1, b2)
    rule = f"lion:lr={LR},b1=0.9,b2=0.99,step=3"
    report = Made(after, rule, before=before, grads=gradients(3), state=state).report(tmp_path)
    assert report.exit_code == (1 if says else 0), report.pronounced.says
    assert [one.cause for one in report.causes] == ["betas"] * bool(says)
    assert all(says in one.says for one in report.causes)


def test_a_checkpoint_of_other_weights_is_said(tmp_path: Path) -> None:
    """Seen red: "0% of its elements are as expected; it moved 1.14 times the step"."""
    rng = np.random.default_rng(3)
    after = {name: rng.permutation(w.reshape(-1)).reshape(w.shape) for name, w in weights().items()}
    report = Made(after, f"{ADAMW},step=1", grads=gradients(1)).report(tmp_path / "other")
    assert report.exit_code == 1 and len(report.causes) == 1
    assert "of another checkpoint" in report.causes[0].says
    one = dict(step_of("adamw", 1).after) | {Q1: after[Q1]}
    report = Made(one, f"{ADAMW},step=1", grads=gradients(1)).report(tmp_path / "one")
    assert "of another checkpoint" not in report.causes[0].says


@pytest.mark.parametrize("of", ["after", "before"])
@pytest.mark.parametrize("kind", ["unseen", "no gradient", "new", "no step"])
def test_a_parameter_with_a_gradient_that_no_state_has_is_frozen(
    kind: str, of: str, tmp_path: Path
) -> None:
    """One that no gradient was saved of, that moved, or whose gradient is zero is not accused."""
    steps, _ = torch_steps(adamw, 3)
    _, state = torch_steps(adamw, 3 if of == "after" else 2)
    before, after = steps[1], dict(steps[2])
    grads = dict(gradients(3))
    state = {name: each for name, each in state.items() if Q1 not in name}
    after[Q1] = before[Q1]
    if kind == "no gradient":
        del grads[Q1]
    elif kind == "new":
        after[Q1] = (before[Q1] + right(before[Q1], grads[Q1])).astype(np.float32)
    elif kind == "no step":
        grads[Q1] = np.zeros_like(grads[Q1])
    made = Made(after, f"{ADAMW},step=3", before=before, grads=grads, state=state)
    found = made.report(tmp_path)
    named = [(cause.cause, cause.level, len(cause.roles)) for cause in found.causes]
    assert named == ([("frozen", "confirmed", 1)] if kind == "unseen" else [])
    assert ("no group" in found.causes[0].says) if named else found.exit_code == 2
