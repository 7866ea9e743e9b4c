"""Gradients beside the optimizer's state of after the step: are they the ones in its moments?"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

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
    rounded,
    sgd,
    torch_steps,
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
