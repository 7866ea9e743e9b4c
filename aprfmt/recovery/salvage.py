"""Writes the undamaged tensors of a damaged file to a new file."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aprfmt.base.protocols import Damage, Source, TypedValue, Value, tensor_damage
from aprfmt.errors import FormatError, UsageError
from aprfmt.formats import FORMATS, open_sink, open_source
from aprfmt.tensors.runs import all_runs, byte_windows

MISSING = "aprfmt.repair.missing"  # key of the output: the names left out, one a line


@dataclass
class SalvageResult:
    """The tensors that were written, and {name: why} of those that were not."""

    kept: list[str]
    missing: dict[str, str]
    damage: list[Damage]


def salvage(broken: Path, output: Path, *, force: bool = False) -> SalvageResult:
    """Write the tensors of `broken` that are whole to `output`, and return which they are.

    The format stays the same. The metadata are kept; one more key lists what is missing, where
    something is. Bytes after the last tensor are left out. Raises FormatError where the header
    cannot be read, or names no tensor that is whole; UsageError where nothing is wrong, or where
    `output` is `broken` itself and tensors of it would be lost.
    """
    with open_source(broken, partial=True, damaged=True) as source:
        missing = {name: why for name, one in source.tensors.items() if (why := tensor_damage(one))}
        kept = [name for name in source.tensors if name not in missing]
        longer = any(note.key == "trailing_bytes" for note in source.notes)
        if not missing and not source.damage and not longer:
            raise UsageError(
                f"{broken}: nothing of it is missing or damaged; there is nothing to do"
            )
        if missing and output.is_file() and output.samefile(broken):
            raise UsageError(
                f"{output}: is the damaged file itself, and {len(missing)} of its tensors would be "
                "left out for good; name another file with -o"
            )
        if not kept:
            raise FormatError(f"{broken}: no tensor of it is sound; get the file again")
        spec = FORMATS[source.format]
        infos = spec.order([source.tensors[name].info for name in kept])
        with open_sink(output, source.format, force=force) as sink:
            sink.plan(_output_metadata(source, missing), infos)
            for info in infos:
                data = byte_windows(all_runs(source.tensors[info.name]))
                sink.write(info.name, (memoryview(window) for window in data))
        return SalvageResult(kept, missing, list(source.damage))


def _output_metadata(source: Source, missing: Mapping[str, str]) -> dict[str, Value | TypedValue]:
    """Return {key: value} for the output: the file's metadata with their types.

    Keys about shards are left out. A key is added that lists the missing tensors, if there are any.
    """
    own = FORMATS[source.format].values.writer_keys
    found: dict[str, Any] = {}
    for key in source.metadata:
        if any(key.startswith(prefix) for prefix in own):
            continue  # a key about the split; the output is one file
        with suppress(FormatError):
            value = source.metadata[key]
            kind = source.types.get(key, "")
            found[key] = TypedValue(value, kind) if kind else value
    return {**found, MISSING: "\n".join(missing)} if missing else found
