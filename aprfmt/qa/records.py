"""What the gates give: findings, results and the report, as frozen records with `to_json`."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from aprfmt.base.outcome import Check, Outcome

if TYPE_CHECKING:
    from aprfmt.inference.device import Choice

# How far a measure may move from a baseline: by `tolerance`, or by `tolerance` times the old value.
Kind = Literal["absolute", "relative"]
LEFT_OUT = "left out by --only or --skip"  # why a gate that was not wanted did not run


class NotRunError(Exception):
    """A gate that cannot be asked here; the text says why. Never a pass."""


@dataclass(frozen=True, slots=True)
class Measure:
    """A number a baseline keeps: its unit, how far it may move, and why that far."""

    value: float
    unit: str
    tolerance: float
    kind: Kind
    reason: str


@dataclass(frozen=True)
class Findings:
    """What one gate found: its checks, the numbers a baseline keeps, and tables for people."""

    checks: Sequence[Check]
    measures: Mapping[str, Measure] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class GateResult:
    """One gate of one run.

    `why` is the reason of a NOT_RUN; `asked` marks a gate the user named, which may not go
    missing without an exit code. `seconds` is the wall time.
    """

    name: str
    requirements: tuple[str, ...]
    proves: str
    outcome: Outcome
    seconds: float
    checks: tuple[Check, ...] = ()
    measures: Mapping[str, Measure] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)
    why: str = ""
    asked: bool = False

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that failed."""
        return tuple(check for check in self.checks if check.outcome == "FAIL")

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `--json`."""
        return {
            "name": self.name,
            "requirements": list(self.requirements),
            "proves": self.proves,
            "outcome": self.outcome,
            "why": self.why,
            "asked": self.asked,
            "seconds": self.seconds,
            "checks": [asdict(check) for check in self.checks],
            "measures": {name: asdict(measure) for name, measure in self.measures.items()},
            "details": dict(self.details),
        }


@dataclass(frozen=True)
class QaReport:
    """All gates of one run, in the table's order; a gate that did not run is in it as NOT_RUN.

    `choice` says what was asked for, what ran and why; `backend` is what it says of itself.
    """

    model: str
    choice: "Choice"
    gates: tuple[GateResult, ...]
    min_run: int = 0
    backend: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ran(self) -> int:
        """How many gates gave an answer."""
        return sum(gate.outcome != "NOT_RUN" for gate in self.gates)

    @property
    def counts(self) -> dict[str, int]:
        """Gates by outcome; all three names are always present."""
        counts = {"PASS": 0, "FAIL": 0, "NOT_RUN": 0}
        for gate in self.gates:
            counts[gate.outcome] += 1
        return counts

    @property
    def _lost(self) -> list[str]:
        return [gate.name for gate in self.gates if gate.asked and gate.outcome == "NOT_RUN"]

    @property
    def outcome(self) -> Outcome:
        """FAIL for any failed gate or fewer than `min_run` answers; NOT_RUN without any."""
        if any(gate.outcome == "FAIL" for gate in self.gates):
            return "FAIL"
        if not self.ran:
            return "NOT_RUN"
        return "FAIL" if self.ran < self.min_run else "PASS"

    @property
    def exit_code(self) -> int:
        """0 passed; 1 the answer is no; 2 nothing ran, or something asked for could not run."""
        if self.outcome == "FAIL":
            return 1
        return 2 if self._lost or self.outcome == "NOT_RUN" else 0

    @property
    def sentence(self) -> str:
        """The verdict in words."""
        counts = self.counts
        said = f"{counts['PASS']} PASS, {counts['FAIL']} FAIL, {counts['NOT_RUN']} NOT-RUN"
        if not counts["FAIL"] and self.ran and self.ran < self.min_run:
            said += f"; fewer than the {self.min_run} of --min-run gave an answer"
        lost = self._lost
        if not counts["FAIL"] and lost:
            said += f"; asked for and without an answer: {', '.join(lost)}"
        return said

    def gate(self, name: str) -> GateResult:
        """Return a gate's result; KeyError for a name that is none."""
        for gate in self.gates:
            if gate.name == name:
                return gate
        raise KeyError(name)

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `--json`."""
        return {
            "model": self.model,
            "requested": self.choice.requested,
            "ran": str(self.choice),
            "why": self.choice.why,
            "backend": dict(self.backend),
            "outcome": self.outcome,
            "counts": self.counts,
            "gates_run": self.ran,
            "min_run": self.min_run,
            "gates": [gate.to_json() for gate in self.gates],
        }


def check(
    name: str, passed: bool, found: str, expected: str, todo: str = "", where: str = ""
) -> Check:
    """Return a PASS or FAIL; `todo` is said only of a FAIL."""
    outcome: Outcome = "PASS" if passed else "FAIL"
    return Check(name, outcome, where, found, expected, "" if passed else todo)


def not_run(name: str, why: str, where: str = "") -> Check:
    """Return a NOT_RUN check with its reason."""
    return Check(name, "NOT_RUN", where, why, "an answer")


def listed(names: Sequence[str], most: int = 5) -> str:
    """Return the first few of some names, and how many there are."""
    shown = ", ".join(names[:most])
    return f"{len(names)}: {shown}{', ...' if len(names) > most else ''}" if names else "none"
