"""Evaluates sizes written with hyperparameter names: sums of products, nothing else."""

from collections.abc import Mapping, Sequence
from functools import cache

from aprfmt.base.protocols import Value
from aprfmt.errors import ArchError


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
    """Return the shape that a TensorRule's expressions stand for; ArchError as in `size_of`."""
    return tuple(size_of(expression, hp) for expression in expressions)
