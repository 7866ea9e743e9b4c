"""gemma4 (text): other heads in layers without a window, shared keys and values, a scale a layer.

Layers without a window have longer heads, perhaps fewer of them for keys, perhaps no values of
their own, and rotate only the first elements of a head. Some models have an embedding a layer, some
experts besides the MLP. A GGUF says which elements rotate by a tensor of divisors. Sources:
transformers' modeling_gemma4 and modeling_gemma4_unified; the gguf package's name map; the
converter's gemma.py; llama.cpp's gemma4.cpp.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from aprfmt.arch import hyper_rules, losses, moe
from aprfmt.arch.gemma import NO_BIASES, embedding_scale_rule
from aprfmt.arch.gemma2 import softcap_rule
from aprfmt.arch.gemma3n import (
    BIAS,
    OUT_BIAS,
    OWN,
    PADDED,
    PER,
    REUSED,
    four_norms,
    listed_windows,
    own_kv_rule,
    per_layer_embeddings,
    per_layer_inputs,
    per_layer_sizes,
)
from aprfmt.arch.joining_steps import Split
from aprfmt.arch.layer_kinds import KV_HEADS
from aprfmt.arch.rope import rope_rules
from aprfmt.arch.rope_gguf import FREQS, UNTURNED
from aprfmt.arch.rope_hf import RopeDefaults, full_head_dim
from aprfmt.arch.sliding_window import window_period
from aprfmt.arch.spec import (
    ArchSpec,
    Binding,
    BlockSpec,
    DerivedTensor,
    Facts,
    Found,
    HyperRule,
    Params,
    PerLayer,
    Read,
)
from aprfmt.arch.tensor_rows import (
    KV,
    LAYER,
    Q,
    RoleRow,
    Rows,
    linear,
    make_tables,
    norm,
    with_model_rows,
)
from aprfmt.arch.value_checks import boolean, finite_number, sequence, whole_number
from aprfmt.base.protocols import Value

_LOCAL, _FULL = "window_layers", "!window_layers"
_GQ, _GKV = "n_heads*global_head_dim", "global_kv_heads*global_head_dim"


def _write_nothing(value: Value, hp: Params) -> Params:
    """Return {}: the write function of a hyperparameter that this style has no key for."""
    return {}


def _read_logit_softcap(facts: Facts, hp: Params) -> Found:
    """Return a GGUF's (softcap of the logits, key), where 0 means None; None without the key."""
    found = facts.first(_CAP)
    return None if found is None else (finite_number(*found) or None, found[1])


# llama.cpp caps the logits at 30 unless a GGUF says otherwise; 0 switches it off.
_CAP = "{arch}.final_logit_softcapping"
_FINAL_CAP = replace(
    softcap_rule("final_softcap", "final_logit_softcapping", "final_logit_softcapping", None),
    read={"gguf": _read_logit_softcap},
    write={"gguf": lambda value, hp: {_CAP: value or 0.0}},
    default_in={"gguf": 30.0},
)


def _unnamed_row(role: str, shape: tuple[str, ...], needs: str) -> RoleRow:
    """Return the tensor-table row with a role's shape in the layers where `needs` holds.

    The row names no stored tensor: the names in the role's first row are used.
    """
    return RoleRow(role, "", shape, needs, gguf="")


def _attention_rows() -> Rows:
    """Return the tensor-table rows of attention, for layers with a window and without one."""
    own, other, dim = f"{_LOCAL} & {OWN}", f"{_FULL} & {OWN}", "global_head_dim"
    valued = f"{other} & !value_is_key"
    return (
        *linear("attn_q", "self_attn.q_proj", Q, "hidden_size", _LOCAL, bias=BIAS),
        *linear("attn_k", "self_attn.k_proj", KV, "hidden_size", own, bias=BIAS),
        *linear("attn_v", "self_attn.v_proj", KV, "hidden_size", own, bias=BIAS),
        *linear("attn_output", "self_attn.o_proj", "hidden_size", Q, _LOCAL, bias=OUT_BIAS),
        *norm("attn_q_norm", "self_attn.q_norm", ("head_dim",), _LOCAL),
        *norm("attn_k_norm", "self_attn.k_norm", ("head_dim",), own),
        _unnamed_row("attn_q.weight", (_GQ, "hidden_size"), _FULL),
        _unnamed_row("attn_k.weight", (_GKV, "hidden_size"), other),
        _unnamed_row("attn_v.weight", (_GKV, "hidden_size"), valued),
        _unnamed_row("attn_output.weight", ("hidden_size", _GQ), _FULL),
        _unnamed_row("attn_q.bias", (_GQ,), f"{_FULL} & {BIAS}"),
        _unnamed_row("attn_k.bias", (_GKV,), f"{other} & {BIAS}"),
        _unnamed_row("attn_v.bias", (_GKV,), f"{valued} & {BIAS}"),
        _unnamed_row("attn_output.bias", ("hidden_size",), f"{_FULL} & {OUT_BIAS}"),
        _unnamed_row("attn_q_norm.weight", (dim,), _FULL),
        _unnamed_row("attn_k_norm.weight", (dim,), other),
    )


def _mlp_rows() -> Rows:
    """Return the tensor-table rows of the dense MLP, for layers of usual and of twice the width."""
    usual, wide = "!wide_layers", "wide_layers"
    into, out = ("2*ffn_size", "hidden_size"), ("hidden_size", "2*ffn_size")
    return (
        *linear("ffn_gate", "mlp.gate_proj", "ffn_size", "hidden_size", usual),
        *linear("ffn_up", "mlp.up_proj", "ffn_size", "hidden_size", usual),
        *linear("ffn_down", "mlp.down_proj", "hidden_size", "ffn_size", usual),
        *(_unnamed_row(f"ffn_{name}.weight", into, wide) for name in ("gate", "up")),
        _unnamed_row("ffn_down.weight", out, wide),
    )


def _expert_rows() -> Rows:
    """Return the tensor-table rows of the router, the experts and the norms around them."""
    on = "moe_layers"
    into = ("n_experts", "moe_ffn_size", "hidden_size")
    return (
        *norm("post_ffw_norm_1", "post_feedforward_layernorm_1", needs=on),
        *norm("pre_ffw_norm_2", "pre_feedforward_layernorm_2", needs=on),
        RoleRow("ffn_gate_inp.weight", "router.proj.weight", ("n_experts", "hidden_size"), on),
        RoleRow("ffn_gate_inp.scale", "router.scale", ("hidden_size",), on),
        *(RoleRow(f"ffn_{part}_exps.weight", "", into, on, gguf="") for part in ("gate", "up")),
        RoleRow(
            "ffn_down_exps.weight",
            "experts.down_proj",
            ("n_experts", "hidden_size", "moe_ffn_size"),
            on,
        ),
        RoleRow("ffn_down_exps.scale", "router.per_expert_scale", ("n_experts",), on),
        *norm("post_ffw_norm_2", "post_feedforward_layernorm_2", needs=on),
    )


_JOINED = ("ffn_gate_exps.weight", "ffn_up_exps.weight")
_HALVES = (Split(("moe_ffn_size", "moe_ffn_size"), axis=1),)


_ROPE = RopeDefaults(theta=1e6, theta_local=10000.0, layers="full", nested=True, new=True)


def _rope_rules() -> tuple[HyperRule, ...]:
    """Return the rules for rope; by default a quarter of each head without a window is rotated."""

    def usual(hp: Params) -> Params:
        """Return the default rope scaling of layers without a window, in normal form.

        It rotates the first quarter of a head's pairs; `rotated` is their number of elements.
        """
        return {
            "type": "proportional",
            "factor": 1.0,
            "rotated": 2 * int(0.25 * full_head_dim(hp) // 2),
        }

    def change_rule(rule: HyperRule) -> HyperRule:
        """Return a shared rope rule, with gemma 4's default for `rope_dim` and `rope_scaling`."""
        if rule.name == "rope_dim":
            return HyperRule("rope_dim", default=lambda hp: hp["head_dim"])
        return replace(rule, default_in={"hf": usual}) if rule.name == "rope_scaling" else rule

    return tuple(map(change_rule, rope_rules(_ROPE)))


def _rope_divisors(hp: Params) -> Sequence[float]:
    """Return the divisors of a GGUF's rope_freqs tensor, one for each pair of a full head.

    UNTURNED for a pair that is not rotated. llama.cpp asks for the tensor even where all pairs are
    rotated.
    """
    scaling, pairs = hp["rope_scaling"], full_head_dim(hp) // 2
    if scaling is None or scaling["type"] != "proportional":
        return (1.0,) * pairs
    turned = int(scaling["rotated"]) // 2
    return (float(scaling["factor"]),) * turned + (UNTURNED,) * (pairs - turned)


def _default_window_layers(facts: Facts | None, hp: Params) -> PerLayer:
    """Return one boolean a layer: True for a window, in all but every sixth and the last."""
    return (*window_period(6)(facts, hp)[:-1], False)


def _window_rules(size: int) -> tuple[HyperRule, HyperRule]:
    """Return (the rule for the window's size, the rule for the layers with a window).

    The last layer never has a window.
    """
    positions, layers = listed_windows(size, _default_window_layers)

    def read(facts: Facts, hp: Params) -> Found:
        """Return (one boolean per layer: it has a window, key) of config.json.

        None without the key. The last layer never has a window.
        """
        found = layers.read["hf"](facts, hp)
        return None if found is None else ((*found[0][:-1], False), found[1])

    def check(value: Value, facts: Facts, hp: Params) -> str:
        """Return a warning if config.json lists a window for the last layer.

        Else what the shared rule's check returns. `value` has one boolean per layer. "" says that
        there is no warning.
        """
        assert layers.check is not None
        said, listed = layers.check(value, facts, hp), facts.first("layer_types")
        if listed is None or sequence(*listed)[-1] == "full_attention":
            return said
        return f"{listed[1]}: the last layer has a window; transformers takes it to have none"

    return positions, replace(layers, read={**layers.read, "hf": read}, check=check)


# What a published model has, or another, never both: hyperparameter and config.json's key.
_MIXES = (
    ("n_experts", PER), ("n_experts", "shared"), ("n_experts", "wide_layers"),
    ("value_is_key", PER), ("value_is_key", "shared"),
)  # fmt: skip
_WORDS: Mapping[str, str] = {
    "n_experts": "experts (enable_moe_block)",
    PER: "an embedding a layer (hidden_size_per_layer_input)",
    "shared": "layers without keys of their own (num_kv_shared_layers)",
    "wide_layers": "wider MLPs (use_double_wide_mlp)",
    "value_is_key": "keys that are the values (attention_k_eq_v)",
}


def _unpublished_mix(hp: Params) -> str:
    """Return in words two features of a model that no published one has together; "" for none.

    `hp` are the model's hyperparameters. A check warns of such a model.
    """
    has = {
        "n_experts": any(hp["moe_layers"]), PER: hp[PER] > 0, "shared": not all(hp[OWN]),
        "wide_layers": any(hp["wide_layers"]),
        "value_is_key": hp["value_is_key"] and not all(hp[_LOCAL]),
    }  # fmt: skip
    for one, other in _MIXES:
        if has[one] and has[other]:
            return f"{_WORDS[one]} and {_WORDS[other]}"
    return ""


def _read_full_layer_size(key: str, layer_key: str) -> Read:
    """Return a read function for a size of layers without a window.

    It takes `key`, else `layer_key` of the first layer in `per_layer_config` that has it.
    """

    def read(facts: Facts, hp: Params) -> Found:
        """Return (size of layers without a window, key) of config.json.

        None without `key` and `layer_key`. `key` counts, else `layer_key` of the first layer in
        `per_layer_config` that has it.
        """
        stated, each = facts.first(key), facts.first("per_layer_config")
        if stated is not None or each is None or not isinstance(each[0], Mapping):
            return stated
        rows = [row for row in each[0].values() if isinstance(row, Mapping)]
        sizes = [row[layer_key] for row in rows if layer_key in row]
        return (whole_number(sizes[0], each[1], 1), each[1]) if sizes else None

    return read


def _lacks_value_projections(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether any layer stores a key projection but no value projection.

    `shapes` is {role key: shape} of the stored tensors.
    """
    return any(
        key.endswith(".attn_k.weight") and key.replace("attn_k", "attn_v") not in shapes
        for key in shapes
    )


_LENGTH = "{arch}.attention.key_length"


def _write_head_lengths(hp: Params) -> Params:
    """Return GGUF's {key: head length}, of layers without ("") and with ("_swa") a window."""
    lengths = {"": hp["global_head_dim"], "_swa": hp["head_dim"]}
    keys = {
        f"{{arch}}.attention.{part}_length{kind}": size
        for kind, size in lengths.items()
        for part in ("key", "value")
    }
    return keys | {f"{{arch}}.rope.dimension_count{kind}": size for kind, size in lengths.items()}


def _read_kv_heads(windowed: bool, facts: Facts, hp: Params) -> Found:
    """Return (key-value heads, key) of a GGUF's layers with a window, or of those without.

    A list has a number for each layer; the first one of such a layer is taken. None without the
    key.
    """
    found = facts.first(KV_HEADS)
    if found is None or isinstance(found[0], (int, float)):
        return found
    pattern = facts.first("{arch}.attention.sliding_window_pattern")
    counts = sequence(found[0], found[1], 1)
    on = sequence(*pattern) if pattern is not None else [True] * len(counts)
    here = [count for count, window in zip(counts, on, strict=False) if bool(window) is windowed]
    return ((here or counts)[0], found[1])


def _write_kv_heads(value: Value, hp: Params) -> Params:
    """Return GGUF's {key: key-value heads}: one number, or a list if layers differ."""
    if value == hp["global_kv_heads"]:
        return {KV_HEADS: value}
    return {KV_HEADS: [value if on else hp["global_kv_heads"] for on in hp["window_layers"]]}


_WIDTH = "{arch}.feed_forward_length"


def _read_ffn_size(facts: Facts, hp: Params) -> Found:
    """Return (the smallest MLP width, key) of a GGUF, which may list one for each layer.

    None without the key.
    """
    found = facts.first(_WIDTH)
    if found is None or isinstance(found[0], (int, float)):
        return found
    return min(whole_number(width, found[1], 1) for width in sequence(*found, 1)), found[1]


def _write_ffn_size(value: Value, hp: Params) -> Params:
    """Return GGUF's {key: MLP width}, a list with twice the width for the wide layers."""
    wide = hp["wide_layers"]
    return {_WIDTH: [value * (1 + on) for on in wide] if any(wide) else value}


_NORMS = four_norms()


def _wide_layers_rule() -> HyperRule:
    """Return the rule for the layers with MLPs of twice the width: those that reuse keys."""

    def read(facts: Facts, hp: Params) -> Found:
        """Return (one boolean per layer: its MLP is twice as wide, key) of config.json's switch.

        With the switch on, the layers without keys of their own are wide. None without the
        switch.
        """
        found = facts.first("use_double_wide_mlp")
        if found is None:
            return None
        return tuple(boolean(*found) and not own for own in hp[OWN]), found[1]

    def read_gguf(facts: Facts, hp: Params) -> Found:
        """Return (one boolean per layer: its MLP is wider than the narrowest, key) of a GGUF.

        None where the GGUF has no list of MLP widths.
        """
        found = facts.first(_WIDTH)
        if found is None or isinstance(found[0], (int, float)):
            return None
        widths = sequence(*found, hp["n_layers"])
        return tuple(width > min(widths) for width in widths[: hp["n_layers"]]), found[1]

    return HyperRule(
        "wide_layers",
        default=hyper_rules.per_layer(False),
        read={"hf": read, "gguf": read_gguf},
        write={"hf": lambda value, hp: {"use_double_wide_mlp": any(value)}, "gguf": _write_nothing},
    )


def _moe_layers_rule() -> HyperRule:
    """Return the rule for which layers have experts: all of them or none."""

    def read(facts: Facts, hp: Params) -> Found:
        """Return (one boolean per layer: it has experts, key) of config.json; None without the key.

        All layers have experts, or none.
        """
        found = facts.first("enable_moe_block")
        return None if found is None else ((boolean(*found),) * hp["n_layers"], found[1])

    def read_gguf(facts: Facts, hp: Params) -> Found:
        """Return (one boolean per layer: it has experts, key) of a GGUF: all True or all False."""
        return (hp["n_experts"] > 0,) * hp["n_layers"], "{arch}.expert_count"

    return HyperRule(
        "moe_layers",
        default=hyper_rules.per_layer(False),
        read={"hf": read, "gguf": read_gguf},
        write={"hf": lambda value, hp: {"enable_moe_block": any(value)}, "gguf": _write_nothing},
    )


def _count_rule(name: str, hf: str, gguf: str) -> HyperRule:
    """Return the rule of a whole number, 0 by default, with its keys of both styles."""
    return HyperRule(name, {"hf": (hf,), "gguf": (f"{{arch}}.{gguf}",)}, "int", 0)


def _read_global_kv_heads(facts: Facts, hp: Params) -> Found:
    """Return config.json's (key-value heads, key) of layers without a window.

    None where the key is not used: transformers reads it only where keys are values too.
    """
    found = _read_full_layer_size("num_global_key_value_heads", "num_key_value_heads")(facts, hp)
    equal = facts.first("attention_k_eq_v")
    stated = found is not None and found[1] == "num_global_key_value_heads"
    return None if stated and not (equal is not None and boolean(*equal)) else found


def _shared_rules(window: int, context: int, per_layer: int) -> tuple[HyperRule, ...]:
    """Return the hyperparameter rules of every gemma 4.

    `window` and `context` are the default window size and context length, `per_layer` is the
    default width of the embeddings by layer.
    """
    return hyper_rules.hyper_table(
        hyper_rules.hidden_size(2304),
        hyper_rules.n_layers(30),
        hyper_rules.n_heads(8),
        replace(
            hyper_rules.n_kv_heads(4),
            write={"gguf": _write_kv_heads},
            read={"gguf": lambda facts, hp: _read_kv_heads(True, facts, hp)},
        ),
        HyperRule(
            "head_dim",
            {"hf": ("head_dim",), "gguf": (_LENGTH + "_swa",)},
            "size",
            256,
            write={"gguf": lambda value, hp: _write_head_lengths(hp)},
        ),
        HyperRule("value_head_dim", default=lambda hp: hp["head_dim"]),
        HyperRule(
            "global_head_dim",
            {"hf": ("global_head_dim",), "gguf": (_LENGTH,)},
            "size",
            512,
            {"gguf": lambda hp: hp["head_dim"]},
            read={"hf": _read_full_layer_size("global_head_dim", "head_dim")},
            write={"gguf": lambda value, hp: {}},
        ),
        HyperRule(
            "global_kv_heads",
            {"hf": ("num_global_key_value_heads",)},
            "size",
            lambda hp: hp["n_kv_heads"],
            read={
                "hf": _read_global_kv_heads,
                "gguf": lambda facts, hp: _read_kv_heads(False, facts, hp),
            },
            write={"gguf": _write_nothing},
        ),
        replace(
            hyper_rules.ffn_size(9216),
            read={"gguf": _read_ffn_size},
            write={"gguf": _write_ffn_size},
            shape=None,
        ),
        hyper_rules.vocab_size(262144),
        hyper_rules.context_length(context),
        hyper_rules.activation("gelu_tanh", "hidden_activation"),
        hyper_rules.tied_embeddings(True),
        *hyper_rules.attention_biases(),
        hyper_rules.fixed("qk_norm", True),
        hyper_rules.fixed("attn_scale", 1.0),
        *_rope_rules(),
        *_window_rules(window),
        _FINAL_CAP,
        embedding_scale_rule(),
        own_kv_rule(0),
        _wide_layers_rule(),
        HyperRule(
            "value_is_key",
            {"hf": ("attention_k_eq_v",)},
            "bool",
            False,
            shape=_lacks_value_projections,
        ),
        *per_layer_sizes(262144, per_layer),
        _count_rule("n_experts", "num_experts", "expert_count"),
        _count_rule("n_experts_used", "top_k_experts", "expert_used_count"),
        _count_rule("moe_ffn_size", "moe_intermediate_size", "expert_feed_forward_length"),
        _moe_layers_rule(),
        moe.router_rule("softmax"),
        hyper_rules.fixed("norm_topk", True),
    )


_TENSORS, _BINDINGS = make_tables(
    with_model_rows(
        *per_layer_embeddings(PER),
        *_NORMS[0],
        *_attention_rows(),
        *_NORMS[1],
        *_NORMS[2],
        *_mlp_rows(),
        *_expert_rows(),
        *_NORMS[3],
        *per_layer_inputs(PER),
        RoleRow("layer_output_scale.weight", "layer_scalar", ("1",)),
    ),
    hf_first=(Binding((LAYER + "experts.gate_up_proj",), _JOINED, _HALVES),),
    gguf_first=(Binding(("blk.{L}.ffn_gate_up_exps.weight",), _JOINED, _HALVES),),
)
GEMMA4 = ArchSpec(
    name="gemma4",
    hyper=_shared_rules(512, 131072, 256),
    tensors=_TENSORS,
    bindings=_BINDINGS,
    block=BlockSpec(
        norm_cast="after_weight",
        placement="sandwich",
        qk_norm="head",
        value_norm="plain",
        experts="parallel",
        layer_scale=True,
        router_cast="logits",
    ),
    lost=(*losses.common_losses("gelu_tanh"), losses.ONE_BIAS_KEY, NO_BIASES, PADDED, REUSED),
    mixed=_unpublished_mix,
    derived=(DerivedTensor({"gguf": FREQS}, _rope_divisors),),
    ignored=frozenset(
        """attention.value_length attention.value_length_swa rope.dimension_count
        rope.dimension_count_swa per_layer_config hidden_act""".split()
    ),
)
# The text of the models that read images and sounds without towers: no experts, no embedding a
# layer. A GGUF of it is one of gemma4.
GEMMA4_UNIFIED = replace(
    GEMMA4,
    name="gemma4_unified",
    hyper=_shared_rules(1024, 262144, 0),
    called={},
    evidence=lambda names, values: False,
)
