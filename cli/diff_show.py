"""What `aprfmt diff` prints: counts, causes, differing fields, the worst tensors."""

from collections.abc import Sequence

from aprfmt.base.named import meaning
from aprfmt.cli import render
from aprfmt.compare import DiffReport
from aprfmt.compare.diffs import CauseGroup, Explanation, FieldDiff, TensorDiff
from aprfmt.model.ledger import Pronounced

FINDINGS = 12  # causes shown
LINES = 60  # of a chat template's diff
LEFT = 8  # items shown that were not compared
_STYLES = {0: "good", 1: "bad", 2: "warn"}  # by exit code


def show(report: DiffReport, top: int, found: Pronounced) -> None:
    """Print the verdict and what it stands on, then the worst tensors."""
    render.say(found.says, style=_STYLES[found.exit])
    _not_compared(found)
    for one in report.relations:
        render.say(f"  {one.side.upper()}: {one.relation.text}", style="bad")
    _findings(report.findings)
    _derived(report.tensors)
    layouts: dict[tuple[str, ...], int] = {}
    for tensor in report.tensors:
        if tensor.layout and tensor.verdict in ("SAME_VALUES", "SAME_BYTES"):
            layouts[tensor.layout] = layouts.get(tensor.layout, 0) + 1
    for layout, count in layouts.items():
        render.line(f"  same values in {count} tensors: {render.escape(', '.join(layout))}")
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


def _not_compared(found: Pronounced) -> None:
    """List what was not compared by its meaning, and is not equal byte for byte."""
    rows = [row for row in found.not_compared if row.state != "equal"]
    if len(rows) < 2:
        return
    render.line("not compared", style="head")
    for row in render.first(rows, LEFT, "  ", "more (--json)"):
        render.say(f"  {row.says}", style="warn")


def _findings(findings: Sequence[CauseGroup]) -> None:
    """Say what explains the differing tensors, one line a cause."""
    for found in render.first(findings, FINDINGS, "  ", "more findings"):
        sure = "" if found.confirmed else " (unconfirmed)"
        many = f"{len(found.keys)} tensor{'s' if len(found.keys) > 1 else ''}"
        render.say(
            f"  {found.cause}{sure}, {many}: {found.text}",
            style="bad" if found.confirmed else "warn",
        )


def _derived(tensors: Sequence[TensorDiff]) -> None:
    """Say how many quantized tensors derive from the base, by side and by how they were made."""
    found: dict[tuple[str, str], int] = {}
    for tensor in tensors:
        for one in tensor.derivations:
            text = "not known whether they derive from base"
            if one.derives is not None:
                made = f"requantized from base, {one.mode}"
                text = made if one.derives else "do not derive from base"
            found[one.side, text] = found.get((one.side, text), 0) + 1
    for (side, text), count in found.items():
        render.line(f"  {side.upper()}: {count} tensors {text}")


def _fields(title: str, rows: Sequence[FieldDiff]) -> None:
    if not rows:
        return
    render.line(f"{title} that differ", style="head")
    for row in rows:
        origins = f"  ({row.origin_a or '-'} | {row.origin_b or '-'})" if row.origin_a else ""
        sides = f"{_said(row.name, row.a)} | {_said(row.name, row.b)}"
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
        sides = f"{_said(row.name, row.a)} | {_said(row.name, row.b)}"
        render.say(f"  {row.name}: {sides}{effect}")


def _said(name: str, value: object) -> str:
    """Return a field's value, short, with the name that its number stands for."""
    if value is None:
        return "-"
    text, called = str(value), meaning(name, value)
    return (text if len(text) <= 60 else text[:57] + "...") + (f" = {called}" if called else "")


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
    sure = "confirmed" if found.confirmed else "unconfirmed"
    after = ""
    if found.residual_after is not None:
        before = "-" if found.residual_before is None else f"{found.residual_before:.3g}"
        after = f", residual {before} to {found.residual_after:.3g}"
    render.say(f"      {sure} {found.cause}{after}")
    for sentence in found.evidence:
        render.say(f"        {sentence}")
