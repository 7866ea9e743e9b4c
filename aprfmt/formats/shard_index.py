"""The index of a sharded model: which file has which tensor; its files open as one set.

The layout is transformers': `weight_map` maps tensor names to file names, `metadata` is
optional.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from aprfmt.base.protocols import ByteSource, Note
from aprfmt.errors import FormatError
from aprfmt.formats.bounded_json import loads
from aprfmt.formats.cursor import MAX_COUNT
from aprfmt.formats.mapped_file import Buffer, open_bytes
from aprfmt.formats.shard_set import MAX_INDEX, member_path, refuse_mixed, require_files
from aprfmt.remote.paths import map_paths

Opened = TypeVar("Opened")


@dataclass(frozen=True)
class ShardIndex:
    """The content of an index: file names by tensor, its metadata, and the path of each file."""

    path: Path
    weight_map: Mapping[str, Any]
    metadata: Mapping[str, Any]
    homes: Mapping[str, Path]


def index_bytes(
    weight_map: Mapping[str, Any], total: int, metadata: Mapping[str, Any] = MappingProxyType({})
) -> bytes:
    """Return the content of an index file; `total` counts the bytes of all tensors.

    `metadata` is what an index before it said; its own total does not count.
    """
    index = {"metadata": {**metadata, "total_size": total}, "weight_map": dict(weight_map)}
    return (json.dumps(index, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def read_index(path: Path) -> ShardIndex:
    """Return the index in a file, with the paths of the shards in the order of their names.

    Raises FormatError for an index that breaks a rule, and for a set that an interrupted run left
    partly old.
    """
    with closing(open_bytes(path)) as file:
        weight_map, metadata = parse_index(file.view[: MAX_INDEX + 1], path)
    homes = shard_paths(path, weight_map)
    refuse_mixed(path, list(homes.values()))
    return ShardIndex(path, weight_map, metadata, homes)


def parse_index(buffer: Buffer, path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (weight map, metadata) of an index's bytes; FormatError if it is none.

    The file names in the weight map are not checked yet.
    """
    index = loads(buffer, str(path), max_bytes=MAX_INDEX)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise FormatError(
            f"{path}: has no weight_map; expected an index of safetensors shards, an object that "
            "maps tensor names to file names"
        )
    metadata = index.get("metadata")
    if metadata is not None and not isinstance(metadata, dict):
        raise FormatError(f"{path}: metadata is {type(metadata).__name__}; expected an object")
    return weight_map, metadata or {}


def shard_paths(path: Path, weight_map: Mapping[str, Any]) -> dict[str, Path]:
    """Return {shard's file name as the index has it: its path}, sorted by file name.

    `weight_map` is the index's {tensor name: file name}, and `path` is the index.

    Raises FormatError for a name that leads out of the index's folder.
    """
    if len(weight_map) > MAX_COUNT:
        raise FormatError(f"{path}: {len(weight_map)} tensors, the limit is {MAX_COUNT}")
    homes: dict[str, Path] = {}
    for name in weight_map.values():
        if not isinstance(name, str) or name not in homes:
            homes[name] = member_path(path.parent, name, str(path))
    return dict(sorted(homes.items()))


def existing_files(
    path: Path, homes: Mapping[str, Path], kind: str
) -> tuple[dict[str, Path], list[Note]]:
    """Return ({name: path} of the files that exist, a note for each that does not).

    `kind` is the plural that a message uses. Raises FormatError where none exists.
    """
    there = {name: home for name, home in homes.items() if home.exists()}
    if not there:
        raise FormatError(f"{path}: none of the {kind} it names is there; get them")
    return there, [
        Note("warning", str(path), f"{name} is missing", "missing_shard")
        for name in homes
        if name not in there
    ]


@contextmanager
def open_files(
    path: Path, homes: Mapping[str, Path], parse: Callable[[ByteSource], Opened]
) -> Iterator[dict[str, Opened]]:
    """Yield {name: result of `parse`} of every opened file of a set.

    All files are closed if the body raises. Raises FormatError for a file that is missing or no
    regular file.
    """
    require_files(homes.values(), str(path))
    with ExitStack() as stack:

        def open_one(home: Path) -> Opened:
            """Return what `parse` makes of one opened file.

            `stack` closes it if anything raises later.
            """
            file = open_bytes(home)
            stack.callback(file.close)
            return parse(file)

        yield dict(zip(homes, map_paths(list(homes.values()), open_one), strict=True))
        stack.pop_all()
