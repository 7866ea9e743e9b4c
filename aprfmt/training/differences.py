"""Given gradients checked by differences of a batch's loss: float64 forward passes, no torch."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from aprfmt.adapters.trained_pairs import open_trained_pairs
from aprfmt.causes.training.gradient_case import COARSE, FINE, GradientGuess
from aprfmt.causes.training.gradient_scale import factor_guess
from aprfmt.causes.training.optimizers import F64
from aprfmt.errors import UsageError
from aprfmt.inference.gradients.adapter_differences import AdapterLoss
from aprfmt.inference.gradients.differences import (
    BatchLoss,
    GradientCheck,
    Wrong,
    check_gradient,
    parts_of,
)
from aprfmt.inference.gradients.documents import routers
from aprfmt.measure.encoding_noise import UNIT
from aprfmt.model import Model
from aprfmt.training.gradient_verdict import judge_rounding
from aprfmt.training.judgement import Judgement
from aprfmt.training.reference_gradients import batch_numbers
from aprfmt.training.step_batch import read_step_batch, router_text

# Causes by the mistake that all directions agree on.
CAUSES_OF: dict[Wrong, str] = {
    "zero": "gradient_zero",
    "sign": "gradient_sign",
    "factor": "gradient_factor",
    "transposed": "gradient_transposed",
}


@dataclass(frozen=True)
class DifferenceChecker:
    """The loss of a batch, whose differences along random directions judge given gradients.

    `counts` are numbers of the batch by name, which a wrong factor may equal, and `unread` are
    arrays of its file that nothing reads. `padding` are the ids that stand at its padding alone.
    """

    model: Model
    batch: BatchLoss
    counts: Mapping[str, float] = field(default_factory=dict)
    how: str = "numpy:cpu:float64, by differences"
    unread: tuple[str, ...] = ()
    padding: tuple[int, ...] = ()

    @property
    def loss(self) -> float:
        """The mean loss of the batch, in nats per label."""
        return self.batch.loss

    def judge(
        self, key: str, given: F64, coarse: bool, largest: float
    ) -> tuple[Judgement | None, float | None]:
        """Return (verdict on a given gradient, its relative L2 distance from the true one).

        `key` is the parameter's role, `coarse` says that the trainer computes in a type of few
        bits, `largest` is the norm of the largest given gradient: a small one is a difference of
        numbers as large as that, rounded in the trainer's type. (None, None) for a weight that the
        forward pass does not read.
        """
        if key not in self.batch.first:
            return None, None
        parts = parts_of(self.model, key, given.shape, self.padding) if given.ndim > 1 else {}
        tolerance = COARSE if coarse else FINE
        found = check_gradient(self.batch, key, given, tolerance=tolerance, parts=parts)
        judged = judgement_of(found, self.counts)
        if judged.verdict == "differs" and not judged.guesses:
            rounding = UNIT["BF16" if coarse else "F32"] * largest
            judged = judge_rounding(found.apart * found.size, found.size, rounding) or judged
        return judged, found.apart


def judgement_of(found: GradientCheck, counts: Mapping[str, float]) -> Judgement:
    """Return the verdict of a check by differences, with a guess where the check names a cause.

    `counts` are numbers of the batch by name, which a wrong factor may equal. A mistake that all
    directions agree on is a cause. Where single parts are wrong, only the text says which.
    """
    if not found.measured:
        return Judgement("not compared", found.says, whole=True)
    if found.agrees:
        return Judgement("agrees", whole=True)
    cause = CAUSES_OF.get(found.wrong)
    says = f"the gradient is {found.says}"
    if cause is None:
        return Judgement("differs", says, whole=True)
    if found.wrong == "factor" and found.factor is not None and found.factor > 0:
        guess = factor_guess(found.factor, found.factor_room, counts)
        return Judgement("differs", guess.says, (guess,), whole=True)
    free = 1 if found.wrong in ("factor", "transposed") else 0
    guess = GradientGuess(cause, says, lambda part: part.computed, free)
    return Judgement("differs", says, (guess,), whole=True)


@contextmanager
def open_differences(
    model: Model, batch: Path, adapter: Path | None = None
) -> Iterator[DifferenceChecker]:
    """Yield a checker of gradients of this batch; FormatError for arrays that are no batch.

    `batch` is the file. With the folder of an `adapter` of the model they are those of its factors,
    else those of the model's weights. The checker's weights are released at the end. Raises
    UsageError for weights that make the loss NaN or infinite.
    """
    loaded = read_step_batch(batch, model)
    if routers(loaded).any:
        raise UsageError(
            f"{batch}: {router_text(loaded)}, which differences of the loss do not have; leave out "
            "--check-gradients"
        )
    with ExitStack() as stack:
        pairs = open_trained_pairs(adapter, model, stack)
        loss = AdapterLoss(model, loaded, pairs) if pairs else BatchLoss(model, loaded)
        stack.callback(loss.close)
        scales = {pair.scale for pair in pairs}
        counts = batch_numbers(loaded, scales.pop() if len(scales) == 1 else None).counts
        padding = np.setdiff1d(loaded.ids[:, :-1][~loaded.mask], loaded.ids[:, :-1][loaded.mask])
        yield DifferenceChecker(
            model, loss, counts, unread=loaded.unread, padding=tuple(padding[padding >= 0].tolist())
        )
