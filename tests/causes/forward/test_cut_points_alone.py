"""Through which later points a capture point reaches what follows, and how that is tried."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.causes.forward import cut_points
from aprfmt.causes.forward.cut_points import (
    agrees_without,
    cut_keys,
    depends_on_mismatch,
    is_computed_from,
    keys_after,
    may_be_mistaken,
    recorded_values_are_used,
    stream_keys_after,
)


@pytest.mark.parametrize(
    ("key", "other", "may"),
    [
        ("L0.q", "L1.q", True),
        ("L0.q", "L0.q", False),
        ("L0.q", "L1.k", False),
        ("L0.in", "L0.mid", True),
        ("L3.out", "final_norm", True),
        ("L0.mid", "L0.q", False),
        ("L0.q", "L0.mid", False),
        ("L0.experts", "L1.experts", False),  # whole numbers are equal by chance
    ],
)
def test_a_recorder_may_count_layers_or_points_of_the_stream_wrong(
    key: str, other: str, may: bool
) -> None:
    assert may_be_mistaken(key, other) == may


def test_a_point_acts_through_the_later_ends_of_its_sublayers() -> None:
    mlp = ["L2.ffn_mul", "L2.ffn_out", "L2.moe_out", "L2.ffn_contrib", "L2.out"]
    end = ["final_norm", "logits"]
    attention = ["L2.attn", "L2.attn_out", "L2.attn_contrib", "L2.mid"]
    assert list(cut_keys("L2.q")) == [*attention, *mlp, *end]
    assert list(cut_keys("L2.attn")) == [*attention[1:], *mlp, *end]
    assert list(cut_keys("L2.ffn_mul")) == [*mlp[1:], *end]
    assert list(cut_keys("L0.ffn_contrib")) == ["L0.out", *end]
    for other in ("embd", "final_norm", "L2.mid", "L2.in", "L2.experts"):
        assert not list(cut_keys(other))


MIXER = ("ssm_gate", "conv", "ssm_gated", "attn_out", "out")
BESIDE = ("ssm_gate", "ssm_gated", "ssm_out", "q", "attn", "attn_out", "attn_contrib", "mid",
          "ffn_out", "out")  # fmt: skip
PARALLEL = ("q", "attn", "attn_out", "ffn_up", "ffn_mul", "ffn_out", "out")
EXPERTS = ("q", "attn", "attn_out", "mid", "ffn_up", "ffn_mul", "ffn_out", "ffn_mlp", "router",
           "moe_out", "ffn_contrib", "out")  # fmt: skip
DENSE = ("q", "attn", "attn_out", "mid", "ffn_up", "ffn_mul", "ffn_out", "out")


@pytest.mark.parametrize(
    ("points", "point", "left_out"),
    [
        (BESIDE, "ssm_gate", {"attn", "attn_out"}),
        (BESIDE, "ssm_out", {"attn", "attn_out"}),
        (BESIDE, "q", {"ssm_out"}),
        (MIXER, "ssm_gate", set()),
        (PARALLEL, "q", {"ffn_mul", "ffn_out"}),
        (PARALLEL, "attn_out", {"ffn_mul", "ffn_out"}),
        (PARALLEL, "ffn_up", set()),
        (EXPERTS, "ffn_up", {"moe_out"}),
        (EXPERTS, "q", set()),
        (DENSE, "q", set()),
    ],
)
def test_a_branch_beside_a_point_is_no_cut_of_it(
    points: tuple[str, ...], point: str, left_out: set[str]
) -> None:
    """What runs beside a point agrees, whatever the point is: that says nothing of it."""
    found = list(cut_keys(f"L1.{point}", [f"L1.{name}" for name in points]))
    usual = list(cut_keys(f"L1.{point}"))
    here = {f"L1.{name}" for name in left_out}
    ends = {f"L1.{name}" for name in points if name in (*cut_points.ATTENTION, *cut_points.MLP)}
    assert not here & {*found} and found[-2:] == ["final_norm", "logits"]
    assert (ends & {*usual}) - {*found} == here - {"L1.ssm_out"}
    assert ("L1.ssm_out" in found) == (points is BESIDE and point == "ssm_gate")


def test_after_a_point_of_the_stream_come_those_of_the_stream() -> None:
    keys = ["embd", "L0.in", "L0.q", "L0.mid", "L0.ffn_mul", "L0.out", "logits"]
    assert list(stream_keys_after("L0.in", keys)) == ["L0.mid", "L0.out", "logits"]
    assert not list(stream_keys_after("logits", keys))
    assert not list(stream_keys_after("L0.q", keys))


@pytest.mark.parametrize(
    ("later", "earlier", "computed"),
    [
        ("L0.k_rope", "L0.q", False),
        ("L0.q_rope", "L0.q", True),
        ("L0.q", "L0.k", False),
        ("L0.v", "L0.k_norm", False),
        ("L1.k", "L0.q", True),
        ("L0.scores", "L0.v", False),
        ("L0.probs", "L0.v_cache", False),
        ("L0.scores", "L0.k", True),
        ("L0.attn", "L0.v", True),
        ("L0.ffn_up", "L0.ffn_gate", False),
        ("L0.ffn_act", "L0.ffn_gate", True),
        ("L0.ffn_up", "L0.q", True),
        ("logits", "L0.q", True),
        ("L0.ssm_conv_in", "L0.ssm_gate", False),
        ("L0.ssm_gated", "L0.ssm_gate", True),
        ("L0.ssm_dt", "L0.ssm_conv_in", True),  # by way of the convolution, in Mamba 1
        ("L0.scores", "L0.ssm_gate", False),
        ("L0.attn_contrib", "L0.ssm_gate", True),
    ],
)
def test_parallel_branches_are_not_computed_from_each_other(
    later: str, earlier: str, computed: bool
) -> None:
    assert is_computed_from(later, earlier) == computed


KEYS = ("L0.q", "L0.q_rope", "L0.experts", "L0.attn", "L0.attn_out", "L0.mid", "L0.out")


def case_of(key: str, views: dict[str, Any], recorded: tuple[str, ...] = KEYS) -> Any:
    """Return a mismatch at `key` of a pass of KEYS, with views of later points."""
    return SimpleNamespace(
        view=SimpleNamespace(key=key),
        patched=SimpleNamespace(points=dict.fromkeys(KEYS)),
        recorded=SimpleNamespace(has_record=recorded.__contains__),
        found=SimpleNamespace(views=views),
        without=lambda drop: list(drop),
    )


def seen(residual: float | None, *, flagged: bool = False, mine: float = 0.0) -> Any:
    return SimpleNamespace(residual=residual, flagged=flagged, mine=np.array([mine]))


def test_the_keys_after_a_point_leave_out_whole_numbers() -> None:
    assert list(keys_after(case_of("L0.q_rope", {}))) == [*KEYS[3:]]
    assert not list(keys_after(case_of("L0.out", {})))
    assert not list(keys_after(case_of("L9.out", {})))


def test_a_cut_is_recomputed_from_the_mismatch_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    first: list[Any] = [seen(0.0), None, seen(None), seen(0.5, flagged=True)]

    def run(patched: Any, recorded: Any, cut: str) -> Any:
        asked.append((recorded, cut))
        return seen(0.9, mine=1.0) if case.view.key not in recorded else first[0]

    monkeypatch.setattr(cut_points, "run_shadow_point", run)
    case = case_of("L0.q_rope", {})
    inner = ["L0.q_rope", "L0.experts", "L0.attn"]
    assert agrees_without(case, "L0.attn_out")
    assert asked[0] == (inner, "L0.attn_out") and (inner[1:], "L0.attn_out") in asked
    for _ in range(3):
        first.pop(0)
        assert not agrees_without(case, "L0.attn_out")
    first[0] = seen(0.0, mine=1.0)  # what is recorded changes nothing: a branch beside it
    assert not agrees_without(case, "L0.attn_out")
    assert not depends_on_mismatch(case, "L0.attn_out")
    first[0] = seen(0.0)
    assert depends_on_mismatch(case, "L0.attn_out")
    pair = case = case_of("L0.q", {})
    pair.patched.points = dict.fromkeys(("L0.q", "L0.attn"))
    asked.clear()
    assert agrees_without(pair, "L0.attn") and asked[0] == (["L0.q"], "L0.attn")
    asked.clear()
    case = case_of("L0.q_rope", {})
    assert not agrees_without(case, "L0.ffn_out")  # no point of this pass
    assert not agrees_without(case_of("L0.q", {}, ("L0.q",)), "L0.attn")  # not in the trace
    assert not agrees_without(case_of("L9.q", {}), "L0.attn")
    assert not asked


def test_recorded_values_are_used_where_only_they_give_the_next_point(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[str] = []
    agrees = False

    def agree(case: Any, cut: str) -> bool:
        tried.append(cut)
        return agrees

    reached = {"L0.attn", "L0.attn_out", "L0.mid", "L0.out"}
    monkeypatch.setattr(cut_points, "agrees_without", agree)
    monkeypatch.setattr(cut_points, "depends_on_mismatch", lambda case, cut: cut in reached)
    good, bad, unseen = seen(0.0), seen(0.9, flagged=True), seen(None)
    assert recorded_values_are_used(case_of("L0.q", {"L0.attn": good}))
    assert not recorded_values_are_used(case_of("L0.q", {"L0.attn": bad, "L0.mid": good}))
    assert recorded_values_are_used(case_of("L0.q", {"L0.attn": unseen, "L0.attn_out": good}))
    assert not recorded_values_are_used(case_of("L0.q", {"L0.q_rope": good}))  # no cut
    assert tried == ["L0.attn", "L0.attn_out"]
    assert recorded_values_are_used(case_of("L0.mid", {"L0.out": good}))
    reached.remove("L0.attn")  # it is of a branch beside: the next one tells
    assert not recorded_values_are_used(case_of("L0.q", {"L0.attn": good, "L0.attn_out": bad}))
    assert recorded_values_are_used(case_of("L0.q", {"L0.attn": good, "L0.attn_out": good}))
    agrees = True
    assert not recorded_values_are_used(case_of("L0.q", {"L0.attn_out": good}))
