"""cohere2 (command-r7b): cohere without q/k-norms; only windowed layers have rope.

All layers but every fourth are windowed. Source: transformers' modeling_cohere2; the converter's
command_r.py, llama.cpp's cohere2.cpp.
"""

from collections.abc import Mapping

from aprfmt.arch import hyper_rules, losses
from aprfmt.arch.cohere import logit_factor_rule
from aprfmt.arch.gemma2 import pattern_loss
from aprfmt.arch.sliding_window import Window, rotated_windows, window_period, window_rules
from aprfmt.arch.spec import MISSING, ArchSpec, BlockSpec, Facts, Loss, PerLayer
from aprfmt.arch.tensor_rows import FUSED, attention, gated_mlp, make_tables, norm, with_model_rows
from aprfmt.arch.value_checks import whole_number
from aprfmt.base.protocols import Value


def _window_layers(facts: Facts | None, hp: Mapping[str, Value]) -> PerLayer:
    """Return one boolean a layer: a window in all but every fourth.

    The old key sliding_window_pattern may give another period.
    """
    found = None if facts is None else facts.first("sliding_window_pattern")
    return window_period(4 if found is None else whole_number(*found, 1))(facts, hp)


_TENSORS, _BINDINGS = make_tables(
    with_model_rows(
        *norm("attn_norm", "input_layernorm"), *attention(), *gated_mlp(), head_gguf=""
    ),
    hf_more=FUSED,
)

COHERE2 = ArchSpec(
    name="cohere2",
    hyper=hyper_rules.hyper_table(
        hyper_rules.context_length(8192),
        hyper_rules.norm_eps(1e-5, "layer_norm_eps", "layer_norm_epsilon"),
        hyper_rules.tied_embeddings(True),
        *hyper_rules.attention_biases(),
        hyper_rules.fixed("parallel_residual", True),
        hyper_rules.rope_style("interleaved"),
        *window_rules(Window(4096, MISSING, _window_layers, stated=True)),
        rotated_windows(without=False),
        logit_factor_rule(),
    ),
    tensors=_TENSORS,
    bindings=_BINDINGS,
    block=BlockSpec(norm="layer", norm_cast="after_weight", rope_cast="table_and_result"),
    lost=(
        *losses.common_losses(),
        losses.ONE_BIAS_KEY,
        pattern_loss(4),
        Loss(
            "gguf",
            "attention_bias",
            lambda hp: hp["attention_bias"],
            "llama.cpp has no attention biases here and refuses the file",
        ),
    ),
    # Of a block that is always the same, and of the layers' order.
    ignored=frozenset(
        "rotary_pct order_of_interleaved_layers use_embedding_sharing layer_switch "
        "position_embedding_type use_gated_activation use_parallel_block "
        "use_parallel_embedding use_qk_norm".split()
    ),
)
