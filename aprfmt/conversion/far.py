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
from aprfmt.conversion.run import Written, chunks
from aprfmt.errors import ConversionError
from aprfmt.formats.mapped import MemoryTensor
from aprfmt.formats.sequential import LeftRoom, SequentialSink
from aprfmt.tensors.runs import ByteRun

if TYPE_CHECKING:
    from pathlib import Path

    from aprfmt.base.protocols import LazyTensor, Sink

_GAP = 64 << 10  # bytes between tensors that are fetched with them
_RANGES = 32  # of what lies together, that are announced
_IN_MEMORY = 256 << 20  # bytes of a tensor whose rows change places, which is fetched whole
_FILES = 192  # outputs that are open at a time: all are, until their last tensor comes


def by_place(sink: "Sink", outputs: Sequence[Output]) -> bool:
    """Say whether tensors are written in the order of their source, whatever `--jobs` is."""
    fits = isinstance(sink, SequentialSink) and len(sink.files) <= _FILES
    return fits and any(output.far for output in outputs)


def write_by_place(
    sink: SequentialSink,
    infos: Sequence[TensorInfo],
    held: "dict[str, tuple[Output, Written]]",
    files: "Sequence[Path]",
    options: Options,
    whole: Callable[[Output, Written, LeftRoom], None],
    kept: Callable[[TensorInfo], bool],
) -> None:
    """Write all outputs, each into the room that is left for it; `whole` is told of each.

    `kept` says which an earlier run wrote, and leaves those as they are.
    """
    rooms = {info.name: sink.leave(info.name) for info in infos if not kept(info)}
    numbers = {path: number for number, path in enumerate(files)}
    every = sorted((held[name] for name in rooms), key=lambda row: _place(row[0], numbers))
    _expect([tensor for output, _ in every for tensor in output.sources])
    for output, record in every:
        room = rooms[output.info.name]
        at = crc = 0
        for chunk in chunks(_brought(output), options, record):
            view = memoryview(chunk)
            room.place.put(at, view)
            at, crc = at + view.nbytes, crc32(view, crc) if room.crc else 0
        if at != room.place.nbytes:
            raise ConversionError(
                f"{output.info.name}: {at} bytes were made, {room.place.nbytes} were planned"
            )
        sink.filled(room, crc)
        whole(output, record, room)


def _expect(tensors: "Sequence[LazyTensor]") -> None:
    """Say that tensors are read one after the other: what lies together is fetched together."""
    ranges: list[tuple[ByteSource, int, int]] = []
    for tensor in tensors:
        for part in stored_parts(tensor):
            lies = part.lies()
            if lies is None:
                continue
            file, start = lies
            stop = start + part.info.nbytes
            if ranges and ranges[-1][0] is file and 0 <= start - ranges[-1][2] <= _GAP:
                ranges[-1] = file, ranges[-1][1], stop
            else:
                ranges.append((file, start, stop))
    for file, start, stop in ranges[:_RANGES]:
        file.expect(start, stop)


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
    found = [part.lies() for tensor in output.sources for part in stored_parts(tensor)]
    places = [(numbers.get(lies[0].path, -1), lies[1]) for lies in found if lies is not None]
    return min(places, default=(-1, 0))
