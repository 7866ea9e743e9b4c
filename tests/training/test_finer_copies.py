"""Checkpoints in few bits: what they show of a step, and whether the trainer holds finer weights.

Seen red, each alone: a step up the gradient in norms, exit 0, since bfloat16 "does not show" it;
`update_rounded_away`, confirmed, of a trainer that keeps float32 copies; `gradient_scaled`,
confirmed, of weights that did not move at all.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprfmt.training.report import StepReport
from aprfmt.training.step import explain_step
from tests.training.faults import finer
from tests.training.steps import (
    WD,
    Made,
    Values,
    adamw_all,
    gradients,
    right,
    rounded,
    save,
    save_arrays,
    torch_steps,
    weights,
)

NORMS = 5  # of 64 elements near 1 each
LION = 1e-4
SEEN = 1.8e-3  # moves matrices by many spacings, and is below half of one near 1


def by_lion(start: Values, sign: Callable[[Any], float]) -> Values:
    """Return weights after Lion's first step; `sign(w)` is 1, or -1 for up the gradient."""
    return {
        name: (w - sign(w) * LION * np.sign(gradients(1)[name])).astype(np.float32)
        for name, w in start.items()
    }


def said(
    folder: Path, before: Values, after: Values, kind: str, rule: str, **more: Any
) -> StepReport:
    """Return what is said of a step from weights in bfloat16, with its gradients."""
    return explain_step(
        save(folder / "before", before, "BF16"),
        after=save(folder / "after", after, kind),
        grads=[save_arrays(folder / "grads.npz", gradients(1))],
        optimizer=rule,
        **more,
    )


@pytest.mark.parametrize("wrong", [False, True])
def test_a_finer_checkpoint_shows_the_step_of_weights_in_bfloat16(
    wrong: bool, tmp_path: Path
) -> None:
    """Which is far below their spacing, where they are what was stepped."""
    after = by_lion(weights(), lambda w: -1 if wrong and w.ndim < 2 else 1)
    report = said(tmp_path, weights(), after, "F32", f"lion:lr={LION},step=1")
    assert report.exit_code == wrong and not report.left
    assert [(one.cause, len(one.roles)) for one in report.causes] == [("step_sign", NORMS)] * wrong


@pytest.mark.parametrize("wrong", [False, True])
def test_weights_that_were_rounded_do_not_show_it(wrong: bool, tmp_path: Path) -> None:
    """Norms that are copies of float32 ones, up to half a spacing off: nothing right is accused."""
    rng = np.random.default_rng(8)
    start = {
        name: (w * (1 + 2e-3 * rng.uniform(-1, 1, w.shape))).astype(np.float32)
        for name, w in weights().items()
    }
    after = by_lion(start, lambda w: -1 if wrong and w.ndim < 2 else 1)
    stored = {name: rounded(w) for name, w in start.items()}
    report = said(tmp_path, stored, after, "F32", f"lion:lr={LION},step=1")
    named = {(one.cause, role) for one in report.causes for role in one.roles}
    assert all(wrong and cause == "step_sign" and "norm" in role for cause, role in named)
    hidden = [one.name for one in report.left if one.kind == "step"]
    assert len([name for name in hidden if name.endswith("norm.weight")]) == NORMS - len(named)


def stepped(rate: float, dtype: str) -> Values:
    """Return weights after a first step of torch's AdamW in a type, as bfloat16 stores them."""
    return finer(torch_steps(partial(adamw_all, lr=rate, weight_decay=0), dtype=dtype)[0][0])


@pytest.mark.parametrize(
    ("rate", "dtype", "trained_in", "level"),
    [
        (SEEN, "float32", None, ""),  # the bits of the matrices say that they are held finer
        (SEEN, "bfloat16", None, "confirmed"),
        (SEEN, "bfloat16", "bfloat16", "confirmed"),
        (1e-6, "float32", None, "explained"),  # nothing moves that could say it
        (1e-6, "float32", "float32", ""),
        (1e-6, "bfloat16", None, "explained"),
    ],
)
def test_a_first_step_of_finer_copies_is_no_mistake(
    rate: float, dtype: str, trained_in: str | None, level: str, tmp_path: Path
) -> None:
    rule = f"adamw:lr={rate},wd=0,step=1"
    after = stepped(rate, dtype)
    report = said(tmp_path, weights(), after, "BF16", rule, trained_in=trained_in)
    assert [(one.cause, one.level) for one in report.causes] == (
        [("update_rounded_away", level)] if level else []
    ), report.pronounced.says
    assert report.exit_code == bool(level)
    if level == "explained":
        assert "--trained-in float32 says so" in report.causes[0].says
    if rate == SEEN and not level:  # a step too small for the type moves no norm: nothing shows it
        hidden = [one.name for one in report.left]
        assert len(hidden) == NORMS and all("norm" in name for name in hidden)
        assert report.counts["agrees"] == len(report.tensors)


@pytest.mark.parametrize("moved", [0, 1, 8])
def test_a_step_that_moves_some_weights_is_compared_to_the_bit(moved: int, tmp_path: Path) -> None:
    """Most elements of a norm are too large for the step; `moved` of them are small enough.

    Seen red: no bits asked, all such steps listed as not compared; a norm of which no element
    moves, and which no step would leave as it is as well, compared.
    """
    name = "model.norm.weight"
    start = weights()
    start[name].flat[:moved] = 2.0**-6
    after = finer(
        {n: (w + right(w, gradients(1)[n], SEEN, 0.0)).astype(np.float32) for n, w in start.items()}
    )
    rule = f"adamw:lr={SEEN},wd=0,step=1"
    report = said(tmp_path / "right", start, after, "BF16", rule)
    hidden = {one.name for one in report.left if one.kind == "step"}
    assert ("output_norm.weight" in hidden) == (moved == 0) and not report.exit_code
    after[name].flat[moved : moved + 8] *= np.float32(1 + 2.0**-7)  # another step's
    report = said(tmp_path / "wrong", start, after, "BF16", rule)
    wrong = {row.key for row in report.tensors if row.verdict == "differs"}
    left = {one.name for one in report.left if one.kind == "step"}
    assert "output_norm.weight" in wrong | left


@pytest.mark.parametrize(
    ("moved", "near", "cause"),
    [
        (0, 1.0, None),  # both signs leave the same weights: the step is not compared
        (1, 2.0**-6, "step_sign"),  # moves by three spacings
        (2, 2.0**-6, "step_sign"),
        (1, 1.5 * 2.0**-4, ""),  # by one spacing: another step, and not enough to say which
    ],
)
def test_one_element_that_moves_shows_the_sign_of_a_step(
    moved: int, near: float, cause: str | None, tmp_path: Path
) -> None:
    """A norm stepped up the gradient, of which `moved` elements near `near` move in bfloat16."""
    name, rate = "model.norm.weight", SEEN / 4
    start = weights()
    start[name].flat[:moved] = near
    for sign in (1, -1):
        after = {
            n: w + (sign if n == name else 1) * right(w, gradients(1)[n], rate, 0.0)
            for n, w in start.items()
        }
        rule = f"adamw:lr={rate},wd=0,step=1"
        report = said(tmp_path / str(sign), start, finer(after), "BF16", rule)
        hidden = {one.name for one in report.left if one.kind == "step"}
        wrong = sign == -1 and moved > 0
        assert ("output_norm.weight" in hidden) == (moved == 0)
        assert report.exit_code == wrong
        named = [(one.cause, one.roles) for one in report.causes]
        assert named == [(cause, ("output_norm.weight",))] * wrong


@pytest.mark.parametrize("make", [weights, gradients])
def test_values_that_a_test_changes_are_its_own(make: Callable[[], Values]) -> None:
    """Seen red: small elements of one test's norm showed the steps of the tests after it."""
    name = "model.norm.weight"
    values, kept = make(), make()[name].copy()
    values[name].flat[:8] = 2.0**-6
    del values["lm_head.weight"]
    assert np.array_equal(make()[name], kept) and "lm_head.weight" in make()


@pytest.mark.parametrize("wrong", [False, True])
def test_float32_copies_show_what_bfloat16_rounds_away(wrong: bool, tmp_path: Path) -> None:
    """The same step of norms: with the other sign bfloat16 has the same weights, float32 not."""
    sign, rate = -1 if wrong else 1, SEEN / 4
    after = {
        n: (w + (sign if w.ndim < 2 else 1) * right(w, gradients(1)[n], rate, 0.0)).astype("f4")
        for n, w in weights().items()
    }
    rule = f"adamw:lr={rate},wd=0,step=1"
    coarse = said(tmp_path / "coarse", weights(), finer(after), "BF16", rule)
    assert not coarse.exit_code
    assert len([one for one in coarse.left if one.kind == "step"]) == NORMS
    exact = explain_step(
        save(tmp_path / "before", weights(), "F32"),
        after=save(tmp_path / "after", after, "F32"),
        grads=[save_arrays(tmp_path / "grads.npz", gradients(1))],
        optimizer=rule,
    )
    assert exact.exit_code == wrong and not exact.left
    assert [one.cause for one in exact.causes] == ["step_sign"] * wrong


@pytest.mark.parametrize("kind", ["BF16", "F16"])
@pytest.mark.parametrize("rate", [1e-5, 1e-6, 1e-7])
@pytest.mark.parametrize("moved", [0, 1, 3])
def test_a_step_that_was_skipped_is_no_factor(
    moved: int, rate: float, kind: str, tmp_path: Path
) -> None:
    """Weights that moved little are not explained by a gradient or rate small enough for that.

    Each parameter has weights near zero, whose step the type shows; `moved` elements of each go
    one spacing up.
    """
    rng = np.random.default_rng(8)
    start = {}
    for name, w in weights().items():
        near = rng.random(w.shape) < 0.02
        near.flat[:4] = True
        start[name] = np.where(near, np.float32(2.0**-16), w).astype(np.float32)
    after = {name: w.copy() for name, w in start.items()}
    for w in after.values():
        w.flat[8 : 8 + moved] *= np.float32(1 + 2.0**-6)
    recipe = f"adamw:lr={rate},step=1"
    report = explain_step(
        save(tmp_path / "before", start, kind),
        after=save(tmp_path / "after", after, kind),
        grads=[save_arrays(tmp_path / "grads.npz", gradients(1))],
        optimizer=recipe,
    )
    named = {one.cause for one in report.causes}
    assert named <= {"", "frozen", "rows_frozen"} and report.exit_code == 1
    if not moved and rate >= 1e-6:
        assert [(one.cause, one.level) for one in report.causes] == [("frozen", "confirmed")]


@pytest.mark.parametrize(("part", "exit_code"), [(0.25, 2), (1, 0), (2, 2)])
def test_another_decay_that_rounding_hides_is_not_said_to_agree(
    part: float, exit_code: int, tmp_path: Path
) -> None:
    """A decay below the type's spacing is held to all weights together, not to each alone."""
    lr = 0.01
    after = {
        name: rounded((w + right(w, gradients()[name], lr, part * WD)).astype(np.float32))
        for name, w in weights().items()
    }
    rule = f"adamw:lr={lr},wd={WD},step=1"
    found = Made(after, rule, grads=gradients(), encoding="BF16").report(tmp_path)
    assert found.exit_code == exit_code and not found.causes
    open_ = [one for one in found.pronounced.not_compared if one.kind == "decay"]
    assert bool(open_) == (part != 1)
