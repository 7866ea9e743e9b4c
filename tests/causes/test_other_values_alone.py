"""What tells other values, another place or another rope from damage, rule by rule."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.causes.forward import drafted_rows, rope
from aprfmt.causes.forward.rotations import without_rope
from aprfmt.causes.tensor import (
    coarse_damage,
    derived_weights,
    folded_factors,
    foreign_values,
    initial_values,
    misplaced_rows,
)
from aprfmt.causes.tensor.drawn_numbers import FAR
from aprfmt.causes.tensor.initial_values import FEWEST
from aprfmt.causes.tensor.misplaced_rows import RowRun
from aprfmt.training import differences

RNG = np.random.default_rng(21)


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """Each test draws the same numbers, whichever ran before it."""
    RNG.bit_generator.state = np.random.default_rng(99).bit_generator.state


# --- numbers of an initialisation ---------------------------------------------------------------


class Side:
    """A tensor of which all is looked at; `drawn` says of what distribution it looks."""

    def __init__(self, values: Any, **more: Any) -> None:
        self.values = np.asarray(values, np.float64)
        self.shape, self.more = self.values.shape, more


@pytest.mark.parametrize("label", ["A", "B"])
def test_one_side_alone_holds_numbers_of_an_initialisation(
    label: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reader(side: Side) -> Any:
        parts = {"": 1} if not side.more.get("packed") else {"scale": 1}
        whole = np.asarray(side.more.get("whole", side.values))
        return SimpleNamespace(
            shape=side.shape,
            size=side.more.get("size", side.values.size),
            values=side.values,
            encoding=side.more.get("encoding", "F32"),
            whole=whole,
            drawn=side.more.get("drawn"),
            side=SimpleNamespace(stored=[SimpleNamespace(parts=parts)]),
        )

    monkeypatch.setattr(initial_values, "RowReader", reader)
    monkeypatch.setattr(initial_values, "sample_values", lambda of, most, fewest: of.values)
    monkeypatch.setattr(initial_values, "_drawn_throughout", lambda values, of: of.drawn)
    common: list[Any] = [None]
    monkeypatch.setattr(initial_values, "common_rows", lambda key, mine, other: common[0])
    reordered = [False]
    monkeypatch.setattr(initial_values, "same_values_reordered", lambda *given: reordered[0])
    asked: list[str] = []

    def usual(context: Any, label: str, key: str, shape: Any, drawn: Any) -> Any:
        asked.append(label)
        return drawn.usual

    monkeypatch.setattr(initial_values, "usual_initialiser", usual)
    text = SimpleNamespace(text=lambda: "drawn", mean=0.25, usual="usual")
    odd = SimpleNamespace(text=lambda: "drawn", mean=0.25, usual=None)
    away = "A" if label == "B" else "B"
    values, theirs = RNG.normal(size=(2, 40, 40))

    def found(
        mine: Any = values,
        other: Any = theirs,
        key: str = "L0.q.weight",
        *,
        drawn: Any = text,
        trained: Any = None,
        **more: Any,
    ) -> Any:
        both: list[bool] = []
        asked.clear()
        own, beside = Side(mine, drawn=drawn, **more), Side(other, drawn=trained)
        pair: Any = SimpleNamespace(**{label.lower(): own, away.lower(): beside})
        context: Any = None
        one = initial_values._find_initial_numbers(context, pair, key, label, both)
        return one, both

    one, both = found()
    assert (one.key, one.side, one.drawn, one.constant, one.usual) == (
        "L0.q.weight",
        label,
        text,
        None,
        "usual",
    )
    assert one.line.startswith(f"mean 0.25 over 1600 values; {away}'s: mean ")
    assert both == [False] and asked == [label]
    # Where the other's are of a known one as well, nothing tells which of them was drawn.
    assert found(trained=text) == (None, [True]) and asked == [label, away]
    assert found(trained=odd)[0] is not None and found(drawn=odd) == (None, [])
    assert found(drawn=None) == (None, [])
    # Few values, values of one number, coarse ones and packed ones tell nothing.
    few, many = values.reshape(-1)[: FEWEST - 1], values.reshape(-1)[:FEWEST]
    other = theirs.reshape(-1)
    assert found(few, other[: FEWEST - 1])[0] is None and found(many, other[:FEWEST])[0] is not None
    assert found(other=theirs * 0 + 2)[0] is None and found(encoding="Q4_0")[0] is None
    assert found(packed=True) == (None, []) and found(size=1) == (None, [])
    assert found(values[:1, :1], theirs[:1, :1])[0] is None
    for bad in (np.nan, np.inf):
        wrong = values.copy()
        wrong[3, 4] = bad
        assert found(wrong) == found(other=wrong) == (None, [])
    # What follows the other side is no other training.
    related = initial_values.RELATED + FAR / 40
    for share, said in ((related + 0.05, False), (related - 0.05, True)):
        x, y = (v - v.mean() for v in (values, theirs))
        y = y - x * float((x * y).sum() / (x * x).sum())
        x, y = x / np.linalg.norm(x), y / np.linalg.norm(y)
        for sign in (1, -1):
            mixed = sign * share * x + (1 - share**2) ** 0.5 * y
            assert (found(x, mixed)[0] is not None) is said
    reordered[0] = True
    assert found() == (None, [False])
    reordered[0] = False
    # A constant is that of a bias or a norm, next to values.
    for key, value, said in (
        ("L0.q.bias", 0.0, True),
        ("L0.attn_norm.weight", 1.0, True),
        ("L0.q.bias", 1.0, False),
        ("L0.attn_norm.weight", 0.0, False),
        ("L0.q.weight", 0.0, False),
        ("L0.attn_norm.bias", 0.0, True),
    ):
        one, both = found(np.full((4, 4), value), theirs[:4, :4], key)
        assert (one is not None) is said and both == []
        assert one is None or (one.constant, one.drawn, one.line) == (
            value,
            None,
            f"{value:g} everywhere",
        )
        assert found(np.full((4, 4), value), np.full((4, 4), 3.0), key)[0] is None
    whole = np.zeros((9, 4))
    whole[8] = 1  # behind the rows that were looked at
    assert found(np.zeros((4, 4)), theirs[:4, :4], "x.bias", whole=whole)[0] is None
    # Of other shapes the rows that both have.
    assert found(values[:20]) == (None, [])
    common[0] = reader(Side(values[:20], drawn=text)), reader(Side(theirs[:20]))
    assert found(values[:20])[0] is not None


# --- another tensor -----------------------------------------------------------------------------


def test_a_direction_of_the_stream_is_lost_where_the_rest_is_as_it_was() -> None:
    """Of what is written to the stream: the rows of a table, the outputs of others."""
    v = RNG.normal(size=12)
    v /= np.linalg.norm(v)
    x = RNG.normal(size=(12, 20))

    def removed(
        key: str,
        x: Any,
        delta: Any,
        rounding: float = 1e-9,
        shape: Any = None,
        absent: bool = False,
    ) -> Any:
        side = None if absent else SimpleNamespace(shape=shape or x.shape)
        pair: Any = SimpleNamespace(key=key, a=side)
        return derived_weights._removed_direction(pair, x, delta, rounding)

    for share in (1.0, 0.5):
        delta = -share * np.outer(v, v @ x)
        for key, a, change in (
            ("L0.attn_output.weight", x, delta),
            ("L0.ffn_down.weight", x, delta),
            ("token_embd.weight", x.T, delta.T),
        ):
            found = removed(key, a, change)
            assert abs(float(found.direction @ v)) == pytest.approx(1.0)
            assert found.share == pytest.approx(share)
        stack, changes = (np.concatenate([one, one[:, ::-1]]) for one in (x, delta))
        found = removed("L0.ffn_down_exps.weight", stack, changes, shape=(2, 12, 20))
        assert found.share == pytest.approx(share)
    delta = -np.outer(v, v @ x)
    assert removed("L0.attn_q.weight", x, delta) is None
    assert removed("L0.attn_output.weight", x, delta, absent=True) is None
    assert removed("L0.attn_output.weight", x, delta * 0) is None
    assert removed("L0.attn_output.weight", x, -delta) is None  # more of it
    assert removed("L0.attn_output.weight", x, np.outer(v, RNG.normal(size=20))) is None
    noise = RNG.normal(size=delta.shape)
    noise -= np.outer(v, v @ noise)
    noise /= np.linalg.norm(noise)
    for room, said in ((0.52, True), (0.48, False)):
        found = removed("L0.attn_output.weight", x, delta + 0.01 * noise, room * 0.01)
        assert (found is not None) is said


def test_values_outside_of_runs_are_equal_up_to_rounding() -> None:
    a = RNG.normal(size=(6, 8))
    wrong = a.copy()
    wrong[1, 2:6] = 9
    wrong[4] = 7
    runs = [[10, 14], [32, 40]]

    def equal(b: Any, runs: Any = runs, count: int = 48, factor: bool = False) -> bool:
        def distance(left: Any, right: Any, rows: Any) -> Any:
            pieces = [np.arange(0, 2), np.arange(2, 5), np.arange(5, 6)]
            off = sum(float(np.abs(left(at) - right(at)).sum()) for at in pieces)
            return SimpleNamespace(relative=off, leaves_factor=lambda slack: factor)

        case: Any = SimpleNamespace(
            a=SimpleNamespace(columns=8, take=lambda at: a[at]),
            b=SimpleNamespace(columns=8, take=lambda at: b[at]),
            before=SimpleNamespace(count=count),
            distance=distance,
            slack=lambda moved: 1e-3,
        )
        return coarse_damage._others_are_equal(case, runs)

    assert equal(wrong) and not equal(wrong, factor=True)
    assert not equal(wrong, runs[:1]) and not equal(wrong, [[11, 14], [32, 40]])
    assert not equal(wrong, [[10, 13], [32, 40]]) and equal(a, [])
    assert equal(wrong, count=24) and not equal(wrong, count=23)
    near = wrong.copy()
    near[0, 0] += 9e-4
    far = wrong.copy()
    far[0, 0] += 2e-3
    assert equal(near) and not equal(far)


def test_rows_of_other_places_are_said_by_expert_or_by_tensor() -> None:
    def said(*runs: RowRun, shape: Any = (8, 4, 5), key: str = "k") -> str:
        case: Any = SimpleNamespace(shape=shape, key=key, role="ffn_up.weight")
        return misplaced_rows._runs_sentence(case, list(runs))

    one = "expert {} holds the bytes of expert {}".format
    assert said(RowRun(4, "k", 12, 4)) == one(1, 3)
    assert said(RowRun(4, "k", 12, 8), RowRun(20, "k", 0, 4)) == "; ".join(
        [one(1, 3), one(2, 4), one(5, 0)]
    )
    assert said(RowRun(0, "k", 4, 28)).count(";") == misplaced_rows.SHOWN - 1
    same = "rows of B are other rows of the same tensor of A, which stand at their own place too"
    for run in (RowRun(5, "k", 12, 4), RowRun(4, "k", 13, 4), RowRun(4, "k", 12, 3)):
        assert said(run) == said(RowRun(4, "k", 12, 4), run) == same
    assert said(RowRun(4, "k", 12, 4), shape=(32, 5)) == same
    other = "rows of B are rows of other tensors of A"
    assert said(RowRun(4, "x", 12, 4)) == said(RowRun(4, "k", 12, 4), RowRun(8, "x", 0, 4)) == other


# --- folds --------------------------------------------------------------------------------------


@pytest.mark.parametrize("label", ["A", "B"])
def test_products_hold_the_weights_of_a_norm_that_kept_them(
    label: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gain = np.array([1.5, 0.5, 2.0])
    weights = {
        "attn_norm.weight": gain,
        "q.weight": np.ones((2, 3)),
        "k.weight": np.full((2, 3), 3.0),
    }
    factor = gain if label == "B" else 1 / gain
    monkeypatch.setattr(
        folded_factors, "_norm_readers", lambda layer: [("attn_norm", ("q", "k", "x"))]
    )
    monkeypatch.setattr(folded_factors, "prove_values", lambda *given: None)

    def kept(
        changed: Any = (),
        moved: bool = True,
        near: Any = ("q.weight", "k.weight"),
        gains: Any = gain,
        fits: Any = ("q.weight", "k.weight"),
        norm_apart: float = 0.5,
        held: Any = tuple(weights),
        apart: float = 1.0,
    ) -> list[Any]:
        monkeypatch.setattr(folded_factors, "_norm_gains", lambda layer, weight: (gains, gains))
        monkeypatch.setattr(
            folded_factors,
            "_moved_by_factor",
            lambda layer, role, factor: moved and factor is gains,
        )

        def right(role: str, values: Any) -> bool:
            return np.allclose(values, weights[role] * factor)

        def roundings(role: str, values: Any) -> float:
            if role == "attn_norm.weight":
                return norm_apart
            return apart if right(role, values) else 9.0

        layer: Any = SimpleNamespace(
            start="L0.",
            a=weights,
            b=weights,
            has=held.__contains__,
            slack=lambda role: 0.0,
            roundings_apart=roundings,
            distance=lambda role, values: float(right(role, values)),
            matches_factor=lambda role, of: role in fits and np.allclose(of, factor),
            is_nearer=lambda role, values: role in near,
        )
        found = folded_factors._kept_norm_explanations(layer, set(changed))
        for key, one in found.items():
            assert one.evidence == (
                f"{label}'s products hold the weights of the norms that they read, which were not "
                "set to one there",
                "the weights of attn_norm",
            )
            assert (one.residual_before, one.residual_after) == (0.0, 1.0) and one.where == (key,)
        return sorted(found)

    both = ["L0.k.weight", "L0.q.weight"]
    assert kept() == both and kept(apart=1.01) == kept(moved=False) == []
    assert kept(("attn_norm.weight",)) == kept(norm_apart=1.01) == []
    assert kept(norm_apart=1.0) == both and kept(gains=np.array([1.5, 0.0, 2.0])) == []
    assert kept(near=("q.weight",)) == kept(fits=("q.weight",)) == ["L0.q.weight"]
    assert kept(held=("q.weight", "k.weight")) == []
    assert kept(held=("attn_norm.weight", "k.weight")) == ["L0.k.weight"]


# --- drafts -------------------------------------------------------------------------------------


def test_rows_of_drafted_tokens_are_looked_for_in_the_newest_slots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One slot after the other, then several, in addition to the tokens' own too."""
    monkeypatch.setattr(
        drafted_rows,
        "drafted_rows_change",
        lambda slots, since, added=False, rest=False: (dict(slots), since, added, rest),
    )

    def tried(
        first: int | None,
        found: Any = None,
        slots: int = 2,
        tokens: int = 6,
        vocabulary: int = 3,
        known: bool = True,
    ) -> tuple[list[Any], list[Any]]:
        asked: list[Any] = []

        def solve(where: list[int], beside: bool) -> Any:
            asked.append((where, beside))
            return dict.fromkeys(reversed(where), 7) if (where, beside) == found else None

        search = SimpleNamespace(slots=slots, solve=solve) if known else None
        monkeypatch.setattr(
            drafted_rows, "_VocabularySearch", SimpleNamespace(of=lambda case, late: search)
        )
        late = np.arange(tokens) >= (tokens if first is None else first)
        case: Any = SimpleNamespace(
            tokens=tokens,
            view=SimpleNamespace(tolerance=1.0),
            patched=SimpleNamespace(hp={"vocab_size": vocabulary}),
            distances_by_row=lambda view: np.where(late, 2.1, 2),
        )
        return list(drafted_rows.drafted_row_changes(case)), asked

    assert tried(None) == tried(0) == ([], [])
    order = [([2], False), ([1], False), ([3], True), ([2, 1], False), ([3, 4], True)]
    assert tried(3) == ([], order)
    assert tried(1)[1] == [([0], False), ([1], True), ([0], False), ([1, 2], True)]
    assert tried(5)[1] == [([4], False), ([3], False), ([5], True), ([4, 3], False), ([5], True)]
    assert tried(3, ([2], False)) == ([({2: 7}, 3, False, False)], order[:1])
    assert tried(3, ([1], False)) == (
        [({1: 7}, 3, False, False), ({1: 7}, 3, False, True)],
        order[:2],
    )
    assert tried(3, ([2, 1], False)) == ([({1: 7, 2: 7}, 3, False, False)], order[:4])
    assert tried(3, ([3], True)) == ([({3: 7}, 3, True, False)], order[:3])
    every = [({2: token}, 3, False, False) for token in range(3)]
    assert tried(3, known=False) == (every, [])
    small = drafted_rows.SMALL
    assert len(tried(3, known=False, vocabulary=small)[0]) == small
    assert tried(3, known=False, vocabulary=small + 1) == ([], [])


# --- ropes of other layers ----------------------------------------------------------------------


def test_layers_are_tried_with_another_rope_of_the_model_or_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All layers of the kind first, then this one; a rope that was solved is asked elsewhere."""
    own, far = (SimpleNamespace(theta=theta, scaled=theta > 100) for theta in (100.0, 5000.0))
    monkeypatch.setattr(rope, "rope_kinds", lambda patched: [own, far])
    monkeypatch.setattr(
        rope,
        "rope_frequencies",
        lambda patched, kind: SimpleNamespace(inv_freq=kind.theta, factor=2),
    )
    monkeypatch.setattr(rope, "rotate_with", lambda *given: given)
    monkeypatch.setattr(rope, "_bind_layers", lambda patch, scope: (patch, scope))
    monkeypatch.setattr(rope, "_use_rope_layers", lambda rows: rows)

    def tried(
        kinds: str, layer: int, *, between: bool = True, called: bool = False, solved: Any = None
    ) -> list[Any]:
        by_letter = {"o": own, "f": far, "-": None}
        rows = [by_letter[letter] for letter in kinds]
        monkeypatch.setattr(rope, "rotation_of_layer", lambda hp, at: rows[at])
        monkeypatch.setattr(rope, "rope_kind_of_layer", lambda case: rows[layer] or own)
        monkeypatch.setattr(rope, "has_rope_between_points", lambda case: between)
        monkeypatch.setattr(rope, "solve_rotation", lambda case: solved)
        hp = {"rope_layers": [row is not None for row in rows]}
        case: Any = SimpleNamespace(
            layer=layer,
            patched=SimpleNamespace(hp=hp, n_layers=len(rows)),
            call=lambda name: object() if called else None,
        )
        return list(rope.try_layers_with_rope(case))

    def told(changes: list[Any]) -> list[str]:
        assert all(one.cause == "rope_layers" and not one.scoped for one in changes)
        return [one.says for one in changes]

    other = (
        "layers 0, 2 rotate with base 5000 and scaling, which belongs to the other kind of layer"
    )
    alone = "layer 2 rotates with base 5000 and scaling, which belongs to the other kind of layer"
    none = "layers 0, 2 do not rotate; they should"
    changes = tried("ofo", 2)
    assert told(changes) == [other, alone, none, "layer 2 does not rotate; it should"]
    assert changes[0].make == ((5000.0, 2), {0, 2}) and changes[1].make[1] == {2}
    assert changes[2].make == (without_rope, {0, 2}) and changes[3].make[1] == {2}
    assert changes[0].where == ("L0.rope_layers", "L2.rope_layers")
    assert told(tried("ofo", 1))[0].startswith("layer 1 rotates with base 100, which belongs")
    moving, still = (SimpleNamespace(still=still) for still in (False, True))
    assert told(tried("ofo", 2, solved=moving)) == [other, alone]
    assert len(tried("ofo", 2, solved=still)) == 4
    # Where all layers are of one kind, only this one is without.
    assert told(tried("ooo", 2))[2:] == ["layer 2 does not rotate; it should"]
    assert tried("ofo", 2, between=False) == tried("ofo", 2, between=False, called=True) == []
    changes = tried("-o-", 0, between=False, called=True)
    assert told(changes) == [
        "layers 0, 2 rotate; they should not",
        "layer 0 rotates; it should not",
    ]
    assert [one.make for one in changes] == [(True, True, True), (True, True, False)]
    assert tried("-o-", 0, between=False) == [] and len(tried("-o-", 0)) == 2
    monkeypatch.undo()


# --- gradients by differences -------------------------------------------------------------------


def test_the_verdict_of_differences_names_what_all_directions_agree_on() -> None:
    def verdict(wrong: str = "", **more: Any) -> Any:
        facts = {
            "measured": True,
            "agrees": False,
            "says": "odd",
            "factor": None,
            "factor_room": 0.1,
        }
        found: Any = SimpleNamespace(**facts | more, wrong=wrong)
        return differences.judgement_of(found, {"tokens": 8.0})

    assert (verdict(measured=False).verdict, verdict(measured=False).why) == ("not compared", "odd")
    assert verdict(agrees=True).verdict == "agrees" and verdict("sign", agrees=True).guesses == ()
    plain = verdict("part")
    assert (plain.verdict, plain.why, plain.guesses) == ("differs", "the gradient is odd", ())
    for wrong, cause, free in (
        ("zero", "gradient_zero", 0),
        ("sign", "gradient_sign", 0),
        ("factor", "gradient_factor", 1),
        ("transposed", "gradient_transposed", 1),
    ):
        (guess,) = verdict(wrong).guesses
        assert (guess.cause, guess.says, guess.free) == (cause, "the gradient is odd", free)
        assert guess.made(SimpleNamespace(computed="computed")) == "computed"
    (guess,) = verdict("factor", factor=8.0).guesses
    assert guess.says == verdict("factor", factor=8.0).why != "the gradient is odd"
    (guess,) = verdict("factor", factor=-8.0).guesses
    assert guess.says == "the gradient is odd"
    (guess,) = verdict("factor", factor=0.0).guesses
    assert guess.says == "the gradient is odd"
    for one in (
        plain,
        verdict(measured=False),
        verdict(agrees=True),
        verdict("zero"),
        verdict("factor", factor=8.0),
    ):
        assert one.whole


def test_a_tensor_of_one_value_was_never_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    values: dict[str, Any] = {}
    monkeypatch.setattr(
        foreign_values, "constant_value", lambda side, windows: values.get(side.name)
    )
    monkeypatch.setattr(foreign_values, "sample_values", lambda side, most: side.values)

    def told(x: Any, y: Any, **constant: float) -> tuple[bool, str]:
        values.clear()
        values.update(constant)
        sides: list[Any] = [
            SimpleNamespace(
                name=name, values=np.asarray(held), shape=(4, 4), size=16, encoding="F32"
            )
            for name, held in (("a", x), ("b", y))
        ]
        found = foreign_values.judge_foreign(*sides)
        return found.sure, found.says

    x = RNG.normal(size=16)
    assert told(x, x, b=0.0) == (True, "B holds 0 everywhere: it was never filled")
    assert told(x, x, a=-0.0) == (True, "A holds 0 everywhere: it was never filled")
    few = (False, "16 values are too few to tell another tensor from damage")
    assert told(x, x, a=1.0, b=2.0) == told(x, x) == few
    assert told(x, x * np.inf) == (False, "values are not finite: damage")


@pytest.mark.parametrize(
    ("rows", "fewest", "looked_at"),
    [(40, 1, [0, 39]), (40, 3, [0, 19, 39]), (3, 5, [0, 1, 2]), (2, 5, [0, 1])],
)
def test_a_sample_of_rows_is_even_and_has_the_fewest_that_are_asked_for(
    rows: int, fewest: int, looked_at: list[int]
) -> None:
    values = np.arange(rows * 8, dtype=np.float32).reshape(rows, 8)
    reader: Any = SimpleNamespace(
        rows=rows, columns=8, size=values.size, take=lambda index: values[index]
    )
    found = foreign_values.sample_values(reader, 16, fewest)
    assert found.dtype == np.float64 and np.array_equal(found, values[looked_at])
