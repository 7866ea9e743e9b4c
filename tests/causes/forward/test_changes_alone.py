"""Changes that hypotheses make, by themselves: what they say is what they hold and do."""

from collections.abc import Iterable, Sequence
from itertools import product as product_of
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.causes.forward import (
    attention,
    experts,
    kv_cache,
    rank_shares,
    routing_rules,
    state_restarts,
    state_space,
)
from aprfmt.causes.forward.operation_patches import use_earlier_layer_cache
from aprfmt.causes.forward.residual_stream import parallel_change
from aprfmt.causes.forward.usual_mistakes import usual_mistakes
from aprfmt.inference.replay.patched_model import PatchedModel
from aprfmt.model import open_model
from tests.diagnosis.engines import tiny_folder
from tests.models import IDS

WIDTH, ROWS = 16, 12


def product(order: Sequence[int], wrong_rows: slice | None = None) -> tuple[Any, Any]:
    """Return (mismatch, product) of ranks that have the weight's columns in another order."""
    rng = np.random.default_rng(5)
    x, w = rng.normal(size=(ROWS, WIDTH)), rng.normal(size=(8, WIDTH))
    shares = np.split(w, len(order), 1)
    y = x @ np.concatenate([shares[one] for one in order], 1).T
    if wrong_rows is not None:
        y[wrong_rows] += 0.5
    case = SimpleNamespace(patched=w, view=SimpleNamespace(tolerance=1e-6))
    return case, SimpleNamespace(key="w", x=x, output_without_bias=y)


@pytest.mark.parametrize(
    ("order", "wrong", "found"),
    [
        ((1, 0), None, [1, 0]),
        ((0, 1, 3, 2), None, [0, 1, 3, 2]),  # by halves: the second is no half of another place
        ((3, 0, 1, 2), None, [3, 0, 1, 2]),
        ((2, 3, 0, 1), None, [1, 0]),
        ((0, 1), None, None),  # what every rank has is its own
        ((0, 0), None, [0, 0]),  # one of them twice
        ((1, 0), slice(1, None, 2), None),  # what the even rows show does not hold on the odd ones
    ],
)
def test_shares_of_columns_are_found_among_two_and_four_ranks(
    order: tuple[int, ...],
    wrong: slice | None,
    found: list[int] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_shares, "weight_values", lambda patched, key: patched)
    case, made = product(order, wrong)
    changes = list(rank_shares._find_column_share_order(case, made, "attn_output", permuted=True))
    assert [change.values["order"] for change in changes] == ([] if found is None else [found])
    # Heads in another order look the same, where no ranks are known; a share twice does not.
    alone = list(rank_shares._find_column_share_order(case, made, "attn_output", permuted=False))
    twice = found is not None and len(set(found)) < len(found)
    assert len(alone) == twice


@pytest.mark.parametrize("arch", ["llama", "gpt2", "phi2", "bloom"])
def test_what_is_said_of_norms_and_of_the_stream_is_what_changes(arch: str) -> None:
    """A layer norm that keeps the mean, an RMS norm that takes it away; parallel or in turn."""
    with open_model(tiny_folder(arch)) as model:
        patched = PatchedModel.unpatched(model, IDS, "float32", None)
        mistakes = [mistake.change for mistake in usual_mistakes(patched)]
        layer = patched.spec.block.norm == "layer"
        change = parallel_change(patched)
        changed = change.make(patched, None)
        patched.weights.close()
    kinds = [change for change in mistakes if change.cause == "norm_kind" and "mean" in change.says]
    of_mean = [change for change in kinds if change.values.keys() <= {"mean", "behind"}]
    places = [change for change in of_mean if "behind" in change.values]
    assert places and len(of_mean) > len(places)
    for kind in of_mean:
        assert ("take" in kind.says) == kind.values["mean"] == (not layer), kind
    one, more = (
        {len(c.values["behind"]) for c in places if word in c.says}
        for word in ("the norm ", "the norms ")
    )
    assert one <= {1} and 1 not in more
    parallel = changed.hp["parallel_residual"]
    assert parallel == change.values["parallel_residual"] != patched.hp["parallel_residual"]
    assert ("added together" in change.says) == parallel


@pytest.mark.parametrize(
    ("back", "layers", "reads"),
    [
        (1, None, [0, 0, 1, 2]),  # None: in all layers; nothing stands before the first
        (2, None, [0, 1, 0, 1]),
        (0, None, [0, 0, 0, 0]),  # the first layer's
        (1, {2}, [0, 1, 1, 3]),
        (1, {0, 3}, [0, 1, 2, 2]),
        (1, set(), [0, 1, 2, 3]),
    ],
)
def test_attention_reads_the_cache_of_the_layer_so_many_before(
    back: int, layers: Any, reads: list[int]
) -> None:
    """Keys and values apart, and a layer's own where the other's have another shape."""
    patched: Any = SimpleNamespace(with_keys_and_values=lambda read: read)
    read: Any = use_earlier_layer_cache(back)(patched, layers)
    for what, sign in (("k", 1), ("v", -1)):
        own = [np.full((2, 3), sign * layer) for layer in range(4)]
        found = [read(what, layer, own[layer]) for layer in range(4)]
        assert [int(x[0, 0]) for x in found] == [sign * layer for layer in reads]
    wider = np.zeros((2, 5))
    assert read("k", 4, wider) is wider


def test_a_factor_of_scores_is_said_beside_all_that_the_model_says() -> None:
    for by_layer, more in ((False, ""), (True, " divided by the layer's number from 1")):
        patched: Any = SimpleNamespace(hp={"attn_scale": 0.25, "attn_scale_by_layer": by_layer})
        change = attention.score_scale_change(patched, 0.5)
        assert change.says == f"scores are multiplied by 0.5; the model says 0.25{more}"
        for layer in (0, 3):
            own = 0.25 / (layer + 1) if by_layer else 0.25
            assert attention.layer_scale_change(patched, layer).says == (
                f"scores are {'not ' * by_layer}divided by a layer's number from 1; the model "
                f"multiplies them by {own:.9g} in layer {layer}"
            )


@pytest.mark.parametrize("fitting", [False, True])
@pytest.mark.parametrize("layer", [0, 2])
def test_the_usual_wrong_factors_of_scores_are_tried(layer: int, fitting: bool) -> None:
    """Without recorded scores: of the width with a root or none, twice, half, and by the layer.

    So is the inverse; and where numbers are fitted, powers of 4 to begin at.
    """
    tried: list[float] = []

    def keep(values: Iterable[float]) -> tuple[()]:
        tried.extend(values)
        return ()

    hp = {"head_dim": 16, "hidden_size": 64, "attn_scale": 0.75, "attn_scale_by_layer": False}
    case: Any = SimpleNamespace(
        patched=SimpleNamespace(hp=hp),
        layer=layer,
        fitting=fitting,
        view=SimpleNamespace(tolerance=1e-6),
        call=lambda name: SimpleNamespace(args=(0, 0, SimpleNamespace(scale=0.75))),
        recorded_result=lambda call: None,
        trial=lambda change: 1.0,
        best_number=lambda make, values: keep(values),
    )
    assert not list(attention.find_score_scale(case))
    usual = {1.0, 1 / 4, 1 / 16, 1 / 8, 0.75 * 4, 0.75 / 4, 0.75 * 2, 0.75 / 2, 1 / 0.75}
    starts = {0.75 * 4.0**power for power in (-4, -3, -2, -1, 1, 2, 3, 4)}
    usual |= starts if fitting else set()
    assert {*tried} == usual | ({0.75 * 3, 0.75 / 3} if layer else set())


@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_mistakes_of_a_shared_expert_are_those_of_a_model_with_one(scale: float) -> None:
    for kind, size in product_of(("none", "plain", "sigmoid"), (0, 32)):
        patched: Any = SimpleNamespace(
            spec=SimpleNamespace(block=SimpleNamespace(shared_expert=kind)),
            hp={"shared_ffn_size": size, "routed_scale": scale},
        )
        values = [change.values for change in experts.usual_shared_expert_mistakes(patched)]
        wanted = [{"shared_expert": each} for each in (2.0, 0.5, *[scale] * (scale != 1))]
        gates = [{"shared_gate": says} for says in experts.GATES] if kind == "sigmoid" else []
        assert values == ([*wanted, *gates] if kind != "none" and size else [])


@pytest.mark.parametrize("router", ["softmax", "sigmoid_bias", "group_limited_greedy"])
def test_a_wrong_rule_of_routing_says_where_it_is_another(router: str) -> None:
    """Its sentence names the sum only where that changes too, and rankings only with groups."""
    for groups, sums in product_of((1, 2, 4), (False, True)):
        hp = {"router": router, "n_expert_groups": groups, "norm_topk": sums, "routed_scale": 1.0,
              "n_experts_used": 2}  # fmt: skip
        patched: Any = SimpleNamespace(hp=hp, weights=())
        own = routing_rules.routing_rule_of(hp)
        rules = [*routing_rules.wrong_routing_rules(patched)]
        name = "softmax" if own.scores == "sigmoid" else "sigmoid"
        words = ("", ", not divided by their sum" if sums else ", divided by their sum")
        assert [says for says, rule in rules if rule.scores == name] == [
            f"the scores are a {name}{word}; the model says {own.scores}" for word in words
        ]
        assert [rule.sums for _, rule in rules if rule.scores == name] == [sums, not sums]
        ranked = {rule.groups for _, rule in rules} - {own.groups}
        assert ranked == ({*routing_rules.RANKED} - {own.groups} if groups > 1 else set())


def test_weights_that_an_engine_does_not_apply_are_tried_where_they_differ() -> None:
    """Of one expert there is no order, and a factor of 1 is no other one than none."""
    for used, factor in product_of((1, 2, 4), (1.0, 2.5)):
        hp = {"router": "softmax", "n_expert_groups": 1, "norm_topk": True,
              "routed_scale": factor, "n_experts_used": used}  # fmt: skip
        own = routing_rules.routing_rule_of(hp)
        rules = [rule for _, rule in routing_rules._unused_weights(hp, own)]
        orders = {"by number"} if used > 1 else set()
        tokens = {"token before", "token after", "first token", "last token"}
        tokens |= {"token before in a ring", "token after in a ring"}
        assert {rule.given for rule in rules} == {"own"} | tokens | orders
        fixed = [rule for rule in rules if rule.weights in ("one each", "equal shares")]
        assert len(fixed) == (1 + (used > 1)) * (1 + (factor != 1))
        logits = np.random.default_rng(used).normal(size=(5, 6))
        made = [routing_rules.route_by_rule(rule, logits, None, hp).weights for rule in fixed]
        assert all(np.ptp(weights) == 0 for weights in made)
        shares = (1, 1 / used) if used > 1 else (1,)
        expected = {share * each for share in shares for each in {1.0, factor}}
        assert {float(weights[0, 0]) for weights in made} == expected


@pytest.mark.parametrize("point", ["k_cache", "v_cache"])
def test_rows_of_a_recorded_cache_are_those_of_its_own_half(
    point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is tried in the reference reads other rows of keys or of values, as the point is."""
    mine = np.random.default_rng(4).normal(size=(5, 2, 4))
    rows = np.array([0, 1, 1, 3, -1])
    theirs = np.where((rows >= 0)[:, None, None], mine[rows], 0)
    made: list[tuple[Any, Any]] = []
    change = kv_cache.cache_change

    def noted(keys: Any, values: Any) -> Any:
        made.append((keys, values))
        return change(keys, values)

    monkeypatch.setattr(kv_cache, "cache_change", noted)
    view = SimpleNamespace(key=f"L0.{point}", point=point, mine=mine, theirs=theirs, tolerance=1e-6)
    case: Any = SimpleNamespace(view=view)
    (found,) = kv_cache.find_cached_rows(case)
    ((keys, values),) = made
    used, other = (keys, values) if point == "k_cache" else (values, keys)
    assert other is None and used.tolist() == rows.tolist()
    assert found.where == (view.key,) and found.drop == {view.key}
    np.testing.assert_array_equal(found.gives, theirs)


@pytest.mark.parametrize(
    ("patch", "starts"),
    [
        (state_restarts.restart_scan([0, 3]), [0, 3]),
        (state_space._restart_every_tokens(2), [0, 2, 4]),
        (state_space._restart_every_tokens(1), [0, 1, 2, 3, 4]),
    ],
)
def test_a_scan_is_restarted_where_the_change_says(patch: Any, starts: list[int]) -> None:
    """Each part is the scan of its tokens alone, from zeros; the last one's state is left."""

    def scan(x: Any, step: Any, rate: Any, b: Any, c: Any, skip: Any, state: Any) -> Any:
        total = np.cumsum(x, axis=0) + (0 if state is None else state)
        return total, total[-1]

    patched: Any = SimpleNamespace(with_op=lambda name, override, layers: (name, override, layers))
    name, override, layers = patch(patched, frozenset({1}))
    assert (name, layers) == ("scan", {1})
    x = np.arange(1.0, 11.0).reshape(5, 2)
    reads, state = override(scan, None, x, x, 0, x, x, 0, np.full(2, 100.0))
    parts = [x[start:stop] for start, stop in zip(starts, [*starts[1:], 5], strict=True)]
    wanted = np.concatenate([np.cumsum(part, axis=0) for part in parts])
    np.testing.assert_array_equal(reads, wanted)
    np.testing.assert_array_equal(state, wanted[-1])
