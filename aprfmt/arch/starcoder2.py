"""starcoder2: LayerNorm, biases everywhere, a plain MLP, a window.

Source: docs/reference/architectures.md.
"""

from aprfmt.arch import hyper_rules, losses
from aprfmt.arch.rope_gguf import ROPE_TENSORS
from aprfmt.arch.sliding_window import IGNORED_WINDOW, Window, window_rules
from aprfmt.arch.spec import ArchSpec, BlockSpec
from aprfmt.arch.tensor_rows import FUSED, attention, make_tables, norm, plain_mlp, with_model_rows

_TENSORS, _BINDINGS = make_tables(
    with_model_rows(
        *norm("attn_norm", "input_layernorm", bias=True),
        *attention(),
        *norm("ffn_norm", "post_attention_layernorm", bias=True),
        *plain_mlp("mlp.c_fc", "mlp.c_proj", bias="mlp_bias"),
        norm_bias=True,
    ),
    hf_more=FUSED,
)

STARCODER2 = ArchSpec(
    name="starcoder2",
    hyper=hyper_rules.hyper_table(
        hyper_rules.n_kv_heads(2),
        hyper_rules.context_length(4096),
        hyper_rules.norm_eps(1e-5, "norm_epsilon", "layer_norm_epsilon"),
        hyper_rules.activation("gelu_tanh"),
        hyper_rules.tied_embeddings(True),
        *hyper_rules.attention_biases(True, "use_bias"),
        hyper_rules.flag("mlp_bias", True, "use_bias", present=("ffn_up.bias",), written=False),
        *window_rules(Window(listed=False)),
    ),
    tensors=_TENSORS,
    bindings=_BINDINGS,
    block=BlockSpec(norm="layer", mlp="plain"),
    lost=(*losses.common_losses("gelu_tanh"), losses.ONE_BIAS_KEY, IGNORED_WINDOW),
    ignored=frozenset({"mlp_type", "norm_type", "layer_norm_eps"}),
    derived=ROPE_TENSORS,
)
