"""Draft heads (multi-token prediction, MTP): one more layer, which guesses the token after next.

After token i, with the model's hidden state h of it (after the last norm) and the embedding e of
token i + 1, a head computes

    x = nextn.eh_proj(concat(norm(e) by nextn.enorm, norm(h) by nextn.hnorm))
    logits of token i + 2 = head(norm(layer(x)))

with a decoder layer of the model's own kind, that with attention and experts where it has them.
Embedding and head are the model's unless the file stores others. The roles are llama.cpp's names.

In a model a head is the block after the last one: with N layers its roles are
`LN.attn_q.weight`, `LN.nextn.enorm.weight`, `LN.nextn.shared_head_norm.weight`, for every style
of names. A second head is block N + 1. Its tables (`head_spec`) are those of a model of one
layer, in which the same tensors are `L0.attn_q.weight` and `nextn.enorm.weight` (`head_role`).

Sources: DeepSeek-V3's report (arXiv 2412.19437), section 2.2; vLLM's deepseek_mtp.py and
qwen3_next_mtp.py, whose models hand over the state after the last norm; llama.cpp's qwen35.cpp
and its converter, which gives Qwen's `mtp.*` the same names as DeepSeek's.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace

from aprfmt.arch import hyper_rules
from aprfmt.arch.binding import (
    BoundGroup,
    BoundNames,
    bind_names,
    bind_packed,
    groups_for,
    without_partial,
)
from aprfmt.arch.name_templates import NameIndex, strip_prefix
from aprfmt.arch.size_expressions import size_of
from aprfmt.arch.spec import (
    ArchSpec,
    Binding,
    DraftNames,
    Facts,
    HyperParams,
    HyperRule,
    role_key,
    split_key,
)
from aprfmt.arch.spec import TensorRule as Rule
from aprfmt.arch.tensor_rows import LAYER
from aprfmt.arch.value_checks import MAX_LAYERS, whole_number
from aprfmt.base.protocols import Value
from aprfmt.errors import ArchError

EMBED_NORM, HIDDEN_NORM, JOIN = "nextn.enorm", "nextn.hnorm", "nextn.eh_proj"
_NORM, _HEAD, _EMBED = "output_norm.weight", "output.weight", "token_embd.weight"
_RULES = (
    Rule(f"{EMBED_NORM}.weight", ("hidden_size",), layered=False),
    Rule(f"{HIDDEN_NORM}.weight", ("hidden_size",), layered=False),
    Rule(f"{JOIN}.weight", ("hidden_size", "2*hidden_size"), layered=False),
)
NORMS = (_RULES[0].role, _RULES[1].role)
_GGUF = DraftNames(
    "blk.{N}.",
    {
        "blk.{N}.nextn.enorm.weight": NORMS[0],
        "blk.{N}.nextn.hnorm.weight": NORMS[1],
        "blk.{N}.nextn.eh_proj.weight": _RULES[2].role,
        "blk.{N}.nextn.shared_head_norm.weight": _NORM,
        "blk.{N}.nextn.shared_head_head.weight": _HEAD,
        "blk.{N}.nextn.embed_tokens.weight": _EMBED,
    },
    ("{arch}.nextn_predict_layers",),
)
# What a role of the head is called in the model, by its role in a model of one layer.
_OUTER = {role: name.removeprefix(_GGUF.layer) for name, role in _GGUF.tensors.items()}
_INNER = {name: role for role, name in _OUTER.items()}
# DeepSeek-V3 and GLM-4.5: the layer after the last one, with the head's own tensors inside.
NEXTN: Mapping[str, DraftNames] = {
    "gguf": _GGUF,
    "hf": DraftNames(
        "model.layers.{N}.",
        {
            "model.layers.{N}.enorm.weight": NORMS[0],
            "model.layers.{N}.hnorm.weight": NORMS[1],
            "model.layers.{N}.eh_proj.weight": _RULES[2].role,
            "model.layers.{N}.shared_head.norm.weight": _NORM,
            "model.layers.{N}.shared_head.head.weight": _HEAD,
            "model.layers.{N}.embed_tokens.weight": _EMBED,
        },
        ("num_nextn_predict_layers",),
    ),
}
# Qwen3-Next and Qwen3.5: a separate module.
MTP: Mapping[str, DraftNames] = {
    "gguf": _GGUF,
    "hf": DraftNames(
        "mtp.layers.{I}.",
        {
            "mtp.pre_fc_norm_embedding.weight": NORMS[0],
            "mtp.pre_fc_norm_hidden.weight": NORMS[1],
            "mtp.fc.weight": _RULES[2].role,
            "mtp.norm.weight": _NORM,
            "mtp.embed_tokens.weight": _EMBED,
        },
        ("mtp_num_hidden_layers", "num_nextn_predict_layers"),
    ),
}
# Keys of config.json that say how many draft layers there are, in the files of any model.
DRAFT_LAYER_KEYS = tuple(dict.fromkeys((*NEXTN["hf"].counts, *MTP["hf"].counts, "num_mtp_layers")))
_FIRST = {"hf": LAYER.replace("{L}", "0"), "gguf": "blk.0."}


def main_layers_rule() -> HyperRule:
    """Return the rule that reads and writes the number of layers without those of draft heads.

    A GGUF counts a draft head's layer among its blocks.
    """

    def read_gguf(facts: Facts, hp: Mapping[str, Value]) -> tuple[Value, str] | None:
        """Return (number of layers without those of draft heads, key) of a GGUF.

        None without the key.
        """
        found, draft = facts.first("{arch}.block_count"), facts.first("{arch}.nextn_predict_layers")
        if found is None:
            return None
        blocks = whole_number(*found, 1, MAX_LAYERS)
        return blocks - (0 if draft is None else whole_number(*draft, 0, blocks - 1)), found[1]

    return replace(hyper_rules.n_layers(), read={"gguf": read_gguf})


def head_spec(spec: ArchSpec) -> ArchSpec:
    """Return the tables of a draft head: a model of one layer with three tensors before it.

    Its norms have the layout steps of the model's last norm.
    """
    bindings = {}
    for style, rows in spec.bindings.items():
        steps = next((row.steps for row in rows if row.roles == (_NORM,)), ())
        join = spec.draft[style].join if style in spec.draft else ()
        head_bindings = (
            Binding((rule.role,), (rule.role,), steps if rule.role in NORMS else join)
            for rule in _RULES
        )
        bindings[style] = (*head_bindings, *rows)
    return replace(spec, tensors=(*_RULES, *spec.tensors), bindings=bindings)


def head_hyper(spec: ArchSpec, hp: HyperParams) -> HyperParams:
    """Return the hyperparameters of the head's one layer: those of the last one with attention.

    `spec.draft_layer` gives the kinds of layer where they differ from it.
    """
    recurrent = hp["delta_layers"]
    like = next((i for i in reversed(range(len(recurrent))) if not recurrent[i]), -1)
    layers = {
        name: (spec.draft_layer.get(name, value[like]),)
        for name, value in hp.items()
        if name.endswith("_layers") and isinstance(value, tuple)
    }
    return hp.with_values(**{**layers, "n_layers": 1})


@dataclass(frozen=True)
class Head:
    """A draft head that a file stores: its tensors, and its hyperparameters.

    `bound` has the groups of stored names under the model's role keys.
    """

    bound: BoundNames
    hyper: HyperParams


def find_heads(
    spec: ArchSpec, style: str, hp: HyperParams, names: Collection[str], packed: Set[str]
) -> list[Head]:
    """Return the draft heads that a file stores, from its tensor names, in order of their blocks.

    `style` is the naming (hf, gguf, apr), `packed` are the names of packed weights.
    """
    found = []
    for layer, stored in _group_names_by_head(spec, style, hp, names):
        hyper = head_hyper(spec, hp)
        bound = bind_names(head_spec(spec), style, stored)
        bound = bind_packed(bound, {target for target, name in stored.items() if name in packed})
        bound = without_partial(bound, hyper)
        groups = tuple(
            BoundGroup(
                group.binding,
                layer,
                tuple(stored[name] for name in group.stored),
                tuple(model_role(layer, key) for key in group.roles),
            )
            for group in bound.groups
        )
        found.append(
            Head(
                BoundNames(
                    groups,
                    tuple(stored[name] for name in bound.unbound),
                    buffers=tuple(stored[name] for name in bound.buffers),
                ),
                hyper,
            )
        )
    return found


def _group_names_by_head(
    spec: ArchSpec, style: str, hp: Mapping[str, Value], names: Collection[str]
) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield (block number, {name in a model of one layer: stored name}) of each draft head."""
    if style not in spec.draft:
        return
    count = size_of("n_layers", hp)
    for layer in range(count, count + MAX_LAYERS):
        renamed = HeadNames(head_spec(spec), style, count, layer - count)
        stored = {
            target: name for name in names if (target := renamed.find_target(name)) is not None
        }
        if not stored or (renamed.own_roles and {*stored}.isdisjoint(renamed.own_targets)):
            return  # without tensors that only a head has, it is a layer of the model
        yield layer, stored


def first_head(spec: ArchSpec, style: str, names: Iterable[str]) -> int | None:
    """Return the block number of the first draft head; None if no tensor of one is stored.

    `style` is the naming (hf, gguf, apr) of `names`. Only tensors that no other layer has count as
    evidence.
    """
    own = spec.draft[style].tensors if style in spec.draft else ()
    rows = [(name.replace("{N}", "{L}"), name) for name in own if "{N}" in name]
    index = NameIndex(style, rows)
    found = (match.layer for name in names if (match := index.find(name)) is not None)
    return min((layer for layer in found if layer is not None), default=None)


def head_count_keys(
    spec: ArchSpec, style: str, hp: HyperParams, names: Collection[str]
) -> dict[str, Value]:
    """Return the {key: value} of a style that say how many draft heads a file of these names has.

    Empty without a head. A GGUF counts heads among the blocks, also in lists of one value a block.
    """
    count = sum(1 for _ in _group_names_by_head(spec, style, hp, names))
    if not count:
        return {}
    keys: dict[str, Value] = {spec.draft[style].counts[0]: count}
    if style == "gguf":
        keys |= {
            "{arch}.block_count": size_of("n_layers", hp) + count,
            **_block_lists(spec, hp, count),
        }
    arch = (spec.called.get("gguf") or ("",))[0]
    return {key.replace("{arch}", arch): value for key, value in keys.items()}


def _block_lists(spec: ArchSpec, hp: HyperParams, count: int) -> dict[str, Value]:
    """Return a GGUF's {key: list of one value a block}, extended by those of `count` heads."""
    layers = {name: (*hp[name], *(on,) * count) for name, on in spec.draft_layer.items()}
    longer = hp.with_values(**layers)
    made = (
        rule.write["gguf"](longer[rule.name], longer)
        for rule in spec.hyper
        if layers and "gguf" in rule.write
    )
    return {key: value for keys in made for key, value in keys.items() if isinstance(value, list)}


def model_role(layer: int, key: str) -> str:
    """Return the role key that a head's tensor has in the model, where the head is block `layer`.

    `key` is the one in a model of one layer: `L0.attn_q.weight`, or `nextn.enorm.weight`.
    """
    inside, role = split_key(key)
    return role_key(layer, role if inside is not None else _OUTER.get(role, role))


def head_role(key: str) -> str:
    """Return a head's role key in a model of one layer, from the key in the whole model."""
    _, role = split_key(key)
    return _INNER.get(role) or role_key(0, role)


def stored_groups(
    spec: ArchSpec, style: str, roles: Collection[str], hp: HyperParams
) -> list[BoundGroup]:
    """Return the stored tensors that hold these roles of a model and of its draft heads.

    `style` is the naming (hf, gguf, apr). `groups_for` does the same for a model without draft
    heads; those of draft heads come last.
    """
    if style not in spec.draft:
        return groups_for(spec, style, roles, hp)
    count = size_of("n_layers", hp)
    mine: dict[int, list[str]] = {}
    main: list[str] = []
    for key in roles:
        layer, _ = split_key(key)
        (main if layer is None or layer < count else mine.setdefault(layer, [])).append(key)
    groups = groups_for(spec, style, main, hp)
    for layer, keys in sorted(mine.items()):
        groups += _head_groups(spec, style, layer, keys, hp)
    return groups


def _head_groups(
    spec: ArchSpec, style: str, layer: int, keys: Collection[str], hp: HyperParams
) -> list[BoundGroup]:
    """Return the stored tensors of a draft head's roles; ArchError for one without a name.

    `layer` is the block that the head is, `keys` are role keys of the model.
    """
    head, count = head_spec(spec), size_of("n_layers", hp)
    renamed = HeadNames(head, style, count, layer - count)
    named = renamed.own_roles
    homeless = [key for key in keys if split_key(key)[1] in _INNER and head_role(key) not in named]
    if homeless:
        raise ArchError(
            f"{style} files of {spec.name} have no name for {len(homeless)} of the draft head's "
            f"tensors: {', '.join(homeless[:4])}; leave them out with --drop"
        )
    return [
        BoundGroup(
            group.binding,
            layer,
            tuple(map(renamed.stored_name, group.stored)),
            tuple(model_role(layer, key) for key in group.roles),
        )
        for group in groups_for(head, style, [head_role(key) for key in keys], head_hyper(spec, hp))
    ]


class HeadNames:
    """Translates names of a draft head's stored tensors to those in a model of one layer, and back.

    `index` counts heads. A tensor that a file stores once for all heads belongs to the first.
    """

    def __init__(self, spec: ArchSpec, style: str, n_layers: int, index: int = 0) -> None:
        """Fill the name templates of head number `index` of a model with `n_layers` layers."""
        self._style = style
        names = spec.draft[style]
        self._layer = _fill_template(names.layer, n_layers, index)
        self._own, self._roles = {}, {}
        for template, role in names.tensors.items():
            if index and "{" not in template:
                continue
            target = next(row.stored[0] for row in spec.bindings[style] if row.roles == (role,))
            target = target.replace("{L}", "0")
            name = _fill_template(template, n_layers, index)
            self._own[name], self._roles[name] = target, role

    @property
    def own_roles(self) -> Set[str]:
        """The roles, in a model of one layer, of tensors that only a draft head has.

        For example `nextn.enorm.weight`, and `output_norm.weight` for its own last norm.
        """
        return {*self._roles.values()}

    @property
    def own_targets(self) -> Set[str]:
        """The names, in a model of one layer, of tensors that only a draft head has."""
        return {*self._own.values()}

    @property
    def own_stored(self) -> tuple[str, ...]:
        """The stored names of tensors that every draft head has: not output head, not embedding."""
        return tuple(name for name, role in self._roles.items() if role not in (_HEAD, _EMBED))

    def find_target(self, name: str) -> str | None:
        """Return a stored tensor's name in a model of one layer; None if not the head's."""
        inner = strip_prefix(name, self._style)
        for stored, target in self._own.items():
            if inner == strip_prefix(stored, self._style):
                return target
        layer = strip_prefix(self._layer, self._style)
        return _FIRST[self._style] + inner.removeprefix(layer) if inner.startswith(layer) else None

    def stored_name(self, name: str) -> str:
        """Return the stored name of a tensor, from its name in a model of one layer."""
        for stored, target in self._own.items():
            if name == target:
                return stored
        return self._layer + name.removeprefix(_FIRST[self._style])


def _fill_template(template: str, n_layers: int, index: int) -> str:
    """Return a name template with {N} as the head's block number and {I} as its own number."""
    return template.replace("{N}", str(n_layers + index)).replace("{I}", str(index))
