"""Causes that are seen where effective quantities are compared."""

from aprfmt.causes.row import Cause

WALK = (
    Cause(
        "equal_quantities", "config", "same",
        "Hyperparameters are written otherwise, and every layer computes with the same numbers: a "
        "window no smaller than the context, a scaling by 1, factors for a named rule.",
        "Keys differ; inverse frequencies, masks, functions and factors do not.",
        "The quantities of every layer are equal up to the context length.",
    ),
)  # fmt: skip
