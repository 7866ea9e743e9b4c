"""Finds where the index of a sharded model does not fit the shards in its folder.

Loaders open the file that the index names for a tensor and search no other. So a tensor in
another shard, or in a file that no index names, is not found although it is there.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from aprfmt.errors import FormatError
from aprfmt.formats.mapped_file import open_bytes
from aprfmt.formats.safetensors.layout import INDEX_SUFFIX
from aprfmt.formats.safetensors.parse import parse
from aprfmt.remote.paths import is_remote

SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")
REMEDY = "aprfmt repair --index"
# Source: transformers, modeling_utils.py (_get_resolved_checkpoint_files: the single file first);
# llama.cpp, conversion (get_model_part_names); vLLM, weight_utils.py
# (filter_duplicate_safetensors_files).
SINGLE = (
    "transformers and llama.cpp's converter load that file, vLLM and others that go by the index "
    "find no weights"
)
# Source: the same functions.
NO_INDEX = (
    "transformers finds no weights without it, llama.cpp's converter and vLLM read every shard"
)


@dataclass(frozen=True, slots=True)
class IndexFault:
    """One kind of fault of a shard index: the sentence, and all tensors or files concerned.

    `examples` are pairs (listed, found). `mended`: an index made anew from the shards is right.
    `by_index`: shards written anew by the index are right. `renamed`: the found files are right
    under the listed names.
    """

    says: str
    where: tuple[str, ...]
    examples: tuple[tuple[str, str], ...] = ()
    mended: bool = True
    by_index: bool = False
    renamed: bool = False


def index_repair_text(path: Path) -> str:
    """Return the command that makes the index at `path` anew; "" where no set of shards is whole.

    If a set in the folder is whole, a file that only the index names is not one of its shards, so
    that nothing is missing.
    """
    if not path.name.endswith(INDEX_SUFFIX) or is_remote(path) or not complete_set(path):
        return ""
    return _repair_command(path)


def _repair_command(path: Path) -> str:
    """Return the command that makes the index at `path` anew from the shards in its folder."""
    usual = path.name == f"model{INDEX_SUFFIX}"
    return f"{REMEDY} {shlex.quote(str(path.parent if usual else path))}"


def check_weight_map(
    path: Path,
    weight_map: Mapping[str, str],
    stored: Mapping[str, set[str]],
    faults: list[IndexFault] | None,
) -> None:
    """Compare a weight map with the names that each shard stores.

    Faults are added to `faults`; if that is None, FormatError is raised for the first.
    """
    # moved: in another shard; absent: in none; loose: not in the index.
    homes = {name: file for file, names in stored.items() for name in names}
    homes |= {name: file for name, file in weight_map.items() if name in stored.get(file, ())}
    moved = [name for name, file in weight_map.items() if homes.get(name, file) != file]
    absent = [name for name, file in weight_map.items() if file in stored and name not in homes]
    loose = [name for name in homes if name not in weight_map]
    if faults is None:
        _refuse_map(path, weight_map, homes, moved, absent, loose)
        return
    if moved:
        examples = tuple((f"{name} in {homes[name]}", weight_map[name]) for name in moved)
        says = (
            f"the index names another shard than the one that holds it for {_count_tensors(moved)}"
        )
        faults.append(IndexFault(says, tuple(moved), examples))
    if absent:
        first = f"{absent[0]!r}, said to be in {weight_map[absent[0]]}"
        says = f"the index names {_count_tensors(absent)} that no shard holds ({first})"
        lost = _lost_tensors(absent, homes)
        if lost:
            says += f"; the rest of its module is there: {lost[0]!r} is lost, get the shard again"
        faults.append(IndexFault(says, tuple(absent), mended=not lost))
    if loose:
        says = (
            f"the index does not name {_count_tensors(loose)} that its shards hold ({loose[0]!r})"
        )
        faults.append(IndexFault(says, tuple(loose)))


def _lost_tensors(absent: Sequence[str], held: Mapping[str, str]) -> list[str]:
    """Return the absent names whose module has other tensors: the model lost these tensors.

    No new index can mend that. The module of mtp.fc.weight is mtp. A name without a module, such as
    a tied head, and a module that is absent as a whole may never have been there.
    """
    modules = {name[:at] for name in held for at, sign in enumerate(name) if sign == "."}
    return [name for name in absent if ".".join(name.split(".")[:-2]) in modules]


def _refuse_map(
    path: Path,
    weight_map: Mapping[str, str],
    homes: Mapping[str, str],
    moved: Sequence[str],
    absent: Sequence[str],
    loose: Sequence[str],
) -> None:
    """Raise FormatError for the first tensor that the index gets wrong; nothing if there is none.

    `homes` maps each stored name to its file.
    """
    todo = f"make the index anew: {_repair_command(path)}"
    for name in (*absent, *moved):
        there = f"it is in {homes[name]}" if name in homes else "no other shard does"
        raise FormatError(
            f"{path}: tensor {name!r} is said to be in {weight_map[name]}, which does not hold it; "
            f"{there}; get the files of one model again, or {todo}"
        )
    for name in loose:
        raise FormatError(
            f"{path}: {homes[name]} holds tensor {name!r}, which the index does not list; get the "
            f"files of one model again, or {todo}"
        )


def find_replacement_shards(
    path: Path, homes: Mapping[str, Path], faults: list[IndexFault] | None
) -> dict[str, Path] | None:
    """Return {name: path} of the shards, or the one file, that replace a stale index's files.

    None if every file that the index names exists, if one exists and there is no single file, or if
    no other set is complete. A fault is added to `faults`; if that is None, FormatError is raised.
    """
    if is_remote(path):
        return None
    single = path.with_name(path.name.removesuffix(INDEX_SUFFIX) + ".safetensors")
    alone = single.is_file()
    if not alone and any(home.exists() for home in homes.values()):
        return None  # nearly every index: the rest are not looked for
    there = [name for name, home in homes.items() if alone and home.exists()]
    found = {} if there else complete_set(path)
    whole = f"while another set of {len(found)} is, whole"
    if not found and len(there) < len(homes) and alone:
        found, whole = {single.name: single}, f"while {single.name} is: {SINGLE}"
    if not found:
        return None
    lacking = [name for name in homes if name not in there]
    many = f"{len(lacking)} of" if there else "none of"
    says = (
        f"the index is stale: {many} the {len(homes)} shards it names "
        f"{'are missing' if there else 'is there'} ({lacking[0]}), {whole}"
    )
    todo = f"make the index anew: {_repair_command(path)}"
    if there:
        todo = f"take it away, and {there[0]} with it"
    if faults is None:
        raise FormatError(f"{path}: {says} ({next(iter(found))}); {todo}")
    pairs = tuple((new, named) for new, named in zip(found, lacking, strict=False))
    faults.append(IndexFault(says, tuple(lacking), pairs, mended=not there))
    return found


def absent_index(path: Path, faults: list[IndexFault] | None) -> dict[str, Path]:
    """Return {name: path} of the whole set of shards in the folder of an index that is not there.

    A fault is added to `faults`; if that is None, FormatError is raised. It is raised too where no
    set is whole.
    """
    found = complete_set(path)
    if not found:
        raise FormatError(f"{path}: no such file, and no whole set of shards is in its folder")
    says = f"the {len(found)} shards of a whole set have no index: {NO_INDEX}"
    if faults is None:
        raise FormatError(f"{path}: no such file; {says}; make it: {_repair_command(path)}")
    faults.append(IndexFault(says, tuple(found)))
    return found


def complete_set(path: Path) -> dict[str, Path]:
    """Return {name: path} of the only complete numbered set of shards next to an index, or {}."""
    sets: dict[str, dict[str, Path]] = {}
    for one in sorted(path.parent.iterdir()):
        match = SHARD.fullmatch(one.name)
        if match and match["stem"] == path.name.removesuffix(INDEX_SUFFIX):
            sets.setdefault(match["count"], {})[one.name] = one
    whole = [held for count, held in sets.items() if len(held) == int(count)]
    return whole[0] if len(whole) == 1 else {}


def find_renamed_shards(
    path: Path,
    weight_map: Mapping[str, str],
    homes: Mapping[str, Path],
    faults: list[IndexFault] | None,
) -> dict[str, Path]:
    """Return {name in the index: path} of missing shards that have other names in the folder.

    Such a file is the only one that no index names and that holds all tensors of the missing shard
    and none of another. A fault is added to `faults`; if that is None, FormatError is raised.
    """
    if is_remote(path):
        return {}
    lost = {name: set[str]() for name, home in homes.items() if not home.exists()}
    if not lost:
        return {}
    for name, home in weight_map.items():
        lost.get(home, set()).add(name)
    others = [
        (one, {*_stored_names(one)})
        for one in sorted(path.parent.glob("*.safetensors"))
        if one.name not in homes and not one.name.startswith(".")
    ]
    found = {}
    for home, names in lost.items():
        foreign = weight_map.keys() - names
        held = [one for one, stored in others if names <= stored and foreign.isdisjoint(stored)]
        if len(held) == 1:
            found[home] = held[0]
    if not found:
        return {}
    pairs = tuple((one.name, home) for home, one in found.items())
    says = f"{len(found)} of the {len(homes)} shards that the index names have another file name"
    if faults is None:
        todo = f"rename {pairs[0][0]} to {pairs[0][1]}"
        raise FormatError(f"{path}: {says} ({pairs[0][0]} for {pairs[0][1]}); {todo}")
    faults.append(IndexFault(says, tuple(found), pairs, mended=False, renamed=True))
    return found


def unlisted_files(path: Path, stored: Mapping[str, set[str]]) -> Iterator[IndexFault]:
    """Yield a fault for each file named like the shards whose tensors are in no shard."""
    if is_remote(path):
        return
    held = {name for names in stored.values() for name in names}
    for one in sibling_files(path):
        names = _stored_names(one) if one.name not in stored else []
        if names and held.isdisjoint(names):
            says = f"{one.name} holds {_count_tensors(names)} and is in no index ({names[0]}, ...)"
            yield IndexFault(says, tuple(names))


def sibling_files(path: Path) -> list[Path]:
    """Return the safetensors files in an index's folder that are named like its shards."""
    stem = path.name.removesuffix(INDEX_SUFFIX)
    return sorted(
        one for one in path.parent.glob(f"{stem}-*.safetensors") if not one.name.startswith(".")
    )


def _count_tensors(names: Sequence[str]) -> str:
    """Return the number of tensors in words: "2 tensors"."""
    return f"{len(names)} tensor{'s' * (len(names) != 1)}"


def _stored_names(path: Path) -> list[str]:
    """Return the names of a file's tensors, an empty list where it cannot be read."""
    try:
        file = open_bytes(path)
    except OSError:
        return []
    try:
        return list(parse(file.view, str(path)).infos)
    except FormatError:
        return []
    finally:
        file.close()
