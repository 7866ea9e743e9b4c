"""Opens APR v2 files, and sets of shards, as sources."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from aprfmt.base.protocols import Note
from aprfmt.errors import FormatError
from aprfmt.formats.apr.metadata import TYPED
from aprfmt.formats.apr.parse import parse
from aprfmt.formats.apr.shards import ShardNumber, read_manifest, shard_number_of, sibling_paths
from aprfmt.formats.apr.source import AprShard as AprShard
from aprfmt.formats.apr.source import AprSource as AprSource
from aprfmt.formats.mapped_file import Buffer, BufferFile, open_bytes
from aprfmt.formats.shard_set import refuse_mixed, require_files
from aprfmt.remote.paths import parse_location

_OF_ONE_FILE = frozenset({"sharding", "total_size", "param_count"})  # may differ between shards


def open_manifest(path: Path, read: Callable[[Path], AprShard], partial: bool) -> AprSource:
    """Return the open model of all shards that a manifest names.

    `read` opens one shard. `partial` allows missing ones, each with a note. FormatError if the
    manifest and the files disagree.
    """
    members = read_manifest(path)
    paths = [one.path for one in members]
    refuse_mixed(path, paths)
    if not partial:
        require_files(paths, str(path))
    shards: list[AprShard] = []
    notes: list[Note] = []
    for one in members:
        if partial and not one.path.is_file():
            notes.append(
                Note(
                    "warning", str(path), f"{one.path.name} is missing next to it", "missing_shard"
                )
            )
            continue
        # The manifest must list the shard's tensors; another size is only noted.
        shard = read(one.path)
        stored = {entry.info.name for entry in shard.parsed.entries}
        if stored != one.tensors:
            odd = min(stored ^ one.tensors)
            holds, lists = ("holds", "does not list") if odd in stored else ("lacks", "lists")
            raise FormatError(
                f"{path}: {one.path.name} {holds} tensor {odd!r}, which the manifest {lists} for it"
            )
        if shard.file.size != one.size:
            notes.append(
                Note(
                    "warning",
                    str(path),
                    f"{one.path.name} has {shard.file.size} bytes, the manifest says {one.size}",
                    "shard_size",
                )
            )
        shards.append(shard)
    if not shards:
        raise FormatError(f"{path}: none of the shards it names is there; get the files of the set")
    return _join_shards(path, shards, len(members), notes)


def open_siblings(
    path: Path, opened: AprShard, read: Callable[[Path], AprShard], partial: bool
) -> AprSource:
    """Return the open model of all shards that an opened shard belongs to, by its file name.

    `read` opens one shard. `partial` allows missing ones, each with a note. Without `partial`,
    FormatError for a missing shard, and where the file's name does not give those of the others.
    """
    place = shard_number_of(opened.parsed)
    if place is None:
        return AprSource(path, [opened])
    paths = sibling_paths(path, place)
    what = f"is shard {place.number} of {place.count}"
    # Without the pattern the others cannot be found.
    if paths is None:
        if partial:
            note = Note(
                "warning",
                str(path),
                f"{what}; the others are not known by its name",
                "missing_shard",
            )
            return AprSource(path, [opened], [note])
        raise FormatError(
            f"{path}: {what}, but its name does not follow STEM-{place.number:05d}-of-"
            f"{place.count:05d}.apr, so the others are not known; open their manifest, "
            "rename the file, or list it alone with --partial"
        )
    refuse_mixed(path, paths)
    notes = []
    shards = []
    for number, sibling in enumerate(paths):
        if number == place.number:
            shards.append(opened)
        elif sibling.is_file():
            shards.append(read(sibling))
        elif partial:
            notes.append(
                Note("warning", str(path), f"{sibling.name} is missing next to it", "missing_shard")
            )
        else:
            raise FormatError(
                f"{path}: {what}, {sibling.name} is missing next to it; get the missing file, "
                "or list this one alone with --partial"
            )
    return _join_shards(path, shards, place.count, notes)


def _join_shards(
    path: Path, shards: Sequence[AprShard], count: int, notes: Sequence[Note]
) -> AprSource:
    """Return the set's source; FormatError unless the shards' numbers make one set of `count`."""
    seen: set[int] = set()
    for shard in shards:
        place = shard_number_of(shard.parsed) or ShardNumber(0, 1)
        if place.count != count or place.number in seen:
            raise FormatError(
                f"{path}: {shard.file.path.name} says it is shard {place.number} of {place.count}; "
                f"expected another number of {count}, each once"
            )
        seen.add(place.number)
    return AprSource(path, shards, [*notes, *_contradictions(shards)])


def _contradictions(shards: Sequence[AprShard]) -> list[Note]:
    """Return a warning for every typed key whose value in a shard differs from the first one's."""
    first = shards[0]
    found: list[Note] = []
    for key in (key.name for key in TYPED if key.name not in _OF_ONE_FILE):
        stated = first.parsed.metadata.get(key)
        for shard in shards[1:]:
            other = shard.parsed.metadata.get(key)
            if other is not None and other != stated:
                found.append(
                    Note(
                        "warning",
                        str(shard.file.path),
                        f"metadata {key} is {other!r}, {first.file.path.name} says {stated!r}",
                        "shard_metadata",
                    )
                )
    return found


def open_source(path: Path, *, partial: bool = False, damaged: bool = False) -> AprSource:
    """Return an open APR v2 model; a shard, or the manifest of a set, opens the whole set.

    `partial` opens truncated files and incomplete sets: `notes` say what is missing, and reading a
    cut tensor raises TruncatedError. `damaged` collects faults that leave other tensors readable in
    `damage`. Raises FormatError (TruncatedError, UnsupportedError).
    """
    path = parse_location(path)
    with ExitStack() as stack:

        def open_shard(file_path: Path) -> AprShard:
            """Return the open APR shard at a path; `stack` closes it if anything raises later."""
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

    `path` begins the messages. `partial` allows a truncated file. `damaged` collects faults that
    leave other tensors readable. Raises FormatError (TruncatedError, UnsupportedError).
    """
    file = BufferFile(buffer, path)
    parsed = parse(file.view, str(path), partial=partial, damaged=damaged)
    return AprSource(path, [AprShard(file, parsed)])


def _is_manifest(path: Path) -> bool:
    """Return whether a file begins as JSON, which only the manifest of a set does."""
    with closing(open_bytes(path)) as file:
        return bytes(file.view[:64]).lstrip()[:1] == b"{"
