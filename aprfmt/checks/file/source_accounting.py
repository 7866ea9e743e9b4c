"""The check of a file against the model it was made of."""

from typing import TYPE_CHECKING

from aprfmt.checks.records import Finding, NotRun, Result

if TYPE_CHECKING:
    from aprfmt.checks.context import CheckContext


def check_accounted(ctx: "CheckContext") -> Result:
    """Return a Result with a failure for each part of the source that the file lost.

    Lost is what is neither copied nor transformed, and not recorded in the file as left out. Raises
    NotRun without a source.
    """
    from aprfmt.conversion.accounting import account_for_source, recorded_omissions

    if ctx.source is None:
        raise NotRun("no source was given (--against SRC)")
    found = account_for_source(ctx.model, ctx.source, recorded_omissions(ctx.model))
    findings = [
        Finding(
            f"{ctx.where}: {entry.name}",
            f"{entry.kind} of the source: {entry.how}",
            "everything of the source, or a record of the flag that left it out",
            "convert the source again",
        )
        for entry in found.lost
    ]
    dropped = [entry.name for entry in found.entries if entry.fate == "dropped"]
    return Result(found.says, findings, details={"dropped": dropped})
