"""Statistics that wait on a device, and logits that stay there: the same answers, later.

Seen red: records behind the first NaN kept, a row with a NaN taken for token 0.
"""

from typing import Any

import numpy as np
import pytest

from aprfmt.errors import AprfmtError
from aprfmt.inference.backends.numpy_backend import NumpyBackend
from aprfmt.inference.sampling import Sampler, Sampling
from aprfmt.inference.session import Session
from aprfmt.model import open_model
from aprfmt.tensors.stats import Stats, compute_stats
from tests.inference.judge import judged
from tests.models import IDS


class Late:
    """Statistics that are computed only when they are read."""

    def __init__(self) -> None:
        self.values: list[Any] = []

    def add(self, x: Any) -> None:
        self.values.append(np.array(x))

    def join(self) -> None:
        pass

    def read(self) -> list[Stats]:
        return [compute_stats(x) for x in self.values]


class LateBackend(NumpyBackend):
    def pending(self) -> Late:
        return Late()


class OnDevice:
    """Logits that count how often they are read whole."""

    def __init__(self, values: list[float]) -> None:
        self.values = np.array(values, np.float32)
        self.read = 0

    def argmax_or_none(self) -> int | None:
        return None if np.isnan(self.values).any() else int(np.argmax(self.values))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        self.read += 1
        return self.values


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_statistics_that_wait_are_the_same(name: str) -> None:
    with open_model(judged(name).folder) as model:
        now, later = (
            Session.open(model, b("cpu", "float32")).trace(IDS, tuple(model_points))
            for b in (NumpyBackend, LateBackend)
            for model_points in [Session.open(model, b("cpu", "float32")).points]
        )
    assert dict(now.records) == dict(later.records) and now.aliases == later.aliases
    assert all(record.stats is not None for record in later.records.values())


@pytest.mark.parametrize("stop", [True, False])
def test_a_trace_that_waits_ends_where_it_would_have(stop: bool) -> None:
    traces = []
    with open_model(judged("llama").folder) as model:
        for kind in (NumpyBackend, LateBackend):
            plain = Session.open(model, kind("cpu", "float32"))
            up = plain.weights["L1.ffn_up.weight"].numpy().copy()
            up[3, 5] = np.nan
            weights = plain.weights.with_arrays({"L1.ffn_up.weight": up})
            session = Session(model.spec, model.hyper, weights, plain.backend)
            with np.errstate(invalid="ignore"):
                traces.append(session.trace(IDS, tuple(session.points), stop=stop))
    now, later = traces
    assert now.nonfinite == later.nonfinite == "L1.ffn_up"
    assert list(now.records) == list(later.records)
    assert (list(later.records)[-1] == "L1.ffn_up") is stop


def test_greedy_sampling_leaves_logits_where_they_are() -> None:
    row = OnDevice([0.5, 2.0, 2.0, -1.0])
    assert Sampler(Sampling())(row) == 1 and row.read == 0
    assert Sampler(Sampling(0.7, top_k=1))(row) in (1, 2) and row.read == 1
    with pytest.raises(AprfmtError, match="1 NaN and 0 infinities of 2"):
        Sampler(Sampling())(OnDevice([1.0, np.nan]))
