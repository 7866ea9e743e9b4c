"""internlm3: llama with heads of 128 elements whatever the width, and all biases or none.

Source: transformers' modeling_internlm3 and configuration_internlm3; the converter's internlm.py
(a llama, Q and K in adjacent pairs).
"""

from aprfmt.arch import hyper_rules, losses
from aprfmt.arch.rope_gguf import ROPE_TENSORS
from aprfmt.arch.spec import ArchSpec, BlockSpec
from aprfmt.arch.tensor_rows import FUSED, attention, gated_mlp, make_tables, norm, with_model_rows

_TENSORS, _BINDINGS = make_tables(
    with_model_rows(
        *norm("attn_norm", "input_layernorm"),
        *attention(permuted=True),
        *norm("ffn_norm", "post_attention_layernorm"),
        *gated_mlp(bias="mlp_bias"),
    ),
    hf_more=FUSED,
)

INTERNLM3 = ArchSpec(
    name="internlm3",
    hyper=hyper_rules.hyper_table(
        hyper_rules.n_kv_heads(2),
        hyper_rules.head_dim(128),
        hyper_rules.context_length(32768),
        hyper_rules.norm_eps(1e-5),
        *hyper_rules.attention_biases(hf="attention_bias qkv_bias"),
        hyper_rules.mlp_bias(hf="mlp_bias bias"),
        hyper_rules.rope_style("half", permuted=True),
    ),
    tensors=_TENSORS,
    bindings=_BINDINGS,
    block=BlockSpec(),
    lost=(*losses.common_losses(), losses.ONE_BIAS_KEY),
    derived=ROPE_TENSORS,
    evidence=lambda names, values: False,  # a GGUF's llama is llama
)
