"""Maps stored tensor names to roles (what a tensor is for) and back, by the binding tables.

A *binding* is a row of a table: stored names, the roles that they hold together, and the layout
steps between both. A *group* is a binding at one layer of a file.

Nothing here knows an architecture: everything comes from the tables and the hyperparameters.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from aprfmt.arch.joining_steps import Stacked
from aprfmt.arch.layout_steps import Transposed
from aprfmt.arch.name_templates import NO_MODEL, Match, NameIndex, expand_template
from aprfmt.arch.name_templates import detect_style as detect_style
from aprfmt.arch.size_expressions import needs_hold, size_of
from aprfmt.arch.spec import ArchSpec, Binding, role_key, split_key
from aprfmt.base.protocols import Value
from aprfmt.errors import ArchError

Shape = tuple[int, ...]

# The rotary module computes it from the configuration; checkpoints of old transformers hold it.
FREQUENCIES = (".rotary_emb.inv_freq",)


@dataclass(frozen=True, slots=True)
class BoundGroup:
    """One binding at one layer of a file: stored names in the binding's order, and role keys.

    `experts` are the numbers of the experts that are there, where a second layout lacks some of
    them; () for a whole group.
    """

    binding: Binding
    layer: int | None
    stored: tuple[str, ...]
    roles: tuple[str, ...]
    experts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class BoundNames:
    """A file's tensor names sorted by the tables.

    `groups` come in execution order. `derived` are tensors of hyperparameters' values, `buffers`
    tensors that are computed or belong to training only; `unbound` are names that no table knows.
    `incomplete` has the roles of which only some stored tensors exist: role key -> the missing
    names (the existing ones are in `unbound`). `again` are groups of names in `unbound` that store
    roles of `groups` a second time, in another layout, all or some of their experts.
    """

    groups: tuple[BoundGroup, ...]
    unbound: tuple[str, ...]
    derived: tuple[str, ...] = ()
    incomplete: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    buffers: tuple[str, ...] = ()
    again: tuple[BoundGroup, ...] = ()


class ExecutionOrder:
    """Execution order of role keys: the embedding, the layers, what follows them."""

    def __init__(self, spec: ArchSpec) -> None:
        """Take the order of the roles in the tensor table of `spec`."""
        self._rank = {rule.role: i for i, rule in enumerate(spec.tensors)}
        layered = [i for i, rule in enumerate(spec.tensors) if rule.layered]
        self._first = layered[0] if layered else 0

    def __call__(self, key: str) -> tuple[int, int, int, str]:
        """Return the sort key of a role key: (phase, layer, row of the tensor table, the key).

        Phase 0 is before the layers (embedding), 1 a layer, 2 after the layers. The layer is 0
        where there is none. Roles that are not in the table come last, by their names.
        """
        layer, role = split_key(key)
        rank = self._rank.get(role, len(self._rank))
        phase = 1 if layer is not None else 0 if rank < self._first else 2
        return phase, layer or 0, rank, key


def bind_names(spec: ArchSpec, style: str, names: Iterable[str]) -> BoundNames:
    """Return the stored names of a file matched to roles, and those that match none.

    A binding maps stored names to roles. All bindings of the style are tried. If two of them offer
    a role, the earlier one gets it, and the later one is in `again` with its names unbound. Raises
    ArchError if two names mean the same tensor.
    """
    every = list(names)
    bindings = tuple(spec.bindings.get(style, ()))
    matches = _matches_of(every, bindings, style)
    if None in matches.values():  # MLX's converters may have given such names
        from aprfmt.arch.mlx_layout import mlx_bindings

        bindings = (*bindings, *mlx_bindings(spec, style))
        matches = _matches_of(every, bindings, style)
    # First the binding, the layer and the expert of each name.
    found: dict[tuple[int, int | None], dict[int, dict[int, str]]] = {}
    for name, match in matches.items():
        if match is None:
            continue
        b, s = match.value
        elements = found.setdefault((b, match.layer), {}).setdefault(s, {})
        other = elements.setdefault(match.element or 0, name)
        if other != name:
            raise ArchError(f"tensors {other!r} and {name!r} are the same one in two spellings")
    # Then the groups: complete ones in the order of the bindings, each role once.
    groups: dict[tuple[int, int | None], BoundGroup] = {}
    claimed: set[str] = set()
    again: list[BoundGroup] = []
    incomplete: dict[str, tuple[str, ...]] = {}
    for b, layer in sorted(found, key=lambda at: (at[0], at[1] or 0)):
        roles = tuple(role_key(layer, role) for role in bindings[b].roles)
        stored, lacking = _stored_names(bindings[b], layer, found[b, layer])
        if lacking:
            incomplete.update(dict.fromkeys(roles, lacking))
            part = _partial_group(bindings[b], layer, found[b, layer], roles)
            again += [] if part is None else [part]
            continue
        group = BoundGroup(bindings[b], layer, stored, roles)
        if claimed.isdisjoint(roles):
            groups[b, layer] = group
            claimed.update(roles)
        else:
            again.append(group)
    # What no group has: hyperparameters, computed tensors, unknown names.
    used = {name for group in groups.values() for name in group.stored}
    derived = {row.name(style) for row in spec.derived}
    templates = NameIndex(style, [(name, name) for name in spec.buffers.get(style, ())])
    computed = FREQUENCIES if style == "hf" and spec.block.position == "rope" else ()
    buffers = {
        name
        for name in every
        if name not in used
        and (name.startswith(NO_MODEL) or name.endswith(computed) or templates.find(name))
    }
    claims = used | derived | buffers
    order = ExecutionOrder(spec)
    return BoundNames(
        tuple(sorted(groups.values(), key=lambda group: order(group.roles[0]))),
        tuple(name for name in every if name not in claims),
        tuple(name for name in every if name in derived),
        {role: names for role, names in incomplete.items() if role not in claimed},
        tuple(name for name in every if name in buffers),
        tuple(
            group
            for group in again
            if claims.isdisjoint(group.stored) and claimed.issuperset(group.roles)
        ),
    )


def _matches_of(
    names: Iterable[str], bindings: Sequence[Binding], style: str
) -> dict[str, Match[tuple[int, int]] | None]:
    """Return {name: the number of its binding and its place there}, None for an unknown name."""
    rows = [(name, (b, s)) for b, row in enumerate(bindings) for s, name in enumerate(row.stored)]
    index = NameIndex(style, rows)
    return {name: index.find(name) for name in names}


def _partial_group(
    binding: Binding,
    layer: int | None,
    found: Mapping[int, Mapping[int, str]],
    roles: Sequence[str],
) -> BoundGroup | None:
    """Return the group of the experts of which all tensors of a binding are stored.

    None if there is no such expert, or if not every name of the binding has an expert's number.
    `found` is {index of a name template in `binding.stored`: {expert number: stored name}}.
    """
    if not all("{E}" in template for template in binding.stored):
        return None
    each = [found.get(s, {}) for s in range(len(binding.stored))]
    experts = tuple(sorted(set(each[0]).intersection(*each[1:])))
    stored = tuple(names[expert] for names in each for expert in experts)
    return BoundGroup(binding, layer, stored, tuple(roles), experts) if experts else None


def _stored_names(
    binding: Binding, layer: int | None, found: Mapping[int, Mapping[int, str]]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (stored names of a binding at one layer, in order; missing names).

    `found` maps the number of a name template to {expert number: stored name}. At the eighth
    missing name the search ends and returns no stored names.
    """
    stored: list[str] = []
    lacking: list[str] = []
    there = sorted({element for names in found.values() for element in names})
    # Without a list of experts their numbers run from 0 to the largest one.
    every = there if binding.elements else range(there[-1] + 1)
    for s, template in enumerate(binding.stored):
        names = found.get(s, {})
        for element in every if "{E}" in template else (0,):
            if element in names:
                stored.append(names[element])
                continue
            lacking.append(expand_template(template, layer, element))
            if len(lacking) == 8:
                return (), tuple(lacking)
    return tuple(stored), tuple(lacking)


def without_partial(bound: BoundNames, hp: Mapping[str, Value]) -> BoundNames:
    """Return `bound` with bindings that lack stored tensors moved from bound to incomplete.

    How many tensors there must be follows from `hp`: names alone do not show that the last experts
    of a stack are missing. A stack with too many tensors stays: its layout step raises. Where the
    same roles are stored whole in another layout, they are read from that one.
    """
    partial: dict[tuple[str, ...], tuple[BoundGroup, tuple[str, ...]]] = {}
    for group in bound.groups:
        names = _written_names(group.binding, group.layer, hp)
        if len(group.stored) < len(names):
            partial[group.stored] = (group, names[len(group.stored) :][:8])
    if not partial:
        return bound
    free = {role for group, _ in partial.values() for role in group.roles}
    whole: list[BoundGroup] = []
    for other in bound.again:
        written = len(_written_names(other.binding, other.layer, hp))
        if len(other.stored) == written and free.issuperset(other.roles):
            whole.append(other)
            free.difference_update(other.roles)
    left = {name for stored in partial for name in stored}
    taken = {name for group in whole for name in group.stored}
    lacking = {
        role: names for group, names in partial.values() for role in group.roles if role in free
    }
    second = [
        replace(group, experts=tuple(range(len(group.stored) // len(group.binding.stored))))
        for group, _ in partial.values()
        if free.isdisjoint(group.roles)
    ]
    groups = [group for group in bound.groups if group.stored not in partial]
    return replace(
        bound,
        groups=(*groups, *whole),
        unbound=(*(name for name in bound.unbound if name not in taken), *sorted(left)),
        incomplete={**bound.incomplete, **lacking},
        again=(*(group for group in bound.again if group not in whole), *second),
    )


def bind_packed(bound: BoundNames, packed: Set[str]) -> BoundNames:
    """Return `bound` with the weights in `packed` (stored names) bound without transposition.

    Packed weights are stored as [out, in], also where the plain weight is [in, out] (gpt2's
    Conv1D). Source: transformers' bitsandbytes integration, which transposes before packing.
    """
    groups = tuple(
        replace(group, binding=packed_binding(group.binding))
        if not packed.isdisjoint(group.stored)
        else group
        for group in bound.groups
    )
    return replace(bound, groups=groups)


def packed_binding(binding: Binding) -> Binding:
    """Return the binding without transposition, as packed weights are stored as [out, in]."""
    steps = tuple(step for step in binding.steps if not isinstance(step, Transposed))
    return replace(binding, steps=steps)


def known_shapes(bound: BoundNames, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return {role key: logical shape}, as far as shapes follow without hyperparameters.

    `bound` says which stored names make which roles, `shapes` are the stored shapes by name. A role
    whose steps need hyperparameters gets `()`: it exists, but its shape is not known yet.
    """
    known: dict[str, Shape] = {}
    for group in bound.groups:
        try:
            found = logical_shapes(group.binding, [shapes[name] for name in group.stored], {})
        except (ArchError, KeyError):
            found = [()] * len(group.roles)
        known.update(zip(group.roles, found, strict=True))
    return known


def logical_shapes(
    binding: Binding, stored: Sequence[Shape], hp: Mapping[str, Value]
) -> list[Shape]:
    """Return the logical shapes that a binding's steps make of stored ones.

    Raises ArchError if a step cannot take its input.
    """
    shapes = [tuple(shape) for shape in stored]
    for step in binding.steps:
        shapes = step.shapes(shapes, hp)
    return shapes


def groups_for(
    spec: ArchSpec, style: str, roles: Collection[str], hp: Mapping[str, Value]
) -> list[BoundGroup]:
    """Return the stored tensors that contain these role keys in a style, in execution order.

    Each role goes to the first binding whose roles are all in `roles` and whose `needs` holds.
    Raises ArchError listing the roles that have no name in this style.
    """
    bindings = spec.bindings.get(style, ())
    wanted = set(roles)
    groups: list[BoundGroup] = []
    done: set[str] = set()
    homeless: list[str] = []
    for key in sorted(wanted, key=ExecutionOrder(spec)):
        if key in done:
            continue
        layer, role = split_key(key)
        if layer is not None and layer >= size_of("n_layers", hp):
            raise ArchError(
                f"{key}: the model has {hp['n_layers']} layers; a tensor beyond them (multi-token "
                "prediction) has no place in a conversion; leave it out with --drop"
            )
        # A binding of several roles is used only if all of them are wanted.
        for binding in bindings:
            keys = tuple(role_key(layer, other) for other in binding.roles)
            if (
                role in binding.roles
                and wanted.issuperset(keys)
                and done.isdisjoint(keys)
                and needs_hold(binding.needs, layer, hp)
            ):
                groups.append(BoundGroup(binding, layer, _written_names(binding, layer, hp), keys))
                done.update(keys)
                break
        else:
            homeless.append(key)
    if homeless:
        shown = ", ".join(homeless[:4]) + (" ..." if len(homeless) > 4 else "")
        others = "" if len(homeless) == len(wanted) else "; --drop leaves such out"
        raise ArchError(
            f"{style} files of {spec.name} have no name for {len(homeless)} of the tensors: "
            f"{shown}{others}"
        )
    return groups


def _written_names(binding: Binding, layer: int | None, hp: Mapping[str, Value]) -> tuple[str, ...]:
    """Return the stored names that a binding at one layer is written with, in order."""
    names: list[str] = []
    for template in binding.stored:
        elements = _expert_numbers(binding, hp) if "{E}" in template else (0,)
        names += [expand_template(template, layer, element) for element in elements]
    return tuple(names)


def _expert_numbers(binding: Binding, hp: Mapping[str, Value]) -> Sequence[int]:
    """Return the numbers that {E} takes in a binding's names."""
    if binding.elements:
        return [number for number, here in enumerate(hp[binding.elements]) if here]
    step = next(step for step in binding.steps if isinstance(step, Stacked))
    return range(size_of(step.count, hp))
