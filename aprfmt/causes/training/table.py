"""The hypotheses about an update, a gradient and a backward pass, in the order they are tried."""

from typing import Any

from aprfmt.causes import hypotheses_of
from aprfmt.causes.training.backward_case import BackwardHypothesis
from aprfmt.causes.training.case import StepHypothesis
from aprfmt.causes.training.gradient_case import GradientHypothesis

__all__ = [
    "BACKWARDS",
    "GRADIENTS",
    "UPDATES",
    "BackwardHypothesis",
    "GradientHypothesis",
    "StepHypothesis",
]

_EVERY: tuple[Any, ...] = hypotheses_of("training")
UPDATES: tuple[StepHypothesis, ...] = tuple(
    row for row in _EVERY if isinstance(row, StepHypothesis)
)
GRADIENTS: tuple[GradientHypothesis, ...] = tuple(
    row for row in _EVERY if isinstance(row, GradientHypothesis)
)
BACKWARDS: tuple[BackwardHypothesis, ...] = tuple(
    row for row in _EVERY if isinstance(row, BackwardHypothesis)
)
