"""deepseek v2 and v3: compressed attention (MLA), shared experts, dense first layers.

Queries and keys have elements without rope and elements with it; in the source those that rotate
together are adjacent. GGUF calls both models `deepseek2` and keeps kv_b cut into k_b, transposed,
and v_b (older files: kv_b whole); its head counts and lengths describe attention on the compressed
vectors. Source: docs/reference/architectures.md; the converter's deepseek.py; transformers'
modeling_deepseek_v2 and _v3.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace

from aprfmt.arch import draft_head, hyper_rules, losses, moe
from aprfmt.arch.joining_steps import KvB
from aprfmt.arch.mla import dense_first_rule, expert_groups_rule, mla_rules
from aprfmt.arch.qwen2_moe import EXPERT_BINDINGS, EXPERTS, ROUTER, shared_expert_rows
from aprfmt.arch.spec import (
    ArchSpec,
    Binding,
    BlockSpec,
    Facts,
    Found,
    HyperRule,
    Loss,
    Params,
    Write,
)
from aprfmt.arch.spec_builders import Made
from aprfmt.arch.tensor_rows import (
    Q,
    RoleRow,
    Rows,
    gated_mlp,
    linear,
    make_tables,
    norm,
    with_model_rows,
)
from aprfmt.arch.value_checks import text
from aprfmt.base.protocols import Value
from aprfmt.errors import ArchError

_LORA = "q_lora_rank"
_KV_A, _KV_B = ("kv_lora_rank+qk_rope_head_dim", "n_heads*qk_nope_head_dim+n_heads*value_head_dim")
_ATTENTION = (
    *linear("attn_q", "self_attn.q_proj", Q, "hidden_size", f"!{_LORA}"),
    *linear("attn_q_a", "self_attn.q_a_proj", _LORA, "hidden_size", _LORA, bias="attention_bias"),
    *norm("attn_q_a_norm", "self_attn.q_a_layernorm", (_LORA,), _LORA),
    *linear("attn_q_b", "self_attn.q_b_proj", Q, _LORA, _LORA),
    *linear(
        "attn_kv_a_mqa", "self_attn.kv_a_proj_with_mqa", _KV_A, "hidden_size",
        bias="attention_bias",
    ),
    *norm("attn_kv_a_norm", "self_attn.kv_a_layernorm", ("kv_lora_rank",)),
    RoleRow("attn_kv_b.weight", "self_attn.kv_b_proj.weight", (_KV_B, "kv_lora_rank"), gguf=""),
    *linear(
        "attn_output", "self_attn.o_proj", "hidden_size", "n_heads*value_head_dim",
        bias="attention_out_bias",
    ),
)  # fmt: skip
ROUTER_BIAS = RoleRow(
    "exp_probs_b.bias", "mlp.gate.e_score_correction_bias", ("n_experts",), "moe_layers"
)
GGUF_FIRST = (
    Binding(
        ("blk.{L}.attn_k_b.weight", "blk.{L}.attn_v_b.weight"), ("attn_kv_b.weight",), (KvB(),)
    ),
)
GGUF_MORE = (Binding(("blk.{L}.attn_kv_b.weight",), ("attn_kv_b.weight",)),)


def _deepseek_rows(mlp_bias: str | None, *router: RoleRow, more: tuple[RoleRow, ...] = ()) -> Rows:
    """Return the tensor-table rows of a deepseek model.

    `router` and `more` are rows that versions differ in. `mlp_bias` is the condition for biases
    of the MLPs, None: no biases.
    """
    return with_model_rows(
        *norm("attn_norm", "input_layernorm"),
        *_ATTENTION,
        *more,
        *norm("ffn_norm", "post_attention_layernorm"),
        *gated_mlp(mlp_bias, needs="!moe_layers"),
        *router,
        *EXPERTS,
        *shared_expert_rows("mlp.shared_experts", "moe_layers & shared_ffn_size", mlp_bias),
    )


LATENT_LOST = (
    Loss(
        "gguf",
        "attention_bias",
        lambda hp: hp["attention_bias"] or hp["attention_out_bias"],
        "llama.cpp has no attention biases here and refuses the file",
    ),
    Loss(
        "gguf",
        "lora_norm_eps",
        lambda hp: hp["lora_norm_eps"] != hp["norm_eps"],
        "llama.cpp uses one epsilon for all norms, transformers 1e-6 on the compressed vectors",
    ),
)
_LOST = (*losses.common_losses(partial=True), losses.ONE_BIAS_KEY, *LATENT_LOST)
# Keys that follow from other sizes, or that describe attention on the compressed vectors.
_DERIVED_KEYS = frozenset(
    """head_dim qk_head_dim num_key_value_heads num_kv_heads attention.head_count_kv
    attention.key_length attention.value_length""".split()
)
EXPERTS_HF = "n_routed_experts num_experts num_local_experts"


def _check_norm_topk(value: Value, facts: Facts, hp: Params) -> str:
    """Return a remark if the file asks to renormalise the experts' weights, else ""."""
    found = facts.first("norm_topk_prob", "{arch}.expert_weights_norm")
    if found is None or not found[0]:
        return ""
    return f"{found[1]} is true, but transformers never renormalises deepseek v2's weights"


def _read_v2_router(facts: Facts, hp: Params) -> Found:
    """Return (kind of router, key) of config.json's `topk_method`; None without the key.

    Raises ArchError for an unknown method.
    """
    found = facts.first("topk_method")
    if found is None:
        return None
    kinds = {"greedy": "softmax", "group_limited_greedy": "group_limited_greedy"}
    kind = text(*found)
    if kind not in kinds:
        raise ArchError(f"topk_method: {kind!r} is not known; known: {', '.join(kinds)}")
    return kinds[kind], found[1]


def _read_v2_groups(rule: HyperRule) -> HyperRule:
    """Return a rule of `expert_groups_rule` that reads 1 unless `topk_method` limits the groups.

    Without that, as without the key, transformers chooses among all experts.
    """

    def read(facts: Facts, hp: Params) -> Found:
        """Return (number of expert groups, key) of deepseek v2's config.json; None without the key.

        The number is 1 unless `topk_method` limits the choice of experts to some groups.
        """
        found, router = facts.first(*rule.keys["hf"]), _read_v2_router(facts, hp)
        limited = router is not None and router[0] == "group_limited_greedy"
        return found if found is None or limited else (1, found[1])

    return replace(rule, read={**rule.read, "hf": read})


_GATING = "{arch}.expert_gating_func"
_SOFTMAX, _SIGMOID = 1, 2  # llama.cpp's llama_expert_gating_func_type


def _read_gating_key(facts: Facts, number: int) -> str:
    """Return the key that names the router's score function, "" without it.

    ArchError unless the function is number `number` of llama.cpp.
    """
    found = facts.first(_GATING)
    if found is not None and found[0] not in (0, number):
        raise ArchError(f"{found[1]}: is {found[0]!r}; expected {number} for this architecture")
    return "" if found is None else found[1]


def _read_v2_gguf_router(facts: Facts, hp: Params) -> Found:
    """Return (kind of router, key of the gating function) of a GGUF, never None.

    The kind follows from the number of expert groups.
    """
    key = _read_gating_key(facts, _SOFTMAX)
    return ("group_limited_greedy" if hp["n_expert_groups"] > 1 else "softmax"), key


def _write_gating(number: int) -> Write:
    """Return a function that writes {GGUF key: `number`}, the router's score function."""
    return lambda value, hp: {_GATING: number}


def sigmoid_router_rule(kind: str = "sigmoid_bias", number: int = _SIGMOID) -> HyperRule:
    """Return the rule for deepseek v3's kind of routing, which config.json cannot change.

    That is sigmoid scores and a bias for the choice. `kind` is the value of the hyperparameter
    `router`, `number` llama.cpp's of the score function.
    """
    return HyperRule(
        "router",
        read={"gguf": lambda facts, hp: (kind, _read_gating_key(facts, number))},
        write={"gguf": _write_gating(number)},
        default=kind,
    )


def routed_scale_rule(hf_default: float) -> HyperRule:
    """Return the rule that reads and writes the factor on the routed experts' weights."""
    return HyperRule(
        "routed_scale",
        {"hf": ("routed_scaling_factor",), "gguf": ("{arch}.expert_weights_scale",)},
        "float",
        hf_default,
        {"gguf": 1.0},
    )


_V2_TENSORS, _V2_BINDINGS = make_tables(
    _deepseek_rows("mlp_bias", ROUTER),
    hf_first=EXPERT_BINDINGS,
    gguf_first=GGUF_FIRST,
    gguf_more=GGUF_MORE,
)

DEEPSEEK_V2 = ArchSpec(
    name="deepseek_v2",
    hyper=mla_rules(
        hyper_rules.flag(
            "mlp_bias", False, "mlp_bias", present=("ffn_up.bias", "ffn_up_shexp.bias")
        ),
        hyper_rules.rope_style("interleaved"),
        *moe.expert_count_rules(64, 6, EXPERTS_HF),
        dense_first_rule(0),
        HyperRule("norm_topk", default=False, check=_check_norm_topk),
        routed_scale_rule(1.0),
        _read_v2_groups(expert_groups_rule("n_expert_groups", "n_group", "expert_group_count", 1)),
        _read_v2_groups(
            expert_groups_rule("n_expert_groups_used", "topk_group", "expert_group_used_count", 1)
        ),
        HyperRule(
            "router",
            read={"hf": _read_v2_router, "gguf": _read_v2_gguf_router},
            write={
                "hf": lambda value, hp: {"topk_method": "greedy" if value == "softmax" else value},
                "gguf": _write_gating(_SOFTMAX),
            },
            default="softmax",
        ),
    ),
    tensors=_V2_TENSORS,
    bindings=_V2_BINDINGS,
    block=BlockSpec(attention="mla", shared_expert="plain", rope_cast="result", router_cast="none"),
    lost=(
        *_LOST,
        Loss(
            "gguf",
            "mlp_bias",
            lambda hp: hp["mlp_bias"],
            "llama.cpp has no biases of MLP and shared experts here and refuses the file",
        ),
        Loss(
            "gguf",
            "router",
            lambda hp: hp["router"] == "group_limited_greedy",
            "llama.cpp ranks groups by the sum of their two best scores, deepseek v2 by the best",
        ),
    ),
    ignored=_DERIVED_KEYS | {"scoring_func", "moe_layer_freq", "ep_size"},
)


def v3_tables(*more: RoleRow) -> Made:
    """Return the tensor table and bindings of v3, with the rows `more` after those of attention."""
    return make_tables(
        _deepseek_rows(None, ROUTER, ROUTER_BIAS, more=more),
        hf_first=EXPERT_BINDINGS,
        gguf_first=GGUF_FIRST,
        gguf_more=GGUF_MORE,
    )


def _has_router_bias(names: Collection[str], values: Mapping[str, Value]) -> bool:
    """Return whether tensor names show the bias of the choice of experts: v3, not v2.

    `values` (the metadata) is not used: every evidence function is given both.
    """
    ends = (".exp_probs_b.bias", ".e_score_correction_bias")
    return any(name.endswith(ends) for name in names)


def _read_rope_style(facts: Facts, hp: Params) -> Found:
    """Return ("interleaved" or "half", key) of config.json's `rope_interleave`; None without it."""
    found = facts.first("rope_interleave")
    return None if found is None else ("interleaved" if found[0] else "half", found[1])


INTERLEAVED = HyperRule(
    "rope_style",
    read={"hf": _read_rope_style},
    write={
        "hf": lambda value, hp: {"rope_interleave": value == "interleaved"},
        **hyper_rules.rope_style("interleaved").write,
    },
    default="interleaved",
    check=hyper_rules.rope_style("interleaved").check,
)


def v3_rules(*overrides: HyperRule) -> tuple[HyperRule, ...]:
    """Return deepseek v3's rules; `overrides` replace or add to them."""
    return mla_rules(
        draft_head.main_layers_rule(),
        hyper_rules.context_length(4096),
        INTERLEAVED,
        *moe.expert_count_rules(256, 8, EXPERTS_HF),
        dense_first_rule(3),
        moe.norm_topk_rule(True),
        routed_scale_rule(2.5),
        expert_groups_rule("n_expert_groups", "n_group", "expert_group_count", 8),
        expert_groups_rule("n_expert_groups_used", "topk_group", "expert_group_used_count", 4),
        sigmoid_router_rule(),
        *overrides,
    )


_V3_TENSORS, _V3_BINDINGS = v3_tables()
DEEPSEEK_V3 = ArchSpec(
    name="deepseek_v3",
    hyper=v3_rules(),
    tensors=_V3_TENSORS,
    bindings=_V3_BINDINGS,
    block=BlockSpec(attention="mla", shared_expert="plain", router_cast="none"),
    lost=(
        *_LOST,
        Loss(
            "gguf",
            "rope_style",
            lambda hp: hp["rope_style"] != "interleaved",
            "llama.cpp pairs adjacent elements of deepseek's rotated part",
        ),
    ),
    ignored=_DERIVED_KEYS
    | set(
        """scoring_func topk_method moe_layer_freq ep_size num_nextn_predict_layers
        num_mtp_layers""".split()
    ),
    evidence=_has_router_bias,
    draft=draft_head.NEXTN,
)
