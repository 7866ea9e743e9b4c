"""What a model must have, and what of it is not there: the one judgement of completeness.

The configuration says what must exist (its keys, or where it is silent the defaults of the
architecture's table, which are transformers'), the tensors say what does. A role is required where
the configuration demands it, and where the tensors show that the part it belongs to exists: the
biases of one layer demand those of all.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from aprfmt.arch.bind import Order, Shape
from aprfmt.arch.sizes import shape_of, size_of
from aprfmt.arch.spec import ArchSpec, TensorRule, role_key, split_key
from aprfmt.base.protocols import Value
from aprfmt.errors import ArchError

Values = Mapping[str, Value]
_NONE: Values = {}


def needed(
    rule: TensorRule, layer: int | None, hp: Values, demanded: Mapping[str, Value] = _NONE
) -> bool:
    """Say whether the hyperparameters demand a role (in a layer); `demanded` ones win."""
    if rule.needs == "optional":
        return False
    for condition in filter(None, (part.strip() for part in rule.needs.split("&"))):
        name = condition.removeprefix("!")
        value = demanded[name] if name in demanded else hp[name]
        if isinstance(value, tuple) and layer is not None:
            value = value[layer]
        if bool(value) is condition.startswith("!"):
            return False
    return True


def expected_roles(
    spec: ArchSpec, hp: Values, demanded: Mapping[str, Value] = _NONE
) -> dict[str, Shape]:
    """Return every role key that must be there, with its logical shape, in execution order.

    `hp` has what the tensors show, `demanded` what keys and table say of the same parts
    (KeyReport.demanded): either is enough.
    """
    expected: dict[str, Shape] = {}
    layers = range(size_of("n_layers", hp))
    for rule in spec.tensors:
        for layer in layers if rule.layered else (None,):
            if needed(rule, layer, hp) or (demanded and needed(rule, layer, hp, demanded)):
                expected[role_key(layer, rule.role)] = shape_of(rule.shape, hp)
    order = Order(spec)
    return dict(sorted(expected.items(), key=lambda item: order(item[0])))


def logical_shape(spec: ArchSpec, key: str, hp: Values) -> Shape:
    """Return the logical shape of a role key; ArchError for a role the table does not have."""
    return shape_of(_rule(spec, key).shape, hp)


def _rule(spec: ArchSpec, key: str) -> TensorRule:
    role = split_key(key)[1]
    for rule in spec.tensors:
        if rule.role == role:
            return rule
    raise ArchError(f"{key}: {spec.name} has no such role")


@dataclass(frozen=True, slots=True)
class Coverage:
    """Which roles are required, and which of them are not there or do not fit.

    `missing` and `accepted` are role keys that are not there; the latter are so on purpose. `vital`
    are those of both that the forward pass cannot do without: neither is there something to take
    in their place nor can they be left out. `misshapen` has (role key, found, expected); roles
    that are not required are held to their shape too.
    """

    required: tuple[str, ...]
    missing: tuple[str, ...] = ()
    accepted: tuple[str, ...] = ()
    vital: tuple[str, ...] = ()
    misshapen: tuple[tuple[str, Shape, Shape], ...] = ()

    @property
    def expected(self) -> int:
        """How many roles are required."""
        return len(self.required)

    @property
    def found(self) -> int:
        """How many of them are there."""
        return len(self.required) - len(self.missing) - len(self.accepted)


def nothing(key: str) -> bool:
    """Accept the absence of no role."""
    return False


def coverage(
    spec: ArchSpec,
    hp: Values,
    shapes: Mapping[str, Shape],
    demanded: Mapping[str, Value] = _NONE,
    accept: Callable[[str], bool] = nothing,
) -> Coverage:
    """Compare the roles of a file, with their logical shapes, with what must be there.

    `demanded` is what keys and table say of parts that tensors show; `accept` says of a role key
    whether it may be missing.
    """
    expected = expected_roles(spec, hp, demanded)
    absent = [key for key in expected if key not in shapes]
    accepted = tuple(key for key in absent if accept(key))
    missing = tuple(key for key in absent if key not in set(accepted))
    vital = tuple(key for key in absent if _vital(spec, key, hp))
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


def _vital(spec: ArchSpec, key: str, hp: Values) -> bool:
    """Say whether the pass needs a role: all but biases, as far as what is there uses it.

    With every q/k-norm gone, none is computed; without a head the embedding is one.
    """
    return not key.endswith(".bias") and needed(_rule(spec, key), split_key(key)[0], hp)


def collapsed(keys: Collection[str], required: Collection[str]) -> tuple[str, ...]:
    """Return role keys with those of a role that lacks all its required layers as the role."""
    lacking, layers = _by_role(keys), _by_role(required)
    return tuple(
        name
        for role, found in lacking.items()
        for name in ([role] if len(found) == len(layers.get(role, found)) else found)
    )


def _by_role(keys: Collection[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for key in keys:
        found.setdefault(split_key(key)[1], []).append(key)
    return found
