"""Parts of a diagnosis, each by itself."""

import math
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from aprfmt.causes.forward import linear
from aprfmt.causes.forward.mismatch import Change
from aprfmt.diagnosis import examine, tensors
from aprfmt.diagnosis.nextstep import missing_points
from aprfmt.diagnosis.relations import relation
from aprfmt.diagnosis.search import Search, SearchStep


def point(key: str, layer: int, recorded: Any = None, after: tuple[str, ...] = ()) -> Any:
    return SimpleNamespace(key=key, layer=layer, recorded=recorded, base=False, after=after)


def test_what_lacks_lies_between_the_last_good_point_and_the_divergence() -> None:
    keys = ["L0.attn_norm", "L0.q", "L0.k", "L0.mid", "L0.out"]
    views = {key: point(key, 0, recorded=1 if key == "L0.attn_norm" else None) for key in keys}
    view = point("L0.mid", 0, after=("L0.attn_norm",))
    assert missing_points(view, views) == ["L0.q", "L0.k"]
    assert missing_points(point("L0.out", 0, after=("L0.k",)), views) == ["L0.mid"]
    assert missing_points(point("L9.q", 9), views) == []


def test_of_several_layers_their_outputs_lack() -> None:
    keys = [f"L{i}.{name}" for i in range(3) for name in ("q", "out")]
    views = {key: point(key, int(key[1])) for key in keys}
    assert missing_points(point("L2.out", 2, after=("L0.q",)), views) == ["L0.out", "L1.out"]


def test_alike_are_other_steps_of_the_same_cause_that_solve_it() -> None:
    def step(cause: str) -> Any:
        return SimpleNamespace(change=SimpleNamespace(cause=cause))

    own, twin, failing, other = step("rope"), step("rope"), step("rope"), step("norm")
    measured: list[Any] = []

    def measure(steps: Any) -> Any:
        measured.append(steps[-1])
        return SimpleNamespace(steps=steps)

    singles = [SimpleNamespace(steps=(one,)) for one in (own, twin, failing, other)]
    search: Any = SimpleNamespace(
        runs=0, measure=measure, singles=singles, solves=lambda one: one.steps[-1] is not failing
    )
    assert Search.alike(search, [own], own) == [twin]
    assert measured == [twin, failing]


@pytest.mark.parametrize("label", ["ONLY_IN_A", "ONLY_IN_B"])
def test_tensors_that_one_side_lacks_are_evidence_and_the_reason(
    label: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensors, "_is_role", lambda a, b, key: True)
    monkeypatch.setattr(tensors, "_undecoded", lambda model, keys: "")
    rows: Any = [SimpleNamespace(key=f"L{i}.ffn_up.weight", verdict=label) for i in range(3)]
    evidence: list[Any] = []
    found: Any = SimpleNamespace(evidence=evidence, runs=True, reason="", add=lambda *_: None)
    model: Any = SimpleNamespace()
    tensors._missing(model, model, rows, found)
    side = "B" if label == "ONLY_IN_A" else "A"
    assert [one.says for one in evidence] == [f"{side} lacks 3 tensors"]
    assert evidence[0].where == tuple(row.key for row in rows)
    assert not found.runs and found.reason.startswith(f"{side} lacks 3 of the tensors: L0.ffn_up")


@pytest.mark.parametrize("tokens", [2, 3, 5])
def test_factors_of_columns_are_said_only_of_rows_enough_to_show_them(tokens: int) -> None:
    """Two rows are any two rows' multiples nearly: a fit of them is none."""
    rng = np.random.default_rng(3)
    mine = rng.normal(size=(tokens, 8))
    said = relation(mine, mine * rng.uniform(0.5, 2, 8), 1e-3)
    assert ("every column" in said) == (tokens > 2)
    assert "every row" in relation(mine, mine * rng.uniform(0.5, 2, (tokens, 1)), 1e-3)
    assert "same vector added" in relation(mine, mine + 5 * rng.normal(size=8), 1e-3)
    assert relation(mine, mine, 1e-3) == ""


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_an_experts_capacity_is_tried_where_all_rows_are_compared(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aprfmt.diagnosis.search.capacity", lambda case: ["change"])
    calls = [SimpleNamespace(op="add_weighted")]
    case = SimpleNamespace(view=SimpleNamespace(calls=calls), rows=range(rows), tokens=5)
    steps = list(Search._by_rows(cast(Any, SimpleNamespace(case=case))))
    assert [cast(Any, step.change) for step in steps] == ["change"] * (rows == 5)


@pytest.mark.parametrize("spanned", [1, 2])
@pytest.mark.parametrize("layer", [-1, 0])
def test_an_answer_is_tried_in_fewer_layers_only_where_it_lies_in_one(
    spanned: int, layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    change = Change("rope", "", ())
    monkeypatch.setattr(examine, "spanned", lambda case: range(spanned))

    def scopes(case: Any, change: Change) -> list[None]:
        asked.append(change)
        return [None]

    monkeypatch.setattr(examine, "scopes_of", scopes)
    passed = SimpleNamespace(flagged=[])
    monkeypatch.setattr(examine, "shadow_pass", lambda patched, recorded: passed)
    monkeypatch.setattr(examine, "agreement", lambda case, found: None)
    case: Any = SimpleNamespace(layer=layer, patched=None, recorded=None)
    found = examine._reaching(case, [SearchStep(change, None)], 0.0, set(), {}, 0)
    assert bool(asked) == (spanned == 1 and layer >= 0)
    assert found is not None and found.reach == math.inf


@pytest.mark.parametrize("right", [2, 4])
@pytest.mark.parametrize("heads", [1, 2, 4, 8, 16])
def test_rows_made_for_another_number_of_heads_are_named(heads: int, right: int) -> None:
    """Of 32 rows: made for pairs alone, and put right for the true number, as loaders do."""
    rows = np.arange(32)
    pairs = rows.reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)
    undone = pairs.reshape(right, -1, 2).swapaxes(1, 2).reshape(-1)
    for order, words in ((pairs, ""), (undone, f", and undone for {right}")):
        if heads == right or np.array_equal(order, rows):
            continue
        assert linear._permuted_for(order, right) == (heads, words)
    swapped = np.roll(rows, 32 // right)
    assert linear._permuted_for(swapped, right) is None, "whole heads"
