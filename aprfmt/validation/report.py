"""What a validation says: one Check a row of the table, and every finding behind them."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from aprfmt.base.outcome import Check, Report
from aprfmt.errors import AprfmtError

SHOWN = 100  # findings kept for one check: a damaged file can have one a tensor


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong ("fail") or odd ("warning"): where, what, what was expected."""

    where: str
    found: str
    expected: str
    todo: str = ""
    level: Literal["fail", "warning"] = "fail"


@dataclass(frozen=True, slots=True)
class Result:
    """What a check that ran has to say: what it saw, and what it found wrong or odd."""

    found: str = ""
    findings: Sequence[Finding] = ()


class NotRun(AprfmtError):
    """A check could not run, or not on everything; the message is the reason.

    `findings` are what it found all the same: a failure among them fails the check.
    """

    def __init__(self, reason: str, findings: Iterable[Finding] = ()) -> None:
        super().__init__(reason)
        self.findings = tuple(findings)


@dataclass(frozen=True, slots=True)
class Noted:
    """A finding under the name of its check."""

    check: str
    finding: Finding


@dataclass(frozen=True, slots=True)
class Validation(Report):
    """A Report with one Check a row of the table, and the findings behind them.

    Warnings fail nothing unless the validation is `strict`.
    """

    format: str = ""
    strict: bool = False
    findings: tuple[Noted, ...] = field(default=())

    @property
    def warnings(self) -> tuple[Noted, ...]:
        """The findings that are odd, not wrong."""
        return tuple(noted for noted in self.findings if noted.finding.level == "warning")

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `--json`."""
        # A slotted dataclass is made anew by its decorator, so super() without arguments fails.
        return Report.to_json(self) | {
            "format": self.format,
            "strict": self.strict,
            "findings": [
                {"check": noted.check, **asdict(noted.finding)} for noted in self.findings
            ],
        }


def summed(name: str, result: Result, reason: str, strict: bool) -> Check:
    """Return the one Check of a row; `reason` is why it did not run, or "" where it did.

    The first failure stands for all of them (with `strict` warnings are failures).
    """
    counted = [one for one in result.findings if strict or one.level == "fail"]
    if counted:
        first = counted[0]
        more = f" (and {len(counted) - 1} more)" if len(counted) > 1 else ""
        return Check(name, "FAIL", first.where, first.found + more, first.expected, first.todo)
    if reason:
        return Check(name, "NOT_RUN", found=reason)
    odd = len(result.findings)
    words = [result.found] if result.found else []
    if odd:
        words.append(f"{odd} warning{'s' * (odd > 1)}")
    return Check(name, "PASS", found="; ".join(words))
