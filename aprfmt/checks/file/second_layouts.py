"""Checks that parameters which a file stores in two layouts have the same values in both."""

from aprfmt.causes.tensor.second_layouts import (
    drop_command,
    names_text,
    second_layouts,
    stored_names,
)
from aprfmt.checks.context import CheckContext
from aprfmt.checks.records import CheckFinding, NotRun, Result


def check_second_layouts(ctx: CheckContext) -> Result:
    """Return a Result that fails where one parameter is stored in two layouts with other values.

    A parameter that is stored in two layouts with the same values is a warning. Raises NotRun where
    nothing is stored in two layouts.
    """
    found = list(second_layouts(ctx.model))
    if not found:
        raise NotRun("no parameter is stored in two layouts")
    ctx.compared.update(
        name for one in found if one.verdict != "UNREADABLE" for name in one.second.names
    )
    findings = []
    stale = [one for one in found if not one.is_copy and one.verdict != "UNREADABLE"]
    for one in stale:
        what = f"{names_text([one.second])} and {names_text([one.first])} are the same parameter"
        if one.lacks:
            what += f" (without {one.lacks} of its experts)"
        findings.append(
            CheckFinding(
                one.second.name,
                f"{what} in two layouts, with other values",
                "one layout, or the same values in both",
                "loaders differ in which they take: leave the older ones out (convert --drop)",
            )
        )
    copies = [one.second for one in found if one.is_copy]
    if copies:
        findings.append(
            CheckFinding(
                ctx.where,
                f"{len(copies)} parameters are stored twice, in two layouts, with the same values: "
                f"{names_text(copies)}",
                "one layout",
                "" if stale else drop_command(ctx.model, stored_names(copies)),
                "warning",
            )
        )
    return Result(f"{len(found)} parameters in two layouts", findings)
