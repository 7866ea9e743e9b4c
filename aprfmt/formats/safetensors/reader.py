"""Opens safetensors files, and sharded models by their index, as sources."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from aprfmt.base.protocols import ByteSource, LazyTensor, Note, Value
from aprfmt.errors import FormatError
from aprfmt.formats import mapped_file
from aprfmt.formats.mapped_file import Buffer, BufferFile, open_bytes
from aprfmt.formats.safetensors.layout import is_json
from aprfmt.formats.safetensors.parse import ParsedSafe, merge_metadata, parse
from aprfmt.remote.paths import is_remote, parse_location

if TYPE_CHECKING:
    from aprfmt.formats.safetensors.index_check import IndexFault


class SafeShard(mapped_file.Shard[ParsedSafe]):
    """One open safetensors file and its structure."""

    __slots__ = ()


class SafetensorsSource(mapped_file.MappedSource[SafeShard]):
    """An open safetensors model: one file, or all shards of an index.

    `metadata` is `__metadata__` (strings only), merged over the shards of a sharded model.
    `index_metadata` is that of the index, `weight_map` its entries (tensor -> file); both are {}
    without an index. `index_faults` say where the index does not fit the shards, in a set opened
    with `damaged`. The format has no version.
    """

    format = "safetensors"
    version = ""
    types: Mapping[str, str] = {}

    def __init__(
        self,
        path: Path,
        shards: Sequence[SafeShard],
        tensors: Mapping[str, LazyTensor],
        index_metadata: Mapping[str, Value],
        notes: Sequence[Note] = (),
        index_faults: "Sequence[IndexFault]" = (),
        weight_map: Mapping[str, str] | None = None,
    ) -> None:
        """Take the open shards, in order, and their joined tensors.

        `index_metadata`, `weight_map` and `index_faults` are those of the index, empty for a single
        file. `notes` are those on the set of files.
        """
        merged, more = merge_metadata(
            {str(shard.file.path): shard.parsed.metadata for shard in shards}
        )
        super().__init__(path, shards, [*notes, *more])
        self.tensors = tensors
        self.index_faults = tuple(index_faults)
        self.index_metadata = index_metadata
        self.weight_map: Mapping[str, str] = weight_map or {}
        self.metadata: Mapping[str, Value] = merged

    @property
    def header_raw(self) -> bytes:
        """The bytes of the first file's length and header."""
        return bytes(self.shards[0].parsed.header_raw)


def open_source(path: Path, *, partial: bool = False, damaged: bool = False) -> SafetensorsSource:
    """Return one open safetensors file (a shard alone), or all shards of an index.

    `partial` lists a file whose data is cut; reading a cut tensor then raises TruncatedError.
    `damaged` collects faults that leave other tensors readable in `damage`. Raises FormatError for
    a file that breaks a rule of the format.
    """
    path = parse_location(path)
    file = open_bytes(path)
    try:
        if not is_json(bytes(file.view[:64])):
            parsed = parse(file.view, str(path), partial=partial, damaged=damaged)
            shard = SafeShard(file, parsed)
            return SafetensorsSource(path, [shard], shard.tensors, {})
    except BaseException:
        file.close()
        raise
    file.close()
    return open_index(path, partial=partial, damaged=damaged)


def open_buffer(
    buffer: Buffer, path: Path, *, partial: bool = False, damaged: bool = False
) -> SafetensorsSource:
    """Return an open source of one file's bytes in memory; `path` begins the messages.

    `partial` allows a truncated file. `damaged` collects faults that leave other tensors readable.
    Raises FormatError.
    """
    file = BufferFile(buffer, path)
    parsed = parse(file.view, str(path), partial=partial, damaged=damaged)
    shard = SafeShard(file, parsed)
    return SafetensorsSource(path, [shard], shard.tensors, {})


def open_index(path: Path, *, partial: bool = False, damaged: bool = False) -> SafetensorsSource:
    """Return the open model of every shard that a `*.safetensors.index.json` names.

    Index and shards must agree on every tensor. `partial` allows missing and truncated shards, each
    with a note. `damaged` is for the shards as in `open_source`, and collects the index's faults in
    `index_faults`: tensors are then taken from the shard that has them. An index that names no
    existing file is then replaced by a complete set of shards in its folder, and so is one that
    does not exist itself. Raises FormatError.
    """
    from aprfmt.formats.safetensors.index_check import (
        IndexFault,
        absent_index,
        check_weight_map,
        complete_set,
        find_renamed_shards,
        find_replacement_shards,
        unlisted_files,
    )
    from aprfmt.formats.shard_index import ShardIndex, existing_files, open_files, read_index
    from aprfmt.formats.shard_set import join_tensors

    path = parse_location(path)
    notes: list[Note] = []
    faults: list[IndexFault] | None = [] if damaged else None
    if is_remote(path) or path.is_file():
        index = read_index(path)
        others = find_replacement_shards(path, index.homes, faults)
    else:
        index = ShardIndex(path, {}, {}, {})
        others = absent_index(path, faults)
    homes, weight_map = index.homes, index.weight_map
    if others is not None:
        homes = others
    elif faults is not None and not is_remote(path) and {*homes} < {*complete_set(path)}:
        homes = complete_set(path)  # a part of a whole set is named: the rest is its, too
    else:
        if damaged or not partial:
            homes = {**homes, **find_renamed_shards(path, weight_map, homes, faults)}
        if partial:
            homes, notes = existing_files(path, homes, "shards")

    unreadable: dict[Path, FormatError] = {}

    def open_shard(file: ByteSource) -> SafeShard | None:
        """Return an open file as a shard with its parsed header.

        With `partial`, one that cannot be parsed is put into `unreadable`, and None is returned.
        """
        try:
            parsed = parse(file.view, str(file.path), partial=partial, damaged=damaged)
        except FormatError as error:
            if not partial:
                raise
            unreadable[file.path] = error
            return None
        return SafeShard(file, parsed)

    with open_files(path, homes, open_shard) as opened:
        shards = {name: shard for name, shard in opened.items() if shard is not None}
        if unreadable and not shards:
            raise next(iter(unreadable.values()))
        notes += [
            Note("warning", str(path), f"a shard cannot be read: {error}", "missing_shard")
            for error in unreadable.values()
        ]
        repeated: list[tuple[str, tuple[str, ...]]] = []
        tensors = join_tensors(
            [(s.file.path, s.tensors) for s in shards.values()],
            str(path),
            weight_map,
            None if faults is None else repeated,
        )
        if faults is not None:
            faults += [
                IndexFault(says, names, mended=False, by_index=weight_map.keys() >= {*names})
                for says, names in repeated
            ]
        stored = {name: _stored_names(shard) for name, shard in shards.items()}
        if others is None:
            check_weight_map(path, weight_map, stored, faults)
        loose = list(unlisted_files(path, stored))
        if faults is not None:
            faults += loose
        else:
            notes += [Note("warning", str(path), fault.says, "index") for fault in loose]
        total = index.metadata.get("total_size")
        found = sum(tensor.info.nbytes for tensor in tensors.values())
        sound = not any(shard.parsed.faults.damage for shard in shards.values())
        if total is not None and total != found and not notes and sound and not faults:
            text = f"total_size is {total!r}, the tensors of all shards take {found} bytes"
            notes.append(Note("warning", str(path), text, "index_size"))
        return SafetensorsSource(
            path, list(shards.values()), tensors, index.metadata, notes, faults or (), weight_map
        )


def _stored_names(shard: SafeShard) -> set[str]:
    """Return the names of a shard's tensors as its header has them.

    A tensor of an encoding that the format lacks has another name there.
    """
    parsed = shard.parsed
    return {parsed.carried.get(name, name) for name in parsed.infos}
