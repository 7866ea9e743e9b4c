"""The hypotheses that need no forward pass, in the order they are tried.

Cheap and specific ones come first: each row of a module's `HYPOTHESES` has its rank and the reason.
A row's function reads samples (SAMPLE_ROWS rows, or as its docstring says) and yields guesses with
their values filled in; only a guess that fits the sample is applied to the whole tensor. `JOINT`
are the rows about several tensors together.
"""

from aprfmt.causes import hypotheses_of
from aprfmt.causes.tensor.guess import JointHypothesis, PairHypothesis

__all__ = ["JOINT", "TABLE", "PairHypothesis"]

TABLE = hypotheses_of("tensor", PairHypothesis)
JOINT = hypotheses_of("tensor", JointHypothesis)
