"""glm4-moe (GLM-4.5 to 4.7): deepseek v3's experts, grouped queries, half of each head rotated.

GGUF calls the norm before the MLP `post_attention_norm`. Source: transformers' modeling_glm4_moe;
the converter's glm.py, llama.cpp's glm4-moe.cpp.
"""

from aprfmt.arch import draft_head, hyper_rules, losses, moe
from aprfmt.arch.deepseek import EXPERTS_HF, ROUTER_BIAS, routed_scale_rule, sigmoid_router_rule
from aprfmt.arch.mla import dense_first_rule, expert_groups_rule, shared_experts_rule
from aprfmt.arch.qwen2_moe import EXPERT_BINDINGS, EXPERTS, ROUTER, shared_expert_rows
from aprfmt.arch.rope import rope_rules
from aprfmt.arch.rope_hf import RopeDefaults
from aprfmt.arch.spec import ArchSpec, BlockSpec, Loss
from aprfmt.arch.tensor_rows import (
    FUSED,
    RoleRow,
    attention,
    gated_mlp,
    make_tables,
    norm,
    with_model_rows,
)

_TENSORS, _BINDINGS = make_tables(
    with_model_rows(
        *norm("attn_norm", "input_layernorm"),
        *attention(out_bias=None),
        *norm("attn_q_norm", "self_attn.q_norm", ("head_dim",), "qk_norm"),
        *norm("attn_k_norm", "self_attn.k_norm", ("head_dim",), "qk_norm"),
        RoleRow(
            "ffn_norm.weight",
            "post_attention_layernorm.weight",
            ("hidden_size",),
            gguf="post_attention_norm.weight",
        ),
        *gated_mlp(needs="!moe_layers"),
        ROUTER,
        ROUTER_BIAS,
        *EXPERTS,
        *shared_expert_rows("mlp.shared_experts", "moe_layers & shared_ffn_size"),
    ),
    hf_first=EXPERT_BINDINGS,
    hf_more=FUSED,
)

GROUPS_LOSS = Loss(
    "gguf",
    "n_expert_groups",
    lambda hp: hp["n_expert_groups"] > 1,
    "llama.cpp reads no groups of experts here and chooses among all",
)

GLM4_MOE = ArchSpec(
    name="glm4_moe",
    hyper=hyper_rules.hyper_table(
        draft_head.main_layers_rule(),
        hyper_rules.n_kv_heads(8),
        hyper_rules.context_length(131072),
        hyper_rules.norm_eps(1e-5),
        hyper_rules.flag("attention_bias", False, "attention_bias", present=("attn_q.bias",)),
        hyper_rules.qk_norm(False, "use_qk_norm"),
        *rope_rules(RopeDefaults(partial=0.5)),
        *moe.expert_count_rules(128, 8, EXPERTS_HF),
        moe.expert_size_rule(hf_default=1408),
        shared_experts_rule("n_shared_experts", 1),
        dense_first_rule(1),
        moe.norm_topk_rule(True),
        routed_scale_rule(1.0),
        expert_groups_rule("n_expert_groups", "n_group", "expert_group_count", 1),
        expert_groups_rule("n_expert_groups_used", "topk_group", "expert_group_used_count", 1),
        sigmoid_router_rule(),
    ),
    tensors=_TENSORS,
    bindings=_BINDINGS,
    block=BlockSpec(qk_norm="head", shared_expert="plain", router_cast="none"),
    lost=(*losses.common_losses(partial=True), GROUPS_LOSS),
    ignored=frozenset({"num_nextn_predict_layers", "num_mtp_layers"}),
    draft=draft_head.NEXTN,
)
