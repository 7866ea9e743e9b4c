"""qwen2-moe: qwen2 with experts, and a shared expert that has its own sigmoid gate.

Source: docs/reference/architectures.md; transformers' modeling_qwen2_moe.
"""

from collections.abc import Mapping

from aprfmt.arch import hyper_rules, losses, moe
from aprfmt.arch.layout_steps import Reshaped
from aprfmt.arch.qwen2 import MAX_WINDOW_LAYERS
from aprfmt.arch.sliding_window import IGNORED_WINDOW, Window, window_every_layer, window_rules
from aprfmt.arch.spec import ArchSpec, BlockSpec, Facts, Loss, PerLayer
from aprfmt.arch.tensor_rows import (
    FUSED,
    RoleRow,
    attention,
    experts,
    linear,
    make_tables,
    norm,
    with_model_rows,
)
from aprfmt.arch.value_checks import whole_number
from aprfmt.base.protocols import Value

EXPERTS, EXPERT_BINDINGS = experts()
ROUTER = RoleRow(
    "ffn_gate_inp.weight", "mlp.gate.weight", ("n_experts", "hidden_size"), "moe_layers"
)

# The MLPs of layers without experts; GGUF has no names for them in these architectures.
DENSE = tuple(
    RoleRow(f"ffn_{name}.weight", f"mlp.{name}_proj.weight", shape, "!moe_layers", gguf="")
    for name, shape in (
        ("gate", ("ffn_size", "hidden_size")),
        ("up", ("ffn_size", "hidden_size")),
        ("down", ("hidden_size", "ffn_size")),
    )
)
DENSE_LOSS = Loss(
    "gguf",
    "moe_layers",
    lambda hp: not all(hp["moe_layers"]),
    "GGUF has no names for layers without experts here, and llama.cpp expects none",
)


def shared_expert_rows(
    module: str, needs: str = "moe_layers", bias: str | None = None
) -> tuple[RoleRow, ...]:
    """Return the table rows of gate, up and down of the shared expert, stored below `module`.

    `needs` is the condition for a layer to have it, `bias` that of biases (None: none).
    """
    inside, outside = "shared_ffn_size", "hidden_size"
    return (
        *linear("ffn_gate_shexp", f"{module}.gate_proj", inside, outside, needs, bias=bias),
        *linear("ffn_up_shexp", f"{module}.up_proj", inside, outside, needs, bias=bias),
        *linear("ffn_down_shexp", f"{module}.down_proj", outside, inside, needs, bias=bias),
    )


SHARED_GATE = RoleRow(
    "ffn_gate_inp_shexp.weight", "mlp.shared_expert_gate.weight", ("1", "hidden_size"),
    "moe_layers", gguf_steps=(Reshaped(("1", "hidden_size"), ("hidden_size",)),),
)  # fmt: skip

_TENSORS, _BINDINGS = make_tables(
    with_model_rows(
        *norm("attn_norm", "input_layernorm"),
        *attention(out_bias=None),
        *norm("ffn_norm", "post_attention_layernorm"),
        *DENSE,
        ROUTER,
        *EXPERTS,
        SHARED_GATE,
        *shared_expert_rows("mlp.shared_expert"),
    ),
    hf_first=EXPERT_BINDINGS,
    hf_more=FUSED,
)


def _window_layers(facts: Facts | None, hp: Mapping[str, Value]) -> PerLayer:
    """Return one boolean a layer: a window in every other layer below max_window_layers.

    As transformers does.
    """
    found = None if facts is None else facts.first("max_window_layers")
    last = MAX_WINDOW_LAYERS if found is None else whole_number(*found)
    return tuple((i + 1) % 2 == 1 and i < last for i in range(hp["n_layers"]))


QWEN2_MOE = ArchSpec(
    name="qwen2_moe",
    hyper=hyper_rules.hyper_table(
        hyper_rules.n_kv_heads(16),
        hyper_rules.context_length(32768),
        hyper_rules.tied_embeddings(shown=False),
        hyper_rules.flag("attention_bias", True, "qkv_bias", present=("attn_q.bias",)),
        *window_rules(Window(layers=_window_layers, gguf_layers=window_every_layer, switch=True)),
        *moe.expert_count_rules(60, 4),
        moe.expert_size_rule(hf_default=1408),
        hyper_rules.size(
            "shared_ffn_size",
            "shared_expert_intermediate_size",
            "expert_shared_feed_forward_length",
            default=lambda hp: hp["ffn_size"],
            hf_default=5632,
        ),
        moe.sparse_layers_rule(),
        moe.norm_topk_rule(False, gguf=False),
    ),
    tensors=_TENSORS,
    bindings=_BINDINGS,
    block=BlockSpec(shared_expert="gated"),
    lost=(*losses.common_losses(), IGNORED_WINDOW, DENSE_LOSS, moe.norm_topk_loss(False)),
)
