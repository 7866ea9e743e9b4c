"""Rope's angles that are rounded on their way: tables of cos and sin, and changes to try."""

from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from aprfmt.causes.forward import rope_precision
from aprfmt.causes.forward.rope_precision import rounded_table, try_rounded_angles
from aprfmt.inference.rope import RopeFrequencies

FREQUENCIES = np.array([1.0, 0.3, 0.01], np.float32)
POSITIONS = np.array([0, 1, 257, 3001])
HALF, BRAIN = np.float16, ml_dtypes.bfloat16
ROPE = RopeFrequencies(FREQUENCIES, 1.5)


def table(kind: Any, *which: int) -> Any:
    """Return the rounded table, of what is named by its place 0 to 3."""
    return rounded_table(POSITIONS, ROPE, kind, tuple(n in which for n in range(4)))


def cast(values: Any, kind: Any) -> Any:
    return np.asarray(values, np.float32).astype(kind).astype(np.float32)


@pytest.mark.parametrize("kind", [HALF, BRAIN])
def test_each_of_four_numbers_is_rounded_by_itself(kind: Any) -> None:
    where = POSITIONS.astype(np.float32)[:, None]
    angles = {
        (): where * FREQUENCIES,
        (0,): cast(where, kind) * FREQUENCIES,
        (1,): where * cast(FREQUENCIES, kind),
        (2,): cast(where * FREQUENCIES, kind),
        (0, 1, 2): cast(cast(where, kind) * cast(FREQUENCIES, kind), kind),
    }
    for which, angle in angles.items():
        cos, sin = table(kind, *which)
        assert cos.shape == (4, 3) and cos.dtype == sin.dtype == np.float32
        assert np.array_equal(cos, np.cos(angle) * np.float32(1.5))
        assert np.array_equal(sin, np.sin(angle) * np.float32(1.5))
    cos, sin = table(kind, 3)
    assert np.array_equal(cos, cast(np.cos(angles[()]), kind) * np.float32(1.5))
    assert np.array_equal(sin, cast(np.sin(angles[()]), kind) * np.float32(1.5))


class Model:
    """A model that keeps the override of an operation."""

    backend = SimpleNamespace(to_numpy=np.asarray, array=np.asarray)

    def with_op(self, op: str, override: Any, layers: Any) -> Any:
        return op, override, layers


def changes(monkeypatch: pytest.MonkeyPatch, positions: Any = POSITIONS, **facts: Any) -> list[Any]:
    """Return the changes to a case with these positions."""
    facts = {"kind": "rope", "between": True, "base": "", "rope": ROPE, **facts}
    monkeypatch.setattr(rope_precision, "rope_kind_of_layer", lambda case: facts["kind"])
    monkeypatch.setattr(rope_precision, "has_rope_between_points", lambda case: facts["between"])
    monkeypatch.setattr(rope_precision, "rope_frequencies", lambda patched, kind: facts["rope"])
    monkeypatch.setattr(rope_precision, "token_positions", lambda patched: positions)
    case: Any = SimpleNamespace(patched=None, view=SimpleNamespace(base=facts["base"]))
    return list(try_rounded_angles(case))


def test_every_rounding_that_moves_an_angle_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    found = changes(monkeypatch)
    brain = [one.values["rounded"] for one in found if one.values["dtype"] == "bfloat16"]
    assert brain == [
        "positions, frequencies, angles, cosines and sines", "positions, frequencies and angles",
        "frequencies", "positions", "angles",
    ]  # fmt: skip
    half = [one.values["rounded"] for one in found if one.values["dtype"] == "float16"]
    assert half == [*brain]  # 3001 is no number of float16
    assert found[0].says == f"rope's angles are made in bfloat16: {brain[0]} are rounded to it"
    assert (found[0].cause, found[0].where) == ("rope_precision", ("rope",))
    rounded = ((0, 1, 2, 3), (0, 1, 2), (1,), (0,), (2,))
    own = table(np.float32)
    for change, which in zip(found, rounded, strict=False):
        _, override, _ = change.make(Model(), None)
        used = override(lambda x, table: table, None, "x", own)
        wanted = table(BRAIN, *which)
        assert all(np.array_equal(one, two) for one, two in zip(used, wanted, strict=True))


def test_what_moves_no_angle_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    small = changes(monkeypatch, np.array([0, 1, 2]))
    words = {(one.values["dtype"], one.values["rounded"]) for one in small}
    assert ("bfloat16", "positions") not in words and ("float16", "positions") not in words
    exact = RopeFrequencies(np.array([1.0, 0.5], np.float32), 1.0)
    left = changes(monkeypatch, np.array([0, 1, 2]), rope=exact)
    assert {one.values["rounded"] for one in left} == {
        "positions, frequencies, angles, cosines and sines"
    }
    assert not changes(monkeypatch, np.array([0]))


def test_positions_past_the_range_of_a_type_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    found = changes(monkeypatch, np.array([0, 70000]))
    half = {one.values["rounded"] for one in found if one.values["dtype"] == "float16"}
    assert half == {"frequencies"}
    assert any(one.values["dtype"] == "bfloat16" for one in found)


@pytest.mark.parametrize("facts", [{"kind": None}, {"between": False}, {"base": "L0.q"}])
def test_nothing_is_tried_where_no_rope_comes_between(
    monkeypatch: pytest.MonkeyPatch, facts: dict[str, Any]
) -> None:
    assert not changes(monkeypatch, **facts)


def test_the_change_turns_by_its_own_table_of_the_same_shape(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    change = changes(monkeypatch)[0]
    op, override, layers = change.make(Model(), frozenset({2}))
    assert (op, layers) == ("rope", frozenset({2}))
    given: list[Any] = []

    def rotate(x: Any, own: Any, **more: Any) -> str:
        given.append((x, own, more))
        return "turned"

    own = tuple(part.astype(np.float64) for part in table(np.float32))
    assert override(rotate, None, "x", own, heads=2) == "turned"
    x, used, more = given.pop()
    wanted = table(BRAIN, 0, 1, 2, 3)
    assert x == "x" and more == {"heads": 2} and used[0].dtype == np.float64
    assert all(np.array_equal(one, two) for one, two in zip(used, wanted, strict=True))
    other = tuple(part[:2] for part in own)
    assert override(rotate, None, "x", other, heads=2) == "turned"
    assert given == [("x", other, {"heads": 2})]
