"""solar-open: glm4-moe with experts in every layer, whole heads rotated and no norms of q and k.

GGUF calls it glm4moe. Source: transformers' modeling_solar_open; the converter's glm.py,
llama.cpp's glm4-moe.cpp.
"""

from aprfmt.arch import hyper_rules, losses, moe
from aprfmt.arch.deepseek import EXPERTS_HF, ROUTER_BIAS, routed_scale_rule, sigmoid_router_rule
from aprfmt.arch.glm4_moe import GROUPS_LOSS
from aprfmt.arch.mla import expert_groups_rule, shared_experts_rule
from aprfmt.arch.qwen2_moe import EXPERT_BINDINGS, EXPERTS, ROUTER, shared_expert_rows
from aprfmt.arch.rope import rope_rules
from aprfmt.arch.rope_hf import RopeDefaults
from aprfmt.arch.spec import BlockSpec
from aprfmt.arch.spec_builders import full_spec
from aprfmt.arch.tensor_rows import FUSED, RoleRow, attention, make_tables, norm, with_model_rows

_MADE = make_tables(
    with_model_rows(
        *norm("attn_norm", "input_layernorm"),
        *attention(out_bias=None),
        RoleRow(
            "ffn_norm.weight",
            "post_attention_layernorm.weight",
            ("hidden_size",),
            gguf="post_attention_norm.weight",
        ),
        ROUTER,
        ROUTER_BIAS,
        *EXPERTS,
        *shared_expert_rows("mlp.shared_experts", "moe_layers & shared_ffn_size"),
    ),
    hf_first=EXPERT_BINDINGS,
    hf_more=FUSED,
)

SOLAR_OPEN = full_spec(
    "solar_open",
    _MADE,
    hyper_rules.hyper_table(
        hyper_rules.n_kv_heads(8),
        hyper_rules.head_dim(128),
        hyper_rules.ffn_size(1280, "moe_intermediate_size"),  # no layer has another MLP
        hyper_rules.context_length(131072),
        hyper_rules.norm_eps(1e-5),
        hyper_rules.flag("attention_bias", False, "attention_bias", present=("attn_q.bias",)),
        *rope_rules(RopeDefaults(theta=1e6, partial_fails=True)),
        *moe.expert_count_rules(128, 8, EXPERTS_HF),
        moe.expert_size_rule(hf_default=1280),
        shared_experts_rule("n_shared_experts", 1),
        moe.all_moe_layers_rule(),
        moe.norm_topk_rule(True),
        routed_scale_rule(1.0),
        expert_groups_rule("n_expert_groups", "n_group", "expert_group_count", 1),
        expert_groups_rule("n_expert_groups_used", "topk_group", "expert_group_used_count", 1),
        sigmoid_router_rule(),
    ),
    BlockSpec(shared_expert="plain", router_cast="none"),
    lost=(*losses.common_losses(), GROUPS_LOSS),
    ignored=frozenset(
        "first_k_dense_replace intermediate_size use_qk_norm num_nextn_predict_layers".split()
    ),
    evidence=lambda names, values: False,  # a GGUF's glm4moe is glm4_moe
)
