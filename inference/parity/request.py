"""What to run, and how: the same for every run of a comparison."""

from collections.abc import Sequence
from dataclasses import dataclass

from aprfmt.inference.running import RunRequest
from aprfmt.measure.tolerances import CalibratedBound


@dataclass(frozen=True)
class ParityRequest(RunRequest):
    """A run, of which `choice` is replaced by each of the runs, and how these are compared.

    `ids` are given. `text` is what they stand for, `arbiter` asks for a float64 run beside the
    others, `calibrated` are tolerances of the file `calibrated_by`, and `by_position` asks for
    each token position's own distance.
    """

    ids: tuple[int, ...] = ()
    text: str | None = None
    arbiter: bool = False
    calibrated: Sequence[CalibratedBound] = ()
    calibrated_by: str | None = None
    by_position: bool = False
