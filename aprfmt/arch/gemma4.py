"""gemma4 (text): other heads in layers without a window, shared keys and values, a scale a layer.

Layers without a window have longer heads, perhaps fewer of them for keys, perhaps no values of
their own, and rotate a part of a head. Some models have an embedding a layer, some experts beside
the MLP. A GGUF says which part rotates by a tensor of divisors. Sources: transformers'
modeling_gemma4; the gguf package's name map; the converter's gemma.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from aprfmt.arch import rules
from aprfmt.arch.gemma import embedding_scale
from aprfmt.arch.gemma2 import softcap
from aprfmt.arch.gemma3n import (
    OWN,
    PADDED,
    PER,
    four_norms,
    listed_windows,
    own_kv,
    per_layer_embeddings,
    per_layer_inputs,
    per_layer_sizes,
)
from aprfmt.arch.gpt2 import NO_ROPE
from aprfmt.arch.named import named
from aprfmt.arch.rows import KV, Q, RoleRow, around, linear, norm, tables
from aprfmt.arch.spec import DerivedTensor, Facts, HyperRule, Read
from aprfmt.arch.values import boolean, number, sequence
from aprfmt.arch.values import whole as whole_number
from aprfmt.base.protocols import Value

Params = Mapping[str, Value]
Found = tuple[Value, str] | None
Rows = tuple[RoleRow, ...]
_LOCAL, _FULL = "window_layers", "!window_layers"
_GQ, _GKV = "n_heads*global_head_dim", "global_kv_heads*global_head_dim"
_UNTURNED = 1e30  # a divisor that leaves a pair where it is


def _nothing(value: Value, hp: Params) -> Params:
    return {}


def _read_cap(facts: Facts, hp: Params) -> Found:
    found = facts.first(_CAP)
    return None if found is None else (number(*found) or None, found[1])


# llama.cpp caps the logits at 30 unless a GGUF says otherwise; 0 switches it off.
_CAP = "{arch}.final_logit_softcapping"
_FINAL_CAP = replace(
    softcap("final_softcap", "final_logit_softcapping", "final_logit_softcapping", None),
    read={"gguf": _read_cap},
    write={"gguf": lambda value, hp: {_CAP: value or 0.0}},
    default_in={"gguf": 30.0},
)


def _also(role: str, shape: tuple[str, ...], needs: str) -> RoleRow:
    """Return the rule of a role in layers of the other kind: other shape, same names."""
    return RoleRow(role, "", shape, needs, gguf="")


def _attention() -> Rows:
    own, other, dim = f"{_LOCAL} & {OWN}", f"{_FULL} & {OWN}", "global_head_dim"
    valued = f"{other} & !value_is_key"
    return (
        *linear("attn_q", "self_attn.q_proj", Q, "hidden_size", _LOCAL),
        *linear("attn_k", "self_attn.k_proj", KV, "hidden_size", own),
        *linear("attn_v", "self_attn.v_proj", KV, "hidden_size", own),
        *linear("attn_output", "self_attn.o_proj", "hidden_size", Q, _LOCAL),
        *norm("attn_q_norm", "self_attn.q_norm", ("head_dim",), _LOCAL),
        *norm("attn_k_norm", "self_attn.k_norm", ("head_dim",), own),
        _also("attn_q.weight", (_GQ, "hidden_size"), _FULL),
        _also("attn_k.weight", (_GKV, "hidden_size"), other),
        _also("attn_v.weight", (_GKV, "hidden_size"), valued),
        _also("attn_output.weight", ("hidden_size", _GQ), _FULL),
        _also("attn_q_norm.weight", (dim,), _FULL),
        _also("attn_k_norm.weight", (dim,), other),
    )


def _mlp() -> Rows:
    usual, wide = "!wide_layers", "wide_layers"
    into, out = ("2*ffn_size", "hidden_size"), ("hidden_size", "2*ffn_size")
    return (
        *linear("ffn_gate", "mlp.gate_proj", "ffn_size", "hidden_size", usual),
        *linear("ffn_up", "mlp.up_proj", "ffn_size", "hidden_size", usual),
        *linear("ffn_down", "mlp.down_proj", "hidden_size", "ffn_size", usual),
        *(_also(f"ffn_{name}.weight", into, wide) for name in ("gate", "up")),
        _also("ffn_down.weight", out, wide),
    )


def _experts() -> Rows:
    on = "moe_layers"
    return (
        *norm("post_ffw_norm_1", "post_feedforward_layernorm_1", needs=on),
        *norm("pre_ffw_norm_2", "pre_feedforward_layernorm_2", needs=on),
        RoleRow("ffn_gate_inp.weight", "router.proj.weight", ("n_experts", "hidden_size"), on),
        RoleRow("ffn_gate_inp.scale", "router.scale", ("hidden_size",), on),
        RoleRow("ffn_gate_up_exps.weight", "experts.gate_up_proj",
            ("n_experts", "2*moe_ffn_size", "hidden_size"), on),
        RoleRow("ffn_down_exps.weight", "experts.down_proj",
            ("n_experts", "hidden_size", "moe_ffn_size"), on),
        RoleRow("ffn_down_exps.scale", "router.per_expert_scale", ("n_experts",), on),
        *norm("post_ffw_norm_2", "post_feedforward_layernorm_2", needs=on),
    )  # fmt: skip


def _rope(facts: Facts, kind: str, key: str) -> Found:
    """Return one value of config.json's rope object for a kind of layers."""
    found = facts.first("rope_parameters")
    part = found[0].get(kind) if found is not None else None
    return (part[key], f"rope_parameters.{kind}.{key}") if part and key in part else None


def _theta(name: str, kind: str, gguf: str, default: float) -> HyperRule:
    return HyperRule(
        name, {"gguf": (f"{{arch}}.rope.{gguf}",)}, "positive", default,
        read={"hf": lambda facts, hp: _rope(facts, kind, "rope_theta")},
        write={"hf": _nothing},
    )  # fmt: skip


def _write_rope(value: Value, hp: Params) -> Params:
    """Return config.json's rope object."""
    full = {"rope_type": "proportional", "rope_theta": hp["rope_theta"],
            "partial_rotary_factor": value / hp["global_head_dim"]}  # fmt: skip
    local = {"rope_type": "default", "rope_theta": hp["rope_theta_local"]}
    return {"rope_parameters": {"full_attention": full, "sliding_attention": local}}


def _rotated(facts: Facts, hp: Params) -> Found:
    found = _rope(facts, "full_attention", "partial_rotary_factor")
    return None if found is None else (int(number(*found) * hp["global_head_dim"]), found[1])


def _rotated_gguf(facts: Facts, hp: Params) -> Found:
    divisors = facts.vector("rope_freqs.weight")
    if divisors is None:
        return None
    return 2 * sum(divisor < _UNTURNED / 2 for divisor in divisors), "rope_freqs.weight"


def _divisors(hp: Params) -> Sequence[float]:
    turned, pairs = int(hp["global_rope_dim"]) // 2, int(hp["global_head_dim"]) // 2
    return (1.0,) * turned + (_UNTURNED,) * (pairs - turned)


def _global(key: str, layer_key: str) -> Read:
    """Return a function that reads what layers without a window have: stated for all, or each."""

    def read(facts: Facts, hp: Params) -> Found:
        stated, each = facts.first(key), facts.first("per_layer_config")
        if stated is not None or each is None:
            return stated
        sizes = [row[layer_key] for row in each[0].values() if layer_key in row]
        return (whole_number(sizes[0], each[1], 1), each[1]) if sizes else None

    return read


def _without_values(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Say whether a layer has keys and no values."""
    return any(
        key.endswith(".attn_k.weight") and key.replace("attn_k", "attn_v") not in shapes
        for key in shapes
    )


_LENGTH = "{arch}.attention.key_length"


def _lengths(hp: Params) -> Params:
    """Return GGUF's lengths: key and value, of layers without and with a window."""
    lengths = {"": hp["global_head_dim"], "_swa": hp["head_dim"]}
    keys = {f"{{arch}}.attention.{part}_length{kind}": size
            for kind, size in lengths.items() for part in ("key", "value")}  # fmt: skip
    return keys | {f"{{arch}}.rope.dimension_count{kind}": size for kind, size in lengths.items()}


_KV_HEADS = "{arch}.attention.head_count_kv"


def _kv(windowed: bool, facts: Facts, hp: Params) -> Found:
    """Return a GGUF's key heads in layers with or without a window; a list has both."""
    found = facts.first(_KV_HEADS)
    if found is None or isinstance(found[0], (int, float)):
        return found
    pattern = facts.first("{arch}.attention.sliding_window_pattern")
    counts = sequence(found[0], found[1], 1)
    on = sequence(*pattern) if pattern is not None else [True] * len(counts)
    here = [count for count, window in zip(counts, on, strict=False) if bool(window) is windowed]
    return ((here or counts)[0], found[1])


def _write_kv(value: Value, hp: Params) -> Params:
    if value == hp["global_kv_heads"]:
        return {_KV_HEADS: value}
    return {_KV_HEADS: [value if on else hp["global_kv_heads"] for on in hp["window_layers"]]}


_WIDTH = "{arch}.feed_forward_length"


def _widths(facts: Facts, hp: Params) -> Found:
    found = facts.first(_WIDTH)
    if found is None or isinstance(found[0], (int, float)):
        return found
    return min(whole_number(width, found[1], 1) for width in sequence(*found, 1)), found[1]


def _write_widths(value: Value, hp: Params) -> Params:
    wide = hp["wide_layers"]
    return {_WIDTH: [value * (1 + on) for on in wide] if any(wide) else value}


_NORMS = four_norms()


def _wide_rule() -> HyperRule:
    """Return the rule for the layers with wider MLPs: those without keys of their own."""

    def read(facts: Facts, hp: Params) -> Found:
        found = facts.first("use_double_wide_mlp")
        if found is None:
            return None
        return tuple(boolean(*found) and not own for own in hp[OWN]), found[1]

    def gguf(facts: Facts, hp: Params) -> Found:
        found = facts.first(_WIDTH)
        if found is None or isinstance(found[0], (int, float)):
            return None
        widths = sequence(*found, hp["n_layers"])
        return tuple(width > min(widths) for width in widths[: hp["n_layers"]]), found[1]

    return HyperRule(
        "wide_layers",
        default=rules.per_layer(False),
        read={"hf": read, "gguf": gguf},
        write={"hf": lambda value, hp: {"use_double_wide_mlp": any(value)}, "gguf": _nothing},
    )


def _moe_layers() -> HyperRule:
    def read(facts: Facts, hp: Params) -> Found:
        found = facts.first("enable_moe_block")
        return None if found is None else ((boolean(*found),) * hp["n_layers"], found[1])

    def gguf(facts: Facts, hp: Params) -> Found:
        return (hp["n_experts"] > 0,) * hp["n_layers"], "{arch}.expert_count"

    return HyperRule(
        "moe_layers",
        default=rules.per_layer(False),
        read={"hf": read, "gguf": gguf},
        write={"hf": lambda value, hp: {"enable_moe_block": any(value)}, "gguf": _nothing},
    )


def _count(name: str, hf: str, gguf: str) -> HyperRule:
    return HyperRule(name, {"hf": (hf,), "gguf": (f"{{arch}}.{gguf}",)}, "int", 0)


GEMMA4 = named(
    "gemma4",
    tables(around(
        *per_layer_embeddings(PER),
        *_NORMS[0],
        *_attention(),
        *_NORMS[1],
        *_NORMS[2],
        *_mlp(),
        *_experts(),
        *_NORMS[3],
        *per_layer_inputs(PER),
        RoleRow("layer_output_scale.weight", "layer_scalar", ("1",)),
    )),
    rules.hyper_table(
        rules.n_heads(8),
        replace(
            rules.n_kv_heads(4), write={"gguf": _write_kv},
            read={"gguf": lambda facts, hp: _kv(True, facts, hp)},
        ),
        HyperRule("head_dim", {"hf": ("head_dim",), "gguf": (_LENGTH + "_swa",)}, "size", 256,
            write={"gguf": lambda value, hp: _lengths(hp)}),
        HyperRule("value_head_dim", default=lambda hp: hp["head_dim"]),
        replace(
            rules.ffn_size(9216), read={"gguf": _widths}, write={"gguf": _write_widths}, shape=None,
        ),
        rules.vocab_size(262144),
        rules.context_length(131072),
        rules.activation("gelu_tanh", "hidden_activation"),
        rules.tied_embeddings(True),
        rules.fixed("qk_norm", True),
        rules.fixed("attn_scale", 1.0),
        *NO_ROPE,
        _theta("rope_theta", "full_attention", "freq_base", 1e6),
        _theta("rope_theta_local", "sliding_attention", "freq_base_swa", 10000.0),
        HyperRule("rope_dim", default=lambda hp: hp["head_dim"]),
        HyperRule("rope_layers", default=rules.per_layer(True)),
        *listed_windows(512, 6),
        _FINAL_CAP,
        embedding_scale(),
        own_kv(0),
        _wide_rule(),
        HyperRule("value_is_key", {"hf": ("attention_k_eq_v",)}, "bool", False,
            shape=_without_values),
        *per_layer_sizes(262144, 256),
        HyperRule("global_head_dim", {"hf": ("global_head_dim",), "gguf": (_LENGTH,)}, "size",
            lambda hp: hp["head_dim"], read={"hf": _global("global_head_dim", "head_dim")},
            write={"gguf": lambda value, hp: {}}),
        HyperRule("global_kv_heads", {"hf": ("num_global_key_value_heads",)}, "size",
            lambda hp: hp["n_kv_heads"],
            read={"hf": _global("num_global_key_value_heads", "num_key_value_heads"),
                  "gguf": lambda facts, hp: _kv(False, facts, hp)},
            write={"gguf": _nothing}),
        HyperRule("global_rope_dim", kind="int", default=lambda hp: hp["global_head_dim"] // 4,
            read={"hf": _rotated, "gguf": _rotated_gguf},
            write={"hf": _write_rope, "gguf": _nothing}),
        _count("n_experts", "num_experts", "expert_count"),
        _count("n_experts_used", "top_k_experts", "expert_used_count"),
        _count("moe_ffn_size", "moe_intermediate_size", "expert_feed_forward_length"),
        _moe_layers(),
    ),
    derived=(DerivedTensor({"gguf": "rope_freqs.weight"}, _divisors),),
    ignored=frozenset(
        """attention.value_length attention.value_length_swa rope.dimension_count
        rope.dimension_count_swa per_layer_config""".split()
    ),
    lost=(PADDED,),
)  # fmt: skip
