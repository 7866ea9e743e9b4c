"""phi-1, 1.5 and 2: LayerNorm, attention and MLP in parallel, partial rope, biases everywhere.

Source: docs/reference/architectures.md; transformers' modeling_phi.
"""

from aprfmt.arch import hyper_rules, losses
from aprfmt.arch.joining_steps import Split
from aprfmt.arch.rope import rope_rules
from aprfmt.arch.rope_hf import RopeDefaults
from aprfmt.arch.spec import ArchSpec, Binding, BlockSpec, Loss
from aprfmt.arch.tensor_rows import (
    KV,
    Q,
    RoleRow,
    attention,
    make_tables,
    norm,
    plain_mlp,
    with_model_rows,
)

# LayerNorms of each query and key head, one weight for all heads. GGUF has no names for them.
_QK_NORMS = tuple(
    RoleRow(
        f"attn_{x}_norm.{part}",
        f"self_attn.{x}_layernorm.{part}",
        ("head_dim",),
        "qk_norm",
        gguf="",
    )
    for x in "qk"
    for part in ("weight", "bias")
)
_TENSORS, _BINDINGS = make_tables(
    with_model_rows(
        *norm("attn_norm", "input_layernorm", bias=True),
        *attention(bias="", out_bias="", out="dense"),
        *_QK_NORMS,
        *plain_mlp("mlp.fc1", "mlp.fc2"),
        final="model.final_layernorm",
        norm_bias=True,
        head_bias=True,
    ),
    gguf_more=tuple(
        Binding(
            (f"blk.{{L}}.attn_qkv.{part}",),
            tuple(f"attn_{x}.{part}" for x in "qkv"),
            (Split((Q, KV, KV)),),
        )
        for part in ("weight", "bias")
    ),
)

PHI2 = ArchSpec(
    name="phi2",
    hyper=hyper_rules.hyper_table(
        hyper_rules.norm_eps(1e-5, "layer_norm_eps", "layer_norm_epsilon"),
        hyper_rules.activation("gelu_tanh", tanh="gelu_new"),
        hyper_rules.tied_embeddings(shown=False),
        hyper_rules.fixed("attention_bias", True),
        hyper_rules.fixed("attention_out_bias", True),
        hyper_rules.fixed("mlp_bias", True),
        hyper_rules.qk_norm(False, "qk_layernorm"),
        hyper_rules.fixed("parallel_residual", True),
        *rope_rules(RopeDefaults(partial=0.5)),
    ),
    tensors=_TENSORS,
    bindings=_BINDINGS,
    block=BlockSpec(norm="layer", qk_norm="head_layer", mlp="plain", activation_cast="steps"),
    lost=(
        *losses.common_losses("gelu_tanh", partial=True),
        Loss(
            "gguf",
            "qk_norm",
            lambda hp: hp["qk_norm"],
            "GGUF has no names for phi's q/k-norms, and llama.cpp computes none",
        ),
    ),
)
