"""Writes a sharded model anew with every tensor in the one shard that its index names."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from aprfmt.base.protocols import Source
from aprfmt.errors import FormatError, UsageError
from aprfmt.formats import open_source
from aprfmt.formats.atomic import FileSet
from aprfmt.formats.safetensors.index_check import sibling_files
from aprfmt.formats.safetensors.layout import INDEX_SUFFIX
from aprfmt.formats.safetensors.writer import SafetensorsSink
from aprfmt.formats.shard_index import ShardIndex, index_bytes, read_index
from aprfmt.model.hf_folder import INDEX, is_written_name
from aprfmt.model.manifest import MANIFEST_END
from aprfmt.tensors.runs import all_runs, byte_windows

_COPIED = 1 << 24  # bytes of another file copied at a time


@dataclass(frozen=True, slots=True)
class IndexedSet:
    """A set that was written: its folder, the tensors left out of each shard, files left out."""

    folder: Path
    shards: tuple[str, ...]
    tensors: int
    removed: Mapping[str, tuple[str, ...]]
    left_out: tuple[str, ...]


def write_by_index(folder: Path, output: Path, *, force: bool = False) -> IndexedSet:
    """Write the folder `output` with every tensor of the index in the shard that it names.

    Copies of a tensor in other shards are left out, so are shards that the index does not name and
    digests of the old files. Values, metadata and all other files of the folder itself are kept;
    `left_out` names its subfolders too, but no caches. Raises UsageError where the folder has no
    index, or the shards already hold what it says and no more; FormatError for a tensor that is not
    in its shard; OutputError for an `output` that exists without `force`. Then nothing is written.
    """
    path = folder if folder.name.endswith(INDEX_SUFFIX) else folder / INDEX
    if not path.is_file():
        raise UsageError(f"{folder}: has no {path.name}; give a folder of shards with their index")
    if output.resolve() == path.parent.resolve():
        raise UsageError(f"{output}: is the folder itself; name a new one with -o OUTPUT")
    index = read_index(path)
    with ExitStack() as stack:
        sources = {
            name: stack.enter_context(open_source(home)) for name, home in index.homes.items()
        }
        _refuse_misplaced(index, sources)
        removed = {
            name: tuple(each for each in source.tensors if index.weight_map.get(each) != name)
            for name, source in sources.items()
        }
        others = [each for each in sorted(path.parent.iterdir()) if each.is_file()]
        others = [each for each in others if each.name not in sources and each != path]
        unnamed = set(sibling_files(path))
        left_out = [each for each in others if each in unnamed or each.name.endswith(MANIFEST_END)]
        if not any(removed.values()) and not left_out:
            raise UsageError(f"{path}: the shards hold what it says and no more; nothing to do")
        folders = [
            each
            for each in sorted(path.parent.iterdir())
            if each.is_dir() and not each.name.startswith((".", "__"))
        ]
        with FileSet(force=force, folder=output, ours=is_written_name) as files:
            total = 0
            for name, source in sources.items():
                total += _write_shard(files, output / name, source, removed[name])
            data = index_bytes(index.weight_map, total, index.metadata)
            files.create(output / path.name).write(data)
            for each in others:
                if each not in left_out:
                    _copy_file(files, each, output / each.name)
    return IndexedSet(
        output,
        tuple(sources),
        len(index.weight_map),
        {name: names for name, names in removed.items() if names},
        tuple(each.name for each in (*left_out, *folders)),
    )


def _refuse_misplaced(index: ShardIndex, sources: Mapping[str, Source]) -> None:
    """Raise FormatError for a tensor that the index names in a shard without it."""
    lost = [name for name, home in index.weight_map.items() if name not in sources[home].tensors]
    if lost:
        raise FormatError(
            f"{index.path}: tensor {lost[0]!r} is not in {index.weight_map[lost[0]]}; first make "
            "an index that fits the shards: aprfmt repair --index"
        )


def _write_shard(files: FileSet, path: Path, source: Source, without: tuple[str, ...]) -> int:
    """Write one shard without some of its tensors; return the bytes of those that stay."""
    gone = set(without)
    kept = [one.info for name, one in source.tensors.items() if name not in gone]
    with SafetensorsSink(path, files=files) as sink:
        infos = sink.order(kept)
        sink.plan(dict(source.metadata), infos)
        for info in infos:
            data = byte_windows(all_runs(source.tensors[info.name]))
            sink.write(info.name, (memoryview(window) for window in data))
    return sum(info.nbytes for info in infos)


def _copy_file(files: FileSet, source: Path, target: Path) -> None:
    """Copy another file of the folder into the set, byte by byte."""
    made = files.create(target)
    with source.open("rb") as file:
        while piece := file.read(_COPIED):
            made.write(piece)
