"""deepseek v4: compressed attention, several residual streams, experts listed by token at first.

Every layer's attention sees a window of tokens and, but for windowed layers, keys that stand for
windows of tokens: all of them (`heavily_compressed_attention`), or those that an indexer chooses
(`compressed_sparse_attention`). Published files have their own names; transformers saves these
below `model.`, and has others in memory. Sources: transformers' modeling_deepseek_v4,
configuration_deepseek_v4 and conversion mapping; the converter's deepseek.py, llama.cpp's
deepseek4.cpp.
"""

from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from reprlib import repr as short_repr
from typing import Any

from aprfmt.arch import hyper_rules, losses, moe
from aprfmt.arch.deepseek import routed_scale_rule, sigmoid_router_rule
from aprfmt.arch.joining_steps import Split, Stacked
from aprfmt.arch.layer_kinds import layers_with_role
from aprfmt.arch.layout_steps import Reshaped
from aprfmt.arch.mla import q_lora_rank_rule, shared_experts_rule
from aprfmt.arch.rope import rope_rules
from aprfmt.arch.rope_hf import RopeDefaults, yarn_attention_factor
from aprfmt.arch.spec import Binding, BlockSpec, Facts, Found, HyperRule, Loss, Params, PerLayer
from aprfmt.arch.spec_builders import full_spec
from aprfmt.arch.tensor_rows import Q, RoleRow, make_tables, single_row, with_model_rows
from aprfmt.arch.value_checks import (
    finite_number,
    listed_kinds,
    positive_number,
    sequence,
    shortest_decimal,
    whole_number,
)
from aprfmt.base.protocols import Value
from aprfmt.errors import ArchError

_AT, _SPARSE, _HEAVY, _HASH = "layers.{L}.", "index_layers", "heavy_layers", "hash_layers"
_LORA = "q_lora_rank"
_WEIGHTS = "2*hc_streams+hc_streams*hc_streams"
_STREAMS = "hc_streams*hidden_size"
# What transformers calls a module in memory, by its name in files; the first that fits is taken.
_IN_MEMORY = (
    ("attn.indexer.compressor.", "self_attn.compressor.indexer."),
    ("attn.indexer.weights_proj.", "self_attn.compressor.indexer.scorer.weights_proj."),
    ("attn.indexer.wq_b.", "self_attn.compressor.indexer.q_b_proj."),
    ("attn.", "self_attn."),
    ("ffn.", "mlp."),
    ("attn_norm.", "input_layernorm."),
    ("ffn_norm.", "post_attention_layernorm."),
    ("hc_attn_", "attn_hc."),
    ("hc_ffn_", "ffn_hc."),
)
_PARTS_IN_MEMORY = {
    "attn_sink": "sinks",
    "ape": "position_bias",
    "wq_a.weight": "q_a_proj.weight",
    "wq_b.weight": "q_b_proj.weight",
    "wkv.weight": "kv_proj.weight",
    "norm.weight": "kv_norm.weight",
    "wgate.weight": "gate_proj.weight",
    "wo_a.weight": "o_a_proj.weight",
    "wo_b.weight": "o_b_proj.weight",
    "q_norm.weight": "q_a_norm.weight",
    "gate.bias": "gate.e_score_correction_bias",
    "w1.weight": "gate_proj.weight",
    "w2.weight": "down_proj.weight",
    "w3.weight": "up_proj.weight",
    "w1.bias": "gate_proj.bias",
    "w2.bias": "down_proj.bias",
    "w3.bias": "up_proj.bias",
}


def _in_memory(name: str) -> str:
    """Return the name that transformers has in memory for a layer's tensor, below the layer."""
    for stored, module in _IN_MEMORY:
        if name.startswith(stored):
            rest = name[len(stored) :]
            for end, other in _PARTS_IN_MEMORY.items():
                if rest == end or rest.endswith(f".{end}"):
                    rest = rest[: len(rest) - len(end)] + other
                    break
            return module + rest
    return name


def _row(role: str, hf: str, *shape: str, needs: str = "") -> RoleRow:
    """Return the tensor-table row of a layer's tensor.

    `hf` is its name below the layer in published files, `shape` its size expressions, `needs` the
    condition for a layer to have it.
    """
    # What compresses an indexer's keys has a name without its dot in GGUF.
    return RoleRow(role, _AT + hf, shape, needs, gguf=role.replace(".compressor", "_compressor"))


def _compressor(role: str, hf: str, width: str, rate: str, needs: str) -> tuple[RoleRow, ...]:
    """Return the tensor-table rows of a compressor, without its norm.

    Layers that meet the condition `needs` have it. `role` and `hf` are prefixes of roles and of
    names, `width` is how many numbers it makes of each token, and `rate` the hyperparameter that
    counts the tokens of a window.
    """
    return (
        _row(f"{role}_kv.weight", f"{hf}.wkv.weight", width, "hidden_size", needs=needs),
        _row(f"{role}_gate.weight", f"{hf}.wgate.weight", width, "hidden_size", needs=needs),
        _row(f"{role}_ape.weight", f"{hf}.ape", rate, width, needs=needs),
    )


def _hyper_connection(name: str) -> tuple[RoleRow, ...]:
    """Return the tensor-table rows of the hyper-connection `name`, "hc_attn" or "hc_ffn"."""
    return (
        _row(f"{name}_fn.weight", f"{name}_fn", _WEIGHTS, _STREAMS),
        _row(f"{name}_base.weight", f"{name}_base", _WEIGHTS),
        _row(f"{name}_scale.weight", f"{name}_scale", "3"),
    )


_MAIN, _INDEX = (
    ("attn_compressor", "attn.compressor"),
    ("indexer.compressor", "attn.indexer.compressor"),
)
_GROUPS = Reshaped(
    ("output_groups", "output_rank", "output_group_size"),
    ("output_groups*output_rank", "output_group_size"),
)
_ATTENTION = (
    _row("attn_q_a.weight", "attn.wq_a.weight", _LORA, "hidden_size"),
    _row("attn_q_a_norm.weight", "attn.q_norm.weight", _LORA),
    _row("attn_q_b.weight", "attn.wq_b.weight", Q, _LORA),
    _row("attn_kv.weight", "attn.wkv.weight", "head_dim", "hidden_size"),
    _row("attn_kv_a_norm.weight", "attn.kv_norm.weight", "head_dim"),
    _row("attn_sinks.weight", "attn.attn_sink", "n_heads"),
    RoleRow(
        "attn_output_a.weight",
        f"{_AT}attn.wo_a.weight",
        _GROUPS.logical,
        "",
        (_GROUPS,),
        (_GROUPS,),
    ),
    _row("attn_output_b.weight", "attn.wo_b.weight", "hidden_size", "output_groups*output_rank"),
    *_compressor(*_MAIN, "2*head_dim", "sparse_rate", _SPARSE),
    *(
        replace(row, hf="", gguf="")
        for row in _compressor(*_MAIN, "head_dim", "heavy_rate", _HEAVY)
    ),
    _row("attn_compressor_norm.weight", "attn.compressor.norm.weight", "head_dim", needs=_SPARSE),
    RoleRow("attn_compressor_norm.weight", "", ("head_dim",), _HEAVY, gguf=""),
    _row(
        "indexer.attn_q_b.weight",
        "attn.indexer.wq_b.weight",
        "index_heads*index_head_dim",
        _LORA,
        needs=_SPARSE,
    ),
    _row(
        "indexer.proj.weight",
        "attn.indexer.weights_proj.weight",
        "index_heads",
        "hidden_size",
        needs=_SPARSE,
    ),
    *_compressor(*_INDEX, "2*index_head_dim", "sparse_rate", _SPARSE),
    _row(
        "indexer.compressor_norm.weight",
        "attn.indexer.compressor.norm.weight",
        "index_head_dim",
        needs=_SPARSE,
    ),
)
_EXPERTS = tuple(
    RoleRow(f"ffn_{part}_exps.weight", "", ("n_experts", *sizes))
    for part, sizes in (
        ("gate", ("moe_ffn_size", "hidden_size")),
        ("up", ("moe_ffn_size", "hidden_size")),
        ("down", ("hidden_size", "moe_ffn_size")),
    )
)
_GATE_UP = ("ffn_gate_exps.weight", "ffn_up_exps.weight")
_MLP = (
    _row("ffn_gate_inp.weight", "ffn.gate.weight", "n_experts", "hidden_size"),
    _row("exp_probs_b.bias", "ffn.gate.bias", "n_experts", needs=f"!{_HASH}"),
    _row(
        "ffn_gate_tid2eid.weight", "ffn.gate.tid2eid", "vocab_size", "n_experts_used", needs=_HASH
    ),
    *_EXPERTS,
    *(
        _row(f"ffn_{part}_shexp.weight", f"ffn.shared_experts.{hf}.weight", *sizes)
        for part, hf, sizes in (
            ("gate", "w1", ("shared_ffn_size", "hidden_size")),
            ("up", "w3", ("shared_ffn_size", "hidden_size")),
            ("down", "w2", ("hidden_size", "shared_ffn_size")),
        )
    ),
    *(
        _row(f"ffn_{part}_shexp.bias", f"ffn.shared_experts.{hf}.bias", width, needs="mlp_bias")
        for part, hf, width in (
            ("gate", "w1", "shared_ffn_size"),
            ("up", "w3", "shared_ffn_size"),
            ("down", "w2", "hidden_size"),
        )
    ),
)
_LAYER_ROWS = (
    *_hyper_connection("hc_attn"),
    _row("attn_norm.weight", "attn_norm.weight", "hidden_size"),
    *_ATTENTION,
    *_hyper_connection("hc_ffn"),
    _row("ffn_norm.weight", "ffn_norm.weight", "hidden_size"),
    *_MLP,
)
_HEAD = {"fn": ("hc_streams", _STREAMS), "base": ("hc_streams",), "scale": ("1",)}
# transformers saves the norm of the keys as `attn.norm`, and has other names in memory.
_OTHER_NAMES = (
    Binding((f"{_AT}attn.norm.weight",), ("attn_kv_a_norm.weight",)),
    *(
        Binding((_AT + _in_memory(row.hf.removeprefix(_AT)),), (row.role,), row.hf_steps)
        for row in _LAYER_ROWS
        if row.hf
    ),
    *(Binding((f"hc_head.hc_{part}",), (f"output_hc_{part}.weight",)) for part in _HEAD),
    Binding(("embed_tokens.weight",), ("token_embd.weight",)),
    Binding(("lm_head.weight",), ("output.weight",)),
    Binding(
        (f"{_AT}mlp.experts.gate_up_proj",),
        _GATE_UP,
        (Split(("moe_ffn_size", "moe_ffn_size"), axis=1),),
    ),
    Binding((f"{_AT}mlp.experts.down_proj",), ("ffn_down_exps.weight",)),
)
_MADE = make_tables(
    with_model_rows(
        *_LAYER_ROWS,
        *(
            single_row(f"output_hc_{part}.weight", f"hc_head_{part}", *shape)
            for part, shape in _HEAD.items()
        ),
        embed="embed",
        final="norm",
        head="head",
    ),
    hf_first=(
        Binding(
            (f"{_AT}ffn.experts.{{E}}.{hf}.weight",),
            (f"ffn_{part}_exps.weight",),
            (Stacked("n_experts"),),
        )
        for part, hf in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
    ),
    hf_more=_OTHER_NAMES,
)

_SQRT_SOFTPLUS = 4  # llama.cpp's number of the router's score function
_WINDOWED, _INDEXED, _COMPRESSED = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)
_OF_RATIO = {0: _WINDOWED, 4: _INDEXED, 128: _COMPRESSED}  # of compress_ratios in older files
_RATIOS = "{arch}.attention.compress_ratios"
_KINDS = {"window_layers": _WINDOWED, _SPARSE: _INDEXED, _HEAVY: _COMPRESSED}
_RATES = {"sparse_rate": (_INDEXED, "csa", 4), "heavy_rate": (_COMPRESSED, "hca", 128)}


def _read_kinds(facts: Facts, hp: Params) -> tuple[tuple[str, ...], str]:
    """Return (the kinds of attention of all layers, the key of config.json that says them).

    The key is `layer_types`, else `compress_ratios`. Without either it is "", and the kinds are two
    layers without an indexer, then in turn one without and one with. Raises ArchError for an
    unknown kind or ratio.
    """
    count = int(hp["n_layers"])
    listed, ratios = facts.first("layer_types"), facts.first("compress_ratios")
    if listed is not None:
        return tuple(listed_kinds(*listed, count, _KINDS.values())), listed[1]
    if ratios is not None:
        numbers = [whole_number(number, ratios[1]) for number in sequence(*ratios, count)[:count]]
        known = listed_kinds(numbers, ratios[1], count, _OF_RATIO)
        return tuple(_OF_RATIO[ratio] for ratio in known), ratios[1]
    turns = (_COMPRESSED if i < 2 or i % 2 == 0 else _INDEXED for i in range(count))
    return tuple(turns), ""


def _gguf_attention_kinds(
    facts: Facts, hp: Params
) -> tuple[tuple[str, ...], list[int], str] | None:
    """Return each layer's kind of attention and ratio of compression, and the ratios' key.

    None if the GGUF has no ratios. A layer with an indexer's tensors chooses keys; where the file's
    tensors are not known, a layer of ratio 4 does.
    """
    found = facts.first(_RATIOS)
    if found is None:
        return None
    count = int(hp["n_layers"])
    ratios = [whole_number(number, found[1]) for number in sequence(*found, count)[:count]]
    stored = layers_with_role("indexer.proj.weight")(facts.shapes)
    indexed = [ratio == 4 for ratio in ratios] if stored is None else stored
    kinds = (
        _WINDOWED if ratio == 0 else _INDEXED if on else _COMPRESSED
        for ratio, on in zip(ratios, (*indexed, *(False,) * count), strict=False)
    )
    return tuple(kinds), ratios, found[1]


def _layers_rule(name: str) -> HyperRule:
    """Return the rule that reads and writes the hyperparameter `name`: layers of one kind.

    It says for each layer whether it is of that kind. The indexer's rule writes the kinds of all
    layers, the other rule writes nothing.
    """

    def read(facts: Facts, hp: Params) -> Found:
        """Return (one boolean per layer: its attention is of `name`'s kind, key) of config.json.

        `name` is the hyperparameter that the rule is for.
        """
        kinds, key = _read_kinds(facts, hp)
        return tuple(kind == _KINDS[name] for kind in kinds), key

    def read_gguf(facts: Facts, hp: Params) -> Found:
        """Return (one boolean per layer: its attention is of `name`'s kind, key) of a GGUF.

        `name` is the hyperparameter that the rule is for. None without the key of compression
        ratios.
        """
        found = _gguf_attention_kinds(facts, hp)
        return found and (tuple(kind == _KINDS[name] for kind in found[0]), found[2])

    def write_gguf(value: Value, hp: Params) -> Params:
        """Return {GGUF key: the attention's compression ratio in each layer, 0 for a window only}.

        Only the rule of the indexer's layers writes the key; the other rule returns {}.
        """
        if name != _SPARSE:
            return {}
        pairs = zip(value, hp[_HEAVY], strict=True)
        return {
            _RATIOS: [
                hp["sparse_rate"] if on else hp["heavy_rate"] if heavy else 0 for on, heavy in pairs
            ]
        }

    def write(value: Value, hp: Params) -> Params:
        """Return config.json's {"layer_types": the kind of attention of each layer}.

        Only the rule of the indexer's layers writes the key; the other rule returns {}.
        """
        if name != _SPARSE:
            return {}
        kinds = [_WINDOWED] * len(value)
        for each in (_SPARSE, _HEAVY):
            kinds = [_KINDS[each] if on else kind for on, kind in zip(hp[each], kinds, strict=True)]
        return {"layer_types": kinds}

    return HyperRule(
        name, read={"hf": read, "gguf": read_gguf}, write={"hf": write, "gguf": write_gguf}
    )


def _rate_rule(name: str) -> HyperRule:
    """Return the rule that reads and writes how many tokens a compressed key stands for.

    The hyperparameter `name` is that of one kind of layer. config.json has an object of both
    kinds, or a key for each in older files, which wins.
    """
    kind, short, default = _RATES[name]

    def read(facts: Facts, hp: Params) -> Found:
        """Return (tokens that a compressed key stands for in layers of one kind, its config key).

        The kind's own key in config.json counts before the object with the rates of both kinds,
        in which a missing kind has the default. None without either key, and for a model without
        a layer of the kind. Raises ArchError where `compress_rates` is not an object.
        """
        rates, found = facts.first("compress_rates"), facts.first(f"compress_rate_{short}")
        if found is None and rates is not None:
            if not isinstance(rates[0], Mapping):
                raise ArchError(f"{rates[1]}: is {short_repr(rates[0])}; expected an object")
            found = rates[0].get(kind, default), f"{rates[1]}.{kind}"
        if found is None or kind not in _read_kinds(facts, hp)[0]:
            return None
        return whole_number(found[0], found[1], 1), found[1]

    def write(value: Value, hp: Params) -> Params:
        """Return config.json's object with the tokens per compressed key in both kinds of layer.

        The rule of `sparse_rate` writes the object; the other kind's rule returns {}.
        """
        if name != "sparse_rate":
            return {}
        return {"compress_rates": {each: hp[rule] for rule, (each, *_) in _RATES.items()}}

    def read_gguf(facts: Facts, hp: Params) -> Found:
        """Return (tokens that a compressed key stands for in layers of one kind, key) of a GGUF.

        None without a layer of the kind. Raises ArchError where layers of the kind differ.
        """
        kinds, ratios, key = _gguf_attention_kinds(facts, hp) or ((), [], "")
        known = {ratio for layer, ratio in zip(kinds, ratios, strict=True) if layer == kind}
        if len(known) > 1 and facts.shapes:
            raise ArchError(
                f"{key}: layers of one kind have the ratios {sorted(known)}; expected one"
            )
        return (min(known), key) if known else None

    return HyperRule(
        name,
        read={"hf": read, "gguf": read_gguf},
        write={"hf": write, "gguf": lambda value, hp: {}},
        default=default,
    )


_HASH_COUNT = "{arch}.hash_layer_count"


def _hash_layers_rule() -> HyperRule:
    """Return the rule that reads and writes the layers whose experts are listed by token.

    These are by default the first three.
    """
    kinds = {"hash_moe": True, "moe": False}

    def first_layers(count: int, hp: Params) -> PerLayer:
        """Return one boolean per layer: token ids choose its experts.

        True for the first `count`.
        """
        return tuple(i < count for i in range(hp["n_layers"]))

    def counted(count: Found, hp: Params) -> Found:
        """Return (one boolean per layer: True for the first ones, key) from (number of them, key).

        The True layers choose experts by a table of token ids. None for None.
        """
        return None if count is None else (first_layers(whole_number(*count), hp), count[1])

    def read(facts: Facts, hp: Params) -> Found:
        """Return (one boolean per layer: token ids choose its experts, key) of config.json.

        A list of layer kinds counts, else the number of such first layers. None without either
        key. Raises ArchError for an unknown kind.
        """
        listed, count = facts.first("mlp_layer_types"), facts.first("num_hash_layers")
        if listed is None:
            return counted(count, hp)
        found = listed_kinds(*listed, hp["n_layers"], kinds)
        return tuple(kinds[kind] for kind in found), listed[1]

    def read_gguf(facts: Facts, hp: Params) -> Found:
        """Return (one boolean per layer: token ids choose its experts, key) of a GGUF.

        A GGUF has the number of such first layers. None without that key.
        """
        return counted(facts.first(_HASH_COUNT), hp)

    names = {on: kind for kind, on in kinds.items()}
    return HyperRule(
        _HASH,
        read={"hf": read, "gguf": read_gguf},
        write={
            "hf": lambda value, hp: {"mlp_layer_types": [names[on] for on in value]},
            "gguf": lambda value, hp: {_HASH_COUNT: sum(value)},
        },
        shape=layers_with_role("ffn_gate_tid2eid.weight"),
        default=lambda hp: first_layers(3, hp),
    )


_DEFAULT_PART = 64 / 512  # of a head, rotated where config.json says nothing


def _rope_objects(facts: Facts) -> tuple[Params, Params] | None:
    """Return config.json's rope objects: (of compressed layers, of windowed layers).

    None where `rope_parameters` is missing, or is one object for all layers.
    """
    found = facts.first("rope_parameters")
    value = {} if found is None else found[0]
    if not isinstance(value, Mapping):
        return None
    full, local = value.get("compress"), value.get("main")
    if isinstance(full, Mapping) and isinstance(local, Mapping):
        return full, local
    return None


def _read_rotated(facts: Facts, hp: Params) -> Found:
    """Return (rotated elements of a head, key) of config.json; None without a key.

    Raises ArchError if the windowed layers rotate another number.
    """
    nested = _rope_objects(facts)
    part, count = facts.first("partial_rotary_factor"), facts.first("qk_rope_head_dim")
    if nested is not None:
        parts = [each.get("partial_rotary_factor", 1.0) for each in nested]
        if parts[0] != parts[1]:
            raise ArchError(
                f"rope_parameters: compress rotates {short_repr(parts[0])} of a head, main "
                f"{short_repr(parts[1])}; expected the same in both"
            )
        part = parts[0], "rope_parameters.compress.partial_rotary_factor"
    if part is not None:
        share = positive_number(*part)
        return int(finite_number(hp["head_dim"] * share, part[1])), part[1]
    return None if count is None else (whole_number(*count, 1), count[1])


def _with_plain_factor(found: Found) -> Found:
    """Return (rope scaling, key) as read, with 1 as yarn's factor on cos and sin.

    transformers computes no such factor for this architecture. Other scalings, and None, are
    returned unchanged.
    """
    if found is None or found[0] is None or found[0]["type"] != "yarn":
        return found
    return {**found[0], "attention_factor": 1.0}, found[1]


def _with_yarns_factor(scaling: Params | None) -> Params | None:
    """Return a rope scaling with yarn's usual factor on cos and sin, for a GGUF.

    A GGUF has no key for the factor, and llama.cpp divides it out again for this architecture.
    Other scalings, and None, are returned unchanged.
    """
    if scaling is None or scaling["type"] != "yarn":
        return scaling
    every = scaling["mscale_all_dim"]
    return {**scaling, "attention_factor": yarn_attention_factor(scaling["factor"], every, every)}


def _rope_rules() -> tuple[HyperRule, ...]:
    """Return the rules for rope: two bases, one scaling, and how many elements of a head rotate.

    Windowed layers have the base `rope_theta` and no scaling, the others `compress_rope_theta`.
    Objects in `rope_parameters` are called `main` and `compress`.
    """
    defaults = RopeDefaults(theta=160000.0, partial=_DEFAULT_PART, layers="full")
    usual = {rule.name: rule for rule in rope_rules(defaults)}
    rules = dict(usual)

    def renamed(facts: Facts) -> Facts:
        """Return config.json's values with its two rope objects named as other architectures do.

        `compress` becomes `full_attention`, `main` becomes `sliding_attention`. `facts` itself is
        returned where there are no such objects.
        """
        nested = _rope_objects(facts)
        if nested is None:
            return facts
        stored: Any = facts.values
        named = dict(zip(("full_attention", "sliding_attention"), nested, strict=True))
        return replace(facts, values=ChainMap({"rope_parameters": named}, stored))

    def read_base(number: int, key: str, facts: Facts) -> Found:
        """Return (rope base, its key) of config.json's rope object `number`, else of the key `key`.

        Object 0 is that of layers with compressed attention, 1 that of the others. None without
        both.
        """
        nested, top = _rope_objects(facts), facts.first(key)
        inner = None if nested is None else nested[number].get("rope_theta")
        return top if inner is None else (inner, f"rope_parameters.{('compress', 'main')[number]}")

    def read_scaling(facts: Facts, hp: Params) -> Found:
        """Return (rope scaling of layers with compressed attention, key) of config.json.

        The scaling is in normal form, None for unscaled frequencies. Returns None without a key.
        """
        for name in ("rope_parameters", "rope_scaling"):
            flat = facts.first(name)
            if flat is not None and isinstance(flat[0], Mapping):
                flat[0].get("rope_theta")  # known, and not used: compress_rope_theta is
        found: Found = usual["rope_scaling"].read["hf"](renamed(facts), hp)
        nested = _rope_objects(facts)
        flat = facts.first("rope_parameters", "rope_scaling")
        outer = nested[0] if nested is not None else flat[0] if flat is not None else {}
        return found if "attention_factor" in outer else _with_plain_factor(found)

    def base_rule(name: str, number: int, key: str, gguf: str) -> HyperRule:
        """Return the rule for one of the two rope bases, the hyperparameter `name`.

        `number` is that of the config's rope object, `key` the older key of config.json, `gguf`
        the key of a GGUF without its prefix.
        """
        return replace(
            usual[name],
            keys={**usual[name].keys, "hf": (key,), "gguf": (f"{{arch}}.{gguf}",)},
            read={"hf": lambda facts, hp: read_base(number, key, facts)},
            write={"hf": lambda value, hp: {key: value}},
            default_in={},
            check=None,
        )

    rules["rope_theta"] = base_rule(
        "rope_theta", 0, "compress_rope_theta", "attention.compress_rope_freq_base"
    )
    rules["rope_theta_local"] = replace(
        base_rule("rope_theta_local", 1, "rope_theta", "rope.freq_base"), default=10000.0
    )
    write_part = usual["rope_dim"].write["hf"]
    rules["rope_dim"] = replace(
        rules["rope_dim"],
        read={"hf": _read_rotated},
        write={"hf": lambda value, hp: {**write_part(value, hp), "qk_rope_head_dim": value}},
    )
    write_scaling = usual["rope_scaling"].write["hf"]
    gguf_scaling, write_gguf = usual["rope_scaling"].read["gguf"], usual["rope_scaling"].write
    rules["rope_scaling"] = replace(
        rules["rope_scaling"],
        read={
            "hf": read_scaling,
            "gguf": lambda facts, hp: _with_plain_factor(gguf_scaling(facts, hp)),
        },
        write={
            "hf": lambda value, hp: {"rope_scaling": write_scaling(value, hp)["rope_scaling"]},
            "gguf": lambda value, hp: write_gguf["gguf"](_with_yarns_factor(value), hp),
        },
        check=None,
    )
    rules["rope_scaling_layers"] = hyper_rules.fixed("rope_scaling_layers", "full")
    return tuple(rules.values())


# Keys whose other values no published model has -> the only value that is computed.
_ONLY: Mapping[str, Value] = {
    "scoring_func": "sqrtsoftplus",
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "hidden_act": "silu",
}


def _check_norm_topk(value: Value, facts: Facts, hp: Params) -> str:
    """Return a remark if config.json asks to leave the experts' weights as they are, else ""."""
    found = facts.first("norm_topk_prob")
    if found is None or found[0] is not False:
        return ""
    return f"{found[1]} is false, but transformers always renormalises deepseek v4's weights"


def _unpublished_mix(hp: Params) -> str:
    """Return in words two features of a model that no published one has together; "" for none.

    `hp` are the model's hyperparameters. A check warns of such a model.
    """
    if hp["n_heads"] % hp["output_groups"]:
        return f"{hp['n_heads']} heads and {hp['output_groups']} groups of unequal size"
    if hp["sliding_window"] is None:
        return "keys that stand for windows of tokens, and no window on the tokens themselves"
    if hp[_LORA] is None:
        return "an indexer and queries that are not compressed"
    if not any(hp[_SPARSE]) and not any(hp[_HEAVY]):
        return "the sizes of compressed attention and no layer that has it"
    return "experts listed by token, and no layer whose router chooses" if all(hp[_HASH]) else ""


def _limit_rule() -> HyperRule:
    """Return the rule for the clamp of an expert's gate and up; a GGUF has one a layer."""
    key = "{arch}.swiglu_clamp_exp"

    def read_gguf(facts: Facts, hp: Params) -> Found:
        """Return (clamp of the expert MLPs' gate and up values, key) of a GGUF.

        None without the key. A GGUF lists a clamp for each layer. Raises ArchError where layers
        have different ones.
        """
        found = facts.first(key)
        if found is None:
            return None
        listed = found[0] if isinstance(found[0], Sequence) else [found[0]]
        limits = {finite_number(each, found[1]) for each in listed}
        if len(limits) != 1:
            raise ArchError(f"{found[1]}: is {short_repr(found[0])}; expected one clamp throughout")
        return shortest_decimal(limits.pop()), found[1]

    return HyperRule(
        "swiglu_limit",
        {"hf": ("swiglu_limit",)},
        "float",
        10.0,
        read={"gguf": read_gguf},
        write={"gguf": lambda value, hp: {key: [float(value)] * hp["n_layers"]}},
    )


def _rate_loss(layers: str, rate: str) -> Loss:
    """Return the Loss (what a GGUF cannot express) of tokens per compressed key unlike llama.cpp's.

    `layers` names the hyperparameter of the layers with such keys, `rate` that of the number.
    llama.cpp's code has the usual numbers.
    """
    usual = _RATES[rate][2]
    return Loss(
        "gguf",
        rate,
        lambda hp: any(hp[layers]) and hp[rate] != usual,
        f"llama.cpp knows keys for {usual} tokens in such layers only, and refuses the file",
    )


_LOST = (
    *losses.common_losses(partial=True),
    Loss(
        "gguf",
        "rope_scaling",
        lambda hp: (
            hp["rope_scaling"] is not None
            and hp["rope_scaling"]["type"] == "yarn"
            and hp["rope_scaling"]["attention_factor"] != 1
        ),
        "llama.cpp leaves cos and sin of compressed keys as they are, whatever the model says",
    ),
    *map(_rate_loss, (_SPARSE, _HEAVY), _RATES),
    Loss(
        "gguf",
        _HASH,
        lambda hp: hp[_HASH] != tuple(sorted(hp[_HASH], reverse=True)),
        "llama.cpp has lists of experts in the first layers only, and refuses the file",
    ),
    Loss(
        "gguf",
        "mlp_bias",
        lambda hp: hp["mlp_bias"],
        "llama.cpp has no biases of a shared expert and refuses the file",
    ),
)

DEEPSEEK_V4 = full_spec(
    "deepseek_v4",
    _MADE,
    hyper_rules.hyper_table(
        HyperRule("n_kv_heads", {"gguf": ("{arch}.attention.head_count_kv",)}, "size", 1),
        hyper_rules.head_dim(512),
        hyper_rules.ffn_size(2048, "moe_intermediate_size"),
        hyper_rules.context_length(1048576),
        *_rope_rules(),
        hyper_rules.size(
            "sliding_window", "sliding_window", "attention.sliding_window", default=128
        ),
        *map(_layers_rule, _KINDS),
        *map(_rate_rule, _RATES),
        q_lora_rank_rule(1024),
        *moe.expert_count_rules(256, 6, "n_routed_experts num_experts num_local_experts"),
        moe.expert_size_rule(),
        shared_experts_rule("n_shared_experts", 1),
        moe.all_moe_layers_rule(),
        HyperRule(
            "norm_topk",
            {"gguf": ("{arch}.expert_weights_norm",)},
            "bool",
            True,
            check=_check_norm_topk,
        ),
        hyper_rules.flag("mlp_bias", False, "mlp_bias", present=("ffn_up_shexp.bias",)),
        routed_scale_rule(1.5),
        replace(
            sigmoid_router_rule("sqrtsoftplus_bias", _SQRT_SOFTPLUS),
            check=hyper_rules.as_published(_ONLY),
        ),
        _hash_layers_rule(),
        _limit_rule(),
        hyper_rules.size(
            "index_heads", "index_n_heads", "attention.indexer.head_count", hf_default=64
        ),
        hyper_rules.size(
            "index_head_dim", "index_head_dim", "attention.indexer.key_length", hf_default=128
        ),
        hyper_rules.size("index_topk", "index_topk", "attention.indexer.top_k", hf_default=512),
        hyper_rules.size("output_groups", "o_groups", "attention.output_group_count", hf_default=8),
        hyper_rules.size(
            "output_rank", "o_lora_rank", "attention.output_lora_rank", hf_default=1024
        ),
        HyperRule(
            "output_group_size",
            default=lambda hp: hp["n_heads"] * hp["head_dim"] // hp["output_groups"],
        ),
        HyperRule("qk_rope_head_dim", default=lambda hp: hp["rope_dim"]),
        hyper_rules.size("hc_streams", "hc_mult", "hyper_connection.count", hf_default=4),
        hyper_rules.size(
            "hc_iterations",
            "hc_sinkhorn_iters",
            "hyper_connection.sinkhorn_iterations",
            hf_default=20,
        ),
        HyperRule(
            "hc_eps",
            {"hf": ("hc_eps",), "gguf": ("{arch}.hyper_connection.epsilon",)},
            "positive",
            1e-6,
        ),
    ),
    BlockSpec(
        attention="compressed",
        qk_norm="plain",
        norm_cast="after_weight",
        sinks=True,
        softmax_cast="input",
        rope_cast="table_and_result",
        shared_expert="plain",
        router_cast="logits",
        streams="hyper",
    ),
    lost=_LOST,
    ignored=frozenset(
        """num_nextn_predict_layers topk_method expert_dtype output_router_logits attention_bias
        router_jitter_noise router_aux_loss_coef""".split()
    ).union(_ONLY),
    mixed=_unpublished_mix,
)
