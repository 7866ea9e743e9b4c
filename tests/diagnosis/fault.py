"""One row of the tables of seeded faults."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Pair = tuple[object, object]


@dataclass(frozen=True)
class Fault:
    """One row: `make()` gives A and B; `causes` are all that must be named, the first one first.

    `where` must be among the places of the first cause. `base` is the architecture.
    """

    name: str
    base: str
    says: str
    make: Callable[[], Pair]
    causes: tuple[str, ...]
    where: tuple[str, ...] = ()
    verdict: str = "bug"
    confidence: str = "confirmed"
    upstream: tuple[int, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def control(self) -> bool:
        """Nothing is broken: a verdict of a bug here is a false alarm."""
        return self.verdict in ("same", "precision")
