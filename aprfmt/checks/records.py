"""What checks return: findings, results, an answer for each row, and a report of all of them.

A *row* of the table of checks is one check or gate. An *item* is one thing that a model is made of,
a file, a tensor, a key, a text; where a budget left rows, these are listed as items too.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from aprfmt.base.budget import LEFT_BY
from aprfmt.base.notebook import Card, Table, Tone
from aprfmt.base.outcome import OUTCOMES, Check, Outcome, Report, count_outcomes, exit_code, verdict
from aprfmt.errors import AprfmtError
from aprfmt.model.ledger import LATE, OF_A_PASS, Ledger, NotCompared, make_ledger
from aprfmt.model.verdict import Compared, Pronounced, VerdictWords, pronounce

if TYPE_CHECKING:
    from aprfmt.checks.file.second_reader import SecondReading
    from aprfmt.inference.device import DeviceChoice
    from aprfmt.model import Model

SHOWN = 100  # findings stored for one check: a damaged file can have one a tensor
LISTED = 5  # names in one sentence
LEFT_OUT = "left out by --only or --skip"  # why a gate that was not wanted did not run

# How far a measure may move from a baseline: by `tolerance`, or by `tolerance` times the old value.
MoveKind = Literal["absolute", "relative"]
Level = Literal["fail", "warning"]  # of a finding: wrong, or odd


@dataclass(frozen=True, slots=True)
class CheckFinding:
    """One thing of a model that a check finds wrong or odd: where, what, what was expected.

    `level` is "fail" for wrong, "warning" for odd. `todo` is what repairs it, "" where that is not
    known. It is no `Finding` of `diff` and `diagnose`, which is a cause why two models differ.
    """

    where: str
    found: str
    expected: str
    todo: str = ""
    level: Level = "fail"


@dataclass(frozen=True, slots=True)
class Measure:
    """A number that a baseline keeps, its unit, and how far a later run's may be from it.

    `tolerance` is a distance, or a fraction of the old value, as `kind` says. `reason` is why a
    later number may be that far off.
    """

    value: float
    unit: str
    tolerance: float
    kind: MoveKind
    reason: str


@dataclass(frozen=True, slots=True)
class Result:
    """What the function of a check that ran returns.

    It has either `found`, what the check saw, with `findings` of what is wrong in it; or, where one
    row has several questions, a Check for each in `checks`. `measures` are numbers for a baseline,
    `details` are tables for people.
    """

    found: str = ""
    findings: Sequence[CheckFinding] = ()
    checks: Sequence[Check] = ()
    measures: Mapping[str, Measure] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)


class NotRun(AprfmtError):
    """Raised by a check that cannot run, or not on everything; the message is the reason.

    A check that raises it has not passed. `findings` are those made before it was raised: a failure
    among them fails the check.
    """

    def __init__(self, reason: str, findings: Iterable[CheckFinding] = ()) -> None:
        """Store the reason, and the findings that were made before the check had to stop."""
        super().__init__(reason)
        self.findings = tuple(findings)


@dataclass(frozen=True, slots=True)
class Answer:
    """The outcome of one row of the table in one run.

    `why` is the reason of a NOT_RUN; `asked` marks a row the user named, which may not be missing
    without an exit code. `seconds` is the wall time.
    """

    name: str
    proves: str
    outcome: Outcome
    seconds: float = 0.0
    checks: tuple[Check, ...] = ()
    measures: Mapping[str, Measure] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)
    why: str = ""
    asked: bool = False
    findings: tuple[CheckFinding, ...] = ()

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that failed."""
        return tuple(check for check in self.checks if check.outcome == "FAIL")

    def to_json(self) -> dict[str, Any]:
        """Return the answer as the JSON of a gate in `qa --json`, without findings."""
        found = asdict(self)
        del found["findings"]
        return found


def _answer_text(answer: Answer) -> str:
    """Return the text of an answer in a table: what failed, why it did not run, what it proves."""
    if answer.outcome == "FAIL":
        return "; ".join(f"{one.where}: {one.found}".removeprefix(": ") for one in answer.failed)
    return answer.why if answer.outcome == "NOT_RUN" else answer.proves


# --- reports ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class CheckReport:
    """The answers of one run in the table's order; a row that did not run is in it as NOT_RUN."""

    subject: str
    answers: tuple[Answer, ...]

    def __repr__(self) -> str:
        from aprfmt.base.object_repr import short_repr

        return short_repr(self, self.subject, self.outcome, f"{len(self.answers)} rows")

    @property
    def outcome(self) -> Outcome:
        """FAIL for any failure, NOT_RUN where nothing passed, else PASS."""
        return verdict(self.answers)

    @property
    def counts(self) -> dict[str, int]:
        """{outcome: number of answers}, with all three outcomes."""
        return count_outcomes(self.answers)

    @property
    def exit_code(self) -> int:
        """0 passed, 1 something failed, 2 nothing ran."""
        return exit_code(self.outcome)

    @property
    def sentence(self) -> str:
        """The number of answers by outcome, in words."""
        counts = self.counts
        return f"{counts['PASS']} PASS, {counts['FAIL']} FAIL, {counts['NOT_RUN']} NOT-RUN"

    def _repr_html_(self) -> str:
        """Return HTML for a notebook: the verdict, and a table of checks with failures first."""
        tones: Mapping[str, Tone] = {"PASS": "good", "FAIL": "bad"}
        ranked = sorted(
            self.answers, key=lambda one: ("FAIL", "PASS", "NOT_RUN").index(one.outcome)
        )
        rows = [(one.outcome.replace("_", "-"), one.name, _answer_text(one)) for one in ranked]
        word = self.outcome.replace("_", "-")
        return Card(
            self.subject,
            f"{word}: {self.sentence}",
            tones.get(self.outcome, "warn"),
            (),
            [Table(("outcome", "check", ""), rows, len(rows))],
        ).html()


@dataclass(frozen=True, slots=True)
class NamedFinding:
    """A finding under the name of its check."""

    check: str
    finding: CheckFinding


_WORDS = VerdictWords("PASS", "FAIL")
_NOTHING_RAN = VerdictWords("PASS", "FAIL", "NOT-RUN")


def outcome_counts(counts: Mapping[str, int]) -> str:
    """Return the number of answers by outcome, in words."""
    return f"{counts['PASS']} passed, {counts['FAIL']} failed, {counts['NOT_RUN']} not run"


def pronounce_checks(
    outcome: Outcome,
    counts: Mapping[str, int],
    scope: str,
    not_compared: Sequence[NotCompared] = (),
    accept: Collection[str] = (),
    *,
    of_a_model: bool = True,
) -> Pronounced:
    """Return the verdict over all checks that were made; `scope` says in words what they checked.

    `outcome` is that of all checks together, `counts` is {outcome: number of checks}.
    `not_compared` are items that nothing reads, `accept` patterns of those that the user accepts.
    `of_a_model` says that the checks were made on a model.
    """
    ran = {"checks": (counts["PASS"], counts["PASS"] + counts["FAIL"])}
    compared = Compared(
        outcome == "FAIL", ran, tuple(not_compared), scope=f": {scope}", of_a_model=of_a_model
    )
    return pronounce(_WORDS if counts["PASS"] else _NOTHING_RAN, compared, accept)


def _unanswered_rows(
    answers: Iterable[Answer], kind: str, asked: Collection[str]
) -> list[NotCompared]:
    """Return the rows that were asked for and did not run, as items that were not compared.

    `kind` is the kind of item: check or gate. The reason of an item is the budget where the row was
    left because a budget had ended.
    """
    why = "asked for and without an answer"
    return [
        NotCompared(kind, each.name, LATE, each.why)
        if each.why.startswith(LEFT_BY)
        else NotCompared(kind, each.name, "unreadable", why)
        for each in answers
        if each.name in asked and each.outcome == "NOT_RUN"
    ]


@dataclass(frozen=True, repr=False)
class Validation(CheckReport):
    """What `validate` found: one Check for each row of the table, and all findings.

    Warnings fail nothing unless the validation is `strict`.
    """

    format: str = ""
    strict: bool = False
    ledger: Ledger | None = None
    accept: tuple[str, ...] = ()
    second_reading: "SecondReading | None" = None
    asked: Collection[str] = ()  # rows that run only where they are asked for, and were
    undecoded: Mapping[str, str] = field(default_factory=dict)  # {tensor: why it was not}
    compared: Collection[str] = ()  # tensors of no role whose values a check compared

    @property
    def pronounced(self) -> Pronounced:
        """The verdict over all checks, with the items that nothing reads.

        Items that no table lists are named in it, and fail nothing. A tensor among them leaves the
        verdict open, unless the file states no architecture. A tensor that could not be decoded,
        and a row that was asked for and did not run, leave it open too.
        """
        scope = f"{outcome_counts(self.counts)}, {len(self.warnings)} warnings"
        every = () if self.ledger is None else self.ledger.not_compared
        left = [row for row in every if row.kind != "tensor" or row.name not in self.compared]
        lost = _unanswered_rows(self.answers, "check", self.asked)
        lost += [
            NotCompared("tensor", name, "unreadable", why) for name, why in self.undecoded.items()
        ]
        return pronounce_checks(
            verdict(self.answers),
            self.counts,
            scope,
            (*left, *lost),
            self.accept,
            of_a_model=self.ledger is None or self.ledger.of_a_model,
        )

    @property
    def outcome(self) -> Outcome:
        """The outcome of the verdict: NOT_RUN where it is open, though checks passed."""
        return OUTCOMES[self.exit_code]

    @property
    def exit_code(self) -> int:
        """0 passed, 1 something failed, 2 nothing ran or something could not be read."""
        return self.pronounced.exit

    @property
    def checks(self) -> tuple[Check, ...]:
        """All checks, those of each row of the table in its order."""
        return tuple(check for answer in self.answers for check in answer.checks)

    @property
    def findings(self) -> tuple[NamedFinding, ...]:
        """Everything that is wrong or odd, with the name of its check."""
        return tuple(
            NamedFinding(answer.name, one) for answer in self.answers for one in answer.findings
        )

    @property
    def warnings(self) -> tuple[NamedFinding, ...]:
        """The findings that are odd, not wrong."""
        return tuple(noted for noted in self.findings if noted.finding.level == "warning")

    def to_json(self) -> dict[str, Any]:
        """Return the report as the JSON object of `validate --json`."""
        return {
            "subject": self.subject,
            "outcome": self.outcome,
            "counts": self.counts,
            "checks": [asdict(check) for check in self.checks],
            "format": self.format,
            "strict": self.strict,
            "says": self.pronounced.says,
            **self.pronounced.to_json(),
            "ledger": None if self.ledger is None else self.ledger.to_json(),
            "second_reader": None if self.second_reading is None else asdict(self.second_reading),
            "findings": [
                {"check": noted.check, **asdict(noted.finding)} for noted in self.findings
            ],
        }


@dataclass(frozen=True, repr=False)
class QaReport(CheckReport):
    """What `qa` found: an answer for each gate.

    `choice` says what device was asked for, what ran and why; `backend` is what the backend says of
    itself.
    """

    choice: "DeviceChoice"
    min_run: int = 0
    backend: Mapping[str, Any] = field(default_factory=dict)
    ledger: Ledger | None = None
    accept: tuple[str, ...] = ()

    @property
    def pronounced(self) -> Pronounced:
        """The verdict over all gates, with the items that nothing reads.

        A gate that was asked for and did not run leaves the verdict open.
        """
        asked = [each.name for each in self.answers if each.asked]
        lost = _unanswered_rows(self.answers, "gate", asked)
        left = () if self.ledger is None else self.ledger.not_compared
        return pronounce_checks(
            self._outcome_of_gates, self.counts, self.sentence, (*left, *lost), self.accept
        )

    @property
    def gates(self) -> tuple[Answer, ...]:
        """The answers of all gates; `gates` is their name in `--json`."""
        return self.answers

    @property
    def ran(self) -> int:
        """The number of gates that did not end as NOT_RUN."""
        return len(self.answers) - self.counts["NOT_RUN"]

    @property
    def outcome(self) -> Outcome:
        """The outcome of the verdict: NOT_RUN where it is open, though gates passed."""
        return OUTCOMES[self.exit_code]

    @property
    def _outcome_of_gates(self) -> Outcome:
        """FAIL for any failed gate or fewer than `min_run` answers; NOT_RUN without any."""
        found = verdict(self.answers)
        return "FAIL" if found == "PASS" and self.ran < self.min_run else found

    @property
    def exit_code(self) -> int:
        """0 passed, 1 a gate failed, 2 nothing ran or a gate that was asked for did not."""
        return self.pronounced.exit

    @property
    def sentence(self) -> str:
        """The number of gates by outcome, in words, and whether too few ran."""
        counts, said = self.counts, super().sentence
        if not counts["FAIL"] and self.ran and self.ran < self.min_run:
            said += f"; fewer than the {self.min_run} of --min-run gave an answer"
        return said

    def gate(self, name: str) -> Answer:
        """Return a gate's answer; KeyError for a name that is not in the report."""
        for answer in self.answers:
            if answer.name == name:
                return answer
        raise KeyError(name)

    def to_json(self) -> dict[str, Any]:
        """Return the report as the JSON object of `qa --json`."""
        return {
            "model": self.subject,
            "requested": self.choice.requested,
            "ran": str(self.choice),
            "why": self.choice.why,
            "backend": dict(self.backend),
            "outcome": self.outcome,
            "counts": self.counts,
            "gates_run": self.ran,
            "min_run": self.min_run,
            **self.pronounced.to_json(),
            "ledger": None if self.ledger is None else self.ledger.to_json(),
            "gates": [gate.to_json() for gate in self.answers],
        }


def pronounce_report(
    report: Report,
    model: "Model",
    not_compared: Sequence[NotCompared] = (),
    accept: Collection[str] = (),
) -> Pronounced:
    """Return the verdict of a report on what `model` computes, naming its items that nothing reads.

    A tensor among these leaves the verdict open, with exit code 2. `not_compared` are items of the
    input that were not compared; they are added to the model's. `accept` are patterns
    (`unread:PATTERN`) of items that the user accepts.
    """
    counts = count_outcomes(report.checks)
    rows = (*not_compared, *make_ledger(model, OF_A_PASS).not_compared)
    scope = outcome_counts(counts)
    return pronounce_checks(report.outcome, counts, scope, rows, accept)


# --- making checks ----------------------------------------------------------------------------


def list_names(names: Sequence[str]) -> str:
    """Return how many names there are and the first few, as text; "none" for none.

    At most LISTED names are listed.
    """
    shown = ", ".join(names[:LISTED])
    return f"{len(names)}: {shown}{', ...' if len(names) > LISTED else ''}" if names else "none"


def to_check(name: str, result: Result, reason: str, strict: bool) -> Check:
    """Return one Check named `name` for a result; `reason` is why it did not run, "" where it did.

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
