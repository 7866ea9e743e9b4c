"""A source that is fetched is read once: tensors are written in the order in which they lie there.

So its digest is that of the bytes as they come, and nothing comes again for it.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from aprfmt.base.columns import Columns
from aprfmt.base.crc import crc32
from aprfmt.base.protocols import ByteSource, TensorInfo
from aprfmt.conversion.options import Options
from aprfmt.conversion.outputs import Output, stored_parts
from aprfmt.conversion.run import WrittenTensor, output_chunks
from aprfmt.errors import ConversionError
from aprfmt.formats.mapped_file import MemoryTensor
from aprfmt.formats.sequential import FILES, DeferredSlot, SequentialSink
from aprfmt.remote.paths import is_remote
from aprfmt.tensors.runs import ByteRun

if TYPE_CHECKING:
    from pathlib import Path

    from aprfmt.base.protocols import LazyTensor, Sink, Source

_SMALL = 64 << 10  # bytes of a tensor that a plan may read: norms, biases, scales
_GAP = 64 << 10  # bytes between tensors that are fetched with them
_RANGES = 32  # of what lies together in a file, that are announced
_IN_MEMORY = 256 << 20  # bytes of a tensor whose rows change places, which is fetched whole


def prefetch_small_tensors(source: "Source") -> None:
    """Fetch and keep the small tensors of files that lie elsewhere, which a plan reads one by one.

    What was read around each of them would be fetched again when the large ones are written.
    """
    if not any(map(is_remote, source.files)):
        return
    from aprfmt.remote.remote_file import GAP, KEPT, RemoteFile

    ranges: dict[RemoteFile, list[tuple[int, int]]] = {}
    left = KEPT // 2
    for tensor in source.tensors.values():
        for part in stored_parts(tensor):
            lies = part.lies()
            if lies is None or not isinstance(lies[0], RemoteFile) or part.info.nbytes > _SMALL:
                continue
            left -= part.info.nbytes + GAP  # what lies between two is fetched with them
            if left > 0:
                ranges.setdefault(lies[0], []).append((lies[1], lies[1] + part.info.nbytes))
    for file, found in ranges.items():
        file.bring(found)


def writes_in_source_order(sink: "Sink", outputs: Sequence[Output]) -> bool:
    """Say whether tensors are written in the order of their source, whatever `--jobs` is."""
    fits = isinstance(sink, SequentialSink) and len(sink.files) <= FILES
    return fits and any(output.far for output in outputs)


def write_in_source_order(
    sink: SequentialSink,
    infos: Sequence[TensorInfo],
    held: "dict[str, tuple[Output, WrittenTensor]]",
    files: "Sequence[Path]",
    options: Options,
    whole: Callable[[Output, WrittenTensor, DeferredSlot], None],
    kept: Callable[[TensorInfo], bool],
) -> None:
    """Write all outputs, each into the room that is left for it; `whole` is told of each.

    `kept` says which an earlier run wrote, and leaves those as they are.
    """
    rooms = {info.name: sink.leave(info.name) for info in infos if not kept(info)}
    numbers = {path: number for number, path in enumerate(files)}
    every = sorted((held[name] for name in rooms), key=lambda row: _place(row[0], numbers))
    coming = _ranges([tensor for output, _ in every for tensor in output.sources])
    for output, record in every:
        for file, _ in _places(output.sources):
            for start, stop in coming.pop(file, ()):
                file.expect(start, stop)
        room = rooms[output.info.name]
        at = crc = 0
        for chunk in output_chunks(_brought(output), options, record):
            view = memoryview(chunk)
            room.place.put(at, view)
            at, crc = at + view.nbytes, crc32(view, crc) if room.crc else 0
        if at != room.place.nbytes:
            raise ConversionError(
                f"{output.info.name}: {at} bytes were made, {room.place.nbytes} were planned"
            )
        sink.filled(room, crc)
        whole(output, record, room)


def _ranges(tensors: "Sequence[LazyTensor]") -> dict[ByteSource, list[tuple[int, int]]]:
    """Return what will be read of each file, in order; what lies together is fetched together.

    Each is announced when its first tensor is written: every file keeps what came ahead of it.
    """
    found: dict[ByteSource, list[tuple[int, int]]] = {}
    for tensor in tensors:
        for part in stored_parts(tensor):
            lies = part.lies()
            if lies is None:
                continue
            file, start = lies
            stop = start + part.info.nbytes
            ranges = found.setdefault(file, [])
            if ranges and 0 <= start - ranges[-1][1] <= _GAP:
                ranges[-1] = ranges[-1][0], stop
            elif len(ranges) < _RANGES:
                ranges.append((start, stop))
    return found


def _places(tensors: "Sequence[LazyTensor]") -> list[tuple[ByteSource, int]]:
    """Return the file of every stored part, and where in it the part begins."""
    found = [part.lies() for tensor in tensors for part in stored_parts(tensor)]
    return [lies for lies in found if lies is not None]


def _brought(output: Output) -> Output:
    """Return an output with all of its source in memory where that is rows in another order."""
    first = output.runs[0].tensor if output.runs else None
    if not isinstance(output.runs, Columns) or first is None or first.info.nbytes > _IN_MEMORY:
        return output
    if any(run.tensor is not first for run in output.runs) or first.makes:
        return output
    tensor = MemoryTensor(first.info, first.raw())
    return replace(output, runs=[ByteRun(tensor, run.start, run.nbytes) for run in output.runs])


def _place(output: Output, numbers: "dict[Path, int]") -> tuple[int, int]:
    """Return the number of the source file and the place where an output's first bytes lie."""
    places = [(numbers.get(file.path, -1), start) for file, start in _places(output.sources)]
    return min(places, default=(-1, 0))
