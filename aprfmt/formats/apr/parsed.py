"""The structure of one APR v2 file, as `parse` makes it."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from aprfmt.base.protocols import Note, TensorInfo, Value
from aprfmt.formats.apr.layout import HEADER_SIZE, Header
from aprfmt.formats.damage import Faults

FooterState = Literal["present", "missing", "trailing"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One index entry: the stored tensor (absolute offset) and the dtype code in the file."""

    info: TensorInfo
    code: int


@dataclass(slots=True)
class Parsed:
    """The structure of one file.

    `buffer` holds the plain file: the one given, or the expanded one. `infos` are the logical
    tensors in index order, `entries` the stored ones. `end` is where the padded data ends and the
    footer begins; `size` is the plain file's length. Metadata that cannot be read end at 0.
    """

    where: str
    buffer: memoryview
    size: int
    header: Header
    faults: Faults
    metadata: dict[str, Value] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)
    infos: dict[str, TensorInfo] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    metadata_end: int = 0
    index_end: int = 0
    end: int = 0
    expanded: bool = False

    @property
    def metadata_raw(self) -> memoryview:
        """The metadata's bytes, unchanged from the file."""
        start = self.header.metadata_offset
        return self.buffer[start : start + self.header.metadata_size]

    @property
    def footer(self) -> FooterState:
        """Whether the file ends with its checksum, ends before it, or has bytes after it."""
        if self.size == self.end + 4:
            return "present"
        return "missing" if self.size <= self.end else "trailing"

    def regions(self) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) of everything that has a meaning; the rest should be zeros."""
        header = self.header
        yield 0, HEADER_SIZE
        yield header.metadata_offset, header.metadata_offset + header.metadata_size
        yield header.index_offset, self.index_end
        for entry in self.entries:
            yield entry.info.offset, entry.info.offset + entry.info.nbytes

    def warn(self, key: str, text: str) -> None:
        """Add a warning about the file; `key` is one of WARNINGS."""
        self.notes.append(Note("warning", self.where, text, key))

    def remark(self, text: str) -> None:
        """Add a note: unusual, but harmless."""
        self.notes.append(Note("note", self.where, text, "remark"))
