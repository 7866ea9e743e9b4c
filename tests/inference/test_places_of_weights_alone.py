"""Where weights are placed within a budget, and which drafts of a head are accepted."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.inference import memory_estimate
from aprfmt.inference.draft import DraftCounts

# --- drafts ---------------------------------------------------------------------------------------


def test_a_draft_is_accepted_where_both_choose_the_same_token() -> None:
    """The head's rows are the model's last ones; a row with no number is not accepted."""
    mine = np.eye(4)[[0, 1, 2, 3, 1]]
    drafts = np.eye(4)[[1, 2, 0, 1]]
    found = DraftCounts(10, 3).add_rows(mine, drafts)
    assert (found.drafts, found.accepted) == (14, 6)
    for bad in (np.nan, np.inf, -np.inf):
        for side in (mine, drafts):
            held = side.copy()
            held[-1, 3] = bad
            rows = (held, drafts) if side is mine else (mine, held)
            assert DraftCounts().add_rows(*rows).accepted == 2
    assert DraftCounts().add_rows(mine, drafts[:0]) == DraftCounts()


def test_a_share_of_drafts_is_enough_from_its_least_on() -> None:
    counts = DraftCounts(8, 6)
    assert counts.acceptance_rate == 0.75 and math.isnan(DraftCounts().acceptance_rate)
    for least, status in ((0.5, "PASS"), (0.75, "PASS"), (0.76, "FAIL"), (1.0, "FAIL")):
        check = counts.check_acceptance(least, "head 0")
        assert (check.outcome, check.where) == (status, "head 0")
        assert check.found == "75.0 % of 8 drafts"
        assert check.expected == f"at least {100 * least:g} %"
        assert bool(check.todo) is (status == "FAIL")
    none = DraftCounts().check_acceptance(0.5, "head 0")
    assert (none.outcome, none.found) == ("NOT_RUN", "no draft was scored")


# --- places ---------------------------------------------------------------------------------------


def placed(
    *weights: tuple[str, tuple[int, ...], int, int, int],
    memory: int | None = 1000,
    gpus: bool = False,
    by_rows: bool = False,
    last: tuple[str, ...] = (),
    monkeypatch: pytest.MonkeyPatch,
) -> Any:
    """The bytes of weights (key, shape, placed, decoded at a use, on the host) by device."""
    monkeypatch.setattr(
        memory_estimate, "StoredRows", lambda tensor: SimpleNamespace(by_rows=by_rows)
    )
    on: Any = SimpleNamespace(
        gpus=[("cuda:0", None)] if gpus else [],
        budget=lambda: 100,
        device_of_layer=lambda layer, n_layers: (
            "first" if layer < 1 else "second" if layer < n_layers else "end"
        ),
    )
    used: list[Any] = [
        SimpleNamespace(
            key=key,
            tensor=SimpleNamespace(shape=shape),
            placed=lambda on, numbers=(size, rest, host): numbers,
            last=key in last,
        )
        for key, shape, size, rest, host in weights
    ]
    return memory_estimate._place_weights(on, used, 2, memory)


def test_weights_are_placed_layer_by_layer_while_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = (
        ("token_embd.weight", (8, 8), 300, 10, 0),
        ("L0.ffn_up.weight", (8, 8), 200, 5, 7),
        ("L1.ffn_up.weight", (8, 8), 400, 20, 30),
        ("L1.ffn_down.weight", (8, 8), 101, 2, 0),
        ("output.weight", (8, 8), 100, 50, 0),
        ("cls.weight", (8, 8), 1, 3, 0),
    )
    found, peaks, ends = placed(*weights, last=("output.weight",), monkeypatch=monkeypatch)
    # 101 bytes do not fit into the 100 that are left, and are decoded at each use.
    assert found == {"first": 500, "second": 400, "end": 100}
    assert peaks == {"first": 505, "second": 503, "end": 150, "cpu": 30}
    assert ends == {"first": 0, "second": 0, "end": 100}
    small, _, _ = placed(*weights, memory=None, monkeypatch=monkeypatch)
    assert small == {"first": 0, "second": 0, "end": 100}
    none, peaks, _ = placed(*weights, memory=0, monkeypatch=monkeypatch)
    assert set(none.values()) == {0} and peaks["second"] == 420


def test_as_many_experts_are_placed_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are decoded one by one, or the whole stack where its rows are not stored so."""
    stack = ("L0.ffn_up_exps.weight", (4, 8, 8), 400, 80, 0)

    def told(memory: int, **more: Any) -> tuple[int, int]:
        found, peaks, _ = placed(stack, memory=memory, monkeypatch=monkeypatch, **more)
        return found["first"], peaks["first"]

    for gpus, by_rows in ((True, False), (True, True), (False, True)):
        more = {"gpus": gpus, "by_rows": by_rows}
        assert told(400, **more) == (400, 420)
        assert told(399, **more) == (300, 320) and told(100, **more) == (100, 120)
        assert told(99, **more) == told(0, **more) == (0, 20)
    assert told(400) == (400, 880) and told(399) == (300, 780) and told(0) == (0, 480)
    odd = ("L0.ffn_up_exps.weight", (3, 8, 8), 100, 9, 0)  # 34 bytes each, rounded up
    found, _, _ = placed(odd, memory=67, monkeypatch=monkeypatch)
    assert found["first"] == 33
    nothing = ("L0.ffn_up_exps.weight", (4, 8, 8), 0, 80, 0)
    found, peaks, _ = placed(nothing, memory=0, gpus=True, monkeypatch=monkeypatch)
    assert (found["first"], peaks["first"]) == (0, 20)
    vector = ("L0.gate_exps.bias", (8,), 50, 5, 0)
    found, _, _ = placed(vector, memory=49, monkeypatch=monkeypatch)
    assert found["first"] == 0
