"""stablelm: LayerNorm, a quarter of each head rotated; q/k-norms with one weight row per head.

Source: docs/reference/architectures.md; transformers' modeling_stablelm.
"""

from aprfmt.arch import hyper_rules, losses
from aprfmt.arch.joining_steps import Stacked
from aprfmt.arch.rope import rope_rules
from aprfmt.arch.rope_gguf import ROPE_TENSORS
from aprfmt.arch.rope_hf import RopeDefaults
from aprfmt.arch.spec import ArchSpec, Binding, BlockSpec
from aprfmt.arch.tensor_rows import (
    FUSED,
    LAYER,
    RoleRow,
    attention,
    gated_mlp,
    make_tables,
    with_model_rows,
)

_HEADS = {"q": "n_heads", "k": "n_kv_heads"}
_TENSORS, _BINDINGS = make_tables(
    with_model_rows(
        RoleRow("attn_norm.weight", "input_layernorm.weight", ("hidden_size",)),
        RoleRow("attn_norm.bias", "input_layernorm.bias", ("hidden_size",)),
        *attention(out_bias=None),
        *(
            RoleRow(f"attn_{x}_norm.weight", "", (heads, "head_dim"), "qk_norm")
            for x, heads in _HEADS.items()
        ),
        *(
            RoleRow(
                f"ffn_norm.{part}",
                f"post_attention_layernorm.{part}",
                ("hidden_size",),
                "!parallel_residual",
            )
            for part in ("weight", "bias")
        ),
        *gated_mlp(),
        norm_bias=True,
    ),
    hf_first=tuple(
        Binding(
            (f"{LAYER}self_attn.{x}_layernorm.norms.{{E}}.weight",),
            (f"attn_{x}_norm.weight",),
            (Stacked(heads),),
        )
        for x, heads in _HEADS.items()
    ),
    hf_more=FUSED,
)

STABLELM = ArchSpec(
    name="stablelm",
    hyper=hyper_rules.hyper_table(
        hyper_rules.n_kv_heads(32),
        hyper_rules.context_length(4096),
        hyper_rules.norm_eps(1e-5, "layer_norm_eps", "layer_norm_epsilon"),
        hyper_rules.tied_embeddings(shown=False),
        hyper_rules.flag("attention_bias", False, "use_qkv_bias", present=("attn_q.bias",)),
        hyper_rules.qk_norm(False, "qk_layernorm"),
        hyper_rules.flag(
            "parallel_residual",
            False,
            "use_parallel_residual",
            gguf="use_parallel_residual",
            absent=("ffn_norm.weight", "ffn_norm.bias"),
        ),
        *rope_rules(RopeDefaults(partial=0.25)),
    ),
    tensors=_TENSORS,
    bindings=_BINDINGS,
    block=BlockSpec(norm="layer", qk_norm="head_layer"),
    lost=losses.common_losses(partial=True),
    derived=ROPE_TENSORS,
)
