"""The hypotheses about an update and about a gradient, in the order they are tried."""

from typing import Any

from aprfmt.causes import hypotheses_of
from aprfmt.causes.training.case import StepHypothesis
from aprfmt.causes.training.gradient_case import GradientHypothesis

__all__ = ["GRADIENTS", "UPDATES", "GradientHypothesis", "StepHypothesis"]

_EVERY: tuple[Any, ...] = hypotheses_of("training")
UPDATES: tuple[StepHypothesis, ...] = tuple(
    row for row in _EVERY if isinstance(row, StepHypothesis)
)
GRADIENTS: tuple[GradientHypothesis, ...] = tuple(
    row for row in _EVERY if isinstance(row, GradientHypothesis)
)
