"""What hypotheses of the forward pass propose, each by itself, at both sides of its bounds."""

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.causes.forward import (
    attention,
    compressed_attention,
    experts,
    indexer,
    kv_cache,
    lightning_attention,
    linear,
    moe,
    norm,
    query_key,
    shards,
)
from aprfmt.causes.tensor.permutation import adjacent_pair_order

# --- windows ------------------------------------------------------------------------------------

TOKENS = 8


def windowed(
    *,
    first: int | None = None,
    late: int | None = None,
    size: int | None = None,
    probs: Any = None,
    **more: Any,
) -> Any:
    """A mismatch in layer 0 of two, whose rows differ from `first` on.

    `size`: the layer's window; `late`: the first row that differs without one.
    """
    shape = (1, TOKENS, TOKENS) if probs is None else probs.shape
    rows = {id(at): np.where(np.arange(TOKENS) >= at, 3.0, 2.0) for at in (first, late) if at}
    if first == 0:
        rows[id(first)] = np.full(TOKENS, 3.0)
    view = SimpleNamespace(
        mine=np.zeros(shape), axis=1, tolerance=1.0, layer=0, point="attn_mix", at=first
    )
    wide = None if size is None else SimpleNamespace(tolerance=1.0, at=late)
    hyper = {"sliding_window": size, "window_layers": [size is not None, False]}
    block = SimpleNamespace(**{"attends": "causal", "window": "sliding"} | more)
    return SimpleNamespace(
        call=lambda name: object(),
        view=view,
        tokens=TOKENS,
        layer=0,
        rows=range(TOKENS),
        patched=SimpleNamespace(hp=hyper, spec=SimpleNamespace(block=block)),
        found=SimpleNamespace(flagged=[view]),
        recorded_result=lambda call: probs,
        attempt=lambda change, layers: wide,
        distances_by_row=lambda x: rows.get(id(x.at), np.full(TOKENS, 2.0)),
    )


def windows(case: Any) -> list[Any]:
    return [change.values["sliding_window"] for change in attention.find_window(case)]


def test_the_first_row_that_differs_shows_the_window() -> None:
    """Of a wider one the rows agree until the model's own ends, and then show where theirs does."""
    assert windows(windowed()) == []
    assert [windows(windowed(first=at)) for at in (0, 1, 5)] == [[], [1], [5]]
    assert windows(windowed(size=4, first=3)) == [3]
    assert windows(windowed(size=4, first=4)) == [None]
    assert windows(windowed(size=4, first=4, late=6)) == [None, 6]
    assert windows(windowed(size=4, first=5, late=7)) == [None, 7]
    assert windows(windowed(first=3, attends="all")) == []
    other = windowed(first=3)
    other.view.mine = np.zeros((1, 1, TOKENS))  # no row for each token
    assert windows(other) == []


def test_recorded_probabilities_show_the_window_itself() -> None:
    at = np.arange(TOKENS)
    for reach in (1, 3, TOKENS - 1, TOKENS, TOKENS + 1):
        seen = (at <= at[:, None]) & (at > at[:, None] - reach)
        found = windows(windowed(probs=seen[None].astype(np.float32), size=4, first=1))
        assert found == [reach if reach < TOKENS else None]


# --- orders of rows -----------------------------------------------------------------------------

DIM, COUNT = 8, 32
HALVES = np.arange(DIM).reshape(2, -1).T.reshape(-1)


def by_head(inside: Any) -> Any:
    return np.arange(COUNT).reshape(-1, DIM)[:, inside].reshape(-1)


ORDERS: dict[str, tuple[str, Any, str, str]] = {
    "heads": (
        "attn_q",
        np.arange(COUNT).reshape(-1, DIM)[[1, 0, 3, 2]].reshape(-1),
        "head_order",
        "heads stand in the order [1, 0, 3, 2]",
    ),
    "heads of another part": (
        "ffn_up",
        np.arange(COUNT).reshape(-1, DIM)[[1, 0, 3, 2]].reshape(-1),
        "row_offset",
        "rows are in another order ([8, 9, 10, 11, 12, 13], ...)",
    ),
    "pairs": (
        "attn_k",
        by_head(HALVES),
        "rope_pairing",
        "rows of each head are ordered for adjacent pairs",
    ),
    "halves": (
        "attn_q",
        by_head(np.argsort(HALVES)),
        "rope_pairing",
        "rows of each head are ordered for split halves",
    ),
    "wrong heads": (
        "attn_q",
        adjacent_pair_order(COUNT, 2),
        "gqa_mapping",
        "rows were permuted for 2 heads; the tensor has 4",
    ),
    "one shard twice": (
        "ffn_up",
        np.tile(np.arange(16), 2),
        "tensor_parallel",
        "the rows are those of shards 0, 0 of 2, one after the other",
    ),
    "of four shards": (
        "ffn_up",
        np.arange(COUNT).reshape(4, -1)[[0, 1, 1, 3]].reshape(-1),
        "tensor_parallel",
        "the rows are those of shards 0, 1, 1, 3 of 4, one after the other",
    ),
    "any": (
        "ffn_up",
        np.arange(COUNT)[::-1],
        "row_offset",
        "rows are in another order ([31, 30, 29, 28, 27, 26], ...)",
    ),
}


def test_an_order_of_rows_has_its_name() -> None:
    case: Any = SimpleNamespace(patched=SimpleNamespace(hp={"head_dim": DIM}))
    for what, (role, order, cause, says) in ORDERS.items():
        found = linear._name_row_order(case, f"L0.{role}.weight", order)
        assert found[:2] == (cause, says), what
    for count in (11, 12):
        for shift in range(1, count):
            order = (np.arange(count) + shift) % count
            found = linear._name_row_order(case, "L0.ffn_up.weight", order)
            move = shift if shift <= count // 2 else shift - count
            assert found == ("row_offset", f"rows are read {move} further on", {"offset": move}), (
                count,
                shift,
            )


# --- half of a table ----------------------------------------------------------------------------


@pytest.mark.parametrize("alone", [0, 1])
def test_half_of_a_table_counts_as_zero(alone: int) -> None:
    """In the embedding by ids, in the head by columns; of an odd number the last half is longer."""
    held: dict[str, Any] = {}

    def with_op(op: str, override: Any, layers: Any) -> Any:
        held[op] = override
        return patched

    patched: Any = SimpleNamespace(weights={"t": SimpleNamespace(n_rows=5)}, with_op=with_op)
    assert shards._zero_half_table("t", alone)(patched, None) is patched
    kept = np.arange(5) >= 2 if alone else np.arange(5) < 2
    table, other = (SimpleNamespace(key=key) for key in ("t", "u"))
    ones = np.ones((5, 3), np.float32)
    embed = held["embed"](lambda table, ids: ones, None, table, [4, 3, 2, 1, 0])
    assert np.array_equal(embed, ones * kept[::-1, None]) and embed.dtype == np.float32
    logits = held["linear"](lambda x, w: ones.T, None, None, table)
    assert np.array_equal(logits, ones.T * kept) and logits.dtype == np.float32
    assert held["embed"](lambda table, ids: ones, None, other, [0] * 5) is ones
    assert held["linear"](lambda x, w: ones.T, None, None, other).all()


# --- norms, streams, rows of a cache ------------------------------------------------------------


@pytest.mark.parametrize(
    ("addend", "meant", "more", "less"), [(0, "w", "1 + w", "w - 1"), (1, "1 + w", "2 + w", "w")]
)
def test_a_norms_weight_is_tried_plus_and_minus_1_everywhere_and_here(
    addend: int, meant: str, more: str, less: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(norm, "point_before_norm", lambda patched, at: at)
    patched = SimpleNamespace(norm_addend=addend)
    case: Any = SimpleNamespace(call=lambda *ops: SimpleNamespace(location="mid"), patched=patched)
    found = [(change.values, change.says) for change in norm.try_norm_offsets(case)]
    here = {"behind": ("mid",)}
    assert [values for values, _ in found] == [
        {"offset": 1},
        {"offset": -1},
        {"offset": 1, **here},
        {"offset": -1, **here},
    ]
    for values, says in found:
        assert f"by {more if values['offset'] > 0 else less}, where {meant} is meant (w is" in says
        assert ("the norm before the MLP multiplies" in says) == ("behind" in values)
    case.call = lambda *ops: None
    assert not list(norm.try_norm_offsets(case))


@pytest.mark.parametrize("configured", [1, 2, 20])
def test_streams_are_mixed_another_number_of_times(configured: int) -> None:
    block = SimpleNamespace(streams="hyper")
    patched: Any = SimpleNamespace(
        spec=SimpleNamespace(block=block), hp={"hc_iterations": configured}, weights={}
    )
    found = [
        (change.values["hc_iterations"], change.says)
        for change in compressed_attention.usual_connection_mistakes(patched)
        if "hc_iterations" in change.values
    ]
    counts = {1: [2], 2: [1, 3], 20: [1, 19, 21]}[configured]
    assert [count for count, _ in found] == counts
    assert all(f"{count} times; the model says {configured}" in says for count, says in found)
    block.streams = "plain"
    assert not list(compressed_attention.usual_connection_mistakes(patched))


def test_a_row_of_a_cache_is_its_own_within_twice_the_tolerance() -> None:
    """Though another token's is nearer; beyond that it is the nearest, and zeros are none."""
    ours = np.array([[1.0, 0.0], [1.0, 0.15], [0.0, 5.0]])

    def matched(theirs: Any) -> list[int] | None:
        view = SimpleNamespace(mine=ours, theirs=np.array(theirs), tolerance=0.1)
        case: Any = SimpleNamespace(view=view)
        rows = kv_cache._match_cache_rows(case)
        return None if rows is None else rows.tolist()

    assert matched(ours) == [0, 1, 2]
    assert matched([[1.0, 0.15], ours[1], ours[2]]) == [0, 1, 2]  # 0.148 away from its own
    assert matched([ours[0], ours[2], ours[0]]) == [0, 2, 0]
    assert matched([ours[0], [0, 0], ours[2]]) == [0, -1, 2]
    assert matched([ours[0], ours[1], [0.0, 4.0]]) is None  # a quarter away from any


def test_a_later_pass_reads_other_rows_of_the_tokens_before_it_alone() -> None:
    tokens, first = 6, 4
    seen = set()
    for change in kv_cache.later_pass_changes(tokens, first):
        rows = {int(token): row for token, row in change.values["rows"].items()}
        assert change.values["since"] == first
        assert all(0 <= token < first and -1 <= row < tokens for token, row in rows.items())
        seen.add((change.says.split(" are ")[0], *sorted(rows.items())))
    for part in ("keys and values", "keys", "values"):
        for slot in (3, 2, 0):
            for row in {slot - 1, slot + 1, -1}:
                assert (part, (slot, row)) in seen
        for read in ([-1] * 4, [1, 2, 3, 4]):
            assert (part, *enumerate(read)) in seen
        assert (part, (1, 0), (2, 1), (3, 2)) in seen


# --- norms and factors of q and k ----------------------------------------------------------------


def of_queries(point: str = "scores", layer: int = 0, **more: Any) -> Any:
    """A mismatch at a point of a layer, of a model with norms behind rope and a factor on q."""
    hyper = {"qk_norm": True, "temperature_scale": 0.1, "temperature_length": 4}
    block = SimpleNamespace(qk_norm_place=more.pop("place", "after_rope"), temperature="rotated")
    alias = SimpleNamespace(alias_of=more.pop("alias", ""))
    patched = SimpleNamespace(
        hp={**hyper, **more},
        spec=SimpleNamespace(block=block),
        ids=range(8),
        points={f"L{layer}.q_attn": alias},
        with_hyper=lambda layers, **values: (layers, values),
        with_block=lambda layers, **values: (layers, values),
    )
    return SimpleNamespace(
        patched=patched, layer=layer, tokens=8, view=SimpleNamespace(point=point, tolerance=1e-6)
    )


def made(changes: Any) -> list[Any]:
    """What each change makes of the model, which says how it was asked."""
    return [change.make(of_queries().patched, {2}) for change in changes]


@pytest.mark.parametrize("place", ["rotated", "after_rope", "before_rope", "whole", ""])
def test_norms_of_queries_are_left_out_or_elsewhere_where_they_follow_rope(place: str) -> None:
    other = {"rotated": "after_rope", "after_rope": "before_rope"}.get(place)
    expected = [({2}, {"qk_norm": False}), ({2}, {"qk_norm_place": other})] if other else []
    for point in query_key._LATE:
        changes = list(query_key.try_query_key_norms(of_queries(point, place=place)))
        assert made(changes) == expected
        assert [change.values for change in changes] == [values for _, values in expected]
    for case in (
        of_queries("q", place=place),
        of_queries(place=place, layer=-1),
        of_queries(place=place, qk_norm=False),
    ):
        assert not list(query_key.try_query_key_norms(case))


def test_a_factor_by_position_is_left_out_where_queries_have_one() -> None:
    expected = [({2}, {"temperature_scale": 0.0})]
    for point in query_key._LATE:
        if point == "q_attn":
            continue
        changes = list(query_key.find_query_temperature(of_queries(point)))
        assert made(changes) == ([] if point.endswith("_rope") else expected)
    for case in (
        of_queries("q"),
        of_queries(layer=-1),
        of_queries(temperature_scale=None),
        of_queries(alias="q_rope"),
    ):
        assert not list(query_key.find_query_temperature(case))


def test_the_growth_of_queries_is_read_from_their_rows() -> None:
    """The first row that grows says the length, and its factor the scale."""
    at = np.arange(8)
    for first, length, scale in ((3, 3, 0.25), (4, 4, 0.5), (7, 7, 0.1), (9, 9, 0.5)):
        for unrotated in (False, True):
            case = of_queries("q_attn")
            if unrotated:
                case.patched.spec.block.temperature = "unrotated"
            places = at + unrotated
            base = np.ones((8, 2, 3)) * (at + 1)[:, None, None]
            case.view.mine = base * (1 + np.log1p(places // 4) * 0.1)[:, None, None]
            case.view.theirs = base * (1 + np.log1p(places // length) * scale)[:, None, None]
            given: list[Any] = []
            case.rounded_change = lambda change, value, given=given: [given.append((change, value))]
            changes = list(query_key.find_query_temperature(case))
            if first > 8 - (not unrotated):
                assert not given and len(changes) == 1
                continue
            [(change, value)] = given
            assert value == pytest.approx(scale, rel=1e-3)
            asked = change(scale)
            assert asked.values == {"temperature_length": length, "temperature_scale": scale}
            told = [("temperature_length", length != 4), ("temperature_scale", scale != 0.1)]
            assert asked.where == tuple(name for name, other in told if other)
            assert f"over {length}; the model says 0.1 and 4" in asked.says
            assert made([asked]) == [({2}, asked.values)]


# --- biases -------------------------------------------------------------------------------------


def test_the_same_vector_in_every_row_is_a_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing one, one too many, one added again, or one with other values."""
    rng = np.random.default_rng(5)
    bias, other = rng.normal(size=6), rng.normal(size=6)
    other -= bias * (other @ bias) / (bias @ bias)
    ours = rng.normal(size=(4, 6))
    others = SimpleNamespace(says="others")

    def said(
        vector: Any, own: Any, point: str = "q", rows: int = 4, tolerance: float = 1e-6
    ) -> str:
        case: Any = SimpleNamespace(
            view=SimpleNamespace(tolerance=tolerance, point=point, key=f"L0.{point}"),
            patched=SimpleNamespace(weights={"L0.attn_q.bias": bias}),
        )
        product = SimpleNamespace(
            theirs=ours[:rows] + vector, ours=ours[:rows], bias=own, key="k", role="L0.attn_q"
        )
        monkeypatch.setattr(linear, "product_of", lambda case: product)
        monkeypatch.setattr(linear, "_leave_out_biases", lambda case: iter([others]))
        changes = list(linear.find_missing_bias(case))
        assert len(changes) < 2
        return changes[0].says if changes else ""

    assert said(-bias, bias) == "L0.attn_q.bias is not added"
    assert said(-bias * (1 + 5e-4), bias) == "L0.attn_q.bias is not added"
    assert "has other values" in said(-bias * (1 + 5e-3), bias)
    assert said(-bias * (1 + 5e-3), bias, tolerance=1e-3) == "L0.attn_q.bias is not added"
    assert "has other values" in said(-bias * (1 + 2e-2), bias, tolerance=1e-3)
    assert said(bias, bias) == "L0.attn_q.bias is added twice"
    assert said(3 * bias, bias) == "L0.attn_q.bias is added 4 times"
    assert said(63 * bias, bias) == "L0.attn_q.bias is added 64 times"
    assert "has other values" in said(64 * bias, bias)
    assert "has other values" in said(other, bias) and not said(other, bias, rows=1)
    assert said(other, None).startswith("a bias is added that the model does not have")
    assert not said(other, None, rows=1) and not said(other * 1e-8, None)
    assert said(np.ones(6), None) and not said(np.ones(6), None, "logits")
    assert said(other, None, "logits")
    noise = rng.normal(size=(4, 6)) * 1e-2
    assert said(noise, bias) == "others" and said(noise, None) == "others"


# --- passes that forget, experts that are alike, factors of the stream ----------------------------


@pytest.mark.parametrize("late", [None, 0, 1, 5])
def test_a_pass_that_counts_from_nought_begins_behind_the_first_token(
    late: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_recorded_mask", lambda case: None)
    own = object()
    monkeypatch.setattr(attention, "usual_masks", lambda n: iter([own] if n == 8 else []))
    rows = np.full(8, 2.0)
    rows[8 if late is None else late :] = 2.5
    case: Any = SimpleNamespace(
        call=lambda name: object(),
        tokens=8,
        distances_by_row=lambda view: rows,
        view=SimpleNamespace(mine=np.zeros((1, 8, 8)), axis=1, tolerance=1.0),
        patched=SimpleNamespace(spec=SimpleNamespace(block=SimpleNamespace(attends="causal"))),
    )
    first, *more = attention.try_masks(case)
    assert first is own
    assert [change.values for change in more] == ([{"passes": [late]}] if late else [])


def test_of_experts_that_give_the_same_the_first_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = np.random.default_rng(2).normal(size=(4, 3, 5))  # expert, token, column
    outputs[3] = outputs[1]
    calls = [SimpleNamespace(args=(None, [token], np.ones((1, 5)), [0.5])) for token in range(3)]
    for order in ([1, 0, 2], [2, 1, 0], [1, 2, 0]):
        wanted = np.stack([0.5 * outputs[order[token]][token] for token in range(3)])
        case: Any = SimpleNamespace(
            tokens=3,
            rows=np.arange(3),
            array=np.asarray,
            view=SimpleNamespace(point="moe_out", mine=np.full((3, 5), 0.5), theirs=wanted),
        )
        monkeypatch.setattr(moe, "_all_expert_outputs", lambda case, count: outputs)
        monkeypatch.setattr(moe, "_experts_in_order", lambda case: range(3))
        assert moe._vote_expert_order(case, calls, 4) == [*order, 3]
        case.view.point = "ffn_out"
        assert moe._vote_expert_order(case, calls, 4) is None


@pytest.mark.parametrize(
    "experts, choices, hidden", [(4, 1, 3), (8, 2, 48), (16, 4, 48), (64, 8, 48), (64, 8, 256)]
)
@pytest.mark.parametrize("twice", [False, True])
def test_the_assignment_that_gives_a_tokens_value_is_found(
    experts: int, choices: int, hidden: int, twice: bool
) -> None:
    """Seen red: of more than 5000 assignments none was tried, as of 4 out of 16 experts."""
    rng = np.random.default_rng(experts + choices)
    for _ in range(5):
        outputs = rng.normal(size=(experts, hidden))
        weights = rng.dirichlet(np.full(choices, 4.0))
        right = rng.choice(experts, choices, replace=False)
        if twice and choices > 1:
            right[-1] = right[0]
        wanted = (weights[:, None] * outputs[right]).sum(0)
        wanted = wanted * (1 + 2.0**-9 * rng.normal(size=hidden))
        found = moe._best_assignment(outputs, weights, wanted)
        total = (weights[:, None] * outputs[found]).sum(0)
        assert np.linalg.norm(total - wanted) < 0.01 * np.linalg.norm(wanted)
        assert sorted(found) == sorted(right.tolist())


def test_the_best_of_all_assignments_is_found_where_all_are_held() -> None:
    """The distance is the least of any assignment, also where none fits."""
    rng = np.random.default_rng(3)
    for _ in range(20):
        outputs, weights = rng.normal(size=(6, 4)), rng.dirichlet(np.ones(3))
        wanted = rng.normal(size=4)
        away = [
            np.linalg.norm((weights[:, None] * outputs[list(one)]).sum(0) - wanted)
            for one in itertools.product(range(6), repeat=3)
        ]
        found = moe._best_assignment(outputs, weights, wanted)
        total = (weights[:, None] * outputs[found]).sum(0)
        assert np.linalg.norm(total - wanted) == pytest.approx(min(away))


@pytest.mark.parametrize(
    "voted, used, mapping",
    [
        ({0: 1, 1: 0}, {0, 1}, [1, 0, 2, 3]),  # two exchanged, the others chosen by no token
        ({0: 2, 1: 3}, {0, 1}, [2, 3, 0, 1]),  # what no token chose gets what is left
        ({0: 2, 1: 3}, {0, 1, 2, 3}, [2, 3, 2, 3]),  # chosen without a difference: its own
        ({0: 0, 2: 0}, {0, 2}, [0, 1, 0, 3]),  # one twice: the others keep their numbers
        ({0: 3, 1: 3}, {0, 1}, [3, 3, 2, 3]),
        ({2: 1}, {2}, None),  # a single vote
    ],
)
def test_votes_become_an_order_of_experts(
    voted: dict[int, int], used: set[int], mapping: list[int] | None
) -> None:
    votes = np.zeros((4, 4))
    for expert, stored in voted.items():
        votes[expert, stored] = 1
    assert moe._mapping_of_votes(votes, used) == mapping


def test_two_votes_for_a_single_expert_are_enough() -> None:
    """Where a token takes one expert, each token says one only."""
    votes = np.zeros((3, 3))
    votes[2, 1] = 2
    assert moe._mapping_of_votes(votes, {0, 1, 2}) == [0, 1, 1]


def test_factors_of_the_stream_are_left_out_in_pairs() -> None:
    for scales in (
        (0.5, 0.6, 0.7, 0.8, 0.9, 1.1),
        (1.0, 1.0, 0.7, 0.8, 1.0, 1.0),
        (1.0, 0.6, 1.0, 1.0, 0.9, 1.0),
        (1.0,) * 6,
    ):
        patched: Any = SimpleNamespace(
            spec=SimpleNamespace(block=SimpleNamespace(residual="norm")),
            hp={"residual_scales": scales},
            n_layers=0,
        )
        changes = usual(patched)
        assert all(each.cause == "multiplier" and "no factors" in each.says for each in changes)
        found = [tuple(change.values["residual_scales"]) for change in changes]
        pairs = [
            (*scales[:at], 1.0, 1.0, *scales[at + 2 :])
            for at in (0, 2, 4)
            if scales[at : at + 2] != (1.0, 1.0)
        ]
        assert found == [*pairs, *([(1.0,) * 6] if pairs else [])]


def usual(patched: Any) -> list[Any]:
    """The usual changes of a model without lightning attention."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lightning_attention, "mixer_kinds", lambda patched: ())
        return list(lightning_attention.usual_lightning_mistakes(patched))


def test_blocks_of_an_indexer_have_other_sizes_and_neighbours() -> None:
    for size, local, sizes, locals_ in (
        (4, 1, [3, 5, 2, 8], [0, 2]),
        (1, 0, [2], [1]),
        (8, 3, [7, 9, 4, 16], [0, 2, 4]),
    ):
        patched: Any = SimpleNamespace(hp={"index_block": size, "index_local_blocks": local})
        changes = list(indexer._block_mistakes(patched))
        values = [dict(change.values) for change in changes[1:-1]]
        assert values == [
            *({"index_block": each} for each in sizes),
            *({"index_local_blocks": each} for each in locals_),
        ]
        for change in changes[1:-1]:
            (count,) = change.values.values()
            assert f"{count} keys; the model says {size}" in change.says or (
                f"{count} blocks next to a query are always read; the model says {local}"
                in change.says
            )
        assert "not rotated" in changes[0].says and "the first one's indexer" in changes[-1].says


# --- capacities of experts ------------------------------------------------------------------------


@pytest.mark.parametrize("heaviest", [False, True])
@pytest.mark.parametrize(
    ("layer", "op", "late", "found"),
    [
        (0, "add_weighted", [2, 3], [2]),
        (0, "add_weighted", [3], [3]),
        (0, "add_weighted", [2], []),  # two tokens would be dropped
        (0, "add_weighted", [], []),
        (0, "linear", [2], [2]),  # at later points other rows differ, or fewer
        (-1, "add_weighted", [2], [2]),
        (-1, "linear", [1, 3], [1]),
        (-1, "linear", [0, 3], []),
    ],
)
def test_a_capacity_drops_just_the_rows_that_differ_where_they_are_added(
    layer: int, op: str, late: list[int], found: list[int], heaviest: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Four tokens of one expert, whose weights fall: its first tokens are its heaviest."""
    routing = np.zeros((4, 1), np.int64), np.array([[0.8], [0.4], [0.2], [0.1]])
    monkeypatch.setattr(experts, "_recorded_routing", lambda case: [routing])
    view = SimpleNamespace(tolerance=0.1, calls=[SimpleNamespace(op=op)])
    apart = np.where(np.isin(np.arange(4), late), 0.3, 0.2)
    case: Any = SimpleNamespace(
        layer=layer, view=view, rows=np.arange(4), distances_by_row=lambda view: apart
    )
    changes = list(experts.find_capacity(case))
    kept = "those with the highest weights" if heaviest else "the first ones"
    told = [one.values["expert_capacity"] for one in changes if one.values["kept"] == kept]
    assert told == found


CHOSEN = np.array([[0, 1], [0, 1], [1, 0], [0, 1]])
WEIGHED = np.array([[0.6, 0.4], [0.7, 0.3], [0.8, 0.2], [0.9, 0.1]])


@pytest.mark.parametrize(
    ("which", "kept"),
    [
        ("the first ones", [[1, 1], [1, 1], [0, 0], [0, 0]]),
        ("those with the highest weights", [[0, 1], [1, 0], [1, 0], [1, 0]]),
        ("all first choices of tokens before the second ones", [[1, 1], [1, 0], [1, 0], [0, 0]]),
    ],
)
def test_a_full_expert_keeps_two_tokens(which: str, kept: list[list[int]]) -> None:
    """Renormalised weights of a token have the sum that they had, where one is left."""
    plain = experts.drop_over_capacity(CHOSEN, WEIGHED, 2, which)
    assert np.array_equal(plain, WEIGHED * kept)
    whole = experts.drop_over_capacity(CHOSEN, WEIGHED, 2, which, renormalised=True)
    left = np.any(kept, axis=1)
    assert np.allclose(whole.sum(-1), left) and np.array_equal(whole != 0, plain != 0)


def test_a_token_with_one_expert_has_no_second_choice() -> None:
    """No rule is tried twice where two rules drop the same tokens."""
    patched: Any = SimpleNamespace(ids=range(8), hp={"n_experts_used": 1, "n_experts": 8})
    told = [change.values for change in experts.usual_capacities(patched)]
    assert {one["kept"] for one in told} == set(list(experts.KEPT)[:2])
    assert not any(one["renormalised"] for one in told)


# --- weights of norms -----------------------------------------------------------------------------


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("size", [3, 4, 8])
def test_a_norms_weight_is_solved_from_what_it_gives(
    size: int, offset: int, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the last of a longer weight's numbers, and not by a shorter one's."""
    rng = np.random.default_rng(5)
    w, true, plain = rng.uniform(1, 2, size), rng.uniform(1, 2, 4), rng.standard_normal((6, 4))
    bias = rng.standard_normal(4) if biased else None
    added = 0.0 if bias is None else bias
    call = SimpleNamespace(
        op="layer_norm" if biased else "rms_norm", args=("x", "w", bias), kwargs={"offset": offset},
        result=plain * (w[-4:] + offset) + added if size >= 4 else plain,
    )  # fmt: skip
    other = plain * (true + offset) + added
    monkeypatch.setattr(norm, "norm_key", lambda case: "w")
    monkeypatch.setattr(norm, "_exchanged_norms", lambda case, key: iter(()))
    monkeypatch.setattr(norm, "_name_norm_weight", lambda case, key, stored: iter([stored]))
    case: Any = SimpleNamespace(
        call=lambda *names: call, recorded_result=lambda call: other, array=lambda x: x,
        patched=SimpleNamespace(stored={"w": SimpleNamespace(numpy=lambda: w)}),
        agree=lambda x, y: np.allclose(x, y, rtol=1e-9),
    )  # fmt: skip
    found: list[Any] = list(norm.find_norm_weight(case))
    assert len(found) == (size >= 4)
    for stored in found:
        np.testing.assert_allclose(stored, true, rtol=1e-9)
    other = other + rng.standard_normal((6, 4))  # which no weight explains
    assert not list(norm.find_norm_weight(case))
