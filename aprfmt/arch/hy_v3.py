"""hy-v3 (Hunyuan 3): qwen3's attention, experts chosen by sigmoids with a bias, a shared one.

Published files call the router, its bias and the shared expert otherwise than transformers does.
Source: transformers' modeling_hy_v3 and conversion mapping; the converter's hunyuan.py, llama.cpp's
hy-v3.cpp.
"""

from dataclasses import replace

from aprfmt.arch import hyper_rules, losses, moe
from aprfmt.arch.deepseek import routed_scale_rule, sigmoid_router_rule
from aprfmt.arch.exaone_moe import shared_width_rule
from aprfmt.arch.layer_kinds import layers_with_role
from aprfmt.arch.mla import listed_experts_rule
from aprfmt.arch.qwen2_moe import EXPERT_BINDINGS, EXPERTS, shared_expert_rows
from aprfmt.arch.qwen3 import QK_NORMS
from aprfmt.arch.rope import rope_rules
from aprfmt.arch.rope_hf import RopeDefaults
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

_MADE = make_tables(
    with_model_rows(
        *norm("attn_norm", "input_layernorm"),
        *attention(),
        *QK_NORMS,
        *norm("ffn_norm", "post_attention_layernorm"),
        *gated_mlp(bias="mlp_bias", needs="!moe_layers"),
        RoleRow(
            "ffn_gate_inp.weight",
            "mlp.router.gate.weight",
            ("n_experts", "hidden_size"),
            "moe_layers",
        ),
        RoleRow(
            "exp_probs_b.bias", "mlp.expert_bias", ("n_experts",), "moe_layers", gguf="exp_probs_b"
        ),
        *EXPERTS,
        *shared_expert_rows("mlp.shared_mlp", "moe_layers & shared_ffn_size", "mlp_bias"),
    ),
    hf_first=EXPERT_BINDINGS,
    # As transformers calls them in memory.
    hf_more=(
        Binding((LAYER + "mlp.gate.weight",), ("ffn_gate_inp.weight",)),
        Binding((LAYER + "mlp.e_score_correction_bias",), ("exp_probs_b.bias",)),
        *(
            Binding(
                (f"{LAYER}mlp.shared_experts.{part}_proj.{kind}",), (f"ffn_{part}_shexp.{kind}",)
            )
            for part in ("gate", "up", "down")
            for kind in ("weight", "bias")
        ),
        *FUSED,
    ),
)


def _bias_loss(name: str, what: str) -> Loss:
    """Return the Loss (what a GGUF cannot express) of biases, the hyperparameter `name`.

    `what` names in words the weights that have these biases.
    """
    text = f"llama.cpp has no biases of {what} here and refuses the file"
    return Loss("gguf", name, lambda hp: bool(hp[name]), text)


HY_V3 = full_spec(
    "hy_v3",
    _MADE,
    hyper_rules.hyper_table(
        hyper_rules.n_kv_heads(8),
        hyper_rules.head_dim(128),
        hyper_rules.context_length(131072),
        hyper_rules.norm_eps(1e-5),
        *hyper_rules.attention_biases(),
        hyper_rules.mlp_bias(),
        hyper_rules.fixed("qk_norm", True),
        *rope_rules(RopeDefaults(theta=11158840.0)),
        *moe.expert_count_rules(192, 8, "num_experts num_local_experts"),
        moe.expert_size_rule(hf_default=1536),
        shared_width_rule(),
        replace(
            listed_experts_rule(1, counted=False), shape=layers_with_role("ffn_gate_inp.weight")
        ),
        HyperRule("norm_topk", {"gguf": ("{arch}.expert_weights_norm",)}, "bool", True),
        replace(
            routed_scale_rule(2.826),
            keys={"hf": ("router_scaling_factor",), "gguf": ("{arch}.expert_weights_scale",)},
        ),
        sigmoid_router_rule(),
    ),
    BlockSpec(qk_norm="head", shared_expert="plain", router_cast="none"),
    lost=(
        *losses.common_losses(),
        losses.ONE_BIAS_KEY,
        _bias_loss("attention_out_bias", "attention's output"),
        _bias_loss("mlp_bias", "the MLP"),
    ),
    ignored=frozenset(
        """enable_moe_fp32_combine route_norm num_nextn_predict_layers
        expert_shared_feed_forward_length first_k_dense_replace enable_attention_fp32_softmax
        enable_lm_head_fp32 moe_router_enable_expert_bias moe_router_use_sigmoid qk_norm""".split()
    ),
)
