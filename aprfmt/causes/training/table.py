"""The hypotheses about an update and about a gradient, in the order they are tried."""

from aprfmt.causes import hypotheses_of
from aprfmt.causes.training.case import StepHypothesis
from aprfmt.causes.training.gradient_case import GradientHypothesis

__all__ = ["GRADIENTS", "UPDATES", "GradientHypothesis", "StepHypothesis"]

UPDATES = hypotheses_of("training", StepHypothesis)
GRADIENTS = hypotheses_of("training", GradientHypothesis)
