"""arcee (AFM): llama with a plain MLP of squared relus.

Source: transformers' modeling_arcee; the converter's arcee.py (a llama, Q and K in adjacent pairs).
"""

from aprfmt.arch import losses, rules
from aprfmt.arch.rope_gguf import ROPE_TENSORS
from aprfmt.arch.rows import FUSED, around, attention, norm, plain_mlp, tables
from aprfmt.arch.spec import ArchSpec, BlockSpec

_TENSORS, _BINDINGS = tables(
    around(
        *norm("attn_norm", "input_layernorm"),
        *attention(permuted=True),
        *norm("ffn_norm", "post_attention_layernorm"),
        *plain_mlp("up_proj", "down_proj", bias="mlp_bias"),
    ),
    hf_more=FUSED,
)

ARCEE = ArchSpec(
    name="arcee",
    hyper=rules.hyper_table(
        rules.context_length(4096),
        rules.norm_eps(1e-5),
        rules.activation("relu2"),
        *rules.attention_biases(),
        rules.mlp_bias(),
        rules.rope_style("half", permuted=True),
    ),
    tensors=_TENSORS,
    bindings=_BINDINGS,
    block=BlockSpec(mlp="plain"),
    lost=(*losses.common_losses("relu2"), losses.ONE_BIAS_KEY),
    derived=ROPE_TENSORS,
)
