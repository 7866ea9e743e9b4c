"""Each kind of router against transformers' own router module, on the same logits.

So is the rule of a model that diagnose exchanges parts of.

Seen red: v3's bias in the weights too, its groups ranked by their best one, weights not
renormalised, the routed scale dropped, softmax over all where only the chosen count.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from aprfmt.causes.forward.routing_rules import (
    MixedBy,
    Ranking,
    RoutingRule,
    Scores,
    route_by_rule,
    routing_rule_of,
)
from aprfmt.errors import ArchError
from aprfmt.inference.routing import ROUTERS, choose_experts
from tests.models import tiny

# id -> (tiny model, config values of ours, hyperparameters)
CASES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {"router": "softmax", "norm_topk": True}),
    "qwen2_moe": ("qwen2_moe", {"router": "softmax", "norm_topk": False}),
    "qwen3_moe": ("qwen3_moe", {"router": "softmax", "norm_topk": True}),
    "gpt_oss": ("gpt_oss", {"router": "softmax_topk", "norm_topk": False}),
    "deepseek_v2": (
        "deepseek_v2",
        {"router": "group_limited_greedy", "norm_topk": False, "routed_scale": 1.7,
         "n_experts_used": 3},
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {"router": "sigmoid_bias", "norm_topk": True, "routed_scale": 1.7, "n_experts_used": 3},
    ),
}  # fmt: skip


def router_of(model: Any) -> Any:
    mlp = model.model.layers[-1].mlp
    return getattr(mlp, "gate", None) or mlp.router


@pytest.mark.parametrize("case", CASES)
def test_choice_and_weights_are_those_of_transformers(case: str) -> None:
    arch, changed = CASES[case]
    router = router_of(tiny(arch))
    x = torch.randn(200, router.weight.shape[1], generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        logits, weights, experts = router(x)
    bias = getattr(router, "e_score_correction_bias", None)
    hp = {
        "n_experts_used": 2,
        "routed_scale": 1.0,
        "n_expert_groups": 4,
        "n_expert_groups_used": 2,
    } | changed
    inputs = logits.numpy(), None if bias is None else bias.numpy(), hp
    order = np.argsort(-weights.numpy(), axis=-1, kind="stable")
    for routing in (choose_experts(*inputs), route_by_rule(routing_rule_of(hp), *inputs)):
        chosen = np.take_along_axis(experts.numpy(), order, -1)
        np.testing.assert_array_equal(routing.experts, chosen)
        np.testing.assert_allclose(
            routing.weights, np.take_along_axis(weights.numpy(), order, -1), rtol=2e-6
        )
        assert (routing.margin > 0).all()


# What the chosen experts are weighted by: (logits, scores, correction, experts) -> weights.
WEIGHED: Mapping[MixedBy, Any] = {
    "scores": lambda x, s, b, at: s.gather(1, at),
    "biased": lambda x, s, b, at: (s + b).gather(1, at),
    "logits": lambda x, s, b, at: x.gather(1, at),
    "softmax of the chosen": lambda x, s, b, at: torch.softmax(x.gather(1, at), 1),
    "softmax of the scores": lambda x, s, b, at: torch.softmax(s.gather(1, at), 1),
    "shares": lambda x, s, b, at: s.gather(1, at) / s.sum(1, keepdim=True),
    "biased shares": lambda x, s, b, at: (
        (s + b).gather(1, at) / s.gather(1, at).sum(1, keepdim=True)
    ),
}
SCORES: Mapping[Scores, Any] = {
    "sigmoid": torch.sigmoid,
    "softmax": lambda x: torch.softmax(x, 1),
    "root of softplus": lambda x: torch.nn.functional.softplus(x).sqrt(),
}


@pytest.mark.parametrize("weights", WEIGHED)
@pytest.mark.parametrize("scored", SCORES)
@pytest.mark.parametrize("corrected", [True, False])
def test_the_rule_of_an_engine_is_the_mistake_it_says(
    weights: MixedBy, scored: Scores, corrected: bool
) -> None:
    """Every source of the weights, divided and scaled or not, written in torch."""
    made = torch.Generator().manual_seed(5)
    logits = torch.randn(64, 8, generator=made, dtype=torch.float64)
    bias = 0.3 * torch.randn(8, generator=made, dtype=torch.float64)
    scores = SCORES[scored](logits)
    hp = {"n_experts_used": 3, "routed_scale": 1.7, "n_expert_groups": 1}
    given = bias if corrected else torch.zeros(8, dtype=torch.float64)
    for added in (True, False):
        for sums in (True, False):
            for scaled in (True, False):
                at = torch.topk(scores + given if added else scores, 3, dim=1).indices
                wanted = WEIGHED[weights](logits, scores, given, at)
                wanted = wanted / (wanted.sum(1, keepdim=True) + 1e-20) if sums else wanted
                wanted = wanted * 1.7 if scaled else wanted
                order = torch.sort(wanted, dim=1, descending=True, stable=True).indices
                rule = RoutingRule(scored, added, "none", weights, sums, scaled)
                correction = bias.numpy() if corrected else None
                found = route_by_rule(rule, logits.numpy(), correction, hp)
                np.testing.assert_array_equal(found.experts, at.gather(1, order).numpy())
                np.testing.assert_allclose(
                    found.weights, wanted.gather(1, order).numpy(), rtol=1e-12
                )


@pytest.mark.parametrize("sums", [True, False])
def test_a_rule_that_normalises_over_the_tokens_is_what_torch_makes_of_that_axis(
    sums: bool,
) -> None:
    """A softmax or a sum over dimension 0, of scores, and of the chosen experts' logits."""
    logits = torch.randn(32, 8, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    hp = {"n_experts_used": 3, "routed_scale": 1.0, "n_expert_groups": 1}
    rows: list[tuple[Scores, MixedBy, bool]] = [
        ("softmax over tokens", "scores", False),
        ("softmax", "softmax of the chosen over tokens", False),
        ("softmax", "scores", True),
    ]
    for scored, weights, by_tokens in rows:
        scores = logits.softmax(0 if scored == "softmax over tokens" else 1)
        at = torch.topk(scores, 3, dim=1).indices
        wanted = scores.gather(1, at)
        if weights != "scores":
            wanted = logits.gather(1, at).softmax(0)
        wanted = wanted / wanted.sum(1, keepdim=True) if sums else wanted
        wanted = wanted / wanted.sum(0) if by_tokens else wanted
        rule = RoutingRule(scored, False, "none", weights, sums, True, by_tokens=by_tokens)
        found = route_by_rule(rule, logits.numpy(), None, hp)
        order = torch.sort(wanted, dim=1, descending=True, stable=True).indices
        np.testing.assert_array_equal(found.experts, at.gather(1, order).numpy())
        np.testing.assert_allclose(found.weights, wanted.gather(1, order).numpy(), rtol=1e-12)


@pytest.mark.parametrize("router", [name for name in ROUTERS if name != "sparsemixer"])
@pytest.mark.parametrize("groups", [1, 4])
def test_the_rule_of_every_router_is_what_a_pass_does(router: str, groups: int) -> None:
    """Seen red: two routers with a correction were described as softmax routers without one."""
    rng = np.random.default_rng(6)
    logits, bias = rng.normal(size=(64, 8)), 0.3 * rng.normal(size=8)
    grouped = groups if router.startswith(("group", "sigmoid_bias")) else 1
    for sums in (False, True):
        hp = {"router": router, "n_experts_used": 3, "routed_scale": 1.7, "norm_topk": sums,
              "n_expert_groups": grouped, "n_expert_groups_used": min(2, grouped)}  # fmt: skip
        ours, rule = choose_experts(logits, bias, hp), routing_rule_of(hp)
        found = route_by_rule(rule, logits, bias, hp)
        np.testing.assert_array_equal(found.experts, ours.experts)
        np.testing.assert_allclose(found.weights, ours.weights, rtol=1e-5)
        assert rule.biased == ("_bias" in router)


def test_a_correction_in_the_logits_is_in_choice_and_weights() -> None:
    rng = np.random.default_rng(7)
    logits, bias = rng.normal(size=(64, 8)), rng.normal(size=8)
    hp = {"router": "sigmoid_bias", "n_experts_used": 3, "routed_scale": 1.0, "norm_topk": True,
          "n_expert_groups": 1, "n_expert_groups_used": 1}  # fmt: skip
    early = replace(routing_rule_of(hp), biased=False, early=True)
    found = route_by_rule(early, logits, bias, hp)
    wanted = choose_experts(logits + bias, None, hp)
    np.testing.assert_array_equal(found.experts, wanted.experts)
    np.testing.assert_allclose(found.weights, wanted.weights, rtol=1e-12)


RANKS: Mapping[Ranking, Any] = {
    "best": lambda x: x.amax(2),
    "two": lambda x: x.topk(2, dim=2).values.sum(2),
    "mean": lambda x: x.mean(2),
}


@pytest.mark.parametrize("groups", RANKS)
@pytest.mark.parametrize(("experts", "count", "used"), [(12, 4, 2), (12, 3, 1), (8, 2, 2)])
def test_groups_of_experts_are_ranked_as_the_rule_says(
    groups: Ranking, experts: int, count: int, used: int
) -> None:
    """By the best, the two best or all: no expert of another group is chosen, by torch."""
    logits = torch.randn(200, experts, generator=torch.Generator().manual_seed(8)).double()
    hp = {"n_experts_used": 2, "routed_scale": 1.0, "n_expert_groups": count,
          "n_expert_groups_used": used}  # fmt: skip
    scores = torch.softmax(logits, 1)
    inside = RANKS[groups](scores.reshape(200, count, -1)).topk(used, dim=1).indices
    mask = torch.zeros(200, count).scatter(1, inside, 1.0).bool()
    open_ = mask.repeat_interleave(experts // count, 1)
    at = scores.masked_fill(~open_, -torch.inf).topk(2, dim=1).indices
    rule = RoutingRule("softmax", False, groups, "scores", False, False)
    found = route_by_rule(rule, logits.numpy(), None, hp)
    np.testing.assert_array_equal(np.sort(found.experts, 1), np.sort(at.numpy(), 1))


def test_the_margin_is_what_separates_the_last_chosen_from_the_next() -> None:
    hp = {"router": "softmax_topk", "n_experts_used": 2, "routed_scale": 1.0, "norm_topk": False}
    routing = choose_experts(np.array([[3.0, 1.0, 2.5, 0.0]]), None, hp)
    assert routing.experts.tolist() == [[0, 2]]
    assert routing.margin == pytest.approx([1.5])
    everyone = choose_experts(np.array([[3.0, 1.0]]), None, hp)
    assert np.isinf(everyone.margin).all()


def test_a_close_group_counts_as_a_margin() -> None:
    hp = {
        "router": "group_limited_greedy",
        "n_experts_used": 1,
        "routed_scale": 1.0,
        "norm_topk": False,
        "n_expert_groups": 2,
        "n_expert_groups_used": 1,
    }
    routing = choose_experts(np.array([[5.0, 0.0, 4.999, 0.0]]), None, hp)
    assert routing.experts.tolist() == [[0]]
    assert 0 < routing.margin[0] < 1e-3


def test_an_unknown_router_is_refused() -> None:
    with pytest.raises(ArchError, match="router 'dice' is not known"):
        choose_experts(np.zeros((1, 2)), None, {"router": "dice"})


@pytest.mark.parametrize(
    ("router", "score", "tiny_sum"),
    [
        ("sigmoid_bias", "sigmoid", 1e-20),
        ("sigmoid_bias_eps", "sigmoid", 1e-6),
        ("sqrtsoftplus_bias", "sqrtsoftplus", 1e-20),
        ("sigmoid", "sigmoid", 0.0),
        ("fixed", "sqrtsoftplus", 1e-20),
    ],
)
@pytest.mark.parametrize("level", [-3.0, -40.0, -95.0])
def test_scores_that_are_nearly_zero_have_a_finite_sum(
    router: str, score: str, tiny_sum: float, level: float
) -> None:
    """What is added to the sum is transformers' own of each model: it shows at small scores."""
    logits = torch.tensor([[level, level - 1, level + 0.5, level - 2]], dtype=torch.float64)
    scores = {
        "sigmoid": torch.sigmoid(logits),
        "sqrtsoftplus": torch.nn.functional.softplus(logits, threshold=1000.0).sqrt(),
    }[score]
    hp = {
        "router": "sqrtsoftplus_bias" if router == "fixed" else router, "n_experts_used": 2,
        "routed_scale": 1.5, "norm_topk": True, "n_expert_groups": 1, "n_expert_groups_used": 1,
    }  # fmt: skip
    fixed = np.array([[2, 0]]) if router == "fixed" else None
    found = choose_experts(logits.numpy(), None, hp, fixed=fixed)
    assert found.experts.tolist() == [[2, 0]]
    best = scores[0, [2, 0]]
    wanted = best / (best.sum() + tiny_sum) * 1.5
    np.testing.assert_allclose(found.weights[0], wanted.numpy(), rtol=1e-12)
