"""PEFT's pairs for single parameters (`target_parameters`): the stacked experts of a layer.

A *pair* is the factors A and B of one module. A *rank* is one column of B with its row of A.

One pair changes a parameter of all experts at once, [experts, rows, columns]:

lora_A [r * experts, in]    expert by expert, the ranks of one expert one after the other lora_B
[out, r * experts]   rank by rank, the experts of one rank one after the other

PEFT wraps several parameters of one module one around the other. The pair of the outermost is named
MODULE, that of the next MODULE.base_layer, and so on. The parameters' names are nowhere in the
file: the shapes say which pair is whose. A matrix counts as one expert.

Source: peft 0.21, tuners/lora/layer.py ParamWrapper, tuners/tuners_utils.py _inject_parameters.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from aprfmt.arch.element_moves import to_logical, to_stored
from aprfmt.arch.layout_steps import Transposed, TransposedEach
from aprfmt.errors import ArchError, ConversionError
from aprfmt.model import Model
from aprfmt.model.adapter_parts import unwrap_module
from aprfmt.model.adapter_reading import Adapter, StoredPair, pair_scale, read_factors

if TYPE_CHECKING:
    from aprfmt.arch.binding import BoundGroup
    from aprfmt.arch.spec import LayoutStep

Array = np.ndarray[Any, Any]
Shape = tuple[int, ...]
# Architectures whose modules in transformers say that experts are [experts, in, out]. A square
# matrix does not show it. Source: use_experts_implementation(is_transposed=True), transformers 5.
_TRANSPOSED = frozenset({"gpt_oss"})


class ExpertOrder(NamedTuple):
    """Whether each factor of a pair for stacked experts has its ranks expert by expert.

    `a` and `b` are True where all ranks of one expert follow one another, False where all experts'
    first ranks come first.
    """

    a: bool
    b: bool
    says: str  # for an order that is not PEFT's


PEFT_ORDER = ExpertOrder(True, False, "")
# What a merge may take for PEFT's order.
OTHER_ORDERS = (
    ExpertOrder(True, True, "with the columns of lora_B read expert by expert"),
    ExpertOrder(False, False, "with the rows of lora_A read rank by rank"),
    ExpertOrder(False, True, "with the ranks of lora_A and lora_B read in the other order"),
)


@dataclass(frozen=True)
class LowRankChange:
    """The change of one stored weight: scale * (left @ right), for each expert its own.

    `left` is [rows, r] or [experts, rows, r], `right` [r, columns] or [experts, r, columns].
    """

    left: Array
    right: Array
    scale: float


class _Target(NamedTuple):
    """A parameter that a pair may change, in the layout of the module that PEFT wrapped."""

    name: str
    shape: Shape
    group: "BoundGroup | None"  # None: the base has it under this name


def parameter_changes(
    adapter: Adapter, base: Model, order: ExpertOrder
) -> Iterator[tuple[str, StoredPair, LowRankChange]]:
    """Yield (stored name of the base, pair, change) of each pair for a single parameter.

    `order` is how the pairs order the ranks of all experts. Raises ConversionError for a pair that
    fits no parameter, or two of the same shape.
    """
    modules: dict[str, list[StoredPair]] = {}
    for pair in adapter.pairs.values():
        if pair.parameters:
            modules.setdefault(unwrap_module(pair.module)[0], []).append(pair)
    for module, pairs in modules.items():
        pairs.sort(key=lambda pair: -unwrap_module(pair.module)[1])
        for pair, target in zip(pairs, _assign_targets(adapter, module, pairs, base), strict=True):
            left, right, scale = _expert_factors(adapter, pair, target, base, order)
            if target.group is None:
                if len(target.shape) == 2:
                    left, right = left[0], right[0]
                yield target.name, pair, LowRankChange(left, right, scale)
                continue
            if len(target.shape) == 2:
                raise ConversionError(
                    f"{adapter.path}: {target.name} (target_parameters) has another form in "
                    f"{base.path}; merge the adapter into a base in its own format"
                )
            for name, (one, other) in _place_factors(adapter, pair, target, base, left, right):
                yield name, pair, LowRankChange(one, other, scale)


def _assign_targets(
    adapter: Adapter, module: str, pairs: Sequence[StoredPair], base: Model
) -> Sequence[_Target]:
    """Return the parameter that each pair of a module changes, in the order of `pairs`.

    PEFT's names do not tell it; the shapes do. Raises ConversionError where no assignment fits, or
    several do.
    """
    every = [_find_target(f"{module}.{name}", base) for name in pairs[0].parameters]
    targets = [target for target in every if target is not None]
    fitting = [
        order
        for order in permutations(targets, len(pairs))
        if all(_pair_fits(adapter, p, t) for p, t in zip(pairs, order, strict=True))
    ]
    if len(fitting) == 1:
        return fitting[0]
    factored = "; ".join(
        f"lora_A {list(pair.parts['a'].shape)}, lora_B {list(pair.parts['b'].shape)}"
        for pair in pairs
    )
    names = ", ".join(f"{target.name} {list(target.shape)}" for target in targets)
    asked = ", ".join(pairs[0].parameters)
    said = (
        f"has no parameter {asked} of that module"
        if not targets
        else f"has {names}, and its shapes do not tell which pair is whose"
        if fitting
        else f"has {names}: it belongs to another base, or its ranks are others"
    )
    raise ConversionError(
        f"{adapter.path}: {module}: factors {factored} (target_parameters); {base.path} {said}"
    )


def _find_target(name: str, base: Model) -> _Target | None:
    """Return the base's parameter that PEFT calls `name`; None if the base has none."""
    from aprfmt.arch.binding import bind_names

    if name in base:
        return _Target(name, base[name].shape, None)
    try:
        groups = bind_names(base.spec, "hf", [name]).groups
        shapes = [base.roles[role].shape for role in groups[0].roles] if groups else []
        for step in reversed(groups[0].binding.steps if groups else ()):
            shapes = step.stored_shapes(shapes, base.hyper, 1)
    except (ArchError, KeyError):
        return None
    return _Target(name, shapes[0], groups[0]) if shapes else None


def _matrix_sizes(shape: Shape) -> tuple[int, int, int]:
    """Return (experts, rows, columns) of a parameter; a matrix counts as one expert."""
    return (shape[0], shape[1], shape[2]) if len(shape) == 3 else (1, shape[0], shape[1])


def _pair_fits(adapter: Adapter, pair: StoredPair, target: _Target) -> bool:
    """Return whether a pair's shapes and rank fit a parameter.

    A parameter of stacked experts may also have rows and columns exchanged.
    """
    if len(target.shape) not in (2, 3):
        return False
    experts, rows, columns = _matrix_sizes(target.shape)
    rank, _ = pair_scale(adapter, target.name)
    out, into = pair.parts["b"].shape[0], pair.parts["a"].shape[1]
    sides = (rows, columns), (columns, rows)
    return pair.rank == rank * experts and (out, into) in sides[: 1 if experts == 1 else 2]


def _expert_factors(
    adapter: Adapter, pair: StoredPair, target: _Target, base: Model, order: ExpertOrder
) -> tuple[Array, Array, float]:
    """Return a pair's factors for each expert, as the parameter is laid out, and their scale.

    They are (left [experts, rows, r], right [experts, r, columns], scale): expert e changes by
    scale * (left[e] @ right[e]). `order` is how the file orders the ranks of all experts.
    """
    experts, rows, columns = _matrix_sizes(target.shape)
    rank, scale = pair_scale(adapter, target.name)
    a, b = read_factors(pair)
    if order.a:
        a = a.reshape(experts, rank, -1)
    else:
        a = a.reshape(rank, experts, -1).transpose(1, 0, 2)
    if order.b:
        b = b.reshape(-1, experts, rank).transpose(1, 0, 2)
    else:
        b = b.reshape(-1, rank, experts).transpose(2, 0, 1)
    turned = (b.shape[1], a.shape[2]) != (rows, columns)
    if rows == columns and experts > 1:
        turned = base.spec.name in _TRANSPOSED
    if turned:
        return a.swapaxes(1, 2), b.swapaxes(1, 2), scale
    return b, a, scale


def _split_transpose(
    steps: "Sequence[LayoutStep]", shapes: Sequence[Shape], hp: Mapping[str, Any]
) -> "tuple[bool, Sequence[LayoutStep]]":
    """Return (whether the first layout step exchanges rows and columns, the steps after it).

    `shapes` are the stored shapes, `hp` the hyperparameters. Where the first step exchanges
    nothing, all of `steps` are returned.
    """
    first = steps[0] if steps else None
    if not isinstance(first, Transposed | TransposedEach):
        return False, steps
    square = type(first) is Transposed or isinstance(first, TransposedEach)
    return square or first.shapes(shapes, hp) != [tuple(s) for s in shapes], steps[1:]


def _place_factors(
    adapter: Adapter, pair: StoredPair, target: _Target, base: Model, left: Array, right: Array
) -> Iterator[tuple[str, tuple[Array, Array]]]:
    """Yield (stored name, (left, right)) of a pair for a base with another layout of the experts.

    `left` is [experts, rows, r], `right` [experts, r, columns]. Layout steps move rows and experts,
    so they are applied to the left factor, whose columns are ranks, and to the expert number of
    each row. Raises ConversionError where the base's layout cannot take these rows.
    """
    assert target.group is not None
    hp = base.hyper
    experts = len(left)
    # Both factors in the base's orientation, before its other layout steps.
    turned, steps = _split_transpose(target.group.binding.steps, [target.shape], hp)
    if turned:
        left, right = right.swapaxes(1, 2), left.swapaxes(1, 2)
    try:
        # Follow the rows of the left factor, and their experts, through the steps.
        owners = np.broadcast_to(np.arange(experts)[:, None, None], (*left.shape[:2], 1))
        roles = target.group.roles
        rows = dict(zip(roles, to_logical(steps, [left], hp), strict=True))
        whose = dict(zip(roles, to_logical(steps, [owners], hp), strict=True))
        yield from _store_factors(base, rows, whose, right)
    except ArchError as error:
        raise ConversionError(
            f"{adapter.path}: {pair.module} (target_parameters) is laid out otherwise in "
            f"{base.path}: {error}; merge the adapter into a base in its own format"
        ) from error


def _store_factors(
    base: Model, rows: Mapping[str, Array], whose: Mapping[str, Array], right: Array
) -> Iterator[tuple[str, tuple[Array, Array]]]:
    """Yield (stored name, (left, right)) of factors by role, as the base stores these roles.

    `rows` are the left factors by role [experts, rows, r], `whose` the expert number of each row,
    `right` is [experts, r, columns]. Raises ArchError where a stored tensor holds other roles as
    well, or a matrix has rows of several experts.
    """
    hp = base.hyper
    for view in {id(base.roles[role].group): base.roles[role] for role in rows}.values():
        group = view.group
        assert group is not None
        if not set(group.roles) <= set(rows):
            raise ArchError(f"{view.names[0]} holds {', '.join(group.roles)}")
        back, after = _split_transpose(group.binding.steps, [x.info.shape for x in view.stored], hp)
        lefts = to_stored(after, [rows[role] for role in group.roles], hp)
        owned = to_stored(after, [whose[role] for role in group.roles], hp)
        for name, one, owner in zip(view.names, lefts, owned, strict=True):
            numbers = owner[..., 0]
            if (numbers != numbers[..., :1]).any():
                raise ArchError(f"a matrix of {name} holds rows of several experts")
            mine, other = np.ascontiguousarray(one), right[numbers[..., 0]]
            if back:
                mine, other = other.swapaxes(-1, -2), mine.swapaxes(-1, -2)
            yield name, (mine, other)


def stacked_changes(
    adapter: Adapter, base: Model, pairs: Mapping[str, StoredPair]
) -> Iterator[tuple[str, LowRankChange]]:
    """Yield (stored name of the base, change) of pairs for single experts that the base stacks.

    `pairs` are by the weight's name, such as `mlp.experts.3.up_proj.weight`. Where one tensor joins
    several matrices (gate and up), the factors of each follow one another along the rank, with
    zeros for the others' rows. Raises ConversionError where only some experts of a matrix have
    pairs, or the base has no such matrix.
    """
    from aprfmt.arch.binding import bind_names

    found: dict[str, tuple[Array, Array]] = {}  # role -> left, right by expert
    for group in bind_names(base.spec, "hf", pairs).groups:
        role, count = group.roles[0], int(base.hyper["n_experts"] or 0)
        if len(group.stored) != count or len(group.roles) != 1 or role not in base.roles:
            raise ConversionError(
                f"{adapter.path}: {group.stored[0]}: {len(group.stored)} of {count} experts have a "
                f"pair, and {base.path} stacks them: merge it into a base in its own format"
            )
        factors = []
        for name in group.stored:
            a, b = read_factors(pairs[name])
            factors.append((b * pairs[name].scale, a))
        rank = max(a.shape[0] for _, a in factors)
        found[role] = (
            np.stack([np.pad(b, ((0, 0), (0, rank - b.shape[1]))) for b, _ in factors]),
            np.stack([np.pad(a, ((0, rank - a.shape[0]), (0, 0))) for _, a in factors]),
        )
    for role in list(found):
        own = base.roles[role].group
        held = [] if own is None else [key for key in own.roles if key in found]
        if own is None or held[0] != role:
            continue
        ranks = [found[key][0].shape[2] for key in held]
        right = np.concatenate([found[key][1] for key in held], axis=1)
        rows, whose = {}, {}
        for key in own.roles:
            experts, out, _ = base.roles[key].shape
            rows[key] = np.zeros((experts, out, sum(ranks)))
            whose[key] = np.broadcast_to(np.arange(experts)[:, None, None], (experts, out, 1))
            if key in held:
                start = sum(ranks[: held.index(key)])
                rows[key][:, :, start : start + found[key][0].shape[2]] = found[key][0]
        try:
            for name, (mine, other) in _store_factors(base, rows, whose, right):
                yield name, LowRankChange(mine, other, 1.0)
        except ArchError as error:
            raise ConversionError(
                f"{adapter.path}: pairs of single experts have no place in {base.path}: {error}"
            ) from error
