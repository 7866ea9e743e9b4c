"""glm: llama with one matrix for gate and up, and half of each head rotated in adjacent pairs.

GGUF permutes nothing and keeps gate and up whole, like phi3; files made of the older ChatGLM code
keep q, k and v whole, too. Source: transformers' modular_glm and configuration_glm; the
converter's chatglm.py, llama.cpp's chatglm.cpp.
"""

from aprfmt.arch import hyper_rules, losses
from aprfmt.arch.joining_steps import Split
from aprfmt.arch.phi3 import GATE_UP, IN_GATE_UP
from aprfmt.arch.rope import rope_rules
from aprfmt.arch.rope_hf import RopeDefaults
from aprfmt.arch.spec import ArchSpec, Binding, BlockSpec
from aprfmt.arch.tensor_rows import (
    FUSED,
    KV,
    LAYER,
    Q,
    RoleRow,
    attention,
    linear,
    make_tables,
    norm,
    with_model_rows,
)

_TENSORS, _BINDINGS = make_tables(
    with_model_rows(
        *norm("attn_norm", "input_layernorm"),
        *attention(out_bias=None),
        *norm("ffn_norm", "post_attention_layernorm"),
        *(RoleRow(role, "", ("ffn_size", "hidden_size"), gguf="") for role in GATE_UP),
        *linear("ffn_down", "mlp.down_proj", "hidden_size", "ffn_size"),
    ),
    hf_first=(Binding((LAYER + "mlp.gate_up_proj.weight",), GATE_UP, IN_GATE_UP),),
    hf_more=FUSED,
    gguf_first=(Binding(("blk.{L}.ffn_up.weight",), GATE_UP, IN_GATE_UP),),
    gguf_more=tuple(
        Binding(
            (f"blk.{{L}}.attn_qkv.{suffix}",),
            tuple(f"attn_{x}.{suffix}" for x in "qkv"),
            (Split((Q, KV, KV)),),
        )
        for suffix in ("weight", "bias")
    ),
)

GLM = ArchSpec(
    name="glm",
    hyper=hyper_rules.hyper_table(
        hyper_rules.n_kv_heads(2),
        hyper_rules.head_dim(128),
        hyper_rules.context_length(131072),
        hyper_rules.norm_eps(1.5625e-7),
        hyper_rules.flag("attention_bias", True, "attention_bias", present=("attn_q.bias",)),
        *rope_rules(RopeDefaults(partial=0.5)),
        hyper_rules.rope_style("interleaved"),
    ),
    tensors=_TENSORS,
    bindings=_BINDINGS,
    block=BlockSpec(),
    lost=losses.common_losses(partial=True),
)
