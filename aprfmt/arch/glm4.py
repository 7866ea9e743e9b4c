"""glm4: four norms a layer, one matrix for gate and up, half of each head rotated in pairs.

The source pairs adjacent elements, so GGUF permutes nothing; it keeps gate and up whole, like
phi3. Source: transformers' modeling_glm4; the converter's glm.py, llama.cpp's glm4.cpp.
"""

from aprfmt.arch import hyper_rules, losses
from aprfmt.arch.phi3 import GATE_UP, IN_GATE_UP
from aprfmt.arch.rope import rope_rules
from aprfmt.arch.rope_hf import RopeDefaults
from aprfmt.arch.spec import ArchSpec, Binding, BlockSpec
from aprfmt.arch.tensor_rows import (
    FUSED_QKV,
    LAYER,
    RoleRow,
    attention,
    linear,
    make_tables,
    norm,
    with_model_rows,
)

MLP = (
    *(RoleRow(role, "", ("ffn_size", "hidden_size"), gguf="") for role in GATE_UP),
    *linear("ffn_down", "mlp.down_proj", "hidden_size", "ffn_size"),
)
HF_GATE_UP = (Binding((LAYER + "mlp.gate_up_proj.weight",), GATE_UP, IN_GATE_UP),)
GGUF_GATE_UP = (Binding(("blk.{L}.ffn_up.weight",), GATE_UP, IN_GATE_UP),)

_TENSORS, _BINDINGS = make_tables(
    with_model_rows(
        *norm("attn_norm", "input_layernorm"),
        *attention(out_bias=None),
        *norm("post_attention_norm", "post_self_attn_layernorm"),
        *norm("ffn_norm", "post_attention_layernorm"),
        *MLP,
        *norm("post_ffw_norm", "post_mlp_layernorm"),
    ),
    hf_first=HF_GATE_UP,
    hf_more=FUSED_QKV,
    gguf_first=GGUF_GATE_UP,
)

HYPER = hyper_rules.hyper_table(
    hyper_rules.n_kv_heads(2),
    hyper_rules.head_dim(128),
    hyper_rules.context_length(131072),
    hyper_rules.norm_eps(1.5625e-7),
    hyper_rules.flag("attention_bias", True, "attention_bias", present=("attn_q.bias",)),
    *rope_rules(RopeDefaults(partial=0.5)),
    hyper_rules.rope_style("interleaved"),
)

GLM4 = ArchSpec(
    name="glm4",
    hyper=HYPER,
    tensors=_TENSORS,
    bindings=_BINDINGS,
    block=BlockSpec(placement="sandwich"),
    lost=losses.common_losses(partial=True),
)
