"""exaone-moe (K-EXAONE): exaone4's attention after norms, deepseek v3's experts in later layers.

Source: transformers' modeling_exaone_moe; the converter's exaone.py, llama.cpp's exaone-moe.cpp.
"""

from collections.abc import Mapping
from dataclasses import replace

from aprfmt.arch import hyper_rules, losses, moe
from aprfmt.arch.deepseek import routed_scale_rule, sigmoid_router_rule
from aprfmt.arch.exaone4 import lettered_windows
from aprfmt.arch.glm4_moe import GROUPS_LOSS
from aprfmt.arch.mla import (
    LISTED_EXPERTS_LOSS,
    expert_groups_rule,
    listed_experts_rule,
    shared_experts_rule,
)
from aprfmt.arch.qwen2_moe import EXPERT_BINDINGS, EXPERTS, ROUTER, shared_expert_rows
from aprfmt.arch.qwen3 import QK_NORMS
from aprfmt.arch.rope_gguf import ROPE_TENSORS
from aprfmt.arch.sliding_window import Window, rotated_windows, window_rules
from aprfmt.arch.spec import Binding, BlockSpec, HyperRule, Loss
from aprfmt.arch.spec_builders import full_spec
from aprfmt.arch.tensor_rows import (
    FUSED,
    LAYER,
    RoleRow,
    attention,
    gated_mlp,
    make_tables,
    norm,
    with_model_rows,
)
from aprfmt.base.protocols import Value

_SHARED_WIDTH = "{arch}.expert_shared_feed_forward_length"
_MADE = make_tables(
    with_model_rows(
        *norm("attn_norm", "input_layernorm"),
        *attention(bias=None, out_bias=None),
        *QK_NORMS,
        *norm("ffn_norm", "post_attention_layernorm"),
        *gated_mlp(needs="!moe_layers"),
        ROUTER,
        RoleRow("exp_probs_b.bias", "mlp.e_score_correction_bias", ("n_experts",), "moe_layers"),
        *EXPERTS,
        *shared_expert_rows("mlp.shared_experts", "moe_layers & shared_ffn_size"),
    ),
    hf_first=EXPERT_BINDINGS,
    # transformers 5 has it below the router in memory.
    hf_more=(Binding((LAYER + "mlp.gate.e_score_correction_bias",), ("exp_probs_b.bias",)), *FUSED),
)


def shared_width_rule() -> HyperRule:
    """Return the rule for the shared experts' joint width, which GGUF has next to their number."""
    rule = shared_experts_rule("num_shared_experts", 1)
    counted = rule.write["gguf"]

    def write(value: Value, hp: Mapping[str, Value]) -> Mapping[str, Value]:
        """Return GGUF's {key: number} for the number of shared experts and their joint width."""
        return {**counted(value, hp), _SHARED_WIDTH: value}

    return replace(rule, write={**rule.write, "gguf": write})


EXAONE_MOE = full_spec(
    "exaone_moe",
    _MADE,
    hyper_rules.hyper_table(
        hyper_rules.n_kv_heads(32),
        hyper_rules.norm_eps(1e-5),
        hyper_rules.fixed("qk_norm", True),
        *window_rules(Window(4096, None, lettered_windows)),
        rotated_windows(without=True),
        *moe.expert_count_rules(64, 8, "num_experts num_local_experts"),
        moe.expert_size_rule(hf_default=1024),
        shared_width_rule(),
        listed_experts_rule(1, counted=True),
        moe.norm_topk_rule(True),
        routed_scale_rule(2.5),
        expert_groups_rule("n_expert_groups", "n_group", "expert_group_count", 1),
        expert_groups_rule("n_expert_groups_used", "topk_group", "expert_group_used_count", 1),
        sigmoid_router_rule(),
    ),
    BlockSpec(qk_norm="head", shared_expert="plain", router_cast="none"),
    lost=(
        *losses.common_losses(),
        GROUPS_LOSS,
        LISTED_EXPERTS_LOSS,
        Loss(
            "gguf",
            "sliding_window",
            lambda hp: hp["sliding_window"] is None,
            "llama.cpp expects windows here, and refuses the file",
        ),
    ),
    ignored=frozenset(
        """scoring_func topk_method num_nextn_predict_layers expert_shared_feed_forward_length
        first_last_k_dense_replace""".split()
    ),
    derived=ROPE_TENSORS,
)
