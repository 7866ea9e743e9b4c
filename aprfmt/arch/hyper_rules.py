"""Rules that read and write the hyperparameters of most architectures; families override some.

`hyper_table` returns one rule for every hyperparameter, so that no other code needs a default.
"""

from collections.abc import Callable, Mapping
from reprlib import repr as short_repr
from typing import Any

from aprfmt.arch.pooling import pooling_rule
from aprfmt.arch.rope import rope_rules
from aprfmt.arch.rope_hf import RopeDefaults
from aprfmt.arch.spec import (
    HYPER_NAMES,
    MISSING,
    SPECIAL_NAMES,
    Facts,
    HyperRule,
    Params,
    Write,
    split_key,
)
from aprfmt.arch.value_checks import MAX_LAYERS, finite_number, nearest_float32, text
from aprfmt.base.protocols import Value
from aprfmt.errors import ArchError

ShapesByName = Mapping[str, tuple[int, ...]]
_TABLE = "token_embd.weight"
# Norms whose length is the hidden size.
_NORMS_OF_FEATURES = ("output_norm.weight", "L0.attn_norm.weight", "L0.ffn_norm.weight")


def fixed(name: str, value: Any) -> HyperRule:
    """Return a rule with a fixed value, which no key of a file changes."""
    return HyperRule(name, default=value)


def as_published(only: Mapping[str, Value]) -> Callable[[Value, Facts, Params], str]:
    """Return a rule's check that refuses settings which no published model has.

    `only` is {key of config.json: the one value that is computed}. The check returns "", and raises
    ArchError for a key with another value.
    """

    def check(value: Value, facts: Facts, hp: Params) -> str:
        """Raise ArchError if config.json has other values than published models have.

        Else return "", which says that there is no warning. `only` has the one value of each key
        that is computed.
        """
        for key, expected in only.items():
            found = facts.first(key) if facts.style == "hf" else None
            if found is not None and found[0] != expected:
                raise ArchError(
                    f"{key} is {short_repr(found[0])}; expected {short_repr(expected)}, as in "
                    "every published model of this architecture: no other is computed"
                )
        return ""

    return check


def per_layer(value: bool) -> Callable[[Params], tuple[bool, ...]]:
    """Return a default function (hp -> tuple) with the same value for every layer."""
    return lambda hp: (value,) * hp["n_layers"]


def axis(role: str, number: int) -> Callable[[ShapesByName], int | None]:
    """Return a function (logical shapes -> size) that reads axis `number` of a role's tensor.

    For a role of a layer the tensor of layer 0 is read. The size is None without that tensor, and
    where it is no matrix: a flattened shard of a matrix has a length that is no size of the model.
    """

    def read(shapes: ShapesByName) -> int | None:
        """Return the size of axis `number` of the tensor `role`, or of layer 0's.

        None without that axis. `shapes` has the logical shape of each tensor by its role.
        """
        for key in (role, f"L0.{role}"):
            shape = shapes.get(key, ())
            if len(shape) > max(number, 1):
                return shape[number]
        return None

    return read


def _table_axis(number: int) -> Callable[[ShapesByName], int | None]:
    """Return a function (logical shapes -> size) that reads an axis of the token embedding.

    Axis 0 counts tokens and axis 1 features. The two are exchanged where the length of a norm says
    that the features stand first: such a table is turned, and the sizes of the model stay.
    """
    straight = axis(_TABLE, number)

    def read(shapes: ShapesByName) -> int | None:
        """Return the number of tokens or features by the embedding's shape; None without one.

        `shapes` has the logical shape of each tensor by its role.
        """
        table = shapes.get(_TABLE, ())
        norm = next((shapes[key] for key in _NORMS_OF_FEATURES if key in shapes), ())
        if len(table) == 2 and len(norm) == 1 and norm[0] == table[0] != table[1]:
            return table[1 - number]
        return straight(shapes)

    return read


def _count_layers(shapes: ShapesByName) -> int | None:
    """Return the number of layers that tensor names show; None if no tensor is in a layer."""
    found = [layer for layer, _ in map(split_key, shapes) if layer is not None]
    return max(found) + 1 if found else None


def size(
    name: str,
    hf: str = "",
    gguf: str = "",
    apr: str = "",
    *,
    default: Any = MISSING,
    hf_default: Any = None,
    default_in: Mapping[str, Any] | None = None,
    **rest: Any,
) -> HyperRule:
    """Return a rule for a whole number above 0.

    `hf`, `gguf` and `apr` are the keys of each style, separated by spaces; GGUF's are given without
    the architecture's prefix. `hf_default` is the value transformers takes for an absent key.
    """
    keys = {"hf": tuple(hf.split()), "apr": tuple(apr.split())}
    keys["gguf"] = tuple(f"{{arch}}.{key}" for key in gguf.split())
    by_style = {} if hf_default is None else {"hf": hf_default}
    return HyperRule(name, keys, "size", default, by_style | dict(default_in or {}), **rest)


def hidden_size(hf_default: int | None = None, hf: str = "hidden_size n_embd") -> HyperRule:
    """Return the rule that reads and writes the width of the residual stream.

    `hf_default` is its value where config.json has none of the keys `hf`.
    """
    return size(
        "hidden_size",
        hf,
        "embedding_length",
        "hidden_size hidden_dim d_model n_embd model.hidden_size",
        hf_default=hf_default,
        shape=_table_axis(1),
    )


def n_layers(hf_default: int | None = None, hf: str = "num_hidden_layers n_layer") -> HyperRule:
    """Return the rule that reads and writes the number of decoder blocks.

    `hf_default` is its value where config.json has none of the keys `hf`.
    """
    return size(
        "n_layers",
        hf,
        "block_count",
        "num_layers n_layers num_hidden_layers n_layer model.num_layers",
        hf_default=hf_default,
        shape=_count_layers,
        high=MAX_LAYERS,
    )


def n_heads(hf_default: int | None = None, hf: str = "num_attention_heads n_head") -> HyperRule:
    """Return the rule that reads and writes the number of query heads.

    `hf_default` is its value where config.json has none of the keys `hf`.
    """
    return size(
        "n_heads",
        hf,
        "attention.head_count",
        "num_heads n_heads num_attention_heads n_head model.num_heads",
        hf_default=hf_default,
    )


def n_kv_heads(hf_default: int | None = None, hf: str = "num_key_value_heads") -> HyperRule:
    """Return the rule for the number of key and value heads; by default that of query heads.

    `hf_default` is its value where config.json has none of the keys `hf`.
    """
    return size(
        "n_kv_heads",
        hf,
        "attention.head_count_kv",
        "num_kv_heads n_kv_heads num_key_value_heads model.num_kv_heads",
        default=lambda hp: hp["n_heads"],
        hf_default=hf_default,
    )


def head_dim(hf_default: int | None = None, hf: str = "head_dim") -> HyperRule:
    """Return the rule for the elements of a head; by default hidden_size / n_heads.

    `hf_default` is its value where config.json has none of the keys `hf`.
    """
    return size(
        "head_dim",
        hf,
        "attention.key_length",
        "head_dim",
        default=lambda hp: hp["hidden_size"] // hp["n_heads"],
        hf_default=hf_default,
    )


def ffn_size(hf_default: Any = None, hf: str = "intermediate_size") -> HyperRule:
    """Return the rule that reads and writes the inner width of the dense MLP.

    `hf_default` is its value where config.json has none of the keys `hf`.
    """
    return size(
        "ffn_size",
        hf,
        "feed_forward_length",
        "intermediate_size ffn_dim intermediate_dim n_inner model.intermediate_size",
        hf_default=hf_default,
        shape=axis("ffn_up.weight", 0),
    )


def vocab_size(hf_default: int | None = None) -> HyperRule:
    """Return the rule that reads and writes the number of rows of the embedding.

    The embedding's shape wins over the key. `hf_default` is its value where config.json has no
    key.
    """
    return size(
        "vocab_size",
        "vocab_size",
        "vocab_size",
        "vocab_size n_vocab model.vocab_size",
        hf_default=hf_default,
        shape=_table_axis(0),
        shape_wins=True,
    )


def context_length(hf_default: int = 2048, hf: str = "max_position_embeddings") -> HyperRule:
    """Return the rule that reads and writes the number of positions the model was trained for.

    `hf_default` is its value where config.json has none of the keys `hf`; a GGUF must have it.
    """
    return size(
        "context_length",
        hf,
        "context_length",
        "max_position_embeddings max_seq_len context_length n_ctx model.max_position_embeddings",
        default=hf_default,
        default_in={"gguf": MISSING},
    )


def norm_eps(
    default: float = 1e-6, hf: str = "rms_norm_eps", gguf: str = "layer_norm_rms_epsilon"
) -> HyperRule:
    """Return the rule for the epsilon of the norms; a GGUF file must have the key.

    `hf` and `gguf` are its keys, `default` is its value where a config.json or an APR has none.
    """
    return HyperRule(
        "norm_eps",
        {
            "hf": (hf,),
            "gguf": (f"{{arch}}.attention.{gguf}",),
            "apr": ("rms_norm_eps", "layer_norm_eps", "norm_eps", "model.rms_norm_eps"),
        },
        "positive",
        default,
        {"gguf": MISSING},
    )


# config.json's activation names; both tanh approximations are one function.
ACTIVATIONS: Mapping[str, str] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


def activation(
    default: str = "silu",
    key: str = "hidden_act",
    names: Mapping[str, str] | None = None,
    tanh: str = "gelu_pytorch_tanh",
) -> HyperRule:
    """Return the rule for the MLP's activation, which config.json has under `key`.

    `names` replaces rows of ACTIVATIONS; `tanh` is the spelling of gelu_tanh that is written.
    """
    known = {**ACTIVATIONS, **(names or {})}
    spelling = {ours: name for name, ours in reversed(known.items())} | {"gelu_tanh": tanh}

    def read(facts: Facts, hp: Params) -> tuple[Value, str] | None:
        """Return (activation by its name here, key) of config.json; None without the key.

        Raises ArchError for an unknown name.
        """
        found = facts.first(key)
        if found is None:
            return None
        name = text(*found)
        if name not in known:
            raise ArchError(
                f"{key}: activation {name!r} is not known; known: {', '.join(sorted(known))}"
            )
        return known[name], key

    def write(value: Value, hp: Params) -> Params:
        """Return {config.json's `key`: name of the activation as transformers spells it}."""
        return {key: spelling[value]}

    return HyperRule("activation", read={"hf": read}, write={"hf": write}, default=default)


def flag(
    name: str,
    default: bool = False,
    hf: str = "",
    *,
    present: tuple[str, ...] = (),
    written: bool = True,
    gguf: str = "",
    absent: tuple[str, ...] = (),
) -> HyperRule:
    """Return the rule of a boolean that the presence of tensors shows.

    True if one of the roles `present` is stored, or none of `absent`. `hf` (keys of config.json,
    separated by spaces) and `gguf` state it too: the first key in the file counts, and the first is
    written. `written=False`: the key belongs to another rule, which writes it.
    """
    keys = {"hf": tuple(hf.split()), "gguf": (f"{{arch}}.{gguf}",) if gguf else ()}
    write: dict[str, Write] = {} if written else {"hf": lambda value, hp: {}}
    return HyperRule(name, keys, "bool", default, write=write, present=present, absent=absent)


def tied_embeddings(default: bool = False, *, shown: bool = True) -> HyperRule:
    """Return the rule that reads and writes whether the head uses the embedding's weight.

    `shown`: without config.json, a missing output.weight means a tied head, as in llama.cpp;
    False for architectures in which llama.cpp requires output.weight.
    """
    return HyperRule(
        "tied_embeddings",
        {"hf": ("tie_word_embeddings",)},
        "bool",
        default,
        absent=("output.weight",),
        shown_in=("gguf", "apr") if shown else (),
    )


def attention_biases(default: bool = False, hf: str = "attention_bias") -> tuple[HyperRule, ...]:
    """Return the rules for biases of q, k, v and of the output; one config key sets both.

    `hf` is that key, or several keys with spaces between. `default` is its value where it is
    absent.
    """
    return (
        flag("attention_bias", default, hf, present=("attn_q.bias",)),
        flag("attention_out_bias", default, hf, present=("attn_output.bias",), written=False),
    )


def mlp_bias(default: bool = False, hf: str = "mlp_bias") -> HyperRule:
    """Return the rule that reads and writes whether the MLP has biases.

    `hf` is config.json's key, `default` the value where it is absent.
    """
    return flag("mlp_bias", default, hf, present=("ffn_up.bias",))


def qk_norm(default: bool = True, hf: str = "") -> HyperRule:
    """Return the rule for whether queries and keys have norms: either both have one, or neither.

    `hf` is config.json's key, `default` the value where it is absent.
    """
    return flag("qk_norm", default, hf, present=("attn_q_norm.weight", "attn_k_norm.weight"))


def default_attn_scale(hp: Params) -> float:
    """Return the usual factor on attention scores, 1/sqrt(head_dim)."""
    scale: float = float(hp["head_dim"]) ** -0.5
    return scale


def check_scale_factor(value: Value, key: str) -> float:
    """Return a factor on attention scores as a float; ArchError outside 1e-9 to 1e9."""
    found = finite_number(value, key)
    if not 1e-9 < found < 1e9:
        raise ArchError(f"{key}: is {found!r}; expected a factor between 1e-9 and 1e9")
    return found


def attn_scale(
    default: Callable[[Params], float] = default_attn_scale,
    gguf_default: Callable[[Params], float] | None = None,
    read: Mapping[str, Any] | None = None,
    write: Mapping[str, Any] | None = None,
) -> HyperRule:
    """Return the rule that reads and writes the factor on attention scores.

    `default` computes the value without a key. `gguf_default` is what GGUF readers compute, if that
    differs: a GGUF has the key only for another value. `read` and `write` are {style: function} in
    place of the usual ones.
    """
    assumed = gguf_default or default

    def read_gguf(facts: Facts, hp: Params) -> tuple[Value, str] | None:
        """Return (factor on attention scores, key) of a GGUF, its float32 rounding undone.

        Most factors are one over the root of a whole number: that number is looked for. None if
        the key is absent or 0.
        """
        found = facts.first("{arch}.attention.scale")
        if found is None or found[0] == 0:  # llama.cpp: not set
            return None
        value = check_scale_factor(*found)
        exact = round(value**-2) ** -0.5 if value < 1 else value  # one over a whole root, mostly
        return (exact if nearest_float32(exact) == value else value), found[1]

    def write_gguf(value: Value, hp: Params) -> Params:
        """Return {GGUF key: factor on attention scores}.

        {} where GGUF readers derive the same factor.
        """
        return {} if value == assumed(hp) else {"{arch}.attention.scale": value}

    return HyperRule(
        "attn_scale",
        {"gguf": ("{arch}.attention.scale",)},
        "float",
        default,
        {"gguf": assumed, "apr": assumed},
        read={"gguf": read_gguf, **(read or {})},
        write={"gguf": write_gguf, **(write or {})},
    )


def rope_style(style: str, permuted: bool = False) -> HyperRule:
    """Return the rule that reads and writes which elements of a head rope rotates together.

    The value is "half" or "interleaved". The check warns if APR's rope_type contradicts it. The
    row order of a file follows from the style of its tensor names, never from rope_type.
    `permuted`: GGUF stores q and k in pair order.
    """

    def check(value: Value, facts: Facts, hp: Params) -> str:
        """Return a warning if an APR file's rope_type contradicts its tensor names, else "".

        `value` is "half" or "interleaved": the elements of a head that rope rotates together.
        """
        found = facts.first("rope_type", "model.rope_type")
        if found is None or not facts.names:
            return ""
        pairs = value == "interleaved" or (facts.names == "gguf" and permuted)
        if found[0] == (0 if pairs else 2):
            return ""
        order = "adjacent pairs (0)" if pairs else "split halves (2)"
        return (
            f"{found[1]} is {found[0]}, but {facts.names} names of this architecture mean "
            f"{order}; the names are believed"
        )

    def write(value: Value, hp: Params) -> Params:
        """Return APR's {"rope_type": 2}; 0 in place of 2 if rope pairs adjacent elements of a head.

        `value` is "half" or "interleaved".
        """
        return {"rope_type": 2 if value == "half" else 0}

    return HyperRule("rope_style", default=style, write={"apr": write}, check=check)


BASE: tuple[HyperRule, ...] = (
    hidden_size(),
    n_layers(),
    n_heads(),
    n_kv_heads(),
    head_dim(),
    size("value_head_dim", gguf="attention.value_length", default=lambda hp: hp["head_dim"]),
    fixed("global_head_dim", None),
    fixed("global_kv_heads", None),
    HyperRule("own_kv_layers", default=per_layer(True)),
    fixed("value_is_key", False),
    fixed("per_layer_size", 0),
    fixed("altup_streams", 1),
    fixed("altup_scaled", False),
    HyperRule("ffn_sparsity", default=lambda hp: (0.0,) * hp["n_layers"]),
    ffn_size(),
    vocab_size(),
    fixed("token_types", None),
    fixed("position_buckets", None),
    context_length(),
    fixed("position_offset", 0),
    fixed("alibi_max_bias", None),
    pooling_rule(),
    norm_eps(),
    fixed("lora_norm_eps", None),
    activation(),
    tied_embeddings(),
    HyperRule("attn_norm_layers", default=per_layer(True)),
    fixed("attention_bias", False),
    fixed("attention_out_bias", False),
    fixed("mlp_bias", False),
    fixed("qkv_clip", None),
    fixed("qk_norm", False),
    fixed("parallel_residual", False),
    *rope_rules(RopeDefaults()),
    rope_style("half"),
    HyperRule("rope_layers", default=per_layer(True)),
    fixed("sliding_window", None),
    HyperRule("window_layers", default=per_layer(False)),
    attn_scale(),
    fixed("attn_scale_by_layer", False),
    fixed("temperature_scale", None),
    fixed("temperature_length", None),
    fixed("attn_softcap", None),
    fixed("final_softcap", None),
    fixed("embedding_scale", 1.0),
    fixed("residual_scale", 1.0),
    fixed("logit_scale", 1.0),
    fixed("n_experts", 0),
    fixed("n_experts_used", 0),
    fixed("moe_ffn_size", 0),
    fixed("shared_ffn_size", 0),
    HyperRule("moe_layers", default=per_layer(False)),
    fixed("norm_topk", False),
    fixed("routed_scale", 1.0),
    fixed("n_expert_groups", 1),
    fixed("n_expert_groups_used", 1),
    fixed("router", "softmax"),
    fixed("q_lora_rank", None),
    fixed("kv_lora_rank", None),
    fixed("qk_nope_head_dim", None),
    fixed("qk_rope_head_dim", None),
    HyperRule("delta_layers", default=per_layer(False)),
    *(fixed(f"delta_{part}", None) for part in ("key_heads", "value_heads")),
    *(fixed(f"delta_{part}", None) for part in ("key_dim", "value_dim")),
    HyperRule("conv_layers", default=per_layer(False)),
    fixed("conv_taps", None),
    fixed("rope_sections", None),
    fixed("swiglu_limit", None),
    fixed("swiglu_alpha", None),
)


def hyper_table(*overrides: HyperRule) -> tuple[HyperRule, ...]:
    """Return one rule for every hyperparameter, in the vocabulary's order.

    `overrides` replace rules of BASE, and add those of special names. ArchError if a name of the
    vocabulary has no rule, or a rule has an unknown name.
    """
    rules = {rule.name: rule for rule in (*BASE, *overrides)}
    wrong = (rules.keys() ^ HYPER_NAMES.keys()) - SPECIAL_NAMES.keys()
    if wrong:
        raise ArchError(f"rules and vocabulary differ in {sorted(wrong)}")
    return tuple(rules[name] for name in (*HYPER_NAMES, *SPECIAL_NAMES) if name in rules)
