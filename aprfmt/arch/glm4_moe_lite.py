"""glm4-moe-lite (GLM-4.7-Flash): deepseek v3 with other sizes, and its layers' experts listed.

GGUF calls it `deepseek2` and has nothing that tells it from deepseek v3, whose pass is the same:
such a file is read as that. Source: transformers' modeling_glm4_moe_lite; the converter's glm.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from reprlib import repr as short_repr

from aprfmt.arch import hyper_rules, moe
from aprfmt.arch.deepseek import DEEPSEEK_V3, EXPERTS_HF, routed_scale_rule, v3_rules
from aprfmt.arch.mla import (
    LISTED_EXPERTS_LOSS,
    expert_groups_rule,
    listed_experts_rule,
    mla_length_rules,
    q_lora_rank_rule,
    shared_experts_rule,
)
from aprfmt.arch.spec import Facts, Params
from aprfmt.base.protocols import Value
from aprfmt.errors import ArchError


def _check_whole_rope(value: Value, facts: Facts, hp: Params) -> str:
    """Return ""; ArchError if only some of the rotary elements are to be rotated.

    transformers fails on such a model.
    """
    rope = facts.first("rope_parameters", "rope_scaling")
    inside = rope[0] if rope is not None and isinstance(rope[0], Mapping) else {}
    found = facts.first("partial_rotary_factor")
    part = inside.get("partial_rotary_factor", 1.0 if found is None else found[0])
    if part != 1:
        raise ArchError(
            f"partial_rotary_factor is {short_repr(part)}; expected 1, or no such key: "
            "transformers makes frequencies of the part, but rotates all elements, and fails"
        )
    return ""


def _unpublished_mix(hp: Params) -> str:
    """Return in words two features of a model that no published one has together; "" for none.

    `hp` are the model's hyperparameters. A check warns of such a model.
    """
    return "" if any(hp["moe_layers"]) else "latent attention of its sizes, and no experts"


_ROPE_DIM = next(rule for rule in DEEPSEEK_V3.hyper if rule.name == "rope_dim")
GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    name="glm4_moe_lite",
    called={},
    hyper=v3_rules(
        hyper_rules.context_length(202752),
        hyper_rules.norm_eps(1e-5),
        *mla_length_rules(192, 256),
        q_lora_rank_rule(768),
        replace(_ROPE_DIM, check=_check_whole_rope),
        *moe.expert_count_rules(64, 4, EXPERTS_HF),
        moe.expert_size_rule(hf_default=1536),
        shared_experts_rule("n_shared_experts", 1),
        listed_experts_rule(1, counted=False),
        routed_scale_rule(1.8),
        expert_groups_rule("n_expert_groups", "n_group", "expert_group_count", 1),
        expert_groups_rule("n_expert_groups_used", "topk_group", "expert_group_used_count", 1),
    ),
    lost=(*DEEPSEEK_V3.lost, LISTED_EXPERTS_LOSS),
    evidence=lambda names, values: False,
    mixed=_unpublished_mix,
)
