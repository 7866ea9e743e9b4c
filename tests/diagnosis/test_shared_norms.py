"""Parallel branches with two norms, of which one branch reads the other's.

Seen red: only the interval of operations with their weights.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from aprfmt.diagnosis import diagnose
from tests.diagnosis.engine_changes import LAYERS
from tests.diagnosis.engines import tiny_folder, trace
from tests.diagnosis.test_hypotheses import MODULES

Weights = Callable[[Any], Mapping[str, Any]]


def read(role: str, other: str) -> Weights:
    """Return an overlay by which all norms of `role` are those of `other`."""
    return lambda held: {
        key: np.array(held[key.replace(role, other)].numpy(), np.float32)
        for key in held
        if f".{role}." in key
    }


NORMS: Mapping[str, tuple[str, frozenset[str], Weights, str, str]] = {
    "MLP": ("gpt_neox", LAYERS, read("ffn_norm", "attn_norm"), "residual",
            "the MLP reads attention's norm, not its own"),
    "MLP, from modules": ("gpt_neox", MODULES, read("ffn_norm", "attn_norm"), "residual",
                          "the MLP reads attention's norm, not its own"),
    "attention": ("gpt_neox", LAYERS, read("attn_norm", "ffn_norm"), "residual",
                  "attention reads the MLP's norm, not its own"),
    "one after the other": ("gpt2", MODULES, read("ffn_norm", "attn_norm"), "copied_tensor",
                            "attn_norm is read in place of ffn_norm, too, weight and bias"),
}  # fmt: skip


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_of_the_other_branch_is_named(name: str) -> None:
    base, points, weights, cause, says = NORMS[name]
    folder = tiny_folder(base)
    run = trace(folder, f"norm-{name}".replace(" ", "-"), points=points, weights=weights)
    found = diagnose(str(folder), str(run))
    (finding,) = found.findings
    assert (finding.cause, finding.says) == (cause, says), found.sentence
    assert finding.certainty == "confirmed"
