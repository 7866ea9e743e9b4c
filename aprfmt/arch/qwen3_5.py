"""qwen3_5 and qwen3_5_moe (text): qwen3_next with separate projections; dense, or all with experts.

GGUF has the value heads of the delta nets tiled: the key heads run fastest. The rotary sections
of images and videos change nothing in a text, but llama.cpp requires them (rope_sections.py).
Sources: delta_net.py.
"""

from collections.abc import Mapping
from dataclasses import replace

from aprfmt.arch import delta_net, draft_head, hyper_rules, losses, moe
from aprfmt.arch.gemma import NO_BIASES, PLUS_ONE
from aprfmt.arch.grouped_rows import Tiled
from aprfmt.arch.qwen2_moe import EXPERT_BINDINGS, EXPERTS, ROUTER, SHARED_GATE, shared_expert_rows
from aprfmt.arch.qwen3_next import shared_size_rule
from aprfmt.arch.rope import rope_rules
from aprfmt.arch.rope_hf import RopeDefaults
from aprfmt.arch.rope_sections import sections_rule
from aprfmt.arch.spec import ArchSpec, Binding, HyperRule, TensorRule
from aprfmt.arch.tensor_rows import RoleRow, gated_mlp, make_tables, with_model_rows

SECTIONS = (11, 11, 10)  # transformers' default, and the converter's
_ROPE = RopeDefaults(partial=0.25)
_HEADS, _HEAD = (Tiled("delta_value_dim"),), (Tiled("1"),)
_AFTER_KEYS = (Tiled("delta_value_dim", f"2*{delta_net.KEYS}"),)


def _mixing_rows() -> tuple[RoleRow, ...]:
    """Return the tensor-table rows of attention and of the delta net."""
    return (
        *delta_net.gated_attention_rows(),
        *delta_net.delta_net_rows(
            rates=_HEAD,
            kernel=_AFTER_KEYS,
            output=(Tiled("delta_value_dim", axis=1),),
            projections=(
                ("in_proj_qkv", "attn_qkv", _AFTER_KEYS),
                ("in_proj_z", "attn_gate", _HEADS),
                ("in_proj_b", "ssm_beta", _HEAD),
                ("in_proj_a", "ssm_alpha", _HEAD),
            ),
        ),
    )


def _make_qwen3_5_tables(
    mlp: tuple[RoleRow, ...], hf: tuple[Binding, ...] = (), gguf: tuple[Binding, ...] = ()
) -> tuple[tuple[TensorRule, ...], Mapping[str, tuple[Binding, ...]]]:
    """Return the tensor table and bindings with these MLP rows.

    `hf` bindings are tried first, `gguf` ones are only read.
    """
    first, second = delta_net.norm_rows()
    return make_tables(
        with_model_rows(*first, *_mixing_rows(), *second, *mlp, norm_steps=PLUS_ONE),
        hf_first=(*hf, *delta_net.GATED_HF),
        gguf_first=delta_net.GATED_GGUF,
        gguf_more=gguf,
    )


def _qwen3_5_rules(*own: HyperRule) -> tuple[HyperRule, ...]:
    """Return the hyperparameter rules of both models; `own` replace or add to them."""
    return hyper_rules.hyper_table(
        draft_head.main_layers_rule(),
        hyper_rules.head_dim(256),
        hyper_rules.context_length(32768),
        *hyper_rules.attention_biases(),
        hyper_rules.fixed("qk_norm", True),
        *rope_rules(_ROPE),
        sections_rule(_ROPE, SECTIONS),
        *delta_net.size_rules(),
        *own,
    )


_LOST = (*losses.common_losses(partial=True), losses.ONE_BIAS_KEY, NO_BIASES, *delta_net.LOST)
_TENSORS, _BINDINGS = _make_qwen3_5_tables(gated_mlp())
QWEN3_5 = ArchSpec(
    name="qwen3_5",
    hyper=_qwen3_5_rules(hyper_rules.n_kv_heads(4), hyper_rules.ffn_size(12288)),
    tensors=_TENSORS,
    bindings=_BINDINGS,
    block=delta_net.BLOCK,
    lost=_LOST,
    ignored=delta_net.IGNORED,
    draft=draft_head.MTP,
)

_MOE_TENSORS, _MOE_BINDINGS = _make_qwen3_5_tables(
    (ROUTER, *EXPERTS, SHARED_GATE, *shared_expert_rows("mlp.shared_expert")),
    EXPERT_BINDINGS,
    (delta_net.GATE_UP_GGUF,),
)
QWEN3_5_MOE = ArchSpec(
    name="qwen3_5_moe",
    hyper=_qwen3_5_rules(
        hyper_rules.n_kv_heads(2),
        hyper_rules.size("ffn_size", "intermediate_size", "feed_forward_length", default=None),
        *moe.expert_count_rules(256, 8),
        moe.expert_size_rule(hf_default=512),
        shared_size_rule(),
        moe.all_moe_layers_rule(),
        hyper_rules.fixed("norm_topk", True),
    ),
    tensors=_MOE_TENSORS,
    bindings=_MOE_BINDINGS,
    block=replace(delta_net.BLOCK, shared_expert="gated"),
    lost=_LOST,
    ignored=delta_net.IGNORED,
    draft=draft_head.MTP,
)
