"""The checks of `validate`: every byte of a file, with PASS, FAIL or NOT-RUN for each check.

An *item* is one thing that a model is made of: a file, a tensor, a key, a text.

The checks are rows of one table; its other rows are the gates of `qa`
(aprfmt.checks.gates.running). A damaged file is reported, not refused: what is wrong with it fails
the check `layout`, and what the damage leaves is checked all the same. `inspect` looks at structure
only, and reads no data.
"""

import warnings
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from aprfmt.arch import check_arch
from aprfmt.base.budget import Budget
from aprfmt.base.outcome import check
from aprfmt.checks.records import Answer, CheckFinding, Measure, NotRun, Result, Validation
from aprfmt.checks.table import SECOND_READER, CheckRow, file_checks
from aprfmt.errors import AprfmtError, ArchError, FormatError, UnsupportedError
from aprfmt.model import Model, open_model, recognize_format
from aprfmt.remote.paths import parse_location
from aprfmt.remote.stream_hash import checked_by_published_digests

__all__ = [
    "Answer", "CheckFinding", "CheckRow", "Measure", "NotRun", "Result", "Validation", "check",
    "validate", "validate_model",
]  # fmt: skip

if not TYPE_CHECKING:  # else every name of this module would have a type

    def __getattr__(name: str) -> object:
        """Return CheckFinding for `Finding`, its name before 0.2, with a DeprecationWarning."""
        if name != "Finding":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        warnings.warn(
            "aprfmt.checks.Finding is called CheckFinding", DeprecationWarning, stacklevel=2
        )
        return CheckFinding


UNREAD = "it reads every stored byte, which was not asked for"


def validate(
    path: Path | str,
    *,
    arch: str | None = None,
    strict: bool = False,
    allow_missing: Sequence[str] = (),
    against: "Path | str | None" = None,
    second_reader: bool = False,
    accept: Collection[str] = (),
    budget: Budget | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Validation:
    """Return the answers of all checks on a model file or folder, of any architecture.

    `against` is what the model was made of: the check `accounted` compares the two. With
    `second_reader` the format's official library reads the file too. Without a `budget` the bytes
    of a remote file are compared with the SHA-256 that its site publishes. `strict` makes warnings
    failures. `allow_missing` are patterns of required roles whose absence is a warning only.
    `accept` are `unread:PATTERN`s of items that no warning is given for. Checks that `budget` does
    not allow are NOT_RUN, and the verdict is open then; all checks that read every stored byte are
    allowed or left out together. `progress` is called with (bytes done, bytes in all). A file of
    which nothing can be read fails `layout`, and no other check runs. Raises FormatError for what
    is no model file, UnsupportedError for a version that is not read, ArchError for an unknown
    `arch`, UsageError for a wrong pattern, RemoteError for bytes that are not those published.
    """
    check_arch(arch)
    try:
        model = open_model(path, arch=arch, partial=True, damaged=True, allow_missing=allow_missing)
    except UnsupportedError:
        raise
    except FormatError as error:
        return _report_unreadable(parse_location(path), error, strict, second_reader)
    with ExitStack() as opened:
        opened.enter_context(model)
        source = None if against is None else opened.enter_context(open_model(against))
        if allow_missing:
            with suppress(ArchError):  # which is a check's to report; a wrong pattern is not
                _ = model.resolution
        if budget is None:
            opened.enter_context(checked_by_published_digests(model.source.files))
        return validate_model(
            model,
            arch=arch,
            strict=strict,
            source=source,
            second_reader=second_reader,
            accept=accept,
            budget=budget,
            progress=progress,
        )


def _report_unreadable(
    path: Path, error: FormatError, strict: bool, second_reader: bool
) -> Validation:
    """Return the report on a file that cannot be opened: `layout` fails, the others are NOT_RUN.

    With `second_reader` that check is in the report too. Raises `error` again for a file that is no
    model at all.
    """
    from aprfmt.checks.check_runner import error_finding, make_answer

    try:
        kind = recognize_format(path)
    except AprfmtError:
        raise error from None
    first, *others = file_checks(second_reader=second_reader)
    why = "nothing of the file can be read; see the check layout"
    answers = [make_answer(first, Result(findings=[error_finding(error)]), "")]
    answers += [make_answer(row, Result(), why) for row in others]
    return Validation(str(path), tuple(answers), kind, strict)


def validate_model(
    model: Model,
    *,
    arch: str | None = None,
    strict: bool = False,
    whole: bool = True,
    source: "Model | None" = None,
    second_reader: bool = False,
    accept: Collection[str] = (),
    budget: Budget | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Validation:
    """Return the answers of all checks on an open model; see `validate`.

    Without `whole` the checks that read every stored byte are NOT_RUN. `source` is the model that
    this one was made of. With `second_reader` another library reads the file too.
    """
    from aprfmt.checks.check_runner import make_answer, run_check
    from aprfmt.checks.context import CheckContext

    context = CheckContext(model, arch, progress, source, accept)
    budget = budget or Budget()
    nbytes = sum(tensor.info.nbytes for tensor in model.source.tensors.values())
    answers, asked = [], [SECOND_READER] if second_reader else []
    for row in file_checks(source=source is not None, second_reader=second_reader):
        if row.reads_all_bytes and not whole:
            answers.append(make_answer(row, Result(), UNREAD))
            continue
        if budget.has_time() and budget.has_room(nbytes * row.reads_all_bytes):
            with budget.in_force() as reading:
                answers.append(run_check(row, context, strict=strict))
            if not reading.over:
                continue
        answers.append(make_answer(row, Result(), budget.reason))
        asked.append(row.name)
    return Validation(
        str(model.path),
        tuple(answers),
        model.format,
        strict,
        context.ledger,
        tuple(accept),
        context.shared.get(SECOND_READER),
        asked,
        {name: row.unread for name, row in context.scanned.items() if row.unread},
        context.compared,
    )
