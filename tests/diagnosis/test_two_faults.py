"""Two faults of one engine: both are named, in one product or in different operations.

Seen red: the products, where only single changes were solved and a joined change that broke an
earlier point ended the search; the bases, of which none below the model's own was tried.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from aprfmt.causes.forward.mismatch import Mismatch
from aprfmt.causes.forward.norm import eps_change
from aprfmt.causes.forward.rope import theta_change
from aprfmt.causes.forward.usual_mistakes import layers_of_rope_kinds
from aprfmt.diagnosis import diagnose
from aprfmt.diagnosis.search import Search
from tests.diagnosis.engines import LONG, tiny_folder, trace
from tests.diagnosis.test_hypotheses import MODULES, at_norm

LAYERS = frozenset({"out", "logits"})
LOGITS = frozenset({"logits"})
How = Mapping[str, Any]


def product(role: str, shards: tuple[float, ...], bias: float = 1, layer: str = "") -> How:
    """Count a product's blocks of columns and its bias so often, in one layer or in all."""

    def weights(held: Any) -> Mapping[str, Any]:
        found = {}
        for key in held:
            if not key.startswith(layer) or f".{role}." not in key:
                continue
            x = np.array(held[key].numpy(), np.float32)
            whole = key.endswith(".weight")
            found[key] = x * (np.repeat(shards, x.shape[1] // len(shards)) if whole else bias)
        return found

    return {"weights": weights}


def coarse_eps(op: Any, x: Any, *rest: Any, eps: float, **how: Any) -> Any:
    return op(x, *rest, eps=1e-2, **how)


# What ran -> (model, how, {cause: a part of its sentence}); the last two have one fault only.
PAIRS: Mapping[str, tuple[str, How, Mapping[str, str]]] = {
    "shard twice, no bias": (
        "starcoder2",
        product("ffn_down", (2, 1), 0, "L1."),
        {
            "tensor_parallel": "shard 0 of 2 counts twice",
            "missing_bias": "L1.ffn_down.bias is not added",
        },
    ),
    "shard lost, no bias": (
        "starcoder2",
        product("attn_output", (1, 1, 0, 1), 0),
        {
            "tensor_parallel": "shard 2 of 4 is left out",
            "missing_bias": "no bias of attention's output",
        },
    ),
    "shard twice, bias by device": (
        "gpt2",
        product("ffn_down", (1, 1, 1, 2), 4, "L0."),
        {
            "tensor_parallel": "shard 3 of 4 counts twice",
            "repeated_bias": "L0.ffn_down.bias is added 4 times",
        },
    ),
    "base and one epsilon": (
        "llama",
        {"hp": {"rope_theta": 777.0}, **at_norm("out", coarse_eps)},
        {"rope_theta": "base is 777;", "norm_eps": "the norm at attn_norm alone adds eps 0.01"},
    ),
    "base and routing": (
        "mixtral",
        {"hp": {"norm_topk": False, "rope_theta": 300.0}},
        {"rope_theta": "base is 300;", "moe_routing": "not renormalised"},
    ),
    "factors of scores and stream": (
        "granite",
        {"hp": {"residual_scale": 1.0, "attn_scale": 0.31}},
        {"multiplier": "residual_scale is 1;", "attention_scale": "multiplied by 0.31;"},
    ),
    "cap and window": (
        "gemma2",
        {
            "ids": LONG[:24],
            "hp": lambda hp: {
                "window_layers": tuple(not own for own in hp["window_layers"]),
                "attn_softcap": 0.0,
            },
        },
        {"softcap": "scores are not capped", "sliding_window": "layers that have none"},
    ),
    "shard lost": (
        "starcoder2",
        product("ffn_down", (1, 0), 1, "L1."),
        {"tensor_parallel": "shard 1 of 2 is left out"},
    ),
    "no bias": (
        "starcoder2",
        product("ffn_down", (1, 1), 0, "L1."),
        {"missing_bias": "L1.ffn_down.bias is not added"},
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_each_fault_is_named_and_nothing_else(name: str) -> None:
    base, how, causes = PAIRS[name]
    run = trace(tiny_folder(base), f"pair {name}", points=MODULES, **how)
    found = diagnose(str(tiny_folder(base)), str(run))
    assert found.complete and found.confidence == "confirmed", found.sentence
    assert {one.cause for one in found.findings} == {*causes}
    for one in found.findings:
        assert causes[one.cause] in one.says


# Two numbers of the configuration, of which one or both are no usual ones, and where they are seen.
NUMBERS: Mapping[str, tuple[str, frozenset[str], Mapping[str, float]]] = {
    "a usual epsilon, outputs of layers": ("qwen2", LAYERS, {"rope_theta": 7345, "norm_eps": 1e-5}),
    "a usual epsilon, logits": ("qwen3", LOGITS, {"rope_theta": 777, "norm_eps": 1e-5}),
    "two numbers, outputs of layers": ("llama", LAYERS, {"rope_theta": 7345, "norm_eps": 0.0023}),
    "two numbers, logits": ("llama", LOGITS, {"rope_theta": 777, "norm_eps": 0.002}),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_two_numbers_are_fitted_together(name: str) -> None:
    """Seen red: only the interval was said; neither number alone brings the points near."""
    base, points, values = NUMBERS[name]
    run = trace(tiny_folder(base), f"numbers {name}", points=points, hp=values)
    found = diagnose(str(tiny_folder(base)), str(run))
    assert found.complete and found.confidence == "confirmed", found.sentence
    says = {one.cause: one.says for one in found.findings}
    assert {*says} == {*values}
    assert f"base is {values['rope_theta']:g};" in says["rope_theta"]
    assert f"add eps {values['norm_eps']:g} where" in says["norm_eps"]


@pytest.mark.parametrize(
    "how",
    [
        {"hp": {"rope_theta": 7345}},
        {"hp": {"norm_eps": 0.0023}},
        product("ffn_down", (1.3, 1.1), 1),
    ],
)
def test_a_second_number_is_not_fitted_where_none_is_wrong(how: How) -> None:
    run = trace(tiny_folder("llama"), "one number", points=LAYERS, **how)
    found = diagnose(str(tiny_folder("llama")), str(run))
    wrong = {*how.get("hp", {"": 0})}
    assert {one.cause for one in found.findings} == wrong, found.sentence
    assert found.confidence == ("unconfirmed" if "" in wrong else "confirmed")


def test_changes_are_judged_by_the_first_row_where_it_differs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Epsilon changes the first token's row, the base of rope does not."""
    cases: list[Mismatch] = []
    seen = Search.run

    def keep(self: Search, joined: bool = True) -> Any:
        cases.append(self.case)
        return seen(self, joined)

    monkeypatch.setattr(Search, "run", keep)
    values = {"rope_theta": 777.0, "norm_eps": 0.002}
    run = trace(tiny_folder("llama"), "first row", points=LAYERS, hp=values)
    diagnose(str(tiny_folder("llama")), str(run))
    case = cases[0]
    (kind,) = layers_of_rope_kinds(case.patched)
    eps, base = eps_change(case.patched, 0.002), theta_change(case.patched, kind, 777.0)
    first = case.judged_by_first_row()
    assert first is not None and first.trial(base) == pytest.approx(first.view.residual)
    assert case.trial(eps) > 0.1 > case.view.tolerance > first.trial(eps)
    held = eps.make(case.patched, None)
    view = case.attempt(eps)
    assert view is not None
    assert replace(case, patched=held, view=view).judged_by_first_row() is None
