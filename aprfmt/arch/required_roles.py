"""Which roles a model must have, and which of them are missing.

The configuration says what must exist (its keys; for an absent key the default in the
architecture's table, which is transformers'). The tensors say what does exist. A role is
required if the configuration requires it, or if tensors show that the part it belongs to
exists: biases in one layer make the biases of all layers required.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from aprfmt.arch.binding import BoundGroup, ExecutionOrder, Shape, logical_shapes
from aprfmt.arch.size_expressions import needs_hold, shape_of, size_of
from aprfmt.arch.spec import ArchSpec, TensorRule, role_key, split_key
from aprfmt.base.protocols import Value
from aprfmt.errors import ArchError

Values = Mapping[str, Value]
_NONE: Values = {}


def is_required(
    rule: TensorRule, layer: int | None, hp: Values, demanded: Mapping[str, Value] = _NONE
) -> bool:
    """Return whether the role of a TensorRule (in a layer) is required.

    Values in `demanded` replace those in `hp`; `layer` None is for roles outside the layers.
    """
    return rule.needs != "optional" and needs_hold(rule.needs, layer, hp, demanded)


def expected_roles(
    spec: ArchSpec, hp: Values, demanded: Mapping[str, Value] = _NONE
) -> dict[str, Shape]:
    """Return {role key: logical shape} of every required role, in execution order.

    `hp` says which optional weights (biases, norms) the tensors show, `demanded` which of them keys
    and table require (KeyReport.demanded): a role is required if either says so.
    """
    expected: dict[str, Shape] = {}
    layers = range(size_of("n_layers", hp))
    for rule in spec.tensors:
        for layer in layers if rule.layered else (None,):
            if is_required(rule, layer, hp) or (
                demanded and is_required(rule, layer, hp, demanded)
            ):
                expected[role_key(layer, rule.role)] = shape_of(rule.shape, hp)
    order = ExecutionOrder(spec)
    return dict(sorted(expected.items(), key=lambda item: order(item[0])))


def logical_shape(spec: ArchSpec, key: str, hp: Values) -> Shape:
    """Return the logical shape of a role key; ArchError if the table has no such role."""
    return shape_of(find_rule(spec, key, hp).shape, hp)


def find_rule(spec: ArchSpec, key: str, hp: Values) -> TensorRule:
    """Return the tensor table's row of a role; ArchError if the architecture lacks the role.

    Of several rows, each for a kind of layer, it is the one for the key's layer.
    """
    layer, role = split_key(key)
    found = [rule for rule in spec.tensors if rule.role == role]
    if not found:
        raise ArchError(f"{key}: {spec.name} has no such role")
    return next(
        (rule for rule in found if len(found) > 1 and is_required(rule, layer, hp)), found[0]
    )


def shapes_fit(spec: ArchSpec, group: BoundGroup, stored: Sequence[Shape], hp: Values) -> bool:
    """Return whether stored shapes give each role of a group the shape the config asks for."""
    try:
        logical = logical_shapes(group.binding, stored, hp)
        return all(
            tuple(shape) == logical_shape(spec, key, hp)
            for key, shape in zip(group.roles, logical, strict=True)
        )
    except (ArchError, KeyError):
        return False


@dataclass(frozen=True, slots=True)
class Coverage:
    """Which roles are required, and which of them are missing or have a wrong shape.

    `missing` and `accepted` are role keys of absent tensors; the user or the file accepts the
    latter. `vital` are those of both without which a forward pass is not possible. `misshapen` has
    (role key, found shape, expected shape), also for roles that are not required.
    """

    required: tuple[str, ...]
    missing: tuple[str, ...] = ()
    accepted: tuple[str, ...] = ()
    vital: tuple[str, ...] = ()
    misshapen: tuple[tuple[str, Shape, Shape], ...] = ()

    @property
    def expected(self) -> int:
        """The number of required roles."""
        return len(self.required)

    @property
    def found(self) -> int:
        """The number of required roles that the file has."""
        return len(self.required) - len(self.missing) - len(self.accepted)

    @property
    def is_whole(self) -> bool:
        """Whether all required roles are there, and every role has its shape."""
        return not (self.missing or self.accepted or self.misshapen)


def accept_nothing(key: str) -> bool:
    """Return False for any role `key`: the default for `accept`, no role may be missing."""
    return False


def compare_roles(
    spec: ArchSpec,
    hp: Values,
    shapes: Mapping[str, Shape],
    demanded: Mapping[str, Value] = _NONE,
    accept: Callable[[str], bool] = accept_nothing,
) -> Coverage:
    """Return which required roles a file lacks, and which have a wrong shape.

    `shapes` are the file's logical shapes by role key. `demanded` says which optional weights, as
    biases, keys and table require; `accept` says whether a role key may be missing.
    """
    expected = expected_roles(spec, hp, demanded)
    absent = [key for key in expected if key not in shapes]
    accepted = tuple(key for key in absent if accept(key))
    missing = tuple(key for key in absent if key not in set(accepted))
    vital = tuple(key for key in absent if _is_vital(spec, key, hp))
    wrong = []
    for key, found in shapes.items():
        wanted = expected.get(key)
        if wanted is None:
            try:
                wanted = logical_shape(spec, key, hp)
            except ArchError:
                continue  # a size that only the missing feature would have
        if tuple(found) != wanted:
            wrong.append((key, tuple(found), wanted))
    return Coverage(tuple(expected), missing, accepted, vital, tuple(wrong))


def _is_vital(spec: ArchSpec, key: str, hp: Values) -> bool:
    """Return whether a forward pass is impossible without a role.

    It is possible without biases, and without what the tensors in `hp` show to be absent: q/k-norms
    if all are missing, a head, which the embedding replaces.
    """
    return not key.endswith(".bias") and is_required(
        find_rule(spec, key, hp), split_key(key)[0], hp
    )


def collapse_roles(keys: Collection[str], required: Collection[str]) -> tuple[str, ...]:
    """Return the missing role keys; a role missing in every layer is given once, without layer.

    `keys` are the missing ones, `required` all: only layers that require the role count.
    """
    lacking, layers = _group_by_role(keys), _group_by_role(required)
    return tuple(
        name
        for role, found in lacking.items()
        for name in ([role] if len(found) == len(layers.get(role, found)) else found)
    )


def _group_by_role(keys: Collection[str]) -> dict[str, list[str]]:
    """Return {role without layer: its role keys}."""
    found: dict[str, list[str]] = {}
    for key in keys:
        found.setdefault(split_key(key)[1], []).append(key)
    return found
