"""ministral: mistral whose layers each have a window or none, as `layer_types` lists them.

Source: transformers' modular_ministral. llama.cpp has no such model.
"""

from aprfmt.arch import hyper_rules, losses
from aprfmt.arch.sliding_window import Window, window_rules
from aprfmt.arch.spec import ArchSpec, BlockSpec
from aprfmt.arch.tensor_rows import FUSED, attention, gated_mlp, make_tables, norm, with_model_rows

_TENSORS, _BINDINGS = make_tables(
    with_model_rows(
        *norm("attn_norm", "input_layernorm"),
        *attention(bias=None, out_bias=None),
        *norm("ffn_norm", "post_attention_layernorm"),
        *gated_mlp(),
    ),
    hf_more=FUSED,
)

MINISTRAL = ArchSpec(
    name="ministral",
    hyper=hyper_rules.hyper_table(
        hyper_rules.n_kv_heads(8),
        hyper_rules.context_length(4096 * 32),
        hyper_rules.rope_style("half"),
        *window_rules(Window(hf_default=4096)),
    ),
    tensors=_TENSORS,
    bindings={"hf": _BINDINGS["hf"]},
    block=BlockSpec(),
    lost=losses.common_losses(),
)
