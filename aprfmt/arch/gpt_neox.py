"""gpt_neox (pythia): attention and MLP in parallel, each after its own norm; a fused projection.

q, k and v come head by head in the source, one after the other in GGUF; a quarter of each head
is rotated. Source: transformers' modeling_gpt_neox; the converter's gpt_neox.py.
"""

from aprfmt.arch import hyper_rules, losses
from aprfmt.arch.fused_projection import GGUF_FUSED, GROUPED, fused_bindings, fused_rows
from aprfmt.arch.required_values import divided_head_dim_rule
from aprfmt.arch.rope import rope_rules
from aprfmt.arch.rope_hf import RopeDefaults
from aprfmt.arch.spec import ArchSpec, Binding, BlockSpec, Loss
from aprfmt.arch.tensor_rows import Q, linear, make_tables, norm, with_model_rows

_L = "gpt_neox.layers.{L}."
_TENSORS, _BINDINGS = make_tables(
    with_model_rows(
        *norm("attn_norm", _L + "input_layernorm", bias=True),
        *fused_rows("attention_bias"),
        *linear("attn_output", _L + "attention.dense", "hidden_size", Q, bias="attention_out_bias"),
        *norm("ffn_norm", _L + "post_attention_layernorm", bias=True),
        *linear("ffn_up", _L + "mlp.dense_h_to_4h", "ffn_size", "hidden_size", bias=""),
        *linear("ffn_down", _L + "mlp.dense_4h_to_h", "hidden_size", "ffn_size", bias=""),
        embed="gpt_neox.embed_in",
        final="gpt_neox.final_layer_norm",
        head="embed_out",
        norm_bias=True,
    ),
    hf_first=fused_bindings(_L + "attention.query_key_value", GROUPED),
    hf_more=(Binding(("lm_head.weight",), ("output.weight",)),),  # in memory
    gguf_first=GGUF_FUSED,
)

GPT_NEOX = ArchSpec(
    name="gpt_neox",
    hyper=hyper_rules.hyper_table(
        hyper_rules.n_kv_heads(hf=""),
        divided_head_dim_rule(),
        hyper_rules.norm_eps(1e-5, "layer_norm_eps", "layer_norm_epsilon"),
        hyper_rules.activation("gelu"),
        hyper_rules.tied_embeddings(shown=False),
        *hyper_rules.attention_biases(True),
        hyper_rules.fixed("mlp_bias", True),
        hyper_rules.flag(
            "parallel_residual", True, "use_parallel_residual", gguf="use_parallel_residual"
        ),
        *rope_rules(RopeDefaults(partial=0.25, base_key="rotary_emb_base")),
    ),
    tensors=_TENSORS,
    bindings=_BINDINGS,
    block=BlockSpec(norm="layer", mlp="plain", parallel_norm="two"),
    lost=(
        *losses.common_losses("gelu", partial=True),
        losses.ONE_BIAS_KEY,
        Loss(
            "gguf",
            "attention_bias",
            lambda hp: not hp["attention_bias"],
            "llama.cpp requires attention biases here and refuses the file",
        ),
    ),
    ignored=frozenset({"rope_pct"}),
    # Masks that early checkpoints store.
    buffers={"hf": tuple(_L + "attention." + x for x in ("bias", "masked_bias"))},
)
