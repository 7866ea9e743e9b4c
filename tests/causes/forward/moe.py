"""Seeded faults of `aprfmt/causes/forward/moe.py`.

Seen red: experts weighed behind named nothing; weights that were not applied, or were another
token's, were left at "no cause of the table fits"; so were the experts of another token.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.diagnosis import wrong_modules as wrong
from tests.diagnosis.dumps import as_npz, everything, logits_only
from tests.diagnosis.engine_changes import LOGITS, V4, How, dumped, placed, traced
from tests.diagnosis.engines import broken, broken_here
from tests.diagnosis.making import engine


def no_gate(op: Any, x: Any) -> Any:
    """A gate that is always open."""
    return np.ones_like(op(x))


INSIDE = ("router", "experts", "expert_w", "router_margin")


def shared(change: Callable[[Any], Any]) -> How:
    """Add another thing than the shared expert's output."""

    def add(here: Any, op: Any, a: Any, b: Any) -> Any:
        return op(a, change(b) if here.point in INSIDE and b.ndim == 2 else b)

    return broken_here(add=add)


def shared_gate(change: Callable[[Any, Any], Any]) -> How:
    """Take another gate of the shared expert."""
    return broken_here(sigmoid=lambda here, op, x: change(op, x) if here.point in INSIDE else op(x))


def full(
    capacity: int, *, heaviest: bool = False, by_choice: bool = False, renormalised: bool = False
) -> How:
    """Let an expert take so many tokens only: the first ones, or the heaviest.

    `by_choice`: every token's first choice comes before any second one. `renormalised`: the
    weights that a token keeps sum to what all of its weights did.
    """

    def fresh() -> Callable[[str, int, Any], Any]:
        held: dict[str, Any] = {}

        def alter(point: str, layer: int, x: Any) -> Any:
            held[point] = np.array(x)
            if point != "expert_w":
                return x
            before = held[point].sum(-1, keepdims=True)
            for expert in range(held["experts"].max() + 1):
                at = np.argwhere(held["experts"] == expert)
                if heaviest:
                    at = at[np.argsort(-x[at[:, 0], at[:, 1]], kind="stable")]
                if by_choice:
                    at = at[np.argsort(at[:, 1], kind="stable")]
                held[point][at[capacity:, 0], at[capacity:, 1]] = 0
            if renormalised:
                held[point] *= before / np.maximum(held[point].sum(-1, keepdims=True), 1e-9)
            return held[point]

        return alter

    return {"alter": fresh}


def whole_bias() -> How:
    """Add the bias of an expert's output whole, not times the expert's weight."""
    held: dict[str, Any] = {}

    def add(here: Any, op: Any, a: Any, b: Any) -> Any:
        held["last"] = b
        return op(a, b)

    def add_weighted(here: Any, op: Any, total: Any, rows: Any, y: Any, weights: Any) -> Any:
        made = op(total, rows, y - held["last"], weights)
        made[rows] += held["last"]
        return made

    return broken_here(add=add, add_weighted=add_weighted)


TWICE = shared(lambda b: 2 * b)


def given(change: Callable[[Any, Any], Any]) -> How:
    """Give the experts other weights: change(weights, experts), [tokens, used], heaviest first."""

    def fresh() -> Callable[[str, int, Any], Any]:
        held: dict[str, Any] = {}

        def alter(point: str, layer: int, x: Any) -> Any:
            held[point] = x
            return np.array(change(x, held["experts"])) if point == "expert_w" else x

        return alter

    return {"alter": fresh}


def sorted_numbers(weights: Any, experts: Any) -> Any:
    """Return each expert's weight where the experts' numbers alone were sorted."""
    return np.take_along_axis(weights, experts.argsort(-1).argsort(-1), -1)


def replayed(rows: Callable[[int], Any], *, weights: bool = False) -> How:
    """Give each token the experts of token rows(tokens), weighted by its own scores.

    `weights`: weighted as that token weights them.
    """

    def fresh() -> Callable[[str, int, Any], Any]:
        held: dict[str, Any] = {}

        def alter(point: str, layer: int, x: Any) -> Any:
            held[point] = x
            if point not in ("experts", "expert_w"):
                return x
            at = rows(len(x))
            if point == "experts" or weights:
                return x[at]
            powers = np.exp(np.take_along_axis(held["router"], held["experts"][at], -1))
            return powers / powers.sum(-1, keepdims=True)

        return alter

    return {"alter": fresh}


def before(tokens: int) -> Any:
    """Return the number of the token before each, of the first its own."""
    return np.maximum(np.arange(tokens) - 1, 0)


def over_tokens(weights: Any, experts: Any) -> Any:
    """Return the chosen experts' weights, each choice's divided by its sum over the tokens."""
    return weights / weights.sum(0)


def softmax_of_tokens() -> How:
    """Choose and weight experts by a softmax over the tokens, not divided by a token's sum."""

    def fresh() -> Callable[[str, int, Any], Any]:
        held: dict[str, Any] = {}

        def alter(point: str, layer: int, x: Any) -> Any:
            held[point] = x
            if point not in ("experts", "expert_w"):
                return x
            powers = np.exp(held["router"] - held["router"].max(0))
            scores = powers / powers.sum(0)
            chosen = np.argsort(-scores, axis=-1, kind="stable")[:, : x.shape[-1]]
            return chosen if point == "experts" else np.take_along_axis(scores, chosen, -1)

        return alter

    return {"alter": fresh}


def own_expert(op: Any, table: Any, ids: Any, n_experts: int) -> Any:
    """List the experts of the token before in the vocabulary."""
    return op(table, (np.asarray(ids) - 1) % table.shape[0], n_experts)


ENGINE_FAULTS = (
    engine("norm-topk", "mixtral", "weights of the experts not renormalised", "moe_routing",
           "norm_topk", hp={"norm_topk": False}),
    engine("routed-scale", "deepseek_v3", "experts' factor left out", "moe_routing",
           "routed_scale", fine=True, hp={"routed_scale": 1.0}),
    engine("choice-unbiased", "ernie4_5_moe", "experts chosen without the bias", "moe_routing",
           "router", hp={"router": "softmax"}),
    engine("near-ties", "phimoe", "experts weighed by a softmax over all of them", "moe_routing",
           "router", hp={"router": "softmax"}),
    engine("groups", "deepseek_v3", "groups of experts ignored", "moe_routing",
           "n_expert_groups_used", hp={"n_expert_groups_used": 4}),
    traced("logits-gate", "qwen2_moe", "the shared expert's gate left out, from logits alone",
           ["moe_routing"], ["ffn_gate_inp_shexp"], LOGITS, {},
           backend=lambda: broken("sigmoid", no_gate)),
    engine("experts-behind", "llama4", "experts' weights multiply what comes out of them",
           "moe_routing", "expert_weights", fine=True, block={"expert_weights": "output"}),
    engine("experts-softmax", "llama4", "experts weighed by a softmax", "moe_routing", "router",
           hp={"router": "softmax"}),
    engine("solar-open-weights", "solar_open", "experts' weights not renormalised", "moe_routing",
           "norm_topk", hp={"norm_topk": False}),
    engine("exaone-moe-scale", "exaone_moe", "experts' factor left out", "moe_routing",
           "routed_scale", hp={"routed_scale": 1.0}),
    engine("hy-v3-scale", "hy_v3", "experts' factor left out", "moe_routing", "routed_scale",
           hp={"routed_scale": 1.0}),
    engine("olmoe-weights", "olmoe", "experts' weights renormalised", "moe_routing", "norm_topk",
           hp={"norm_topk": True}),
    engine("hunyuan-weights", "hunyuan_v1_moe", "experts' weights not renormalised", "moe_routing",
           "norm_topk", hp={"norm_topk": False}),
    engine("glm4-moe-scale", "glm4_moe", "experts' factor left out", "moe_routing",
           "routed_scale", fine=True, hp={"routed_scale": 1.0}),
    engine("minimax-softmax", "minimax_m2", "experts chosen by a softmax", "moe_routing", "router",
           hp={"router": "softmax"}),
    engine("dots1-groups", "dots1", "groups of experts ignored", "moe_routing",
           "n_expert_groups_used", hp={"n_expert_groups_used": 4}),
    engine("next-weights", "qwen3_next", "experts' weights not renormalised", "moe_routing",
           "norm_topk", hp={"norm_topk": False}),
    engine("qwen3-5-moe-one", "qwen3_5_moe", "one expert for two", "moe_routing",
           "n_experts_used", hp={"n_experts_used": 1}),
    engine("deepseek-v2-weights", "deepseek_v2", "experts' weights renormalised", "moe_routing",
           "norm_topk", hp={"norm_topk": True}),
    engine("qwen3-vl-moe-weights", "qwen3_vl_moe", "experts' weights not renormalised",
           "moe_routing", "norm_topk", hp={"norm_topk": False}),
    engine("nemotron-h-moe-weights", "nemotron_h_moe", "experts' weights not renormalised",
           "moe_routing", "norm_topk", hp={"norm_topk": False}),
    engine("lfm2-moe-weights", "lfm2_moe", "experts' weights not renormalised", "moe_routing",
           "norm_topk", hp={"norm_topk": False}),
    engine("lite-scale", "glm4_moe_lite", "experts' factor left out", "moe_routing",
           "routed_scale", hp={"routed_scale": 1.0}),
    dumped("hf-softmax-twice", "qwen3_moe", "a softmax of the chosen experts' scores",
           ["moe_routing"], ["router"], everything, as_npz, {},
           wrong=wrong.weighted(lambda logits, probs: probs.softmax(-1))),
    dumped("hf-logits-as-weights", "qwen2_moe", "logits weight the experts, logits alone",
           ["moe_routing"], ["router"], logits_only, as_npz, {},
           wrong=wrong.weighted(lambda logits, probs: logits)),
    dumped("hf-shared-lost", "qwen2_moe", "the shared expert is left out", ["moe_routing"],
           ["moe_out"], everything, as_npz, {}, wrong=wrong.nothing_from("shared_expert")),
    placed("shared-twice", "qwen2_moe", "the shared expert added twice", "moe_routing",
           "shared_expert", TWICE),
    placed("shared-twice-logits", "qwen2_moe", "the same, from logits alone", "moe_routing",
           "shared_expert", TWICE, LOGITS),
    placed("shared-twice-plain", "glm4_moe", "a shared expert without a gate added twice",
           "moe_routing", "shared_expert", TWICE),
    placed("shared-factor", "deepseek_v3", "the shared expert times the routed ones' factor",
           "moe_routing", "shared_expert", shared(lambda b: b * np.float32(1.7))),
    placed("routed-twice", "deepseek_v3", "the routed experts' factor twice", "moe_routing",
           "routed_scale", {"hp": {"routed_scale": 1.7**2}}),
    placed("routed-twice-logits", "deepseek_v3", "the same, from logits alone", "moe_routing",
           "routed_scale", {"hp": {"routed_scale": 1.7**2}}, LOGITS),
    placed("routed-third", "qwen2_moe", "the sum of the routed experts times 0.35", "moe_routing",
           "routed_scale", {"hp": {"routed_scale": 0.35}}),
    placed("shared-third", "glm4_moe", "the shared expert times 0.35", "moe_routing",
           "shared_expert", shared(lambda b: b * np.float32(0.35))),
    placed("routed-and-shared", "deepseek_v3", "other factors on both sums", "moe_routing",
           "routed_scale", {**shared(lambda b: b * np.float32(0.35)), "hp": {"routed_scale": 1.2}}),
    placed("shared-silu", "qwen2_moe", "silu for the sigmoid of the shared expert's gate",
           "moe_routing", "ffn_gate_inp_shexp", shared_gate(lambda op, x: x * op(x))),
    placed("shared-ungated", "qwen3_next", "no gate of the shared expert, beside gated attention",
           "moe_routing", "ffn_gate_inp_shexp", shared_gate(lambda op, x: 0 * x + 1), LOGITS),
    placed("capacity", "mixtral", "experts take 8 tokens", "moe_routing", "expert_capacity",
           full(8)),
    placed("capacity-logits", "qwen3_moe", "experts take 11 tokens, from logits alone",
           "moe_routing", "expert_capacity", full(11), LOGITS),
    placed("capacity-heaviest", "mixtral", "experts take their 8 heaviest tokens", "moe_routing",
           "expert_capacity", full(8, heaviest=True)),
    placed("capacity-choices", "olmoe", "experts take 8 tokens, first choices before second ones",
           "moe_routing", "expert_capacity", full(8, by_choice=True)),
    placed("capacity-sums", "deepseek_v3", "experts take 9 tokens, the others are weighed anew",
           "moe_routing", "expert_capacity", full(9, renormalised=True)),
    placed("capacity-sums-logits", "mixtral", "the same with 8 heaviest tokens, logits alone",
           "moe_routing", "expert_capacity", full(8, heaviest=True, renormalised=True), LOGITS),
    placed("weights-one", "mixtral", "every chosen expert's weight is 1", "moe_routing", "router",
           given(lambda w, _: np.ones_like(w))),
    placed("weights-one-logits", "qwen3_moe", "the same, from logits alone", "moe_routing",
           "router", given(lambda w, _: np.ones_like(w)), LOGITS),
    placed("weights-one-scaled", "deepseek_v3", "every chosen expert's weight is the factor",
           "moe_routing", "router", given(lambda w, _: np.full_like(w, 1.7))),
    placed("weights-even", "olmoe", "every chosen expert's weight is 1 / their number",
           "moe_routing", "router", given(lambda w, _: np.full_like(w, 1 / w.shape[-1]))),
    placed("weights-turned", "qwen2_moe", "the weights of two chosen experts exchanged",
           "moe_routing", "expert_w", given(lambda w, _: w[:, ::-1])),
    placed("weights-unsorted", "mixtral", "experts sorted by number, their weights not",
           "moe_routing", "router", given(sorted_numbers)),
    placed("experts-before", "mixtral", "the experts of the token before", "moe_routing",
           "router", replayed(before)),
    placed("experts-behind-ring", "qwen3_moe", "the experts of the token after, from logits alone",
           "moe_routing", "router", replayed(lambda n: np.roll(np.arange(n), -1)), LOGITS),
    placed("routing-before", "qwen3_moe", "experts and weights of the token before",
           "moe_routing", "router", replayed(before, weights=True)),
    placed("weights-before", "mixtral", "the weights of the token before", "moe_routing",
           "router", given(lambda w, _: np.roll(w, 1, 0))),
    placed("weights-of-last", "qwen3_moe", "the weights of the last token", "moe_routing",
           "router", given(lambda w, _: w[-1:].repeat(len(w), 0)), LOGITS),
    placed("weights-first", "mixtral", "experts' weights multiply inputs, from logits alone",
           "moe_routing", "expert_weights", {"block": {"expert_weights": "input"}}, LOGITS),
    placed("weights-by-tokens", "olmoe", "weights divided by their sums over the tokens",
           "moe_routing", "router", given(over_tokens)),
    placed("weights-by-tokens-logits", "qwen3_moe", "the same as well, from logits alone",
           "moe_routing", "router", given(over_tokens), LOGITS),
    placed("softmax-of-tokens", "olmoe", "the router's softmax over the tokens", "moe_routing",
           "router", softmax_of_tokens()),
    placed("bias-whole", "gpt_oss", "output biases of experts are not weighted", "moe_routing",
           "ffn_down_exps.bias", whole_bias()),
    placed("bias-whole-logits", "gpt_oss", "the same, from logits alone", "moe_routing",
           "ffn_down_exps.bias", whole_bias(), LOGITS),
    placed("two-of-experts", "qwen2_moe", "the shared expert twice, weights renormalised",
           "moe_routing", "", {**TWICE, "hp": {"norm_topk": True}}, None),
    engine(
        "v4-listed",
        V4,
        "experts of the token before",
        "moe_routing",
        "L0.ffn_gate_tid2eid.weight",
        fine=True,
        backend=lambda: broken("listed_experts", own_expert),
    ),
)  # fmt: skip
