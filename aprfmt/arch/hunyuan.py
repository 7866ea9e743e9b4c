"""hunyuan (dense and with experts): q/k-norms a head after rope; a fixed stretch of rope's base.

`rope_scaling` {type: dynamic, alpha} is no dynamic scaling: alpha^(d/(d-2)) multiplies the base
once, and GGUF stores the product. Source: transformers' modeling_hunyuan_v1_dense and _moe; the
converter's hunyuan.py, llama.cpp's hunyuan-dense.cpp and hunyuan-moe.cpp.
"""

from dataclasses import replace
from typing import Any

from aprfmt.arch import hyper_rules, losses, moe
from aprfmt.arch.qwen2_moe import EXPERT_BINDINGS, EXPERTS, shared_expert_rows
from aprfmt.arch.rope import rope_rules
from aprfmt.arch.rope_gguf import ROPE_TENSORS
from aprfmt.arch.rope_hf import HFRope, RopeDefaults
from aprfmt.arch.spec import ArchSpec, BlockSpec, Facts, Found, HyperRule, Params
from aprfmt.arch.tensor_rows import (
    FUSED,
    RoleRow,
    attention,
    gated_mlp,
    make_tables,
    norm,
    with_model_rows,
)
from aprfmt.arch.value_checks import positive_number, sequence, whole_number
from aprfmt.errors import ArchError

_ROPE = RopeDefaults()


def _read_alpha(facts: Facts) -> float | None:
    """Return the factor alpha that raises rope's base, None without one."""
    found = HFRope(_ROPE, facts).full.find("alpha")
    return None if found is None or not found[0] else positive_number(*found)


def _read_theta(facts: Facts, hp: Params) -> Found:
    """Return (rope base, key) of config.json, multiplied by a power of alpha if it has alpha.

    None if it has neither base nor alpha.
    """
    found, alpha, dim = HFRope(_ROPE, facts).read_theta(), _read_alpha(facts), hp["head_dim"]
    if alpha is None or dim <= 2:
        return found
    base, key = (_ROPE.theta, "rope_theta") if found is None else found
    return positive_number(base, key) * alpha ** (dim / (dim - 2)), key


def _read_scaling(facts: Facts, hp: Params) -> Found:
    """Return (scaling in normal form, key) of config.json; (None, "alpha") if it has alpha.

    Alpha only changes the base. None if config.json has no scaling.
    """
    rope = HFRope(_ROPE, facts)
    if _read_alpha(facts) is None:
        return rope.read_scaling(hp["context_length"])
    for key in (
        "rope_type",
        "type",
        "factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
    ):
        rope.full.find(key)  # published with alpha, and not used
    return None, "alpha"


def _rope_rules() -> tuple[HyperRule, ...]:
    """Return the rules that read and write rope, with base and scaling read with alpha."""
    reads: dict[str, Any] = {"rope_theta": _read_theta, "rope_scaling": _read_scaling}
    return tuple(
        replace(rule, read={**rule.read, "hf": reads[rule.name]}) if rule.name in reads else rule
        for rule in rope_rules(_ROPE)
    )


_ATTENTION = (
    *norm("attn_norm", "input_layernorm"),
    *attention(),
    *norm("attn_q_norm", "self_attn.query_layernorm", ("head_dim",)),
    *norm("attn_k_norm", "self_attn.key_layernorm", ("head_dim",)),
    *norm("ffn_norm", "post_attention_layernorm"),
)
_HYPER = (
    hyper_rules.norm_eps(1e-5),
    *hyper_rules.attention_biases(),
    hyper_rules.fixed("qk_norm", True),
    *_rope_rules(),
)
_IGNORED = frozenset(
    """eod_token_id sep_token_id im_start_id im_end_id im_newline_id text_start_id text_end_id
    attention_head_dim use_qk_norm use_cla cla_share_factor norm_type mlp_bias use_rotary_pos_emb
    position_embedding_xdrope num_media_embeds enable_lm_head_fp32 dense_list pool_type
    add_classification_head class_num org_vocab_size skip_cls_token group_limited_greedy n_group
    topk_group routed_scaling_factor norm_topk_prob moe_layer_num_skipped use_mixed_mlp_moe
    num_shared_expert kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim
    use_mla moe_drop_tokens moe_random_routing_dropped_token router_aux_loss_coef""".split()
)
_BLOCK = BlockSpec(qk_norm="head", qk_norm_place="after_rope")

_TENSORS, _BINDINGS = make_tables(with_model_rows(*_ATTENTION, *gated_mlp()), hf_more=FUSED)

HUNYUAN_V1_DENSE = ArchSpec(
    name="hunyuan_v1_dense",
    hyper=hyper_rules.hyper_table(*_HYPER),
    tensors=_TENSORS,
    bindings=_BINDINGS,
    block=_BLOCK,
    lost=(*losses.common_losses(), losses.ONE_BIAS_KEY),
    ignored=_IGNORED | {"num_experts", "moe_topk", "moe_intermediate_size"},
)


def _read_same_number(key: str) -> Any:
    """Return a read function for a number, or for a list with the same number for every layer.

    `key` is config.json's key.
    """

    def read(facts: Facts, hp: Params) -> Found:
        """Return (the number under `key`, key) of config.json; None without the key.

        The key may have a list with a number for each layer. Raises ArchError if these differ.
        """
        found = facts.first(key)
        if found is None or isinstance(found[0], int):
            return found
        each = {whole_number(item, key, 1) for item in sequence(*found, hp["n_layers"])}
        if len(each) != 1:
            raise ArchError(f"{key}: differs between layers, {sorted(each)}; expected one number")
        return each.pop(), key

    return read


_MOE_TENSORS, _MOE_BINDINGS = make_tables(
    with_model_rows(
        *_ATTENTION,
        RoleRow(
            "ffn_gate_inp.weight", "mlp.gate.wg.weight", ("n_experts", "hidden_size"), "moe_layers"
        ),
        *EXPERTS,
        *shared_expert_rows("mlp.shared_mlp"),
    ),
    hf_first=EXPERT_BINDINGS,
    hf_more=FUSED,
)
_COUNTS = moe.expert_count_rules(1, 1, "num_experts num_local_experts")

HUNYUAN_V1_MOE = ArchSpec(
    name="hunyuan_v1_moe",
    hyper=hyper_rules.hyper_table(
        *_HYPER,
        replace(_COUNTS[0], read={"hf": _read_same_number("num_experts")}),
        replace(
            _COUNTS[1],
            keys={**_COUNTS[1].keys, "hf": ("moe_topk",)},
            read={"hf": _read_same_number("moe_topk")},
        ),
        moe.expert_size_rule("intermediate_size"),
        hyper_rules.size(
            "shared_ffn_size",
            "intermediate_size",
            "expert_shared_feed_forward_length",
            default=lambda hp: hp["ffn_size"],
        ),
        moe.all_moe_layers_rule(),
        hyper_rules.fixed("norm_topk", True),
    ),
    tensors=_MOE_TENSORS,
    bindings=_MOE_BINDINGS,
    block=replace(_BLOCK, shared_expert="plain", router_cast="none"),
    lost=(*losses.common_losses(), losses.ONE_BIAS_KEY),
    ignored=_IGNORED | {"moe_intermediate_size"},
    derived=ROPE_TENSORS,
)
