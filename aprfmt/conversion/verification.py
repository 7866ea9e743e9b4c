"""Read back what was written, on another thread while the next tensor is written, or at the end.

A tensor is compared when the system has its bytes: copied ones with the source's; encoded, repacked
and fetched ones by the checksum taken while they were made, or came. What is read is the file,
through a mapping of its own, not the memory that was written from. Afterwards the published file is
opened by its reader: a tensor that lies exactly where bytes were proven, in a file that has not
changed since it was closed, is proven; any other tensor is read again. The system may answer from
its cache, before or after the sync: what the disk itself returns, only reading the file later can
say.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from aprfmt.base.protocols import LazyTensor, Note
from aprfmt.errors import ConversionError
from aprfmt.formats import checksum_matches, checksum_notes
from aprfmt.formats.mapped_file import MappedFile, StoredTensor, in_mapped_file
from aprfmt.formats.sequential import SequentialSink
from aprfmt.tensors.runs import all_runs, first_difference

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from aprfmt.base.protocols import Sink, Source
    from aprfmt.conversion.outputs import Output
    from aprfmt.conversion.run import WrittenTensor
    from aprfmt.formats.output_file import OutputFile
    from aprfmt.formats.sequential import DeferredSlot

LARGE = 1 << 20  # smaller tensors are read back at the end: they are no work


class Verifier:
    """A context manager that compares written tensors on other threads.

    Leaving it cancels comparisons that have not begun.

    `wait` ends it in good order: ConversionError for the first tensor that differs.
    """

    def __init__(self, source: "Source") -> None:
        """Start the threads; the checksum of a local source is checked at once."""
        self._source = source
        self._pool = ThreadPoolExecutor(2, "aprfmt-verify")
        self._waiting: list[Future[None]] = []
        self._places: dict[str, tuple[OutputFile, int]] = {}
        self._notes: Future[list[Note]] | None = None
        if all(map(in_mapped_file, source.tensors.values())):  # any thread may read it
            self._notes = self._pool.submit(checksum_notes, source)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        """Cancel the comparisons that have not begun, and wait for the others."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def notes(self, checksums: "Callable[[], Mapping[Path, int]]") -> list[Note]:
        """Return the notes on whether the source's own checksum is right.

        `checksums` returns the CRC-32 of files that were fetched whole: they are not read again.
        """
        if self._notes is not None:
            return self._notes.result()
        return checksum_notes(self._source, checksum_matches(self._source, checksums))

    def written(
        self,
        sink: "Sink",
        output: "Output",
        record: "WrittenTensor",
        slot: "DeferredSlot | None" = None,
    ) -> None:
        """Start comparing a written tensor, if it is large and its source can be read again.

        It is the tensor `output` that `sink` wrote last, or that workers wrote into `slot`;
        `record` has its CRC-32. Raises ConversionError for an earlier tensor that differs.
        """
        self._raise_errors()
        if output.info.nbytes < LARGE or not isinstance(sink, SequentialSink):
            return
        here = output.made or all(map(in_mapped_file, output.sources))
        if output.copies and not here and not output.is_remote:
            return
        file, at = sink.location() if slot is None else (slot.place.file, slot.place.start)
        self._places[output.info.name] = file, at
        self._waiting.append(self._pool.submit(_compare, file, at, output, record))

    def done(self) -> bool:
        """Return whether all comparisons have ended."""
        return all(each.done() for each in self._waiting)

    def wait(self) -> None:
        """Wait for every comparison; ConversionError for the first tensor that differs."""
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            each.result()

    def is_proved(self, name: str, tensor: LazyTensor) -> bool:
        """Return whether this tensor was already compared at the same offset of the same file."""
        file, at = self._places.get(name, (None, 0))
        location = tensor.location() if type(tensor) is StoredTensor else None
        if file is None or location is None or not file.identity:
            return False
        return location[0].identity == file.identity and location[1] == at

    def _raise_errors(self) -> None:
        """Raise the error of the first comparison that has ended and found a difference, if any."""
        while self._waiting and self._waiting[0].done():
            self._waiting.pop(0).result()


def compare_written(output: "Output", record: "WrittenTensor", stored: LazyTensor) -> None:
    """Raise ConversionError where a tensor, read back, does not have the bytes that were written.

    `stored` is the tensor of the new file. Copied bytes are compared with the source, others by the
    CRC-32 of `record`.
    """
    from aprfmt.conversion.run import BACK, tensor_checksum

    if output.copies and output.runs is not None and not (output.made or output.is_remote):
        at = first_difference(output.runs, all_runs(stored), BACK)
        if at is not None:
            raise ConversionError(f"{output.info.name}: byte {at} differs from the source")
    elif tensor_checksum(stored) != record.crc:
        raise ConversionError(f"{output.info.name}: reads back with other bytes")


def _compare(file: "OutputFile", at: int, output: "Output", record: "WrittenTensor") -> None:
    """Raise ConversionError where a tensor at offset `at` of a file is not what was written."""
    mapped = MappedFile(file.temporary)
    try:
        if mapped.size < at + output.info.nbytes:
            raise ConversionError(f"{output.info.name}: reads back with {mapped.size} bytes")
        compare_written(output, record, StoredTensor(mapped, replace(output.info, offset=at)))
    finally:
        mapped.close()
