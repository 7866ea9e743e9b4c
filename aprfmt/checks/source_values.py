"""The check that a file's tensors hold the values of the model it was made of."""

from typing import TYPE_CHECKING

from aprfmt.checks.records import CheckFinding, NotRun, Result, list_names

if TYPE_CHECKING:
    from aprfmt.checks.context import CheckContext

_WRONG = ("DIFFERENT", "SHAPE_DIFFERS")


def check_source_values(ctx: "CheckContext") -> Result:
    """Return a Result with a failure for each tensor whose values are not those of the source.

    Values may be rounded to the coarser of both encodings. Tensors that the file or the source
    lacks are not judged here: `accounted` does that. Raises NotRun without a source, or where no
    tensor is in both.
    """
    from aprfmt.compare import diff_models

    if ctx.source is None:
        raise NotRun("no source was given (--against SRC)")
    report = diff_models(ctx.source, ctx.model, only=("tensors",), explain=False)
    counts = {name: count for name, count in report.counts.items() if count}
    held = sum(count for name, count in counts.items() if not name.startswith("ONLY_IN_"))
    if not held:
        raise NotRun(f"no tensor is in {ctx.source.path} too")
    findings = [
        CheckFinding(
            f"{ctx.where}: {row.name_b}",
            f"{row.verdict}: "
            + (
                f"relative L2 {row.stats.rel_l2:.3g}"
                if row.stats is not None
                else f"{list(row.shape_a or ())} in the source, {list(row.shape_b or ())} here"
            ),
            "the source's values, rounded at most as its encoding rounds",
            f"aprfmt diff {ctx.source.path} {ctx.where}",
        )
        for row in report.worst()
        if row.verdict in _WRONG
    ]
    unread = [row.key for row in report.tensors if row.verdict == "UNREADABLE"]
    if unread and not findings:
        raise NotRun(f"tensors that cannot be read: {list_names(unread)}")
    return Result(", ".join(f"{count} {name}" for name, count in counts.items()), findings)
