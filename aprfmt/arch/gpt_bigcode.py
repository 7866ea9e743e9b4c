"""gpt_bigcode (starcoder, santacoder): gpt2 with one key head, its matrices [out, in].

Without `multi_query`, q, k and v come head by head. Source: transformers' modeling_gpt_bigcode;
llama.cpp's starcoder.cpp.
"""

from dataclasses import replace

from aprfmt.arch import hyper_rules, losses
from aprfmt.arch.fused_projection import GGUF_FUSED, GROUPED, fused_bindings, fused_rows
from aprfmt.arch.gpt2 import BUFFERS, NO_ROPE, POSITIONS, attn_scale_rule, default_ffn_size
from aprfmt.arch.required_values import divided_head_dim_rule
from aprfmt.arch.spec import ArchSpec, BlockSpec, Facts, Loss, Params
from aprfmt.arch.tensor_rows import Q, linear, make_tables, norm, with_model_rows
from aprfmt.arch.value_checks import boolean
from aprfmt.base.protocols import Value

_H = "transformer.h.{L}."
_TENSORS, _BINDINGS = make_tables(
    with_model_rows(
        POSITIONS,
        *norm("attn_norm", _H + "ln_1", bias=True),
        *fused_rows(""),
        *linear("attn_output", _H + "attn.c_proj", "hidden_size", Q, bias=""),
        *norm("ffn_norm", _H + "ln_2", bias=True),
        *linear("ffn_up", _H + "mlp.c_fc", "ffn_size", "hidden_size", bias=""),
        *linear("ffn_down", _H + "mlp.c_proj", "hidden_size", "ffn_size", bias=""),
        embed="transformer.wte",
        final="transformer.ln_f",
        norm_bias=True,
    ),
    hf_first=fused_bindings(_H + "attn.c_attn", GROUPED),
    gguf_first=GGUF_FUSED,
)


def _read_key_heads(facts: Facts, hp: Params) -> tuple[Value, str] | None:
    """Return (number of key heads, key) of config.json's `multi_query`; None without it.

    True means one key head, False as many as heads.
    """
    found = facts.first("multi_query")
    return None if found is None else (1 if boolean(*found) else hp["n_heads"], found[1])


GPT_BIGCODE = ArchSpec(
    name="gpt_bigcode",
    hyper=hyper_rules.hyper_table(
        hyper_rules.hidden_size(768, "n_embd hidden_size"),
        hyper_rules.n_layers(12, "n_layer num_hidden_layers"),
        hyper_rules.n_heads(12, "n_head num_attention_heads"),
        replace(
            hyper_rules.n_kv_heads(1, hf=""),
            read={"hf": _read_key_heads},
            write={"hf": lambda value, hp: {"multi_query": value == 1}},
        ),
        divided_head_dim_rule(),
        hyper_rules.ffn_size(default_ffn_size, "n_inner"),
        hyper_rules.vocab_size(50257),
        hyper_rules.context_length(1024, "n_positions max_position_embeddings n_ctx"),
        hyper_rules.norm_eps(1e-5, "layer_norm_epsilon", "layer_norm_epsilon"),
        hyper_rules.activation("gelu_tanh", "activation_function"),
        hyper_rules.tied_embeddings(True),
        hyper_rules.fixed("attention_bias", True),
        hyper_rules.fixed("attention_out_bias", True),
        hyper_rules.fixed("mlp_bias", True),
        *NO_ROPE,
        attn_scale_rule(),
    ),
    tensors=_TENSORS,
    bindings=_BINDINGS,
    block=BlockSpec(norm="layer", position="learned", mlp="plain"),
    lost=(
        *losses.common_losses("gelu_tanh", partial=True),
        Loss(
            "gguf",
            "attn_scale",
            lambda hp: hp["attn_scale"] != hyper_rules.default_attn_scale(hp),
            "llama.cpp divides starcoder's scores by sqrt(head_dim)",
        ),
    ),
    ignored=frozenset(
        """n_ctx num_key_value_heads attention_softmax_in_fp32 scale_attention_softmax_in_fp32
        summary_type summary_use_proj summary_activation summary_proj_to_labels
        summary_first_dropout inference_runner max_batch_size max_sequence_length
        pad_key_length pre_allocate_kv_cache validate_runner_input""".split()
    ),
    buffers=BUFFERS,
)
