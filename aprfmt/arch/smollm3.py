"""smollm3: llama without rope in some layers (every fourth, unless the config lists them).

GGUF has no key for the list: llama.cpp skips rope in every fourth layer. Source:
docs/reference/architectures.md; transformers' configuration_smollm3.
"""

from aprfmt.arch import hyper_rules, losses
from aprfmt.arch.nope_layers import all_but_every, rope_layers_rule, rotating_layers
from aprfmt.arch.rope import rope_rules
from aprfmt.arch.rope_gguf import ROPE_TENSORS
from aprfmt.arch.rope_hf import RopeDefaults
from aprfmt.arch.sliding_window import IGNORED_WINDOW, Window, window_every_layer, window_rules
from aprfmt.arch.spec import ArchSpec, BlockSpec, Facts, Loss, Params, PerLayer
from aprfmt.arch.tensor_rows import FUSED, attention, gated_mlp, make_tables, norm, with_model_rows

_TENSORS, _BINDINGS = make_tables(
    with_model_rows(
        *norm("attn_norm", "input_layernorm"),
        *attention(permuted=True),
        *norm("ffn_norm", "post_attention_layernorm"),
        *gated_mlp(bias="mlp_bias"),
    ),
    hf_more=FUSED,
)


def _default_window_layers(facts: Facts | None, hp: Params) -> PerLayer:
    """Return one boolean a layer: a window in layers without rope.

    That is transformers' default for an absent layer_types.
    """
    return tuple(not rotated for rotated in rotating_layers(facts, hp))


SMOLLM3 = ArchSpec(
    name="smollm3",
    hyper=hyper_rules.hyper_table(
        hyper_rules.n_kv_heads(4),
        hyper_rules.context_length(32768),
        hyper_rules.tied_embeddings(True),
        *hyper_rules.attention_biases(),
        hyper_rules.mlp_bias(),
        *rope_rules(RopeDefaults(theta=2e6)),
        hyper_rules.rope_style("half", permuted=True),
        rope_layers_rule(),
        *window_rules(
            Window(
                layers=_default_window_layers,
                gguf_layers=window_every_layer,
                switch=True,
                listed_wins=True,
            )
        ),
    ),
    tensors=_TENSORS,
    bindings=_BINDINGS,
    block=BlockSpec(),
    lost=(
        *losses.common_losses(),
        losses.ONE_BIAS_KEY,
        IGNORED_WINDOW,
        Loss(
            "gguf",
            "rope_layers",
            lambda hp: hp["rope_layers"] != all_but_every(hp),
            "GGUF has no key for the list: llama.cpp rotates in all layers but every fourth",
            assumed=True,
        ),
    ),
    ignored=frozenset({"max_window_layers"}),
    derived=ROPE_TENSORS,
)
