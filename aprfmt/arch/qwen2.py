"""qwen2 and 2.5: llama with biases on q, k, v and optional windows in the upper layers.

Source: docs/reference/architectures.md.
"""

from collections.abc import Callable, Mapping

from aprfmt.arch import hyper_rules, losses
from aprfmt.arch.rope_gguf import ROPE_TENSORS
from aprfmt.arch.sliding_window import IGNORED_WINDOW, Window, window_every_layer, window_rules
from aprfmt.arch.spec import ArchSpec, BlockSpec, Facts, PerLayer
from aprfmt.arch.tensor_rows import FUSED, attention, gated_mlp, make_tables, norm, with_model_rows
from aprfmt.arch.value_checks import whole_number
from aprfmt.base.protocols import Value

MAX_WINDOW_LAYERS = 28  # transformers' default


def upper_layers(usual: int) -> Callable[[Facts | None, Mapping[str, Value]], PerLayer]:
    """Return a function that gives one boolean a layer: True from max_window_layers on.

    `usual` is the default of that key.
    """

    def read_layers(facts: Facts | None, hp: Mapping[str, Value]) -> PerLayer:
        """Return one boolean per layer: its number is at least config.json's max_window_layers.

        These layers may have a window. `usual` is the first of them without that key.
        """
        found = None if facts is None else facts.first("max_window_layers")
        first = usual if found is None else whole_number(*found)
        return tuple(i >= first for i in range(hp["n_layers"]))

    return read_layers


WINDOW = Window(layers=upper_layers(MAX_WINDOW_LAYERS), gguf_layers=window_every_layer, switch=True)

_TENSORS, _BINDINGS = make_tables(
    with_model_rows(
        *norm("attn_norm", "input_layernorm"),
        *attention(bias="attention_bias", out_bias=None),
        *norm("ffn_norm", "post_attention_layernorm"),
        *gated_mlp(),
    ),
    hf_more=FUSED,
)

QWEN2 = ArchSpec(
    name="qwen2",
    hyper=hyper_rules.hyper_table(
        hyper_rules.context_length(32768),
        hyper_rules.flag("attention_bias", True, present=("attn_q.bias",)),
        *window_rules(WINDOW),
    ),
    tensors=_TENSORS,
    bindings=_BINDINGS,
    block=BlockSpec(),
    lost=(*losses.common_losses(), IGNORED_WINDOW),
    ignored=frozenset({"use_mrope"}),
    derived=ROPE_TENSORS,
)
