"""What engines get wrong in attention's scores, sums, keys and results: each change by itself."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.causes.forward import (
    attention_operands,
    indexer,
    operation_patches,
    rounding,
    score_bias,
    softmax,
)
from aprfmt.causes.tensor import pruned_copies
from aprfmt.inference.score_bias import alibi_slopes


class Patched(SimpleNamespace):
    """Notes what is replaced: operations, hyperparameters, blocks and taps."""

    def __init__(self, *, block: dict[str, Any] | None = None, **more: Any) -> None:
        super().__init__(spec=SimpleNamespace(block=SimpleNamespace(**(block or {}))), **more)
        self.ops: dict[str, Any] = {}
        self.taps: dict[str, Any] = {}
        self.backend = SimpleNamespace(array=np.asarray, to_numpy=np.asarray)

    def with_op(
        self, op: str, override: Any, layers: Any, *, of_operands: bool = False
    ) -> "Patched":
        assert layers == "some"
        self.ops[op] = override
        return self

    def with_tap(self, point: str, tap: Any, layers: Any) -> "Patched":
        assert layers == "some"
        self.taps[point] = tap
        return self

    def with_block(self, layers: Any, **more: Any) -> "Patched":
        self.block = more
        return self

    def with_hyper(self, layers: Any, **more: Any) -> "Patched":
        self.hyper = more
        return self


def made(change: Any, patched: Any) -> Any:
    return change.make(patched, "some")


# --- the softmax ----------------------------------------------------------------------------------


def softened(scores: Any) -> Any:
    e = np.exp(scores)
    return e / e.sum(-1, keepdims=True)


def test_sums_over_tiles_are_those_that_their_words_say() -> None:
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(2, 5, 5))
    mask = np.tril(np.ones((5, 5), bool))
    e = np.where(mask, np.exp(scores), 0.0)
    heads = SimpleNamespace(mask=mask)

    def probs(name: str, tile: int) -> Any:
        patched = Patched()
        softmax.sum_over_keys(name, tile)(patched, "some")  # type: ignore[arg-type]
        return patched.ops["probs"](None, None, scores, heads)

    whole = e / e.sum(-1, keepdims=True)
    for name in softmax.SUMS:
        assert np.allclose(probs(name, 5), whole), name
    first, last, full, each = softmax.SUMS
    assert np.allclose(probs(first, 2), e / e[..., :2].sum(-1, keepdims=True))
    assert np.allclose(probs(full, 2), e / e[..., :4].sum(-1, keepdims=True))
    assert np.allclose(probs(full, 8), whole)  # there is no full one
    ends = e[..., 4:].sum(-1, keepdims=True)  # which the last row alone sees
    assert np.allclose(probs(last, 2)[:, 4], (e / np.maximum(ends, 1e-30))[:, 4])
    assert np.allclose(probs(last, 2)[:, :4], whole[:, :4])
    assert np.allclose(probs(last, 1), probs(last, 2))
    by_tile = probs(each, 2)
    assert np.allclose(by_tile[..., :2].sum(-1), 1)
    assert np.allclose(
        by_tile[:, 4], [[*softened(row[:2]), *softened(row[2:4]), 1.0] for row in scores[:, 4]]
    )
    assert not by_tile[:, 1, 2:].any()


def test_sinks_and_tiles_are_tried_where_a_model_has_them() -> None:
    def said(sinks: bool, tokens: int) -> list[str]:
        patched: Any = Patched(block={"sinks": sinks}, ids=range(tokens), hp={"n_heads": 2})
        return [one.says for one in softmax.usual_softmax_mistakes(patched)]

    (added,) = said(False, 8)
    assert added.startswith("1 is added to the softmax's sum")
    first, *tiles = said(False, 9)
    assert first == added
    assert len(tiles) == 4 and all("tile" in one and " 8 " in one for one in tiles)
    assert len(said(False, 129)) == 21
    sinks = said(True, 1)
    assert sinks[0] == "the softmax sums without the sinks" and len(sinks) == 8
    heads = SimpleNamespace(sinks=np.array([1.0, 2.0, 4.0]), scale=0.5)
    assert [how(heads).tolist() for how in softmax.SINKS.values()] == [
        [0.5, 1, 2],
        [2, 4, 8],
        [0, 0, 0],
        [4, 1, 2],
        [2, 4, 1],
        [4, 2, 1],
        [1, 1, 1],
    ]


# --- what attention gives -------------------------------------------------------------------------


def test_a_gate_is_left_out_of_attention_alone() -> None:
    def op(*given: Any) -> float:
        return float(np.prod(given))

    here, other = (SimpleNamespace(point=point) for point in ("attn_mixed", "mlp"))
    for name, plain, given in (("mul", 12.0, (3.0, 4.0)), ("sigmoid", 3.0, (3.0,))):
        call = SimpleNamespace(location=here)
        case: Any = SimpleNamespace(calls=lambda op, call=call: [call])
        (change,) = (
            one for one in attention_operands.try_gates(case) if name in made(one, Patched()).ops
        )
        override = made(change, Patched()).ops[name]
        marked = override(lambda *args: 100 + op(*args), here, *given)
        assert marked == 3.0  # attention's result, or its gate, as it is
        assert override(lambda *args: 100 + op(*args), other, *given) == 100 + plain
    nowhere: Any = SimpleNamespace(calls=lambda op: [SimpleNamespace(location=other)])
    assert not list(attention_operands.try_gates(nowhere))


def test_a_result_is_reshaped_in_another_order() -> None:
    mixed = np.arange(24.0).reshape(2, 3, 4)
    patched: Any = Patched(hp={"n_heads": 3})
    first, second = attention_operands.result_order_changes(patched)
    for change, axes in ((first, (1, 0, 2)), (second, (0, 2, 1))):
        given = made(change, Patched()).ops["mix"](lambda probs, v: mixed, None, None, None)
        assert np.array_equal(given.ravel(), mixed.transpose(axes).ravel())
        assert given.shape == mixed.shape and change.cause == "head_order"
    assert not list(attention_operands.result_order_changes(Patched(hp={"n_heads": 1})))  # type: ignore[arg-type]


def test_attention_takes_values_for_keys() -> None:
    """Values with their bias, of one shape with the keys, and only where the scores took them."""
    patched: Any = Patched()
    attention_operands.exchange_keys_and_values(patched, "some")  # type: ignore[arg-type]
    weight = SimpleNamespace(key="L0.attn_v.weight")
    k, v = np.ones((2, 1, 2)), np.full((2, 2), 3.0)
    y = patched.ops["linear"](lambda *given: v, None, None, weight, None)
    summed = patched.ops["add"](lambda a, b: a + b, None, y, 1.0)
    scores = patched.ops["scores"](lambda q, k, *rest: k, None, None, k)
    assert np.array_equal(scores, summed.reshape(k.shape))
    assert patched.ops["mix"](lambda probs, v: v, None, None, summed) is k
    assert patched.ops["mix"](lambda probs, v: v, None, None, summed) is summed
    assert patched.ops["scores"](lambda q, k, *rest: k, None, None, k) is k

    def tried(keys: Any, values: Any, held: Any) -> int:
        given = {"scores": keys, "mix": values}
        calls = {
            name: SimpleNamespace(args=(None, x)) for name, x in given.items() if x is not None
        }
        case: Any = SimpleNamespace(call=calls.get, layer=2, patched=SimpleNamespace(weights=held))
        return len(list(attention_operands.try_exchanged_keys_and_values(case)))

    both = ("L2.attn_k.weight", "L2.attn_v.weight")
    assert tried(k, k, both) == 1
    assert tried(k, v, both) == tried(k, None, both) == tried(None, k, both) == 0
    assert tried(k, k, both[:1]) == 0


# --- the choice of keys ---------------------------------------------------------------------------


def key_choices(kind: str = "half", attention: str = "gqa", **hp: int) -> list[Any]:
    given = {"index_topk": 8, "index_block": 4, "index_local_blocks": 2} | hp
    patched: Any = Patched(block={"indexer": kind, "attention": attention}, hp=given)
    return list(indexer.usual_key_choice_mistakes(patched))


def test_usual_mistakes_of_an_indexer_are_of_its_kind() -> None:
    assert key_choices("none") == []
    for kind, attention, rows in (
        ("half", "gqa", 12),
        ("interleaved", "gqa", 12),
        ("none", "compressed", 10),
        ("blocks", "gqa", 17),
    ):
        assert len(key_choices(kind, attention)) == rows, (kind, attention)
    counts = [one.values["index_topk"] for one in key_choices() if "index_topk" in one.values]
    assert counts == [7, 9, 4, 16]
    assert [
        one.values["index_topk"] for one in key_choices(index_topk=1) if "index_topk" in one.values
    ] == [2]
    blocks = key_choices("blocks", index_block=1, index_local_blocks=0)
    assert [one.values["index_block"] for one in blocks if "index_block" in one.values] == [2]
    local = [one.values for one in blocks if "index_local_blocks" in one.values]
    assert local == [{"index_local_blocks": 1}]
    assert "an indexer chooses 7 keys; the model says 8" in [one.says for one in key_choices()]
    assert "an indexer chooses 7 blocks; the model says 8" in [
        one.says for one in key_choices("blocks")
    ]
    (other,) = (one for one in key_choices() if "rotates pairs" in one.says)
    assert other.says == "an indexer rotates pairs as interleaved; the model's are half"
    patched = Patched()
    assert made(other, patched).block == {"indexer": "interleaved"}


def test_keys_are_chosen_by_the_rule_that_is_named() -> None:
    by_words = {
        one.says: made(one, Patched()).ops
        for one in key_choices()
        if one.cause == "key_choice" and one.values.keys() == {"key_choice"}
    }
    scores = np.array([[1.0, 5.0, 3.0, 2.0]])
    mask = np.array([[True, True, True, False]])

    def best(scores: Any, mask: Any, count: int) -> Any:
        left = np.where(mask, scores, -np.inf)
        return (left >= np.sort(left, axis=-1)[..., -count:][..., :1]) & mask

    def chosen(words: str, count: int = 1) -> list[bool]:
        (override,) = (ops["best_keys"] for says, ops in by_words.items() if words in says)
        found: list[bool] = override(best, None, scores, mask, count)[0].tolist()
        return found

    assert chosen("every key") == mask[0].tolist()
    assert chosen("after") == [False, False, True, False]
    assert chosen("before") == [True, False, False, False]
    assert chosen("score worst") == [True, False, False, False]
    late = np.array([[1.0, 2.0, 9.0, 2.0]])
    (shift,) = (ops["best_keys"] for says, ops in by_words.items() if "after each" in says)
    assert shift(best, None, late, mask, 1)[0].tolist() == mask[0].tolist()  # none is left

    def products(q: Any, k: Any, weights: Any, scale: float) -> Any:
        return (weights * np.maximum(q * k, 0)).sum() * scale

    q, k, weights = np.array([1.0, -2.0]), np.array([3.0, 1.0]), np.array([2.0, 5.0])
    (alike,) = (ops["index_scores"] for says, ops in by_words.items() if "weigh one" in says)
    (negative,) = (ops["index_scores"] for says, ops in by_words.items() if "negative" in says)
    assert alike(products, None, q, k, weights, 0.5) == 1.5
    assert negative(products, None, q, k, weights, 0.5) == (2 * 3 - 5 * 2) * 0.5
    (plain,) = (one for one in key_choices() if "not rotated" in one.says)
    taps = made(plain, Patched()).taps
    held = {"index_q": [[1.0, 2.0]], "index_k": [[3.0, 4.0]]}
    for part in "qk":
        tap = taps[f"index_{part}_rope"]
        assert tap(None, 0, np.zeros(2), held).tolist() == held[f"index_{part}"][0]
    (first,) = (one for one in key_choices("blocks") if "every group" in one.says)
    shared = made(first, Patched()).taps["index_blocks"](None, 0, np.array([[1], [2]]), None)
    assert shared.tolist() == [[1], [1]]


# --- what is added for the distance ---------------------------------------------------------------


def test_slopes_are_those_that_their_words_say() -> None:
    own = alibi_slopes(6, 8.0)
    found = {says: how(own, 8.0) for says, how in score_bias.TAKEN.items()}
    power = 2.0 ** -np.arange(1, 9)  # of eight heads
    four = 2.0 ** (-2.0 * np.arange(1, 7))
    for says, slopes in found.items():
        assert len(slopes) == 6, says
    expected: list[Any] = [
        2.0 ** (-8.0 * np.arange(1, 7) / 6),
        four,
        power[:6],
        sorted(own, reverse=True),
        own[::-1],
        -own,
        [1.0, *own[:5]],
        2 * own,
        own / 2,
        own,  # powers of two have few bits
    ]
    for slopes, right in zip(found.values(), expected, strict=True):
        assert np.allclose(slopes, right)
    short = score_bias.TAKEN["are rounded to bfloat16"](alibi_slopes(12, 8.0), 8.0)
    assert not np.array_equal(short, alibi_slopes(12, 8.0))
    assert np.allclose(short, alibi_slopes(12, 8.0), rtol=2**-8)


def test_ranks_that_do_not_know_their_heads_have_slopes_of_the_first_rank() -> None:
    """Or those of a model with as many heads as one rank has."""
    own = alibi_slopes(6, 8.0)
    told = dict(score_bias._slopes_by_rank(own, 8.0))
    assert len(told) == 6  # of two, three and six ranks
    first = told["of each of 2 ranks are those of the first one's heads"]
    assert np.array_equal(first, [*own[:3], *own[:3]])
    two = told["of each of 3 ranks are those of a model of 2 heads"]
    assert np.allclose(two, [2**-4, 2**-8] * 3)
    assert list(score_bias._slopes_by_rank(alibi_slopes(1, 8.0), 8.0)) == []


def bias_mistakes(**given: Any) -> list[Any]:
    block = {"score_bias": given.pop("score_bias", "alibi")}
    hp = {"alibi_max_bias": 8.0, "n_heads": 4, "attn_scale": 0.5} | given
    patched: Any = Patched(block=block, hp=hp)
    return list(score_bias.usual_score_bias_mistakes(patched))


def test_a_bias_on_scores_is_left_out_doubled_or_has_other_slopes() -> None:
    assert bias_mistakes(score_bias="none") == []
    assert len(bias_mistakes(score_bias="relative")) == 2
    assert len(bias_mistakes(alibi_max_bias=None)) == 2
    scores, own = np.zeros((4, 3, 3), np.float32), alibi_slopes(4, 8.0)
    bias = -(own[:, None, None] * np.arange(3)[:, None]).astype(np.float32) + np.zeros((4, 3, 3))
    bias = bias.astype(np.float32)
    factors = {}
    for change in bias_mistakes():
        override = made(change, Patched()).ops["add"]
        total = override(lambda a, b: a + b, None, scores, bias)
        assert total.dtype == np.float32
        with np.errstate(invalid="ignore"):
            factors[change.says] = np.nanmean((total - scores) / bias, axis=(1, 2))
        assert override(lambda a, b: a + b, None, 1.0, np.ones(2)).tolist() == [2, 2]  # no scores
    assert np.allclose(factors["nothing is added to the scores for the distance"], 0)
    twice = "what is added to the scores for the distance is added twice"
    assert np.allclose(factors[twice], 2, atol=1e-4)
    for most in (1, 2, 4, 16, 32):
        says = f"the slopes on distances end at 2^-{most}; the model says 2^-8"
        assert np.allclose(factors[says], alibi_slopes(4, most) / own, rtol=1e-3)
    scaled = "the slopes on distances are multiplied by the scale of the scores, too"
    assert np.allclose(factors[scaled], 0.5, atol=1e-3)
    assert len(factors) == 2 + 5 + 5 + 4 + 1  # four heads are a power of two
    assert len(bias_mistakes(n_heads=6)) == 2 + 5 + 9 + 6 + 1
    assert not any("end at 2^-8;" in says for says in factors)
    assert any("end at 2^-8;" in one.says for one in bias_mistakes(alibi_max_bias=4.0))
    assert len(bias_mistakes(attn_scale=1.0)) == len(factors) - 1
    keys = bias_mistakes(score_bias="alibi_keys")
    assert keys[-1].says.endswith("are not multiplied by the scale of the scores")


def test_slopes_are_solved_where_the_scores_of_all_rows_are_known() -> None:
    """On even rows, of what was added last; the model's own have the heads' usual rule."""
    tokens, own = 6, alibi_slopes(4, 8.0)
    away = np.arange(tokens)[:, None] - np.arange(tokens)
    bias = -own[:, None, None] * away
    scores = np.random.default_rng(3).normal(size=(4, tokens, tokens))
    right = np.array([0.5, 0.25, 0.1, 0.01])
    theirs = scores - right[:, None, None] * away
    block, hp = {"score_bias": "alibi"}, {"alibi_max_bias": 8.0, "n_heads": 4, "attn_scale": 1.0}
    stream = SimpleNamespace(op="add", args=(1.0, np.ones((2, 2))))
    added = SimpleNamespace(op="add", args=(scores, bias))

    def solved(calls: Any = (added,), rows: int = tokens, **more: Any) -> list[Any]:
        given = {"layer": 0, "point": "scores", "theirs": theirs} | more
        case: Any = SimpleNamespace(
            view=SimpleNamespace(calls=calls, point=given["point"]),
            layer=given["layer"],
            patched=Patched(block=block, hp=hp),
            recorded_result=lambda call: given["theirs"] if call is added else None,
            rows=range(rows),
            tokens=tokens,
            array=np.asarray,
        )
        return list(score_bias.find_score_bias(case))

    usual = len(bias_mistakes(attn_scale=1.0))
    found = solved((SimpleNamespace(op="add", args=(scores, 9 * bias)), stream, added, stream))
    assert len(found) == usual + 1 and found[-1].general
    assert np.allclose(found[-1].values["alibi_slopes"], right)
    assert found[-1].says == (
        "the slopes on distances are 0.5, 0.25, 0.1, 0.01; the model says 0.25, 0.0625, 0.01562, "
        "0.003906"
    )
    assert len(solved(theirs=None)) == len(solved(rows=tokens - 1)) == usual
    for more in ({"layer": -1}, {"point": "q"}, {"calls": (stream,)}, {"calls": ()}):
        assert solved(**more) == []


def test_what_is_tried_follows_from_the_operations_of_the_point() -> None:
    block = {"sinks": True, "indexer": "half", "attention": "gqa"}
    hp = {"n_heads": 2, "index_topk": 4}
    for find, op in (
        (softmax.try_softmax_sums, "probs"),
        (attention_operands.try_result_orders, "mix"),
    ):
        for there in (True, False):
            case: Any = SimpleNamespace(
                patched=Patched(block=block, hp=hp, ids=()),
                call=lambda name, op=op, there=there: object() if there and name == op else None,
            )
            assert bool(list(find(case))) is there
    for layer, there in ((-1, False), (0, True), (3, True)):
        case = SimpleNamespace(patched=Patched(block=block, hp=hp), layer=layer)
        assert bool(list(indexer.try_key_choices(case))) is there


def test_joined_rows_of_queries_and_gates_are_cut_in_halves() -> None:
    """Of all layers that have both, in one shape; not where the point itself was cut."""
    q, gate = (np.arange(24.0).reshape(6, 4) + more for more in (0, 100))
    heads = 2
    joined = np.concatenate([q[:3], gate[:3], q[3:], gate[3:]])  # head by head
    weights = {
        f"L1.{role}.weight": SimpleNamespace(numpy=lambda x=x: x)
        for role, x in (("attn_q", q), ("attn_q_gate", gate))
    }

    def tried(point: str = "attn_mixed", away: float = 0.1, **more: Any) -> list[Any]:
        given = {"layer": 1, "gate": "sigmoid", "weights": weights} | more
        patched: Any = Patched(
            block={"attention_gate": given["gate"]},
            hp={"n_heads": heads},
            n_layers=2,
            stored=given["weights"],
        )
        views = {
            f"L1.{name}": SimpleNamespace(point=name, recorded=name != "q_norm" or None)
            for name in ("q", "attn_gate", "q_norm", "out")
        }
        case: Any = SimpleNamespace(
            layer=given["layer"],
            patched=patched,
            found=SimpleNamespace(views=views),
            view=SimpleNamespace(key=f"L1.{point}", tolerance=0.2),
            trial=lambda change: away,
        )
        return list(attention_operands.try_split_gates(case))

    with pytest.MonkeyPatch.context() as patch:
        held: list[Any] = []
        patch.setattr(attention_operands, "replace_weights", held.append)
        (change,) = tried()
    assert change.drop == {"L1.q", "L1.attn_gate"} and change.where == tuple(weights)
    first, second = (held[0][key] for key in weights)
    assert np.array_equal(np.concatenate([first, second]), joined)
    assert tried(away=0.2) and not tried(away=0.21)
    other = weights | {"L1.attn_q.weight": SimpleNamespace(numpy=lambda: q[:2])}
    lacking = {"L1.attn_q.weight": weights["L1.attn_q.weight"]}
    for odd in (other, lacking, {}):
        assert tried(weights=odd) == []
    assert tried("q") == tried(layer=-1) == tried(gate="none") == []


# --- pruned, then quantized -----------------------------------------------------------------------


def test_a_pruned_copy_is_known_by_its_zeros_and_what_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(4)
    x = rng.normal(size=(16, 64)).astype(np.float32)

    def side(values: Any, encoding: str) -> Any:
        held = np.asarray(values, np.float32)
        return SimpleNamespace(shape=held.shape, encoding=encoding, held=held)

    def found(y: Any, *, a: Any = x, encoding: str = "Q8_0") -> Any:
        pair: Any = SimpleNamespace(key="t", a=side(a, "F32"), b=side(y, encoding))
        return pruned_copies._pruned_copy(pair)

    pruned = np.where(np.abs(x) < 0.5, 0, x)
    rounded = pruned * (1 + 0.002 * rng.choice([-1, 1], x.shape))
    monkeypatch.setattr(pruned_copies, "RowReader", lambda side: SimpleNamespace(whole=side.held))
    copy = found(rounded)
    assert copy is not None and copy.encoding == "Q8_0"
    assert copy.zeros == float((np.abs(x) < 0.5).mean()) and copy.after < copy.before / 2
    assert found(rounded, encoding="F16") is None  # no quantization
    assert found(rounded[:8]) is None and found(np.where(x > 2, np.nan, rounded)) is None
    assert found(np.where(np.abs(x) > 1.0, 0, x)) is None  # the large ones are gone
    few = np.where(np.abs(x) < 0.2, 0, x)
    assert (np.abs(x) < 0.2).mean() < pruned_copies.LEAST and found(few) is None
    assert found(1.2 * pruned) is None  # more than the encoding rounds off
    assert found(np.zeros_like(x)) is None


# --- the norm of latent keys and values -----------------------------------------------------------


def test_a_norm_over_the_whole_latent_row_divides_by_the_mean_square_of_both_parts() -> None:
    patched: Any = Patched(hp={"norm_eps": 0.5})
    operation_patches.norm_over_rotated_keys(patched, "some")  # type: ignore[arg-type]
    row = np.random.default_rng(3).standard_normal((4, 6)).astype(np.float32)
    latent, weight = row[:, :4], np.arange(1, 5, dtype=np.float32)
    own = latent / np.sqrt(np.square(latent).mean(-1, keepdims=True) + 0.5) * weight
    made = patched.taps["kv_a_norm"](patched, 0, own, {"kv_a": row})
    whole = latent / np.sqrt(np.square(row).mean(-1, keepdims=True) + 0.5) * weight
    np.testing.assert_allclose(made, whole, rtol=1e-5)
    assert made.dtype == np.float32


# --- keys and values in fewer bits ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("codes", "axes", "wanted"),
    [
        ("int8", (2,), [[[12.7, -6.4], [2.54, 0.64]], [[0.0, 0.0], [1.26, 0.01]]]),
        ("int8", (0, 2), [[[12.7, -6.4], [2.54, 0.64]], [[0.0, 0.0], [1.26, 0.0]]]),
        ("int8", None, [[[12.7, -6.4], [2.5, 0.6]], [[0.0, 0.0], [1.3, 0.0]]]),
        ("uint4", None, [[[12.74, -6.37], [2.548, 1.274]], [[0.0, 0.0], [1.274, 0.0]]]),
        ("int4", (1, 2), [[[12.7, -7.257], [1.814, 0.0]], [[0.0, 0.0], [1.26, 0.0]]]),
    ],
)
def test_values_that_share_a_scale_are_whole_steps_of_it(
    codes: str, axes: tuple[int, ...] | None, wanted: Any
) -> None:
    x = np.array([[[12.7, -6.41], [2.54, 0.64]], [[0.0, 0.0], [1.26, 0.01]]], np.float32)
    made = rounding.round_on_scales(x, codes, axes)
    np.testing.assert_allclose(made, np.array(wanted), atol=5e-4)


def test_rows_that_are_no_whole_blocks_stay_as_they_are() -> None:
    x = np.random.default_rng(2).standard_normal((3, 4, 8)).astype(np.float32)
    made = rounding.round_to_blocks(x, "Q8_0")
    assert made.shape == x.shape and 0 < np.abs(made - x).max() < np.abs(x).max() / 127
    np.testing.assert_array_equal(rounding.round_to_blocks(x[:, :3], "Q8_0"), x[:, :3])
