"""The findings of the first three levels of evidence, while they are collected."""

from dataclasses import dataclass, field

from aprfmt.diagnosis.mixing import Part
from aprfmt.diagnosis.records import Evidence, Finding


@dataclass
class Levels:
    """Findings of the first three levels; `parts` has one entry per finding."""

    findings: list[Finding] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    evidence: list[Evidence] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)
    reason: str = ""
    runs: bool = True  # True if both models have all tensors a pass needs

    def add(self, finding: Finding, part: Part) -> None:
        """Add a finding and its part."""
        self.findings.append(finding)
        self.parts.append(part)
