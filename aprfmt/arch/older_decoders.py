"""Older decoders by their names: gpt_neo, olmo, xglm, biogpt, persimmon, codegen.

What converting, comparing, checking and quantizing need; no forward pass. Sources: transformers'
modeling files; the gguf package's name map; the converter's olmo.py.
"""

from typing import Unpack

from aprfmt.arch import hyper_rules
from aprfmt.arch.fused_projection import GROUPED, fused_bindings, fused_rows
from aprfmt.arch.gpt2 import NO_ROPE, POSITIONS, default_ffn_size
from aprfmt.arch.rope import rope_rules
from aprfmt.arch.rope_hf import RopeDefaults
from aprfmt.arch.spec import HyperRule
from aprfmt.arch.spec_builders import names_only_spec
from aprfmt.arch.tensor_rows import (
    FUSED,
    KV,
    Q,
    RoleRow,
    Rows,
    WholeNames,
    attention,
    gated_mlp,
    linear,
    make_tables,
    norm,
    plain_mlp,
    with_model_rows,
)

_H = "transformer.h.{L}."


def _old_rules(*overrides: HyperRule) -> tuple[HyperRule, ...]:
    """Return the rules that the older decoders share: as many key heads as query heads, no rope.

    `overrides` replace or add to them.
    """
    return hyper_rules.hyper_table(
        hyper_rules.n_kv_heads(hf=""),
        hyper_rules.head_dim(hf=""),
        hyper_rules.norm_eps(1e-5, "layer_norm_epsilon", "layer_norm_epsilon"),
        hyper_rules.activation("gelu"),
        hyper_rules.tied_embeddings(True),
        *NO_ROPE,
        *overrides,
    )


GPT_NEO = names_only_spec(
    "gpt_neo",
    make_tables(
        with_model_rows(
            POSITIONS,
            *norm("attn_norm", _H + "ln_1", bias=True),
            *linear("attn_q", _H + "attn.attention.q_proj", Q, "hidden_size"),
            *linear("attn_k", _H + "attn.attention.k_proj", KV, "hidden_size"),
            *linear("attn_v", _H + "attn.attention.v_proj", KV, "hidden_size"),
            *linear("attn_output", _H + "attn.attention.out_proj", "hidden_size", Q, bias=""),
            *norm("ffn_norm", _H + "ln_2", bias=True),
            *plain_mlp(_H + "mlp.c_fc", _H + "mlp.c_proj"),
            embed="transformer.wte",
            final="transformer.ln_f",
            norm_bias=True,
        )
    ),
    _old_rules(
        hyper_rules.n_layers(None, "num_layers num_hidden_layers"),
        hyper_rules.n_heads(None, "num_heads num_attention_heads"),
        hyper_rules.ffn_size(default_ffn_size),
        hyper_rules.context_length(2048),
        hyper_rules.activation("gelu_tanh", "activation_function", tanh="gelu_new"),
    ),
)

OLMO = names_only_spec(
    "olmo",
    make_tables(
        # Its norms have no weights.
        (
            row
            for row in with_model_rows(*attention(permuted=True), *gated_mlp())
            if "norm" not in row.role
        ),
        hf_more=FUSED,
    ),
    hyper_rules.hyper_table(
        hyper_rules.n_kv_heads(),
        hyper_rules.norm_eps(1e-5, "layer_norm_eps", "layer_norm_epsilon"),
        *hyper_rules.attention_biases(),
        *rope_rules(RopeDefaults()),
        hyper_rules.rope_style("half", permuted=True),
        HyperRule(
            "qkv_clip",
            {"hf": ("clip_qkv",), "gguf": ("{arch}.attention.clamp_kqv",)},
            "positive",
            None,
        ),
    ),
)

# fairseq's decoders: norms before attention and MLP, biases everywhere.


def _fairseq_rows(layer: str, *more: RoleRow, **named: Unpack[WholeNames]) -> Rows:
    """Return the table rows of a model with fairseq's names; `layer` is the prefix of its layers.

    `more` are further rows, `named` the names of the whole-model tensors.
    """
    return with_model_rows(
        *more,
        *norm("attn_norm", layer + "self_attn_layer_norm", bias=True),
        *linear("attn_q", layer + "self_attn.q_proj", Q, "hidden_size", bias=""),
        *linear("attn_k", layer + "self_attn.k_proj", KV, "hidden_size", bias=""),
        *linear("attn_v", layer + "self_attn.v_proj", KV, "hidden_size", bias=""),
        *linear("attn_output", layer + "self_attn.out_proj", "hidden_size", Q, bias=""),
        *norm("ffn_norm", layer + "final_layer_norm", bias=True),
        *plain_mlp(layer + "fc1", layer + "fc2"),
        **named,
    )


XGLM = names_only_spec(
    "xglm",
    make_tables(_fairseq_rows("model.layers.{L}.", final="model.layer_norm", norm_bias=True)),
    _old_rules(
        hyper_rules.hidden_size(1024, "d_model hidden_size"),
        hyper_rules.n_layers(24, "num_layers num_hidden_layers"),
        hyper_rules.n_heads(16, "attention_heads num_attention_heads"),
        hyper_rules.ffn_size(4096, "ffn_dim"),
        hyper_rules.context_length(2048),
        hyper_rules.activation("gelu", "activation_function"),
    ),
)
BIOGPT = names_only_spec(
    "biogpt",
    make_tables(
        _fairseq_rows(
            "biogpt.layers.{L}.",
            RoleRow(
                "position_embd.weight",
                "biogpt.embed_positions.weight",
                ("context_length+2", "hidden_size"),
                layered=False,
            ),
            embed="biogpt.embed_tokens",
            final="biogpt.layer_norm",
            norm_bias=True,
            head="output_projection",
        )
    ),
    _old_rules(
        hyper_rules.context_length(1024),
        hyper_rules.norm_eps(1e-12, "layer_norm_eps", "layer_norm_epsilon"),
    ),
)

_L = "model.layers.{L}."
PERSIMMON = names_only_spec(
    "persimmon",
    make_tables(
        with_model_rows(
            *norm("attn_norm", "input_layernorm", bias=True),
            *fused_rows(""),
            *norm("attn_q_norm", "self_attn.q_layernorm", ("head_dim",), "qk_norm", bias=True),
            *norm("attn_k_norm", "self_attn.k_layernorm", ("head_dim",), "qk_norm", bias=True),
            *linear("attn_output", "self_attn.dense", "hidden_size", Q, bias=""),
            *norm("ffn_norm", "post_attention_layernorm", bias=True),
            *plain_mlp(_L + "mlp.dense_h_to_4h", _L + "mlp.dense_4h_to_h"),
            final="model.final_layernorm",
            norm_bias=True,
        ),
        hf_first=fused_bindings(_L + "self_attn.query_key_value", GROUPED),
    ),
    hyper_rules.hyper_table(
        hyper_rules.n_kv_heads(hf=""),
        hyper_rules.head_dim(hf=""),
        hyper_rules.context_length(16384),
        hyper_rules.norm_eps(1e-5, "layer_norm_eps", "layer_norm_epsilon"),
        hyper_rules.activation("relu2"),
        hyper_rules.qk_norm(True, "qk_layernorm"),
        *rope_rules(RopeDefaults(partial=0.5)),
    ),
)

CODEGEN = names_only_spec(
    "codegen",
    make_tables(
        with_model_rows(
            *norm("attn_norm", _H + "ln_1", bias=True),
            # q, v and k of each of four parts of the heads: not reordered.
            RoleRow(
                "attn_qvk.weight", _H + "attn.qkv_proj.weight", ("3*hidden_size", "hidden_size")
            ),
            *linear("attn_output", _H + "attn.out_proj", "hidden_size", Q),
            *plain_mlp(_H + "mlp.fc_in", _H + "mlp.fc_out"),
            embed="transformer.wte",
            final="transformer.ln_f",
            norm_bias=True,
            head_bias=True,
        )
    ),
    _old_rules(
        hyper_rules.hidden_size(4096, "n_embd hidden_size"),
        hyper_rules.n_layers(28, "n_layer num_hidden_layers"),
        hyper_rules.n_heads(16, "n_head num_attention_heads"),
        hyper_rules.ffn_size(default_ffn_size, "n_inner"),
        hyper_rules.vocab_size(50400),
        hyper_rules.context_length(2048, "n_positions n_ctx"),
        hyper_rules.activation("gelu_tanh", "activation_function", tanh="gelu_new"),
        hyper_rules.tied_embeddings(),
    ),
)
