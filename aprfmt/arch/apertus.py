"""apertus: a plain MLP whose activation (xIELU) has numbers of its own in every layer.

x above zero: alpha_p*x^2 + beta*x; below: alpha_n*(expm1(min(x, eps)) - x) + beta*x. Both alphas
are stored before a softplus, and beta is added to the second. A GGUF has these numbers in its
metadata instead of tensors: no GGUF table. Source: transformers' modeling_apertus, activations.py.
"""

from aprfmt.arch import hyper_rules, losses
from aprfmt.arch.qwen3 import QK_NORMS
from aprfmt.arch.rope import rope_rules
from aprfmt.arch.rope_hf import RopeDefaults
from aprfmt.arch.spec import ArchSpec, BlockSpec
from aprfmt.arch.tensor_rows import (
    FUSED,
    RoleRow,
    attention,
    linear,
    make_tables,
    norm,
    with_model_rows,
)

_TENSORS, _BINDINGS = make_tables(
    with_model_rows(
        *norm("attn_norm", "attention_layernorm"),
        *attention(),
        *QK_NORMS,
        *norm("ffn_norm", "feedforward_layernorm"),
        *linear("ffn_up", "mlp.up_proj", "ffn_size", "hidden_size"),
        *linear("ffn_down", "mlp.down_proj", "hidden_size", "ffn_size"),
        *(RoleRow(f"ffn_act.{x}", f"mlp.act_fn.{x}", ("1",)) for x in ("alpha_n", "alpha_p")),
        *(RoleRow(f"ffn_act.{x}", f"mlp.act_fn.{x}", ()) for x in ("beta", "eps")),
    ),
    hf_more=FUSED,
)

_LLAMA3 = {
    "type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_context_length": 8192,
}  # fmt: skip
APERTUS = ArchSpec(
    name="apertus",
    hyper=hyper_rules.hyper_table(
        hyper_rules.context_length(65536),
        hyper_rules.norm_eps(1e-5),
        hyper_rules.fixed("activation", "xielu"),
        *hyper_rules.attention_biases(),
        hyper_rules.fixed("qk_norm", True),
        *rope_rules(RopeDefaults(theta=12e6, hf_default=_LLAMA3)),
    ),
    tensors=_TENSORS,
    bindings={"hf": _BINDINGS["hf"]},
    block=BlockSpec(qk_norm="head", mlp="plain", activation="xielu"),
    lost=losses.common_losses("xielu"),
    ignored=frozenset({"hidden_act", "mlp_bias"}),
)
