"""What `diagnose` says of a row, and whether that is right, placed and confirmed."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from aprfmt.diagnosis import Diagnosis, Finding, diagnose
from aprfmt.errors import AprfmtError
from tests.field.row import Row
from tests.field.rows import BY_NAME

ERROR, CRASH = "error", "crash"


@dataclass(frozen=True)
class Answer:
    """One row's answer; `wrong` are causes that were confirmed and not seeded.

    Of a fault `right` is the verdict and every cause, `placed` every cause's place, `confirmed`
    that every cause in its place is confirmed, or named with all that no dump like this one tells
    from it. Of a control only `right` is asked.
    """

    name: str
    kind: str
    frozen: bool
    seeded: str
    verdict: str
    named: tuple[str, ...]
    where: tuple[str, ...]
    confidence: str
    exit_code: int
    right: bool
    placed: bool
    confirmed: bool
    wrong: tuple[str, ...]
    says: str
    seconds: float = 0.0

    @property
    def whole(self) -> bool:
        """Nothing is left to be wished for."""
        return self.right and self.placed and self.confirmed and not self.wrong

    @property
    def alarm(self) -> bool:
        """A control that was called a bug."""
        return self.kind == "control" and self.verdict == "bug"

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self) | {"whole": self.whole, "alarm": self.alarm}


def asked(name: str) -> Answer:
    """Make a row's two sides, diagnose them, and judge the answer."""
    row = BY_NAME[name]
    first, second = row.make()
    try:
        found = diagnose(str(first), str(second), **row.options)
    except AprfmtError as error:
        return _failed(row, ERROR, str(error))
    except Exception as error:  # a traceback is an answer, too: the worst one
        return _failed(row, CRASH, f"{type(error).__name__}: {error}")
    return judged(row, found)


def measured(name: str) -> Answer:
    """Return a row's answer and how long it took; one thread, also in a process of its own."""
    import torch

    torch.set_num_threads(1)
    began = time.perf_counter()
    return replace(asked(name), seconds=time.perf_counter() - began)


def _failed(row: Row, verdict: str, says: str) -> Answer:
    return Answer(
        row.name,
        row.kind,
        row.frozen,
        row.counted_as,
        verdict,
        (),
        (),
        "",
        2,
        verdict in row.verdicts,
        False,
        False,
        (),
        says,
    )


def judged(row: Row, found: Diagnosis) -> Answer:
    """Return whether an answer names, places and confirms what was seeded."""
    named = tuple(dict.fromkeys(finding.cause or "-" for finding in found.findings))
    wrong = tuple(
        dict.fromkeys(
            finding.cause
            for finding in found.findings
            if finding.verdict == "bug"
            and finding.confidence == "confirmed"
            and not any(cause.named(finding.cause) for cause in row.causes)
        )
    )
    right = found.verdict in row.verdicts
    placed = confirmed = right
    if not row.control:
        for cause in row.causes:
            ours = [finding for finding in found.findings if cause.named(finding.cause)]
            there = [finding for finding in ours if cause.placed(finding.where)]
            right = right and bool(ours)
            placed = placed and bool(there)
            confirmed = confirmed and any(cause.settled(finding) for finding in there)
    lead = found.lead
    return Answer(
        row.name,
        row.kind,
        row.frozen,
        row.counted_as,
        found.verdict,
        named,
        () if lead is None else lead.where[:2],
        found.confidence,
        found.exit_code,
        right,
        right and placed,
        right and placed and confirmed,
        wrong,
        found.reason or _said(found.findings),
    )


def _said(findings: Sequence[Finding]) -> str:
    return "; ".join(finding.says for finding in findings[:2])


# --- counts ---------------------------------------------------------------------------------------


def counts(answers: Sequence[Answer]) -> Mapping[str, int]:
    """Return how many faults were found, named, placed and confirmed, and what went wrong."""
    faults = [answer for answer in answers if answer.kind != "control"]
    controls = [answer for answer in answers if answer.kind == "control"]
    return {
        "faults": len(faults),
        "called a bug": sum(answer.verdict == "bug" for answer in faults),
        "named": sum(answer.right for answer in faults),
        "named and placed": sum(answer.placed for answer in faults),
        "named, placed and confirmed": sum(answer.confirmed for answer in faults),
        "answers with a wrong cause confirmed": sum(bool(answer.wrong) for answer in answers),
        "controls": len(controls),
        "controls answered rightly": sum(answer.right for answer in controls),
        "controls called a bug": sum(answer.alarm for answer in controls),
        "crashes": sum(answer.verdict == CRASH for answer in answers),
    }


def counts_table(answers: Sequence[Answer]) -> str:
    """Return the counts as a table."""
    lines = [f"| {name} | {count} |" for name, count in counts(answers).items()]
    return "\n".join(["| of the frozen rows | |", "| --- | --- |", *lines])


def matrix(answers: Sequence[Answer]) -> str:
    """Return seeded against named causes, the first of each, with what is right and complete."""
    rows: dict[str, list[Answer]] = {}
    for answer in answers:
        seeded = "nothing wrong" if answer.kind == "control" else answer.seeded
        rows.setdefault(seeded, []).append(answer)
    head = "| seeded first | times | first named | named, placed, confirmed |"
    made = [head, "| --- | --- | --- | --- |"]
    for seeded in sorted(rows, key=lambda name: (name == "nothing wrong", name)):
        found = rows[seeded]
        said = Counter(first_named(answer) for answer in found)
        text = ", ".join(f"{name} {count}" for name, count in sorted(said.items()))
        good = sum(
            answer.right if answer.kind == "control" else answer.confirmed for answer in found
        )
        made.append(f"| {seeded} | {len(found)} | {text} | {good} |")
    return "\n".join(made)


def first_named(answer: Answer) -> str:
    """Return the first cause that an answer names, or why there is none."""
    if answer.verdict in (ERROR, CRASH, "not_comparable"):
        return answer.verdict.replace("_", " ")
    if not answer.named:
        return "none" if answer.verdict == "same" else "unknown"
    return answer.named[0] if answer.named[0] != "-" else "unknown"
