"""Write a conversion's outputs in order, by several worker threads, or in the source's order.

A *piece* is some rows or bytes of an output that one worker makes and writes. A *slot* is the range
of a file that is reserved for an output. A *part* is one of the tensors that a packed weight is
stored as.

Tensors are written one after the other, on several workers (`WorkerPool`), or in the order in which
a fetched source holds them (`write_in_source_order`), so that it is read once. The bytes are the
same each time. Kernels, numpy and the system let go of the interpreter, so the workers are threads.
They make and write pieces of tensors in any order, as far ahead as BUDGET allows; what follows from
a tensor that is whole (the journal's line, reading it back) is done by the thread that hands out.
"""

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Self

from aprfmt.base.columns import Columns
from aprfmt.base.crc import crc32
from aprfmt.base.encodings import find_encoding
from aprfmt.base.protocols import ByteSource, TensorInfo
from aprfmt.conversion.change_counts import ChangeCounts
from aprfmt.conversion.encoding_choice import column_importances
from aprfmt.conversion.options import Options
from aprfmt.conversion.outputs import Output, stored_parts
from aprfmt.conversion.run import (
    BAND,
    CHUNK,
    WINDOW,
    RowPiece,
    WrittenTensor,
    check_overflow,
    copied_bytes,
    count_lost_codes,
    decoded_pieces,
    encode_piece,
    output_chunks,
    recodable_rows,
)
from aprfmt.errors import ConversionError
from aprfmt.formats.crc_combine import combine_crcs
from aprfmt.formats.mapped_file import MemoryTensor, in_mapped_file
from aprfmt.formats.output_file import OutputFile
from aprfmt.formats.sequential import FILES, DeferredSlot, SequentialSink
from aprfmt.remote.paths import is_remote
from aprfmt.tensors.runs import ByteRun, RunBytes

if TYPE_CHECKING:
    from pathlib import Path

    from aprfmt.base.protocols import LazyTensor, Sink, Source
    from aprfmt.conversion.outputs import Plan
    from aprfmt.conversion.verification import Verifier
    from aprfmt.formats.resumable_output import ResumableFileSet


_SMALL = 64 << 10  # bytes of a tensor that a plan may read: norms, biases, scales
_GAP = 64 << 10  # bytes between tensors that are fetched with them
_RANGES = 32  # of what lies together in a file, that are announced
_IN_MEMORY = 256 << 20  # bytes of a tensor whose rows change places, which is fetched whole


def prefetch_small_tensors(source: "Source") -> None:
    """Fetch and cache the small tensors of remote files, which a plan reads one by one.

    Otherwise the bytes around each of them, which are fetched too, would be fetched again later.
    Does nothing for local files.
    """
    if not any(map(is_remote, source.files)):
        return
    from aprfmt.remote.remote_file import GAP, KEPT, RemoteFile

    ranges: dict[RemoteFile, list[tuple[int, int]]] = {}
    left = KEPT // 2
    for tensor in source.tensors.values():
        for part in stored_parts(tensor):
            place = part.location()
            if place is None or not isinstance(place[0], RemoteFile) or part.info.nbytes > _SMALL:
                continue
            left -= part.info.nbytes + GAP  # what lies between two is fetched with them
            if left > 0:
                ranges.setdefault(place[0], []).append((place[1], place[1] + part.info.nbytes))
    for file, found in ranges.items():
        file.bring(found)


def writes_in_source_order(sink: "Sink", outputs: Sequence[Output]) -> bool:
    """Return whether tensors are written in the order of their source, whatever `--jobs` is.

    That is so where a source is fetched and the sink can leave room for tensors.
    """
    fits = isinstance(sink, SequentialSink) and len(sink.files) <= FILES
    return fits and any(output.is_remote for output in outputs)


def write_in_source_order(
    sink: SequentialSink,
    infos: Sequence[TensorInfo],
    outputs: "dict[str, tuple[Output, WrittenTensor]]",
    files: "Sequence[Path]",
    options: Options,
    on_finished: Callable[[Output, WrittenTensor, DeferredSlot], None],
    already_written: Callable[[TensorInfo], bool],
) -> None:
    """Write all outputs in the order of the source, each into its reserved slot of the file.

    `outputs` is {name: (output, record)}, `files` the source's files in order. `on_finished` is
    called after each output. `already_written` says which outputs an earlier run wrote; these are
    not written. Raises ConversionError where an output has another size than planned.
    """
    slots = {info.name: sink.defer_tensor(info.name) for info in infos if not already_written(info)}
    numbers = {path: number for number, path in enumerate(files)}
    every = sorted(
        (outputs[name] for name in slots), key=lambda row: _source_order_key(row[0], numbers)
    )
    coming = _read_ranges([tensor for output, _ in every for tensor in output.sources])
    for output, record in every:
        for file, _ in _part_offsets(output.sources):
            for start, stop in coming.pop(file, ()):
                file.expect(start, stop)
        slot = slots[output.info.name]
        at = crc = 0
        for chunk in output_chunks(_load_reordered(output), options, record):
            view = memoryview(chunk)
            slot.place.put(at, view)
            at, crc = at + view.nbytes, crc32(view, crc) if slot.crc else 0
        if at != slot.place.nbytes:
            raise ConversionError(
                f"{output.info.name}: {at} bytes were made, {slot.place.nbytes} were planned"
            )
        sink.record_filled(slot, crc)
        on_finished(output, record, slot)


def _read_ranges(tensors: "Sequence[LazyTensor]") -> dict[ByteSource, list[tuple[int, int]]]:
    """Return {file: [(start, stop)]} of the bytes that will be read, in order.

    Tensors that are close together are one range. Each is announced when its first tensor is
    written: every file caches what was fetched ahead.
    """
    found: dict[ByteSource, list[tuple[int, int]]] = {}
    for tensor in tensors:
        for part in stored_parts(tensor):
            location = part.location()
            if location is None:
                continue
            file, start = location
            stop = start + part.info.nbytes
            ranges = found.setdefault(file, [])
            if ranges and 0 <= start - ranges[-1][1] <= _GAP:
                ranges[-1] = ranges[-1][0], stop
            elif len(ranges) < _RANGES:
                ranges.append((start, stop))
    return found


def _part_offsets(tensors: "Sequence[LazyTensor]") -> list[tuple[ByteSource, int]]:
    """Return (file, offset of the first byte) of every stored tensor that is in a file.

    Of a packed weight these are its parts.
    """
    found = [part.location() for tensor in tensors for part in stored_parts(tensor)]
    return [location for location in found if location is not None]


def _load_reordered(output: Output) -> Output:
    """Return an output whose source is in memory, if rows of one small tensor are reordered.

    Other outputs are returned unchanged.
    """
    first = output.runs[0].tensor if output.runs else None
    if not isinstance(output.runs, Columns) or first is None or first.info.nbytes > _IN_MEMORY:
        return output
    if any(run.tensor is not first for run in output.runs) or first.makes:
        return output
    tensor = MemoryTensor(first.info, first.raw())
    return replace(output, runs=[ByteRun(tensor, run.start, run.nbytes) for run in output.runs])


def _source_order_key(output: Output, numbers: "dict[Path, int]") -> tuple[int, int]:
    """Return (number of the source file, offset) of an output's first bytes, to sort by.

    `numbers` is {path: number of the file}. The result is (-1, 0) for an output that no file holds.
    """
    places = [(numbers.get(file.path, -1), start) for file, start in _part_offsets(output.sources)]
    return min(places, default=(-1, 0))


BUDGET = 640 << 20  # bytes of values and results that workers hold; one piece may be larger
HELD = 16  # bytes an element takes: read, decoded, encoded, read back
RECODED = 4  # the same where a kernel does all of it
LARGE = 4 * CHUNK  # elements of a tensor that is one piece, and made by all
EACH = 4  # pieces handed out for each worker, at most
AT_LEAST = 2  # workers: what lies in no file is made by one while the other writes


@dataclass(frozen=True)
class PlacedPiece:
    """A piece that was written: its size, its CRC-32 if that is needed, and counts of changes.

    The result of counting lost codes has `counts` None.
    """

    nbytes: int = 0
    crc: int = 0
    counts: ChangeCounts | None = None
    lost_codes: int | None = None


@dataclass
class _TensorInWork:
    """A tensor that workers write, and how many of its bytes they have written."""

    output: Output
    written: WrittenTensor
    slot: DeferredSlot
    nbytes: int = 0


PieceWork = tuple[int, Callable[[], PlacedPiece]]
GivesWork = Callable[[DeferredSlot], Iterator[PieceWork]]
FileWork = Iterator[tuple[_TensorInWork, PieceWork | None]]  # None after a tensor's last piece


class WorkerPool:
    """A context manager whose workers write the outputs they are given.

    With one job they write only what is in no file: repacks, and parts of weights. With several
    they begin when all are given, and take a piece of each shard in turn, of as many shards as
    there are workers: the system lets one at a time write into a file, and make its pages where it
    lies in memory. `whole` is called for every tensor when all of it is written, in the order of a
    shard.
    """

    def __init__(
        self,
        sink: SequentialSink,
        options: Options,
        on_finished: Callable[[Output, WrittenTensor, DeferredSlot], None],
    ) -> None:
        """Start a pool of `options.jobs` workers, at least two, that write into `sink`.

        `on_finished` is called after each output.
        """
        self._sink, self._options, self._on_finished = sink, options, on_finished
        self._workers = max(options.jobs, AT_LEAST)
        self._pool = ThreadPoolExecutor(self._workers, "aprfmt-jobs")
        self._most = EACH * self._workers  # pieces that are handed out at a time
        self._making = threading.Lock()
        self._queued: dict[OutputFile, list[tuple[_TensorInWork, GivesWork]]] = {}
        self._waiting: deque[tuple[_TensorInWork, Future[PlacedPiece] | None]] = deque()
        self._held = self._out = 0  # bytes, and pieces, that workers have
        self._freed = threading.Condition()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        """Cancel the pieces that no worker has begun, and wait for the others."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def write(self, output: Output, written: WrittenTensor) -> bool:
        """Hand a tensor to the workers; return False where the caller has to write it itself.

        `written` is the record that they fill in. Tensors are handed over in the planned order.
        Raises what went wrong with an earlier one.
        """
        tasks = self._tasks(output)
        if tasks is None:
            return False
        begun = _TensorInWork(output, written, self._sink.defer_tensor(output.info.name))
        self._queued.setdefault(begun.slot.place.file, []).append((begun, tasks))
        if self._options.jobs == 1 or len(self._queued) > FILES:
            self._hand_out()
        return True

    def wait(self) -> None:
        """Wait until everything is written; raises what went wrong."""
        self._hand_out()
        while self._waiting:
            self._finish_oldest()

    def _hand_out(self) -> None:
        """Give the workers the pieces of all queued tensors, one piece of each file in turn."""
        queued, self._queued = self._queued, {}
        files = map(_pieces_in_order, queued.values())
        turn = deque(islice(files, self._workers))
        while turn:
            file = turn.popleft()
            begun, piece = next(file, (None, None))
            if begun is None:
                turn.extend(islice(files, 1))
                continue
            turn.append(file)
            self._waiting.append((begun, None if piece is None else self._submit_piece(*piece)))
            while self._waiting and (self._waiting[0][1] is None or self._waiting[0][1].done()):
                self._finish_oldest()

    def _submit_piece(self, cost: int, work: Callable[[], PlacedPiece]) -> Future[PlacedPiece]:
        """Submit a piece once few enough are under way, and return its future.

        `cost` is the memory that the piece takes, in bytes.
        """
        with self._freed:
            while self._out and (self._held + cost > BUDGET or self._out >= self._most):
                self._freed.wait()
            self._held += cost
            self._out += 1
        future = self._pool.submit(work)
        future.add_done_callback(partial(self._release_memory, cost))
        return future

    def _release_memory(self, cost: int, _: Future[PlacedPiece]) -> None:
        """Count a finished piece as no longer under way: `cost` bytes of memory are free again."""
        with self._freed:
            self._held -= cost
            self._out -= 1
            self._freed.notify()

    def _finish_oldest(self) -> None:
        """Wait for the oldest piece and record it, or finish its tensor after the last piece."""
        begun, future = self._waiting.popleft()
        if future is None:
            self._finish_tensor(begun)
        else:
            self._record_piece(begun, future.result())

    def _record_piece(self, begun: _TensorInWork, made: PlacedPiece) -> None:
        """Add a written piece's counts, checksum and size to those of its tensor.

        A piece that only counted lost codes sets their number. Raises ConversionError for values
        that overflowed without permission.
        """
        written = begun.written
        if made.counts is None:
            begun.written.lost_codes = made.lost_codes
            return
        written.counts.join(made.counts)
        check_overflow(begun.output, self._options, written.counts)
        if self._needs_checksum(begun.output, begun.slot):
            written.crc = combine_crcs(written.crc, made.crc, made.nbytes)
        begun.nbytes += made.nbytes

    def _finish_tensor(self, begun: _TensorInWork) -> None:
        """Finish a tensor whose pieces are all written, and call the function given for that.

        Raises ConversionError where the number of bytes is not the planned one.
        """
        output, planned = begun.output, begun.slot.place.nbytes
        if begun.nbytes != planned:
            raise ConversionError(
                f"{output.info.name}: {begun.nbytes} bytes were made, {planned} were planned"
            )
        if output.part is not None:
            begun.written.counts = output.part.packed.counts
        for tensor in output.sources:
            tensor.drop()
        self._sink.record_filled(begun.slot, begun.written.crc)
        self._on_finished(output, begun.written, begun.slot)

    def _needs_checksum(self, output: Output, slot: DeferredSlot) -> bool:
        """Return whether a checksum of the written bytes is needed."""
        read_back = self._options.verify and (
            is_encoded(output) or output.made or output.part is not None
        )
        return read_back or self._options.resume or slot.crc

    def _tasks(self, output: Output) -> GivesWork | None:
        """Return a function that yields an output's pieces of work, given its slot in the file.

        None where one thread has to write the output in order: for what is fetched, and with one
        job for what is copied, or encoded by several threads at a time.
        """
        here = all(map(in_mapped_file, output.sources))
        if output.part is not None:
            return partial(self._part_work, output) if here else None
        if output.made:
            return partial(self._repack_work, output) if here else None
        if self._options.jobs == 1:
            return None
        if is_encoded(output):
            return partial(self._encode_work, output)
        return partial(self._copy_work, output) if here else None

    def _part_work(self, output: Output, slot: DeferredSlot) -> Iterator[PieceWork]:
        """Yield (memory in bytes, function) once, for a stored tensor of a packed weight.

        A lock lets only one such tensor be made at a time.
        """
        part, summed = output.part, self._needs_checksum(output, slot)
        assert part is not None

        def write_part() -> PlacedPiece:
            """Make and write one stored tensor of a packed weight; return its size and CRC-32."""
            with self._making:
                data = part.data()
            slot.place.put(0, data)
            return PlacedPiece(len(data), crc32(data) if summed else 0, ChangeCounts())

        yield output.info.nbytes, write_part

    def _repack_work(self, output: Output, slot: DeferredSlot) -> Iterator[PieceWork]:
        """Yield (memory in bytes, function) for each piece of a repacked output.

        A piece is a band of bytes that stays in the processor's cache.
        """
        assert output.runs is not None
        data, summed = RunBytes(output.runs), self._needs_checksum(output, slot)

        def write_band(start: int, stop: int) -> PlacedPiece:
            """Repack bytes [start, stop) of the output tensor and write them into its slot.

            Returns their count and CRC-32, 0 if no checksum is asked for.
            """
            band = data.window(start, stop)
            slot.place.put(start, band)
            if not data.reordered:
                data.drop(start, stop)
            return PlacedPiece(stop - start, crc32(band) if summed else 0, ChangeCounts())

        for start in range(0, len(data), BAND):
            yield BAND, partial(write_band, start, min(start + BAND, len(data)))

    def _copy_work(self, output: Output, slot: DeferredSlot) -> Iterator[PieceWork]:
        """Yield (memory in bytes, function) for each piece of an output whose bytes are copied."""
        assert output.runs is not None
        data, summed = RunBytes(output.runs), self._needs_checksum(output, slot)
        step = WINDOW // 4 if isinstance(output.runs, Columns) else WINDOW

        def copy_window(start: int, stop: int) -> PlacedPiece:
            """Copy bytes [start, stop) of the source tensor to the output.

            Returns their count and CRC-32, 0 if no checksum is asked for.
            """
            crc, at = 0, start
            for window in copied_bytes(data, start, stop):
                slot.place.put(at, window)
                crc, at = crc32(window, crc) if summed else 0, at + window.nbytes
            data.drop(start, stop)
            return PlacedPiece(stop - start, crc, ChangeCounts())

        for start in range(0, len(data), step):
            yield 0, partial(copy_window, start, min(start + step, len(data)))

    def _encode_work(self, output: Output, slot: DeferredSlot) -> Iterator[PieceWork]:
        """Yield (memory in bytes, function) for each piece of an encoded output.

        For packed sources a last piece counts the codes that cannot be recovered.
        """
        shape = output.info.shape
        whole = math.prod(shape)
        parts = list(decoded_pieces(output, CHUNK))
        elements = whole if len(parts) == 1 else min(whole, CHUNK + shape[-1])
        for piece in parts:
            held = HELD if recodable_rows(output, piece) is None else RECODED
            yield held * elements, self._piece_work(output, slot, piece, len(parts))
        if any(tensor.packed is not None for tensor in output.sources):
            yield HELD * CHUNK, partial(_lost_codes_piece, output)

    def _piece_work(
        self, output: Output, slot: DeferredSlot, piece: RowPiece, parts: int
    ) -> Callable[[], PlacedPiece]:
        """Return the function that encodes and writes a piece.

        It uses one thread, or all threads for a large tensor that is one piece. `parts` is the
        number of the tensor's pieces.
        """
        alone = parts == 1 and math.prod(output.info.shape) > LARGE
        options = replace(self._options, threads=self._options.jobs if alone else 1)
        width = find_encoding(output.info.encoding).row_bytes(output.info.shape) or 0
        summed = self._needs_checksum(output, slot)

        def write_piece() -> PlacedPiece:
            """Encode a piece of the output tensor and write it.

            Returns its size, its CRC-32 (0 if not asked for) and the counts of values that
            changed.
            """
            data, counts = encode_piece(output, options, column_importances(output, options), piece)
            slot.place.put(piece.first * width, data)
            return PlacedPiece(len(data), crc32(data) if summed else 0, counts)

        return write_piece


def _pieces_in_order(rows: Sequence[tuple[_TensorInWork, GivesWork]]) -> FileWork:
    """Yield (tensor, piece of work) for a file's tensors, and (tensor, None) after each."""
    for begun, gives in rows:
        for piece in gives(begun.slot):
            yield begun, piece
        yield begun, None


def _lost_codes_piece(output: Output) -> PlacedPiece:
    """Return a piece that holds only how many codes cannot be recovered from an output."""
    return PlacedPiece(lost_codes=count_lost_codes(output))


def is_encoded(output: Output) -> bool:
    """Return whether an output is decoded and encoded, not copied or packed in several tensors."""
    return output.part is None and not (output.copies and output.runs is not None)


def write_tensors(
    sink: "Sink",
    infos: "Sequence[TensorInfo]",
    plan: "Plan",
    written: "list[WrittenTensor]",
    options: Options,
    begun: "ResumableFileSet | None",
    verifier: "Verifier | None",
    source_files: "Sequence[Path]",
) -> None:
    """Write all outputs that no earlier run wrote, and fill in `written`.

    `infos` are the planned tensors in the order of `sink`, `written` their records in the plan's
    order, `source_files` the files read. `begun` is the state of a resumable run or None;
    `verifier` reads tensors back or is None.
    """
    from aprfmt.conversion.resume_state import journal_entry, skip_if_written

    # What is done after each tensor: journal, verifier, progress.
    by_name = {o.info.name: (o, w) for o, w in zip(plan.outputs, written, strict=True)}
    total = sum(info.nbytes for info in infos)
    done = 0

    def report_progress(output: "Output") -> None:
        """Add an output's bytes to those done, and call the progress function with both totals."""
        nonlocal done
        done += output.info.nbytes
        if options.progress is not None:
            options.progress(done, total)

    def finish_output(
        output: "Output", record: "WrittenTensor", slot: "DeferredSlot | None" = None
    ) -> None:
        """Record a written output in the journal, give it to the verifier and report progress."""
        if begun is not None:
            begun.done(output.info.name, journal_entry(record))
        if verifier is not None:
            verifier.written(sink, output, record, slot)
        report_progress(output)

    def is_written(info: "TensorInfo") -> bool:
        """Return whether an earlier run wrote a tensor; if so, report its bytes as done."""
        output, record = by_name[info.name]
        found = begun is not None and skip_if_written(sink, info, begun, record)
        if found:
            report_progress(output)
        return found

    # A remote source is read once, in its own order.
    if isinstance(sink, SequentialSink) and writes_in_source_order(sink, plan.outputs):
        write_in_source_order(
            sink, infos, by_name, source_files, options, finish_output, is_written
        )
        return
    # Otherwise in the plan's order: by workers, or here where one thread has to.
    with ExitStack() as stack:
        ahead = None
        if isinstance(sink, SequentialSink):
            ahead = stack.enter_context(WorkerPool(sink, options, finish_output))
        for info in infos:
            if is_written(info):
                continue
            output, record = by_name[info.name]
            if ahead is None or not ahead.write(output, record):
                sink.write(info.name, output_chunks(output, options, record))
                finish_output(output, record)
        if ahead is not None:
            ahead.wait()
