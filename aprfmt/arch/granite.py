"""granite 3: llama with factors on embedding, scores, block outputs and logits.

`logits_scaling` and GGUF's `logit_scale` are divisors here (a factor for cohere). Source:
docs/architectures.md; llama.cpp's granite.cpp.
"""

from dataclasses import replace

from aprfmt.arch import losses, rules
from aprfmt.arch.rope_gguf import ROPE_TENSORS
from aprfmt.arch.rows import FUSED, attention, gated_mlp, norm, tables, whole
from aprfmt.arch.spec import MISSING, ArchSpec, BlockSpec, HyperRule

_BEFORE, _AFTER = whole()
_TENSORS, _BINDINGS = tables(
    (
        *_BEFORE,
        *norm("attn_norm", "input_layernorm"),
        *attention(permuted=True),
        *norm("ffn_norm", "post_attention_layernorm"),
        *gated_mlp(bias="mlp_bias"),
        *_AFTER,
    ),
    hf_more=FUSED,
)


def _factor(name: str, hf: str, gguf: str) -> HyperRule:
    keys = {"hf": (hf,), "gguf": (f"{{arch}}.{gguf}",)}
    return HyperRule(name, keys, "float", 1.0, {"apr": MISSING})


GRANITE = ArchSpec(
    name="granite",
    called={
        "hf": ("granite", "GraniteForCausalLM"),
        "gguf": ("granite",),
        "apr": ("granite",),
    },
    hyper=rules.hyper_table(
        *rules.attention_biases(),
        rules.mlp_bias(),
        rules.rope_style("half", permuted=True),
        replace(
            rules.attn_scale(gguf_default=rules.plain_scale),
            keys={"hf": ("attention_multiplier",), "gguf": ("{arch}.attention.scale",)},
            default=1.0,
            default_in={"gguf": rules.plain_scale, "apr": MISSING},
            write={},
        ),
        _factor("embedding_scale", "embedding_multiplier", "embedding_scale"),
        _factor("residual_scale", "residual_multiplier", "residual_scale"),
        HyperRule(
            "logit_scale",
            {"hf": ("logits_scaling",), "gguf": ("{arch}.logit_scale",)},
            "float",
            1.0,
            {"gguf": MISSING, "apr": MISSING},
            inverse_in=("hf", "gguf"),
        ),
    ),
    tensors=_TENSORS,
    bindings=_BINDINGS,
    block=BlockSpec(),
    lost=(*losses.common_losses(), losses.ONE_BIAS_KEY),
    derived=ROPE_TENSORS,
)
