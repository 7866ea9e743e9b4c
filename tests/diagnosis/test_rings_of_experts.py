"""Experts that run one number further on or back: the order is named, by outputs of layers too.

Seen red: only the interval of operations with their weights.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from aprfmt.diagnosis import diagnose
from aprfmt.diagnosis import search as searching
from tests.diagnosis.engine_changes import LAYERS
from tests.diagnosis.engines import tiny_folder, trace
from tests.diagnosis.test_hypotheses import MODULES

Weights = Callable[[Any], Mapping[str, Any]]


def turned(layers: frozenset[int], order: Callable[[int], list[int]]) -> Weights:
    """Return an overlay by which experts of `layers` have the weights that order(count) says."""

    def weights(held: Any) -> Mapping[str, Any]:
        made = {}
        for key in held:
            if "_exps." in key and int(key[1 : key.index(".")]) in layers:
                x = np.array(held[key].numpy(), np.float32)
                made[key] = x[order(len(x))]
        return made

    return weights


RINGS: Mapping[str, tuple[int, frozenset[str], str]] = {
    "one on": (1, LAYERS, "each number runs the expert of that number + 1, counted in a ring"),
    "one back": (-1, LAYERS, "each number runs the expert of that number - 1, counted in a ring"),
    "from modules": (1, MODULES, "that number + 1, counted in a ring"),
}


@pytest.mark.parametrize("name", RINGS)
def test_experts_that_are_one_number_off_are_named(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, points, says = RINGS[name]
    monkeypatch.setattr(searching, "RUNS", 24)
    folder = tiny_folder("mixtral")
    weights = turned(frozenset({1}), lambda count: [(e + step) % count for e in range(count)])
    run = trace(folder, f"ring-{name}".replace(" ", "-"), points=points, weights=weights)
    found = diagnose(str(folder), str(run))
    (finding,) = found.findings
    assert (finding.cause, finding.certainty) == ("expert_order", "confirmed"), found.sentence
    assert says in finding.says
