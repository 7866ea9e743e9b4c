"""The structure of one APR v2 file, as `parse` makes it."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from aprfmt.base.protocols import Note, Region, TensorInfo, Value
from aprfmt.formats.apr.layout import HEADER_SIZE, Header
from aprfmt.formats.damage import Faults, Structure

FooterState = Literal["present", "missing", "trailing"]


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """One index entry: the stored tensor (absolute offset) and the dtype code in the file."""

    info: TensorInfo
    code: int


@dataclass(slots=True)
class ParsedApr(Structure):
    """The structure of one APR v2 file.

    `buffer` has the uncompressed file's bytes. `infos` are the logical tensors in index order,
    `entries` the stored ones. `end` is where the padded data ends and the
    footer begins; `size` is the uncompressed file's length. `metadata_end` is 0 for metadata that
    cannot be read.
    """

    where: str
    buffer: Region
    size: int
    header: Header
    faults: Faults
    metadata: dict[str, Value] = field(default_factory=dict)
    entries: list[IndexEntry] = field(default_factory=list)
    infos: dict[str, TensorInfo] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    metadata_end: int = 0
    index_end: int = 0
    end: int = 0
    expanded: bool = False

    @property
    def metadata_raw(self) -> memoryview:
        """The bytes of the metadata's JSON."""
        start = self.header.metadata_offset
        return self.buffer[start : start + self.header.metadata_size]

    @property
    def footer(self) -> FooterState:
        """Whether the file ends with its checksum, ends before it, or has bytes after it."""
        if self.size == self.end + 4:
            return "present"
        return "missing" if self.size <= self.end else "trailing"

    def regions(self) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) of header, metadata, index, tensors; other bytes should be zeros."""
        header = self.header
        yield 0, HEADER_SIZE
        yield header.metadata_offset, header.metadata_offset + header.metadata_size
        yield header.index_offset, self.index_end
        for entry in self.entries:
            yield entry.info.offset, entry.info.offset + entry.info.nbytes

    def undamaged_infos(self) -> list[TensorInfo]:
        """Return the infos of the stored tensors (not the logical ones) without a fault."""
        return [e.info for e in self.entries if e.info.name not in self.faults.broken]
