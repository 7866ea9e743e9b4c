"""Collects the findings on configuration, tokenizer and tensors, before any pass is run.

A *part* is the weights and hyperparameters of B that one finding is about. A *level* is one stage
of a comparison: identity, configuration, tensors, forward pass and so on.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from aprfmt.compare.diffs import DiffReport
from aprfmt.diagnosis.records import CoverageText, Evidence, Touched
from aprfmt.measure.findings import Finding
from aprfmt.model import Model
from aprfmt.model.ledger import NotCompared

POSITIONS = "position_embd.weight"


@dataclass
class DifferingRows:
    """The numbers of rows or experts that differ in tensors of two models, by role key."""

    rows: dict[str, list[int]] = field(default_factory=dict)
    experts: dict[str, list[int]] = field(default_factory=dict)


@dataclass
class Levels:
    """What was found before any pass was run: on configuration, tokenizer and tensors.

    `parts` has one entry per finding. `stated` are findings that replacing a part of B in a pass
    cannot show: those of tokenizers and of flags. `unmoved`: both models compute the same, and no
    pass is needed.
    """

    findings: list[Finding] = field(default_factory=list)
    parts: list[Touched] = field(default_factory=list)
    evidence: list[Evidence] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)
    reason: str = ""
    other_model: bool = False  # `reason` is a difference: other sizes, blocks or weights
    stated: list[Finding] = field(default_factory=list)  # measured where they were found
    unmoved: bool = False  # every tensor's values and every hyperparameter are equal
    report: DiffReport | None = None  # what comparing the files gave
    coverage: CoverageText = field(default_factory=CoverageText)
    models: dict[str, Model] = field(default_factory=dict)  # sides as they are once they are read
    added: tuple[int, ...] = ()  # ids of special and added tokens, which probes are to hold
    ended: bool = False  # no pass can be made, and it is known why: weights miss, or do not decode
    left: tuple[NotCompared, ...] = ()  # of tokenizers, extra tensors and levels
    complete: bool | None = None
    remainder: float | None = None

    def add(self, finding: Finding, part: Touched) -> None:
        """Append a finding, and `part`: the hyperparameters and weights that it is about."""
        self.findings.append(finding)
        self.parts.append(part)

    def end_with_other_model(self, reason: str) -> None:
        """Note that A and B are two different models; `reason` is a sentence on why."""
        self.reason, self.other_model = reason, True

    def close(self) -> None:
        """Move the findings in `stated` to the end of `findings`, once everything is compared."""
        self.findings, self.stated = [*self.findings, *self.stated], []


def join_findings(
    levels: Levels, numbers: Sequence[int], finding: Finding, part: Touched
) -> dict[int, int]:
    """Put one finding in place of several; return {old number: new number} of those that stay."""
    first = min(numbers)
    kept = [i for i in range(len(levels.findings)) if i == first or i not in numbers]
    findings = [finding if i == first else levels.findings[i] for i in kept]
    levels.parts[:] = [part if i == first else levels.parts[i] for i in kept]
    levels.findings[:] = findings
    return {old: new for new, old in enumerate(kept) if old != first}


def join_counted_copies(levels: Levels) -> None:
    """Join a finding on a size in the configuration with that on the tensors that have this size.

    Neither can be run without the other, and both have the same cause: the tensors' finding says
    what was done, and is confirmed by their values.
    """
    shapes = {
        row.key
        for row in (() if levels.report is None else levels.report.tensors)
        if row.verdict == "SHAPE_DIFFERS"
    }
    for i, (config, sizes) in enumerate(zip(levels.findings, levels.parts, strict=True)):
        if config.level != "config" or not sizes.hyper:
            continue
        for k, (one, part) in enumerate(zip(levels.findings, levels.parts, strict=True)):
            same = one.level == "tensor" and one.cause == config.cause
            if same and one.confirmed and part.keys and shapes.issuperset(part.keys):
                joined = replace(
                    one,
                    says=f"{one.says}; {config.says}",
                    where=(*one.where, *(name for name in config.where if name not in one.where)),
                    values={**config.values, **one.values},
                )
                both = Touched((*sizes.hyper, *part.hyper), (*part.keys, *sizes.keys))
                join_findings(levels, (i, k), joined, both)
                return
