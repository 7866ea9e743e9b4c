"""SARIF and JUnit reports of what `validate`, `qa`, `scan` and `diff` found, for CI servers.

Both are made of `ReportCase` records, which are made of the object that `--json` prints.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote
from xml.etree import ElementTree

from aprfmt.base.exit_codes import EXIT_CODES
from aprfmt.base.version import __version__

# https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/sarif-v2.1.0-errata01-os-complete.html
SCHEMA = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)
Level = Literal["pass", "warning", "fail", "error", "not run"]
DAMAGED = "damage"


@dataclass(frozen=True)
class ReportCase:
    """One question about one file: the check or gate asked, the answer, and the place in the file.

    `place` is a tensor, a key or an offset inside `file`; "" where the answer is about all of it.
    The level "error" is for a question that could not be answered, "not run" for one not asked.
    """

    check: str
    file: str
    level: Level
    text: str = ""
    place: str = ""
    seconds: float = 0.0


def cases_of_validation(body: Mapping[str, Any]) -> list[ReportCase]:
    """Return a ReportCase for each finding of `validate`, and for each check without one.

    `body` is what `validate --json` prints.
    """
    file, found = body["subject"], []
    for check in body["checks"]:
        noted = [one for one in body["findings"] if one["check"] == check["name"]]
        for one in noted:
            level: Level = "fail" if one["level"] == "fail" or body["strict"] else "warning"
            found.append(ReportCase(check["name"], file, level, _check_text(one), one["where"]))
        if not noted:
            found.append(_check_case(check, check["name"], file))
    return found


def cases_of_gates(body: Mapping[str, Any]) -> list[ReportCase]:
    """Return a ReportCase for each `qa` check that did not pass, else one for the gate.

    `body` is what `qa --json` prints. A gate that did not run has one case.
    """
    file, found = body["model"], []
    for gate in body["gates"]:
        apart = [one for one in gate["checks"] if one["outcome"] != "PASS"]
        if gate["outcome"] == "NOT_RUN" or not apart:
            text = gate["why"] or gate["proves"]
            level = _case_level(gate["outcome"])
            found.append(ReportCase(gate["name"], file, level, text, seconds=gate["seconds"]))
            continue
        found += [_check_case(one, f"{gate['name']}: {one['name']}", file) for one in apart]
    return found


def cases_of_scan(body: Mapping[str, Any]) -> list[ReportCase]:
    """Return a ReportCase for each `scan` answer that is no pass, and one more per model.

    The one more counts the model's answers that passed and those that did not run. `body` is what
    `scan --json` prints.
    """
    found = []
    for model in body["models"]:
        rows = [row for row in body["damage"] if row["model"] == model["model"]]
        for row in rows:
            texts = [f"{one['where']}: {_check_text(one)}" for one in row["findings"]]
            text = "; ".join(texts) or row["found"]
            found.append(ReportCase(row["check"], row["model"], _case_level(row["outcome"]), text))
        text = f"{model['PASS']} answers passed, {model['NOT_RUN']} not run"
        level: Level = "pass" if model["PASS"] else "not run"
        found.append(ReportCase("other checks", model["model"], level, text))
    return found


def cases_of_diff(
    body: Mapping[str, Any], differing: Mapping[str, int], tensors: Collection[str]
) -> list[ReportCase]:
    """Return a ReportCase for each tensor of `diff`, differing section, and damage of a file.

    `body` is what `--json` prints. `differing` is {section: number of its differing fields that
    make the exit code 1}, `tensors` are the keys of the tensors that do.
    """
    file = body["b"]
    found = [ReportCase(DAMAGED, one["where"], "error", one["text"]) for one in body["damage"]]
    for row in body["tensors"]:
        verdict = row["verdict"]
        level: Level = "fail" if row["key"] in tensors else "pass"
        if verdict == "UNREADABLE":
            level = "error"
        text = f"{verdict}: {row['cause']}".removesuffix(": ")
        found.append(ReportCase("tensor", file, level, text, row["name_b"] or row["name_a"]))
    for section, count in differing.items():
        names = ", ".join(row["name"] for row in body[section]) or "what goes with the tensors"
        found.append(ReportCase(section, file, "fail", f"{count} differ: {names}"))
    return found


def append_verdict_case(cases: Sequence[ReportCase], code: int, file: str) -> list[ReportCase]:
    """Return the cases and one more for the exit code, so that no report hides a failure.

    `file` is what the command was about.
    """
    word: Level = "pass" if code == 0 else "fail" if code == 1 else "error"
    return [*cases, ReportCase("verdict", file, word, f"exit {code}: {EXIT_CODES[code]}")]


def sarif_log(command: str, cases: Sequence[ReportCase], code: int) -> dict[str, Any]:
    """Return a SARIF 2.1.0 log with a result for each failure, error and warning.

    What did not run is a notification of the invocation, since it is no result. `code` is the exit
    code of `aprfmt command`.
    """
    reported = [case for case in cases if case.level in ("fail", "error", "warning")]
    rules = sorted({case.check for case in reported})
    skipped = [case for case in cases if case.level == "not run"]
    return {
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "aprfmt",
                        "version": __version__,
                        "rules": [
                            {"id": rule, "name": f"aprfmt {command}: {rule}"} for rule in rules
                        ],
                    }
                },
                "invocations": [
                    {
                        "executionSuccessful": code != 2,
                        "exitCode": code,
                        "toolExecutionNotifications": [
                            {
                                "level": "note",
                                "message": {"text": f"NOT-RUN {case.check}: {case.text}"},
                            }
                            for case in skipped
                        ],
                    }
                ],
                "results": [_sarif_result(case, rules.index(case.check)) for case in reported],
            }
        ],
    }


def _sarif_result(case: ReportCase, rule: int) -> dict[str, Any]:
    """Return a case as a SARIF result; `rule` is the index of its rule in the log's list."""
    address = case.file if "://" in case.file else quote(Path(case.file).as_posix())
    location: dict[str, Any] = {"physicalLocation": {"artifactLocation": {"uri": address}}}
    if case.place:
        location["logicalLocations"] = [{"fullyQualifiedName": case.place}]
    return {
        "ruleId": case.check,
        "ruleIndex": rule,
        "kind": "fail",
        "level": "warning" if case.level == "warning" else "error",
        "message": {"text": f"{case.place}: {case.text}".removeprefix(": ")},
        "locations": [location],
    }


def junit_xml(command: str, cases: Sequence[ReportCase]) -> str:
    """Return a JUnit report as XML text, as Jenkins, GitLab and GitHub's reporters read it.

    A failure is a `failure`, what could not be answered an `error`, NOT-RUN a `skipped`. A warning
    passes, with its text in `system-out`.
    """
    counts = {
        "tests": str(len(cases)),
        "failures": str(sum(case.level == "fail" for case in cases)),
        "errors": str(sum(case.level == "error" for case in cases)),
        "skipped": str(sum(case.level == "not run" for case in cases)),
    }
    time = f"{sum(case.seconds for case in cases):.3f}"
    root = ElementTree.Element("testsuites")
    facts = {"name": f"aprfmt {command}", "time": time, **counts}
    suite = ElementTree.SubElement(root, "testsuite", facts)
    for case in cases:
        name = _escape_for_xml(f"{case.check}: {case.place}".removesuffix(": "))
        took, where = f"{case.seconds:.3f}", _escape_for_xml(case.file)
        row = ElementTree.SubElement(suite, "testcase", classname=where, name=name, time=took)
        tag = {"fail": "failure", "error": "error", "not run": "skipped"}.get(case.level)
        if tag is not None:
            ElementTree.SubElement(row, tag, message=_escape_for_xml(case.text))
        elif case.level == "warning":
            ElementTree.SubElement(row, "system-out").text = _escape_for_xml(
                f"warning: {case.text}"
            )
    ElementTree.indent(root)
    return ElementTree.tostring(root, "unicode", xml_declaration=False)


def _escape_for_xml(text: str) -> str:
    r"""Return text with each character that XML 1.0 cannot hold written as an escape, like \x00.

    Names in files may hold such characters.
    """
    return "".join(
        char
        if char in "\t\n"
        or " " <= char <= "\ud7ff"
        or "\ue000" <= char <= "\ufffd"
        or char >= "\U00010000"
        else f"\\x{ord(char):02x}"
        for char in text
    )


def _case_level(outcome: str) -> Level:
    """Return the level of an outcome; any word but PASS, FAIL and NOT_RUN is "error"."""
    levels: dict[str, Level] = {"PASS": "pass", "FAIL": "fail", "NOT_RUN": "not run"}
    return levels.get(outcome, "error")


def _check_case(check: Mapping[str, Any], name: str, file: str) -> ReportCase:
    """Return the ReportCase of one check or gate of the JSON, under the given name."""
    level = _case_level(check["outcome"])
    text = check["found"] if level in ("pass", "not run") else _check_text(check)
    return ReportCase(name, file, level, text, check["where"])


def _check_text(found: Mapping[str, Any]) -> str:
    """Return "found; expected ...; what to do" of a check or finding of the JSON."""
    todo = f"; {found['todo']}" if found["todo"] else ""
    return f"{found['found']}; expected {found['expected']}{todo}"
