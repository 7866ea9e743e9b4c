"""What no published model has together is refused by name, and what they have is not.

Seen red: a list of layers of one kind, and a first layer without an indexer, that were run.
"""

from collections.abc import Mapping
from typing import Any

import pytest

from aprfmt.arch import ARCHS
from aprfmt.arch.hyperparameters import read_hyper
from aprfmt.arch.spec import Facts
from aprfmt.errors import ArchError
from tests.arch.tiny import TINY, make

_FULL, _LINEAR = "full_attention", "linear_attention"
# Model, keys of config.json, words of the refusal.
REFUSED: tuple[tuple[str, Mapping[str, Any], str], ...] = (
    (
        "glm4_moe_lite",
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        "partial_rotary_factor is 0.5",
    ),
    ("glm4_moe_lite", {"mlp_layer_types": ["dense"] * 4}, "no experts"),
    ("glm4_moe_lite", {"mlp_layer_types": ["sparse"] * 3 + ["moe"]}, "layer 3 is 'moe'"),
    ("deepseek_v32", {"q_lora_rank": None}, "an indexer and queries that are not compressed"),
    ("deepseek_v32", {"layer_types": [_FULL] * 4}, "layer 0 is 'full_attention'"),
    ("glm_moe_dsa", {"indexer_types": ["shared"] + ["full"] * 3}, "a first layer that has none"),
    ("glm_moe_dsa", {"indexer_types": ["full"] * 3 + ["half"]}, "layer 3 is 'half'"),
    ("deepseek_v4", {"q_lora_rank": None}, "an indexer and queries that are not compressed"),
    ("deepseek_v4", {"layer_types": ["sliding_attention"] * 4}, "no layer that has it"),
    ("deepseek_v4", {"layer_types": [_FULL] * 4}, "layer 0 is 'full_attention'"),
    ("deepseek_v4", {"layer_types": None, "compress_ratios": [0, 4, 128, 8]}, "layer 3 is 8"),
    ("deepseek_v4", {"mlp_layer_types": ["hash_moe"] * 4}, "no layer whose router chooses"),
    ("deepseek_v4", {"mlp_layer_types": ["moe"] * 3 + ["dense"]}, "layer 3 is 'dense'"),
    ("deepseek_v4", {"o_groups": 4}, "6 heads and 4 groups of unequal size"),
    ("deepseek_v4", {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'"),
    ("deepseek_v4", {"num_key_value_heads": 2}, "num_key_value_heads is 2; expected 1"),
    ("deepseek_v4", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; expected 'silu'"),
    ("olmo_hybrid", {"layer_types": [_LINEAR] * 4}, "all are linear_attention"),
    ("olmo_hybrid", {"layer_types": [_FULL] * 4}, "all are full_attention"),
    (
        "olmo_hybrid",
        {"layer_types": [_FULL, _LINEAR, _FULL, "conv"]},
        "layer 3 is 'conv'; the layers of this architecture are one of: linear_attention",
    ),
    ("minimax", {"layer_types": [_FULL] * 4}, "no layer with lightning attention"),
    ("minimax", {"layer_types": [_LINEAR] * 4}, "no layer with attention"),
    (
        "minimax",
        {"layer_types": [_FULL, _LINEAR, _FULL, "sliding_attention"]},
        "layer 3 is 'sliding_attention'",
    ),
    ("minimax_m3_vl", {"index_n_heads": 3}, "3 heads of an indexer and 2 key heads"),
    ("minimax_m3_vl", {"index_head_dim": 6}, "6 elements of an indexer's head, 10 that rotate"),
    ("minimax_m3_vl", {"index_local_blocks": 4}, "3 blocks of keys that are read and 4 of them"),
    ("minimax_m3_vl", {"layer_types": [_FULL] * 3 + [_LINEAR]}, "layer 3 is 'linear_attention'"),
    ("kimi_linear", {"layer_types": [_FULL] * 4}, "no layer that has it"),
    ("kimi_linear", {"hidden_act": "gelu"}, "convolutions and gelu after them"),
    ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope is False"),
    ("kimi_linear", {"moe_router_activation_func": "softmax"}, "is 'softmax'; expected 'sigmoid'"),
    ("kimi_linear", {"moe_layer_freq": 2}, "moe_layer_freq is 2"),
    (
        "kimi_linear",
        {
            "layer_types": None,
            "linear_attn_config": {"kda_layers": [1, 2], "full_attn_layers": [2, 3, 4]},
        },
        "layer 2 is in kda_layers and in full_attn_layers",
    ),
    (
        "kimi_linear",
        {
            "layer_types": None,
            "linear_attn_config": {"kda_layers": [1, 2], "full_attn_layers": [4]},
        },
        "layer 3 is neither in kda_layers nor in full_attn_layers",
    ),
)


def refusal(arch: str, changes: Mapping[str, Any]) -> str:
    """Return why a tiny model's configuration with other keys is not run; "" if it is."""
    tiny = next(tiny for tiny in TINY if (tiny.arch, tiny.label) == (arch, "plain"))
    config = {**make(tiny).config, **changes}
    config = {key: value for key, value in config.items() if value is not None or key in changes}
    try:
        hp, _ = read_hyper(ARCHS[arch], Facts("hf", config, {}), "config.json")
    except ArchError as error:
        return str(error)
    mixed = ARCHS[arch].mixed
    return "" if mixed is None else mixed(hp)


@pytest.mark.parametrize(("arch", "changes", "words"), REFUSED)
def test_a_mixture_that_nobody_published_is_refused(
    arch: str, changes: Mapping[str, Any], words: str
) -> None:
    assert refusal(arch, {}) == ""
    assert words in refusal(arch, changes)
