"""Parts of runs, losses and engines, each by itself."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.checks.gates.forward import judge_loss
from aprfmt.checks.gates.golden import GoldenText
from aprfmt.inference.batch import _aligned
from aprfmt.inference.engines.graph import GraphReader
from aprfmt.inference.evaluation import Sample, without_label
from aprfmt.inference.loss import MeanLoss
from aprfmt.inference.parity.matched import ThroughRows


def test_rows_through_an_encoding_take_what_their_numbers_take() -> None:
    values = np.random.default_rng(0).normal(size=(6, 64)).astype(np.float32)
    rows = ThroughRows(SimpleNamespace(shape=values.shape, numpy=lambda: values), "Q8_0")  # type: ignore[arg-type]
    found = rows.numpy()
    assert rows.nbytes == found.nbytes and found.shape == values.shape
    assert 0 < np.abs(found - values).max() < 0.02


@pytest.mark.parametrize("shift", [-1, 0, 1])
def test_labels_stand_against_the_tokens_they_are(shift: int) -> None:
    """The mask of the first token is kept where labels are the ids; no row predicts it."""
    ids = np.array([[5, 6, 7, 8]])
    labels = {0: ids, 1: np.array([[6, 7, 8, 9]]), -1: np.array([[4, 5, 6, 7]])}[shift]
    longer, label = _aligned(ids, labels, np.ones(ids.shape, bool), shift)
    assert longer.tolist() == [[5, 6, 7, 8, 9 if shift == 1 else -1]]
    expected = {0: [1, 1, 1, 1, 0], 1: [0, 1, 1, 1, 1], -1: [0, 1, 1, 0, 0]}[shift]
    assert label.astype(int).tolist() == [expected]


def test_why_a_sample_has_no_loss_token() -> None:
    def said(count: int, prompt: int, cut: bool) -> str:
        return without_label(Sample("s", tuple(range(count)), prompt=prompt, cut=cut), 8, "windows")

    assert said(1, 0, False) == "1 tokens leave no loss token; give a longer text"
    assert said(2, 0, False).startswith("2 tokens fill no window of 8")
    assert said(3, 3, True) == "3 tokens leave no loss token; give a response"
    assert said(30, 9, True).startswith("its prompt of 9 tokens fills the window of 8")


@pytest.mark.parametrize("off", [0.0, 0.25, 0.25000001])
def test_a_stated_loss_may_be_as_far_off_as_is_allowed(off: float) -> None:
    found = MeanLoss(2.0, 10, 100, 1)
    checks = judge_loss(
        GoldenText("t", "x", nats=2.0 + off), found, (3.0, 2.0, 3.0), "trained", 0.25
    )
    (one,) = [each for each in checks if each.name == "loss-as-stated"]
    assert one.outcome == ("PASS" if off <= 0.25 else "FAIL")
    assert math.isclose(found.uniform, math.log(100))


@pytest.mark.parametrize("point", ["experts", "expert_w", "attn_out"])
@pytest.mark.parametrize("masked", [False, True])
def test_only_whole_values_of_experts_are_routed(point: str, masked: bool) -> None:
    put: list[str] = []
    reader: Any = SimpleNamespace(
        _scales_q=lambda node: None,
        places=lambda node: [SimpleNamespace(point=point, layer=0, columns=None)],
        _add_routed=lambda place, values: put.append("routed"),
        _put=lambda place, cut, mask: put.append("put"),
    )
    seen = np.ones(2, bool) if masked else None
    GraphReader.add(reader, SimpleNamespace(scale=None), np.zeros(2, np.float32), seen)  # type: ignore[arg-type]
    assert put == ["routed" if point.startswith("expert") and not masked else "put"]
