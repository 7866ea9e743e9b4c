"""Writes a new shard index for a sharded model, from the tensors that its shards hold."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aprfmt.errors import FormatError, OutputError, UsageError
from aprfmt.formats.atomic import FileSet
from aprfmt.formats.mapped_file import open_bytes
from aprfmt.formats.safetensors.index_check import SHARD, sibling_files
from aprfmt.formats.safetensors.parse import parse
from aprfmt.formats.shard_index import index_bytes, parse_index
from aprfmt.formats.shard_set import MAX_INDEX
from aprfmt.model.hf_folder import INDEX, WEIGHTS


@dataclass(frozen=True, slots=True)
class WrittenIndex:
    """An index that was written: its file and size, how many tensors, and the shards it names."""

    path: Path
    size: int
    tensors: int
    shards: tuple[str, ...]


def write_index(folder: Path, output: Path | None = None, *, force: bool = False) -> WrittenIndex:
    """Write the index of a folder's shards over the old one, or to `output`; return its facts.

    Every shard is one that is named like the set (`model-*.safetensors`), or model.safetensors
    where only that is next to the index. What the old index says besides names and `total_size` is
    kept. Raises UsageError where there are no shards or one of a numbered set is missing,
    FormatError for a shard that cannot be read and for a name that two shards hold, OutputError for
    an `output` that exists without `force`: then nothing is written.
    """
    path = folder if folder.name.endswith(".index.json") else folder / INDEX
    if not path.parent.is_dir():
        raise UsageError(f"{folder}: no such folder; give the folder that holds the shards")
    shards = sibling_files(path)
    if not shards and path.is_file() and path.with_name(WEIGHTS).is_file():
        shards = [path.with_name(WEIGHTS)]  # next to one file a stale index names it, or misleads
    if not shards:
        raise UsageError(
            f"{path.parent}: holds no shards; expected files named like "
            "model-00001-of-00002.safetensors; one file needs no index"
        )
    _refuse_missing_shard(path, shards)
    # The headers of the shards say which tensors there are.
    weight_map: dict[str, str] = {}
    total = 0
    for shard in shards:
        with ExitStack() as stack:
            file = open_bytes(shard)
            stack.callback(file.close)
            parsed = parse(file.view, str(shard))
            for name, info in parsed.infos.items():
                stored = parsed.carried.get(name, name)
                if stored in weight_map:
                    raise FormatError(
                        f"{path.parent}: tensor {stored!r} stands in {weight_map[stored]} and in "
                        f"{shard.name}; "
                        + _doubled_remedy(path, stored, (weight_map[stored], shard.name))
                    )
                weight_map[stored] = shard.name
                total += info.nbytes
    # A new index replaces the old one whole, or not at all.
    data = index_bytes(weight_map, total, _read_old_index(path)[1])
    target = path if output is None else output
    if output is not None and output.exists() and not force:
        raise OutputError(f"{output}: exists; use --force to replace it")
    with FileSet(force=True) as files:
        files.create(target).write(data)
    return WrittenIndex(target, len(data), len(weight_map), tuple(shard.name for shard in shards))


def _doubled_remedy(path: Path, name: str, shards: tuple[str, str]) -> str:
    """Return what to do about a tensor that two shards hold.

    Where the old index names both for tensors, each is of this model, and it is the copy that the
    index does not name that has to go.
    """
    named = _read_old_index(path)[0]
    taken = named.get(name)
    if taken not in shards or not {*shards} <= {*named.values()}:
        return "take the file away that is not of this model"
    stale = shards[1] if taken == shards[0] else shards[0]
    return (
        f"the index names {taken}, and {stale} for other tensors: both files are of this model; "
        f"write {stale} without the copy: aprfmt repair {path.parent} --by-index -o OUT"
    )


def _refuse_missing_shard(path: Path, shards: list[Path]) -> None:
    """Raise UsageError if a numbered set lacks a shard, whose tensors a new index would omit."""
    counts: dict[str, set[int]] = {}
    for shard in shards:
        match = SHARD.fullmatch(shard.name)
        if match:
            counts.setdefault(match["count"], set()).add(int(match["number"]))
    for count, numbers in counts.items():
        lacking = sorted({*range(1, int(count) + 1)} - numbers)
        if lacking and int(count) < 100_000:
            raise UsageError(
                f"{path.parent}: shard {lacking[0]} of {int(count)} is missing; an index without "
                "it would hide that; get the file, or take the other shards of that set away"
            )


def _read_old_index(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (weight map, metadata) of the existing index; empty without a readable one."""
    if not path.is_file():
        return {}, {}
    file = open_bytes(path)
    try:
        weight_map, metadata = parse_index(file.view[: MAX_INDEX + 1], path)
        return dict(weight_map), dict(metadata)
    except FormatError:
        return {}, {}
    finally:
        file.close()
