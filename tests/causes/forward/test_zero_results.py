"""Points of a pass that are zeros: in every layer, in one, in some rows, beside a shared expert.

Seen red without the hypothesis: "no cause of the table fits", though a zero is read at a glance.
"""

import math
from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.causes.forward.mismatch import Change
from aprfmt.diagnosis import diagnose, wrong_operations
from tests.diagnosis.engines import tiny_folder, trace

KEPT = frozenset({"attn_norm", "attn_out", "ffn_norm", "ffn_out", "moe_out", "out", "logits"})
Alter = Callable[[], Callable[[str, int, Any], Any]]


def emptied(point: str, layers: Collection[int] = (), rows: Any = slice(None)) -> Alter:
    """Return a maker of a pass in which a point's `rows` are zeros in `layers`; () means all."""

    def alter(name: str, layer: int, x: Any) -> Any:
        if name != point or (layers and layer not in layers):
            return x
        made = np.array(x)
        made[rows] = 0
        return made

    return lambda: alter


def told(base: str, name: str, **how: Any) -> Any:
    folder = tiny_folder(base)
    return diagnose(str(folder), str(trace(folder, f"zeros-{name}", points=KEPT, **how)))


@pytest.mark.parametrize(
    ("base", "point", "layers", "rows", "says"),
    [
        ("mixtral", "moe_out", (), slice(None), "moe_out is zeros in every row"),
        ("llama", "ffn_out", (1,), slice(None), "ffn_out is zeros in every row"),
        ("llama", "attn_out", (), slice(None), "attn_out is zeros in every row"),
        ("llama", "attn_out", (0,), [5, 6], "rows 5, 6, and as the model has it in the others"),
        ("llama", "ffn_out", (2,), [7], "row 7, and as the model has it in the others"),
    ],
)
def test_a_result_of_zeros_is_named(
    base: str, point: str, layers: tuple[int, ...], rows: Any, says: str
) -> None:
    found = told(base, f"{base}{point}{layers}{rows}", alter=emptied(point, layers, rows))
    lead = found.lead
    assert lead is not None and (lead.cause, lead.certainty) == ("zero_result", "confirmed")
    assert says in lead.says and len(found.findings) == 1
    # Zeros are exact in 16 bits, too, which says nothing of the run's arithmetic.
    assert not any("bfloat16" in text for text in found.not_checked)
    assert {*lead.where} == ({f"L{n}.{point}" for n in layers} if layers else {point})


def test_routed_experts_that_add_nothing_beside_a_shared_one() -> None:
    """No zeros are recorded there: the shared expert is added, and its rule says it."""
    found = told("deepseek_v3", "routed", hp={"routed_scale": 0.0})
    assert found.lead is not None and found.lead.cause == "moe_routing"
    assert found.lead.certainty == "confirmed" and "routed experts are left out" in found.lead.says


def test_zeros_that_no_later_point_was_computed_from_are_no_result() -> None:
    """The recorder lost the values: the engine's own next point has them."""

    def lost(values: dict[str, Any]) -> dict[str, Any]:
        return {k: np.zeros_like(v) if k == "L1.ffn_out" else v for k, v in values.items()}

    found = told("llama", "lost", rename=lost)
    assert found.lead is not None and found.lead.cause != "zero_result"


def test_zero_rows_beside_other_wrong_rows_are_no_cause() -> None:
    def alter(name: str, layer: int, x: Any) -> Any:
        if (name, layer) != ("ffn_out", 1):
            return x
        made = np.array(np.random.default_rng(2).standard_normal(x.shape), x.dtype)
        made[3] = 0
        return made

    found = told("llama", "noise", alter=lambda: alter)
    assert all(one.cause != "zero_result" for one in found.findings)


@pytest.mark.parametrize("base", ["llama", "mixtral", "deepseek_v3"])
def test_a_sound_run_is_the_same(base: str) -> None:
    assert told(base, f"sound-{base}").verdict in ("same", "precision")


def test_what_an_operation_did_is_said_before_the_zeros_it_gave() -> None:
    """Seen red: the zeros chosen; named as a second explanation; not named where they are alone."""

    def answer(change: Change) -> Any:
        return SimpleNamespace(change=change, reach=math.inf, left=0, residual=0.0, then=None)

    zeros = answer(Change("zero_result", "decay is zeros", ("decay",), of_values=True))
    rule = answer(Change("recurrence", "nothing decays", ("decay",)))
    other = answer(Change("mask", "no mask", ("mask",)))
    view: Any = SimpleNamespace(tolerance=1e-6)
    assert wrong_operations._best_answer([zeros, rule], 0) is rule
    assert wrong_operations._best_answer([zeros], 0) is zeros
    assert wrong_operations._equally_good([zeros, rule, other], rule, view) == (other,)
    assert wrong_operations._equally_good([zeros], zeros, view) == ()


def test_a_cause_in_fewer_places_is_no_second_explanation_of_itself() -> None:
    """Norms that the run does not show. Seen red: norm_kind "would explain it as well"."""

    def answer(cause: str, **values: Any) -> Any:
        change = Change(cause, f"{cause} {values}", ("norm",), values=values)
        return SimpleNamespace(change=change, reach=math.inf, left=0, residual=0.0, then=None)

    view: Any = SimpleNamespace(tolerance=1e-6)
    every = answer("norm_kind", mean=False)
    some = answer("norm_kind", mean=False, behind=("in",))
    offset = answer("norm_offset", offset=1)
    part = answer("norm_offset", offset=1, behind=("in", "mid"))
    answers = [every, some, offset, part]
    assert wrong_operations._equally_good(answers, every, view) == (offset,)
    assert wrong_operations._equally_good(answers, part, view) == (every,)
    root = answer("norm_eps", eps_outside=True)  # another rule is one, in any place
    number = answer("norm_eps", norm_eps=1e-3)
    assert wrong_operations._equally_good([root, number], number, view) == (root,)


def test_a_shift_of_all_positions_is_no_second_explanation_of_a_rope_scaling() -> None:
    """It passes a length, and turns queries and keys alike. Seen red: "positions" named, too."""

    def answer(cause: str, **values: Any) -> Any:
        change = Change(cause, cause, ("rope",), values=values)
        return SimpleNamespace(change=change, reach=math.inf, left=0, residual=0.0, then=None)

    view: Any = SimpleNamespace(tolerance=1e-6)
    scaling = answer("rope_scaling", rope_scaling={"type": "longrope"})
    shift, jump = answer("positions", offset=3), answer("positions", offset=None)
    assert wrong_operations._equally_good([scaling, shift], scaling, view) == ()
    assert wrong_operations._equally_good([scaling, jump], scaling, view) == (jump,)
    other = answer("attention_scale", scale=2.0)
    assert wrong_operations._equally_good([other, shift], other, view) == (shift,)
