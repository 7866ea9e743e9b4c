"""The parameters of an inference engine or a trainer, made of the rows of an architecture.

A *parameter* is one tensor of an engine. A *part* of it is what it holds of one published tensor,
or of several. A rank's *share* is what it has of a parameter, and a *section* rows that the ranks
divide among themselves. A *unit* of a section, such as a head, is on one rank.

An engine joins what a checkpoint has apart (`qkv_proj`, `gate_up_proj`), stacks experts
(`w13_weight`), and gives every rank its share. Both follow from the roles of an architecture and
from the shapes in its table: an axis of `n_kv_heads*head_dim` rows is divided by heads, one of
`hidden_size` is not. So an architecture has its engine parameters without rows of its own here.

Sources: vLLM's linear.py (QKVParallelLinear, MergedColumnParallelLinear, RowParallelLinear),
vocab_parallel_embedding.py, fused_moe/layer.py and mamba_mixer2.py; SGLang's files of the same
names; Megatron Core's core/transformer/attention.py, mlp.py and core/models/gpt/gpt_layer_specs.py.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, TypeVar

from aprfmt.arch.binding import BoundGroup, Shape, logical_shapes
from aprfmt.arch.grouped_rows import ByGroup
from aprfmt.arch.joining_steps import Split
from aprfmt.arch.layout_steps import HalvesBelow, RowsPermuted, Transposed
from aprfmt.arch.required_roles import find_rule
from aprfmt.arch.size_expressions import expression_terms, shape_of, size_of
from aprfmt.arch.spec import ArchSpec, LayoutStep, role_key, split_key
from aprfmt.base.protocols import Value

Array = Any
Sizes = Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class JoinedModule:
    """Roles that an engine has as one matrix, rows in this order, and the names of that module."""

    roles: tuple[str, ...]
    names: tuple[str, ...]


JOINED = (
    JoinedModule(("attn_q", "attn_k", "attn_v"), ("qkv_proj", "W_pack", "qkv")),
    JoinedModule(("ffn_gate", "ffn_up"), ("gate_up_proj", "w13")),
    JoinedModule(("ffn_gate_shexp", "ffn_up_shexp"), ("gate_up_proj",)),
    JoinedModule(("attn_q_a", "attn_kv_a_mqa"), ("fused_qkv_a_proj", "fused_qkv_a_proj_with_mqa")),
    # Delta nets of qwen3_next, qwen3_5 and kimi_linear.
    JoinedModule(("attn_qkv", "attn_gate"), ("in_proj_qkvz",)),
    JoinedModule(("ssm_beta", "ssm_alpha"), ("in_proj_ba",)),
    JoinedModule(
        ("attn_q", "attn_k", "attn_v", "ssm_beta", "ssm_f_a", "ssm_g_a"), ("fused_qkvbfg_a_proj",)
    ),
    JoinedModule(("ssm_f_b", "ssm_g_b"), ("fused_fg_b_proj",)),
    JoinedModule(("ssm_conv1d_q", "ssm_conv1d_k", "ssm_conv1d_v"), ("qkv_conv1d",)),
    # deepseek_v4's query and keys, and its compressors.
    JoinedModule(("attn_q_a", "attn_kv"), ("wqkv_a",)),
    JoinedModule(("attn_compressor_kv", "attn_compressor_gate"), ("wkv_gate",)),
    JoinedModule(("indexer.compressor_kv", "indexer.compressor_gate"), ("wkv_gate",)),
)
# Architecture -> parts of its checkpoints' names that SGLang's loader replaces, one after another.
RENAMED: Mapping[str, tuple[tuple[str, str], ...]] = {
    "deepseek_v4": (
        (".attn.norm.", ".attn.kv_norm."), (".attn.", ".self_attn."), (".ffn.", ".mlp."),
        (".attn_norm.", ".input_layernorm."), (".ffn_norm.", ".post_attention_layernorm."),
        (".gate.tid2eid", ".topk.tid2eid"), (".gate.bias", ".gate.e_score_correction_bias"),
        (".w1.", ".gate_proj."), (".w2.", ".down_proj."), (".w3.", ".up_proj."),
        (".hc_head.hc_", ".hc_head_"),
    ),
}  # fmt: skip
# Other names of tensors outside the layers, as in vLLM's gpt_oss, nemotron_h and gpt_neox.
WHOLE: Mapping[str, tuple[str, ...]] = {
    "token_embd": ("model.embed_tokens.weight", "model.embedding.weight"),
    "output_norm": ("model.norm.weight", "model.norm_f.weight"),
    "output": ("lm_head.weight",),
}
# Parts of names that an engine replaces: its routers have the biases of their experts' scores, and
# in SGLang hunyuan's and granitemoe's weight, and lfm2_moe's dense layers and short convolutions;
# its scans have the decay itself, not its logarithm.
REPLACED = (
    (".moe_statics.", ".gate."),
    (".expert_bias", ".gate.e_score_correction_bias"),
    (".gate.wg.", ".gate."),
    (".router.layer.", ".gate."),
    (".feed_forward.w2.", ".feed_forward.down_proj."),
    (".conv.conv.weight", ".conv.conv_weight"),
    (".A_log", ".A"),
)
T = TypeVar("T")
# Roles of which one matrix is made whose parts have one factor of NVFP4's scales: ModelOpt and
# llm-compressor export them so, as vLLM and SGLang take the largest factor for all.
ONE_FACTOR = (
    ("attn_q", "attn_k", "attn_v"),
    ("ffn_gate", "ffn_up"),
    ("ffn_gate_shexp", "ffn_up_shexp"),
    ("ffn_gate_exps", "ffn_up_exps"),
)
# Stacks of all experts: the roles whose rows one has, and the begin of its name.
STACKED = (
    JoinedModule(("ffn_gate_exps", "ffn_up_exps"), ("w13",)),
    JoinedModule(("ffn_up_exps",), ("w13",)),
    JoinedModule(("ffn_down_exps",), ("w2",)),
)
# Leaves of stacks: SGLang calls biases `w13_weight_bias`.
STACKED_LEAVES: Mapping[str, tuple[str, ...]] = {
    "weight": ("weight",),
    "bias": ("bias", "weight_bias"),
}
# Megatron Core: roles -> names below `decoder.layers.{L}.`; its experts are stacked where they are
# read. What transformer_engine joins with the norm before it has the norm's weight under its name.
MEGATRON: Mapping[tuple[str, ...], tuple[str, ...]] = {
    ("attn_norm",): (
        "input_layernorm.*",
        "self_attention.linear_qkv.layer_norm_*",
        "self_attention.linear_q_proj.layer_norm_*",
    ),
    ("attn_q", "attn_k", "attn_v"): ("self_attention.linear_qkv.*",),
    ("attn_q",): ("self_attention.linear_q_proj.*",),
    ("attn_q_norm",): ("self_attention.q_layernorm.*",),
    ("attn_k_norm",): ("self_attention.k_layernorm.*",),
    ("attn_q_a",): ("self_attention.linear_q_down_proj.*",),
    ("attn_q_a_norm",): (
        "self_attention.q_layernorm.*",
        "self_attention.linear_q_up_proj.layer_norm_*",
    ),
    ("attn_q_b",): ("self_attention.linear_q_up_proj.*",),
    ("attn_kv_a_mqa",): ("self_attention.linear_kv_down_proj.*",),
    ("attn_kv_a_norm",): (
        "self_attention.kv_layernorm.*",
        "self_attention.linear_kv_up_proj.layer_norm_*",
    ),
    ("attn_kv_b",): ("self_attention.linear_kv_up_proj.*",),
    ("attn_output",): ("self_attention.linear_proj.*",),
    ("ffn_norm",): ("pre_mlp_layernorm.*", "mlp.linear_fc1.layer_norm_*"),
    ("post_attention_norm",): ("post_self_attn_layernorm.*",),
    ("post_ffw_norm",): ("post_mlp_layernorm.*",),
    ("ffn_gate", "ffn_up"): ("mlp.linear_fc1.*",),
    ("ffn_up",): ("mlp.linear_fc1.*",),
    ("ffn_down",): ("mlp.linear_fc2.*",),
    ("ffn_gate_inp",): ("mlp.router.*",),
    ("exp_probs_b",): ("mlp.router.expert_*",),
    ("ffn_gate_exps", "ffn_up_exps"): ("mlp.experts.linear_fc1.*",),
    ("ffn_up_exps",): ("mlp.experts.linear_fc1.*",),
    ("ffn_down_exps",): ("mlp.experts.linear_fc2.*",),
    ("ffn_gate_shexp", "ffn_up_shexp"): ("mlp.shared_experts.linear_fc1.*",),
    ("ffn_down_shexp",): ("mlp.shared_experts.linear_fc2.*",),
    ("ffn_gate_inp_shexp",): ("mlp.shared_experts.gate_*",),
}
MEGATRON_WHOLE: Mapping[str, str] = {
    "token_embd": "embedding.word_embeddings.*",
    "position_embd": "embedding.position_embeddings.*",
    "output_norm": "decoder.final_layernorm.*",
    "output": "output_layer.*",
}
# Modules whose names say that a state is an engine's.
ENGINE_MODULES = frozenset(
    (
        *(name for row in JOINED for name in row.names),
        *(
            f"{name}_{leaf}"
            for row in STACKED
            for name in row.names
            for leaves in STACKED_LEAVES.values()
            for leaf in leaves
        ),
        "A",  # mamba's decay: its models have no joined module
        "linear_qkv",
        "linear_fc1",
        "linear_fc2",
        "linear_proj",
    )
)
# Tables of the vocabulary, whose rows are padded to a multiple and divided.
VOCABULARY = ("token_embd", "output", "per_layer_token_embd")
# Hyperparameters that count things which stay whole when ranks divide them.
COUNTED = (
    "n_heads",
    "n_kv_heads",
    "global_kv_heads",
    "ssm_heads",
    "ssm_groups",
    "delta_key_heads",
    "delta_value_heads",
)
# Other sizes that ranks divide.
DIVIDED = (
    "ffn_size",
    "moe_ffn_size",
    "shared_ffn_size",
    "vocab_size",
    "per_layer_vocab",
    "ssm_size",
)


@dataclass(frozen=True, slots=True)
class Section:
    """Rows that ranks divide among themselves, whole units of `unit` rows.

    Where there are fewer units than ranks, neighbouring ranks have the same one. Each rank has all
    rows where `divided` is False.
    """

    rows: int
    unit: int = 1
    divided: bool = True

    def copies(self, ranks: int) -> int:
        """Return how many of `ranks` ranks hold the same rows of this section."""
        return max(1, ranks // max(1, self.rows // self.unit)) if self.divided else ranks

    def share(self, ranks: int) -> int:
        """Return how many rows of this section each of `ranks` ranks has.

        -1 where the units cannot be divided evenly among the ranks, or the ranks among the units.
        """
        units = self.rows // self.unit
        if not self.divided:
            return self.rows
        if units * self.unit != self.rows or max(units, ranks) % max(1, min(units, ranks)):
            return -1
        return max(units // ranks, 1) * self.unit

    def start(self, rank: int, ranks: int) -> int:
        """Return the number of the first row of this section that a rank has."""
        return rank // self.copies(ranks) * self.share(ranks) if self.divided else 0


@dataclass(frozen=True, slots=True)
class Part:
    """Published tensors that are one part of an engine's parameter.

    `steps` make of the stored arrays those that the engine joins; `shapes` are the shapes of these,
    `keys` their role keys, `sections` the Sections of each along the axis they are joined on.
    `divided` is the axis of them that ranks divide, None where each rank has all. Without a stored
    name it is room that nothing is loaded into.
    """

    stored: tuple[str, ...]
    steps: tuple[LayoutStep, ...]
    keys: tuple[str, ...]
    shapes: tuple[Shape, ...]
    sections: tuple[tuple[Section, ...], ...]
    divided: int | None = None


@dataclass(frozen=True, slots=True)
class EngineParameter:
    """One parameter of an engine: its possible names, and the parts that it joins along `axis`.

    `grouped`: a rank's q, k and v are joined group by group of its key heads, as Megatron's.
    `vocabulary`: rows may be padded. `published`: the name and the order of rows are those of the
    checkpoint. `megatron`: it is one of Megatron Core's. `negated_exp`: under another
    name than the checkpoint's it holds -exp(x) of the published x. `regrouped`: the rows of a delta
    net's key heads are apart, as some engines have them.
    """

    names: tuple[str, ...]
    parts: tuple[Part, ...]
    axis: int = 0
    grouped: bool = False
    vocabulary: bool = False
    published: bool = False
    megatron: bool = False
    negated_exp: bool = False
    regrouped: bool = False

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The shapes of the arrays that are joined."""
        return tuple(shape for part in self.parts for shape in part.shapes)

    @property
    def sections(self) -> tuple[tuple[Section, ...], ...]:
        """The Sections of each array along the axis they are joined on."""
        return tuple(one for part in self.parts for one in part.sections)

    @property
    def keys(self) -> tuple[str, ...]:
        """The role keys of the arrays; "" for one of several roles."""
        return tuple(key for part in self.parts for key in part.keys)

    @property
    def shape(self) -> Shape:
        """The shape of the parameter where one rank holds all of it."""
        return joined_shape(self.shapes, self.axis)


def parts_of_one_factor(held: Mapping[str, Sequence[T]]) -> Iterator[tuple[T, ...]]:
    """Yield the weights that engines join into one matrix with one scale (ONE_FACTOR).

    `held` is {role key: weights}. Each tuple has one weight of each joined role, such as q, k and
    v; of experts it has those of one expert.
    """
    for key, firsts in held.items():
        layer, role = split_key(key)
        for group in ONE_FACTOR:
            if role == f"{group[0]}.weight":
                others = (held.get(role_key(layer, f"{one}.weight"), ()) for one in group[1:])
                yield from zip(firsts, *others, strict=False)


def joined_shape(shapes: Sequence[Shape], axis: int) -> Shape:
    """Return the shape of arrays of these shapes joined along an axis."""
    first = shapes[0]
    if axis >= len(first):
        return first
    return (*first[:axis], sum(shape[axis] for shape in shapes), *first[axis + 1 :])


def list_parameters(
    spec: ArchSpec, groups: Sequence[BoundGroup], shapes: Mapping[str, Shape], hp: Sizes
) -> list[EngineParameter]:
    """Return the parameters in which engines may hold a checkpoint, the likeliest first.

    `groups` are its tensors bound to roles, `shapes` their stored shapes by name. A tensor is in
    several of them: under its own name, joined, stacked, in Megatron's form.
    """
    table = _Table(spec, groups, shapes, hp)
    made = [*table.published(), *table.relaid(), *table.stacked()]
    renamed = RENAMED.get(spec.name, ())
    for layer in table.layers:
        made += [*table.joined(layer), *table.completed(layer), *table.megatron(layer)]
    if not renamed:
        return made
    return [replace(one, names=_with_renamed(one.names, renamed)) for one in made]


def _with_renamed(names: Sequence[str], pairs: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Return the names, and after them each name with the replacements (old, new) applied.

    A name that occurs twice is returned once.
    """
    found = dict.fromkeys(names)
    for name in names:
        for old, new in pairs:
            name = name.replace(old, new)
        found[name] = None
    return tuple(found)


class _Table:
    """Makes the parameters of one checkpoint; see `list_parameters`."""

    def __init__(
        self, spec: ArchSpec, groups: Sequence[BoundGroup], shapes: Mapping[str, Shape], hp: Sizes
    ) -> None:
        """Store the checkpoint's groups, stored shapes and hyperparameters."""
        self._spec, self._groups, self._shapes, self._hp = spec, groups, shapes, hp
        self._by_key = {key: group for group in groups for key in group.roles}
        found = {split_key(key)[0] for key in self._by_key}
        self.layers = sorted(found, key=lambda one: -1 if one is None else one)

    def published(self) -> Iterator[EngineParameter]:
        """Yield a parameter for each stored tensor, under its name and in its order of rows."""
        for group in self._groups:
            base = role_base(group.roles[0])
            for name in group.stored:
                part = self._stored_part(group, name)
                other = [name.replace(*pair) for pair in REPLACED]
                names = (name, *other, *(WHOLE.get(base, ()) if name.endswith("weight") else ()))
                yield EngineParameter(
                    tuple(dict.fromkeys(names)),
                    (part,),
                    vocabulary=base in VOCABULARY,
                    published=True,
                    negated_exp=base == "ssm_a",
                )

    def relaid(self) -> Iterator[EngineParameter]:
        """Yield a parameter for each stored tensor that an engine holds with its rows reordered.

        gpt_neox stores q, k and v joined head by head, and an engine has all of q before all of k.
        The positions of a compressor (deepseek_v4) whose windows overlap are two halves of columns
        as published, and of rows in an engine.
        """
        for group in self._groups:
            moves = any(step.permutes for step in group.binding.steps)
            if len(group.stored) == 1 and moves and "_exps" not in group.roles[0]:
                regrouped = any(type(step) is ByGroup for step in group.binding.steps)
                yield EngineParameter(
                    group.stored, (self._logical_part(group),), regrouped=regrouped
                )
            if role_base(group.roles[0]).endswith("compressor_ape") and self._overlaps(group):
                part = self._stored_part(group, group.stored[0])
                yield EngineParameter(group.stored, (replace(part, steps=(HalvesBelow(),)),))

    def _overlaps(self, group: BoundGroup) -> bool:
        """Return whether a compressor's windows overlap: its positions are twice its norm's size.

        `group` holds the positions.
        """
        norm = self._by_key.get(group.roles[0].replace("compressor_ape", "compressor_norm"))
        width = self._shapes[group.stored[0]][-1]
        return norm is not None and width == 2 * self._shapes[norm.stored[0]][-1]

    def stacked(self) -> Iterator[EngineParameter]:
        """Yield a parameter for each stack of all experts: gate and up, down, their biases."""
        for layer in self.layers:
            for leaf in ("weight", "bias"):
                done: set[str] = set()
                for row in STACKED:
                    groups = self._groups_of(row.roles, layer, leaf)
                    if groups is None or not done.isdisjoint(row.roles):
                        continue
                    done.update(row.roles)
                    above = _expert_module(groups[0].stored[0])
                    names = tuple(
                        f"{above}{below}.{name}_{own}"
                        for name in row.names
                        for below in ("", ".routed_experts")
                        for own in STACKED_LEAVES[leaf]
                    )
                    yield EngineParameter(names, tuple(map(self._logical_part, groups)), axis=1)
                    if _is_interleaved(groups[0]):
                        # gpt_oss: an engine keeps gate and up row by row.
                        yield EngineParameter(names, (self._turned_part(groups[0]),), axis=1)

    def joined(self, layer: int | None) -> Iterator[EngineParameter]:
        """Yield the joined parameters of a layer, in the order of the published tensors' rows."""
        for row in JOINED:
            for leaf in ("weight", "bias"):
                groups = self._groups_of(row.roles, layer, leaf)
                if groups is None or len(groups) < 2 or any(len(g.stored) > 1 for g in groups):
                    continue
                parts = tuple(self._stored_part(group, group.stored[0]) for group in groups)
                above, _, last = groups[0].stored[0].rpartition(".")
                base = above.rpartition(".")[0]
                names = tuple(f"{base}.{name}.{last}" for name in row.names)
                yield EngineParameter(names, parts)
                if self._spec.name == "llama4" and row.roles[0] == "attn_q":
                    # Its pairs of rows that turn together are neighbours; vLLM's are halves.
                    halves = (
                        self._to_split_halves(parts[0], "n_heads"),
                        self._to_split_halves(parts[1], "n_kv_heads"),
                    )
                    yield EngineParameter(names, (*halves, *parts[2:]))

    def completed(self, layer: int | None) -> Iterator[EngineParameter]:
        """Yield a layer's joined q, k and v where the checkpoint stores no k or no v for it.

        SGLang's `qkv_proj` is whole in every layer. In a layer that uses the keys and values of
        another layer, its k and v rows are loaded from nothing. In a layer whose values are its
        keys, the keys' rows are there twice.
        """
        if layer is None or not may_share_keys(self._spec):
            return
        row = next(one for one in JOINED if one.roles[0] == "attn_q")
        shared = not self._hp["own_kv_layers"][layer]
        for leaf in ("weight", "bias"):
            groups = self._groups_of(row.roles[: 1 if shared else 2], layer, leaf)
            value = role_key(layer, f"{row.roles[2]}.{leaf}")
            if groups is None or any(len(one.stored) > 1 for one in groups):
                continue
            parts = [self._stored_part(one, one.stored[0]) for one in groups]
            if shared:
                parts += [
                    self._absent_part(role_key(layer, f"{one}.{leaf}")) for one in row.roles[1:]
                ]
            elif len(parts) == 2 and value not in self._by_key:
                parts.append(replace(parts[1], keys=(value,)))
            else:
                continue
            above, _, last = groups[0].stored[0].rpartition(".")
            base = above.rpartition(".")[0]
            names = tuple(f"{base}.{name}.{last}" for name in row.names)
            yield EngineParameter(names, tuple(parts))

    def _absent_part(self, key: str) -> Part:
        """Return a part without stored tensors for a role that a layer lacks.

        It is as large as the role's in a layer that has it.
        """
        own = self._hp["own_kv_layers"]
        every = {**self._hp, "own_kv_layers": (True,) * len(own)}
        shape = shape_of(find_rule(self._spec, key, every).shape, every)
        return Part((), (), (key,), (shape,), (self._sections(key, shape, 0),))

    def megatron(self, layer: int | None) -> Iterator[EngineParameter]:
        """Yield the parameters of a layer (None: outside the layers) as Megatron Core has them."""
        for leaf in ("weight", "bias"):
            if layer is None:
                for base, name in MEGATRON_WHOLE.items():
                    group = self._by_key.get(f"{base}.{leaf}")
                    if group is not None:
                        yield EngineParameter(
                            (name.replace("*", leaf),),
                            (self._logical_part(group),),
                            vocabulary=base in VOCABULARY,
                            megatron=True,
                        )
                continue
            done: set[str] = set()
            for roles, names in MEGATRON.items():
                groups = self._groups_of(roles, layer, leaf)
                if groups is None or not done.isdisjoint(roles):
                    continue
                done.update(roles)
                parts = tuple(map(self._logical_part, groups))
                full = tuple(f"decoder.layers.{layer}.{name}".replace("*", leaf) for name in names)
                grouped = roles == ("attn_q", "attn_k", "attn_v")
                axis = 1 if "_exps" in roles[0] else 0
                yield EngineParameter(full, parts, axis, grouped, megatron=True)

    def _groups_of(
        self, roles: Sequence[str], layer: int | None, leaf: str
    ) -> list[BoundGroup] | None:
        """Return the groups that hold these roles of a layer and no others, in their order.

        None if one is missing. A query's gate may be with the query.
        """
        found: list[BoundGroup] = []
        for role in roles:
            group = self._by_key.get(role_key(layer, f"{role}.{leaf}"))
            if group is None:
                return None
            if not found or found[-1] is not group:
                found.append(group)
        held = [role_base(key) for group in found for key in group.roles]
        return found if [one for one in held if one != "attn_q_gate"] == list(roles) else None

    def _stored_part(self, group: BoundGroup, name: str) -> Part:
        """Return a stored tensor as a part, its rows in the checkpoint's order."""
        shape = self._shapes[name]
        key = group.roles[0] if len(group.roles) == 1 else ""
        stack = len(group.stored) > 1
        sections = self._sections_of_group(group, shape, 1 if stack else 0)
        divided = self._divided_axis(group.roles[0])
        if divided is not None and stack:
            divided -= 1
        if any(isinstance(step, Transposed) for step in group.binding.steps):
            divided = None if divided is None else len(shape) - 1 - divided
        return Part((name,), (), (key,), (shape,), (sections,), divided)

    def _logical_part(self, group: BoundGroup) -> Part:
        """Return a group's tensors as a part made of its roles' logical arrays."""
        stored = [self._shapes[name] for name in group.stored]
        shapes = tuple(logical_shapes(group.binding, stored, self._hp))
        sections = tuple(
            self._sections(key, shape, 1 if "_exps" in key else 0)
            for key, shape in zip(group.roles, shapes, strict=True)
        )
        divided = self._divided_axis(group.roles[0])
        return Part(group.stored, group.binding.steps, group.roles, shapes, sections, divided)

    def _divided_axis(self, key: str) -> int | None:
        """Return the axis of a role's logical array that ranks divide; None if they do not."""
        if role_base(key).endswith("_norm") and role_base(key) != "ssm_norm":
            return None
        for axis, expression in enumerate(find_rule(self._spec, key, self._hp).shape):
            for term in expression_terms(expression):
                if any(one in COUNTED or one in DIVIDED for one in term):
                    return axis
        return None

    def _to_split_halves(self, part: Part, heads: str) -> Part:
        """Return a part whose heads' rows are reordered from adjacent pairs to split halves.

        `heads` names the hyperparameter that counts the heads.
        """
        return replace(part, steps=(RowsPermuted(heads),))

    def _turned_part(self, group: BoundGroup) -> Part:
        """Return a part of the parameter that is a stack of experts, transposed.

        Its gate and up rows stay interleaved, one row of gate, one of up.
        """
        steps = tuple(step for step in group.binding.steps if isinstance(step, Transposed))
        binding = replace(group.binding, steps=steps)
        (shape,) = logical_shapes(binding, [self._shapes[group.stored[0]]], self._hp)
        section = Section(shape[1], 2)
        return Part(group.stored, steps, ("",), (shape,), ((section,),), 1)

    def _sections_of_group(self, group: BoundGroup, shape: Shape, axis: int) -> tuple[Section, ...]:
        """Return the Sections of a stored tensor's rows, in the order in which it has them.

        `axis` is the axis of the roles' logical shapes that these rows are made of.
        """
        rows = shape[0] if shape else 1
        by_group = next((s for s in group.binding.steps if isinstance(s, ByGroup)), None)
        if by_group is not None:
            return (Section(rows, max(1, rows // size_of(by_group.groups, self._hp))),)
        parts = [
            self._sections(
                key, shape_of(find_rule(self._spec, key, self._hp).shape, self._hp), axis
            )
            for key in group.roles
        ]
        made = tuple(section for part in parts for section in part)
        return made if sum(section.rows for section in made) == rows else (Section(rows),)

    def _sections(self, key: str, shape: Shape, axis: int) -> tuple[Section, ...]:
        """Return the Sections of a role's axis, by the expression of its size in the table."""
        rule = find_rule(self._spec, key, self._hp).shape
        if axis >= len(shape) or axis >= len(rule):
            return (Section(shape[axis] if axis < len(shape) else 1, 1, False),)
        made: list[Section] = []
        last = ""
        for term in expression_terms(rule[axis]):
            times = math.prod(int(one) for one in term if one.isdecimal())
            names = [one for one in term if not one.isdecimal()]
            rows = size_of("*".join(names), self._hp) if names else 1
            counted = next((one for one in names if one in COUNTED), "")
            unit = rows // max(1, size_of(counted, self._hp)) if counted else 1
            divided = bool(counted) or any(one in DIVIDED for one in names)
            if counted and counted == last and times == 1 and made:
                # A head has rows of both terms: MLA's keys, then values.
                before = made.pop()
                made.append(Section(before.rows + rows, before.unit + unit))
            else:
                made += [Section(rows, max(1, unit), divided)] * times
            last = counted
        whole = shape[axis]
        return tuple(made) if sum(one.rows for one in made) == whole else (Section(whole),)


def may_share_keys(spec: ArchSpec) -> bool:
    """Return whether layers of an architecture may use keys and values of an earlier layer."""
    return any(rule.name == "own_kv_layers" for rule in spec.hyper)


def whole_parameter(name: str, shape: Shape) -> EngineParameter:
    """Return the parameter of a tensor without a role: under its own name, its rows as they are."""
    rows = Section(shape[0] if shape else 1)
    return EngineParameter(
        (name,), (Part((name,), (), ("",), (shape,), ((rows,),)),), published=True
    )


def companion_parameter(
    parameter: EngineParameter, leaves: tuple[str, str], shapes: Mapping[str, Shape], slots: int = 1
) -> EngineParameter | None:
    """Return the parameter that holds a companion (scales, zero points) of `parameter`'s codes.

    `leaves` are the last components of the published names, of codes and of companions; `shapes`
    are the companions' published shapes, by the name of their codes. Companions are divided among
    ranks as the rows of the codes are; a scalar belongs to all rows. An engine may have `slots`
    copies of the one scalar of a matrix that is published joined, one for each of its parts (vLLM's
    PerTensorScaleParameter). None where a tensor has no such companion.
    """
    made = []
    for part in parameter.parts:
        if not part.stored or len(part.shapes) != 1 or any(n not in shapes for n in part.stored):
            return None
        stack = (len(part.stored),) * (len(part.stored) > 1)
        own = shapes[part.stored[0]] or (1,)
        shape = (*stack, *own)
        rows = shape[parameter.axis] if parameter.axis < len(shape) else 1
        before = sum(one.rows for one in part.sections[0])
        whole = rows == 1 or any(one.rows * rows % before for one in part.sections[0])
        sections = tuple(
            Section(one.rows * rows // before, max(1, one.unit * rows // before), one.divided)
            for one in part.sections[0]
        )
        divided = part.divided
        if divided is not None and (divided >= len(shape) or shape[divided] == 1):
            divided = None
        names = tuple(name.removesuffix(leaves[0]) + leaves[1] for name in part.stored)
        made.append(
            Part(
                names,
                part.steps,
                part.keys,
                (shape,),
                ((Section(rows, 1, False),) if whole else sections,),
                divided,
            )
        )
    if len(made) == 1 and made[0].shapes == ((1,),):
        made = [replace(one) for one in made * slots]  # told apart, though they are equal
    return replace(parameter, names=(), parts=tuple(made), vocabulary=False)


def role_base(key: str) -> str:
    """Return the role of a key without layer and without `.weight` or `.bias`.

    "" for "".
    """
    return split_key(key)[1].rpartition(".")[0] if key else ""


def _expert_module(name: str) -> str:
    """Return the name of the module that an engine stacks the experts of a stored tensor in."""
    before, found, _ = name.partition(".experts.")
    if not found:
        before = re.split(r"\.(?:in|out)put_linear", name)[0]
    return f"{before}.experts"


def _is_interleaved(group: BoundGroup) -> bool:
    """Return whether a stack has gate and up row by row."""
    return any(isinstance(step, Split) and step.interleaved for step in group.binding.steps)


@dataclass(frozen=True, slots=True)
class RankLayout:
    """How ranks hold a parameter: whole (`axis` None), or each its share along `axis`.

    `sections` are the Sections of each of its arrays along that axis; () where ranks have equal
    blocks of the whole parameter. `padding` is the number of rows after the vocabulary.
    """

    parameter: EngineParameter
    ranks: int
    axis: int | None = None
    sections: tuple[tuple[Section, ...], ...] = ()
    padding: int = 0

    def shares(self, arrays: Sequence[Array], rank: int) -> list[Array]:
        """Return what a rank has of each section, in the rank's order.

        `arrays` are the parameter's whole arrays; they are returned where it is not divided.
        Without sections the list has one array: the rank's block of all of them joined.
        """
        import numpy as np

        axis = self.parameter.axis
        if self.axis is None:
            return list(arrays)
        if not self.sections:
            whole = np.concatenate(list(arrays), axis) if len(arrays) > 1 else arrays[0]
            size = -(-(whole.shape[self.axis] + self.padding) // self.ranks)
            return [_slice_axis(whole, self.axis, rank * size, size)]
        made = []
        for array, sections in zip(arrays, self.sections, strict=True):
            at = 0
            for section in sections:
                start = at + section.start(rank, self.ranks)
                made.append(_slice_axis(array, self.axis, start, section.share(self.ranks)))
                at += section.rows
        return made

    def rank_array(self, arrays: Sequence[Array], rank: int) -> Array:
        """Return the array that rank number `rank` holds, from the parameter's whole arrays."""
        return self.join_shares(self.shares(arrays, rank))

    def join_shares(self, shares: Sequence[Array]) -> Array:
        """Return one rank's array of the parameter, joined of its share of each section.

        Sections are the matrices that an engine joined (q, k and v; gate and up), in that order.
        """
        import numpy as np

        parameter = self.parameter
        if parameter.grouped:
            return self._join_groups(shares)
        if len(shares) == 1:
            return shares[0]
        return np.concatenate(list(shares), parameter.axis)

    def split_shares(self, local: Array) -> list[Array]:
        """Return a rank's array `local` cut into its share of each section, in order.

        It undoes `join_shares`.
        """
        parameter = self.parameter
        if parameter.grouped:
            return self._split_groups(local)
        if self.axis is None:
            return _split(
                local,
                parameter.axis,
                [
                    shape[parameter.axis] if parameter.axis < len(shape) else 1
                    for shape in parameter.shapes
                ],
            )
        if not self.sections:
            return [local]
        sizes = [one.share(self.ranks) for each in self.sections for one in each]
        return _split(local, self.axis, sizes)

    def join_ranks(self, rank_arrays: Sequence[Array], copy: int = 0) -> list[Array]:
        """Return the parameter's whole arrays, put together from the arrays of all ranks.

        Where several ranks hold the same rows, `copy` is the number of the one that is read.
        """
        import numpy as np

        parameter = self.parameter
        if self.axis is None:
            return self.split_shares(rank_arrays[min(copy, len(rank_arrays) - 1)])
        if not self.sections:
            whole = np.concatenate(list(rank_arrays), self.axis)
            whole = _slice_axis(whole, self.axis, 0, parameter.shape[self.axis])
            sizes = (
                [shape[parameter.axis] for shape in parameter.shapes]
                if parameter.axis < len(parameter.shape)
                else [1]
            )
            return _split(whole, parameter.axis, sizes)
        each = [self.split_shares(one) for one in rank_arrays]
        flat = [section for sections in self.sections for section in sections]
        joined = []
        for at, section in enumerate(flat):
            copies = section.copies(self.ranks)
            start = min(copy, copies - 1)
            joined.append(np.concatenate([one[at] for one in each[start::copies]], self.axis))
        made, at = [], 0
        for sections in self.sections:
            made.append(
                np.concatenate(joined[at : at + len(sections)], self.axis)
                if len(sections) > 1
                else joined[at]
            )
            at += len(sections)
        return made

    def _group_count(self, shares: Sequence[Shape]) -> int:
        """Return the number of key heads of a rank, by the shapes of its shares of q, k and v."""
        return max(1, shares[1][0] // self.parameter.sections[1][0].unit)

    def _join_groups(self, shares: Sequence[Array]) -> Array:
        """Return a rank's rows of q, k and v ordered by key head: q, k and v of each in turn."""
        import numpy as np

        count = self._group_count([one.shape for one in shares])
        each = [one.reshape(count, one.shape[0] // count, *one.shape[1:]) for one in shares]
        joined = np.concatenate(each, 1)
        return joined.reshape(-1, *joined.shape[2:])

    def _split_groups(self, local: Array) -> list[Array]:
        """Return a rank's (q, k, v), taken out of rows that are ordered by key head."""
        rows = [
            sum(one.share(self.ranks) if self.axis is not None else one.rows for one in each)
            for each in self.parameter.sections
        ]
        count = self._group_count([(one,) for one in rows])
        grouped = local.reshape(count, local.shape[0] // count, *local.shape[1:])
        each = _split(grouped, 1, [one // count for one in rows])
        return [one.reshape(-1, *one.shape[2:]) for one in each]


def find_layout(parameter: EngineParameter, local: Shape, ranks: int) -> RankLayout | None:
    """Return how `ranks` ranks hold a parameter; None where no way fits.

    `local` is the shape of what one rank has.
    """
    whole, axis = parameter.shape, parameter.axis
    if local == whole:
        return RankLayout(parameter, ranks)
    differing = [at for at, (a, b) in enumerate(zip(local, whole, strict=False)) if a != b]
    if len(local) != len(whole) or len(differing) != 1:
        return None
    at = differing[0]
    if at == axis:
        for sections in _section_forms(parameter):
            sizes = [one.share(ranks) for each in sections for one in each]
            if min(sizes) > 0 and sum(sizes) == local[at]:
                return RankLayout(parameter, ranks, at, sections)
    if len(parameter.parts) == 1 or at != axis:
        if local[at] * ranks == whole[at]:
            return RankLayout(parameter, ranks, at)
        if parameter.vocabulary and at == 0 and local[at] * ranks > whole[at]:
            return RankLayout(parameter, ranks, at, (), local[at] * ranks - whole[at])
    return None


def divide_parameter(parameter: EngineParameter, ranks: int, multiple: int) -> RankLayout | None:
    """Return how an engine's `ranks` divide a parameter; None where they cannot evenly.

    The axis is that of the parameter's row in this module's table. A vocabulary is padded to a
    `multiple` of rows first.
    """
    axis = parameter.parts[0].divided
    if ranks == 1 or axis is None:
        return RankLayout(parameter, ranks)
    if axis == parameter.axis and not parameter.vocabulary:
        sizes = [one.share(ranks) for each in parameter.sections for one in each]
        return RankLayout(parameter, ranks, axis, parameter.sections) if min(sizes) > 0 else None
    size = parameter.shape[axis]
    padded = -(-size // multiple) * multiple if parameter.vocabulary else size
    return RankLayout(parameter, ranks, axis, (), padded - size) if padded % ranks == 0 else None


def _section_forms(parameter: EngineParameter) -> Iterator[tuple[tuple[Section, ...], ...]]:
    """Yield the parameter's Sections, and then the same as if ranks divided all of them."""
    yield parameter.sections
    yield tuple(tuple(Section(one.rows, one.unit) for one in each) for each in parameter.sections)


def _slice_axis(array: Array, axis: int, start: int, count: int) -> Array:
    """Return `count` elements of an axis from `start` on, as a view."""
    return array[(slice(None),) * axis + (slice(start, start + count),)]


def _split(array: Array, axis: int, sizes: Sequence[int]) -> list[Array]:
    """Return views of an array that is cut along an axis into these sizes."""
    if len(sizes) == 1:
        return [array]
    ends = list(accumulate(sizes))
    return [
        _slice_axis(array, axis, end - size, size) for end, size in zip(ends, sizes, strict=True)
    ]
