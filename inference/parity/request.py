"""What to run, and how: the same for every run of a comparison."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from aprfmt.compare.thresholds import Measured


@dataclass(frozen=True)
class Request:
    """What to run: the wanted points (None: all), and how."""

    ids: tuple[int, ...]
    text: str | None = None
    wanted: Collection[str] | None = None
    through: str | None = None
    arbiter: bool = False
    calibrated: Sequence[Measured] = ()
    calibrated_by: str | None = None
    threads: int | None = None
    memory: int | None = None
    deterministic: bool = False
