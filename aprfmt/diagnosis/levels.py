"""What the first three levels of evidence found, while it is being gathered."""

from dataclasses import dataclass, field

from aprfmt.diagnosis.mixing import Part
from aprfmt.diagnosis.records import Evidence, Finding


@dataclass
class Levels:
    """What the first three levels found. `parts` stand beside `findings`, one each."""

    findings: list[Finding] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    evidence: list[Evidence] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)
    reason: str = ""
    runs: bool = True  # both have all tensors a pass needs

    def add(self, finding: Finding, part: Part) -> None:
        """Note a finding and what it speaks of."""
        self.findings.append(finding)
        self.parts.append(part)
