"""qwen3_next: gated delta nets, gated attention in every fourth layer, experts with a shared one.

q, k, v and z of the delta nets are one projection, key head by key head; GGUF has q, k and v in
one tensor and z in another (older files: all in ssm_in, as Hugging Face). Norms, except the
delta nets', store w of (1 + w). Sources: delta_net.py.
"""

from dataclasses import replace

from aprfmt.arch import delta_net, draft_head, hyper_rules, losses, moe
from aprfmt.arch.gemma import NO_BIASES, PLUS_ONE
from aprfmt.arch.grouped_rows import ByGroup
from aprfmt.arch.qwen2_moe import (
    DENSE,
    DENSE_LOSS,
    EXPERT_BINDINGS,
    EXPERTS,
    ROUTER,
    SHARED_GATE,
    shared_expert_rows,
)
from aprfmt.arch.rope import rope_rules
from aprfmt.arch.rope_hf import RopeDefaults
from aprfmt.arch.spec import ArchSpec, Binding, HyperRule
from aprfmt.arch.tensor_rows import LAYER, make_tables, with_model_rows

_INTO = ("attn_qkv.weight", "attn_gate.weight")
_RATES = ("ssm_beta.weight", "ssm_alpha.weight")
_QKVZ = (
    ByGroup(
        "delta_key_heads",
        (delta_net.KEYS, delta_net.KEYS, delta_net.VALUES, delta_net.VALUES),
        ((0, 1, 2), (3,)),
    ),
)
_BA = (ByGroup("delta_key_heads", ("delta_value_heads", "delta_value_heads"), ((0,), (1,))),)


def _joined_bindings(qkvz: str, ba: str) -> tuple[Binding, Binding]:
    """Return (the binding of q, k, v and z in one stored tensor, that of b and a in another)."""
    return Binding((qkvz,), _INTO, _QKVZ), Binding((ba,), _RATES, _BA)


def shared_size_rule() -> HyperRule:
    """Return the rule that reads and writes the inner width of the shared expert."""
    return hyper_rules.size(
        "shared_ffn_size",
        "shared_expert_intermediate_size",
        "expert_shared_feed_forward_length",
        default=lambda hp: hp["moe_ffn_size"],
        hf_default=512,
    )


_FIRST, _SECOND = delta_net.norm_rows()
_TENSORS, _BINDINGS = make_tables(
    with_model_rows(
        *_FIRST,
        *delta_net.gated_attention_rows(),
        *delta_net.delta_net_rows(),
        *_SECOND,
        *DENSE,
        ROUTER,
        *EXPERTS,
        SHARED_GATE,
        *shared_expert_rows("mlp.shared_expert"),
        norm_steps=PLUS_ONE,
    ),
    hf_first=(
        *EXPERT_BINDINGS,
        *delta_net.GATED_HF,
        *_joined_bindings(
            f"{LAYER}linear_attn.in_proj_qkvz.weight", f"{LAYER}linear_attn.in_proj_ba.weight"
        ),
    ),
    gguf_first=(
        *delta_net.GATED_GGUF,
        Binding(("blk.{L}.attn_qkv.weight",), ("attn_qkv.weight",)),
        Binding(("blk.{L}.attn_gate.weight",), ("attn_gate.weight",)),
        *_joined_bindings("blk.{L}.ssm_in.weight", "blk.{L}.ssm_ba.weight"),
    ),
    gguf_more=(delta_net.GATE_UP_GGUF,),
)

QWEN3_NEXT = ArchSpec(
    name="qwen3_next",
    hyper=hyper_rules.hyper_table(
        draft_head.main_layers_rule(),
        hyper_rules.n_kv_heads(2),
        hyper_rules.head_dim(256),
        hyper_rules.ffn_size(5632),
        hyper_rules.context_length(32768),
        *hyper_rules.attention_biases(),
        hyper_rules.fixed("qk_norm", True),
        *rope_rules(RopeDefaults(partial=0.25)),
        *moe.expert_count_rules(512, 10),
        moe.expert_size_rule(hf_default=512),
        shared_size_rule(),
        moe.sparse_layers_rule(),
        moe.norm_topk_rule(True, gguf=True),
        *delta_net.size_rules(),
    ),
    tensors=_TENSORS,
    bindings=_BINDINGS,
    block=replace(delta_net.BLOCK, shared_expert="gated"),
    lost=(
        *losses.common_losses(partial=True),
        losses.ONE_BIAS_KEY,
        NO_BIASES,
        DENSE_LOSS,
        moe.norm_topk_loss(True),
        *delta_net.LOST,
    ),
    ignored=delta_net.IGNORED,
    draft=draft_head.MTP,
)
