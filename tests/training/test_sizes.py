"""A step without its gradients: what the sizes of its elements say, and what they leave open."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprfmt.training.report import StepReport
from aprfmt.training.step import explain_step
from aprfmt.training.step_causes import rivals_text
from tests.training.steps import (
    EMBED,
    EPS,
    HEAD,
    LR,
    UNUSED,
    WD,
    Made,
    Values,
    adam_all,
    adamw_all,
    gradients,
    right,
    save,
    save_arrays,
    shapes,
    stepped,
    stepped_optimizer,
    torch_steps,
    weights,
)

BY_ALL = f"adamw:lr={LR},wd={WD},step=1,decay_on=all"


def faint(share: float) -> Values:
    """Return gradients whose unused rows are far below epsilon and go with the weight.

    A table that is also the head has such rows: tokens that are hardly ever predicted.
    """
    made, rng = dict(gradients(1)), np.random.default_rng(6)
    table, rest = made[EMBED].copy(), weights()[EMBED][UNUSED]
    table[UNUSED] = share * rest * rng.uniform(0, 2, rest.shape)
    return made | {EMBED: table}


def adam(torch: Any, parameters: list[Any]) -> Any:
    """Return torch's Adam without decay."""
    return adam_all(torch, parameters, weight_decay=0.0)


@pytest.mark.parametrize("share", [1e-11, 1e-10, -1e-10, 3e-9])
@pytest.mark.parametrize(("make", "stated"), [(adamw_all, BY_ALL), (adam, f"adam:lr={LR},step=1")])
def test_gradients_near_epsilon_are_no_decay(
    share: float, make: Any, stated: str, tmp_path: Path
) -> None:
    """Seen red: `the weight decays by 0.000101; 0.0001 is stated`, confirmed, over a right step."""
    report = Made(torch_steps(make, grads=lambda _: faint(share))[0][0], stated).report(tmp_path)
    assert report.causes == () and report.exit_code == 0, report.pronounced.says


@pytest.mark.parametrize("factor", [0.1, 0.37, 0.5, 3.0, 7.3, 10.0])
def test_a_wrong_rate_is_one_statement(factor: float, tmp_path: Path) -> None:
    """Seen red: three rates for one, 0.503 of the stated one, and most parameters unexplained."""
    after = stepped(lambda w, g: right(w, g, factor * LR))
    report = Made(after).report(tmp_path)
    assert [(one.cause, one.level) for one in report.causes] == [("step_factor", "confirmed")]
    assert len(report.causes[0].roles) == len(weights())
    assert f"the rate is {factor * LR:.3g}," in report.causes[0].says


def test_what_sizes_do_not_show_of_a_decay_is_listed(tmp_path: Path) -> None:
    """A table without rows at rest, and gradients all as small as epsilon: no decay shows."""
    grads = {name: np.where(g < 0, -1e-5, 1e-5) * (1 + g * g) for name, g in gradients(1).items()}
    small = {name: 1e-4 * w for name, w in weights().items()}
    after = {
        name: (w + right(w.astype(np.float64), grads[name], wd=0.0)).astype(np.float32)
        for name, w in small.items()
    }
    report = Made(after, BY_ALL, before=small).report(tmp_path)
    assert report.exit_code == 0
    unseen = {one.name for one in report.left if one.kind == "decay"}
    assert "L0.attn_q.weight" in unseen, report.pronounced.says


def state(folder: Path, rate: float) -> Path:
    """Save the state of after a first step, as torch does, with this rate."""
    import torch

    _, made = stepped_optimizer(adamw_all)
    made.param_groups[0]["lr"] = rate
    torch.save(made.state_dict(), folder / "state.pt")
    return folder / "state.pt"


def doubled(folder: Path, **more: Any) -> StepReport:
    """Return what is said of a step that is twice the right one, its decay too."""
    after = {
        name: (w + 2 * (-LR * g / (np.abs(g) + EPS) - LR * WD * w)).astype(np.float32)
        for name, w in weights().items()
        for g in [gradients(1)[name].astype(np.float64)]
    }
    made = [save(folder / name, w, "F32") for name, w in (("a", weights()), ("b", after))]
    return explain_step(made[0], after=made[1], optimizer=BY_ALL, **more)


def test_two_steps_or_twice_the_rate_is_not_confirmed(tmp_path: Path) -> None:
    """Seen red: `the step was taken twice`, confirmed, of a rate that was twice the stated one."""
    grads = save_arrays(tmp_path / "g.npz", gradients(1))
    for number, given in enumerate(({}, {"grads": [grads]})):
        folder = tmp_path / str(number)
        folder.mkdir()
        report = doubled(folder, **given)
        assert [one.level for one in report.causes] == ["explained"]
        assert "as well given by" in report.causes[0].says
        assert "--optimizer-state, whose groups have the rate, tells which" in report.causes[0].says
        assert len(report.causes[0].roles) == len(shapes())


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ((), "; --grads tells which)"),
        (("--grads",), "; --optimizer-state, which has epsilon and the moments, tells which)"),
        (("--grads", "--optimizer-state"), "given by gradient_scaled)"),
    ],
)
def test_an_option_that_was_given_is_not_asked_for(given: tuple[str, ...], wanted: str) -> None:
    assert rivals_text("decay_coupled", ("gradient_scaled",), given).endswith(wanted)


@pytest.mark.parametrize(("rate", "cause"), [(LR, "step_twice"), (2 * LR, "step_factor")])
def test_the_rate_of_a_state_tells_two_steps_from_twice_the_rate(
    rate: float, cause: str, tmp_path: Path
) -> None:
    report = doubled(tmp_path, optimizer_state=state(tmp_path, rate))
    assert [(one.cause, one.level) for one in report.causes] == [(cause, "confirmed")]


@pytest.mark.parametrize("scale", [1.0, 1e-3])
@pytest.mark.parametrize("left", [0.0, 3e-8, -1e-6])
def test_a_decay_that_takes_the_gradient_away_is_no_alarm(
    scale: float, left: float, tmp_path: Path
) -> None:
    """Seen red: float32 leaves noise of gradient plus decay, and Adam makes whole steps of it."""
    grads = {
        name: (scale * g if name == HEAD else g - left * g - (WD * weights()[name] + g)).astype(
            np.float32
        )
        for name, g in gradients(1).items()
    }
    after = torch_steps(adam_all, grads=lambda _: grads)[0][0]
    stated = f"adam:lr={LR},wd={WD},step=1,decay_on=all"
    report = Made(after, stated, grads=grads).report(tmp_path)
    assert report.causes == () and report.exit_code == 0, report.pronounced.says
