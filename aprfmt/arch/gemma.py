"""gemma 1, and what gemma 2 and 3 share with it: (1 + w) norms, scaled embeddings, tanh-gelu gates.

GGUF stores every norm weight with the 1 added. Source: docs/reference/architectures.md; the
converter's gemma.py; llama.cpp's gemma graphs.
"""

from aprfmt.arch import hyper_rules, losses
from aprfmt.arch.layout_steps import Added
from aprfmt.arch.spec import ArchSpec, BlockSpec, HyperRule, Loss
from aprfmt.arch.tensor_rows import (
    FUSED,
    RoleRow,
    attention,
    gated_mlp,
    make_tables,
    norm,
    with_model_rows,
)

PLUS_ONE = (Added(1.0),)
NO_BIASES = Loss(
    "gguf",
    "attention_bias",
    lambda hp: hp["attention_bias"] or hp["attention_out_bias"],
    "llama.cpp has no attention biases here and refuses the file",
)


def gemma_norm_rows(
    role: str, hf: str, size: tuple[str, ...] = ("hidden_size",)
) -> tuple[RoleRow, ...]:
    """Return the tensor-table row of a norm that GGUF stores as 1 + w, as a tuple of one.

    `role` and `hf` are its role and its name in Hugging Face files, without ".weight". `size` is
    its shape.
    """
    return norm(role, hf, size, gguf_steps=PLUS_ONE)


def embedding_scale_rule() -> HyperRule:
    """Return the rule for the factor on embeddings: sqrt(hidden_size), which no key changes.

    It is rounded to the weights' dtype when used.
    """
    return hyper_rules.fixed("embedding_scale", lambda hp: float(hp["hidden_size"]) ** 0.5)


_TENSORS, _BINDINGS = make_tables(
    with_model_rows(
        *gemma_norm_rows("attn_norm", "input_layernorm"),
        *attention(),
        *gemma_norm_rows("ffn_norm", "post_attention_layernorm"),
        *gated_mlp(),
        head_gguf="",
        norm_steps=PLUS_ONE,
    ),
    hf_more=FUSED,
)

GEMMA = ArchSpec(
    name="gemma",
    hyper=hyper_rules.hyper_table(
        hyper_rules.head_dim(256),
        hyper_rules.context_length(8192),
        # In gemma 1 configs `gelu` means the tanh form.
        hyper_rules.activation("gelu_tanh", names={"gelu": "gelu_tanh"}),
        hyper_rules.tied_embeddings(True),
        *hyper_rules.attention_biases(),
        embedding_scale_rule(),
    ),
    tensors=_TENSORS,
    bindings=_BINDINGS,
    block=BlockSpec(norm_offset=1, norm_cast="after_weight"),
    lost=(*losses.common_losses("gelu_tanh"), losses.ONE_BIAS_KEY, NO_BIASES),
    ignored=frozenset({"hidden_activation", "use_bidirectional_attention"}),
)
