"""kimi_linear: Kimi delta attention in most layers, latent attention without rope in others.

Kimi delta attention (KDA) is a gated delta net whose state decays by channel of the key, not by
head. Its decay and its output gate are products of low rank, its output gate is a sigmoid. The
experts are routed as deepseek v3's. Sources: transformers' modeling_kimi_linear and its conversion
mapping; the converter's kimi_linear.py, llama.cpp's kimi-linear.cpp.
"""

from collections.abc import Mapping
from dataclasses import replace

from aprfmt.arch import hyper_rules, losses, moe
from aprfmt.arch.deepseek import (
    GGUF_FIRST,
    GGUF_MORE,
    LATENT_LOST,
    routed_scale_rule,
    sigmoid_router_rule,
)
from aprfmt.arch.delta_net import ELSEWHERE, IN_LAYERS, VALUES
from aprfmt.arch.gpt2 import NO_ROPE
from aprfmt.arch.joining_steps import Split
from aprfmt.arch.layer_kinds import KV_HEADS, read_layer_kinds
from aprfmt.arch.layout_steps import Reshaped
from aprfmt.arch.mla import (
    LISTED_EXPERTS_LOSS,
    expert_groups_rule,
    listed_experts_rule,
    mla_rules,
    shared_experts_rule,
)
from aprfmt.arch.qwen2_moe import shared_expert_rows
from aprfmt.arch.recurrent_steps import Depthwise, NegativeExp
from aprfmt.arch.spec import Binding, BlockSpec, Facts, Found, HyperRule, Loss, Params
from aprfmt.arch.spec_builders import full_spec
from aprfmt.arch.tensor_rows import (
    LAYER,
    Q,
    RoleRow,
    experts,
    gated_mlp,
    linear,
    make_tables,
    norm,
    with_model_rows,
)
from aprfmt.arch.value_checks import object_under, sequence, whole_number
from aprfmt.base.protocols import Value
from aprfmt.errors import ArchError

_LORA, _RANK, _MOE = "q_lora_rank", "kv_lora_rank", "block_sparse_moe."
_HEADS, _DIM = "delta_value_heads", "delta_value_dim"
_LATENT = f"{ELSEWHERE} & {_LORA}"
_KV_B = "n_heads*qk_nope_head_dim+n_heads*value_head_dim"
_EXPERTS, _EXPERT_BINDINGS = experts(_MOE + "experts", "w1", "w3", "w2")
_BIAS, _OUT = "attention_bias", "attention_out_bias"


def _row(role: str, hf: str, *shape: str) -> RoleRow:
    """Return the role's row of a matrix in layers with KDA; `hf` is its name below `self_attn.`."""
    return RoleRow(f"{role}.weight", f"self_attn.{hf}.weight", shape, IN_LAYERS)


def _other_layers_row(role: str, out: str, into: str, needs: str) -> RoleRow:
    """Return the row [out, into] of a role's matrix in layers that meet the condition `needs`.

    It has no names: those of the role's row for layers with KDA are used.
    """
    return RoleRow(role, "", (out, into), needs, gguf="")


def _kernel(part: str) -> RoleRow:
    """Return the table row of the short convolution's kernel for `part`, which is q, k or v."""
    steps = (Depthwise(VALUES, "conv_taps"),)
    return RoleRow(
        f"ssm_conv1d_{part}.weight",
        f"self_attn.{part}_conv1d.weight",
        (VALUES, "conv_taps"),
        IN_LAYERS,
        steps,
        steps,
    )


_KDA = (
    *(_row(f"attn_{part}", f"{part}_proj", VALUES, "hidden_size") for part in "qkv"),
    *(_kernel(part) for part in "qkv"),
    _row("ssm_f_a", "f_a_proj", _DIM, "hidden_size"),
    _row("ssm_f_b", "f_b_proj", VALUES, _DIM),
    RoleRow("ssm_dt.bias", "self_attn.dt_bias", (VALUES,), IN_LAYERS),
    RoleRow(
        "ssm_a.weight",
        "self_attn.A_log",
        (_HEADS,),
        IN_LAYERS,
        (Reshaped((_HEADS,), ("1", "1", _HEADS, "1")),),
        (Reshaped((_HEADS,), (_HEADS, "1")), NegativeExp()),
        "ssm_a",
    ),
    _row("ssm_beta", "b_proj", _HEADS, "hidden_size"),
    _row("ssm_g_a", "g_a_proj", _DIM, "hidden_size"),
    _row("ssm_g_b", "g_b_proj", VALUES, _DIM),
    *norm("ssm_norm", "self_attn.o_norm", (_DIM,), IN_LAYERS),
    _row("attn_output", "o_proj", "hidden_size", VALUES),
)
_ATTENTION = (
    _other_layers_row("attn_q.weight", Q, "hidden_size", f"{ELSEWHERE} & !{_LORA}"),
    *linear("attn_q_a", "self_attn.q_a_proj", _LORA, "hidden_size", _LATENT, bias=_BIAS),
    *norm("attn_q_a_norm", "self_attn.q_a_layernorm", (_LORA,), _LATENT),
    *linear("attn_q_b", "self_attn.q_b_proj", Q, _LORA, _LATENT),
    *linear(
        "attn_kv_a_mqa",
        "self_attn.kv_a_proj_with_mqa",
        f"{_RANK}+qk_rope_head_dim",
        "hidden_size",
        ELSEWHERE,
        bias=_BIAS,
    ),
    *norm("attn_kv_a_norm", "self_attn.kv_a_layernorm", (_RANK,), ELSEWHERE),
    RoleRow("attn_kv_b.weight", "self_attn.kv_b_proj.weight", (_KV_B, _RANK), ELSEWHERE, gguf=""),
    _other_layers_row("attn_output.weight", "hidden_size", "n_heads*value_head_dim", ELSEWHERE),
    RoleRow("attn_output.bias", "self_attn.o_proj.bias", ("hidden_size",), f"{ELSEWHERE} & {_OUT}"),
)
_ROUTER = (
    ("ffn_gate_inp.weight", "gate.weight"),
    ("exp_probs_b.bias", "gate.e_score_correction_bias"),
)
_PROJECTIONS = ("gate", "up", "down")
_RATES = (Reshaped((_HEADS,), ("1", "1", _HEADS, "1")),)
# transformers 5 calls the module of experts `mlp` in memory, and saves dense MLPs, which published
# files call `mlp`, by the name of the experts' module. In memory it joins the kernels, and has a
# module for the decay.
_OTHER_NAMES = (
    Binding(
        (f"{LAYER}self_attn.conv1d.weight",),
        tuple(f"ssm_conv1d_{part}.weight" for part in "qkv"),
        (
            Reshaped((f"3*{VALUES}", "conv_taps"), (f"3*{VALUES}", "1", "conv_taps")),
            Split((VALUES,) * 3),
        ),
    ),
    *(
        Binding((f"{LAYER}self_attn.forget_gate.{hf}",), (role,), steps)
        for hf, role, steps in (
            ("f_a_proj.weight", "ssm_f_a.weight", ()),
            ("f_b_proj.weight", "ssm_f_b.weight", ()),
            ("dt_bias", "ssm_dt.bias", ()),
            ("A_log", "ssm_a.weight", _RATES),
        )
    ),
    *(Binding((f"{LAYER}mlp.{hf}",), (role,)) for role, hf in _ROUTER),
    *(
        Binding((f"{LAYER}{module}{part}_proj.weight",), (f"ffn_{part}{end}.weight",))
        for module, end in ((_MOE, ""), ("mlp.shared_experts.", "_shexp"))
        for part in _PROJECTIONS
    ),
)
_MADE = make_tables(
    with_model_rows(
        *norm("attn_norm", "input_layernorm"),
        *_KDA,
        *_ATTENTION,
        *norm("ffn_norm", "post_attention_layernorm"),
        *gated_mlp(needs="!moe_layers"),
        RoleRow(_ROUTER[0][0], _MOE + _ROUTER[0][1], ("n_experts", "hidden_size"), "moe_layers"),
        RoleRow(_ROUTER[1][0], _MOE + _ROUTER[1][1], ("n_experts",), "moe_layers"),
        *_EXPERTS,
        *shared_expert_rows(_MOE + "shared_experts", "moe_layers & shared_ffn_size"),
    ),
    hf_first=_EXPERT_BINDINGS,
    hf_more=_OTHER_NAMES,
    gguf_first=GGUF_FIRST,
    gguf_more=GGUF_MORE,
)
_NESTED = "linear_attn_config"  # published files have what KDA needs in this object
_KINDS = {True: "linear_attention", False: "full_attention"}
_LISTS = {True: "kda_layers", False: "full_attn_layers"}  # layers are counted from 1 in these


def _size(name: str, key: str, nested: str, default: int, gguf: str = "") -> HyperRule:
    """Return the rule that reads a size of KDA, hyperparameter `name`, from a config.

    `nested` is its key in the object of published files, which wins over transformers' `key`.
    `gguf` is GGUF's key without the prefix; `default` is transformers' value without a key.
    """

    def read(facts: Facts, hp: Params) -> Found:
        """Return (size of the delta attention, its key) of config.json; None with neither key.

        The key `nested` in published files' object counts before transformers' `key`.
        """
        inside = object_under(facts, _NESTED).get(nested)
        if inside is not None:
            return whole_number(inside, f"{_NESTED}.{nested}", 1), f"{_NESTED}.{nested}"
        found = facts.first(key)
        return None if found is None else (whole_number(*found, 1), key)

    made = hyper_rules.size(name, key, gguf, hf_default=default)
    return replace(made, read={"hf": read}, write={"hf": lambda value, hp: {}})


def _delta_layers() -> HyperRule:
    """Return the rule for which layers have KDA; in a GGUF those with 0 key-value heads."""
    listed = read_layer_kinds((_KINDS[True],), (_KINDS[False],), "layer_types")

    def read(facts: Facts, hp: Params) -> Found:
        """Return (one boolean per layer: it has Kimi delta attention, key) of config.json.

        Its list of layer kinds comes first, then the lists of layer numbers of published files;
        None without both. Raises ArchError where a layer is in both of these lists or in none.
        """
        found, inside = listed(facts, hp), object_under(facts, _NESTED)
        if found is not None or not all(key in inside for key in _LISTS.values()):
            return found
        kinds: dict[int, bool] = {}
        for on, key in _LISTS.items():
            for number in sequence(inside[key], f"{_NESTED}.{key}"):
                layer = whole_number(number, f"{_NESTED}.{key}", 1)
                if kinds.setdefault(layer, on) is not on:
                    raise ArchError(
                        f"{_NESTED}: layer {layer} is in {' and in '.join(_LISTS.values())}"
                    )
        lacking = [layer for layer in range(1, hp["n_layers"] + 1) if layer not in kinds]
        if lacking:
            raise ArchError(
                f"{_NESTED}: layer {lacking[0]} is neither in {' nor in '.join(_LISTS.values())}; "
                f"expected every layer from 1 to {hp['n_layers']} in one of them"
            )
        return tuple(kinds[layer + 1] for layer in range(hp["n_layers"])), _NESTED

    def read_gguf(facts: Facts, hp: Params) -> Found:
        """Return (one boolean per layer: it has Kimi delta attention, key) of a GGUF.

        Those are the layers with 0 key-value heads. None without the list of head counts.
        """
        found = facts.first(KV_HEADS)
        if found is None:
            return None
        counts = sequence(*found, hp["n_layers"])[: hp["n_layers"]]
        return tuple(whole_number(count, found[1]) == 0 for count in counts), found[1]

    def write(value: Value, hp: Params) -> Params:
        """Return config.json's {"linear_attn_config": {...}} of published files.

        The object has the numbers (from 1) of the layers with and without Kimi delta attention,
        and the sizes of that attention. `value` has one boolean per layer.
        """
        numbers = {
            key: [layer + 1 for layer, on in enumerate(value) if on is kind]
            for kind, key in _LISTS.items()
        }
        sizes = {
            "head_dim": hp[_DIM],
            "num_heads": hp[_HEADS],
            "short_conv_kernel_size": hp["conv_taps"],
        }
        return {_NESTED: numbers | sizes}

    return HyperRule(
        IN_LAYERS,
        {"gguf": (KV_HEADS,)},
        read={"hf": read, "gguf": read_gguf},
        write={"hf": write, "gguf": lambda value, hp: {KV_HEADS: [0 if on else 1 for on in value]}},
        default=lambda hp: tuple(i == 0 or i % 4 != 0 for i in range(hp["n_layers"])),
    )


# Keys of the published code that transformers does not read -> the only value it computes.
_ONLY: Mapping[str, Value] = {
    "mla_use_nope": True,
    "moe_router_activation_func": "sigmoid",
    "moe_layer_freq": 1,
}


def _unpublished_mix(hp: Params) -> str:
    """Return in words two features of a model that no published one has together; "" for none.

    `hp` are the model's hyperparameters. A check warns of such a model.
    """
    if not any(hp[IN_LAYERS]):
        return "the sizes of Kimi delta attention and no layer that has it"
    return "" if hp["activation"] == "silu" else f"convolutions and {hp['activation']} after them"


_KV_RULE = next(rule for rule in mla_rules() if rule.name == "n_kv_heads")
_COUNTED = "num_experts_per_token num_experts_per_tok"
KIMI_LINEAR = full_spec(
    "kimi_linear",
    _MADE,
    mla_rules(
        replace(_KV_RULE, write={**_KV_RULE.write, "gguf": lambda value, hp: {}}),
        hyper_rules.context_length(1048576, "model_max_length max_position_embeddings"),
        hyper_rules.norm_eps(1e-5),
        *(rule for rule in NO_ROPE if rule.name != "rope_dim"),
        hyper_rules.size(_LORA, _LORA, "attention.q_lora_rank", default=None, null_in=("hf",)),
        moe.expert_count_rules(256, 8, "num_experts num_local_experts")[0],
        hyper_rules.size(
            "n_experts_used",
            _COUNTED,
            "expert_used_count",
            "num_experts_per_tok",
            hf_default=8,
            high=moe.MAX_EXPERTS,
        ),
        moe.expert_size_rule(hf_default=1024),
        shared_experts_rule("num_shared_experts n_shared_experts", 1),
        listed_experts_rule(1, counted=True),
        HyperRule(
            "norm_topk", {"hf": ("moe_renormalize", "norm_topk_prob")}, "bool", True, {"gguf": True}
        ),
        routed_scale_rule(2.446),
        expert_groups_rule("n_expert_groups", "num_expert_group n_group", "expert_group_count", 1),
        expert_groups_rule("n_expert_groups_used", "topk_group", "expert_group_used_count", 1),
        sigmoid_router_rule(),
        replace(
            _size("delta_key_heads", "linear_num_heads", "num_heads", 32),
            default_in={"hf": 32, "gguf": lambda hp: hp["n_heads"]},
        ),
        _size("delta_key_dim", "linear_head_dim", "head_dim", 128, "kda.head_dim"),
        HyperRule(_HEADS, default=lambda hp: hp["delta_key_heads"]),
        HyperRule(_DIM, default=lambda hp: hp["delta_key_dim"]),
        _size(
            "conv_taps", "linear_conv_kernel_dim", "short_conv_kernel_size", 4, "ssm.conv_kernel"
        ),
        replace(_delta_layers(), check=hyper_rules.as_published(_ONLY)),
        hyper_rules.fixed("delta_strength", 1.0),
        HyperRule("delta_norm_eps", default=lambda hp: hp["norm_eps"]),
    ),
    BlockSpec(
        attention="mla",
        position="none",
        shared_expert="plain",
        router_cast="none",
        recurrence="kimi_delta",
    ),
    lost=(
        *losses.common_losses(partial=True),
        losses.ONE_BIAS_KEY,
        LISTED_EXPERTS_LOSS,
        moe.norm_topk_loss(gguf=True),
        *LATENT_LOST,
        Loss(
            "gguf",
            _HEADS,
            lambda hp: hp[_HEADS] != hp["n_heads"],
            "llama.cpp gives Kimi delta attention as many heads as attention has, and refuses the "
            "file",
        ),
    ),
    ignored=frozenset(
        """head_dim qk_head_dim num_key_value_heads num_kv_heads
        attention.head_count_kv attention.key_length
        attention.value_length scoring_func use_grouped_topk num_nextn_predict_layers
        rope_theta rope_scaling rope_parameters output_router_logits pretraining_tp""".split()
    ).union(_ONLY),
    mixed=_unpublished_mix,
)
