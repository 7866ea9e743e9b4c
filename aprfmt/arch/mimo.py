"""MiMo by its names: mimo (7B), which is qwen2, and mimo_v2 (V2-Flash), both with draft heads.

MiMo-7B's heads are under `model.mtp_layers`, and their join takes the hidden state first. V2's
are under `model.mtp.layers`: a windowed layer with a dense MLP each. V2's layers without a
window have fewer key heads, and its value heads are shorter. GGUF calls MiMo-7B qwen2 and knows
no heads of it. V2.5's `qkv_proj`, whose rows are in an order of ranks that no file gives, has no
role. Sources: the checkpoints' modeling files; transformers' modeling_mimo_v2_flash; vLLM's
mimo_mtp.py and mimo_v2_mtp.py; llama.cpp's mimo2.cpp and the converter's mimo.py.
"""

from dataclasses import replace

from aprfmt.arch import draft_head, hyper_rules, moe
from aprfmt.arch.deepseek import EXPERTS_HF, ROUTER_BIAS, routed_scale_rule
from aprfmt.arch.layer_kinds import KV_HEADS
from aprfmt.arch.layout_steps import HalvesExchanged
from aprfmt.arch.mla import expert_groups_rule
from aprfmt.arch.qwen2 import QWEN2, WINDOW
from aprfmt.arch.qwen2_moe import EXPERT_BINDINGS, EXPERTS, ROUTER
from aprfmt.arch.rope import rope_rules
from aprfmt.arch.rope_hf import RopeDefaults
from aprfmt.arch.sliding_window import Window, window_rules
from aprfmt.arch.spec import MISSING, Binding, DraftNames, Facts, Found, HyperRule, Params, PerLayer
from aprfmt.arch.spec_builders import names_only_spec
from aprfmt.arch.tensor_rows import (
    LAYER,
    Q,
    RoleRow,
    gated_mlp,
    linear,
    make_tables,
    norm,
    with_model_rows,
)
from aprfmt.arch.value_checks import boolean, listed_kinds, sequence, whole_number
from aprfmt.base.protocols import Value

_LOCAL, _FULL = "window_layers", "!window_layers"
_PATTERN = "{arch}.attention.sliding_window_pattern"
_COUNTS = ("num_nextn_predict_layers",)


def _head_names(layer: str, before: tuple[str, str, str], last: str, **more: str) -> dict[str, str]:
    """Return {stored name template: role} of a draft head's own tensors.

    `before` are the names of its two norms and its join, `last` of its last norm, below `layer`.
    `more` are further ones, by role.
    """
    roles = (*draft_head.NORMS, f"{draft_head.JOIN}.weight", "output_norm.weight")
    names = {
        f"{layer}{name}.weight": role for name, role in zip((*before, last), roles, strict=True)
    }
    return names | {f"{layer}{name}.weight": f"{role}.weight" for role, name in more.items()}


_SEVEN = "model.mtp_layers.{I}."
MIMO = names_only_spec(
    "mimo",
    (QWEN2.tensors, QWEN2.bindings),
    hyper_rules.hyper_table(
        hyper_rules.context_length(32768),
        hyper_rules.flag("attention_bias", True, present=("attn_q.bias",)),
        *window_rules(WINDOW),
    ),
    evidence=lambda names, values: False,  # a GGUF's qwen2 is qwen2
    ignored=QWEN2.ignored | {*_COUNTS},
    derived=QWEN2.derived,
    lost=QWEN2.lost,
    draft={
        "hf": DraftNames(
            _SEVEN,
            _head_names(
                _SEVEN, ("token_layernorm", "hidden_layernorm", "input_proj"), "final_layernorm"
            ),
            _COUNTS,
            (HalvesExchanged(),),
        )
    },
)


def _read_window_layers(facts: Facts | None, hp: Params) -> PerLayer:
    """Return one boolean a layer: config.json's list, else all but the first and every sixth."""
    listed = None if facts is None else facts.first("hybrid_layer_pattern")
    if listed is None:
        return tuple(i != 0 and (i + 1) % 6 != 0 for i in range(hp["n_layers"]))
    marks = sequence(listed[0], listed[1], hp["n_layers"])[: hp["n_layers"]]
    return tuple(whole_number(mark, listed[1], 0, 1) == 1 for mark in marks)


def _window_rules() -> tuple[HyperRule, HyperRule]:
    """Return (the rule for the window's size, the rule for the layers with a window).

    A GGUF lists one boolean a layer.
    """
    positions, layers = window_rules(Window(129, MISSING, _read_window_layers, stated=True))
    write = {**layers.write, "gguf": lambda value, hp: {_PATTERN: list(value)}}
    return positions, replace(layers, write=write)


def _read_moe_layers(facts: Facts, hp: Params) -> Found:
    """Return (which layers have experts, key) of config.json; None without a list.

    1 in `moe_layer_freq`, or "sparse" among `mlp_layer_types`.
    """
    found = facts.first("moe_layer_freq", "mlp_layer_types")
    if found is None:
        return None
    known = (0, 1) if found[1] == "moe_layer_freq" else ("sparse", "dense")
    kinds = listed_kinds(*found, hp["n_layers"], known)
    return tuple(kind in (1, "sparse") for kind in kinds), found[1]


def _read_moe_layers_gguf(facts: Facts, hp: Params) -> Found:
    """Return (one boolean a layer, the router's role): whether a layer stores a router.

    No key of a GGUF says which layers have experts.
    """
    there = (f"L{i}.ffn_gate_inp.weight" in facts.shapes for i in range(hp["n_layers"]))
    return tuple(there), "ffn_gate_inp.weight"


def _read_window_kv_heads(facts: Facts, hp: Params) -> Found:
    """Return (key heads of layers with a window, key) of config.json.

    Without their own key they are twice those of the other layers. None without both keys.
    """
    stated, others = facts.first("swa_num_key_value_heads"), facts.first("num_key_value_heads")
    if stated is not None or others is None:
        return stated
    return 2 * whole_number(*others, 1), others[1]


def _read_kv_heads_gguf(windowed: bool, facts: Facts) -> Found:
    """Return (key heads, key) of a GGUF's layers with a window, or of those without.

    In a list the first such layer's number is taken. None without the key.
    """
    found, pattern = facts.first(KV_HEADS), facts.first(_PATTERN)
    if found is None or isinstance(found[0], int) or pattern is None:
        return found
    counts, on = sequence(*found, 1), sequence(*pattern, 1)
    here = [count for count, mark in zip(counts, on, strict=False) if bool(mark) is windowed]
    return (here or counts)[0], found[1]


def _write_kv_heads(value: Value, hp: Params) -> Params:
    """Return GGUF's {key: key heads by layer}."""
    return {KV_HEADS: [value if on else hp["global_kv_heads"] for on in hp[_LOCAL]]}


def _read_sink_layers(facts: Facts, hp: Params) -> Found:
    """Return (which layers' heads have a sink, key) of config.json's two keys; None without."""
    local = facts.first("add_swa_attention_sink_bias")
    full = facts.first("add_full_attention_sink_bias")
    if local is None and full is None:
        return None
    on = [found is not None and boolean(*found) for found in (full, local)]
    return tuple(on[window] for window in hp[_LOCAL]), (local or full or ("", ""))[1]


def _write_sinks(value: Value, hp: Params) -> Params:
    """Return config.json's {key: boolean} for layers with a window and for those without."""
    kinds = {window: on for window, on in zip(hp[_LOCAL], value, strict=True)}
    return {
        "add_swa_attention_sink_bias": kinds.get(True, False),
        "add_full_attention_sink_bias": kinds.get(False, False),
    }


def _kv_rows(role: str, hf: str, width: str) -> tuple[RoleRow, RoleRow]:
    """Return the two tensor-table rows of a projection to keys or values.

    The first is for layers with a window, the second for layers without.
    """
    row, *_ = linear(role, hf, f"n_kv_heads*{width}", "hidden_size", _LOCAL)
    return row, RoleRow(row.role, "", (f"global_kv_heads*{width}", "hidden_size"), _FULL, gguf="")


_EPS = hyper_rules.norm_eps(1e-5)
_V2 = "model.mtp.layers.{I}."
MIMO_V2 = names_only_spec(
    "mimo_v2",
    make_tables(
        with_model_rows(
            *norm("attn_norm", "input_layernorm"),
            *linear("attn_q", "self_attn.q_proj", Q, "hidden_size"),
            *_kv_rows("attn_k", "self_attn.k_proj", "head_dim"),
            *_kv_rows("attn_v", "self_attn.v_proj", "value_head_dim"),
            *linear("attn_output", "self_attn.o_proj", "hidden_size", "n_heads*value_head_dim"),
            RoleRow(
                "attn_sinks.weight", "self_attn.attention_sink_bias", ("n_heads",), "sink_layers"
            ),
            *norm("ffn_norm", "post_attention_layernorm"),
            *gated_mlp(needs="!moe_layers"),
            ROUTER,
            ROUTER_BIAS,
            *EXPERTS,
        ),
        hf_first=EXPERT_BINDINGS,
        # transformers' name in memory
        hf_more=(Binding((LAYER + "self_attn.sinks",), ("attn_sinks.weight",)),),
    ),
    hyper_rules.hyper_table(
        draft_head.main_layers_rule(),
        hyper_rules.n_heads(64),
        replace(
            hyper_rules.n_kv_heads(),
            keys={"hf": ("swa_num_key_value_heads",)},
            shape=None,
            read={
                "hf": _read_window_kv_heads,
                "gguf": lambda facts, hp: _read_kv_heads_gguf(True, facts),
            },
            write={"gguf": _write_kv_heads},
        ),
        hyper_rules.head_dim(192),
        hyper_rules.size(
            "value_head_dim",
            "v_head_dim",
            "attention.value_length",
            default=lambda hp: hp["head_dim"],
            hf_default=128,
        ),
        hyper_rules.context_length(131072),
        replace(_EPS, keys={**_EPS.keys, "hf": ("layernorm_epsilon", "rms_norm_eps")}),
        *rope_rules(
            RopeDefaults(
                theta=5e6,
                theta_local=10000.0,
                local_key="swa_rope_theta",
                partial=0.334,
                nested=True,
            )
        ),
        *_window_rules(),
        *moe.expert_count_rules(256, 8, EXPERTS_HF),
        moe.expert_size_rule(hf_default=2048),
        HyperRule(
            "moe_layers",
            default=lambda hp: tuple(i > 0 for i in range(hp["n_layers"])),
            read={"hf": _read_moe_layers, "gguf": _read_moe_layers_gguf},
            write={"hf": lambda value, hp: {"moe_layer_freq": [int(on) for on in value]}},
        ),
        moe.norm_topk_rule(True, gguf=True),
        routed_scale_rule(1.0),
        expert_groups_rule("n_expert_groups", "n_group", "expert_group_count", 1),
        expert_groups_rule("n_expert_groups_used", "topk_group", "expert_group_used_count", 1),
        moe.router_rule("sigmoid_bias"),
        HyperRule(
            "global_kv_heads",
            {"hf": ("num_key_value_heads",)},
            "size",
            4,
            read={"gguf": lambda facts, hp: _read_kv_heads_gguf(False, facts)},
            write={"gguf": lambda value, hp: {}},
        ),
        HyperRule(
            "value_scale",
            {"hf": ("attention_value_scale",), "gguf": ("{arch}.attention.value_scale",)},
            "float",
            None,
        ),
        HyperRule(
            "sink_layers",
            default=lambda hp: hp[_LOCAL],
            read={"hf": _read_sink_layers},
            write={"hf": _write_sinks},
        ),
    ),
    ignored=frozenset(
        """num_nextn_predict_layers swa_num_attention_heads swa_head_dim swa_v_head_dim
        sliding_window_size attention_chunk_size hybrid_block_size topk_method scoring_func
        n_shared_experts""".split()
    ),
    draft={
        "gguf": replace(
            draft_head.NEXTN["gguf"],
            tensors={
                **_head_names(
                    "blk.{N}.",
                    (draft_head.EMBED_NORM, draft_head.HIDDEN_NORM, draft_head.JOIN),
                    "layer_output_norm",
                ),
                **draft_head.NEXTN["gguf"].tensors,
            },
        ),
        "hf": DraftNames(
            _V2,
            _head_names(
                _V2, ("enorm", "hnorm", "eh_proj"), "final_layernorm", ffn_norm="pre_mlp_layernorm"
            ),
            _COUNTS,
        ),
    },
    draft_layer={"window_layers": True, "moe_layers": False, "sink_layers": True},
)
