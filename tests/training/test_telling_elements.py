"""Elements that tell a mistake from the stated step: few of them explain it, and confirm nothing.

Seen red, each alone: all elements of the parameter counted; those of BF16 alone counted.
"""

from pathlib import Path

import numpy as np
import pytest

from aprfmt.model import open_model
from aprfmt.training.report import StepReport
from aprfmt.training.step import explain_step
from tests.training.steps import gradients, save, save_arrays, weights

NORM = "model.layers.0.input_layernorm.weight"
RATE = 0.05


def explained(count: int, sign: float, encoding: str, rest: float, folder: Path) -> StepReport:
    """Explain a step of SGD that moves `count` elements of one norm, upward where `sign` is 1.

    The other elements have the gradient `rest`, and so has every other parameter.
    """
    path = save(folder / "before", weights(), encoding)
    with open_model(path) as model:
        before = {view.names[0]: view.numpy().astype(np.float32) for view in model.roles.values()}
    grads = {name: np.full_like(g, rest) for name, g in gradients(1).items()}
    grads[NORM][:count] = 1.0
    after = {name: w - np.float32(RATE) * grads[name] for name, w in before.items()}
    after[NORM][:count] = before[NORM][:count] + np.float32(sign * RATE)
    return explain_step(
        path, after=save(folder / "after", after, encoding),
        grads=[save_arrays(folder / "grads.npz", grads)], optimizer=f"sgd:lr={RATE}",
    )  # fmt: skip


@pytest.mark.parametrize(("encoding", "rest"), [("BF16", 1e-9), ("F32", 0.0)])
@pytest.mark.parametrize(
    ("count", "level"), [(1, "explained"), (3, "explained"), (40, "confirmed")]
)
def test_a_sign_is_confirmed_by_many_elements_alone(
    count: int, level: str, encoding: str, rest: float, tmp_path: Path
) -> None:
    (cause,) = explained(count, 1.0, encoding, rest, tmp_path).causes
    assert (cause.cause, cause.level, cause.roles) == ("step_sign", level, ("L0.attn_norm.weight",))


@pytest.mark.parametrize(("encoding", "rest"), [("BF16", 1e-9), ("F32", 0.0)])
@pytest.mark.parametrize("count", [1, 40])
def test_a_right_step_of_few_elements_is_right(
    count: int, encoding: str, rest: float, tmp_path: Path
) -> None:
    report = explained(count, -1.0, encoding, rest, tmp_path)
    assert report.exit_code == 0 and not report.causes
