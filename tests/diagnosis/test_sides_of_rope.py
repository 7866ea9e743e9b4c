"""What is solved from queries alone is said of queries alone, and norms of what is rotated.

Seen red: rope rotating queries twice was confirmed as a scaling of all positions, and norms after
rope as "rope is not applied".
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from aprfmt.causes.forward import table
from aprfmt.diagnosis import diagnose
from tests.diagnosis.engine_changes import THREE
from tests.diagnosis.engines import broken_here, tiny_folder, trace
from tests.diagnosis.test_hypotheses import MODULES

ROPE = {"q_rope", "k_rope"}
NORMS = {"q_norm", "k_norm"}
THETA = 5000.0  # of the tiny models
Change = Callable[[Any, Any, Any], Any]  # (operation, its input, its table) -> the result


def turned(x: Any, steps: Any = None) -> Any:
    """Return x [tokens, heads, d] rotated as the tiny models do, or by other `steps` [tokens]."""
    half = x.shape[-1] // 2
    at = np.arange(len(x)) if steps is None else steps
    angles = (at[:, None] * THETA ** (-np.arange(half) / half))[:, None]
    a, b = x[..., :half], x[..., half:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def of_side(side: str, change: Change) -> Mapping[str, Any]:
    """Return arguments of `trace`: rope of queries ("q") or keys ("k") in layer 1 is changed."""
    calls: list[int] = []

    def turn(here: Any, op: Any, x: Any, table: Any, **how: Any) -> Any:
        calls[:] = [*calls, here.layer] if calls[-1:] == [here.layer] else [here.layer]
        if here.layer != 1 or (len(calls) % 2 == 1) != (side == "q"):
            return op(x, table, **how)
        return change(lambda y, t: op(y, t, **how), x, table)

    return broken_here(rope=turn)


def fewer(op: Any, x: Any, table: Any) -> Any:
    """Rotate by 1.5 times the positions."""
    return turned(x, 1.5 * np.arange(len(x)))


SIDES: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "q twice": (of_side("q", lambda op, x, t: op(op(x, t), t)), "queries are rotated twice"),
    "k twice": (of_side("k", lambda op, x, t: op(op(x, t), t)), "keys are rotated twice"),
    "q still": (of_side("q", lambda op, x, t: x), "queries are not rotated"),
    "q positions": (of_side("q", fewer), "of queries alone, not of keys: positions are multiplied"),
    "k backwards": (of_side("k", lambda op, x, t: op(x, (t[0], -t[1]))),
                    "of keys alone, not of queries: rope turns backwards"),
}  # fmt: skip


@pytest.mark.parametrize("name", SIDES)
def test_a_rotation_of_one_side_is_said_of_that_side(name: str) -> None:
    how, says = SIDES[name]
    folder = tiny_folder("llama", **THREE)
    run = trace(folder, f"side-{name}".replace(" ", "-"), points=MODULES | ROPE, **how)
    found = diagnose(str(folder), str(run))
    (finding,) = found.findings
    assert finding.says.startswith(says), found.sentence
    assert (finding.certainty, finding.where[0].split(".")[0]) == ("confirmed", "L1")


def test_what_makes_a_right_operation_wrong_is_no_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row for row in table.TABLE if row.rank != 248]
    monkeypatch.setattr(table, "TABLE", rows)
    folder = tiny_folder("llama", **THREE)
    how = SIDES["q positions"][0]
    found = diagnose(str(folder), str(trace(folder, "side-q", points=MODULES | ROPE, **how)))
    assert found.verdict == "bug"
    assert not [one for one in found.findings if one.confirmed], found.sentence


def norms_after(parts: str, *, before: bool = False) -> Mapping[str, Any]:
    """Return arguments of `trace`: norms of `parts` get rotated vectors.

    `before`: q_rope and k_rope are those before the norm.
    """
    held: dict[str, tuple[Any, Any]] = {}
    calls: list[int] = []

    def norm(here: Any, op: Any, x: Any, *args: Any, **how: Any) -> Any:
        part = {"v": "q", "q_norm": "k"}.get(here.point, "")
        calls.clear()
        if not part or part not in parts:
            return op(x, *args, **how)
        held[part] = turned(x), lambda y: op(y, *args, **how)
        return op(turned(x), *args, **how)

    def turn(here: Any, op: Any, x: Any, table: Any, **how: Any) -> Any:
        calls.append(here.layer)
        part = "q" if len(calls) == 1 else "k"
        if part not in parts:
            return op(x, table, **how)
        return held[part][0] if before else x

    def scores(here: Any, op: Any, q: Any, k: Any, own: Any) -> Any:
        return op(held["q"][1](q), held["k"][1](k), own) if before else op(q, k, own)

    return broken_here(rms_norm=norm, rope=turn, scores=scores)


AFTER: Mapping[str, tuple[Mapping[str, Any], set[str], str]] = {
    "all points": (norms_after("qk"), NORMS | ROPE, "q and k are"),
    "norms alone": (norms_after("qk"), NORMS, "q and k are"),
    "rotated before": (norms_after("qk", before=True), NORMS | ROPE, "q and k are"),
    "q alone": (norms_after("q"), NORMS | ROPE, "q is"),
    "k alone": (norms_after("k"), NORMS | ROPE, "k is"),
}  # fmt: skip


@pytest.mark.parametrize("name", AFTER)
def test_norms_of_rotated_vectors_are_named(name: str) -> None:
    how, points, says = AFTER[name]
    folder = tiny_folder("qwen3", **THREE)
    run = trace(folder, f"after-{name}".replace(" ", "-"), points=MODULES | points, **how)
    found = diagnose(str(folder), str(run))
    (finding,) = found.findings
    assert finding.says == f"{says} normalised after rope instead of before", found.sentence
    assert (finding.cause, finding.certainty) == ("qk_norm", "confirmed")


def test_nothing_is_confirmed_behind_a_value_that_nothing_explains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Attention that reads the recorded norms as they are fits "rope is not applied"."""
    rows = [row for row in table.TABLE if row.rank != 53]
    monkeypatch.setattr(table, "TABLE", rows)
    folder = tiny_folder("qwen3", **THREE)
    run = trace(folder, "after-unnamed", points=MODULES | NORMS, **AFTER["norms alone"][0])
    found = diagnose(str(folder), str(run))
    assert found.verdict == "bug"
    assert not [one for one in found.findings if one.confirmed], found.sentence
