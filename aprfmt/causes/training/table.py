"""The hypotheses about an update, a gradient and a backward pass, in the order they are tried."""

from aprfmt.causes import hypotheses_of
from aprfmt.causes.training.backward_case import BackwardHypothesis
from aprfmt.causes.training.gradient_case import GradientHypothesis
from aprfmt.causes.training.step_case import StepHypothesis

__all__ = [
    "BACKWARDS",
    "GRADIENTS",
    "UPDATES",
    "BackwardHypothesis",
    "GradientHypothesis",
    "StepHypothesis",
]

UPDATES = hypotheses_of("training", StepHypothesis)
GRADIENTS = hypotheses_of("training", GradientHypothesis)
BACKWARDS = hypotheses_of("training", BackwardHypothesis)
