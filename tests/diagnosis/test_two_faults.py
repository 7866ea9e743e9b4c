"""Two faults of one engine: both are named, in one product or in different operations.

Seen red: the products, where only single changes were solved and a joined change that broke an
earlier point ended the search; the bases, of which none below the model's own was tried.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from aprfmt.diagnosis import diagnose
from tests.diagnosis.engines import LONG, tiny_folder, trace
from tests.diagnosis.test_hypotheses import MODULES, at_norm

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
            "missing_bias": "L0.ffn_down.bias is added 4 times",
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
