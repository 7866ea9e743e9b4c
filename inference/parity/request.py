"""The request of a comparison: what to run, and how, the same for every run."""

from collections.abc import Sequence
from dataclasses import dataclass

from aprfmt.base.budget import Budget
from aprfmt.inference.running import RunRequest
from aprfmt.measure.tolerances import CalibratedBound


@dataclass(frozen=True)
class ParityRequest(RunRequest):
    """A run request, of which `choice` is replaced by each run, and how these are compared.

    `ids` are given. `text` is what they stand for, `arbiter` asks for one more run in float64,
    `calibrated` are tolerances of the file `calibrated_by`, and `by_position` asks for the
    distance of each token position. Runs that do not begin in the time of `budget` are named.
    """

    ids: tuple[int, ...] = ()
    text: str | None = None
    arbiter: bool = False
    calibrated: Sequence[CalibratedBound] = ()
    calibrated_by: str | None = None
    by_position: bool = False
    budget: Budget | None = None
