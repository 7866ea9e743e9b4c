"""What a level adds on tensors of one side, and on padding that a mask hides: each by itself."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.causes.forward.point_signatures import likely_cause
from aprfmt.diagnosis import padded_rows, tensors
from aprfmt.diagnosis.records import Touched
from aprfmt.diagnosis.static_findings import Levels
from aprfmt.measure.records import TensorDiff
from aprfmt.measure.traces import rounding_ratios

# --- tensors that one side lacks ----------------------------------------------------------------


def missing(only: Mapping[str, str], *, lacks: bool = False, places: str = "x") -> Levels:
    """Return what is added of keys by their verdicts; `places` may hold the values of others."""
    unread = SimpleNamespace(lacks="scales" if lacks else "")
    model: Any = SimpleNamespace(unread=unread, roles={})
    rows: Any = [SimpleNamespace(key=key, verdict=label) for key, label in only.items()]
    found = Levels()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensors, "_is_role_of_pass", lambda a, b, key: not key.startswith("no"))
        patch.setattr(tensors, "roles_without_place", lambda a, b: frozenset())
        patch.setattr(tensors, "_tensors_large_enough", lambda a, b, rows, side, keys: list(places))
        tensors._add_missing_tensors(model, model, rows, found)
    return found


def test_biases_that_one_side_lacks_are_left_out_of_a_pass() -> None:
    """A bias that went with its weight is lost with it; other tensors end the comparison."""
    for label, side in (("ONLY_IN_A", "B"), ("ONLY_IN_B", "A")):
        found = missing(dict.fromkeys(("q.bias", "k.bias", "no.bias"), label))
        (one,) = found.findings
        assert (one.cause, one.side, one.where) == ("missing_bias", side, ("q.bias", "k.bias"))
        assert one.says == f"{side} lacks 2 biases of the other's: q.bias, k.bias"
        assert found.parts == [Touched(hyper=(), keys=("q.bias", "k.bias"))]
        assert not (found.ended or found.stated or found.evidence or found.not_checked)
        both = missing({"q.bias": label, "q.weight": label, "x.bias": "SAME_BYTES"})
        assert both.ended and not both.findings
        (one,) = both.stated
        assert (one.cause, one.side, one.where) == ("missing_tensors", side, ("q.bias", "q.weight"))
        assert one.says.endswith("their values may be in tensors of no role: x")
        assert one.proof is None and not one.confirmed
        assert both.not_checked == [f"forward pass: {side} lacks tensors that it reads"]
    four = missing({f"w{i}": "ONLY_IN_A" for i in range(4)}).stated[0]
    assert "w2, w3; " in four.says
    many = missing({f"w{i}.weight": "ONLY_IN_A" for i in range(20)})
    assert many.stated[0].says.startswith("B lacks 20 of the tensors: w0.weight, w1.weight, ")
    assert "w3.weight, ...;" in many.stated[0].says and "w4" not in many.stated[0].says
    assert len(many.evidence[0].where) == 12 and len(many.stated[0].where) == 20
    assert many.stated[0].values == {} and many.stated[0].counted
    sure = missing({"w.weight": "ONLY_IN_B"}, places="").stated[0]
    assert sure.confirmed and sure.proof is not None and sure.says.endswith("tensors: w.weight")
    packed = missing({"w.weight": "ONLY_IN_A"}, lacks=True)
    assert not (packed.ended or packed.stated)


# --- padding that a recorded mask hides ---------------------------------------------------------


@dataclass
class Row:
    """A record of a point."""

    point: str
    shape: tuple[int, ...]
    positions: tuple[int, ...] | None = None


@dataclass
class Recorded:
    """A trace with a dump's facts."""

    run: Mapping[str, Any]
    records: Mapping[str, Any] = field(default_factory=dict)
    blocks: Any = None


@dataclass(frozen=True)
class Passed:
    """A model that a pass runs on ids, at positions."""

    ids: tuple[int, ...]
    closed: list[int]
    at: tuple[int, ...] | None = None

    @property
    def weights(self) -> Any:
        return SimpleNamespace(close=lambda: self.closed.append(1))

    def with_positions(self, at: list[int]) -> "Passed":
        return replace(self, at=tuple(at))


IDS = (7, 8, 9)


def seen(
    before: tuple[int, ...], right: tuple[int, ...] | None, *, plain: bool = True, judged: int = 4
) -> tuple[Any, list[Any], list[int]]:
    """Return (finding, passes, closings) where a pass at the positions `right` agrees."""
    passes: list[Any] = []
    closed: list[int] = []

    def shadow(patched: Passed, recorded: Any) -> Any:
        passes.append((patched, recorded))
        agrees = not plain if patched.at is None else patched.at == right
        return SimpleNamespace(flagged=() if agrees else ("q",), compared_count=judged)

    rows = {
        "embd": Row("embd", (3, 4)),
        "L0.q": Row("q", (3, 2, 4), (0, 1, 2)),
        "logits": Row("logits", (3, 9)),
        "last": Row("logits", (1, 9), (2,)),
        "other rows": Row("q", (3, 4), (0, 1)),
        "vector": Row("q", (3,)),
        "short": Row("q", (2, 4)),
        "L0.scores": Row("scores", (3, 3, 3)),
    }
    trace: Any = Recorded({"dump": {"masked": before}}, rows)
    with pytest.MonkeyPatch.context() as patch:
        made = SimpleNamespace(unpatched=lambda model, ids, dtype: Passed(tuple(ids), closed))
        patch.setattr(padded_rows, "PatchedModel", made)
        patch.setattr(padded_rows, "RecordedTrace", lambda trace, ids, more: (trace, ids))
        patch.setattr(padded_rows, "run_shadow_pass", shadow)
        model: Any = object()
        return padded_rows.seen_padding(model, trace, "B", IDS, "float32"), passes, closed


def ways() -> Iterator[tuple[tuple[int, ...], tuple[int, ...], str, str]]:
    yield (0,), (0, 1, 2, 3), "token of padding", "padding"
    yield (0, 0), (0, 1, 2, 3, 4), "2 tokens of padding", "padding"
    yield (0, 0), (0, 0, 0, 1, 2), "2 tokens of padding", "text"


def test_padding_that_rows_see_is_told_with_where_positions_count_from() -> None:
    for before, right, what, where in ways():
        found, passes, closed = seen(before, right)
        assert (found.cause, found.side, found.confirmed) == ("visible_padding", "B", True)
        assert found.says == (
            f"B: the text's tokens see the {what} before them, which the recorded attention mask "
            f"hides; positions count from the {where}"
        )
        assert found.values == {"padding": len(before)} and closed == [1]
        patched, (trace, ids) = passes[-1]
        assert patched.ids == ids == (*before, *IDS)
        moved = tuple(range(len(before), len(before) + 3))
        assert {key: row.positions for key, row in trace.records.items()} == dict.fromkeys(
            ("embd", "L0.q", "logits"), moved
        )
        assert passes[0][1][1] == IDS and len(passes) == 2 + (where == "text")


def test_padding_is_not_seen_where_rows_are_those_of_the_text_or_nothing_was_compared() -> None:
    right = (0, 1, 2, 3)
    for found, passes, closed in (
        seen((0,), right, plain=False),
        seen((0,), None),
        seen((0,), right, judged=0),
    ):
        assert found is None and closed == [1] and passes
    assert seen((), right) == (None, [], [])
    nothing: Any = Recorded({"dump": None})
    assert padded_rows.seen_padding(None, nothing, "B", IDS, "float32") is None


# --- what the form of a difference suggests -----------------------------------------------------


class Values:
    """A trace of one point."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def recorded_values(self, key: str) -> Any:
        return self.values


def test_the_form_of_a_points_difference_suggests_a_cause() -> None:
    rng = np.random.default_rng(4)
    x = rng.standard_normal((5, 6))
    lengths = rng.uniform(1, 2, (5, 1))
    probs = np.tril(np.ones((2, 5, 5)))
    probs /= probs.sum(-1, keepdims=True)
    later, short = probs.copy(), probs * 0.99
    later[0, 1, 4] = 0.01
    turned = x.reshape(5, 3, 2)[..., ::-1].reshape(5, 6)
    odd = x.copy()
    odd[0, 0] = np.nan

    def guessed(key: str, a: Any, b: Any) -> str:
        one: Any = Values(a)
        other: Any = Values(b)
        cause, reason = likely_cause(key, one, other)
        assert bool(cause) is bool(reason)
        return cause

    for point in ("q", "k", "v", "attn_out", "ffn_gate", "ffn_up", "ffn_out", "router"):
        assert guessed(f"L0.{point}", x, x + rng.standard_normal(6)) == "missing_bias", point
    assert guessed("L0.resid", x, x + rng.standard_normal(6)) == ""
    assert guessed("L0.q", x[:1], x[:1] + rng.standard_normal(6)) == ""  # of one row any is
    assert guessed("L0.q", x, x + rng.standard_normal((5, 6))) == ""
    assert guessed("L0.probs", probs, later) == "mask"
    assert guessed("L0.probs", probs, short) == "softmax_reduction"
    assert guessed("L0.probs", probs, probs * 1.0005) == "multiplier"
    assert guessed("L0.q_rope", x, turned) == "rope_theta" and guessed("L0.q", x, turned) == ""
    assert guessed("L0.q_rope", x, rng.standard_normal((5, 6))) == ""
    assert guessed("L0.scores", x, 1.5 * x) == "attention_scale"
    assert guessed("L0.ffn_act", x, 1.5 * x) == "multiplier"
    assert guessed("L0.ffn_norm", x, lengths * x) == "norm_eps"
    assert guessed("L0.ffn_act", x, lengths * x) == ""
    for a, b in ((None, x), (x, None), (x, x[:4]), (odd, 2 * x), (2 * x, odd)):
        assert guessed("L0.scores", a, b) == ""
    assert guessed("L0.scores", x, 1.5 * x.reshape(-1)) == "attention_scale"


def test_rounding_is_measured_by_the_same_computation_in_its_type() -> None:
    y, last = np.array([1.0, 2.0, 2.0]), np.array([0.0, 0.0, 1.0])
    traces: Any = [Values(one) for one in (y + 0.5 * last, y, y + 0.25 * last)]
    assert rounding_ratios(["a", "b"], *traces) == {"a": 2.0, "b": 2.0}
    exact: Any = Values(y)
    assert rounding_ratios(["a"], traces[0], exact, exact) == {"a": float("inf")}
    assert rounding_ratios(["a"], exact, exact, exact) == {"a": 0.0}
    assert rounding_ratios(["a"], exact, exact, traces[2]) == {"a": 0.0}
    other: Any = Values(y[:2])
    nothing: Any = Values(None)
    for left in (other, nothing):
        assert rounding_ratios(["a"], left, exact, exact) == {}
        assert rounding_ratios(["a"], exact, exact, left) == {}


@pytest.mark.parametrize(
    ("encoding", "cause", "sure"),
    [
        ("BF16", "rounding", "confirmed"),
        ("F16", "rounding", "confirmed"),
        ("Q8_0", "quantisation", "explained"),
        ("Q4_K", "quantisation", "explained"),
    ],
)
@pytest.mark.parametrize("side", ["a", "b"])
def test_steps_of_the_copys_own_confirm_no_copy(
    encoding: str, cause: str, sure: str, side: str
) -> None:
    """A float type's unit is its own, the steps of blocks are the copy's."""
    names = {"encoding_a": "F32", "encoding_b": "F32", f"encoding_{side}": encoding}
    rows = [TensorDiff(key, "WITHIN", **names, steps_off=0.5) for key in ("v", "w")]  # type: ignore[arg-type]
    others = [TensorDiff("x", "DIFFERENT", **names), TensorDiff("y", "SAME_VALUES", **names)]  # type: ignore[arg-type]
    found = [one for one, _ in tensors.coarser_copies([*rows, *others])]
    assert [(one.cause, one.certainty, one.where) for one in found] == [(cause, sure, ("v", "w"))]
