"""Parts of a diagnosis, each by itself."""

from types import SimpleNamespace
from typing import Any

import pytest

from aprfmt.diagnosis import tensors
from aprfmt.diagnosis.nextstep import missing_points
from aprfmt.diagnosis.search import Search


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
