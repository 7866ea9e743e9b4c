"""Steps of which each rank clipped its own shards of the gradients by their own norm.

Seen red: no cause, or `clip_missing` of the parameters of a rank below the bound beside
`step_factor`, confirmed, of the others.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprfmt.causes.training.clipping import clip_factor
from aprfmt.training.report import StepReport
from tests.training.faults import CLIP, SGD, STATED, norm
from tests.training.ranks import clipped
from tests.training.steps import Made, gradients, right, weights

# Order of a llama's parameters in a module tree: the norms of a layer are behind its matrices.
ORDER = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def in_module_order() -> dict[str, Any]:
    """Return the gradients of the first step in the order of the model's modules, float64."""

    def place(name: str) -> tuple[int, int]:
        """Return (layer, place in it) of a parameter: the table first, final norm and head last."""
        if ".layers." not in name:
            return (-1, 0) if "embed" in name else (99, int("head" in name))
        part = next((n for n, each in enumerate(ORDER) if each in name), len(ORDER))
        return int(name.split(".")[2]), part + int("post_attention" in name)

    return {name: gradients(1)[name].astype(np.float64) for name in sorted(gradients(1), key=place)}


def sgd_report(
    folder: Path, made: dict[str, Any], clip: float = CLIP, rate: float = 0.5
) -> StepReport:
    """Return what is said of an SGD step by the gradients `made`, with the whole ones given."""
    after = {name: (w - rate * made[name]).astype(np.float32) for name, w in weights().items()}
    return Made(after, f"{SGD},clip={clip}", grads=gradients(1)).report(folder)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(
    ("how", "words"),
    [("rows", "rows of"), ("flat", "flat piece of"), ("buffer", "piece of one flat buffer")],
)
@pytest.mark.parametrize("share", [0.1, 0.5])
def test_the_norms_of_ranks_give_the_step(
    how: str, words: str, ranks: int, share: float, tmp_path: Path
) -> None:
    """With half of the norm as bound, some of four ranks are below it.

    Flat pieces of all gradients are rows of them where the ranks divide the rows.
    """
    clip = float(f"{share * norm():.3g}")
    report = sgd_report(tmp_path, clipped(in_module_order(), ranks, how, clip), clip)
    (one,) = report.causes
    assert (one.cause, one.level, len(one.roles)) == ("clip_by_tensor", "confirmed", 21)
    cut = "rows of" if how == "flat" and ranks != 3 else words
    assert f"each of {ranks} ranks clipped its {cut}" in one.says
    assert f"to {clip:g} by the norm of its own shards, not by that of all, " in one.says


def as_stated(made: dict[str, Any]) -> dict[str, Any]:
    return {name: clip_factor(CLIP, norm()) * g for name, g in made.items()}


def not_at_all(made: dict[str, Any]) -> dict[str, Any]:
    return made


def other_bound(made: dict[str, Any]) -> dict[str, Any]:
    return clipped(made, 2, "rows", 1.7 * CLIP)


def one_parameter_more(made: dict[str, Any]) -> dict[str, Any]:
    found = clipped(made, 2, "rows", CLIP)
    found["model.layers.1.mlp.up_proj.weight"] *= 1.5
    return found


def one_row_more(made: dict[str, Any]) -> dict[str, Any]:
    found = clipped(made, 2, "rows", CLIP)
    found["model.layers.1.mlp.up_proj.weight"][3] *= 1.5
    return found


@pytest.mark.parametrize(
    ("change", "causes"),
    [(as_stated, []), (not_at_all, ["clip_missing"]), (other_bound, None),
     (one_parameter_more, None), (one_row_more, None)],
)  # fmt: skip
def test_other_steps_are_not_said_to_be_clipped_by_ranks(
    change: Callable[[dict[str, Any]], dict[str, Any]], causes: list[str] | None, tmp_path: Path
) -> None:
    report = sgd_report(tmp_path, change(in_module_order()))
    assert causes is None or [one.cause for one in report.causes] == causes
    assert not [one for one in report.causes if "ranks clipped" in one.says]


def test_ranks_whose_shards_are_all_below_the_bound_clip_nothing(tmp_path: Path) -> None:
    """Nothing tells this step from one that is not clipped: both are named."""
    clip = float(f"{0.9 * norm():.3g}")
    report = sgd_report(tmp_path, clipped(in_module_order(), 4, "rows", clip), clip)
    (one,) = report.causes
    assert (one.cause, one.level) == ("clip_missing", "explained")
    assert "clip_by_tensor" in one.says


def adam_report(folder: Path, made: dict[str, Any]) -> StepReport:
    """Return what is said of a first AdamW step by the gradients `made`."""
    after = {name: (w + right(w, made[name])).astype(np.float32) for name, w in weights().items()}
    return Made(after, f"{STATED},clip={CLIP}", grads=gradients(1)).report(folder)


def test_elements_as_small_as_epsilon_show_the_clipping_of_ranks(tmp_path: Path) -> None:
    report = adam_report(tmp_path, clipped(in_module_order(), 4, "flat", CLIP))
    (one,) = report.causes
    assert one.cause == "clip_by_tensor" and "each of 4 ranks clipped its " in one.says
