"""APR models in several files: shard names, the manifest, and which files belong together.

Every shard is a complete file whose metadata have `sharding`. Upstream fixes no file names; its
tests use `STEM-00000-of-00002.apr`, counted from 0, its documents count from 1, and the
manifest's name is free. Ours are `STEM-00000-of-00002.apr` and `STEM-manifest.json`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aprfmt.base.protocols import Value
from aprfmt.errors import FormatError
from aprfmt.formats import bounded_json
from aprfmt.formats.apr.structure import ParsedApr
from aprfmt.formats.cursor import MAX_COUNT
from aprfmt.formats.shard_set import MAX_INDEX, member_path

MAX_SHARDS = 99_999  # five digits in the names
MANIFEST_VERSION = "2.0"
_NAME = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})(?P<suffix>\.[^.]+)")


def shard_name(stem: str, number: int, count: int) -> str:
    """Return the file name of shard `number`, counted from 0."""
    return f"{stem}-{number:05d}-of-{count:05d}.apr"


def shard_stem(name: str) -> str:
    """Return STEM of STEM.apr or STEM-00000-of-00002.apr."""
    match = _NAME.fullmatch(name)
    return match["stem"] if match else Path(name).stem


def manifest_name(stem: str) -> str:
    """Return the file name of the manifest that we write for shards named after `stem`."""
    return f"{stem}-manifest.json"


def make_manifest(shards: Sequence[tuple[str, int, Sequence[str]]]) -> dict[str, Value]:
    """Return the JSON object of a manifest.

    `shards` are (file name, bytes, stored tensor names) in shard order.
    """
    return {
        "version": MANIFEST_VERSION,
        "shard_count": len(shards),
        "total_size": sum(size for _, size, _ in shards),
        "tensor_count": sum(len(names) for _, _, names in shards),
        "shards": [
            {"filename": name, "index": index, "size": size, "tensors": list(names)}
            for index, (name, size, names) in enumerate(shards)
        ],
        "weight_map": {name: index for index, (_, _, names) in enumerate(shards) for name in names},
    }


@dataclass(frozen=True, slots=True)
class ManifestShard:
    """One shard of a manifest; `tensors` are stored names, `size` is in bytes."""

    path: Path
    size: int
    tensors: frozenset[str]


def read_manifest(path: Path) -> list[ManifestShard]:
    """Return the shards that a manifest file names, in order.

    Raises FormatError if it contradicts itself.
    """
    return parse_manifest(bounded_json.load_file(path, MAX_INDEX), path)


def parse_manifest(value: Any, path: Path) -> list[ManifestShard]:
    """Return the shards of a manifest's JSON value, in order; FormatError for a contradiction."""
    where = str(path)
    if not isinstance(value, dict) or not isinstance(value.get("shards"), list):
        raise FormatError(f"{where}: has no array 'shards'; expected an APR shard manifest")
    shards: list[Any] = value["shards"]
    if not 0 < len(shards) <= MAX_SHARDS:
        raise FormatError(f"{where}: lists {len(shards)} shards; expected 1 to {MAX_SHARDS}")
    members = [_parse_member(path, at, shard) for at, shard in enumerate(shards)]
    if len({one.path for one in members}) != len(members):
        raise FormatError(f"{where}: names a shard file twice; every shard has a separate file")
    weight_map = value.get("weight_map")
    if not isinstance(weight_map, dict):
        raise FormatError(f"{where}: has no object 'weight_map'; expected an APR shard manifest")
    # The counts, the map and the lists of the shards have to agree.
    stated = {"shard_count": len(members), "tensor_count": len(weight_map)}
    for key, found in stated.items():
        if value.get(key) != found:
            raise FormatError(f"{where}: {key} is {value.get(key)!r}, but it lists {found}")
    if len(weight_map) > MAX_COUNT:
        raise FormatError(f"{where}: {len(weight_map)} tensors, the limit is {MAX_COUNT}")
    for at, one in enumerate(members):
        mapped = frozenset(name for name, index in weight_map.items() if _is_index(index, at))
        if mapped != one.tensors:
            odd = min(mapped ^ one.tensors)
            raise FormatError(
                f"{where}: weight_map and 'tensors' of shard {at} disagree on tensor {odd!r}"
            )
    if sum(len(one.tensors) for one in members) != len(weight_map):
        raise FormatError(f"{where}: weight_map names shards that are not listed")
    return members


def _is_index(value: Any, at: int) -> bool:
    """Return whether a value is the int `at`, not a bool."""
    return type(value) is int and value == at


def _parse_member(manifest_path: Path, at: int, shard: Any) -> ManifestShard:
    """Return shard number `at` of a manifest from its JSON object; FormatError for a wrong one."""
    where = f"{manifest_path}: shard {at}"
    if not isinstance(shard, dict):
        raise FormatError(f"{where} is {type(shard).__name__}; expected an object")
    names, size = shard.get("tensors"), shard.get("size")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise FormatError(f"{where}: 'tensors' is not an array of strings")
    if type(size) is not int or not _is_index(shard.get("index"), at):
        raise FormatError(
            f"{where}: has size {size!r} and index {shard.get('index')!r}; "
            f"expected a number of bytes and {at}"
        )
    path = member_path(manifest_path.parent, shard.get("filename"), str(manifest_path))
    return ManifestShard(path, size, frozenset(names))


@dataclass(frozen=True, slots=True)
class ShardNumber:
    """The shard number, counted from 0, and the number of shards that a file's metadata give."""

    number: int
    count: int


def shard_number_of(parsed: ParsedApr) -> ShardNumber | None:
    """Return the shard number in a file's metadata, None for a single-file model.

    Raises FormatError for a number outside the count.
    """
    sharding = parsed.metadata.get("sharding")
    if not isinstance(sharding, Mapping):
        return None
    number, count = sharding.get("shard_index"), sharding.get("shard_count")
    if type(number) is not int or type(count) is not int or count <= 1:
        return None
    if not 0 <= number < count <= MAX_SHARDS:
        raise FormatError(
            f"{parsed.where}: metadata says shard_index {number} of shard_count {count}; "
            f"expected 0 to {min(count, MAX_SHARDS) - 1}"
        )
    return ShardNumber(number, count)


def sibling_paths(path: Path, place: ShardNumber) -> list[Path] | None:
    """Return the paths of all shards, derived from this shard's name; None for other names.

    Names may count from 0 or from 1: the number `place` in this shard's metadata decides.
    """
    match = _NAME.fullmatch(path.name)
    if match is None or int(match["count"]) != place.count:
        return None
    base = int(match["number"]) - place.number
    if base not in (0, 1):
        return None
    return [
        path.with_name(f"{match['stem']}-{number + base:05d}-of-{match['count']}{match['suffix']}")
        for number in range(place.count)
    ]
