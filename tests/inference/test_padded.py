"""Experts multiplied at once, padded to equal rows, give the numbers of the loop over them.

No backend of a CPU does so by itself: here each is told to.

Seen red: places left in the order of weights, an expert's bias left out, one
expert's weights for all, inputs not weighed, every rank weighed by the first.
"""

from typing import Any

import numpy as np
import pytest

from aprfmt.inference.padded import lots
from aprfmt.inference.session import Session
from aprfmt.model import open_model
from tests.inference.judge import backend, judged, rel
from tests.models import IDS, MAKERS

# Weights on outputs and on inputs, biases of experts and a clamped gate, groups, a shared expert.
NAMES = ("mixtral", "qwen2_moe", "gpt_oss", "deepseek_v3", "llama4", "phimoe", "ernie4_5_moe")
RUNS = ("numpy:float64", "torch:float64", "torch:float32", "torch:bfloat16")


def logits(patch: pytest.MonkeyPatch, name: str, run: str, *, pads: bool) -> np.ndarray:
    arithmetic = backend(run)
    calls: list[Any] = []

    def answer(*given: Any) -> bool:
        calls.append(given)
        return pads

    patch.setattr(arithmetic, "pads", answer)
    with open_model(judged(name).folder) as model, Session.of(model, arithmetic) as session:
        found = session.logits(IDS)
    assert calls, "no layer with experts ran"
    return found


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("run", RUNS)
def test_logits_are_those_of_the_loop(name: str, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert name in MAKERS
    limit = {"float64": 1e-13, "float32": 2e-6, "bfloat16": 8e-3}[run.rpartition(":")[2]]
    at_once, one_by_one = (logits(monkeypatch, name, run, pads=pads) for pads in (True, False))
    assert rel(at_once, one_by_one) < limit


def test_every_token_finds_its_rows_by_ascending_expert() -> None:
    rng = np.random.default_rng(5)
    experts = np.stack([rng.permutation(9)[:3] for _ in range(50)])
    weights = rng.random((50, 3))
    found = lots(experts, weights)
    flat_rows, flat_weights = found.rows.reshape(-1), found.weights.reshape(-1)
    most = found.rows.shape[1]
    for token in range(50):
        places = found.places[token]
        assert (flat_rows[places] == token).all()
        order = np.argsort(experts[token])
        assert [found.experts[place // most] for place in places] == experts[token][order].tolist()
        np.testing.assert_array_equal(flat_weights[places], weights[token][order])
