"""What the options of `aprfmt trace` ask for."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TraceRequest:
    """What is traced: which points of which layers, at which positions, and by what."""

    payload: bool
    points: str | None
    layers: str | None
    positions: str
    behind: int
    engine: str | None
    draft: bool
    dry_run: bool


@dataclass(frozen=True)
class TraceOutputs:
    """What becomes of a trace: files, a page, a comparison, JSON."""

    save: Path | None
    save_aprt: Path | None
    reference: str | None
    same_dtype: str | None
    html: Path | None
    force: bool
    verbose: bool

    @property
    def values(self) -> bool:
        """Whether anybody wants the values and not only their statistics."""
        return bool(self.save or self.save_aprt or self.reference)
