"""Matrices above the sampled size, whose update is a rule of the whole matrix.

Seen red: Muon's and Adafactor's steps were named for small matrices, and "what happened is not
known" for larger ones of the same run.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from aprfmt.causes.training.other_optimizer import factored, orthogonal
from aprfmt.training.step import explain_step
from aprfmt.training.update_check import SAMPLE
from tests.models import save_tiny

SIZES = {"hidden_size": 256, "num_hidden_layers": 1, "intermediate_size": 320}
Rule = Callable[[Any], Any]
STATED = "adamw:lr=0.01,wd=0,step=1"


def stepped(folder: Path, rule: Rule) -> Any:
    """Return the answer for a step in which each matrix of layer 0 moved by `rule`."""
    save_tiny("llama", folder / "before", "float32", **SIZES)
    save_tiny("llama", folder / "after", "float32", **SIZES)
    held = load_file(folder / "before/model.safetensors")
    drawn = np.random.default_rng(5)
    grads = {key: drawn.standard_normal(x.shape).astype(np.float32) for key, x in held.items()}
    moved = {}
    for key, x in held.items():
        wide = np.float64(grads[key])
        matrix = x.ndim == 2 and ".layers." in key
        step = rule(wide) if matrix else wide / (np.abs(wide) + 1e-8)
        moved[key] = (x - 0.01 * step).astype(np.float32)
    save_file(moved, folder / "after/model.safetensors", metadata={"format": "pt"})
    save_file(grads, folder / "grads.safetensors")
    return explain_step(
        folder / "before", after=folder / "after", grads=[folder / "grads.safetensors"],
        optimizer=STATED,
    )  # fmt: skip


@pytest.mark.parametrize(("rule", "says"), [(orthogonal, "Muon's"), (factored, "Adafactor's")])
def test_one_rule_of_all_matrices_is_one_cause(rule: Rule, says: str, tmp_path: Path) -> None:
    found = stepped(tmp_path, rule)
    (cause,) = found.causes
    assert cause.cause == "other_optimizer" and says in cause.says
    sizes = {row.key: int(np.prod(row.shape)) for row in found.tensors}
    assert sum(sizes[role] > SAMPLE for role in cause.roles) == 3
    assert sum(sizes[role] <= SAMPLE for role in cause.roles) == 4


def test_another_step_of_a_large_matrix_has_no_rule(tmp_path: Path) -> None:
    """Signs in another order of rows are no rule's direction."""
    found = stepped(tmp_path, lambda grad: np.sign(grad[::-1]) * (1 + 0.5 * np.abs(grad)))
    assert found.exit_code == 1
    assert not any(row.cause == "other_optimizer" for row in found.causes)


def test_the_stated_rule_of_large_matrices_agrees(tmp_path: Path) -> None:
    assert stepped(tmp_path, lambda grad: grad / (np.abs(grad) + 1e-8)).exit_code == 0
