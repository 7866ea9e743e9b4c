"""Which layers of a hybrid model have attention: lists in config.json, key head counts in GGUF.

A GGUF has zero key heads for a layer without attention. Sources: transformers' configurations;
the converter's jamba.py, granite.py, lfm2.py, nemotron.py.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from aprfmt.arch import hyper_rules
from aprfmt.arch.layout_steps import RowsPermuted
from aprfmt.arch.spec import (
    Facts,
    Found,
    HyperRule,
    LayoutStep,
    Params,
    PerLayer,
    Read,
    Write,
    split_key,
)
from aprfmt.arch.tensor_rows import KV, LAYER, Q, RoleRow, linear
from aprfmt.arch.value_checks import listed_kinds, sequence, whole_number
from aprfmt.base.protocols import Value

IN, SSM = "attention_layers", "ssm_layers"
KV_HEADS = "{arch}.attention.head_count_kv"
ATTENTION = ("attention", "full_attention")
STATE_SPACE = ("mamba", "linear_attention")


def attention_rows(
    module: str = LAYER + "self_attn",
    *,
    permuted: bool = False,
    bias: str | None = "attention_bias",
    out: str = "o_proj",
) -> tuple[RoleRow, ...]:
    """Return the tensor-table rows of the four projections of layers with attention.

    `module` is their prefix in Hugging Face files, `out` the name of the last one there.
    `permuted`: GGUF stores rows of q and k in pair order. `bias` is the condition for a bias; None:
    there is none.
    """
    q: tuple[LayoutStep, ...] = (RowsPermuted("n_heads"),) if permuted else ()
    k: tuple[LayoutStep, ...] = (RowsPermuted("n_kv_heads"),) if permuted else ()
    return (
        *linear("attn_q", f"{module}.q_proj", Q, "hidden_size", IN, bias=bias, gguf_steps=q),
        *linear("attn_k", f"{module}.k_proj", KV, "hidden_size", IN, bias=bias, gguf_steps=k),
        *linear("attn_v", f"{module}.v_proj", KV, "hidden_size", IN, bias=bias),
        *linear(
            "attn_output",
            f"{module}.{out}",
            "hidden_size",
            Q,
            IN,
            bias=bias and "attention_out_bias",
        ),
    )


def layers_with_role(role: str) -> Callable[[Mapping[str, tuple[int, ...]]], PerLayer | None]:
    """Return a function (shapes -> one boolean a layer): which layers store a role."""

    def read(shapes: Mapping[str, tuple[int, ...]]) -> PerLayer | None:
        """Return one boolean per layer: it stores the tensor `role`.

        None if no tensor is in a layer. `shapes` has the logical shape of each tensor by its
        role.
        """
        layers = [layer for layer, _ in map(split_key, shapes) if layer is not None]
        return tuple(f"L{i}.{role}" in shapes for i in range(max(layers) + 1)) if layers else None

    return read


def read_counts(facts: Facts, name: str) -> tuple[list[int], str] | None:
    """Return ([whole number of each layer], key) under a GGUF's key `name`; None without the key.

    The list has one number if that stands for all layers. Raises ArchError for other values.
    """
    found = facts.first(name)
    if found is None:
        return None
    listed = found[0] if isinstance(found[0], Sequence) else [found[0]]
    return [whole_number(count, found[1]) for count in sequence(listed, found[1], 1)], found[1]


def each_layer(listed: Sequence[int], key: str, hp: Params) -> Sequence[int]:
    """Return the number of each layer: one number stands for all layers.

    Raises ArchError where the list of `key` has several, and fewer than there are layers.
    """
    count = int(hp["n_layers"])
    found: Sequence[int] = sequence(listed, key, count if len(listed) > 1 else 1)
    return found[:count] if len(found) > 1 else [*found] * count


def kv_heads_rule(hf_default: int | None = None) -> HyperRule:
    """Return the rule that reads and writes the number of key heads of attention layers.

    A GGUF lists it by layer, with 0 for layers without attention.
    """

    def read(facts: Facts, hp: Params) -> Found:
        """Return (number of key heads of layers with attention, key) of a GGUF.

        None without the key. A GGUF lists them by layer; the largest is returned.
        """
        found = read_counts(facts, KV_HEADS)
        return None if found is None else (max(found[0]), found[1])

    def write(value: Value, hp: Params) -> Params:
        """Return {GGUF key: number of key heads of each layer}, 0 for layers without attention."""
        return {KV_HEADS: [value if on else 0 for on in hp["attention_layers"]]}

    usual = hyper_rules.n_kv_heads(hf_default)
    return replace(usual, read={"gguf": read}, write={"gguf": write})


def attention_layers_rule(
    hf: Read, write_hf: Write, default: Callable[[Params], PerLayer] | None = None
) -> HyperRule:
    """Return the rule that reads and writes which layers have attention.

    `hf` reads config.json's keys, `write_hf` writes them. In a GGUF those with key heads have it.
    Without a key, `default` says it, or all layers have it.
    """
    return _layers_by_heads_rule(
        "attention_layers", True, hf, write_hf, default or hyper_rules.per_layer(True)
    )


def conv_layers_rule(hf: Read, write_hf: Write) -> HyperRule:
    """Return the rule that reads and writes which layers have a convolution.

    `hf` reads config.json's keys, `write_hf` writes them. In a GGUF those without key heads have
    it. Without a key, those with a stored kernel have it.
    """
    rule = _layers_by_heads_rule("conv_layers", False, hf, write_hf, hyper_rules.per_layer(False))
    return replace(rule, shape=layers_with_role("shortconv.conv.weight"))


def _layers_by_heads_rule(
    name: str, attends: bool, hf: Read, write_hf: Write, default: Callable[[Params], PerLayer]
) -> HyperRule:
    """Return the rule `name` for layers that a GGUF shows by their number of key heads.

    With `attends` these are the layers with key heads, else those without. `hf` and `write_hf`
    read and write config.json's keys, `default` gives the layers without a key.
    """

    def read(facts: Facts, hp: Params) -> Found:
        """Return (one boolean per layer, key) of a GGUF's list of key heads; None without the key.

        True for the layers with key heads if the rule is for those (`attends`), else for the
        others.
        """
        found = read_counts(facts, KV_HEADS)
        if found is None:
            return None
        return tuple((count > 0) is attends for count in each_layer(*found, hp)), found[1]

    return HyperRule(
        name,
        {"gguf": (KV_HEADS,)},
        read={"hf": hf, "gguf": read},
        write={"hf": write_hf, "gguf": lambda value, hp: {}},
        default=default,
    )


def other_layers_rule(name: str = "ssm_layers", opposite: str = "attention_layers") -> HyperRule:
    """Return the rule `name` for the layers for which the hyperparameter `opposite` is False."""
    return HyperRule(name, default=lambda hp: tuple(not on for on in hp[opposite]))


def read_layer_kinds(names: Sequence[str], rest: Sequence[str], *keys: str) -> Read:
    """Return a read function for a list of layer kinds: which layers' kind is among `names`.

    It raises ArchError for a kind that is neither among them nor in `rest`.
    """

    def read(facts: Facts, hp: Params) -> Found:
        """Return (one boolean per layer: its kind is among `names`, key) of config.json's list.

        None without the list. Raises ArchError for a kind that the architecture does not have.
        """
        found = facts.first(*keys)
        if found is None:
            return None
        listed = listed_kinds(*found, hp["n_layers"], (*names, *rest))
        return tuple(kind in names for kind in listed), found[1]

    return read


def read_layer_numbers(key: str) -> Read:
    """Return a read function for a list of layer numbers: which layers are in it."""

    def read(facts: Facts, hp: Params) -> Found:
        """Return (one boolean per layer: its number is listed under `key`, key).

        None without the key.
        """
        found = facts.first(key)
        if found is None:
            return None
        on = {whole_number(item, key) for item in sequence(*found)}
        return tuple(i in on for i in range(hp["n_layers"])), key

    return read


def read_layer_period(period: str, offset: str, usual: tuple[int, int]) -> Read:
    """Return a function that reads which layers are at a period, one boolean a layer.

    `period` and `offset` are keys of config.json: layer i is one where i % period == offset.
    `usual` are both numbers where the keys are not there.
    """

    def read(facts: Facts, hp: Params) -> Found:
        """Return (one boolean per layer: it is at config.json's period, key): i % period == offset.

        `usual` has both numbers where the keys are absent, so None is never returned.
        """
        every, first = facts.first(period), facts.first(offset)
        step = usual[0] if every is None else whole_number(*every, 1)
        start = usual[1] if first is None else whole_number(*first)
        layers = tuple(i % step == start for i in range(hp["n_layers"]))
        return layers, (every or first or ("", period))[1]

    return read


def write_kinds(kinds: Mapping[str, bool]) -> Write:
    """Return a write function for config.json's `layer_types`: the kind of each layer.

    `kinds` is {kind: the boolean of a layer of that kind}.
    """
    names = {on: name for name, on in kinds.items()}
    return lambda value, hp: {"layer_types": [names[on] for on in value]}


def write_period(period: str, offset: str) -> Write:
    """Return a write function for layers at equal distances, as a period and an offset."""

    def write(value: Value, hp: Params) -> Params:
        """Return config.json's {key: number} for the period and offset of the True layers.

        Both follow from the first two True layers of `value`, one boolean per layer.
        """
        on = [i for i, here in enumerate(value) if here]
        step = on[1] - on[0] if len(on) > 1 else max(len(value), 1)
        return {period: step, offset: on[0] if on else step}

    return write


def write_indices(key: str) -> Write:
    """Return a write function for the list of layer numbers that are True, under `key`."""
    return lambda value, hp: {key: [i for i, on in enumerate(value) if on]}
