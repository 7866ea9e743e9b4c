"""`validate`: every byte of a model, by one table of checks; each is PASS, FAIL or NOT-RUN.

`inspect` is the other level: structure, no data read. A damaged file is reported, not refused: what
is wrong with it fails the check `layout`, and what the damage leaves is checked all the same.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from aprfmt.base.outcome import Check
from aprfmt.errors import AprfmtError, ArchError, FormatError, UnsupportedError
from aprfmt.validation.report import SHOWN, Finding, Noted, NotRun, Result, Validation, summed
from aprfmt.validation.table import CHECKS, CheckRow

if TYPE_CHECKING:
    from aprfmt.model import Model
    from aprfmt.validation.context import Context

__all__ = ["CHECKS", "Finding", "Validation", "validate", "validate_model"]


def validate(
    path: "Path | str",
    *,
    arch: str | None = None,
    strict: bool = False,
    allow_missing: Sequence[str] = (),
    progress: Callable[[int, int], None] | None = None,
) -> Validation:
    """Run every check of the table on a model file or folder; unknown architectures included.

    `strict` makes warnings failures; `allow_missing` are patterns of required roles whose absence
    is a warning only; `progress` is told bytes done and bytes in all. A file of which nothing can
    be read fails `layout`, and no other check runs. Raises FormatError for what is no model file,
    UnsupportedError for a version that is not read, ArchError for an unknown `arch`, UsageError
    for a wrong pattern.
    """
    from aprfmt.arch import ARCHS
    from aprfmt.model import open_model

    if arch is not None:
        _ = ARCHS[arch]
    try:
        model = open_model(path, arch=arch, partial=True, damaged=True, allow_missing=allow_missing)
    except UnsupportedError:
        raise
    except FormatError as error:
        return _unreadable(Path(path), error, strict)
    with model:
        if allow_missing:
            with suppress(ArchError):  # which is a check's to report; a wrong pattern is not
                _ = model.resolution
        return validate_model(model, arch=arch, strict=strict, progress=progress)


def _unreadable(path: Path, error: FormatError, strict: bool) -> Validation:
    """Return the report on a model of which nothing can be read.

    Raises `error` for what is no model at all.
    """
    from aprfmt.model import recognised

    try:
        kind = recognised(path)
    except AprfmtError:
        raise error from None
    finding = _finding(error)
    reason = "nothing of the file can be read; see the check layout"
    checks = [
        summed(row.name, Result("", [finding] * first), "" if first else reason, strict)
        for row in CHECKS
        for first in [row is CHECKS[0]]
    ]
    noted = (Noted(CHECKS[0].name, finding),)
    return Validation(str(path), tuple(checks), kind, strict, noted)


def _finding(error: AprfmtError) -> Finding:
    where, _, found = str(error).partition(": ")
    return Finding(where, found or str(error), "what the format and its users agree on")


def validate_model(
    model: "Model",
    *,
    arch: str | None = None,
    strict: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Validation:
    """Run every check on an open model; see `validate`."""
    from aprfmt.validation.context import Context

    context = Context(model, arch, progress)
    checks: list[Check] = []
    findings: list[Noted] = []
    for row in CHECKS:
        result, reason = _run(row, context)
        checks.append(summed(row.name, result, reason, strict))
        findings += [Noted(row.name, one) for one in result.findings[:SHOWN]]
    return Validation(str(model.path), tuple(checks), model.format, strict, tuple(findings))


def _run(row: CheckRow, context: "Context") -> tuple[Result, str]:
    """Return what a check found, and why it did not run ("" where it did)."""
    if row.formats and context.model.format not in row.formats:
        return Result(), f"a check of {' and '.join(row.formats)} files"
    try:
        return row.load()(context), ""
    except NotRun as stop:
        return Result("", stop.findings), str(stop)
    except UnsupportedError as error:
        return Result(), str(error)
    except AprfmtError as error:
        return Result("", [_finding(error)]), ""
