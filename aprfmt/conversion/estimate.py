"""Estimate a conversion's memory, disk space and time, from rates measured on this machine.

The rates are measured by doing a little of the work itself: a file without a name written next to
the output and synced, SHA-256, comparing, every pair of encodings on rows of the source, and for a
remote source a range of its largest tensor, fetched as the conversion would.
"""

import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aprfmt.base.encodings import find_encoding
from aprfmt.base.processors import cpu_count
from aprfmt.conversion.options import Options
from aprfmt.formats.atomic import FileSet, NullFileSet
from aprfmt.remote.traffic import TRAFFIC

if TYPE_CHECKING:
    from aprfmt.base.protocols import Sink
    from aprfmt.conversion.outputs import Output, Plan
    from aprfmt.model import Model

WRITTEN = 32 << 20  # bytes written and synced to measure a disk
HASHED = 8 << 20
FETCHED = 32 << 20, 8  # bytes fetched to measure a network, at most, and as this part of the source
ELEMENTS = 1 << 18  # of a tensor that is decoded and encoded to measure that
BASE = 92 << 20  # resident bytes of the interpreter and numpy, measured with all modules loaded
THREAD = 2 << 20  # bytes that a thread keeps of what it has freed, its stack included
FEW = 2  # threads there are in any case
COPIES = 4  # float32 arrays of a chunk that live at a time: values, input, read back, compared


def estimate_conversion(
    model: "Model",
    dst: Path,
    plan: "Plan",
    sizes: Mapping[Path, int],
    options: Options,
    hashing: bool,
) -> dict[str, Any]:
    """Return the `estimate` of a dry run, for the plan and its target `dst`.

    Its keys are memory_bytes, disk_bytes, disk_free_bytes (None if unknown) and seconds, by kind of
    work. `sizes` are those of the files to write in bytes; `hashing` says whether the source is
    hashed.
    """
    folder = _existing_folder(dst)
    output = sum(sizes.values())
    return {
        "memory_bytes": peak_memory(model, plan, options),
        "disk_bytes": output,
        "disk_free_bytes": _free_disk_bytes(folder),
        "seconds": _seconds(model, folder, plan, output, options, hashing),
    }


def peak_memory(model: "Model", plan: "Plan", options: Options) -> int:
    """Return an upper bound of the resident bytes at the conversion's peak.

    The largest output counts once. Added are what each thread that encodes has allocated, and the
    outputs that workers have made and that wait to be written.
    """
    from aprfmt.conversion.scheduling import BUDGET

    workers = options.jobs if options.jobs > 1 else options.threads or cpu_count()
    largest = max((_output_bytes(output) for output in plan.outputs), default=0)
    metadata = sum(_metadata_bytes(value) for value in model.metadata.values())
    remote = any(output.is_remote for output in plan.outputs)
    ahead = _remote_bytes() if remote else BUDGET if options.jobs > 1 else 0
    return BASE + max(workers, FEW) * THREAD + largest + ahead + 3 * metadata


def _remote_bytes() -> int:
    """Return the bytes of memory that reading a remote source takes.

    These are the ranges being fetched, the cache, and ranges that wait to be hashed.
    """
    from aprfmt.remote.read_ahead import AHEAD, PART
    from aprfmt.remote.remote_file import KEPT
    from aprfmt.remote.stream_hash import HELD

    return 2 * AHEAD * PART + HELD + KEPT


def _output_bytes(output: "Output") -> int:
    """Return the bytes of memory that making and writing one output takes at most."""
    from aprfmt.conversion.run import CHUNK, WINDOW

    if output.part is not None:
        return output.part.packed.nbytes + 4 * COPIES * _elements(output)
    if output.copies:
        return 4 * WINDOW  # a window mapped, one written, two read back
    whole = output.runs is None or find_encoding(output.info.encoding).flat
    elements = _elements(output) if whole else min(_elements(output), CHUNK + output.info.shape[-1])
    return 4 * COPIES * elements + 4 * WINDOW


def _elements(output: "Output") -> int:
    """Return the number of elements of an output."""
    import math

    return math.prod(output.info.shape)


def _metadata_bytes(value: object) -> int:
    """Return about how many bytes of memory a metadata value takes: 64 for each item of a list."""
    if isinstance(value, str | bytes):
        return len(value)
    return 64 * len(value) if isinstance(value, Sized) else 64


def _existing_folder(path: Path) -> Path:
    """Return the nearest folder above `path` that exists."""
    folder = Path(os.path.realpath(path)).parent
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return folder


def _free_disk_bytes(folder: Path) -> int | None:
    """Return the free bytes on the disk of a folder; None if the system does not say."""
    import shutil

    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _seconds(
    model: "Model", folder: Path, plan: "Plan", output: int, options: Options, hashing: bool
) -> dict[str, float | None]:
    """Return {kind of work: seconds} with their "total".

    A value is None where a rate could not be measured. `output` is the number of bytes to write,
    `folder` where they go, `hashing` whether the source is hashed.
    """
    source = sum(tensor.info.nbytes for tensor in model.source.tensors.values())
    rate = write_rate(folder)
    piece = bytes(HASHED)
    found: dict[str, float | None] = {
        "write": None if rate is None else output / rate,
        "encode": _encoding_seconds(plan, options),
        "fetch": _fetching_seconds(plan),
        "hash": source * _time_call(lambda: hashlib.sha256(piece).digest()) / HASHED
        if hashing
        else 0,
        "verify": 0.0,
    }
    if options.verify:
        found["verify"] = (source + output) * _time_call(lambda: bytes(bytearray(piece))) / HASHED
    # The source is fetched, hashed and copied at once; the longest of the three counts.
    total = None
    if found["write"] is not None and found["fetch"] is not None:
        work = found["write"] + (found["encode"] or 0)
        total = max(work, found["hash"] or 0, found["fetch"]) + (found["verify"] or 0)
    return found | {"total": total}


def write_rate(folder: Path) -> float | None:
    """Return the bytes a second that can be written and synced in a folder; None if none can."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            piece = os.urandom(1 << 20)

            def write() -> None:
                """Write WRITTEN bytes to the temporary file and sync them: what is timed."""
                for _ in range(WRITTEN >> 20):
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())

            return WRITTEN / _time_call(write)
    except OSError:
        return None


def _encoding_seconds(plan: "Plan", options: Options) -> float:
    """Return the seconds that decoding and encoding all outputs takes.

    For each pair of encodings the time of a few rows is measured, and multiplied.
    """
    rates: dict[tuple[str, str], float] = {}
    total = 0.0
    for output in plan.outputs:
        if output.copies or output.part is not None or not _elements(output):
            continue
        pair = output.source_encoding, output.info.encoding
        if pair not in rates:
            rates[pair] = _seconds_per_element(output, options)
        total += rates[pair] * _elements(output)
    return total


def _fetching_seconds(plan: "Plan") -> float | None:
    """Return the seconds that fetching a remote source will take; 0 for a local one.

    Some bytes are fetched to measure the rate. None if the disk cache already had them: how much it
    has of the whole source is not known.
    """
    from aprfmt.conversion.outputs import stored_parts
    from aprfmt.remote.remote_file import RemoteFile

    ranges: dict[tuple[Path, int], tuple[RemoteFile, int]] = {}
    for output in plan.outputs:
        for part in (one for tensor in output.sources for one in stored_parts(tensor)):
            file, start = part.location() or (None, 0)
            if isinstance(file, RemoteFile):
                ranges[file.path, start] = file, part.info.nbytes
    source = sum(size for _, size in ranges.values())
    if not source:
        return 0.0
    (_, start), (file, size) = max(ranges.items(), key=lambda one: one[1][1])
    size = min(size, FETCHED[0], max(source // FETCHED[1], 1))
    before = TRAFFIC.received
    took = _time_call(lambda: sum(map(len, file.windows(start, start + size))))
    return took * source / size if TRAFFIC.received - before >= size else None


def _seconds_per_element(output: "Output", options: Options) -> float:
    """Return the seconds that decoding and encoding one element takes, measured on first rows."""
    from aprfmt.conversion.run import first_chunk

    made: list[int] = []
    took = _time_call(lambda: made.append(first_chunk(output, options, ELEMENTS)))
    return took / max(made[0], 1)


def _time_call(work: Callable[[], object]) -> float:
    """Return the seconds that one call of `work` takes, more than 0."""
    began = time.perf_counter()
    work()
    return max(time.perf_counter() - began, 1e-9)


def planned_sizes(
    open_sink: Callable[[FileSet], "Sink"],
    plan: Callable[["Sink"], None],
    texts: Mapping[Path, bytes],
) -> dict[Path, int]:
    """Return {path: bytes} of every file that a conversion would write; nothing is written.

    `open_sink` returns the target's sink that writes into a set of files, `plan` tells the sink
    what will be written, `texts` are the contents of text files by path.
    """
    sink = open_sink(NullFileSet())
    plan(sink)
    return {**sink.sizes, **{path: len(text) for path, text in texts.items()}}
