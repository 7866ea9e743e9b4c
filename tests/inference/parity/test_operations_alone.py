"""How the results of an operation that was cut out of two runs are judged, by themselves."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.inference.parity import operations

ONE = np.array([3.0, 4.0], np.float32)  # of norm 5


def judged(monkeypatch: pytest.MonkeyPatch, away: float, **how: Any) -> Any:
    """Return the operation of a cell whose results are `away` apart, of a bound of 0.01."""
    engine = how.pop("engine", None)
    before = how.pop("before", {"L0.in": 0.1, "L0.x": 0.2, "L0.y": None})
    other = ONE + np.array([0, 5 * away], np.float32)
    monkeypatch.setattr(operations, "operation_dtypes", lambda key, a, b: ("float32", "float32"))
    bound = SimpleNamespace(rel_l2=0.01)
    monkeypatch.setattr(operations, "operation_tolerance", lambda *dtypes: bound)
    monkeypatch.setattr(operations, "backend_name", lambda trace: engine)
    monkeypatch.setattr(operations, "_input_distance", lambda key, *given: before[key])
    rows = how.pop("rows", ())
    recorded = np.concatenate([other[::-1], other])[None] if rows else other
    cell: Any = SimpleNamespace(
        run=lambda backend: ONE[None] if rows else backend,
        rows=rows,
        inputs=before,
        weights={"w": 1},
    )
    point: Any = SimpleNamespace(key="L0.q", tolerance=0.1, rel_l2=how.pop("output", 0.4))
    traces: Any = SimpleNamespace(recorded_values=lambda key: recorded)
    run: Any = None if engine else other
    reference: Any = ONE
    return operations._run_operation(cell, point, traces, traces, reference, run)


@pytest.mark.parametrize("engine", [None, "llama.cpp", "transformers"])
def test_an_operation_is_wrong_beyond_what_its_dtypes_round(
    engine: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine's value is the recorded one; llama.cpp rounds inside, as its whole point does."""
    for away in (0.0, 0.009, 0.02, 0.09, 0.2, np.nan):
        found = judged(monkeypatch, away, engine=engine)
        bound = 0.1 if engine == "llama.cpp" else 0.01
        assert (found.key, found.bound) == ("L0.q", bound)
        assert found.wrong is not bool(away <= bound)
        assert found.shadow is (engine is not None)
        assert np.isnan(away) or found.residual == pytest.approx(away, abs=1e-6)


def test_an_operation_amplifies_what_came_in(monkeypatch: pytest.MonkeyPatch) -> None:
    found = judged(monkeypatch, 0.0)
    assert (found.input_rel_l2, found.output_rel_l2, found.gain) == (0.2, 0.4, 2.0)
    cases: list[dict[str, Any]] = [{}, {"L0.in": None}, {"L0.in": 0.0}]
    for before in cases:
        found = judged(monkeypatch, 0.0, before=before, output=None)
        assert (found.output_rel_l2, found.gain) == (0.0, None)
        assert found.input_rel_l2 == (0.0 if before.get("L0.in") == 0 else None)
        assert (found.inputs, found.weights) == ((*before,), ("w",))


def test_rows_of_a_vocabulary_are_those_of_the_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not judged(monkeypatch, 0.0, engine="vllm", rows=(2, 3)).wrong
    assert judged(monkeypatch, 0.0, engine="vllm", rows=(0, 1)).wrong
