"""olmoe: experts in every layer, q/k-norms over the whole projection, an optional clip of q, k, v.

Source: transformers' modeling_olmoe; the converter's olmo.py, llama.cpp's olmoe.cpp.
"""

from aprfmt.arch import hyper_rules, losses, moe
from aprfmt.arch.qwen2_moe import EXPERT_BINDINGS, EXPERTS, ROUTER
from aprfmt.arch.required_values import divided_head_dim_rule
from aprfmt.arch.spec import ArchSpec, BlockSpec, HyperRule, Loss
from aprfmt.arch.tensor_rows import FUSED, KV, Q, attention, make_tables, norm, with_model_rows

_TENSORS, _BINDINGS = make_tables(
    with_model_rows(
        *norm("attn_norm", "input_layernorm"),
        *attention(),
        *norm("attn_q_norm", "self_attn.q_norm", (Q,)),
        *norm("attn_k_norm", "self_attn.k_norm", (KV,)),
        *norm("ffn_norm", "post_attention_layernorm"),
        ROUTER,
        *EXPERTS,
    ),
    hf_first=EXPERT_BINDINGS,
    hf_more=FUSED,
)

OLMOE = ArchSpec(
    name="olmoe",
    hyper=hyper_rules.hyper_table(
        hyper_rules.context_length(4096),
        divided_head_dim_rule(),
        hyper_rules.norm_eps(1e-5),
        hyper_rules.tied_embeddings(shown=False),
        *hyper_rules.attention_biases(),
        hyper_rules.fixed("qk_norm", True),
        HyperRule("qkv_clip", {"hf": ("clip_qkv",)}, "positive", None),
        *moe.expert_count_rules(64, 8),
        moe.expert_size_rule("intermediate_size"),
        moe.all_moe_layers_rule(),
        moe.norm_topk_rule(False, gguf=False),
    ),
    tensors=_TENSORS,
    bindings=_BINDINGS,
    block=BlockSpec(qk_norm="width"),
    lost=(
        *losses.common_losses(),
        losses.ONE_BIAS_KEY,
        moe.norm_topk_loss(False),
        Loss(
            "gguf",
            "attention_bias",
            lambda hp: hp["attention_bias"],
            "llama.cpp has no attention biases here and refuses the file",
        ),
        Loss(
            "gguf",
            "qkv_clip",
            lambda hp: hp["qkv_clip"] is not None,
            "llama.cpp clips no q, k and v of olmoe",
        ),
    ),
)
