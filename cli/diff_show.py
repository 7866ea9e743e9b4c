"""What `aprfmt diff` prints: the answer; with -v causes, fields and the worst tensors too."""

from collections import Counter
from collections.abc import Iterator, Sequence

from aprfmt.cli import output_format, render
from aprfmt.compare import DiffReport
from aprfmt.compare.short_answer import Line, short_answer
from aprfmt.measure.findings import Finding
from aprfmt.measure.named_causes import share_text
from aprfmt.measure.records import EQUAL, Explanation, FieldDiff, TensorDiff
from aprfmt.model.ledger import Pronounced

TOP = 10  # worst tensors shown with -v
FINDINGS = 12  # causes shown
LINES = 60  # of a chat template's diff
LEFT = 8  # items shown that were not compared
_STYLES = {0: "good", 1: "bad", 2: "warn"}  # by exit code


def show(report: DiffReport, found: Pronounced, verbose: bool, top: int | None) -> None:
    """Print the answer in a few lines; `verbose` or a number of worst tensors: all there is."""
    if verbose or top is not None:
        _everything(report, TOP if top is None else top, found)
        return
    headline = found.says, _STYLES[found.exit]
    lines = short_answer(
        headline, report.causes, first_said=False, others=list(_others(report)),
        commands=report.next if found.exit else (), names=output_format.shown_names(),
    )  # fmt: skip
    for text, style in lines:
        render.say(text, style=style)


def _others(report: DiffReport) -> Iterator[Line]:
    """Yield a line for each kind of difference that no cause speaks of."""
    known = {role for cause in report.causes for role in cause.roles}
    apart = [row for row in report.worst() if row.verdict not in (*EQUAL, "WITHIN")]
    left = [row for row in apart if row.key not in known]
    if left:
        name = left[0].name_b or left[0].name_a
        role = f" ({left[0].key})" if name != left[0].key else ""
        more = f", and {len(left) - 1} more (-v)" if len(left) > 1 else ""
        yield f"  {left[0].verdict}: {name}{role}{more}", "bad"
    for title, rows in (
        ("hyperparameters", report.hyperparameters), ("tokenizer", report.tokenizer),
        ("metadata", report.metadata),
    ):  # fmt: skip
        counted = [row for row in rows if row.decisive or title in report.asked]
        if counted:
            one = counted[0]
            more = f"; {len(counted) - 1} more (-v)" if len(counted) > 1 else ""
            sides = f"{render.field_text(one.name, one.a)} | {render.field_text(one.name, one.b)}"
            yield f"  {title} that differ: {one.name}: {sides}{more}", "bad"
    if report.beside is not None and report.beside.says:
        yield f"  {report.beside.says}", "bad"
    for tensor in report.tensors:  # equal sides that both hold NaN or infinities
        if tensor not in apart and tensor.stats is not None and tensor.stats.nonfinite is not None:
            yield f"  {tensor.verdict}  {tensor.key}: {tensor.stats.nonfinite.says()}", "warn"
    for text in (*_derived(report.tensors), *_layouts(report.tensors)):
        yield text, ""


def _everything(report: DiffReport, top: int, found: Pronounced) -> None:
    """Print the verdict and what it stands on, then the worst tensors."""
    render.say(found.says, style=_STYLES[found.exit])
    _not_compared(found)
    for one in report.relations:
        render.say(f"  {one.side.upper()}: {one.relation.text}", style="bad")
    _findings(report.findings)
    for text in (*_derived(report.tensors), *_layouts(report.tensors)):
        render.say(text)
    _fields("hyperparameters", report.hyperparameters)
    if report.beside is not None and report.beside.says:
        render.line(report.beside.says, style="bad")
    _fields("tokenizer", report.tokenizer)
    _texts(report)
    _fields("metadata", report.metadata)
    shown = [t for t in report.worst() if t.verdict not in ("SAME_BYTES", "SAME_VALUES")][:top]
    if shown:
        render.line("worst tensors", style="head")
    for tensor in shown:
        _tensor(tensor)
    for tensor in report.tensors:  # equal sides that both hold NaN or infinities
        if tensor not in shown and tensor.stats is not None and tensor.stats.nonfinite is not None:
            said = f"  {tensor.verdict}  {tensor.key}: {tensor.stats.nonfinite.says()}"
            render.say(said, style="warn")
    left = sum(t.verdict not in ("SAME_BYTES", "SAME_VALUES") for t in report.tensors) - len(shown)
    if left > 0:
        render.line(f"... {left} more (--top, --json)", style="dim")
    for command in report.next if found.exit else ():
        if command.endswith(" -v"):
            continue  # this is what it would print
        render.say(f"next: {command}", style="head")


def _not_compared(found: Pronounced) -> None:
    """List what was not compared by its meaning, and is not equal byte for byte."""
    rows = [row for row in found.not_compared if row.state != "equal"]
    if len(rows) < 2:
        return
    render.line("not compared", style="head")
    for row in render.first_rows(rows, LEFT, "  ", "more (--json)"):
        render.say(f"  {row.says}", style="warn")


def _findings(findings: Sequence[Finding]) -> None:
    """Say what explains the differing tensors, one line a cause."""
    for found in render.first_rows(findings, FINDINGS, "  ", "more findings"):
        sure = "" if found.certainty == "confirmed" else f" ({found.certainty})"
        many = f"{len(found.keys)} tensor{'s' if len(found.keys) > 1 else ''}"
        render.say(
            f"  {found.cause}{sure}, {many}: {found.says}",
            style="bad" if found.confirmed else "warn",
        )


def _layouts(tensors: Sequence[TensorDiff]) -> Iterator[str]:
    """Yield what formats did to equal values, with the number of tensors."""
    layouts = Counter(row.layout for row in tensors if row.layout and row.verdict in EQUAL)
    for layout, count in layouts.items():
        yield f"  same values in {count} tensors: {', '.join(layout)}"


def _derived(tensors: Sequence[TensorDiff]) -> Iterator[str]:
    """Yield how many quantized tensors derive from the base, by side and by how they were made."""
    found: dict[tuple[str, str], int] = {}
    for tensor in tensors:
        for one in tensor.derivations:
            text = "not known whether they derive from base"
            if one.derives is not None:
                made = f"requantized from base, {one.mode}"
                text = made if one.derives else "do not derive from base"
            found[one.side, text] = found.get((one.side, text), 0) + 1
    for (side, text), count in found.items():
        yield f"  {side.upper()}: {count} tensors {text}"


def _fields(title: str, rows: Sequence[FieldDiff]) -> None:
    if not rows:
        return
    render.line(f"{title} that differ", style="head")
    for row in rows:
        origins = f"  ({row.origin_a or '-'} | {row.origin_b or '-'})" if row.origin_a else ""
        sides = f"{render.field_text(row.name, row.a)} | {render.field_text(row.name, row.b)}"
        render.say(f"  {row.name}: {sides}{origins}", style="bad" if row.decisive else "")


def _texts(report: DiffReport) -> None:
    """Show the chat templates as a unified diff, and what differs of the generation configs."""
    if report.template:
        render.line("chat template", style="head")
    for text in report.template[:LINES]:
        style = {"+": "good", "-": "bad"}.get(text[:1], "")
        render.say(f"  {text}", style=style)
    if len(report.template) > LINES:
        render.line(f"  ... {len(report.template) - LINES} more lines (--json)", style="dim")
    if report.generation:
        render.line("generation config that differs", style="head")
    for row in report.generation:
        effect = f" ({row.effect})" if row.effect else ""
        sides = f"{render.field_text(row.name, row.a)} | {render.field_text(row.name, row.b)}"
        render.say(f"  {row.name}: {sides}{effect}")


def _tensor(tensor: TensorDiff) -> None:
    names = " | ".join(name or "-" for name in (tensor.name_a, tensor.name_b))
    encodings = f"{tensor.encoding_a or '-'} | {tensor.encoding_b or '-'}"
    cause = f" ({tensor.cause})" if tensor.cause else ""
    render.say(f"  {tensor.verdict}{cause}  {tensor.key}  {encodings}")
    render.say(f"      {names}", style="dim")
    if tensor.shape_a != tensor.shape_b:
        shapes = f"{render.shape_text(tensor.shape_a)} | {render.shape_text(tensor.shape_b)}"
        render.line(f"      shape {shapes}")
    if tensor.layout:
        render.say(f"      {', '.join(tensor.layout)}")
    if tensor.first_byte is not None:
        render.line(f"      first differing byte {tensor.first_byte}")
    stats = tensor.stats
    if stats is not None:
        at = list(stats.max_at) if stats.max_at is not None else "-"
        render.line(
            f"      {stats.changed} of {stats.count} values differ, relL2 {stats.rel_l2:.3g}, "
            f"max abs {stats.max_abs_diff:.6g} at {at}, cosine {stats.cosine:.9f}, "
            f"{stats.ulp} ulp"
        )
        if stats.nonfinite is not None:
            render.line(
                f"      NaN {stats.nan_a} | {stats.nan_b}, Inf {stats.inf_a} | {stats.inf_b}: "
                f"{stats.nonfinite.says()}",
                style="bad",
            )
    if tensor.explanation is not None:
        _explanation(tensor.explanation)
    if tensor.steps_off is not None:
        render.line(f"      at most {tensor.steps_off:.3g} steps of the coarser encoding apart")


def _explanation(found: Explanation) -> None:
    sure = found.certainty + share_text(found.share)
    after = ""
    if found.residual_after is not None:
        before = "-" if found.residual_before is None else f"{found.residual_before:.3g}"
        after = f", residual {before} to {found.residual_after:.3g}"
    render.say(f"      {sure} {found.cause}{after}")
    for sentence in found.evidence:
        render.say(f"        {sentence}")
