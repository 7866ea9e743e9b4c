"""Compare and record what a resumable conversion depends on: its sources, plan and tensors."""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from aprfmt.base.version import __version__
from aprfmt.conversion.change_counts import ChangeCounts
from aprfmt.errors import OutputError, UsageError
from aprfmt.formats.mapped_file import open_bytes
from aprfmt.formats.resumable_output import FinishedTensor, ResumableFileSet
from aprfmt.formats.sequential import SequentialSink
from aprfmt.tensors.digest import file_sha256

if TYPE_CHECKING:
    from aprfmt.base.protocols import Sink, TensorInfo
    from aprfmt.conversion.options import Options
    from aprfmt.conversion.run import WrittenTensor
    from aprfmt.model import Model

# Fields of Options that decide about no byte of the output.
_FREE = ("force", "verify", "threads", "jobs", "progress", "dry_run", "resume")


def source_identities(model: "Model") -> dict[str, str]:
    """Return {file name: text} of a model's weight files; the text changes when the file does.

    Raises UsageError for a remote file without an ETag.
    """
    found = {}
    for path in model.source.files:
        file = open_bytes(path)
        try:
            if not file.identity:
                raise UsageError(
                    f"{path}: nothing says when it changes (no ETag), so that a conversion of it "
                    "cannot be continued; leave --resume out, or download it first"
                )
            found[path.name] = f"{file.identity} {file.size}"
        finally:
            file.close()
    return found


def check_resumable(options: "Options") -> None:
    """Raise UsageError for options that are functions, which a later run could not recognise."""
    if options.choose is not None or options.importance is not None:
        raise UsageError(
            "resume: choose and importance are functions; name a quantize type and an "
            "imatrix file instead"
        )


def plan_digest(sink: "Sink", options: "Options", texts: Mapping[str, str]) -> str:
    """Return the hex digest of everything besides the sources that decides the output's bytes.

    `sink` is planned; `options` are those that were asked for, `texts` the text files. Raises
    UsageError for a format that cannot be continued.
    """
    if not isinstance(sink, SequentialSink):
        raise UsageError(f"{sink.files[0]}: files of this format cannot be continued")
    matrix = file_sha256(options.imatrix) if options.imatrix is not None else ""
    unsaid: dict[str, Any] = dict.fromkeys((*_FREE, "imatrix"))
    plain = replace(options, **unsaid)
    parts = (__version__, sink.layout, matrix, repr(plain), repr(sorted(texts.items())))
    return hashlib.sha256("\n".join(parts).encode("utf-8", "surrogatepass")).hexdigest()


def skip_if_written(
    sink: "Sink", info: "TensorInfo", begun: ResumableFileSet, record: "WrittenTensor"
) -> bool:
    """Return whether an earlier run wrote this tensor correctly, so that it need not be written.

    `begun` is that run's journal. The bytes on disk are checked. If True, `record` is filled in
    from the journal.
    """
    known = begun.tensors.get(info.name)
    if known is None or not isinstance(sink, SequentialSink):
        return False
    if not sink.keep(info.name, known.crc):
        return False
    restore_record(begun, info.name, record)
    return True


def restore_record(begun: ResumableFileSet, name: str, record: "WrittenTensor") -> None:
    """Fill in `record`, a tensor's checksum and counts, from the journal of an earlier run.

    Raises OutputError where the journal `begun` does not have the tensor `name`.
    """
    known = begun.tensors.get(name)
    if known is None:
        raise OutputError(
            f"{begun.output}: the journal does not say how {name} was written; "
            "remove it, and the output, to begin anew"
        )
    record.crc, record.counts = known.crc, ChangeCounts(*known.counts)
    begun.kept += 1


def journal_entry(record: "WrittenTensor") -> FinishedTensor:
    """Return the journal's entry for a written tensor: its checksum and counts."""
    counts = record.counts
    return FinishedTensor(record.crc, (counts.changed, counts.overflowed, counts.underflowed))
