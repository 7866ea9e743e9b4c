"""seed-oss: llama with biases on q, k and v, and a switch of its own for the output's.

GGUF calls the norm before the MLP `post_attention_norm`. Source: transformers' modeling_seed_oss;
llama.cpp's seed-oss.cpp.
"""

from aprfmt.arch import hyper_rules, losses
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
        *attention(),
        RoleRow(
            "ffn_norm.weight",
            "post_attention_layernorm.weight",
            ("hidden_size",),
            gguf="post_attention_norm.weight",
        ),
        *gated_mlp(bias="mlp_bias"),
    ),
    hf_more=FUSED,
)

SEED_OSS = ArchSpec(
    name="seed_oss",
    hyper=hyper_rules.hyper_table(
        hyper_rules.n_kv_heads(8),
        hyper_rules.head_dim(128),
        hyper_rules.context_length(524288),
        hyper_rules.flag("attention_bias", True, "attention_bias", present=("attn_q.bias",)),
        hyper_rules.flag(
            "attention_out_bias", False, "attention_out_bias", present=("attn_output.bias",)
        ),
        hyper_rules.mlp_bias(),
    ),
    tensors=_TENSORS,
    bindings=_BINDINGS,
    block=BlockSpec(),
    lost=(
        *losses.common_losses(),
        Loss(
            "gguf",
            "mlp_bias",
            lambda hp: hp["mlp_bias"],
            "llama.cpp has no biases of the MLP here and refuses the file",
        ),
    ),
)
