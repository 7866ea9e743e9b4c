"""The sources of APR v2 models: one open file, or the open shards of a set."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from aprfmt.base.crc import crc32
from aprfmt.base.protocols import ByteSource, LazyTensor, Note, Source, Value
from aprfmt.formats import mapped_file
from aprfmt.formats.apr.layout import Header
from aprfmt.formats.apr.structure import FooterState, ParsedApr
from aprfmt.formats.crc_combine import combine_crcs
from aprfmt.formats.mapped_file import BufferFile
from aprfmt.formats.shard_set import join_tensors


class AprShard(mapped_file.Shard[ParsedApr]):
    """One open APR file and its structure; its tensors are the logical ones, in index order."""

    __slots__ = ()

    @property
    def data(self) -> ByteSource:
        """The file's bytes, decompressed if need be: tensors' offsets count in them."""
        expanded = self.parsed.expanded
        return BufferFile(self.parsed.buffer[:], self.file.path) if expanded else self.file

    def footer_matches(self, known: int | None = None) -> bool | None:
        """Return whether the file's checksum is right; None if the file ends without one.

        Reads the whole file, unless `known` is the CRC-32 of all its bytes.
        """
        parsed = self.parsed
        if parsed.footer == "missing":
            return None
        if known is not None and parsed.footer == "present" and not parsed.expanded:
            footer = bytes(parsed.buffer[parsed.end : parsed.size])
            before = int.from_bytes(footer, "little")  # what is before it has that, if it is right
            return combine_crcs(before, crc32(footer), len(footer)) == known
        at_end, crc = parsed.size - 4, 0
        for stop in sorted({parsed.end, max(parsed.end, at_end)}):
            start = parsed.end if stop > parsed.end else 0
            crc = self._crc(start, stop, crc)
            if parsed.buffer[stop : stop + 4] == crc.to_bytes(4, "little"):
                return True  # right after the data, or at the end of the file after unknown bytes
        return False

    def _crc(self, start: int, stop: int, crc: int) -> int:
        """Return the CRC-32 up to `stop`, where `crc` is that of the bytes before `start`."""
        for window in self.data.windows(start, stop):  # a compressed file's bytes are in memory
            crc = crc32(window, crc)
        return crc


class AprSource(mapped_file.MappedSource[AprShard]):
    """An open APR model: one file, or all shards of a set.

    `tensors` are logical: tensors of encodings that APR has no code for have their own name and
    shape again. `metadata` is the first file's, without `aprfmt.tensors` and, for a set,
    `sharding`; nulls stay (they mean absent). `shards` are the open files with their structures.
    """

    format = "apr"
    version = "2.0"
    types: Mapping[str, str] = {}

    def __init__(self, path: Path, shards: Sequence[AprShard], notes: Sequence[Note] = ()) -> None:
        """Take the open shards in order; join their tensors if there are several."""
        super().__init__(path, shards, notes)
        first = shards[0].parsed
        self.metadata: Mapping[str, Value] = first.metadata
        self.tensors: Mapping[str, LazyTensor] = shards[0].tensors
        if len(shards) > 1:
            self.metadata = {k: v for k, v in first.metadata.items() if k != "sharding"}
            self.tensors = join_tensors([(s.file.path, s.tensors) for s in shards], str(path))

    @property
    def header(self) -> Header:
        """The first file's header."""
        return self.shards[0].parsed.header

    @property
    def metadata_raw(self) -> bytes:
        """The bytes of the first file's metadata."""
        return bytes(self.shards[0].parsed.metadata_raw)

    def footer_state(self) -> FooterState:
        """Return "present" if every file ends with its checksum, else the first other state.

        No tensor data is read.
        """
        states = [shard.parsed.footer for shard in self.shards]
        return next((state for state in states if state != "present"), "present")

    def footer_matches(self, known: Mapping[Path, int] | None = None) -> bool | None:
        """Return whether the checksums of all files are right.

        False: that of some file is wrong. None: none is wrong, but some file has no checksum. Reads
        every byte, and releases mapped pages on the way. `known` has the CRC-32 of files of which
        every byte was read already.
        """
        found = [shard.footer_matches((known or {}).get(shard.file.path)) for shard in self.shards]
        return False if False in found else None if None in found else True


def footer_matches(source: Source, known: Mapping[Path, int] | None = None) -> bool | None:
    """Return whether the checksums of an open model's files are right; None if it is not APR.

    None also where no checksum is wrong, but some file has none. `known` has the CRC-32 of files of
    which every byte was read already.
    """
    return source.footer_matches(known) if isinstance(source, AprSource) else None
