"""Adam's first step with gradients clipped otherwise than stated, which small elements show.

Seen red: `gradient_scaled`, confirmed, of one norm "2 times", and no cause of all other tensors.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from aprfmt.causes.training.clipping import clip_factor
from aprfmt.training.report import StepReport
from aprfmt.training.step_causes import UNSEEN_FACTOR
from tests.training.faults import CLIP, STATED, norm, own_norm
from tests.training.steps import Made, gradients, right, weights


def without_norms() -> float:
    """Return the norm of the gradients of all matrices, of the first step."""
    squares = (own_norm(name) ** 2 for name, g in gradients(1).items() if g.ndim > 1)
    return float(sum(squares) ** 0.5)


def report_of(
    folder: Path, factor: Callable[[str], float], size: float = 1.0, clip: float = CLIP
) -> StepReport:
    """Return what is said of a first AdamW step whose gradients have a factor each.

    The given gradients are those of the first step times `size`, and clipping to `clip` is stated.
    """
    grads = {name: (size * g).astype(np.float32) for name, g in gradients(1).items()}
    after = {
        name: (w + right(w, factor(name) * grads[name].astype(np.float64))).astype(np.float32)
        for name, w in weights().items()
    }
    return Made(after, f"{STATED},clip={clip}", grads=grads).report(folder)


CLIPPINGS: dict[str, tuple[Callable[[str], float], str]] = {
    "not": (lambda name: 1.0, "clip_missing"),
    "twice": (lambda name: clip_factor(CLIP, norm()) ** 2, "clip_twice"),
    "each by its own norm": (lambda name: clip_factor(CLIP, own_norm(name)), "clip_by_tensor"),
    "by the norm of a part": (lambda name: clip_factor(CLIP, without_norms()), "clip_by_part"),
}


@pytest.mark.parametrize("case", CLIPPINGS)
def test_another_clipping_is_told_by_elements_as_small_as_epsilon(
    case: str, tmp_path: Path
) -> None:
    factor, cause = CLIPPINGS[case]
    report = report_of(tmp_path, factor)
    assert [one.cause for one in report.causes] == [cause]
    assert UNSEEN_FACTOR not in report.causes[0].says


def test_the_stated_clipping_is_right(tmp_path: Path) -> None:
    report = report_of(tmp_path, lambda name: clip_factor(CLIP, norm()))
    assert report.causes == () and report.exit_code == 0


@pytest.mark.parametrize("size", [1e5, 1e8])
def test_a_clipping_that_adam_does_not_see_is_no_fault(size: float, tmp_path: Path) -> None:
    report = report_of(tmp_path, lambda name: 1.0, size, clip=norm() * size / 2)
    assert not [one for one in report.causes if one.level == "confirmed"]


@pytest.mark.parametrize(("factor", "size"), [(1.7, 1e5), (1.7, 100.0), (1.4, 1e5)])
def test_a_number_near_a_factor_that_adam_hardly_sees_is_not_confirmed(
    factor: float, size: float, tmp_path: Path
) -> None:
    report = report_of(tmp_path, lambda name: factor, size, clip=1e9)
    scaled = [one for one in report.causes if one.cause == "gradient_scaled"]
    assert scaled and all(UNSEEN_FACTOR in one.says for one in scaled)
    assert {one.level for one in report.causes} == {"located"}
