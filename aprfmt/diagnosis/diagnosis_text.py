"""The text of a diagnosis, for `aprfmt diagnose` and for failing tests.

The *places* of a finding are the tensors, keys, operations or capture points that it names.

A and B are the two models, runs or traces that are compared; a *side* is one of them.
"""

from collections.abc import Iterator, Sequence

from aprfmt.base.sequences import NAMED
from aprfmt.compare.short_answer import PLACES, Line, short_answer
from aprfmt.diagnosis.records import Diagnosis
from aprfmt.measure.findings import Finding
from aprfmt.model.verdict import items_clause

MOST = 24  # lines under a title; JSON has all


def first_lines(result: Diagnosis, style: str = "", names: int = NAMED) -> list[Line]:
    """Return the short answer of a diagnosis, at most 12 of (line, style).

    They are verdict, cause, place, certainty, first differing token and next command. `style` is
    that of the verdict, `names` is how many places are listed.
    """
    shown = [row for row in result.findings if row.verdict not in ("same", "precision")]
    if _reason_says_cause(result):  # what follows the headline is about its cause
        shown.sort(key=lambda row: row is not result.lead)
    lead = result.lead is not None and (not result.reason or bool(result.underived_faults))
    first = sorted(shown, key=lambda row: row is not result.lead)
    causes = result.causes if lead else [row.to_named_cause(result.stored) for row in first]
    rows = [row for row in result.pronounced.not_compared if row.state != "equal"]
    open_items = [items_clause(rows).removeprefix("; not compared: ")] if rows else []
    # Rounding is judged by the values, all of them: no pass over them is owed.
    unrun = () if result.kind in ("same", "precision") else result.coverage.not_reached
    return short_answer(
        (result.sentence, style),
        causes,
        first_said=lead or _reason_says_cause(result),
        not_compared=open_items if lead else (),
        unrun=unrun,
        unmended=result.unrepaired_text,
        commands=result.next,
        source=result.a,
        names=names,
        first_token=_first_token_text(result),
    )


def _first_token_text(result: Diagnosis) -> str:
    """Return the sentence about the first token that differs; "" where none was found.

    "" too where both sides compute the same up to rounding.
    """
    row = result.facts.get("first_token")
    if row is None or result.kind in ("same", "precision"):
        return ""
    from aprfmt.measure.traces import FirstToken

    return FirstToken(**row).text


def _reason_says_cause(result: Diagnosis) -> bool:
    """Return whether the reason already contains the leading finding's sentence."""
    return result.lead is not None and result.lead.says in result.reason


def cause_lines(result: Diagnosis) -> Iterator[tuple[str, str]]:
    """Yield (line, style) of every finding: its places, and what is left without it."""
    for finding in result.findings:
        yield from _finding_lines(finding, finding is result.lead)


def _finding_lines(finding: Finding, lead: bool) -> Iterator[tuple[str, str]]:
    """Yield (line, style) of a finding; `lead`: its sentence was already printed."""
    side = f" in {finding.side}" if finding.side else ""
    name = finding.cause or "unknown cause"
    reached = ", not exercised" if finding.exercised == "not_exercised" else ""
    says = "" if lead else f": {finding.says.removeprefix(f'{name}: ')}"
    yield f"  {name}{side} ({finding.certainty}{reached}){says}", "head"
    where = ", ".join(finding.where[:4])
    if len(finding.where) > 4:
        where += f", ... {len(finding.where) - 4} more"
    if where:
        yield f"      where: {where}", ""
    if finding.residual_before is not None:
        after = "-" if finding.residual_after is None else f"{finding.residual_after:.3g}"
        of = f" ({finding.of})" if finding.of else ""
        yield f"      residual: {finding.residual_before:.3g} before, {after} after{of}", ""
    if finding.kl_before is not None and finding.exercised == "shows":
        after = "-" if finding.kl_after is None else f"{finding.kl_after:.3g}"
        yield f"      KL of the next token: {finding.kl_before:.3g} nats before, {after} after", ""


def titled_lines(title: str, rows: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (line, style) of a title and its rows; nothing without rows.

    Rows that differ in places and numbers only become one line. At most MOST lines are yielded.
    """
    lines: dict[str, list[str]] = {}
    for text in dict.fromkeys(rows):
        lines.setdefault(text if title == "next" else PLACES.sub("#", text), []).append(text)
    if lines:
        yield title, "head"
    for same in list(lines.values())[:MOST]:
        more = f" (and {len(same) - 1} more like this)" if len(same) > 1 else ""
        yield f"  {same[0]}{more}", ""
    if len(lines) > MOST:
        yield f"  ... {len(lines) - MOST} more (--json)", "dim"


def evidence_lines(result: Diagnosis) -> Iterator[tuple[str, str]]:
    """Yield (line, style) of the evidence, in the order in which it was found."""
    yield from titled_lines("evidence", [f"{row.level:8}  {row.says}" for row in result.evidence])


def coverage_lines(result: Diagnosis) -> Iterator[tuple[str, str]]:
    """Yield (line, style) of what was run, compared and not reached, and the next steps."""
    seen = result.coverage
    yield from titled_lines("run", seen.run)
    yield from titled_lines("compared, not run", seen.compared)
    yield from titled_lines("not reached", seen.not_reached)
    yield from titled_lines("checked", result.checked)
    yield from titled_lines("not checked", result.not_checked)
    yield from titled_lines("next", result.next)


def report_text(result: Diagnosis) -> str:
    """Return the text of the whole report, without the table of points."""
    lines = [result.sentence]
    for part in (cause_lines, evidence_lines, coverage_lines):
        lines += [line for line, _ in part(result)]
    return "\n".join(lines)
