"""glm: glm4 without the norms after attention and MLP.

GGUF permutes nothing and keeps gate and up whole, like phi3; files made of the older ChatGLM code
keep q, k and v whole, too. Source: transformers' modular_glm and configuration_glm; the
converter's chatglm.py, llama.cpp's chatglm.cpp.
"""

from aprfmt.arch import losses
from aprfmt.arch.fused_projection import GGUF_FUSED
from aprfmt.arch.glm4 import GGUF_GATE_UP, HF_GATE_UP, HYPER, MLP
from aprfmt.arch.spec import ArchSpec, BlockSpec
from aprfmt.arch.tensor_rows import FUSED_QKV, attention, make_tables, norm, with_model_rows

_TENSORS, _BINDINGS = make_tables(
    with_model_rows(
        *norm("attn_norm", "input_layernorm"),
        *attention(out_bias=None),
        *norm("ffn_norm", "post_attention_layernorm"),
        *MLP,
    ),
    hf_first=HF_GATE_UP,
    hf_more=FUSED_QKV,
    gguf_first=GGUF_GATE_UP,
    gguf_more=GGUF_FUSED,
)

GLM = ArchSpec(
    name="glm",
    hyper=HYPER,
    tensors=_TENSORS,
    bindings=_BINDINGS,
    block=BlockSpec(),
    lost=losses.common_losses(partial=True),
)
