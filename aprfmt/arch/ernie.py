"""ernie4_5: llama that pairs adjacent elements in the source; one key for all biases.

Source: transformers' modeling_ernie4_5; the converter's ernie.py, llama.cpp's ernie4-5.cpp.
"""

from aprfmt.arch import hyper_rules, losses
from aprfmt.arch.rope import rope_rules
from aprfmt.arch.rope_hf import RopeDefaults
from aprfmt.arch.spec import ArchSpec, BlockSpec, Loss
from aprfmt.arch.tensor_rows import FUSED, attention, gated_mlp, make_tables, norm, with_model_rows

BIASES = (
    *hyper_rules.attention_biases(False, "use_bias"),
    hyper_rules.flag("mlp_bias", False, "use_bias", present=("ffn_up.bias",), written=False),
)
BIAS_LOSS = Loss(
    "gguf",
    "mlp_bias",
    lambda hp: hp["mlp_bias"] or hp["attention_out_bias"],
    "llama.cpp has no biases of the output and of the MLP here and refuses the file",
)
ROPE = (*rope_rules(RopeDefaults(theta=500000.0)), hyper_rules.rope_style("interleaved"))

_TENSORS, _BINDINGS = make_tables(
    with_model_rows(
        *norm("attn_norm", "input_layernorm"),
        *attention(),
        *norm("ffn_norm", "post_attention_layernorm"),
        *gated_mlp(bias="mlp_bias"),
    ),
    hf_more=FUSED,
)

ERNIE4_5 = ArchSpec(
    name="ernie4_5",
    hyper=hyper_rules.hyper_table(
        hyper_rules.n_kv_heads(2),
        hyper_rules.head_dim(128),
        hyper_rules.context_length(131072),
        hyper_rules.norm_eps(1e-5),
        hyper_rules.tied_embeddings(True),
        *BIASES,
        *ROPE,
    ),
    tensors=_TENSORS,
    bindings=_BINDINGS,
    block=BlockSpec(rope_cast="result"),
    lost=(*losses.common_losses(), losses.ONE_BIAS_KEY, BIAS_LOSS),
    ignored=frozenset({"use_flash_attention", "compression_ratio", "weight_share_add_bias"}),
)
