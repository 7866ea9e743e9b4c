"""phimoe: LayerNorms, longrope with given factors, and a router that softens near ties only.

Each of two experts is the best of those left; its weight is a softmax over the ones whose logits
are no further from it than twice the jitter, relative to their size (sparsemixer). transformers
5.23 rotates by the short factors at any length; here the long ones are used beyond the trained
length, as in the model's own code. Source: transformers' modeling_phimoe; the converter's
phi.py.
"""

from dataclasses import replace
from reprlib import repr as short_repr

from aprfmt.arch import hyper_rules, losses, moe
from aprfmt.arch.rope import rope_rules
from aprfmt.arch.rope_gguf import ROPE_TENSORS
from aprfmt.arch.rope_hf import RopeDefaults
from aprfmt.arch.sliding_window import IGNORED_WINDOW, Window, window_rules
from aprfmt.arch.spec import ArchSpec, Binding, BlockSpec, Facts, Found, HyperRule, Loss, Params
from aprfmt.arch.tensor_rows import (
    FUSED,
    LAYER,
    RoleRow,
    attention,
    experts,
    make_tables,
    norm,
    with_model_rows,
)
from aprfmt.base.protocols import Value

_EXPERTS, _BINDINGS = experts("block_sparse_moe.experts", "w1", "w3", "w2")
_TENSORS, _MADE = make_tables(
    (
        *with_model_rows(
            *norm("attn_norm", "input_layernorm", bias=True),
            *attention(),
            *norm("ffn_norm", "post_attention_layernorm", bias=True),
            RoleRow("ffn_gate_inp.weight", "block_sparse_moe.gate.weight",
                ("n_experts", "hidden_size"), "moe_layers"),
            *_EXPERTS,
            norm_bias=True,
        ),
        RoleRow("output.bias", "lm_head.bias", ("vocab_size",), "head_bias", layered=False),
    ),
    hf_first=_BINDINGS,
    # transformers 5 has another name in memory.
    hf_more=(Binding((LAYER + "mlp.router.weight",), ("ffn_gate_inp.weight",)), *FUSED),
)  # fmt: skip

_RULES = {rule.name: rule for rule in rope_rules(RopeDefaults(theta=1e6, original=4096))}
_SCALING = _RULES["rope_scaling"]


def _write_scaling(value: Value, hp: Params) -> Params:
    """Return config.json's {key: value} of rope with the two factors transformers asks for."""
    made = dict(_SCALING.write["hf"](value, hp))
    if made.get("rope_scaling"):
        factor = (value or {}).get("attention_factor", 1.0)
        each = {"short_mscale": factor, "long_mscale": factor}
        made["rope_scaling"] = {**made["rope_scaling"], **each}
    return made


_COUNTS = moe.expert_count_rules(16, 2, "num_local_experts num_experts")
_USED = "num_experts_per_tok"


def _read_two_experts(facts: Facts, hp: Params) -> Found:
    """Return (2, key) whatever number config.json gives; None without the key."""
    return None if facts.first(_USED) is None else (2, _USED)


def _check_two_experts(value: Value, facts: Facts, hp: Params) -> str:
    """Return a remark if config.json gives another number of experts than two, else ""."""
    stated = facts.first(_USED) if facts.style == "hf" else None
    if stated is None or stated[0] == value:
        return ""
    return f"{_USED} is {short_repr(stated[0])}; transformers takes two experts here: ignored"


_RULES["rope_scaling"] = replace(_SCALING, write={**_SCALING.write, "hf": _write_scaling})

PHIMOE = ArchSpec(
    name="phimoe",
    hyper=hyper_rules.hyper_table(
        hyper_rules.n_kv_heads(8),
        hyper_rules.context_length(131072),
        hyper_rules.norm_eps(1e-5),
        *hyper_rules.attention_biases(),
        *_RULES.values(),
        *window_rules(Window(listed=False, stated=True)),
        _COUNTS[0],
        replace(_COUNTS[1], read={"hf": _read_two_experts}, check=_check_two_experts),
        moe.expert_size_rule("intermediate_size"),
        moe.all_moe_layers_rule(),
        moe.router_rule("sparsemixer"),
        HyperRule("router_jitter", {"hf": ("router_jitter_noise",)}, "float", 0.01),
        hyper_rules.flag("head_bias", False, "lm_head_bias", present=("output.bias",)),
    ),
    tensors=_TENSORS,
    bindings=_MADE,
    block=BlockSpec(norm="layer"),
    lost=(
        *losses.common_losses(),
        losses.ONE_BIAS_KEY,
        IGNORED_WINDOW,
        Loss(
            "gguf",
            "head_bias",
            lambda hp: not hp["head_bias"],
            "llama.cpp asks for a bias of the head and refuses the file",
        ),
        Loss(
            "gguf",
            "attention_out_bias",
            lambda hp: not hp["attention_out_bias"],
            "llama.cpp asks for a bias of attention's output and refuses the file",
        ),
        Loss(
            "gguf",
            "router",
            lambda hp: True,
            "llama.cpp weighs the experts by a softmax over the chosen ones",
        ),
    ),
    ignored=frozenset({"input_jitter_noise"}),
    derived=ROPE_TENSORS,
)
