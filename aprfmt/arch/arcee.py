"""arcee (AFM): llama with a plain MLP of squared relus.

Source: transformers' modeling_arcee; the converter's arcee.py (a llama, Q and K in adjacent pairs).
"""

from aprfmt.arch import hyper_rules, losses
from aprfmt.arch.rope_gguf import ROPE_TENSORS
from aprfmt.arch.spec import ArchSpec, BlockSpec
from aprfmt.arch.tensor_rows import FUSED, attention, make_tables, norm, plain_mlp, with_model_rows

_TENSORS, _BINDINGS = make_tables(
    with_model_rows(
        *norm("attn_norm", "input_layernorm"),
        *attention(permuted=True),
        *norm("ffn_norm", "post_attention_layernorm"),
        *plain_mlp("mlp.up_proj", "mlp.down_proj", bias="mlp_bias"),
    ),
    hf_more=FUSED,
)

ARCEE = ArchSpec(
    name="arcee",
    hyper=hyper_rules.hyper_table(
        hyper_rules.context_length(4096),
        hyper_rules.norm_eps(1e-5),
        hyper_rules.activation("relu2"),
        *hyper_rules.attention_biases(),
        hyper_rules.mlp_bias(),
        hyper_rules.rope_style("half", permuted=True),
    ),
    tensors=_TENSORS,
    bindings=_BINDINGS,
    block=BlockSpec(mlp="plain"),
    lost=(*losses.common_losses("relu2"), losses.ONE_BIAS_KEY),
    derived=ROPE_TENSORS,
)
