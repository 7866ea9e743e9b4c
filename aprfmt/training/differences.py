"""Given gradients checked by differences of a batch's loss: float64 forward passes, no torch."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from aprfmt.causes.training.gradient_case import COARSE, FINE, GradientGuess
from aprfmt.causes.training.optimizers import F64
from aprfmt.inference.batch import read_batch
from aprfmt.inference.gradients.differences import (
    BatchLoss,
    GradientCheck,
    Wrong,
    check_gradient,
    parts_of,
)
from aprfmt.model import Model
from aprfmt.training.judge import Judgement

# Causes by the mistake that all directions agree on.
CAUSES_OF: dict[Wrong, str] = {
    "zero": "gradient_zero",
    "sign": "gradient_sign",
    "factor": "gradient_factor",
    "transposed": "gradient_transposed",
}


@dataclass(frozen=True)
class DifferenceChecker:
    """The loss of a batch, whose derivatives along random directions judge given gradients."""

    model: Model
    batch: BatchLoss
    how: str = "numpy:cpu:float64, by differences"

    @property
    def loss(self) -> float:
        """The mean loss of the batch, in nats per label."""
        return self.batch.loss

    def judge(self, key: str, given: F64, coarse: bool) -> tuple[Judgement | None, float | None]:
        """Return (verdict on a given gradient, its relative L2 distance from the true one).

        `key` is the parameter's role, `coarse` says that the trainer computes in a type of few
        bits. (None, None) for a weight that the forward pass does not read.
        """
        if key not in self.batch.first:
            return None, None
        parts = parts_of(self.model, key, given.shape) if given.ndim > 1 else {}
        tolerance = COARSE if coarse else FINE
        found = check_gradient(self.batch, key, given, tolerance=tolerance, parts=parts)
        return judgement_of(found), found.apart


def judgement_of(found: GradientCheck) -> Judgement:
    """Return the verdict of a check by differences, with a guess where it names a cause.

    A mistake that all directions agree on is a cause. Where single parts are wrong, only the text
    says which.
    """
    if not found.measured:
        return Judgement("not compared", found.says, whole=True)
    if found.agrees:
        return Judgement("agrees", whole=True)
    cause = CAUSES_OF.get(found.wrong)
    says = f"the gradient is {found.says}"
    if cause is None:
        return Judgement("differs", says, whole=True)
    free = 1 if found.wrong in ("factor", "transposed") else 0
    guess = GradientGuess(cause, says, lambda part: part.computed, free)
    return Judgement("differs", says, (guess,), whole=True)


@contextmanager
def open_differences(model: Model, batch: Path) -> Iterator[DifferenceChecker]:
    """Yield a checker of gradients of this batch; FormatError for arrays that are no batch.

    `batch` is the file. The checker's weights are released at the end.
    """
    loss = BatchLoss(model, read_batch(batch, int(model.hyper["vocab_size"])))
    try:
        yield DifferenceChecker(model, loss)
    finally:
        loss.close()
