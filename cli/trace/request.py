"""The options of `aprfmt trace`, as dataclasses."""

from dataclasses import dataclass
from pathlib import Path

from aprfmt.base.budget import Budget


@dataclass(frozen=True)
class TraceRequest:
    """What to trace: points, layers and positions, on which engine or draft head, for how long."""

    payload: bool
    points: str | None
    layers: str | None
    positions: str
    behind: int
    engine: str | None
    draft: bool
    dry_run: bool
    budget: Budget | None


@dataclass(frozen=True)
class TraceOutputs:
    """What to make of a trace: files, a page, a comparison, all details."""

    save: Path | None
    save_aprt: Path | None
    reference: str | None
    same_dtype: str | None
    accept: tuple[str, ...]
    exact: bool
    html: Path | None
    force: bool
    verbose: bool

    @property
    def values(self) -> bool:
        """Whether a file or a comparison needs the values, not only their statistics."""
        return bool(self.save or self.save_aprt or self.reference)
