"""Sums, orders of shares and columns, removed directions, parts of tokenizers: each by itself."""

import tracemalloc
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.causes.forward import kv_cache, rank_shares, residual_stream, usual_steps
from aprfmt.causes.tensor import derived_weights
from aprfmt.causes.tokenizer import part_exchange
from aprfmt.tensors import norms

# --- the sum of a stream and a sublayer -----------------------------------------------------------

STREAM, MADE = 5.0, 3.0
SUMS = {
    "the stream is added to itself instead of what {} computed": 10.0,
    "what {} computed is added to itself instead of the stream": 6.0,
    "what {} computed is taken away from the stream": 2.0,
    "the stream is counted twice where what {} computed is added": 13.0,
    "the stream is counted 4 times where what {} computed is added": 23.0,
    "the stream is counted 8 times where what {} computed is added": 43.0,
    "the stream is multiplied by what {} computed": 15.0,
}


def test_a_sum_is_what_its_words_say() -> None:
    made = {words: how(STREAM, MADE) for words, how in residual_stream.SUMS.items()}
    assert made == SUMS


def test_sums_and_norms_are_tried_where_a_model_has_them() -> None:
    """Each half by itself; a factor of sums, and a norm behind a sublayer, only where there is."""

    def said(placement: str, *, parallel: bool = False, scale: float = 1.0) -> list[str]:
        hyper = {"parallel_residual": parallel, "residual_scale": scale, "n_layers": 2}
        patched: Any = SimpleNamespace(
            spec=SimpleNamespace(block=SimpleNamespace(placement=placement)), hp=hyper, n_layers=2
        )
        return [one.change.says for one in usual_steps._sum_mistakes(patched)]

    twice = [f"what {name} computed is added twice" for name in ("attention", "the MLP")]
    plain = [words.format(name) for name in ("attention", "the MLP") for words in SUMS]
    for placement in ("pre", "post", "sandwich"):
        found = said(placement)
        assert found[: len(plain)] == plain
        behind = [text for text in found if text.startswith("the norm after")]
        assert len(behind) == (0 if placement == "pre" else 3)
        assert [text for text in found if text.endswith("added twice")] == twice
        halves = [text for text in found if "0.5" in text or "half" in text]
        assert len(halves) == len(twice)
        rest = len(plain) + len(twice) + len(halves)
        assert len(found) == rest + (1 if placement == "pre" else 3)
    assert len(said("pre", parallel=True)) == len(plain) + 2 * len(twice)
    factors = [text for text in said("pre", scale=0.5) if text.startswith("residual_scale mult")]
    assert factors == [
        "residual_scale multiplies the stream, not what a sublayer computed",
        "residual_scale multiplies the sum, not what a sublayer computed",
    ]


# --- shares of ranks ------------------------------------------------------------------------------


def test_blocks_of_columns_are_in_the_order_that_gives_each_exactly_one() -> None:
    mine = np.random.default_rng(1).normal(size=(6, 12))
    first, second, third, last = np.split(mine, 4, 1)
    for order in ([1, 0, 2, 3], [3, 2, 1, 0], [0, 0, 2, 3]):
        theirs = np.concatenate([np.split(mine, 4, 1)[at] for at in order], 1)
        assert rank_shares.block_order(mine, theirs, 4, 0.0) == order  # to the bit
        assert rank_shares.block_order(mine, theirs * 1.01, 4, 0.02) == order
        assert rank_shares.block_order(mine, theirs * 1.03, 4, 0.02) is None
    assert rank_shares.block_order(mine, mine, 4, 0.02) is None  # every block in its place
    assert rank_shares.block_order(mine, mine[:, ::-1], 5, 0.02) is None  # no five shares
    twins = np.concatenate([first, first, third, last], 1)
    assert rank_shares.block_order(twins, np.roll(twins, 3, 1), 4, 0.02) is None  # either's
    other = np.concatenate([second, first, third, 2 * last], 1)
    assert rank_shares.block_order(mine, other, 4, 0.02) is None


def test_an_order_of_shares_is_told_by_those_that_moved() -> None:
    text = rank_shares.order_text([0, 2, 1, 3])
    assert text == (
        "the shares of 4 ranks in another order (rank 1 has that of rank 2, rank 2 has that of "
        "rank 1)"
    )


# --- columns of scores ----------------------------------------------------------------------------


def test_a_column_of_scores_is_a_keys_within_twice_the_tolerance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its own within the tolerance, though another is as near; zeros are none's."""
    tokens = 4
    ours = np.random.default_rng(3).normal(size=(2, tokens, tokens))
    seen = np.broadcast_to(np.tril(np.ones((tokens, tokens), bool)), ours.shape)
    monkeypatch.setattr(kv_cache, "known_entries", lambda case: seen)

    def matched(order: Any, *, scale: float = 1.0, tolerance: float = 0.0) -> list[int] | None:
        theirs = np.where(np.asarray(order) >= 0, ours[:, :, order], 0.0) * scale
        case: Any = SimpleNamespace(
            recorded_result=lambda call: theirs,
            array=lambda result: ours,
            tokens=tokens,
            view=SimpleNamespace(tolerance=tolerance),
        )
        call: Any = SimpleNamespace(result=None)
        rows = kv_cache._match_score_columns(case, call)
        return None if rows is None else rows.tolist()

    assert matched([0, 1, 2, 3]) == [0, 1, 2, 3]
    assert matched([2, 0, 2, 3]) == [2, 0, 2, 3]  # exactly, where nothing may be off
    assert matched([1, -1, 2, 3]) == [1, -1, 2, 3]
    assert matched([2, 0, 2, 3], scale=1.01, tolerance=0.006) == [2, 0, 2, 3]
    assert matched([2, 0, 2, 3], scale=1.01, tolerance=0.004) is None
    none: Any = SimpleNamespace(recorded_result=lambda call: None)
    assert kv_cache._match_score_columns(none, none) is None
    cut: Any = SimpleNamespace(recorded_result=lambda call: ours[:, :, :3], tokens=tokens)
    assert kv_cache._match_score_columns(cut, cut) is None
    long: Any = SimpleNamespace(recorded_result=lambda call: np.zeros((1, 1, 513)), tokens=513)
    assert kv_cache._match_score_columns(long, long) is None


# --- a direction of the stream --------------------------------------------------------------------


def tensor(values: Any) -> Any:
    held = np.asarray(values, np.float32)
    return SimpleNamespace(shape=held.shape, encoding="F32", numpy=held.copy)


def test_a_direction_is_removed_of_what_writes_the_stream() -> None:
    """All of it or a part, of experts too; of what reads the stream there is none to remove."""
    rng = np.random.default_rng(6)
    unit = rng.normal(size=8)
    unit /= np.linalg.norm(unit)
    away = np.outer(unit, unit)

    def removed(role: str, x: Any, y: Any) -> Any:
        values, delta = (np.float32(each).reshape(-1, x.shape[-1]) for each in (x, y - x))
        pair: Any = SimpleNamespace(key=role, a=tensor(x))  # the other side has the same shape
        return derived_weights._removed_direction(pair, values, delta, 1e-6)

    x, table, stack = (rng.normal(size=shape) for shape in ((8, 12), (12, 8), (3, 8, 5)))
    for share in (1.0, 0.5):
        for role, before, after in (
            ("L0.attn_output.weight", x, x - share * away @ x),
            ("L0.ffn_down.weight", x, x - share * away @ x),
            ("token_embd.weight", table, table - share * table @ away),
            ("L0.ffn_down_exps.weight", stack, stack - share * away @ stack),
        ):
            found = removed(role, before, after)
            assert found is not None and found.share == pytest.approx(share, rel=1e-4), role
            assert abs(found.direction @ unit) == pytest.approx(1, abs=1e-5)
    assert removed("L0.attn_q.weight", x, x - away @ x) is None
    assert removed("L0.ffn_down.weight", x, x) is None
    assert removed("L0.ffn_down.weight", x, x + away @ x) is None  # more of it, not less
    assert removed("L0.ffn_down.weight", x, x - np.outer(unit, rng.normal(size=12))) is None
    other = rng.normal(size=(8, 8))
    assert removed("L0.ffn_down.weight", x, x - 0.1 * other @ x) is None  # of more than one rank


def test_the_difference_of_a_matrix_is_looked_at_up_to_a_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(7)
    x = rng.normal(size=(8, 12)).astype(np.float32)
    low = np.outer(rng.normal(size=8), rng.normal(size=12)).astype(np.float32)

    def changed(y: Any, a: Any = x) -> Any:
        pair: Any = SimpleNamespace(key="L0.attn_q.weight", a=tensor(a), b=tensor(y))
        return derived_weights._matrix_change(pair)

    monkeypatch.setattr(derived_weights, "SMALL", x.size)
    found = changed(x + low)
    assert found is not None and (found.rank, found.plain, found.experts) == (1, True, ())
    assert found.size == pytest.approx(np.linalg.norm(low) / np.linalg.norm(x), rel=1e-5)
    few = x.copy()
    few[2] += 1
    for odd in (few, np.full_like(x, 2.0), np.where(x > 2, np.nan, x + low)):
        assert changed(odd) is None
    assert changed(np.where(np.arange(12) == 3, np.nan, x + low)) is None
    stack = np.stack([x[:, :4], x[:, 4:8], x[:, 8:]])
    own = stack.copy()
    own[1] += low[:, :4]
    one = changed(own, stack)
    assert one is not None and one.experts == (1,) and one.rank == 1
    monkeypatch.setattr(derived_weights, "SMALL", x.size - 1)
    assert changed(x + low) is None


def test_the_difference_of_a_matrix_takes_the_place_of_one_side(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two matrices and a mask are in memory at most; three were, for matrices of 256 MB."""
    x, y = np.random.default_rng(8).normal(size=(2, 1024, 1024)).astype(np.float32)
    monkeypatch.setattr(derived_weights, "LOOKED_AT", 32)
    monkeypatch.setattr(derived_weights, "WINDOW", 1 << 12)
    pair: Any = SimpleNamespace(key="L0.attn_q.weight", a=tensor(x), b=tensor(y))
    tracemalloc.start()
    found = derived_weights._matrix_change(pair)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found is not None and found.rank == 0
    assert found.size == pytest.approx(np.linalg.norm(y - x) / np.linalg.norm(x), rel=1e-5)
    assert found.related == pytest.approx(norms.cosine(x, y), abs=1e-6)
    assert peak < 2.6 * x.nbytes


# --- parts of a tokenizer -------------------------------------------------------------------------


def test_merges_of_a_file_are_pairs_however_they_are_written() -> None:
    """Split at the first space: the second piece of a list's text may have more."""

    def parts(model: Any) -> Any:
        side: Any = SimpleNamespace(
            data={"model": model, "pre_tokenizer": {"type": "x"}},
            vocabulary=SimpleNamespace(tokens=["a", "b", "ab"], kind="bpe"),
            added_tokens=["<s>"],
        )
        return part_exchange._parts_from_json(side)

    for written in (["a b", "ab c d"], [["a", "b"], ["ab", "c d"]]):
        found = parts({"vocab": {"a": 5, "b": 7}, "merges": written, "dropout": 0.1})
        assert found["merges"] == [("a", "b"), ("ab", "c d")]
        assert found["pieces"] == {"a": 0, "b": 1, "ab": 2}
        assert found["options"] == {"dropout": 0.1, "type": "BPE"}
        assert found["pre_tokenizer"] == ({"type": "x"}, False) and found["added"] == ["<s>"]
    assert parts({"vocab": [["a", 0.0]]})["pieces"] == [["a", 0.0]]
    assert parts({"vocab": {}, "merges": None})["merges"] == []
    assert parts({"vocab": {}, "ignore_merges": True, "type": "WordPiece"})["pre_tokenizer"][1]
    pairs = part_exchange._merge_pairs(["a b", " a b", "a b c", "alone"])
    assert pairs == [("a", "b"), (" a", "b"), ("a", "b c"), ("alone", "")]
    assert part_exchange._merge_pairs(None) == []


def test_parts_are_exchanged_by_name_and_merges_only_of_pieces_that_are_there() -> None:
    mine: dict[str, Any] = {
        "pieces": {"a": 0, "b": 1, "c": 2, "ab": 3},
        "merges": [("a", "b"), ("b", "c")],
        "x": 1,
    }
    theirs = {"pieces": {"a": 0, "b": 1, "c": 2, "bc": 3}, "merges": [("b", "c")], "y": 2}
    exchange = part_exchange.exchange_parts
    assert exchange(mine, theirs, ["y", "z"]) == mine | {"y": 2}
    assert exchange(mine, theirs, ["pieces"])["merges"] == [("b", "c")]
    assert exchange(mine, theirs, ["merges"])["merges"] == []
    both = exchange(mine, theirs, ["pieces", "merges"])
    assert (both["pieces"], both["merges"]) == (theirs["pieces"], theirs["merges"])


# --- sums of which one summand is left out --------------------------------------------------------


def left_out(monkeypatch: pytest.MonkeyPatch, *adds: Any, layer: int = 2) -> Any:
    """Return [(words, what the change is of, (point, kept summand, number of the sum))]."""
    monkeypatch.setattr(residual_stream, "is_score_bias", lambda call: call.bias)
    monkeypatch.setattr(residual_stream, "keep_one_summand", lambda *given: given)
    monkeypatch.setattr(residual_stream, "_sublayer_of", lambda case, call: "")
    case: Any = SimpleNamespace(
        layer=layer,
        view=SimpleNamespace(point="out"),
        calls=lambda op: list(adds) if op == "add" else [],
        array=np.asarray,
        patched=SimpleNamespace(spec=SimpleNamespace(block=SimpleNamespace(placement="post"))),
    )
    return [
        (one.says, *one.where, one.make)
        for one in residual_stream.try_residual_sums(case)
        if isinstance(one.make, tuple)
    ]


def addition(point: str, *, axes: int = 2, bias: bool = False) -> Any:
    location = SimpleNamespace(point=point)
    shape = (3, 4, 5)[:axes]
    return SimpleNamespace(bias=bias, location=location, args=(np.zeros((3, 4)), np.zeros(shape)))


def test_each_summand_of_a_sum_is_left_out_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first summand is the stream, or the routed experts' sum; the second is added to it."""
    adds = (
        addition("attn_out"),
        addition("attn_norm", axes=1),  # a bias
        addition("experts"),
        addition("per_layer_gate"),
        addition("attn_out", bias=True),
        addition("attn_out"),
    )
    added = "what the sublayer computed replaces the stream instead of being added (before out)"
    stream = "what the sublayer computed is not added to the stream (before out)"
    assert left_out(monkeypatch, *adds) == [
        (added, "residual", ("attn_out", 1, 0)),
        ("the routed experts are left out", "moe_out", ("experts", 1, 0)),
        (added, "residual", ("attn_out", 1, 1)),
        (stream, "residual", ("attn_out", 0, 0)),
        ("the shared expert is left out", "moe_out", ("experts", 0, 0)),
        (stream, "residual", ("attn_out", 0, 1)),
    ]
    assert left_out(monkeypatch, *adds, layer=0) and not left_out(monkeypatch, *adds, layer=-1)


@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.parametrize("keep", [0, 1])
def test_one_sum_of_a_location_keeps_one_summand(keep: int, turn: int) -> None:
    made: list[Any] = []
    patched: Any = SimpleNamespace(with_op=lambda name, how, layers: made.append((name, how)))
    residual_stream.keep_one_summand("experts", keep, turn)(patched, frozenset({2}))
    ((name, how),) = made
    assert name == "add"
    stream, other = np.full((2, 2), 5.0), np.full((2, 2), 3.0)

    def added(point: str, layer: int, b: Any = other) -> float:
        at = SimpleNamespace(point=point, layer=layer)
        return float(np.asarray(how(lambda x, y: x + y, at, stream, b)).max())

    for layer in (2, 3):  # numbers of sums begin again in another layer
        sums = [added("experts", layer) for _ in range(2)]
        assert sums[turn] == (5.0, 3.0)[keep] and sums[1 - turn] == 8.0
        assert added("attn_out", layer) == 8.0 and added("experts", layer, np.ones(2)) == 6.0
