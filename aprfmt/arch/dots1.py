"""dots1: deepseek v3's experts, grouped queries with a norm a head, windows in late layers.

Source: transformers' modeling_dots1; the converter's dots1.py; llama.cpp has no windows here.
"""

from collections.abc import Mapping

from aprfmt.arch import hyper_rules, losses, moe
from aprfmt.arch.deepseek import EXPERTS_HF, ROUTER_BIAS, routed_scale_rule, sigmoid_router_rule
from aprfmt.arch.mla import dense_first_rule, expert_groups_rule, shared_experts_rule
from aprfmt.arch.qwen2_moe import EXPERT_BINDINGS, EXPERTS, ROUTER, shared_expert_rows
from aprfmt.arch.qwen3 import QK_NORMS
from aprfmt.arch.sliding_window import IGNORED_WINDOW, Window, window_every_layer, window_rules
from aprfmt.arch.spec import ArchSpec, BlockSpec, Facts, Loss, PerLayer
from aprfmt.arch.tensor_rows import FUSED, attention, gated_mlp, make_tables, norm, with_model_rows
from aprfmt.arch.value_checks import whole_number
from aprfmt.base.protocols import Value

_LAST = 62  # max_window_layers that transformers assumes


def _window_layers(facts: Facts | None, hp: Mapping[str, Value]) -> PerLayer:
    """Return one boolean a layer: a window from max_window_layers on."""
    found = None if facts is None else facts.first("max_window_layers")
    first = _LAST if found is None else whole_number(*found)
    return tuple(i >= first for i in range(hp["n_layers"]))


_TENSORS, _BINDINGS = make_tables(
    with_model_rows(
        *norm("attn_norm", "input_layernorm"),
        *attention(),
        *QK_NORMS,
        *norm("ffn_norm", "post_attention_layernorm"),
        *gated_mlp(needs="!moe_layers"),
        ROUTER,
        ROUTER_BIAS,
        *EXPERTS,
        *shared_expert_rows("mlp.shared_experts", "moe_layers & shared_ffn_size"),
    ),
    hf_first=EXPERT_BINDINGS,
    hf_more=FUSED,
)

DOTS1 = ArchSpec(
    name="dots1",
    hyper=hyper_rules.hyper_table(
        hyper_rules.n_kv_heads(32),
        hyper_rules.tied_embeddings(shown=False),
        *hyper_rules.attention_biases(),
        hyper_rules.fixed("qk_norm", True),
        *window_rules(Window(4096, None, _window_layers, gguf_layers=window_every_layer)),
        *moe.expert_count_rules(128, 6, EXPERTS_HF),
        moe.expert_size_rule(hf_default=1408),
        shared_experts_rule("n_shared_experts"),
        dense_first_rule(0),
        moe.norm_topk_rule(False),
        routed_scale_rule(1.0),
        expert_groups_rule("n_expert_groups", "n_group", "expert_group_count", 1),
        expert_groups_rule("n_expert_groups_used", "topk_group", "expert_group_used_count", 1),
        sigmoid_router_rule(),
    ),
    tensors=_TENSORS,
    bindings=_BINDINGS,
    block=BlockSpec(qk_norm="head", shared_expert="plain", router_cast="none"),
    lost=(
        *losses.common_losses(),
        losses.ONE_BIAS_KEY,
        IGNORED_WINDOW,
        Loss(
            "gguf",
            "attention_bias",
            lambda hp: hp["attention_bias"],
            "llama.cpp has no attention biases here and refuses the file",
        ),
        Loss(
            "gguf",
            "n_expert_groups",
            lambda hp: hp["n_expert_groups"] > 1,
            "llama.cpp reads no groups of experts here and chooses among all",
        ),
    ),
    ignored=frozenset(
        {
            "max_window_layers",
            "use_sliding_window",
            "scoring_func",
            "topk_method",
            "moe_layer_freq",
            "ep_size",
            "num_nextn_predict_layers",
        }
    ),
)
