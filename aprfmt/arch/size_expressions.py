"""Evaluates sizes written with hyperparameter names: sums of products, nothing else."""

from collections.abc import Mapping, Sequence
from functools import cache

from aprfmt.base.protocols import Value
from aprfmt.errors import ArchError

_NONE: Mapping[str, Value] = {}


@cache
def expression_terms(expression: str) -> tuple[tuple[str, ...], ...]:
    """Return the terms of an expression, each a tuple of its factors; results are cached."""
    return tuple(
        tuple(factor.strip() for factor in term.split("*")) for term in expression.split("+")
    )


def size_of(expression: str, hp: Mapping[str, Value]) -> int:
    """Return the number that an expression like `n_heads*head_dim` stands for.

    Raises ArchError if a hyperparameter in it is absent or not a whole number.
    """
    total = 0
    for term in expression_terms(expression):
        product = 1
        for factor in term:
            size = int(factor) if factor.isdecimal() else hp[factor]
            if type(size) is not int or size < 0:
                raise ArchError(
                    f"size {expression!r}: {factor} is {size!r}; expected a whole number"
                )
            product *= size
        total += product
    return total


def shape_of(expressions: Sequence[str], hp: Mapping[str, Value]) -> tuple[int, ...]:
    """Return the shape that a TensorRule's expressions, such as `n_heads*head_dim`, stand for.

    Raises ArchError if a hyperparameter in one is absent or not a whole number.
    """
    return tuple(size_of(expression, hp) for expression in expressions)


def needs_hold(
    needs: str, layer: int | None, hp: Mapping[str, Value], demanded: Mapping[str, Value] = _NONE
) -> bool:
    """Return whether the conditions of a row of a tensor table hold in a layer.

    They are hyperparameters joined by "&", each to be true, or false after "!"; "": no condition.
    Of a hyperparameter with one value a layer, that of `layer` counts, which is None outside the
    layers. Values in `demanded` replace those in `hp`.
    """
    for condition in filter(None, (part.strip() for part in needs.split("&"))):
        name = condition.removeprefix("!")
        value = demanded[name] if name in demanded else hp[name]
        if isinstance(value, tuple) and layer is not None:
            value = value[layer]
        if bool(value) is condition.startswith("!"):
            return False
    return True
