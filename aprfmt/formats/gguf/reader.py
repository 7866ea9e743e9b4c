"""Opens GGUF files, and splits of them, as sources."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from aprfmt.base.protocols import LazyTensor, Note, Value
from aprfmt.errors import FormatError
from aprfmt.formats.gguf.layout import BYTE_ORDERS
from aprfmt.formats.gguf.parse import parse
from aprfmt.formats.gguf.split import GgufShard, check_set, sibling_names
from aprfmt.formats.mapped_file import Buffer, BufferFile, MappedSource, open_bytes
from aprfmt.remote.paths import map_paths, parse_location


class GGUFSource(MappedSource[GgufShard]):
    """An open GGUF model: one file, or all shards of a split.

    `metadata` is the first shard's. `byteorder` is that of the file ("little" or "big"); tensors
    give little-endian bytes whatever the file has. `shards` are the files with their structures.
    """

    format = "gguf"

    def __init__(self, path: Path, shards: Sequence[GgufShard], notes: Sequence[Note] = ()) -> None:
        """Take the open shards in order; the first one has the metadata."""
        super().__init__(path, shards, notes)
        first = shards[0].parsed
        self.version = str(first.version)
        self.byteorder = BYTE_ORDERS[first.order]
        self.alignment = first.alignment
        self.metadata: Mapping[str, Value] = first.metadata
        self.types: Mapping[str, str] = first.metadata.types
        self.tensors: Mapping[str, LazyTensor] = {
            name: tensor for shard in shards for name, tensor in shard.tensors.items()
        }


def open_source(path: Path, *, partial: bool = False, damaged: bool = False) -> GGUFSource:
    """Return an open GGUF model; any shard of a split opens the whole model.

    `partial` lists truncated files and incomplete splits: `notes` say what is missing, and asking
    for the bytes of a cut tensor raises TruncatedError. `damaged` collects faults that leave other
    tensors readable in `damage`. Raises FormatError (TruncatedError, UnsupportedError) for what is
    not GGUF, for a missing shard, and for shards that contradict each other or were left half
    written.
    """
    from aprfmt.formats.shard_set import refuse_mixed

    path = parse_location(path)
    with ExitStack() as stack:

        def open_shard(shard_path: Path) -> GgufShard:
            """Return the open GGUF shard at a path; `stack` closes it if anything raises later."""
            file = open_bytes(shard_path)
            stack.callback(file.close)
            where = str(shard_path)
            parsed = parse(file.view, where, partial=partial, damaged=damaged, drop=file.drop)
            return GgufShard(file, parsed)

        # The opened shard gives the names of the others.
        opened = open_shard(path)
        names = sibling_names(path, opened.parsed)
        if len(names) > 1:
            refuse_mixed(path, [path.with_name(name) for name in names])
        # Remote files are looked up at once, which stores whether each exists.
        map_paths([path.with_name(name) for name in names], lambda sibling: sibling.is_file())
        shards, notes = [], []
        for name in names:
            sibling = path.with_name(name)
            if name == path.name:
                shards.append(opened)
            elif sibling.is_file():
                shards.append(open_shard(sibling))
            elif not partial:
                raise FormatError(
                    f"{path}: belongs to a split of {len(names)} files, {name} is missing next to "
                    "it; get the missing file"
                )
            else:
                notes.append(
                    Note("warning", str(path), f"{name} is missing next to it", "missing_shard")
                )
        check_set(shards, complete=len(shards) == len(names))
        source = GGUFSource(path, shards, notes)
        stack.pop_all()
        return source


def open_buffer(
    buffer: Buffer, path: Path, *, partial: bool = False, damaged: bool = False
) -> GGUFSource:
    """Return an open source of one file's bytes in memory, without other shards of a split.

    `path` begins the messages. `partial` allows a truncated file. `damaged` collects faults that
    leave other tensors readable. Raises FormatError (TruncatedError, UnsupportedError).
    """
    file = BufferFile(buffer, path)
    parsed = parse(file.view, str(path), partial=partial, damaged=damaged)
    return GGUFSource(path, [GgufShard(file, parsed)])
