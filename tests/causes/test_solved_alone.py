"""What numbers, orders and rows of a pass are solved of a recorded value, each by itself."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.causes.forward import (
    attention,
    delta_net,
    drafted_rows,
    kv_cache,
    logit_relations,
    mlp,
    norm_changes,
    operation_patches,
    rank_shares,
    residual_stream,
    state_space,
)

RNG = np.random.default_rng(11)


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """Each test draws the same numbers, whichever ran before it."""
    RNG.bit_generator.state = np.random.default_rng(99).bit_generator.state


class Patched(SimpleNamespace):
    """A model that keeps what is changed of it, by the operation or the point."""

    def __init__(self, **more: Any) -> None:
        super().__init__(ops={}, taps={}, changed={}, **more)

    def with_op(self, name: str, override: Any, layers: Any) -> "Patched":
        self.ops[name] = override
        return self

    def with_ops(self, names: Any, override: Any, layers: Any) -> "Patched":
        self.ops |= dict.fromkeys(names, override)
        return self

    def with_tap(self, point: str, tap: Any, layers: Any) -> "Patched":
        self.taps[point] = (tap, layers)
        return self

    def with_hyper(self, layers: Any, **values: Any) -> "Patched":
        self.changed |= values
        return self

    with_block = with_hyper


# --- windows and clamps -------------------------------------------------------------------------


def test_chunks_are_left_out_are_a_window_or_end_elsewhere() -> None:
    """Where rows begin to differ, and where they do without any chunks."""

    def tried(first: int | None, late: int | None = None) -> list[Any]:
        own = SimpleNamespace(tolerance=1.0, at=first)
        wide = None if late is None else SimpleNamespace(tolerance=1.0, at=late)

        def apart(view: Any) -> Any:
            return np.where(np.arange(8) >= (9 if view.at is None else view.at), 2.1, 2.0)

        case: Any = SimpleNamespace(
            patched=SimpleNamespace(hp={"sliding_window": 4}),
            view=own,
            distances_by_row=apart,
            attempt=lambda change: wide,
        )
        found = []
        for change in attention._try_chunks(case):
            assert change.cause == "sliding_window" and change.says.endswith(
                "the model says chunks of 4"
            )
            made: Any = Patched()
            change.make(made, None)
            assert made.changed == change.values
            found.append(next(iter(change.values.values())))
        return found

    assert tried(None) == [None, "sliding"] == tried(0)
    assert tried(3) == [None, "sliding", 3] == tried(3, 0)
    assert tried(4, 6) == [None, "sliding", 4, 6] and tried(None, 5) == [None, "sliding", 5]


def test_a_gated_activation_is_tried_without_its_clamp_and_with_other_gains() -> None:
    def tried(limit: float, alpha: float, called: bool = True) -> list[Any]:
        call = SimpleNamespace(args=(None, None, limit, alpha)) if called else None
        case: Any = SimpleNamespace(call=lambda *names: call)
        return [
            (
                change.values["swiglu_limit"],
                change.values["swiglu_alpha"],
                change.where,
                change.says,
            )
            for change in mlp.try_clamps(case)
        ]

    def says(limit: float, gain: float, own: str) -> str:
        return f"gate and up are clamped at {limit:g} with gain {gain:g}; the model says {own}"

    limit, alpha = ("swiglu_limit",), ("swiglu_alpha",)
    assert tried(5.0, 1.5) == [
        (None, 1.5, limit, "gate and up are not clamped"),
        (5.0, 1.0, alpha, says(5, 1, "5 and 1.5")),
        (5.0, 1.702, alpha, says(5, 1.702, "5 and 1.5")),
        (7.0, 1.5, limit, says(7, 1.5, "5 and 1.5")),
    ]
    assert [row[:2] for row in tried(7.0, 1.702)] == [(None, 1.702), (7.0, 1.0)]
    assert tried(5.0, 1.5, called=False) == []


def kept(into: list[Any], what: Any) -> tuple[()]:
    into.append(what)
    return ()


@pytest.mark.parametrize("fitting", [False, True])
def test_a_number_of_an_activation_is_an_offset_a_clamp_or_a_factor(
    fitting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        mlp,
        "_change_by_number",
        lambda says, table: (says, "clamp" if table is mlp.CLAMPS else "number"),
    )
    x = np.array([-3.0, -1.0, 0.5, 2.0, 4.0])
    ours = x * 2

    def solved(y: Any) -> tuple[list[Any], list[Any]]:
        rounded: list[Any] = []
        fitted: list[Any] = []
        case: Any = SimpleNamespace(
            fitting=fitting,
            rounded_change=lambda how, value: kept(rounded, (*how, round(value, 9))),
            best_number=lambda how, tries: kept(fitted, (*how, list(tries))),
        )
        list(mlp._solve_numbers(case, x, ours, np.asarray(y)))
        return rounded, fitted

    words = tuple(mlp.NUMBERS)
    rounded, fitted = solved(ours + 0.5)
    assert rounded == [(words[1], "number", 0.5)]
    rest = [
        (words[0], "number", [-1.0, -0.5, -0.1, 0.1, 0.5, 1.0]),
        (words[2], "number", [0.5, 0.8, 1.2, 1.702, 2.0]),
        (words[3], "number", [0.5, 0.8, 1.2, 2.0]),
    ]
    assert fitted == (rest if fitting else [])
    assert solved(ours * 1.5) == ([], rest if fitting else [])
    rounded, fitted = solved(np.minimum(ours, 3.0))  # x above 1.5
    if not fitting:
        assert (rounded, fitted) == ([], [])
        return
    both, above, result = tuple(mlp.CLAMPS)
    near: dict[str, list[float]] = {words: [] for words in mlp.CLAMPS}
    for says, kind, tries in fitted[:-3]:
        assert kind == "clamp" and len(tries) == 21
        near[says].append(round(tries[10], 9))
        assert tries == pytest.approx([tries[10] * (1 + 0.02 * k) for k in range(-10, 11)])
    assert near == {both: [3.0, 2.0], above: [3.0, 2.0], result: [3.0]} and fitted[-3:] == rest
    _, fitted = solved(np.maximum(ours, -1.0))  # x below -0.5: nothing positive differs but 0
    assert [tries[10] for says, _, tries in fitted[:-3] if says == above] == [4.0, 4.0]


# --- orders of ranks ----------------------------------------------------------------------------


def test_blocks_of_ranks_are_told_where_each_is_one_of_ours() -> None:
    mine = RNG.normal(size=(6, 12))

    def order(theirs: Any, count: int = 4, bound: float = 0.1) -> Any:
        return rank_shares.block_order(mine, theirs, count, bound)

    blocks = np.split(mine, 4, 1)
    for ranks in ([1, 0, 2, 3], [3, 2, 1, 0], [0, 0, 2, 3]):
        assert order(np.concatenate([blocks[one] for one in ranks], 1)) == ranks
    assert order(mine) is None and order(mine, 5) is None
    swapped = np.concatenate([blocks[1], blocks[0], *blocks[2:]], 1)
    assert order(swapped * 1.09) == [1, 0, 2, 3] and order(swapped * 1.2) is None
    assert order(swapped, bound=9.0) is None  # more than one is as near
    odd = swapped.copy()
    odd[:, 9:] = RNG.normal(size=(6, 3))
    assert order(odd) is None


def test_shares_of_rows_stand_in_an_order_that_even_and_odd_rows_show(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_shares, "_share_order_change", lambda *given: given[:3])
    monkeypatch.setattr(rank_shares, "_patch_output_order", lambda *given: None)
    monkeypatch.setattr(rank_shares, "COUNTS", (2, 4))
    mine = RNG.normal(size=(6, 8))
    halves = np.concatenate([mine[:, 4:], mine[:, :4]], 1)
    quarters = mine[:, [2, 3, 0, 1, 4, 5, 6, 7]]

    def found(role: str = "q", **theirs: Any) -> list[Any]:
        views = {
            f"L2.{point}": SimpleNamespace(
                mine=mine,
                theirs=mine if values is None else values,
                recorded=None if values is None else 1,
            )
            for point, values in theirs.items()
        }
        case: Any = SimpleNamespace(
            layer=2, view=SimpleNamespace(tolerance=0.01), found=SimpleNamespace(views=views)
        )
        group = [("q", "q_mm"), ("k", "k_mm"), ("v", "v_mm")]
        return list(rank_shares._find_row_share_order(case, "attention", group, role))

    assert found(q_mm=halves) == [("attention", ("q",), [1, 0])]
    assert found(q_mm=halves, k_mm=halves, v_mm=quarters) == [("attention", ("q", "k"), [1, 0])]
    assert found("v", q_mm=halves, v_mm=quarters) == [("attention", ("v",), [1, 0, 2, 3])]
    assert found("k", q_mm=halves) == found(q_mm=mine) == found() == found(q_mm=None) == []
    around = mine[:, [2, 3, 4, 5, 6, 7, 0, 1]]
    assert found(q_mm=around) == [("attention", ("q",), [1, 2, 3, 0])]
    assert found(q_mm=halves[:, :6]) == []
    mixed = halves.copy()
    mixed[1::2] = mine[1::2]  # odd rows in place
    assert found(q_mm=mixed) == []
    mixed[1::2] = quarters[1::2]
    assert found(q_mm=mixed) == []


# --- factors ------------------------------------------------------------------------------------


def test_a_factor_on_the_stream_is_solved_of_what_is_linear_in_it() -> None:
    """The usual one where a point shows it within its roundings; without any it is tried."""
    stream = RNG.normal(size=(4, 6))
    rest = RNG.normal(size=(4, 6))

    def fitted(
        factor: float,
        usual: Any = (),
        *,
        point: Any = None,
        mid: Any = None,
        normed: bool = False,
        given: Any = stream,
        configured: float = 2.0,
        flagged: bool = True,
    ) -> list[Any]:
        def view(key: str, ours: Any, theirs: Any) -> Any:
            return SimpleNamespace(
                key=key, mine=ours, theirs=theirs, tolerance=1e-3, recorded=1, flagged=flagged
            )

        own = view("L3.point", *(point or (stream, rest)))
        views = {} if mid is None else {"L3.mid": view("L3.mid", *mid)}
        case: Any = SimpleNamespace(
            layer=3,
            view=own,
            found=SimpleNamespace(views=views),
            call=lambda *names: 1 if normed else None,
            best_number=lambda make, tries: iter([("best", list(tries))]),
        )
        size: Any = lambda value: ("size", value)  # noqa: E731
        made: Any = residual_stream._fit_size(case, size, configured, usual, given)
        return list(made)

    for factor in (0.25, 3.0):
        linear = (stream, stream * factor)
        assert fitted(factor, point=linear) == [("size", pytest.approx(2 * factor))]
        assert fitted(factor, (2 * factor * 1.00001,), point=linear) == [
            ("size", 2 * factor * 1.00001)
        ]
        added = (rest + stream, rest + stream * factor)
        assert fitted(factor, mid=added) == [("size", pytest.approx(2 * factor))]
        assert fitted(factor, mid=added, flagged=False) == []
        assert fitted(factor, mid=added, given=None) == []
    assert fitted(0.0, point=(stream, stream * 0)) == []  # nothing is left of it
    powers = [2.0 * 2.0**k for k in residual_stream.POWERS]
    assert fitted(1.0, (5.0,)) == [("best", [5.0, *powers])]
    assert fitted(1.0, (5.0,), point=(stream, stream * 3), normed=True) == [
        ("best", [5.0, *powers])
    ]
    assert fitted(1.0, (5.0,), point=(stream * 0, rest)) == [("best", [5.0, *powers])]


def test_factors_on_parts_of_a_mixer_are_left_out_or_exchanged() -> None:
    parts = state_space.PARTS
    own = (2.0, *[1.0] * (len(parts) - 2), 0.5)
    found = dict(state_space._other_factor_lists(own))
    assert found[f"ssm_scales are left out; the model says {list(own)}"] == (1.0,) * len(parts)
    first = f"ssm_scales has no factor on {parts[0]}; the model says 2"
    assert found[first] == (1.0, *own[1:])
    last = f"ssm_scales has no factor on {parts[-1]}; the model says 0.5"
    assert found[last] == (*own[:-1], 1.0)
    turned = f"ssm_scales of {parts[0]} and {parts[-1]} are exchanged"
    assert found[turned] == (0.5, *own[1:-1], 2.0)
    assert found[f"ssm_scales of {parts[0]} and {parts[1]} are exchanged"] == (1.0, 2.0, *own[2:])
    assert len(found) == 3 + 2 * (len(parts) - 2) + 1
    assert list(state_space._other_factor_lists((1.0,) * len(parts))) == []


def test_the_residual_factor_is_on_the_sum_or_on_the_stream() -> None:
    made: Any = Patched()
    a, b = np.ones((2, 3)), np.full((2, 3), 4.0)
    for whole, expected in ((True, 2.5), (False, 4.5)):
        operation_patches.scale_sum_or_stream(0.5, whole)(made, None)
        for point, behind in (("attn_out", True), ("moe_out", True), ("embd", False)):
            at = SimpleNamespace(point=point)
            total = made.ops["add"](np.add, at, a, b)
            assert (total == (expected if behind else 5.0)).all()
            scaled = made.ops["scale"](np.divide, at, a, 4.0)
            assert (scaled == (1.0 if behind else 0.25)).all()
        bias = made.ops["add"](np.add, SimpleNamespace(point="attn_out"), a, b[0])
        assert (bias == 5.0).all()


def test_queries_and_keys_are_normalised_behind_rope_each_by_its_own_norm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What an earlier layer left is forgotten where the next one begins."""
    monkeypatch.setattr(norm_changes, "_is_query_key_norm", lambda at: at.point != "in")
    made: Any = Patched()
    norm_changes.norm_after_rope(made, None)
    norm, rope = made.ops["rms_norm"], made.ops["rope"]
    assert norm is made.ops["layer_norm"]

    def scaled(x: Any, times: float) -> Any:
        return x * times

    def at(point: str) -> Any:
        return SimpleNamespace(point=point)

    x = np.arange(6.0).reshape(2, 3)
    assert (norm(scaled, at("in"), x, 9.0) == 9 * x).all()
    for rotates in (True, False, True):
        assert norm(scaled, at("v"), x, 2.0) is x and norm(scaled, at("q_norm"), x, 3.0) is x
        for times in (2.0, 3.0, 1.0) if rotates else ():
            turned = rope(lambda x, table: x + table, None, x.reshape(2, 1, 3), 1.0)
            assert turned.shape == (2, 1, 3) and (turned.reshape(2, 3) == times * (x + 1)).all()


# --- relations of logits ------------------------------------------------------------------------


def test_logits_may_be_off_by_a_factor_or_a_number_for_each_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logit_relations, "factor_change", lambda *given: given)
    monkeypatch.setattr(logit_relations, "_factor_after_cap", lambda *given: given)
    ours = RNG.normal(size=(1, 6, 9))

    def related(
        theirs: Any,
        *,
        point: str = "logits",
        cap: Any = None,
        normalized: bool = False,
        recorded: bool = True,
        called: bool = True,
    ) -> list[Any]:
        view = SimpleNamespace(
            point=point,
            key="logits",
            mine=ours,
            theirs=np.asarray(theirs),
            tolerance=1e-4,
            axis=1,
            recorded=SimpleNamespace(normalized=normalized) if recorded else None,
        )
        case: Any = SimpleNamespace(
            view=view,
            rows=np.arange(6),
            recorded_rows=(view.mine, view.theirs),
            patched=SimpleNamespace(hp={"final_softcap": cap, "logit_scale": 2.0}),
            call=lambda name: SimpleNamespace(location="cap") if called else None,
            rounded_change=lambda make, value: iter([make(round(value, 6))]),
        )
        return list(logit_relations.find_logit_relation(case))

    numbers = np.arange(6.0)[None, :, None]
    (change,) = related(ours + numbers)
    assert change.cause == "capture_point" and change.drop == {"logits"}
    assert np.allclose(change.gives, ours + numbers)
    assert related(ours * 3) == [] == related(ours * 3 + numbers)  # found with other factors
    assert related(ours * 3 + numbers, normalized=True) == [("logit_scale", 6.0, 2.0)]
    assert (
        related(ours + numbers, normalized=True) == [("logit_scale", 2.0, 2.0)]
        or related(ours + numbers, normalized=True) == []
    )
    assert related(ours * 3, cap=30.0) == [(3.0, "cap")]
    assert related(ours * 3, cap=30.0, called=False) == []
    wrong = ours * 3
    wrong[0, 1] *= 1.5
    assert related(wrong, cap=30.0) == []
    x = RNG.normal(size=(2, 5))
    rows = logit_relations._factor_of_rows
    assert rows(x, 2 * x, 1e-6) == pytest.approx(2.0) == rows(x[:1], 2 * x[:1], 1e-6)
    assert (
        rows(x[:1], np.array([[2, 3, 2, 3, 2]]) * x[:1], 1e-6) is None
    )  # of one row, its values judge
    assert rows(x, -2 * x, 1e-6) is None and rows(x * 0, x, 1.0) is None
    bad = ours + numbers
    bad[0, 0, 0] = np.inf
    assert related(bad) == related(ours[:, :5]) == []
    assert related(ours + numbers, point="out") == related(ours + numbers, recorded=False) == []


# --- rows of caches -----------------------------------------------------------------------------


def test_values_are_those_of_tokens_that_mixed_results_show() -> None:
    tokens, heads, groups, width = 5, 2, 2, 4
    v = RNG.normal(size=(tokens, heads, width))
    logits = RNG.normal(size=(heads * groups, tokens, tokens)) + 4 * np.eye(tokens)
    probs = np.tril(np.exp(logits))
    probs /= probs.sum(-1, keepdims=True)

    def solved(rows: Any, *, recorded: bool = True, count: int = tokens, probs: Any = probs) -> Any:
        read = np.where(np.asarray(rows)[:, None, None] < 0, 0.0, v[rows])
        theirs = np.einsum("hqk,khd->qhd", probs, np.repeat(read, groups, 1))
        case: Any = SimpleNamespace(
            recorded_result=lambda call: theirs if recorded else None,
            array=lambda x: x,
            tokens=count,
        )
        call: Any = SimpleNamespace(args=(probs, v))
        return kv_cache._solve_value_rows(case, call)

    for rows in ([0, 1, 2, 3, 4], [0, 0, 1, 2, 3], [4, 3, 2, 1, 0], [0, -1, 2, -1, 4]):
        assert solved(rows).tolist() == rows
    assert solved([0] * 5, recorded=False) is None and solved([0] * 5, count=513) is None
    assert solved([0] * 5, count=512) is not None
    assert solved([0, 1, 2, 3, 4], probs=probs[:, :4]) is None


def test_drafted_keys_are_put_behind_the_others_and_later_queries_see_them() -> None:
    from aprfmt.inference.backends.base import Heads

    made: Any = Patched()

    def read(which: str, layer: int, x: Any) -> Any:
        assert which in ("k", "v") and layer == 0
        return np.concatenate([x, np.full((2, *x.shape[1:]), 9.0 if which == "k" else 7.0)])

    drafted_rows._with_more_keys(made, read, None, 2, 3)
    at: Any = SimpleNamespace(layer=0)
    k = np.zeros((4, 1, 2))
    mask = np.tril(np.ones((4, 4), bool))
    heads: Any = SimpleNamespace(mask=mask)
    q, keys, given = made.ops["scores"](lambda *all_of: all_of, at, "q", k, heads)
    assert q == "q" and given is heads and keys[:, 0, 0].tolist() == [0, 0, 0, 0, 9, 9]
    probs, values = made.ops["mix"](lambda *all_of: all_of, at, "p", k)
    assert probs == "p" and values[:, 0, 0].tolist() == [0, 0, 0, 0, 7, 7]
    fields = {name: None for name in Heads.__dataclass_fields__}
    own = Heads(**fields | {"mask": mask, "causal": 5})  # type: ignore[arg-type]
    scores, seen = made.ops["probs"](lambda *all_of: all_of, at, "s", own)
    assert scores == "s" and seen.causal is None
    assert np.array_equal(seen.mask[:, :4], mask)
    assert seen.mask[:, 4:].tolist() == [[False] * 2] * 3 + [[True] * 2]


# --- the delta rule -----------------------------------------------------------------------------

WAYS: tuple[dict[str, bool], ...] = (
    {},
    {"unit_q": False},
    {"unit_k": False},
    {"scaled": False},
    {"in_turn": True},
    {"corrects": False},
    {"early": True},
    {"forgets": True},
    {"late_decay": True},
    {"corrects": False, "late_decay": True},
    {"early": True, "in_turn": True},
)


@pytest.mark.parametrize("by_channel", [False, True])
def test_the_delta_rule_is_that_of_its_words_token_by_token(by_channel: bool) -> None:
    tokens, keys, each, width, out = 5, 2, 2, 3, 6
    q, k = RNG.normal(size=(2, tokens, keys, width))
    v = RNG.normal(size=(tokens, keys * each, out))
    shape = (tokens, keys * each, width) if by_channel else (tokens, keys * each)
    g, beta = -RNG.random(shape), RNG.random((tokens, keys * each))
    for way in WAYS:
        on = dict.fromkeys(("unit_q", "unit_k", "scaled", "corrects"), True) | way
        expected = np.zeros(v.shape)
        for h in range(keys * each):
            own = h % keys if on.get("in_turn") else h // each
            state = np.zeros((width, out))
            for t in range(tokens):
                query, key = q[t, own], k[t, own]
                query = query / np.linalg.norm(query) if on["unit_q"] else query
                key = key / np.linalg.norm(key) if on["unit_k"] else key
                query = query * width**-0.5 if on["scaled"] else query
                decay = np.exp(g[t, h])
                decay = decay[:, None] if by_channel else decay
                if on.get("forgets"):
                    state = state * 0
                elif not on.get("late_decay"):
                    state = state * decay
                before = state
                error = v[t, h] - key @ state if on["corrects"] else v[t, h]
                state = state + np.outer(key, error * beta[t, h])
                state = state * decay if on.get("late_decay") else state
                expected[t, h] = query @ (before if on.get("early") else state)
        found = delta_net._delta_rule(q, k, v, g, beta, **way)
        assert np.allclose(found, expected, atol=1e-6), way
