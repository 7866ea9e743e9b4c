"""The report of a conversion: what was written, and how.

An *item* is one thing that a model is made of: a tensor, a key, a text.
"""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from aprfmt.base.protocols import Note
from aprfmt.errors import UsageError
from aprfmt.model.verdict import Compared, Pronounced, VerdictWords, pronounce

if TYPE_CHECKING:
    from aprfmt.conversion.accounting import Account

Fidelity = Literal["bytes", "values", "lossy"]
OUTCOMES: tuple[Fidelity, ...] = ("bytes", "values", "lossy")
_VERIFIED = VerdictWords("verified by reading back", "not all of the source is in the copy")
_SAID: Mapping[Fidelity, str] = {
    "bytes": "byte-equal",
    "values": "value-equal",
    "lossy": "lossy as asked",
}


@dataclass(frozen=True, slots=True)
class TensorOutcome:
    """How one output tensor was written.

    `how` is "bytes" (the logical tensor's bytes are unchanged, rows may have moved), "values"
    (another encoding or layout, every value equal) or "lossy", with counts of changed values.
    `changed` counts elements whose value differs after rounding, `overflowed` finite ones that
    became infinite, `underflowed` non-zero ones that became zero. A packed weight that was put into
    blocks of another encoding undecoded has `groups`, of which values changed in `inexact`, by at
    most `largest_error`. Of FP8 codes that were decoded to BF16 or F16, `lost_codes` cannot be
    recovered by their scales (None for other tensors).
    """

    name: str
    how: Fidelity
    source_encoding: str
    encoding: str
    shape: tuple[int, ...]
    nbytes: int
    steps: tuple[str, ...] = ()
    changed: int = 0
    overflowed: int = 0
    underflowed: int = 0
    groups: int = 0
    inexact: int = 0
    largest_error: float = 0.0
    lost_codes: int | None = None


@dataclass(frozen=True)
class ConversionReport:
    """What was written, and how it was verified.

    `verified` is None if verification was switched off, else the number of tensors that were read
    back and found to be right. `sizes` are the bytes of every file (of a dry run: expected bytes).
    `allowed_missing` are the required roles missing on purpose, as the output records them.
    `carried_bytes` is the size of the verbatim tokenizer.json inside the output. `accounted` says
    what became of everything in the source, None where the output was not read back.
    `resumed_tensors` is how many tensors an earlier run had written; `estimate` is what a dry run
    expects it to take.
    """

    source: Path
    source_format: str
    target: Path
    target_format: str
    files: tuple[Path, ...]
    arch: str | None
    tensors: tuple[TensorOutcome, ...]
    notes: tuple[Note, ...]
    verified: int | None
    source_sha256: str | None
    sizes: Mapping[Path, int] = field(default_factory=dict)
    allowed_missing: tuple[str, ...] = ()
    carried_bytes: int = 0
    accounted: "Account | None" = None
    resumed_tensors: int = 0
    estimate: Mapping[str, Any] | None = None

    def __repr__(self) -> str:
        checked = "not verified" if self.verified is None else "verified"
        from aprfmt.base.object_repr import short_repr

        return short_repr(
            self, f"{self.source} -> {self.target}", f"{len(self.tensors)} tensors", checked
        )

    def count(self, how: Fidelity) -> int:
        """Return how many tensors were written with the outcome `how`."""
        return sum(tensor.how == how for tensor in self.tensors)

    def pronounced(self, accept: Collection[str] = ()) -> Pronounced | None:
        """Return the verdict on what became of the source; None where nothing was read back.

        Its exit code is 1 where keys or files that aprfmt does not know are missing from the copy,
        or differ, and no flag asked for it. `accept` names items that may differ.
        """
        if self.verified is None:
            return None
        kinds = [f"{self.count(how)} {said}" for how, said in _SAID.items() if self.count(how)]
        counts = {"tensors": (self.verified, len(self.tensors))}
        entries = () if self.accounted is None else self.accounted.entries
        if not self.tensors:
            counts = {"things of the source": (len(entries), len(entries))}
        left = () if self.accounted is None else self.accounted.left
        scope = f": {', '.join(kinds) or 'no tensors'}"
        try:
            return pronounce(_VERIFIED, Compared(False, counts, left, scope=scope), accept)
        except UsageError as error:
            raise UsageError(f"{error}; {self.target} is written and verified") from None

    @property
    def lossless(self) -> bool:
        """Whether no tensor is lossy."""
        return self.count("lossy") == 0

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `--json`."""
        return {
            "source": str(self.source),
            "source_format": self.source_format,
            "target": str(self.target),
            "target_format": self.target_format,
            "files": [str(path) for path in self.files],
            "sizes": {str(path): size for path, size in self.sizes.items()},
            "file_bytes": sum(self.sizes.values()),
            "architecture": self.arch,
            "counts": {how: self.count(how) for how in OUTCOMES},
            "verified": self.verified,
            "source_sha256": self.source_sha256,
            "carried_bytes": self.carried_bytes,
            "accounted": None if self.accounted is None else self.accounted.to_json(),
            "resumed_tensors": self.resumed_tensors,
            **({} if self.estimate is None else {"estimate": dict(self.estimate)}),
            "allowed_missing": list(self.allowed_missing),
            "notes": [asdict(note) for note in self.notes],
            "tensors": [asdict(tensor) for tensor in self.tensors],
        }
