"""Prints the checks of `validate`, the gates of `qa`, and every other PASS or FAIL."""

import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from aprfmt.base.outcome import OUTCOMES
from aprfmt.cli import output_format, render

if TYPE_CHECKING:
    from aprfmt.base.outcome import Check
    from aprfmt.checks.records import CheckFinding, QaReport, Validation
    from aprfmt.compare.short_answer import Line
    from aprfmt.model.verdict import Pronounced

STYLES = {"PASS": "good", "FAIL": "bad", "NOT_RUN": "warn"}
LONG_COMMAND = 300  # characters of a command that is printed once, as the next one
ALIKE = 3  # findings of one kind that have a line each; more share one
LINES = 20  # findings printed for one check; --json has more
_SKIPPED = "not run: "
_WRITTEN = "baseline written to "


def show_checks(checks: "Sequence[Check]") -> None:
    """Print a line for each check: outcome, name, what was found and what was expected."""
    for check in checks:
        render.say(f"{check.outcome:7} {_check_text(check, checks)}", style=STYLES[check.outcome])


def _check_text(check: "Check", among: "Sequence[Check]") -> str:
    """Return a check as text without its outcome.

    The place is included if another check in `among` has the same name, as in a list of models.
    """
    twice = sum(one.name == check.name for one in among) > 1
    place = f"{check.where}: " if twice and check.where else ""
    todo = f"; {check.todo}" if check.todo else ""
    return f"{check.name}: {place}{check.found}; expected {check.expected}{todo}"


def verdict_line(found: "Pronounced") -> "Line":
    """Return (text, style) of a verdict; the style is that of its exit code."""
    return found.says, STYLES[OUTCOMES[found.exit]]


def failure_lines(checks: "Sequence[Check]") -> "list[Line]":
    """Return a (text, style) line for each check that did not pass, NOT-RUN ones included."""
    return [
        (f"  {one.outcome.replace('_', '-')} {_check_text(one, checks)}", STYLES[one.outcome])
        for one in checks
        if one.outcome != "PASS"
    ]


def show_short(
    lines: "Sequence[Line]", passed: int, what: str, skipped: "Sequence[Line]" = ()
) -> None:
    """Print a short answer in at most 12 lines, with a line on what passed.

    `passed` is the number of checks, gates or answers that passed, `what` the plural of their name.
    `skipped` has a line for each check or gate that did not run; where there is room, they replace
    the line that names all of them.
    """
    named = [row for row in lines if row[0].startswith(_SKIPPED)]
    end = [row for row in lines if row[0].startswith((_SKIPPED, _WRITTEN, "next: "))]
    begin = [row for row in lines if row not in end]
    said: list[Line] = [(f"  PASS {passed} {what} (-v lists them)", "dim")] if passed else []
    if len(lines) + len(said) + len(skipped) - len(named) <= output_format.LINES:
        begin, end = [*begin, *skipped], [row for row in end if row not in named]
    every = [*begin, *said, *end]
    render.say_lines(render.shorten_answer(every, "-v, --json", kept=len(said) + len(end)))


def skipped_checks(report: "Validation") -> "list[Line]":
    """Return a (text, style) line for each check that did not run, with the reason."""
    return [
        (f"  NOT-RUN {one.name}: {one.found}", "dim")
        for one in report.checks
        if one.outcome == "NOT_RUN"
    ]


def skipped_gates(report: "QaReport") -> "list[Line]":
    """Return a (text, style) line for each gate, and each check of a gate, that did not run."""
    found: list[Line] = []
    for gate in report.gates:
        if gate.outcome == "NOT_RUN":
            found.append((f"  NOT-RUN {gate.name}: {gate.why}", "dim"))
            continue
        found += [
            (f"  NOT-RUN {gate.name}: {one.name}: {one.found}", "dim")
            for one in gate.checks
            if one.outcome == "NOT_RUN"
        ]
    return found


def account_command(found: "Pronounced", model: str) -> str:
    """Return the command that lists what nothing reads of a model; "" if no tensor is unread.

    `found` is the verdict over what the model at `model` computes, which unread tensors leave open.
    """
    unread = any(row.kind == "tensor" and not row.side for row in found.not_compared)
    return _next_command(model, None) if found.exit == 2 and unread else ""


def count_passed(checks: "Sequence[Check]") -> int:
    """Return how many checks passed."""
    return sum(one.outcome == "PASS" for one in checks)


def show_verdict(found: "Pronounced") -> None:
    """Print the line of a verdict, in the colour of its word."""
    render.say_verdict(*verdict_line(found))


def show_validation(report: "Validation") -> None:
    """Print a line for each check, its findings below it, and the verdict."""
    styles = STYLES | {"NOT_RUN": "dim"}  # what is not asked of this format is no warning
    width = max(len(check.name) for check in report.checks)
    for check in report.checks:
        word = check.outcome.replace("_", "-")
        said = "" if check.outcome == "FAIL" else render.escape(check.found, 300)
        render.line(f"{word:7}  {check.name:{width}}  {said}".rstrip(), style=styles[check.outcome])
        noted = [one.finding for one in report.findings if one.check == check.name]
        for text in render.first_rows(_finding_lines(noted, report.strict), LINES, " " * 9):
            render.line("         " + render.escape(text, 1000))
    show_verdict(report.pronounced)


def _without_long_command(finding: "CheckFinding", command: str) -> "CheckFinding":
    """Return a finding that refers to the next `command` where that is long and its own remedy."""
    long = finding.todo == command and len(command) > LONG_COMMAND
    return replace(finding, todo="the next command states them") if long else finding


def _finding_lines(findings: "Sequence[CheckFinding]", strict: bool) -> list[str]:
    """Return a line for each finding; more than `ALIKE` of one kind become one line with a count.

    With `strict` a warning has no prefix, since it fails the file.
    """
    alike: dict[tuple[str, str, str, str], list[CheckFinding]] = {}
    for one in findings:
        alike.setdefault((one.level, one.found, one.expected, one.todo), []).append(one)
    lines = []
    for group in alike.values():
        if len(group) <= ALIKE:
            lines += [_finding_line(one, strict) for one in group]
            continue
        where = f"{group[0].where}, {group[1].where} and {len(group) - 2} more"
        lines.append(_finding_line(replace(group[0], where=where), strict))
    return lines


def _finding_line(finding: "CheckFinding", strict: bool) -> str:
    """Return a finding as one line: where, found, expected, what to do.

    The line begins with "warning: " unless the finding fails the file (`strict`, or its level).
    """
    level = "" if strict or finding.level == "fail" else "warning: "
    parts = [f"{finding.where}: {finding.found}", f"expected {finding.expected}", finding.todo]
    return level + " - ".join(part for part in parts if part)


def validation_answer(report: "Validation", against: str | None) -> "list[Line]":
    """Return the short answer of `validate` as (text, style) lines.

    They are the verdict, what failed or was warned of, the checks that did not run, and the next
    command, which repairs all failures if one can. `against` is another copy of the file to compare
    with, or None.
    """
    from aprfmt.checks.file.layout import RivalWeights
    from aprfmt.compare.short_answer import merge_similar_lines
    from aprfmt.measure.named_causes import MENDS

    found = report.pronounced
    lines: list[Line] = []
    mends = {one.finding.todo for one in report.findings if one.finding.level == "fail"}
    only = next((one for one in mends if len(mends) == 1 and one.startswith(MENDS)), "")
    for check in report.checks:
        noted = [
            _without_long_command(one.finding, only)
            for one in report.findings
            if one.check == check.name
        ]
        style = STYLES[check.outcome] if check.outcome == "FAIL" else "warn"
        lines += [
            (f"  {check.name}: {text}", style) for text in _finding_lines(noted, report.strict)
        ]
    skipped = [check.name for check in report.checks if check.outcome == "NOT_RUN"]
    end: list[Line] = []
    if skipped:
        end.append((f"{_SKIPPED}{', '.join(skipped)}", "dim"))
    if found.exit:
        failed = [one.finding for one in report.findings if one.finding.level == "fail"]
        stored = [one.where for one in failed if not one.found.startswith("missing")]
        tensor = _first_tensor_name(stored)
        command = only
        lost = {
            one.finding.todo
            for one in report.findings
            if one.check == "shards"
            and one.finding.level == "fail"
            and not isinstance(one.finding, RivalWeights)
        }
        if not command and against is None and any(not todo.startswith(MENDS) for todo in lost):
            end.append(("no command reads a set of which files are missing", "head"))
        else:
            options = [*["--strict"] * report.strict, *(["--against", against] if against else [])]
            whole = _whole_command(found, ["validate", report.subject, *options])
            command = command or whole or _next_command(report.subject, against, tensor)
            end.append((f"next: {command}", "head"))
    lines.sort(key=lambda line: line[1] != STYLES["FAIL"])  # what fails comes before what is odd
    return [(found.says, STYLES[report.outcome]), *merge_similar_lines(lines), *end]


def _first_tensor_name(places: "Sequence[str]") -> str:
    """Return the stored name of the first of `places` that is a weight or bias; "" without one.

    A place is a stored name, or a role with the stored name in parentheses; or several stored
    names, of which the first counts.
    """
    names = (place.rpartition(" (")[2].rstrip(")").partition(", ")[0] for place in places)
    return next((name for name in names if name.endswith((".weight", ".bias"))), "")


def _next_command(model: str, other: str | None, tensor: str = "") -> str:
    """Return the command that tells most about a file that failed.

    It is `diagnose` where there is another copy `other`, `tensors --stats` where a tensor is named,
    else `inspect --account`.
    """
    if other is not None:
        return f"aprfmt diagnose {shlex.quote(other)} {shlex.quote(model)}"
    if tensor:
        return f"aprfmt tensors {shlex.quote(model)} {shlex.quote(tensor)} --stats"
    return f"aprfmt inspect {shlex.quote(model)} --account"


def _whole_command(found: "Pronounced", words: "Sequence[str]") -> str:
    """Return the command `aprfmt WORDS` if only a budget left the verdict open, else "".

    `words` are the command's, without --budget. `found` is the verdict.
    """
    from aprfmt.model.ledger import LATE

    late = {row.state == LATE for row in found.not_compared if row.is_open}
    return f"aprfmt {shlex.join(words)}" if found.exit == 2 and late == {True} else ""


def gates_answer(
    report: "QaReport", saved: str | None, other: str | None, chosen: "Sequence[str]" = ()
) -> "list[Line]":
    """Return the short answer of `qa` as (text, style) lines.

    They are the verdict, the checks that failed, the gates that did not run, the baseline's path
    (`saved`), and the next command. `other` is a model to compare with, or None; `chosen` are the
    words of the command that choose the gates.
    """
    from aprfmt.compare.short_answer import merge_similar_lines

    lines: list[Line] = [
        (
            f"  {gate.name}: {one.name}{f' ({one.where})' if one.where else ''}: {one.found}; "
            f"expected {one.expected}{f'; {one.todo}' if one.todo else ''}",
            "bad",
        )
        for gate in report.gates
        for one in gate.failed
    ]
    style, verdict = {0: "good", 1: "bad", 2: "warn"}[report.exit_code], report.pronounced.says
    skipped = [gate.name for gate in report.gates if gate.outcome == "NOT_RUN"]
    end: list[Line] = [(f"{_SKIPPED}{', '.join(skipped)}", "dim")] if skipped else []
    if saved is not None:
        end.append((f"{_WRITTEN}{saved}", ""))
    if report.exit_code:
        path = str(report.subject)
        against = ["--against", other] if other else []
        todo = _whole_command(report.pronounced, ["qa", path, *against, *chosen])
        if not todo:
            todo = _next_command(path, other) if other else f"aprfmt validate {shlex.quote(path)}"
        end.append((f"next: {todo}", "head"))
    return [(verdict, style), *merge_similar_lines(lines), *end]


def show_gates(report: "QaReport", saved: str | None) -> None:
    """Print a line for each gate, the checks that failed in it, and the path of the baseline.

    `saved` is the path that the baseline was written to, or None.
    """
    render.say(f"{report.subject} on {report.choice}", style="head")
    for gate in report.gates:
        took = f"{gate.seconds:6.2f} s" if gate.outcome != "NOT_RUN" else "        "
        text = f"{gate.outcome.replace('_', '-'):7} {gate.name:16} {took}  "
        if gate.outcome == "PASS":
            seen = [one.found for one in gate.checks if one.name == gate.name and one.found]
            text += ": ".join([gate.proves, *seen])
        elif gate.outcome == "NOT_RUN":
            text += gate.why
        else:
            text += f"{len(gate.failed)} of {len(gate.checks)} checks failed"
        render.say(text, style=STYLES[gate.outcome])
        for each in gate.checks:
            if each.outcome == "FAIL" or (each.outcome == "NOT_RUN" and gate.outcome != "NOT_RUN"):
                todo = f"; {each.todo}" if each.todo else ""
                place = f" ({each.where})" if each.where else ""
                text = f"{each.name}{place}: {each.found}; expected {each.expected}{todo}"
                word = each.outcome.replace("_", "-")
                render.say(f"        {word} {text}", style=STYLES[each.outcome])
    show_verdict(report.pronounced)
    if saved is not None:
        render.say(f"{_WRITTEN}{saved}")
