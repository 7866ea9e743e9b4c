"""Opens APR v2 files, and sets of shards, as sources."""

from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path

from aprfmt.formats.apr.parse import parse
from aprfmt.formats.apr.shard_set import open_manifest, open_siblings
from aprfmt.formats.apr.source import AprShard as AprShard
from aprfmt.formats.apr.source import AprSource as AprSource
from aprfmt.formats.mapped_file import Buffer, BufferFile, open_bytes
from aprfmt.remote.paths import parse_location


def open_source(path: Path, *, partial: bool = False, damaged: bool = False) -> AprSource:
    """Return an open APR v2 model; a shard, or the manifest of a set, opens the whole set.

    `partial` opens truncated files and incomplete sets: `notes` say what is missing, and reading a
    cut tensor raises TruncatedError. `damaged` collects faults that leave the rest readable in
    `damage`. Raises FormatError (TruncatedError, UnsupportedError).
    """
    path = parse_location(path)
    with ExitStack() as stack:

        def open_shard(file_path: Path) -> AprShard:
            """Return the open shard at a path; it is closed if anything raises later."""
            file = open_bytes(file_path)
            stack.callback(file.close)
            parsed = parse(file.view, str(file_path), partial=partial, damaged=damaged)
            return AprShard(file, parsed)

        if _is_manifest(path):
            source = open_manifest(path, open_shard, partial)
        else:
            shard = open_shard(path)
            if isinstance(shard.parsed.metadata.get("sharding"), Mapping):
                source = open_siblings(path, shard, open_shard, partial)
            else:
                source = AprSource(path, [shard])
        stack.pop_all()
        return source


def open_buffer(
    buffer: Buffer, path: Path, *, partial: bool = False, damaged: bool = False
) -> AprSource:
    """Return an open source of one file's bytes in memory, without other shards of a set.

    `path` begins the messages; `partial` and `damaged` as in `open_source`. Raises FormatError
    (TruncatedError, UnsupportedError).
    """
    file = BufferFile(buffer, path)
    parsed = parse(file.view, str(path), partial=partial, damaged=damaged)
    return AprSource(path, [AprShard(file, parsed)])


def _is_manifest(path: Path) -> bool:
    """Return whether a file begins as JSON, which only the manifest of a set does."""
    with closing(open_bytes(path)) as file:
        return bytes(file.view[:64]).lstrip()[:1] == b"{"
