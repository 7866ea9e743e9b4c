"""What hypotheses find in a recorded pass: scales, masks, rows, dropout, each by itself."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.causes.forward import attention, kv_cache, residual_stream, rope
from aprfmt.inference.masks import chunk_mask
from aprfmt.inference.replay.patched_model import MOVES

RNG = np.random.default_rng(44)


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """Each test draws the same numbers, whichever ran before it."""
    RNG.bit_generator.state = np.random.default_rng(99).bit_generator.state


TOKENS = 6
CAUSAL = np.tril(np.ones((TOKENS, TOKENS), bool))

# --- the factor on scores -----------------------------------------------------------------------


def scaled(
    monkeypatch: pytest.MonkeyPatch,
    factor: Any,
    *,
    softcap: Any = None,
    layer: int = 0,
    by_layer: bool = False,
    helps: bool = False,
    scale: float = 0.25,
    noise: float = 0.0,
    cut: float = 1.0,
) -> tuple[list[Any], list[float]]:
    """What is found where the trace's scores are products times `factor`, and what is tried."""
    monkeypatch.setattr(attention, "score_scale_change", lambda patched, s: ("scale", round(s, 6)))
    monkeypatch.setattr(attention, "layer_scale_change", lambda patched, layer: ("by layer", layer))
    q, k = RNG.normal(size=(TOKENS, 4, 8)), RNG.normal(size=(TOKENS, 2, 8))
    products = np.stack([q[:, h] @ k[:, h // 2].T for h in range(4)]) * cut
    theirs = None
    if factor is not None:
        theirs = products * factor + noise * RNG.normal(size=products.shape)
        theirs = theirs if softcap is None else softcap * np.tanh(theirs / softcap)
    monkeypatch.setattr(
        attention, "known_entries", lambda case: np.broadcast_to(CAUSAL, products.shape)
    )
    tried: list[float] = []
    call = SimpleNamespace(args=(q * cut, k, SimpleNamespace(scale=scale, softcap=softcap)))
    case: Any = SimpleNamespace(
        call=lambda name: call,
        layer=layer,
        fitting=False,
        view=SimpleNamespace(tolerance=1e-4),
        patched=SimpleNamespace(
            hp={"head_dim": 8, "hidden_size": 64, "attn_scale_by_layer": by_layer}
        ),
        trial=lambda change: 0.0 if helps else 1.0,
        recorded_result=lambda call: theirs,
        array=np.asarray,
        best_number=lambda make, values: iter([tried.extend(values) or "best"]),  # type: ignore[func-returns-value]
        rounded_change=lambda make, value: iter([("rounded", *make(value))]),
    )
    return list(attention.find_score_scale(case)), sorted(round(one, 6) for one in tried)


def test_a_factor_on_scores_is_a_usual_one_or_what_the_scores_show(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usual = [1.0, 8**-0.5, 0.125, 0.25 * 8**0.5, 0.25 * 8**-0.5, 0.125, 0.5, 4.0]  # 64**-0.5 is 1/8
    assert scaled(monkeypatch, None) == (["best"], sorted({round(one, 6) for one in usual}))
    deep = sorted({round(one, 6) for one in (*usual, 0.25 * 3, 0.25 / 3)})
    assert scaled(monkeypatch, None, layer=2) == (["best"], deep)
    assert scaled(monkeypatch, None, layer=2, helps=True)[0] == [("by layer", 2), "best"]
    assert scaled(monkeypatch, None, by_layer=True, helps=True)[1] == sorted(
        {round(one, 6) for one in usual}
    )
    for factor in usual:
        assert scaled(monkeypatch, factor)[0] == [("scale", round(factor, 6))]
        assert scaled(monkeypatch, factor * (1 + 1e-4))[0] == [("scale", round(factor, 6))]
    assert scaled(monkeypatch, 0.3)[0] == [("rounded", "scale", 0.3)]
    assert scaled(monkeypatch, 0.75, layer=2)[0] == [("scale", 0.75)]
    assert scaled(monkeypatch, 0.75)[0] == [("rounded", "scale", 0.75)]
    assert scaled(monkeypatch, 0.3, softcap=5.0)[0] == [("rounded", "scale", 0.3)]
    assert scaled(monkeypatch, 0.3, softcap=5.0, cut=1e9)[0] == []
    assert scaled(monkeypatch, 0.3, noise=0.1)[0] == [] and scaled(monkeypatch, 0.0)[0] == []
    none: Any = SimpleNamespace(call=lambda name: None)
    assert list(attention.find_score_scale(none)) == []


# --- masks --------------------------------------------------------------------------------------


def masks(
    monkeypatch: pytest.MonkeyPatch,
    pattern: Any = None,
    *,
    first: int | None = None,
    attends: str = "causal",
    window: str = "sliding",
    rows: int = TOKENS,
    called: bool = True,
    in_window: bool = True,
) -> list[tuple[str, Any]]:
    monkeypatch.setattr(attention, "attend_with_mask", lambda mask: mask)
    monkeypatch.setattr(
        attention, "forgotten_starts_change", lambda starts: ("starts", starts.tolist())
    )
    monkeypatch.setattr(attention, "_layer_has_window", lambda case: in_window)
    theirs = None if pattern is None else np.stack([pattern * 0.5, pattern * 0.0])
    at = np.arange(TOKENS)
    late = at >= (TOKENS if first is None else first)
    case: Any = SimpleNamespace(
        call=lambda name: object() if called else None,
        tokens=TOKENS,
        rows=range(rows),
        view=SimpleNamespace(mine=np.zeros((2, TOKENS, TOKENS)), axis=1, tolerance=1.0),
        recorded_result=lambda call: theirs,
        distances_by_row=lambda view: np.where(late, 2.1, 2.0),
        patched=SimpleNamespace(
            spec=SimpleNamespace(block=SimpleNamespace(attends=attends, window=window)),
            hp={"sliding_window": 2},
        ),
    )
    return [
        one if isinstance(one, tuple) else (one.says, one.make) for one in attention.try_masks(case)
    ]


def test_a_recorded_mask_is_taken_where_no_window_explains_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at = np.arange(TOKENS)
    sliding = CAUSAL & (at > at[:, None] - 3)
    for known in (CAUSAL, sliding):
        assert masks(monkeypatch, known) == []
    hidden = CAUSAL.copy()
    hidden[4, 1] = False
    ((says, mask),) = masks(monkeypatch, hidden)
    assert says == "attention hides tokens that it should show" and np.array_equal(mask, hidden)
    later = CAUSAL.copy()
    later[1, 4] = True
    ((says, mask),) = masks(monkeypatch, later)
    assert says == "attention lets some queries see later tokens" and np.array_equal(mask, later)
    ((says, _),) = masks(monkeypatch, np.ones_like(CAUSAL))
    assert says == attention.NOT_CAUSAL
    # Later keys that are as many for each query, or those of its chunk, are said so.
    for ahead in (1, 2):
        shown = np.tril(np.ones_like(CAUSAL), ahead)
        first, second = masks(monkeypatch, shown, in_window=False)
        assert first[0].startswith("queries see the") and second[0].startswith("attention lets")
    (opened, _), _ = masks(monkeypatch, np.tril(np.ones_like(CAUSAL), 1))
    assert opened.startswith("the window of 2 tokens is open on both sides")
    chunks = CAUSAL | (at[:, None] // 2 == at // 2)
    assert masks(monkeypatch, chunks)[0][0].startswith("the chunks of 2 tokens are open")
    assert len(masks(monkeypatch, chunks, in_window=False)) == 1
    for size, found in ((2, 0), (3, 0), (4, 0)):
        chunks = chunk_mask(0, TOKENS, TOKENS, size)
        assert len(masks(monkeypatch, chunks, window="chunk")) == found
        for more in ({"window": "sliding"}, {"window": "chunk", "in_window": False}):
            assert len(masks(monkeypatch, chunks, **more)) == 1


def test_usual_masks_are_tried_where_none_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = [
        attention.NOT_CAUSAL,
        "queries do not see their own token",
        "queries see the token after their own",
    ]
    found = masks(monkeypatch)
    assert [says for says, _ in found] == usual
    own = np.tril(np.ones_like(CAUSAL), -1)
    own[0, 0] = True
    assert np.array_equal(found[1][1], own) and found[0][1].all()
    assert [one[0] for one in masks(monkeypatch, CAUSAL, rows=4)] == usual  # not of all rows
    assert [one[0] for one in masks(monkeypatch, first=0)] == usual
    assert masks(monkeypatch, first=3)[3] == ("starts", [0, 0, 0, 3, 3, 3])
    assert masks(monkeypatch, called=False) == []
    # Where all tokens are seen, only another mask is wrong.
    ((says, mask),) = masks(monkeypatch, attends="all")
    assert says == "attention is causal: queries do not see later tokens"
    assert np.array_equal(mask, CAUSAL)
    ((says, mask),) = masks(monkeypatch, CAUSAL[::-1], attends="all")
    assert says == "attention reaches other tokens than the model says"


# --- rows of a cache ----------------------------------------------------------------------------


def cached(
    monkeypatch: pytest.MonkeyPatch,
    *,
    point: str = "attn_mix",
    rows: Any = None,
    scores: bool = True,
    mix: bool = True,
    gives: str = "",
    first: int | None = None,
) -> list[Any]:
    """What is found where the rows that a cache, scores or values show are `rows`."""
    solved = None if rows is None else np.asarray(rows)
    for name in ("_match_cache_rows", "_match_score_columns", "_solve_value_rows"):
        monkeypatch.setattr(kv_cache, name, lambda *given: solved)
    if point not in ("k_cache", "v_cache"):
        monkeypatch.setattr(
            kv_cache,
            "cache_change",
            lambda keys, values: tuple(None if x is None else x.tolist() for x in (keys, values)),
        )
    monkeypatch.setattr(
        kv_cache, "later_pass_changes", lambda tokens, start: iter([("later", start)])
    )
    calls = {"scores": "scores" if scores else None, "mix": "mix" if mix else None}
    late = np.arange(4) >= (4 if first is None else first)
    case: Any = SimpleNamespace(
        view=SimpleNamespace(
            point=point, key=f"L0.{point}", mine=np.arange(8.0).reshape(4, 2), tolerance=1.0
        ),
        call=calls.__getitem__,
        gives_point_value=lambda call: call == gives,
        tokens=4,
        distances_by_row=lambda view: np.where(late, 2.1, 2.0),
    )
    return list(kv_cache.find_cached_rows(case))


def test_rows_that_attention_read_are_those_that_the_trace_shows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for point, what in (("k_cache", "keys"), ("v_cache", "values")):
        (change,) = cached(monkeypatch, point=point, rows=[0, 0, -1, 3])
        assert change.drop == {f"L0.{point}"} and change.where == (f"L0.{point}",)
        assert change.gives.tolist() == [[0, 1], [0, 1], [0, 0], [6, 7]]
        assert change.says.startswith("the cache's rows are not the tokens' own: attention reads")
        assert what not in change.says.partition(":")[0]
        assert cached(monkeypatch, point=point) == []
    moved, own = [0, 0, 1, 2], [0, 1, 2, 3]
    assert cached(monkeypatch, rows=moved, gives="scores") == [(moved, None), (moved, moved)]
    assert (
        cached(monkeypatch, rows=own, gives="scores") == cached(monkeypatch, gives="scores") == []
    )
    by_values = {"scores": False, "gives": "mix"}
    assert cached(monkeypatch, rows=moved, **by_values) == [(None, moved)]  # type: ignore[arg-type]
    assert cached(monkeypatch, rows=own, **by_values) == []  # type: ignore[arg-type]
    assert cached(monkeypatch, rows=moved, scores=False) == []
    assert cached(monkeypatch, rows=moved, mix=False) == []

    def ways(*rows: list[int]) -> list[Any]:
        return [way for row in rows for way in ((row, row), (row, None), (None, row))]

    before, after = [0, 0, 1, 2], [1, 2, 3, 3]
    assert cached(monkeypatch, first=2, gives="mix") == [
        *ways(before, after, [0, 1, 1, 3], [0, 1, 1, 1], [0, 1, -1, 3]),
        ("later", 2),
    ]
    assert cached(monkeypatch, first=1) == ways(
        before, after, [0, 0, 2, 3], [0, 0, 0, 0], [0, -1, 2, 3]
    )
    assert cached(monkeypatch) == ways(before, after, [0, 0, 0, 0], [-1, 1, 2, 3])


# --- rows of the embedding ----------------------------------------------------------------------


def test_rows_of_the_embedding_are_other_tokens_or_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    table = RNG.normal(size=(20, 6)).astype(np.float32)
    monkeypatch.setattr(residual_stream, "weight_values", lambda patched, key: held[0])
    monkeypatch.setattr(
        residual_stream,
        "token_ids_change",
        lambda ours, read: ("ids", ours.tolist(), read.tolist()),
    )
    held: list[Any] = [table]
    ids = [3, 9, 4, 7, 1, 12, 5, 6]

    def found(
        read: list[int],
        *,
        point: str = "embd",
        scale: float = 4.0,
        calls: int = 1,
        key: str = "token_embd.weight",
        called: bool = True,
        off: float = 0.0,
        rows: Any = range(8),
    ) -> list[Any]:
        times = scale if point == "embd_scaled" else 1.0
        call = SimpleNamespace(args=(SimpleNamespace(key=key),)) if called else None
        case: Any = SimpleNamespace(
            call=lambda name: call,
            rows=np.array(rows),
            view=SimpleNamespace(
                point=point,
                calls=[1] * calls,
                tolerance=1e-3,
                theirs=table[read] * times * (1 + off),
            ),
            patched=SimpleNamespace(hp={"embedding_scale": scale}, ids=tuple(ids)),
        )
        return list(residual_stream.find_embedding_rows(case))

    assert found(ids) == []
    one = [*ids[:2], 8, *ids[3:]]
    for point in ("embd", "embd_scaled"):
        assert found(one, point=point) == [("ids", ids, one)]
    assert found(one, calls=2) and not found(one, calls=3) and not found(one, called=False)
    assert not found(one, point="out") and not found(one, key="position_embd.weight")
    assert found(one, off=9e-3) and not found(one, off=1.2e-2)
    most = int(residual_stream.MOST_WRONG * len(ids))
    wrong = [0 if at < most else i for at, i in enumerate(ids)]
    assert found(wrong) == [("ids", ids, wrong)]
    assert found([0 if at <= most else i for at, i in enumerate(ids)]) == []
    part = found(one, rows=range(2, 8))
    assert part == [("ids", ids, one)]
    for move, says in (
        (1, "1 row further on"),
        (2, "2 rows further on"),
        (-1, "1 row too early"),
        (10, "10 rows further on"),
        (11, "9 rows too early"),
    ):
        (change,) = found([(i + move) % 20 for i in ids])
        assert change.says == f"token_embd.weight is read {says}"
        made: dict[str, Any] = {}
        change.make(SimpleNamespace(with_weights=made.update), None)
        assert np.array_equal(made["token_embd.weight"][3], table[(3 + move) % 20])
    held[0] = None
    assert found(one) == []


# --- dropout ------------------------------------------------------------------------------------


@pytest.mark.parametrize("added", [False, True])
def test_dropout_is_a_share_of_zeros_and_the_factor_that_goes_with_it(added: bool) -> None:
    """Of a residual sum it is on what was added; odd rows judge the factor."""
    ours, stream = RNG.normal(size=(2, 40, 50)) + 3
    dropped = RNG.random(ours.shape) < 0.2

    def found(
        zero: Any = dropped,
        factor: float = 1.25,
        odd: float = 1.0,
        gives: bool = True,
        moves: bool = False,
    ) -> list[Any]:
        made = np.where(zero, 0.0, ours * factor)
        made[1::2] *= odd
        op = "reshape" if moves else "add" if added else "mul"
        theirs, result = (made + stream, ours + stream) if added else (made, ours)
        call = SimpleNamespace(op=op, args=(stream, ours), result=result, location="here")
        last = SimpleNamespace(op=next(iter(MOVES)))
        case: Any = SimpleNamespace(
            view=SimpleNamespace(calls=[call, last], key="L0.out"),
            array=np.asarray,
            calls=lambda op: [call] if op == call.op else [],
            gives_point_value=lambda one: gives and one is call,
            recorded_result=lambda one: theirs,
        )
        changes = list(residual_stream.find_dropout(case))
        for change in changes:
            ops: dict[str, Any] = {}
            held: Any = SimpleNamespace(
                with_op=lambda name, override, layers, ops=ops: ops.update({name: override})
            )
            change.make(held, None)
            assert odd != 1.0 or np.allclose(ops[op](lambda: result, "here"), theirs)
            assert ops[op](lambda: result, "there") is result
        return changes

    (change,) = found()
    share = float(dropped.mean())
    assert change.cause == "dropout" and change.values == {"p": 0.2}
    assert f"{share:.3g} of the values are zero and all others are 1.25 times" in change.says
    for other in (
        {"gives": False},
        {"factor": 1.0},
        {"factor": 0.8},
        {"odd": 1.02},
        {"factor": 1.5},
        {"zero": dropped & False},
        {"zero": dropped | True},
    ):
        assert found(**other) == [], other
    assert len(found(odd=1.008)) == 1
    few = np.zeros_like(dropped)
    few.reshape(-1)[:8] = True  # 0.004 of them
    assert found(few, 1.004) == []
    few.reshape(-1)[:12] = True
    assert len(found(few, 1.006)) == 1


# --- positions of one side ----------------------------------------------------------------------


def test_queries_or_keys_alone_may_have_other_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rope, "token_positions", lambda patched: np.arange(TOKENS))
    monkeypatch.setattr(rope, "_rotate_at", lambda positions: positions.tolist())
    monkeypatch.setattr(rope, "_on_side", lambda side, patch: (side, patch))

    def tried(
        first: int | None, *, kind: bool = True, between: bool = True, base: Any = None
    ) -> list[Any]:
        monkeypatch.setattr(rope, "rope_kind_of_layer", lambda case: object() if kind else None)
        monkeypatch.setattr(rope, "has_rope_between_points", lambda case: between)
        late = np.arange(TOKENS) >= (TOKENS if first is None else first)
        case: Any = SimpleNamespace(
            view=SimpleNamespace(base=base, tolerance=1.0),
            patched=None,
            rows=np.arange(TOKENS),
            distances_by_row=lambda view: np.where(late, 2.1, 2.0),
        )
        return [(one.make, one.values) for one in rope.try_positions_of_a_side(case)]

    sides = list(rope.SIDES)
    further = [((side, [1, 2, 3, 4, 5, 6]), {"offset": 1, "of": side}) for side in sides]
    assert tried(None) == tried(0) == tried(1) == further
    pages = [((side, [0, 1, 2, 3, 0, 1]), {"page": 4, "of": side}) for side in sides]
    assert tried(4) == [one for both in zip(further, pages, strict=True) for one in both]
    assert tried(4, kind=False) == tried(4, between=False) == tried(4, base=object()) == []
