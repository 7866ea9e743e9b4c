"""`validate`: every byte of a model, by one table of checks; each is PASS, FAIL or NOT-RUN.

`inspect` is the other level: structure, no data read. What no reading is safe for (overlap, sizes
beyond the file, duplicates) is refused at both levels by the reader, with FormatError.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from aprfmt.errors import AprfmtError, ArchError, UnsupportedError
from aprfmt.outcome import Check
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
    is a warning only; `progress` is told bytes done and bytes in all. Raises FormatError for a
    file that cannot be opened, ArchError for an unknown `arch`, UsageError for a wrong pattern.
    """
    from aprfmt.arch import ARCHS
    from aprfmt.model import open_model

    if arch is not None:
        _ = ARCHS[arch]
    with open_model(path, arch=arch, allow_missing=allow_missing) as model:
        if allow_missing:
            with suppress(ArchError):  # which is a check's to report; a wrong pattern is not
                _ = model.resolution
        return validate_model(model, arch=arch, strict=strict, progress=progress)


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
        where, _, found = str(error).partition(": ")
        finding = Finding(where, found or str(error), "what the format and its users agree on")
        return Result("", [finding]), ""
