"""bloom: distances added to the scores instead of positions, a norm after the embedding.

q, k and v of each head in turn are one matrix. Source: transformers' modeling_bloom; the
converter's bloom.py, llama.cpp's bloom.cpp.
"""

from collections.abc import Mapping

from aprfmt.arch import hyper_rules, losses
from aprfmt.arch.fused_projection import GGUF_FUSED, GROUPED, fused_bindings, fused_rows
from aprfmt.arch.gpt2 import NO_ROPE, default_ffn_size
from aprfmt.arch.required_values import divided_head_dim_rule
from aprfmt.arch.spec import ArchSpec, BlockSpec, Facts, HyperRule
from aprfmt.arch.tensor_rows import Q, linear, make_tables, norm, with_model_rows
from aprfmt.arch.value_checks import boolean
from aprfmt.base.protocols import Value
from aprfmt.errors import ArchError

_H = "transformer.h.{L}."
_TENSORS, _BINDINGS = make_tables(
    with_model_rows(
        *norm("token_embd_norm", "transformer.word_embeddings_layernorm", bias=True, layered=False),
        *norm("attn_norm", _H + "input_layernorm", bias=True),
        *fused_rows(""),
        *linear("attn_output", _H + "self_attention.dense", "hidden_size", Q, bias=""),
        *norm("ffn_norm", _H + "post_attention_layernorm", bias=True),
        *linear("ffn_up", _H + "mlp.dense_h_to_4h", "ffn_size", "hidden_size", bias=""),
        *linear("ffn_down", _H + "mlp.dense_4h_to_h", "hidden_size", "ffn_size", bias=""),
        embed="transformer.word_embeddings",
        final="transformer.ln_f",
        norm_bias=True,
    ),
    hf_first=fused_bindings(_H + "self_attention.query_key_value", GROUPED),
    gguf_first=GGUF_FUSED,
)


def _check_residual(value: Value, facts: Facts, hp: Mapping[str, Value]) -> str:
    """Return ""; ArchError if the residual stream would continue with the normed values."""
    found = facts.first("apply_residual_connection_post_layernorm")
    if found is not None and boolean(*found):
        raise ArchError(f"{found[1]}: is true; expected false: that block is not known")
    return ""


BLOOM = ArchSpec(
    name="bloom",
    hyper=hyper_rules.hyper_table(
        hyper_rules.hidden_size(64, "hidden_size n_embed"),
        hyper_rules.n_layers(2, "n_layer num_hidden_layers"),
        hyper_rules.n_heads(8, "n_head num_attention_heads"),
        hyper_rules.n_kv_heads(hf=""),
        divided_head_dim_rule(),
        hyper_rules.ffn_size(default_ffn_size, ""),
        hyper_rules.context_length(2048, "seq_length"),
        hyper_rules.norm_eps(1e-5, "layer_norm_epsilon", "layer_norm_epsilon"),
        HyperRule("activation", default="gelu_tanh"),
        hyper_rules.tied_embeddings(True),
        hyper_rules.fixed("attention_bias", True),
        hyper_rules.fixed("attention_out_bias", True),
        hyper_rules.fixed("mlp_bias", True),
        *NO_ROPE,
        hyper_rules.fixed("alibi_max_bias", 8.0),
        HyperRule("parallel_residual", default=False, check=_check_residual),
    ),
    tensors=_TENSORS,
    bindings=_BINDINGS,
    block=BlockSpec(
        norm="layer", position="none", score_bias="alibi", mlp="plain", activation_cast="steps"
    ),
    lost=losses.common_losses("gelu_tanh", partial=True),
    ignored=frozenset(
        """attention_dropout hidden_dropout slow_but_exact pretraining_tp skip_bias_add
        skip_bias_add_qkv attention_softmax_in_fp32 masked_softmax_fusion bias_dropout_fusion
        offset_alibi n_inner unk_token_id""".split()
    ),
)
