"""Which layers of a hybrid have attention: by config.json's lists, GGUF by key heads of zero.

Sources: transformers' configurations; the converter's jamba.py, granite.py, lfm2.py, nemotron.py.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from aprfmt.arch import hyper_rules
from aprfmt.arch.layout_steps import RowsPermuted
from aprfmt.arch.spec import Facts, HyperRule, LayoutStep, Read, Write, split_key
from aprfmt.arch.tensor_rows import KV, LAYER, Q, RoleRow, linear
from aprfmt.arch.value_checks import sequence, whole_number
from aprfmt.base.protocols import Value
from aprfmt.errors import ArchError

Params = Mapping[str, Value]
Found = tuple[Value, str] | None
PerLayer = tuple[bool, ...]
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
    """Return the four projections of layers with attention; `bias` None: they have none."""
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
    """Return a function that says which layers have a role."""

    def read(shapes: Mapping[str, tuple[int, ...]]) -> PerLayer | None:
        layers = [layer for layer, _ in map(split_key, shapes) if layer is not None]
        return tuple(f"L{i}.{role}" in shapes for i in range(max(layers) + 1)) if layers else None

    return read


def _heads(facts: Facts) -> tuple[list[int], str] | None:
    """Return GGUF's key heads by layer; a single number stands for all layers."""
    found = facts.first(KV_HEADS)
    if found is None:
        return None
    listed = found[0] if isinstance(found[0], Sequence) else [found[0]]
    return [whole_number(count, found[1]) for count in sequence(listed, found[1], 1)], found[1]


def kv_heads(hf_default: int | None = None) -> HyperRule:
    """Return the rule for the key heads of layers with attention; GGUF has zeros elsewhere."""

    def read(facts: Facts, hp: Params) -> Found:
        found = _heads(facts)
        return None if found is None else (max(found[0]), found[1])

    def write(value: Value, hp: Params) -> Params:
        return {KV_HEADS: [value if on else 0 for on in hp["attention_layers"]]}

    usual = hyper_rules.n_kv_heads(hf_default)
    return replace(usual, read={"gguf": read}, write={"gguf": write})


def attention_layers(
    hf: Read, write_hf: Write, default: Callable[[Params], PerLayer] | None = None
) -> HyperRule:
    """Return the rule for the layers with attention; `hf` reads config.json's keys."""
    return _by_heads("attention_layers", True, hf, write_hf, default or hyper_rules.per_layer(True))


def convolved_layers(hf: Read, write_hf: Write) -> HyperRule:
    """Return the rule for `conv_layers`; `hf` reads config.json's keys.

    Where no key says which they are, those are that have a kernel.
    """
    rule = _by_heads("conv_layers", False, hf, write_hf, hyper_rules.per_layer(False))
    return replace(rule, shape=layers_with_role("shortconv.conv.weight"))


def _by_heads(
    name: str, attends: bool, hf: Read, write_hf: Write, default: Callable[[Params], PerLayer]
) -> HyperRule:
    """Return the rule for the layers that have key heads in a GGUF, or for the others."""

    def read(facts: Facts, hp: Params) -> Found:
        found = _heads(facts)
        if found is None:
            return None
        counts = found[0] * (1 if len(found[0]) > 1 else hp["n_layers"])
        return tuple((count > 0) is attends for count in counts[: hp["n_layers"]]), found[1]

    return HyperRule(
        name,
        {"gguf": (KV_HEADS,)},
        read={"hf": hf, "gguf": read},
        write={"hf": write_hf, "gguf": lambda value, hp: {}},
        default=default,
    )


def other_layers(name: str = "ssm_layers", of: str = "attention_layers") -> HyperRule:
    """Return the rule for the layers that are not among those of another rule."""
    return HyperRule(name, default=lambda hp: tuple(not on for on in hp[of]))


def by_names(names: Sequence[str], rest: Sequence[str], *keys: str) -> Read:
    """Return a function that reads a list of layer kinds: which ones are among `names`.

    ArchError for a kind that is neither among them nor in `rest`.
    """

    def read(facts: Facts, hp: Params) -> Found:
        found = facts.first(*keys)
        if found is None:
            return None
        listed = sequence(*found, hp["n_layers"])
        for layer, kind in enumerate(listed):
            if kind not in (*names, *rest):
                known = ", ".join((*names, *rest))
                raise ArchError(
                    f"{found[1]}: layer {layer} is {kind!r}; the layers of this architecture are "
                    f"one of: {known}"
                )
        return tuple(kind in names for kind in listed), found[1]

    return read


def by_index(key: str) -> Read:
    """Return a function that reads a list of layer numbers."""

    def read(facts: Facts, hp: Params) -> Found:
        found = facts.first(key)
        if found is None:
            return None
        on = {whole_number(item, key) for item in sequence(*found)}
        return tuple(i in on for i in range(hp["n_layers"])), key

    return read


def by_period(period: str, offset: str, usual: tuple[int, int]) -> Read:
    """Return a function that reads every so many-th layer, from an offset; `usual` if absent."""

    def read(facts: Facts, hp: Params) -> Found:
        every, first = facts.first(period), facts.first(offset)
        step = usual[0] if every is None else whole_number(*every, 1)
        start = usual[1] if first is None else whole_number(*first)
        layers = tuple(i % step == start for i in range(hp["n_layers"]))
        return layers, (every or first or ("", period))[1]

    return read


def write_period(period: str, offset: str) -> Write:
    """Return a function that writes layers at equal distances; the first two say which."""

    def write(value: Value, hp: Params) -> Params:
        on = [i for i, here in enumerate(value) if here]
        step = on[1] - on[0] if len(on) > 1 else max(len(value), 1)
        return {period: step, offset: on[0] if on else step}

    return write


def write_indices(key: str) -> Write:
    """Return a function that writes the numbers of the layers."""
    return lambda value, hp: {key: [i for i, on in enumerate(value) if on]}
