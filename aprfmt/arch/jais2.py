"""jais2: LayerNorm with biases, a plain MLP with relu squared.

Source: transformers' modeling_jais2; the converter's jais.py.
"""

from aprfmt.arch import hyper_rules, losses
from aprfmt.arch.rope_gguf import ROPE_TENSORS
from aprfmt.arch.spec import ArchSpec, BlockSpec
from aprfmt.arch.tensor_rows import FUSED, attention, make_tables, norm, plain_mlp, with_model_rows

_TENSORS, _BINDINGS = make_tables(
    with_model_rows(
        *norm("attn_norm", "input_layernorm", bias=True),
        *attention(),
        *norm("ffn_norm", "post_attention_layernorm", bias=True),
        *plain_mlp("mlp.up_proj", "mlp.down_proj", bias="mlp_bias"),
        norm_bias=True,
    ),
    hf_more=FUSED,
)

JAIS2 = ArchSpec(
    name="jais2",
    hyper=hyper_rules.hyper_table(
        hyper_rules.context_length(8192),
        hyper_rules.norm_eps(1e-5, "layer_norm_eps", "layer_norm_epsilon"),
        hyper_rules.activation("relu2"),
        *hyper_rules.attention_biases(True),
        hyper_rules.mlp_bias(True),
    ),
    tensors=_TENSORS,
    bindings=_BINDINGS,
    block=BlockSpec(norm="layer", mlp="plain"),
    lost=(*losses.common_losses("relu2"), losses.ONE_BIAS_KEY),
    derived=ROPE_TENSORS,
)
