"""The verdict on one update or gradient of a parameter, with the mistakes that explain it."""

from dataclasses import dataclass

from aprfmt.causes.training.gradient_case import GradientGuess
from aprfmt.causes.training.lost_updates import DecayEvidence
from aprfmt.causes.training.step_case import StepGuess
from aprfmt.training.report import Judged

ENOUGH = 8  # elements of a half that judges a fitted number


@dataclass(frozen=True)
class Judgement:
    """The verdict on one update.

    `guesses` are the mistakes that give it, the likeliest first; `whole` says that they were held
    to all elements, `signs` that the signs of the step were not known. `step` is the size of the
    usual element's step, `decay` the share of the weight that was taken away, `arrived` the share
    of the expected update that is there. `shows` says whether the step was compared: the stored
    type is fine enough for its size, or the weights are to the bit what rounding the expected step
    gives and some of them moved (`exact`). `decays_all` says that a vector decays where that was
    not said, `clipped` what the gradients were clipped to where that was not said: (by what, as of
    Clipping, the bound).
    `decay_shown` is what weights of few bits show of their decay. `held_counts`: see
    `Fit.held_counts`. `nonfinite` says that moments of the optimizer's state are NaN or infinite.
    """

    verdict: Judged
    why: str = ""
    guesses: tuple[StepGuess | GradientGuess, ...] = ()
    whole: bool = False
    step: float | None = None
    decay: float | None = None
    arrived: float | None = None
    signs: bool = False
    shows: bool = True
    decays_all: bool = False
    clipped: tuple[str, float | None] | None = None
    decay_shown: DecayEvidence | None = None
    held_counts: tuple[int, float, int, int] = (0, 0.0, 0, 0)
    nonfinite: bool = False
    exact: bool = False
