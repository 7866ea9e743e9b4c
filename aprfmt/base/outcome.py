"""PASS, FAIL, NOT_RUN: the outcomes of a check, and the exit code of each.

A skip is never a pass: a report without a single PASS is NOT_RUN, never PASS.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

Outcome = Literal["PASS", "FAIL", "NOT_RUN"]
OUTCOMES: tuple[Outcome, ...] = ("PASS", "FAIL", "NOT_RUN")  # each at its exit code


class HasOutcome(Protocol):
    """Anything with an outcome: a check, or several checks together."""

    @property
    def outcome(self) -> Outcome:
        """PASS, FAIL or NOT_RUN."""
        ...


@dataclass(frozen=True, slots=True)
class Check:
    """One check: where it looked, what it found, what it expected, what to do about it."""

    name: str
    outcome: Outcome
    where: str = ""
    found: str = ""
    expected: str = ""
    todo: str = ""


def check(
    name: str, passed: bool, found: str, expected: str, todo: str = "", where: str = ""
) -> Check:
    """Return the Check `name`: PASS or FAIL by `passed`.

    `found` and `expected` are what was seen and what should be, `where` the file, tensor or key.
    `todo` says what to do, and is only kept for a FAIL.
    """
    outcome: Outcome = "PASS" if passed else "FAIL"
    return Check(name, outcome, where, found, expected, "" if passed else todo)


def not_run(name: str, why: str, where: str = "") -> Check:
    """Return a NOT_RUN check with its reason `why`."""
    return Check(name, "NOT_RUN", where, why, "an answer")


@dataclass(frozen=True, slots=True)
class Report:
    """Several checks of one subject; FAIL if any FAIL, NOT_RUN if no PASS, else PASS."""

    subject: str
    checks: tuple[Check, ...]

    @property
    def outcome(self) -> Outcome:
        """FAIL if any check failed, NOT_RUN if none passed, else PASS."""
        return verdict(self.checks)

    @property
    def exit_code(self) -> int:
        """The exit code: 0 for PASS, 1 for FAIL, 2 for NOT_RUN."""
        return exit_code(self.outcome)

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `--json`."""
        return {
            "subject": self.subject,
            "outcome": self.outcome,
            "counts": count_outcomes(self.checks),
            "checks": [asdict(check) for check in self.checks],
        }


def verdict(checks: Iterable[HasOutcome]) -> Outcome:
    """Return FAIL if any FAIL, NOT_RUN if no PASS, else PASS."""
    outcomes = {check.outcome for check in checks}
    if "FAIL" in outcomes:
        return "FAIL"
    return "PASS" if "PASS" in outcomes else "NOT_RUN"


def exit_code(outcome: Outcome) -> int:
    """Return the exit code of an outcome: 0 for PASS, 1 for FAIL, 2 for NOT_RUN."""
    return OUTCOMES.index(outcome)


def count_outcomes(checks: Iterable[HasOutcome]) -> dict[str, int]:
    """Return {outcome: number of checks}; all three names are always present."""
    counts = {"PASS": 0, "FAIL": 0, "NOT_RUN": 0}
    for check in checks:
        counts[check.outcome] += 1
    return counts
