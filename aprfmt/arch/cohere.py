"""cohere (command-r): one LayerNorm without bias for attention and MLP in parallel.

Q and K pair adjacent elements in the source itself, so GGUF permutes nothing. `logit_scale` is a
factor here (a divisor for granite). Source: docs/reference/architectures.md.
"""

from dataclasses import replace

from aprfmt.arch import hyper_rules, losses
from aprfmt.arch.rope import rope_rules
from aprfmt.arch.rope_hf import RopeDefaults
from aprfmt.arch.spec import MISSING, ArchSpec, BlockSpec, HyperRule
from aprfmt.arch.tensor_rows import FUSED, attention, gated_mlp, make_tables, norm, with_model_rows

_TENSORS, _BINDINGS = make_tables(
    with_model_rows(
        *norm("attn_norm", "input_layernorm"),
        *attention(),
        *norm("attn_q_norm", "self_attn.q_norm", ("n_heads", "head_dim"), "qk_norm"),
        *norm("attn_k_norm", "self_attn.k_norm", ("n_kv_heads", "head_dim"), "qk_norm"),
        *gated_mlp(),
        head_gguf="",
    ),
    hf_more=FUSED,
)


def logit_factor_rule() -> HyperRule:
    """Return the rule that reads and writes the factor on the logits."""
    return HyperRule(
        "logit_scale",
        {"hf": ("logit_scale",), "gguf": ("{arch}.logit_scale",)},
        "float",
        0.0625,
        {"gguf": MISSING, "apr": MISSING},
    )


COHERE = ArchSpec(
    name="cohere",
    hyper=hyper_rules.hyper_table(
        hyper_rules.context_length(8192),
        hyper_rules.norm_eps(1e-5, "layer_norm_eps", "layer_norm_epsilon"),
        hyper_rules.tied_embeddings(True),
        *hyper_rules.attention_biases(),
        # GGUF has no key for q/k-norms: llama.cpp requires them in models with 64 or more layers.
        replace(
            hyper_rules.qk_norm(False, "use_qk_norm"),
            default_in={"gguf": lambda hp: hp["n_layers"] >= 64},
        ),
        hyper_rules.fixed("parallel_residual", True),
        *rope_rules(RopeDefaults(theta=500000.0)),
        hyper_rules.rope_style("interleaved"),
        logit_factor_rule(),
    ),
    tensors=_TENSORS,
    bindings=_BINDINGS,
    block=BlockSpec(
        norm="layer", norm_cast="after_weight", qk_norm="head_layer", rope_cast="table_and_result"
    ),
    lost=(*losses.common_losses(), losses.ONE_BIAS_KEY),
    # llama.cpp's converter writes model_max_length as the context length; the pass does not use it.
    ignored=frozenset({"model_max_length"}),
)
