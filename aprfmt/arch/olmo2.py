"""olmo2 and olmo3: norms after attention and MLP, q/k-norms over the whole projection.

olmo3 adds windows (three of four layers) and scales its rope in the other layers only; GGUF calls
both `olmo2`. Source: docs/reference/architectures.md; the converter's olmo.py, llama.cpp's olmo2
graph.
"""

from collections.abc import Collection, Mapping

from aprfmt.arch import hyper_rules, losses
from aprfmt.arch.gemma2 import pattern_loss
from aprfmt.arch.rope import rope_rules
from aprfmt.arch.rope_hf import RopeDefaults
from aprfmt.arch.sliding_window import Window, window_period, window_rules
from aprfmt.arch.spec import ArchSpec, BlockSpec, Loss
from aprfmt.arch.tensor_rows import (
    FUSED,
    KV,
    Q,
    attention,
    gated_mlp,
    make_tables,
    norm,
    with_model_rows,
)
from aprfmt.base.protocols import Value

_TENSORS, _BINDINGS = make_tables(
    with_model_rows(
        *attention(),
        *norm("attn_q_norm", "self_attn.q_norm", (Q,)),
        *norm("attn_k_norm", "self_attn.k_norm", (KV,)),
        *norm("post_attention_norm", "post_attention_layernorm"),
        *gated_mlp(),
        *norm("post_ffw_norm", "post_feedforward_layernorm"),
    ),
    hf_more=FUSED,
)
_BLOCK = BlockSpec(norm_cast="after_weight", placement="post", qk_norm="width", rope_cast="result")
_HYPER = (
    hyper_rules.norm_eps(1e-5),
    hyper_rules.tied_embeddings(shown=False),
    *hyper_rules.attention_biases(),
    hyper_rules.fixed("qk_norm", True),
)

OLMO2 = ArchSpec(
    name="olmo2",
    hyper=hyper_rules.hyper_table(*_HYPER),
    tensors=_TENSORS,
    bindings=_BINDINGS,
    block=_BLOCK,
    lost=(*losses.common_losses(), losses.ONE_BIAS_KEY),
)


def _has_window_key(names: Collection[str], values: Mapping[str, Value]) -> bool:
    """Return whether a GGUF has a window's size: the model is olmo3.

    `names` (the tensors') is not used: every evidence function is given both.
    """
    return bool(values.get("olmo2.attention.sliding_window"))


OLMO3 = ArchSpec(
    name="olmo3",
    hyper=hyper_rules.hyper_table(
        *_HYPER,
        *rope_rules(RopeDefaults(theta=500000.0, layers="full", nested=True)),
        *window_rules(Window(4096, 4096, window_period(4))),
    ),
    tensors=_TENSORS,
    bindings=_BINDINGS,
    block=_BLOCK,
    lost=(
        *losses.common_losses(),
        losses.ONE_BIAS_KEY,
        pattern_loss(4),
        Loss(
            "gguf",
            "rope_theta_local",
            lambda hp: hp["rope_theta_local"] is not None or hp["rope_scaling_layers"] == "all",
            "llama.cpp rotates olmo3's windowed layers by the same base, unscaled",
        ),
    ),
    evidence=_has_window_key,
)
