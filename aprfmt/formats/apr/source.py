"""An open APR v2 file, or the open shards of a set."""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from aprfmt.base.protocols import Damage, LazyTensor, Note, Value
from aprfmt.formats.apr.layout import Header
from aprfmt.formats.apr.parsed import FooterState, Parsed
from aprfmt.formats.mapped import BufferFile, MappedFile, stored_tensor

_WINDOW = 8 << 20


@dataclass(frozen=True, slots=True)
class Shard:
    """One open file and its structure."""

    file: MappedFile
    parsed: Parsed

    @property
    def tensors(self) -> dict[str, LazyTensor]:
        """The logical tensors, in index order."""
        parsed, file = self.parsed, self.file
        if parsed.expanded:
            file = BufferFile(parsed.buffer, file.path)
        broken = parsed.faults.broken
        return {name: stored_tensor(file, info, broken) for name, info in parsed.infos.items()}

    def footer_matches(self) -> bool | None:
        """Read the whole file and compare its checksum; None if the file ends without one."""
        parsed = self.parsed
        if parsed.footer == "missing":
            return None
        at_end, crc = parsed.size - 4, 0
        for stop in sorted({parsed.end, max(parsed.end, at_end)}):
            start = parsed.end if stop > parsed.end else 0
            crc = self._crc(start, stop, crc)
            if parsed.buffer[stop : stop + 4] == crc.to_bytes(4, "little"):
                return True  # right after the data, or at the end of the file after unknown bytes
        return False

    def _crc(self, start: int, stop: int, crc: int) -> int:
        for at in range(start, stop, _WINDOW):
            end = min(at + _WINDOW, stop)
            crc = zlib.crc32(self.parsed.buffer[at:end], crc)
            if not self.parsed.expanded:
                self.file.drop(at, end)
        return crc

    def stray_padding(self) -> Iterator[str]:
        """Yield a sentence for every gap between the file's parts that is not all zeros."""
        parsed, header = self.parsed, self.parsed.header
        regions = [
            (header.metadata_offset, header.metadata_offset + header.metadata_size),
            (header.index_offset, parsed.index_end),
            *((e.info.offset, e.info.offset + e.info.nbytes) for e in parsed.entries),
            (parsed.end, parsed.end),
        ]
        at = 64
        for start, stop in sorted(regions):
            gap = parsed.buffer[at : min(start, parsed.size)]
            if any(gap):
                yield f"bytes {at}..{start} between the parts of the file are not all zero"
            at = max(at, stop)


class AprSource:
    """An open APR model: one file, or all shards of a set.

    `tensors` are logical: encodings APR has no code for are joined back under their own name and
    shape. `metadata` is the first file's, without `aprfmt.tensors` and, for a set, `sharding`;
    nulls stay (they mean absent). `shards` are the open files with their structures.
    """

    format = "apr"
    version = "2.0"
    types: Mapping[str, str] = {}

    def __init__(self, path: Path, shards: Sequence[Shard], notes: Sequence[Note] = ()) -> None:
        first = shards[0].parsed
        self.path = path
        self.shards = tuple(shards)
        self.files: tuple[Path, ...] = tuple(shard.file.path for shard in shards)
        self.notes: Sequence[Note] = [*notes, *(n for shard in shards for n in shard.parsed.notes)]
        self.damage: Sequence[Damage] = [d for shard in shards for d in shard.parsed.faults.damage]
        self.metadata: Mapping[str, Value] = first.metadata
        self.tensors: Mapping[str, LazyTensor] = shards[0].tensors
        if len(shards) > 1:
            from aprfmt.formats.shardset import union

            self.metadata = {k: v for k, v in first.metadata.items() if k != "sharding"}
            self.tensors = union([(s.file.path, s.tensors) for s in shards], str(path))

    @property
    def header(self) -> Header:
        """The first file's header."""
        return self.shards[0].parsed.header

    @property
    def metadata_raw(self) -> bytes:
        """The first file's metadata bytes, unchanged."""
        return bytes(self.shards[0].parsed.metadata_raw)

    def footer_state(self) -> FooterState:
        """Say, without reading data, whether every file ends with its checksum."""
        states = [shard.parsed.footer for shard in self.shards]
        return next((state for state in states if state != "present"), "present")

    def footer_matches(self) -> bool | None:
        """Read every byte and compare the checksums; mapped pages are released on the way.

        False: some file does not match. None: no mismatch, but some file has no checksum.
        """
        found = [shard.footer_matches() for shard in self.shards]
        return False if False in found else None if None in found else True

    def stray_padding(self) -> Iterator[Note]:
        """Yield a note for every gap between a file's parts that is not all zeros."""
        for shard in self.shards:
            for text in shard.stray_padding():
                yield Note("note", str(shard.file.path), text)

    def close(self) -> None:
        """Unmap all files; raw views end here."""
        for shard in self.shards:
            shard.file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
