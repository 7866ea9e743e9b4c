"""Newer models by their names: bitnet, eurobert.

What converting, comparing, checking and quantizing need; no forward pass. Sources:
transformers' modeling files; the gguf package's name map.
"""

from aprfmt.arch import hyper_rules
from aprfmt.arch.rope import rope_rules
from aprfmt.arch.rope_hf import RopeDefaults
from aprfmt.arch.spec import Loss
from aprfmt.arch.spec_builders import names_only_spec
from aprfmt.arch.tensor_rows import (
    FUSED,
    RoleRow,
    attention,
    gated_mlp,
    make_tables,
    model_rows,
    norm,
    with_model_rows,
)

_BEFORE, _AFTER = model_rows()
_NORMS = norm("attn_norm", "input_layernorm"), norm("ffn_norm", "post_attention_layernorm")

BITNET = names_only_spec(
    "bitnet",
    make_tables(
        with_model_rows(
            *_NORMS[0],
            *attention(),
            *norm("attn_sub_norm", "self_attn.attn_sub_norm"),
            *_NORMS[1],
            *gated_mlp(),
            *norm("ffn_sub_norm", "mlp.ffn_sub_norm", ("ffn_size",)),
            head_gguf="",
        ),
        hf_more=FUSED,
    ),
    hyper_rules.hyper_table(
        hyper_rules.n_kv_heads(5),
        hyper_rules.context_length(2048),
        hyper_rules.norm_eps(1e-5),
        hyper_rules.activation("relu2"),
        *hyper_rules.attention_biases(),
        *rope_rules(RopeDefaults(theta=500000.0)),
    ),
    lost=(
        Loss(
            "gguf",
            "activation",
            lambda hp: hp["activation"] != "silu",
            "the converter writes no key for it: llama.cpp computes silu",
        ),
    ),
)

EUROBERT = names_only_spec(
    "eurobert",
    make_tables(
        (
            *_BEFORE,
            *_NORMS[0],
            *attention(bias=None, out_bias=None),
            *_NORMS[1],
            *gated_mlp(),
            *(row for row in _AFTER if row.role != "output.weight"),
            RoleRow("output.weight", "lm_head.weight", ("vocab_size", "hidden_size"),
                "optional", gguf="", layered=False),
        ),
        hf_more=FUSED,
    ),
    hyper_rules.hyper_table(
        hyper_rules.context_length(8192),
        hyper_rules.norm_eps(1e-5),
        hyper_rules.fixed("tied_embeddings", True),
        *rope_rules(RopeDefaults(theta=250000.0)),
    ),
)  # fmt: skip
