"""Rules of gated delta nets in the forms of their ports, and shards that stand twice: alone."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.causes.forward import delta_net, state_restarts
from aprfmt.causes.tensor import shard_copies
from aprfmt.errors import FormatError


class Patched(SimpleNamespace):
    """Notes which operation is replaced."""

    def with_op(self, op: str, override: Any, layers: Any) -> "Patched":
        assert layers == "some"
        self.op, self.override = op, override
        return self


def made(patch: Any) -> Any:
    return patch(Patched(), "some").override


# --- the delta rule -------------------------------------------------------------------------------


def test_the_decay_is_computed_as_its_words_say() -> None:
    a = np.array([[0.5, -30.0], [30.0, 1.0]])
    rate, shift = np.array([0.3, -0.4]), np.array([0.2, 0.7])

    def soft(x: Any) -> Any:
        return np.logaddexp(0, x)

    e = np.exp(rate)
    expected = {
        "dt_bias is subtracted": -e * soft(a - shift),
        "dt_bias is added after the softplus": -e * (soft(a) + shift),
        "A_log is taken as it is stored, without exp": rate * soft(a + shift),
        "minus A_log is taken, without exp": -rate * soft(a + shift),
        "exp is taken twice of A_log": -np.exp(e) * soft(a + shift),
        "exp is taken of minus exp(A_log)": -np.exp(-e) * soft(a + shift),
        "the softplus is left out": -e * (a + shift),
        "a sigmoid stands for the softplus": -e / (1 + np.exp(-a - shift)),
        "A_log is left out": -soft(a + shift),
        "nothing decays": 0 * a,
        "the heads of the decay's product are reversed": -e * soft(a[:, ::-1] + shift),
        "the heads of A_log and dt_bias are reversed": -e[::-1] * soft(a + shift[::-1]),
        "the decay is applied twice": -2 * e * soft(a + shift),
    }
    assert expected.keys() == delta_net.DECAYS.keys()
    for says, how in delta_net.DECAYS.items():
        found = made(delta_net._patch_decay(how))(None, None, a, rate, shift)
        assert np.allclose(found, expected[says]) and found.dtype == a.dtype, says


def rule(q: Any, k: Any, v: Any, g: Any, beta: Any, **how: bool) -> Any:
    """The rule, one head and one token after the other."""
    tokens, heads, width = v.shape
    key_heads = k.shape[1]
    result = np.zeros(v.shape)
    for h in range(heads):
        own = h % key_heads if how.get("in_turn") else h // (heads // key_heads)
        state = np.zeros((k.shape[2], width))
        for t in range(tokens):
            key, query = k[t, own], q[t, own]
            key = key / np.linalg.norm(key) if how.get("unit_k", True) else key
            query = query / np.linalg.norm(query) if how.get("unit_q", True) else query
            query = query / len(query) ** 0.5 if how.get("scaled", True) else query
            if how.get("forgets"):
                state = 0 * state
            elif not how.get("late_decay"):
                state = state * np.exp(g[t, h])
            before = state
            error = v[t, h] - key @ state if how.get("corrects", True) else v[t, h]
            state = state + np.outer(key, beta[t, h] * error)
            if how.get("late_decay"):
                state = state * np.exp(g[t, h])
            result[t, h] = query @ (before if how.get("early") else state)
    return result


def test_the_delta_rule_has_the_parts_that_its_words_exchange() -> None:
    rng = np.random.default_rng(4)
    q, k = rng.normal(size=(2, 5, 2, 3))
    v = rng.normal(size=(5, 4, 6))
    g, beta = -rng.random((5, 4)), rng.random((5, 4))
    plain = delta_net._delta_rule(q, k, v, g, beta)
    assert np.allclose(plain, rule(q, k, v, g, beta), atol=1e-5)
    for says, parts in delta_net.RULES.items():
        override = made(delta_net._patch_rule(parts))
        found, state = override(None, None, q, k, v, g, beta, None)
        assert state is None and np.allclose(found, rule(q, k, v, g, beta, **parts), atol=1e-5)
        assert not np.allclose(found, plain, atol=1e-3), says
        begun = override(lambda *given: given[-1], None, q, k, v, g, beta, "state")
        assert begun == "state"  # a later pass goes on with the rule itself
    exchanged = made(delta_net._exchange_queries_and_keys)
    assert exchanged(lambda *given: given, None, 1, 2, 3, 4) == (2, 1, 3, 4)
    restart = made(state_restarts.restart_rule([2]))

    def op(*given: Any) -> Any:
        return rule(*given[:5]), given[5]

    found, state = restart(op, None, q, k, v, g, beta, "old")
    apart = [rule(*(x[part] for x in (q, k, v, g, beta))) for part in (slice(2), slice(2, None))]
    assert np.allclose(found, np.concatenate(apart)) and state is None


def test_strengths_gates_and_channels_are_those_that_their_words_say() -> None:
    def sigmoid(x: Any) -> Any:
        return 1 / (1 + np.exp(-x))

    x = np.array([[0.4, -1.0]])
    there, other = (SimpleNamespace(point=name) for name in ("beta_mm", "x"))
    for how, right in zip(
        delta_net.STRENGTHS.values(),
        (x, 2 * sigmoid(x), np.ones((1, 2)), sigmoid(x)[:, ::-1]),
        strict=True,
    ):
        override = made(delta_net._patch_strength(how))
        assert np.allclose(override(sigmoid, there, x), right)
        assert np.allclose(override(sigmoid, other, x), sigmoid(x))
    g = np.array([[[-1.0, -2.0, -6.0]]])
    expected_channels = ([-1] * 3, [-3] * 3, [-6, -2, -1])
    for decayed, channels in zip(delta_net.CHANNELS.values(), expected_channels, strict=True):
        patch = made(delta_net._patch_channels(decayed))
        given = patch(lambda *rows: rows, None, 1, 2, 3, g, "beta")
        assert (*given[:3], given[4]) == (1, 2, 3, "beta")
        assert given[3].ravel().tolist() == channels
    values, w, gate, eps = np.array([3.0, 4.0]), np.array([2.0, 0.5]), np.array([0.7, -0.3]), 0.5

    def norm(x: Any, w: Any = w) -> Any:
        return x / np.sqrt((x * x).mean() + eps) * w

    silu, bent = gate * sigmoid(gate), sigmoid(gate)
    own = (
        norm(values),
        norm(values) * bent,
        norm(values) * gate,
        norm(values * silu),
        values * silu,
        norm(values, 1) * silu,
        norm(values, w + 1) * silu,
    )
    kimi = (
        norm(values),
        norm(values) * silu,
        norm(values) * gate,
        norm(values * bent),
        values * bent,
        norm(values, 1) * bent,
    )
    for table, expected in ((delta_net.GATES, own), (delta_net.SIGMOID_GATES, kimi)):
        for (says, gated), right in zip(table.items(), expected, strict=True):
            override = made(delta_net._patch_output_gate(gated))
            found = override(None, None, values, w, gate, "silu", eps=eps)
            assert np.allclose(found, right), says
    activation = made(delta_net._without_activation)
    for point, given in (("delta_qkv", 2.0), ("delta_v", 2.0), ("mlp", 5.0)):
        place = SimpleNamespace(point=point)
        assert activation(lambda x, kind: 5.0, place, 2.0, "silu") == given


def test_usual_mistakes_of_a_delta_net_are_of_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    def said(kind: str, *weights: str, **numbers: float) -> list[str]:
        monkeypatch.setattr(delta_net, "mixer_kinds", lambda patched: {kind, "short_conv"})
        for name in ("zero_weights_change", "scale_weights_change"):
            monkeypatch.setattr(
                delta_net, name, lambda cause, says, *given: SimpleNamespace(says=says)
            )
        hp = {"delta_strength": 1.0, "norm_eps": 1e-6, "delta_norm_eps": 1e-6} | numbers
        patched: Any = SimpleNamespace(hp=hp, weights=weights)
        return [one.says for one in delta_net.usual_delta_net_mistakes(patched)]

    assert said("mamba") == []
    rows = len(delta_net.DECAYS) + len(delta_net.RULES) + len(delta_net.STRENGTHS) + 2
    assert len(said("gated_delta")) == rows + len(delta_net.GATES)
    channels = len(delta_net.SIGMOID_GATES) + len(delta_net.CHANNELS)
    assert len(said("kimi_delta")) == rows + channels
    more = said("gated_delta", "L0.ssm_dt.bias", delta_strength=2.0, delta_norm_eps=1e-5)
    assert [text for text in more if text not in said("gated_delta")] == [
        "no dt_bias is added before the decay's softplus",
        "dt_bias is added twice before the decay's softplus",
        "in the delta net beta is its sigmoid, not 2 times that",
        "the norm after the state adds 1e-06, the model's epsilon; it has its own, 1e-05",
    ]
    assert len(said("gated_delta", "L0.ssm_dt.weight")) == rows + len(delta_net.GATES)


# --- shards ---------------------------------------------------------------------------------------


def pair(x: Any, y: Any, encodings: tuple[str, str] = ("F32", "F32")) -> Any:
    a, b = (
        SimpleNamespace(
            shape=np.shape(values),
            encoding=encoding,
            held=np.asarray(values),
            stored=[SimpleNamespace(info=SimpleNamespace(name="w"))],
        )
        for values, encoding in zip((x, y), encodings, strict=True)
    )
    return SimpleNamespace(a=a, b=b)


@pytest.fixture
def readers(monkeypatch: pytest.MonkeyPatch) -> None:
    def reader(side: Any) -> Any:
        held = side.held if side.held.ndim > 1 else side.held[:, None]
        rows = held.reshape(-1, held.shape[-1])
        return SimpleNamespace(
            whole=held,
            rows=len(rows),
            columns=rows.shape[1],
            take=lambda index: rows[index],
            side=SimpleNamespace(drop=lambda: None),
        )

    monkeypatch.setattr(shard_copies, "RowReader", reader)


@pytest.mark.usefixtures("readers")
@pytest.mark.parametrize("window", [1 << 20, 24, 1])  # values of a piece: all, a few rows, one
def test_parts_that_stand_twice_or_elsewhere_are_found_along_both_axes(
    window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_copies, "WINDOW", window)
    rng = np.random.default_rng(5)
    x = rng.normal(size=(16, 8)).astype(np.float32)

    def joined(values: Any, order: Any, axis: int) -> Any:
        return np.concatenate([np.split(values, len(order), axis)[at] for at in order], axis)

    def found(y: Any, a: Any = x, *, exchanged: bool = False, **more: Any) -> Any:
        return shard_copies._find_parts(pair(a, y, **more), exchanged=exchanged)

    for axis in (0, 1):
        for order in ((0, 0), (1, 1), (0, 1, 1, 3), (0, 1, 2, 3, 4, 5, 6, 6)):
            y = joined(x, order, axis)
            one = found(y)
            assert (one.order, one.axis, one.after) == (order, axis, 0.0)
            assert one.changed == int((x != y).sum()) and one.slack == 0.0
            away = np.linalg.norm(y - x) / np.linalg.norm(x)
            assert one.before == pytest.approx(away, rel=1e-6)
            assert found(y, exchanged=True) is None
        for order in ((1, 0), (0, 2, 1, 3)):
            y = joined(x, order, axis)
            assert found(y) is None and found(y, exchanged=True).order == order
    stack = rng.normal(size=(3, 4, 8)).astype(np.float32)
    assert found(joined(stack, (0, 0), 1), stack).axis == 0
    assert found(joined(stack, (1, 1), 2), stack).axis == 1
    vector = rng.normal(size=16).astype(np.float32)
    assert found(joined(vector, (0, 0, 2, 3), 0), vector).order == (0, 0, 2, 3)
    assert found(x) is None and found(x[:8]) is None
    wrong = joined(x, (0, 0), 0)
    wrong[3, 3] += 1
    assert found(wrong) is None
    near = joined(x, (0, 0), 0) * np.float32(1 + 1e-4)
    assert found(near) is None and found(near, encodings=("BF16", "F16")).order == (0, 0)
    twins = np.concatenate([x[:8], x[:8]])
    assert found(joined(twins, (1, 1), 0), twins) is None  # no part says whose it is


@pytest.mark.usefixtures("readers")
def test_shards_of_fused_matrices_hold_each_ranks_rows_together() -> None:
    rng = np.random.default_rng(6)
    whole = [rng.normal(size=(rows, 4)).astype(np.float32) for rows in (8, 4, 4)]

    def stored(order: Any, parts: Any = whole) -> list[Any]:
        ranks = [np.split(each, len(order)) for each in parts]
        fused = np.concatenate([one[at] for at in order for one in ranks])
        cuts = np.cumsum([len(each) for each in parts])[:-1]
        return [pair(a, b) for a, b in zip(parts, np.split(fused, cuts), strict=True)]

    for order in ((0, 0), (1, 0), (0, 1, 1, 3)):
        found = shard_copies._find_joined(stored(order))
        assert found is not None and (found.order, found.axis, found.after) == (order, 0, 0.0)
    assert shard_copies._find_joined(stored((0, 1))) is None  # another order of the rows alone
    assert shard_copies._find_joined([pair(a, a) for a in whole]) is None
    apart = stored((0, 0))
    apart[1].b.stored[0].info.name = "v"
    assert shard_copies._find_joined(apart) is None  # no fused matrix
    other = stored((0, 0))
    other[1].b.shape = (2, 4)
    assert shard_copies._find_joined(other) is None
    alone: list[Any] = [SimpleNamespace(a=None, b=None)]
    assert shard_copies._find_joined(alone) is None


def test_an_order_of_shards_is_told_by_what_moved_and_what_is_lost() -> None:
    told = shard_copies._order_sentence
    assert told((1, 0)) == (
        "the 2 shards were joined in another order: that of rank 1 where rank 0's belongs, that of "
        "rank 0 where rank 1's belongs"
    )
    assert told((0, 1, 1, 3)) == (
        "one shard of 4 was joined twice: that of rank 1 where rank 2's belongs; nothing of rank 2 "
        "is there"
    )
    many = told((1, 2, 3, 4, 5, 0, 6, 7))
    assert many.count("that of rank") == 4 and many.endswith(" and 2 more")
    assert " more" not in told((1, 2, 3, 0))
    assert shard_copies.matrix_of("L3.attn_q.weight") == "attn_q"


def test_rows_alone_are_shards_where_two_kinds_of_tensors_show_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Exchanged ones in attention and MLP; columns of one tensor show it by themselves."""

    def explained(explain: Any, *keys: str, axis: int = 0) -> set[str]:
        monkeypatch.setattr(
            shard_copies,
            "_parts_by_order",
            lambda *given, **more: {(0, 0): {key: SimpleNamespace(axis=axis) for key in keys}},
        )
        monkeypatch.setattr(shard_copies, "_shard_finding", lambda key, order, parts: key)
        context: Any = None
        return set(explain(context, {}, {}))

    twice, moved = shard_copies._explain_shards, shard_copies._explain_exchanged
    k, other = "L0.attn_k.weight", "L1.attn_k.weight"
    q, up = "L0.attn_q.weight", "L0.ffn_up.weight"
    assert explained(twice, k, other) == set() and explained(twice, k, q) == {k, q}
    assert explained(twice, k, axis=1) == {k}
    assert explained(moved, k, q) == set() and explained(moved, k, q, up) == {k, q, up}


@pytest.mark.usefixtures("readers")
def test_groups_of_shards_explain_what_nothing_else_does_and_let_go_of_it() -> None:
    """Each tensor has its finding, with the sentence of all."""
    rng = np.random.default_rng(7)
    dropped: list[str] = []
    told: list[Any] = []

    def held(key: str, order: tuple[int, ...], *, fused: bool = False) -> Any:
        x = rng.normal(size=(8, 4)).astype(np.float32)
        y = np.concatenate([np.split(x, len(order))[at] for at in order])
        one = pair(x, y)
        for side in (one.a, one.b):
            side.stored[0].info.name = "fused" if fused else key
        one.drop = lambda: dropped.append(key)
        return one

    def explained(group: Any, pairs: dict[str, Any], *known: str) -> dict[str, Any]:
        dropped.clear()
        told.clear()
        rows: Any = {
            key: SimpleNamespace(
                is_unexplained=lambda weak, key=key: key not in known,
                stats=SimpleNamespace(rel_l2=0.75),
            )
            for key in pairs
        }
        context: Any = SimpleNamespace(record_not_tried=lambda *given: told.append(given[:2]))
        (function,) = group(context, pairs, rows)
        found: dict[str, Any] = function()
        assert {key: one.where for key, one in found.items()} == {key: (key,) for key in found}
        assert {one.cause for one in found.values()} <= {"shard_order"}
        return found

    q, k, up = "L0.attn_q.weight", "L0.attn_k.weight", "L0.ffn_up.weight"
    pairs = {key: held(key, (0, 0)) for key in (q, k, up)}
    found = explained(shard_copies.shard_groups, pairs)
    assert set(found) == {q, k, up} == set(dropped) and not told
    one = found[q]
    assert one.evidence[0] == shard_copies._order_sentence((0, 0)) == one.says
    assert one.evidence[1] == "rows in 2 equal parts" and one.residual_after == 0
    assert one.residual_before > 0.5 and one.proof.count == 16 and one.proof.free == 2
    assert set(explained(shard_copies.shard_groups, pairs, k)) == {q, up}
    assert explained(shard_copies.shard_groups, pairs, k, up) == {}
    assert explained(shard_copies.exchanged_groups, pairs) == {}
    moved = {key: held(key, (1, 0)) for key in (q, k, up)}
    assert set(explained(shard_copies.exchanged_groups, moved)) == {q, k, up}
    assert explained(shard_copies.shard_groups, moved) == {}
    x = [rng.normal(size=(rows, 4)).astype(np.float32) for rows in (8, 8)]
    ranks = [np.split(each, 2) for each in x]
    gate = "L0.ffn_gate.weight"
    fused = np.split(np.concatenate([one[0] for _ in range(2) for one in ranks]), 2)
    joined = {key: held(key, (0, 1), fused=True) for key in (gate, up)}
    for key, a, b in zip(joined, x, fused, strict=True):
        joined[key].a.held, joined[key].b.held = a, b
    found = explained(shard_copies.joined_groups, joined)
    assert set(found) == {gate, up} == set(dropped)
    assert found[up].says.endswith("; of a fused matrix, each rank's rows together")
    assert found[up].evidence[1] == "the fused rows in 2 equal parts"
    assert (found[up].residual_before, found[up].residual_after) == (0.75, 0.0)
    assert explained(shard_copies.joined_groups, joined, gate) == {}
    assert explained(shard_copies.joined_groups, {up: joined[up]}) == {}


@pytest.mark.usefixtures("readers")
def test_tensors_that_cannot_be_read_are_told_and_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    def torn(*given: Any, **more: Any) -> Any:
        raise FormatError("is torn")

    monkeypatch.setattr(shard_copies, "_find_parts", torn)
    monkeypatch.setattr(shard_copies, "_find_joined", torn)
    told: list[Any] = []
    dropped: list[str] = []
    keys = ("L0.ffn_gate.weight", "L0.ffn_up.weight")
    rows: Any = {key: SimpleNamespace(is_unexplained=lambda weak: True) for key in keys}
    pairs: Any = {key: SimpleNamespace(drop=lambda key=key: dropped.append(key)) for key in keys}
    context: Any = SimpleNamespace(record_not_tried=lambda *given: told.append(given[:2]))
    for group, count in ((shard_copies.shard_groups, 2), (shard_copies.joined_groups, 1)):
        told.clear()
        dropped.clear()
        (function,) = group(context, pairs, rows)
        assert function() == {}
        assert told == [(("shard_order",), key) for key in keys[:count]]
        assert dropped == list(keys)


def test_a_delta_net_is_tried_in_its_own_layers_and_points(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = ("gated_delta", "none", "mamba", "kimi_delta")
    monkeypatch.setattr(delta_net, "mixer_of_layer", lambda block, hp, layer: kinds[layer])
    monkeypatch.setattr(delta_net, "usual_delta_net_mistakes", lambda patched: ["usual"])
    monkeypatch.setattr(delta_net, "starts_to_try", lambda case: [3, 5])
    for layer, point, tried in (
        (0, "delta", True),
        (3, "out", True),
        (1, "delta", False),
        (2, "delta", False),
        (-1, "delta", False),
        (0, "q", False),
    ):
        patched = SimpleNamespace(spec=SimpleNamespace(block=None), hp=None)
        case: Any = SimpleNamespace(layer=layer, view=SimpleNamespace(point=point), patched=patched)
        found: list[Any] = list(delta_net.try_delta_net_mistakes(case))
        assert found[:1] == ["usual"] * tried and len(found) == 3 * tried
        assert [one.cause for one in found[1:]] == ["ssm_state"] * 2 * tried
        assert [one.says for one in found[1:2]] == [
            "no state is carried to token 3: the delta rule begins anew there"
        ] * tried
    change = delta_net._recurrence_change("so", "beta", lambda patched, layers: patched)
    assert (change.cause, change.says) == ("recurrence", "in the delta net so")
    assert (change.where, change.values) == (("beta",), {"beta": "so"})
