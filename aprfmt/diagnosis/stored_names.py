"""Compares two models by stored tensor names, where an architecture is not known."""

from collections import Counter
from dataclasses import replace

from aprfmt.compare import diff_models
from aprfmt.compare.diffs import DiffReport
from aprfmt.diagnosis.found import Diagnosis, Evidence
from aprfmt.diagnosis.models import relation_findings
from aprfmt.diagnosis.tensors import explained_findings
from aprfmt.diagnosis.unread import refusal_reason
from aprfmt.measure.findings import Finding
from aprfmt.measure.records import EQUAL
from aprfmt.model import Model

_SHOWN = 12


def compare_by_name(texts: tuple[str, str], a: Model, b: Model) -> Diagnosis:
    """Return the diagnosis from stored tensors and tokenizers alone.

    It says what could not be compared, and how to enable that. Without a difference the reason
    says what was equal: exit 2, since the rest was not compared.
    """
    # The causes that `diff` names, each with its remedy.
    report = diff_models(a, b, only=("tensors", "tokenizer"))
    findings = list(relation_findings(report, {"A": a, "B": b}))
    mends = {one.cause: one.remedy.command for one in report.causes if one.remedy is not None}
    findings += [
        replace(finding, next=finding.next or mends.get(finding.cause, ""))
        for finding, _ in explained_findings(report, set())
    ]
    # Differing tensors that no cause covers.
    named = {key for finding in findings for key in finding.where}
    apart = tuple(row.key for row in report.tensors if row.verdict not in EQUAL)
    left = tuple(key for key in apart if key not in named)
    if left:
        shown = ", ".join(left[:4]) + (", ..." if len(left) > 4 else "")
        findings.append(
            Finding("", f"{len(left)} tensors differ: {shown}", "tensor", "bug", left, False)
        )
    # Evidence, and why roles and hyperparameters were not compared.
    counts = Counter(row.verdict for row in report.tensors)
    said = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    evidence = [Evidence("tensor", f"{len(report.tensors)} tensors: {said}", apart[:_SHOWN])]
    evidence += [
        Evidence("config", f"tokenizer, {row.name}: A {row.a}, B {row.b}")
        for row in report.tokenizer
        if row.decisive
    ]
    why = [
        f"{label}: {text}"
        for label, model in (("A", a), ("B", b))
        if (text := refusal_reason(model))
    ]
    return Diagnosis(
        *texts,
        tuple(findings),
        tuple(evidence),
        ("tensors: by their stored names", "tokenizer: as diff compares it"),
        (
            *why,
            "hyperparameters and forward pass: they need the architecture of both; name it with "
            "--arch, or correct what its line says",
        ),
        "" if findings else _comparison_limits_text(report),
    )


def _comparison_limits_text(report: DiffReport) -> str:
    """Return the reason of a diagnosis that found equal tensors but could run no pass."""
    apart = [row.name for row in report.tokenizer if row.decisive]
    if apart:
        return (
            f"the tensors are equal, the tokenizers differ ({', '.join(apart)}); no pass was made"
        )
    return (
        f"equal in what was compared: {len(report.tensors)} tensors by their stored names, and the "
        "tokenizer; not compared: hyperparameters and forward pass"
    )
