"""Dumps in many files: a folder for each rank, a file for each pass or for each array.

A *step* is one forward pass by its number. A rank's *part* is what it dumped of an array that ranks
divide. An *axis* is one of the ways in which ranks divide work: tensor, data, sequence or context
parallelism.

The arrays of a dump are read lazily. Ranks are put together first, then passes: what remains is one
sequence's arrays by name, with the token positions of their rows. Nothing is unpickled.
"""

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from aprfmt.base.dump_names import (
    RANK,
    DumpPlace,
    module_path,
    parse_dump_path,
    place_in_dump,
    rank_axis,
    rank_of_axis,
)
from aprfmt.base.text_escape import shorten
from aprfmt.errors import FormatError
from aprfmt.formats.bounded_json import load_file
from aprfmt.inference.engines.attention_groups import AttentionGroups, find_attention_groups
from aprfmt.inference.engines.captured_arrays import ArrayFile, ArrayFiles
from aprfmt.inference.engines.modules import points_named
from aprfmt.inference.engines.plain_names import plain_names
from aprfmt.inference.engines.rank_dims import Division
from aprfmt.inference.engines.rank_joining import (
    SUMMED,
    DumpedArray,
    JoinedArray,
    PointWidths,
    RankDisagreement,
    UnclearLayoutError,
    dims_of,
    join_ranks,
    may_be_summands,
    sum_ranks,
    width_of,
)
from aprfmt.inference.engines.rank_types import ranks_of_another_type

SPEC = "ranks.json"  # {"axes": {"tp": 2}, "arrays": {"*.o_proj": "t h", "*.q_proj": "t h[tp]"}}
MAX_SPEC = 1 << 20
MAX_FILES = 1 << 17
DEPTH = 6  # folders below the dump's
# What the last component of a name says about the batch of a pass -> what it is.
BATCH: Mapping[str, str] = {
    "input_ids": "ids",
    "token_ids": "ids",
    "inp_tokens": "ids",  # llama.cpp's
    "positions": "positions",
    "position_ids": "positions",
    "inp_pos": "positions",  # llama.cpp's
    "cu_seqlens": "starts",
    "cu_seqlens_q": "starts",
    "query_start_loc": "starts",
    "seq_lens": "lengths",
    "num_scheduled_tokens": "counts",
    "query_lens": "counts",
    "extend_seq_lens": "counts",
    "rids": "requests",
    "req_ids": "requests",
    "request_ids": "requests",
    "req_pool_indices": "requests",
    "attention_mask": "mask",
}
_SUFFIXES = (".pt", ".pth", ".npy", ".npz", ".safetensors")


@dataclass
class Pass:
    """One forward pass of the whole engine: its arrays by name, and what it says of its batch."""

    step: int
    stream: int  # of data-parallel ranks, whose requests are others
    arrays: dict[str, JoinedArray] = field(default_factory=dict)
    batch: dict[str, JoinedArray] = field(default_factory=dict)
    texts: dict[str, list[Any]] = field(default_factory=dict)  # lists that are no numbers
    left: dict[str, str] = field(default_factory=dict)  # arrays that were not joined, and why
    torn: dict[str, str] = field(default_factory=dict)  # those of which a file is damaged: the file


@dataclass(frozen=True)
class Dump:
    """All passes of a dump with their ranks put together, in order.

    `axes` are the sizes of the axes by which ranks divide work, `layouts` count how arrays were put
    together, `unequal` are arrays that ranks should hold alike and do not.
    """

    passes: tuple[Pass, ...]
    axes: Mapping[str, int]
    layouts: Mapping[str, int]
    unequal: tuple[tuple[int, RankDisagreement], ...] = ()
    others: tuple[str, ...] = ()
    broken: Mapping[str, str] = field(default_factory=dict)  # files that are damaged, and how
    of_ranks: Mapping[str, str] = field(default_factory=dict)  # ranks that are unlike the others


def dump_files(folder: Path) -> list[str]:
    """Return the paths of array files below a folder, relative to it, sorted in each folder.

    Folders deeper than DEPTH are not entered. FormatError for more than MAX_FILES.
    """
    found: list[str] = []
    for place, folders, files in os.walk(folder):
        below = Path(place).relative_to(folder)
        if len(below.parts) >= DEPTH:
            folders.clear()
        folders.sort()
        found += [(below / name).as_posix() for name in sorted(files) if name.endswith(_SUFFIXES)]
        if len(found) > MAX_FILES:
            raise FormatError(f"{folder}: more than {MAX_FILES} files of arrays, the limit")
    return found


def is_dump(folder: Path) -> bool:
    """Return whether a folder holds arrays of several ranks or passes, by its files' paths."""
    if not folder.is_dir() or (folder / "config.json").is_file():
        return False
    if (folder / SPEC).is_file():
        return True
    for path in dump_files(folder)[:1000]:
        place = parse_dump_path(path.rpartition(".")[0])
        if place.ranks or place.step is not None:
            return True
    return False


class RankSpec:
    """What `ranks.json` says: sizes of axes, and dims by patterns of names, the first that fits."""

    def __init__(self, folder: Path) -> None:
        """Read ranks.json of a folder, if it is there; FormatError if it is not understood."""
        self.axes: dict[str, int] = {}
        self._dims: dict[str, str] = {}
        path = folder / SPEC
        if not path.is_file():
            return
        said = load_file(path, MAX_SPEC)
        axes = said.get("axes", {}) if isinstance(said, dict) else None
        arrays = said.get("arrays", {}) if isinstance(said, dict) else None
        if not isinstance(axes, dict) or not isinstance(arrays, dict):
            raise FormatError(f"{path}: expected an object with axes and arrays")
        for axis, size in axes.items():
            if axis not in ("tp", "pp", "ep", "dp", "cp", "sp", RANK) or type(size) is not int:
                raise FormatError(f"{path}: axes: {axis!r}: {size!r}; expected such as tp: 2")
            self.axes[axis] = size
        for pattern, dims in arrays.items():
            if not isinstance(dims, str):
                raise FormatError(f"{path}: {pattern!r}: expected dims such as 't h[tp]'")
            self._dims[pattern] = dims

    def dims(self, name: str) -> str | None:
        """Return how ranks divide an array, as text: axes and the ranks that cut them, 't h[tp]'.

        None if ranks.json has nothing for the array's name.
        """
        from fnmatch import fnmatchcase

        return next((dims for key, dims in self._dims.items() if fnmatchcase(name, key)), None)


@dataclass
class _Rows:
    """Arrays of one pass by name and rank, in the order of the first rank's.

    `texts` are the lists that describe the batch, such as request ids, by name.
    """

    arrays: dict[str, dict[tuple[int, ...], DumpedArray]] = field(default_factory=dict)
    texts: dict[str, list[Any]] = field(default_factory=dict)


def read_dump(
    folder: Path, stack: ExitStack, widths_of: Callable[[Sequence[str]], PointWidths]
) -> Dump:
    """Return an engine's dump with the arrays of its ranks joined.

    A damaged file of one array is left out if the others of its pass and rank say the rest. Raises
    FormatError if a rank's part of an array is missing or there twice. `widths_of` gives the sizes
    that the model has for arrays of these names. `stack` closes the files.
    """
    spec = RankSpec(folder)
    files = ArrayFiles(stack)
    found, said, others, broken = _gather_arrays(folder, files)
    _refuse_lost_passes(found, broken)
    if not found:
        raise FormatError(f"{folder}: none of its files holds an array")
    names = list(dict.fromkeys(one.name for _, one in found))
    widths = widths_of(names)
    sizes = said | spec.axes
    every = [(step, one) for (step, _), one in found]
    groups = find_attention_groups(every, {one for one in names if _kind_of(one) == "ids"})
    shared: dict[int, tuple[Pass, list[RankDisagreement]]] = {}
    if groups is not None:
        # Arrays of every group's tokens are put together first, and are then cut to each group's.
        both = [(at, groups.shared(one)) for at, one in found if one.name in groups.gathered]
        axes, steps = _ranks_and_steps(folder, both, {k: n for k, n in sizes.items() if k != "dp"})
        for step, rows in steps.items():
            made, odd = _join_pass(folder, step, 0, rows, axes, spec, widths, broken, lone=True)
            shared[step] = _add_up_gathered(made, odd, rows, widths)
        found = [(at, groups.own(one)) for at, one in found if one.name not in groups.gathered]
        sizes |= groups.sizes
    axes, steps = _ranks_and_steps(folder, found, sizes)
    unequal = [(step, one) for step, (_, odd) in shared.items() for one in odd]
    passes: list[Pass] = []
    layouts: dict[str, int] = {}
    streams = axes.values.get("dp", [0])
    # Join the ranks of every step, once for each data-parallel stream.
    for step in sorted(steps):
        for stream in streams:
            try:
                made, odd = _join_pass(
                    folder, step, stream, steps[step], axes, spec, widths, broken
                )
            except FormatError:
                _refuse_other_order(folder, steps, axes)
                raise
            unequal += [(step, one) for one in odd]
            if groups is not None and step in shared:
                _add_gathered(made, shared[step][0], groups, names)
            passes.append(made)
            for one in made.arrays.values():
                layouts[one.how] = layouts.get(one.how, 0) + 1
    sizes = {axis: len(values) for axis, values in axes.values.items() if len(values) > 1}
    texts = {below: str(why).removeprefix(f"{folder / below}: ") for below, why in broken.items()}
    every_pass = [*passes, *(made for made, _ in shared.values())]
    for name, below in dict.fromkeys(pair for made in every_pass for pair in made.torn.items()):
        texts[below] += f"; no rank's part of {shorten(name, 80)} is compared"
    late = tuple(_late_outputs(passes))
    short = {
        rank: f"its values are {kind}, those of the other ranks are not"
        for axis in axes.values
        for rank, kind in ranks_of_another_type(every, axis)
    }
    return Dump(late, sizes, layouts, tuple(unequal), tuple(others), texts, short)


def _kind_of(name: str) -> str | None:
    """Return what an array of a dump says of its batch, such as "ids" or "positions".

    None for an array of computed values.
    """
    return BATCH.get(name.rpartition(".")[2])


def _ranks_and_steps(
    folder: Path,
    found: Sequence[tuple[tuple[int, dict[str, list[Any]]], DumpedArray]],
    sizes: Mapping[str, int],
) -> tuple["_Axes", dict[int, _Rows]]:
    """Return (the parallel axes of a dump's ranks, {step: its arrays}).

    `found` are ((step, batch lists), array), `sizes` the number of ranks of axes that files
    state.
    """
    coordinates = [
        dict(ranks) for ranks in dict.fromkeys(tuple(sorted(one.ranks.items())) for _, one in found)
    ]
    axes = _find_axes(folder, coordinates, sizes)
    return axes, _group_by_step(folder, found, axes)


def _add_up_gathered(
    made: Pass, unequal: Sequence[RankDisagreement], rows: _Rows, widths: PointWidths
) -> tuple[Pass, list[RankDisagreement]]:
    """Return (the pass, the ranks' disagreements that remain) with partial products summed.

    `unequal` are arrays of all groups' tokens in which ranks differ. One of a point that ranks
    sum is replaced in `made` by the sum of its ranks, if their values may be summands.
    """
    left = []
    for one in unequal:
        point = widths.points.get(one.name, "")
        ranks = [
            JoinedArray(one.name, row.shape, row.dtype, row.read, tiles=row.tiles)
            for _, row in sorted(rows.arrays[one.name].items())
        ]
        if point in SUMMED and may_be_summands(ranks, point):
            made.arrays[one.name] = sum_ranks(one.name, ranks)
        else:
            left.append(one)
    return made, left


def _add_gathered(made: Pass, shared: Pass, groups: AttentionGroups, names: Sequence[str]) -> None:
    """Add to the pass of one attention group its rows of arrays that hold all groups' tokens.

    `shared` has these arrays. `names` is the order of the pass's arrays after that. An array whose
    number of rows does not fit is noted in the pass's `left`.
    """
    made.left |= shared.left
    for name, one in shared.arrays.items():
        rows = groups.rows_of_group(one, made.step, made.stream)
        if rows is None:
            made.left[name] = f"{list(one.shape)}: neither one group's tokens nor those of all"
        else:
            made.arrays[name] = rows
    made.arrays = {name: made.arrays[name] for name in names if name in made.arrays}


@dataclass(frozen=True)
class _Axes:
    """The axes of parallelism by which a dump's ranks differ.

    `values` are the ranks' numbers along each axis. `alias` has the axis that stands for another
    one with the same numbers.
    """

    values: Mapping[str, list[int]]
    alias: Mapping[str, str]

    def coordinates(self, ranks: Mapping[str, int]) -> tuple[int, ...]:
        """Return a rank's number along each axis, in order.

        For an axis that `ranks` does not name it is the axis's first number.
        """
        return tuple(ranks.get(axis, values[0]) for axis, values in self.values.items())

    def rename_divisions(self, dims: Sequence[Division] | None) -> tuple[Division, ...] | None:
        """Return an array's divisions with each axis under the name that the ranks use.

        None for None. Where files state only which process a rank is, the process number is the
        rank along the one axis that divides the array. FormatError where several axes divide it.
        """
        if dims is None:
            return None
        alias = dict(self.alias)
        if set(self.values) == {RANK}:
            named = {one.axis for one in dims}
            if len(named) > 1:
                raise FormatError(
                    f"dims divide an array among {' and '.join(sorted(named))} ranks, and its "
                    "files say only which process each is of; dump them with these ranks"
                )
            alias |= dict.fromkeys(named, RANK)
        return tuple(
            Division(alias.get(one.axis, one.axis), one.dimension, one.how) for one in dims
        )


def _find_axes(folder: Path, ranks: Sequence[Mapping[str, int]], sizes: Mapping[str, int]) -> _Axes:
    """Return the parallel axes (tp, pp, ...) of a dump; FormatError names a rank that is missing.

    `ranks` are the numbers of each rank by axis, `sizes` the sizes of axes that files name. Two
    numbers that always go together count as one axis.
    """
    found: dict[str, list[int]] = {}
    alias: dict[str, str] = {}
    for axis in ("tp", "cp", "sp", "ep", "pp", "dp", RANK):
        values = sorted({one[axis] for one in ranks if axis in one})
        size = sizes.get(axis, 0)
        if not values or (len(values) == 1 and size <= 1 and values[0] == 0):
            continue
        # Two numbers that always go together are one axis.
        same = next(
            (
                other
                for other in found
                if len({(one.get(other), one.get(axis)) for one in ranks})
                == len(values)
                == len(found[other])
            ),
            None,
        )
        if same is not None:
            alias[axis] = same
            continue
        if (
            axis == RANK
            and found
            and len({tuple(one.get(a) for a in found) for one in ranks}) == (len(ranks))
        ):
            continue  # the others say which rank it was
        missing = sorted(set(range(max(values[-1] + 1, size))) - set(values))
        if missing:
            # Names say how many there were only where they say a size.
            of, more = (f" of {size}", "") if size > values[-1] else ("", ", and perhaps more")
            raise FormatError(
                f"{folder}: {rank_of_axis(axis)} {', '.join(map(str, missing[:8]))}{of} is "
                f"missing; there are {', '.join(map(str, values))}{more}"
            )
        found[axis] = values
    # Every combination of ranks must be there.
    axes = _Axes(found, alias)
    there = {axes.coordinates(one) for one in ranks}
    grid: list[tuple[int, ...]] = [()]
    for values in found.values():
        grid = [(*at, value) for at in grid for value in values]
    lost = [at for at in grid if at not in there]
    if lost:
        words = ", ".join(f"{axis} {number}" for axis, number in zip(found, lost[0], strict=True))
        raise FormatError(
            f"{folder}: the rank {words} is missing; {len(there)} of {len(grid)} are there"
        )
    return axes


def _gather_arrays(
    folder: Path, files: ArrayFiles
) -> tuple[
    list[tuple[tuple[int, dict[str, list[Any]]], DumpedArray]],
    dict[str, int],
    list[str],
    dict[str, FormatError],
]:
    """Return (arrays of files, {parallel axis: ranks}, files without an array, damaged files).

    The number of ranks of an axis, such as tp, is there where a file says it. Each array comes as
    ((step, batch lists), array). The step is -1 if its path says none. Batch lists are {name: list}
    of its file's lists that describe the batch, such as request ids.
    """
    read: list[_ReadFile] = []
    sizes: dict[str, int] = {}
    others: list[str] = []
    broken: dict[str, FormatError] = {}
    for below in dump_files(folder):
        place = parse_dump_path(below.rpartition(".")[0])
        try:
            file = files.open(folder / below)
        except FormatError as error:
            broken[below] = error
            continue
        if not file.names:
            others.append(below)
            continue
        place, dims, inner = _place_of_file(place, file, sizes)
        read.append(_ReadFile(below, file, place, dims, inner))
    found: list[tuple[tuple[int, dict[str, list[Any]]], DumpedArray]] = []
    for below, file, place, dims, inner in _without_file_names(read):
        step = _step_of(place)
        texts = {name: value for name, value in file.lists.items() if _kind_of(name) is not None}
        for name, stored in inner.items():
            shape, dtype = file.names[stored]
            found.append(
                (
                    (step, texts),
                    DumpedArray(
                        name,
                        place.ranks,
                        shape,
                        dtype,
                        file.reader(stored),
                        below,
                        dims,
                        file.stored(stored),
                        file.tiles(stored),
                    ),
                )
            )
    return found, sizes, others, broken


class _ReadFile(NamedTuple):
    """A file of a dump's folder: its path below it, its arrays, and what its path says of them.

    `dims` are the dims that it states, `inner` is {array's name: name in the file}.
    """

    below: str
    file: ArrayFile
    place: DumpPlace
    dims: str
    inner: dict[str, str]


def _without_file_names(read: Sequence[_ReadFile]) -> list[_ReadFile]:
    """Return the files, those with names that need no file's name before them without it.

    So it is where more of a file's own names are capture points than with the file's name, and no
    other file of its pass and rank has an array of such a name: `acts.logits` is `logits`.
    """
    made = [one if (bare := _bare_names(one)) is None else one._replace(inner=bare) for one in read]
    names = Counter(
        (_step_of(one.place), tuple(sorted(one.place.ranks.items())), name)
        for one in made
        for name in one.inner
    )
    twice = {(step, ranks) for (step, ranks, _), count in names.items() if count > 1}
    return [
        old if (_step_of(old.place), tuple(sorted(old.place.ranks.items()))) in twice else new
        for old, new in zip(read, made, strict=True)
    ]


def _bare_names(one: _ReadFile) -> dict[str, str] | None:
    """Return {name: name in the file} without the file's name; None where that makes no points."""
    stem = f"{one.place.name}."
    if not one.place.name:
        return None
    bare = {name.removeprefix(stem): stored for name, stored in one.inner.items()}
    points, own = (sum(bool(points_named(name)) for name in names) for names in (bare, one.inner))
    return bare if points > own and len(bare) == len(one.inner) else None


def _refuse_lost_passes(
    found: Sequence[tuple[tuple[int, dict[str, list[Any]]], DumpedArray]],
    broken: Mapping[str, FormatError],
) -> None:
    """Raise the error of a damaged file if nothing else tells of the pass that it belonged to.

    Another array that the same rank stored in the same pass would tell of it. A file that has no
    array's name, or that has the ids or positions of a batch, is always refused.
    """
    passes = {(step, tuple(sorted(one.ranks.items()))) for (step, _), one in found}
    for below, error in broken.items():
        place = parse_dump_path(below.rpartition(".")[0])
        step = _step_of(place)
        last = place.name.rpartition(".")[2]
        if not last or last in BATCH or (step, tuple(sorted(place.ranks.items()))) not in passes:
            raise error


def _place_of_file(
    place: DumpPlace, file: ArrayFile, sizes: dict[str, int]
) -> tuple[DumpPlace, str, dict[str, str]]:
    """Return (where a file's arrays belong, their dims, {name: name in the file}).

    Sizes of axes that the file names are added to `sizes`.
    """
    meta = {
        key.removeprefix("meta."): value
        for key, value in file.values.items()
        if key.startswith("meta.")
    }
    names = list(file.names)
    # SGLang's dumper writes one array a file, with its facts next to the value.
    named = bool(meta.get("name") or place.name)
    if meta and named and any(name == "value" or name.startswith("value.") for name in names):
        ranks = dict(place.ranks)
        for key, value in meta.items():
            last = key.rpartition(".")[2]
            axis = rank_axis(last)
            if axis and type(value) is int and (axis not in ranks or last == f"{axis}_rank"):
                ranks[axis] = value
            size = rank_axis(last.removesuffix("_size") + "_rank") if last.endswith("_size") else ""
            if size and type(value) is int:
                sizes[size] = max(value, sizes.get(size, 1))
        step = meta.get("step", meta.get("forward_pass_id", place.step))
        layer = meta.get("layer_id", place.layer)
        own = layer if type(layer) is int else None
        name = module_path(str(meta["name"]), own) if meta.get("name") else place.name
        inner = {
            name + stored.removeprefix("value"): stored
            for stored in names
            if stored == "value" or stored.startswith("value.")
        }
        where = DumpPlace(name, ranks, step if type(step) is int else place.step, None)
        return where, str(meta.get("dims") or ""), inner
    stem = f"{place.name}." if place.name else ""
    called = {f"{stem}{name}": name for name in names}
    if len(names) == 1 and names[0] == "":
        called = {place.name: names[0]}
    return place, "", {plain: called[name] for plain, name in plain_names(called).items()}


def _group_by_step(
    folder: Path, found: Sequence[tuple[tuple[int, dict[str, list[Any]]], DumpedArray]], axes: _Axes
) -> dict[int, _Rows]:
    """Return {step: its arrays by name and rank, and its batch lists}.

    FormatError if a rank has an array twice, or if ranks have different steps.
    """
    steps: dict[int, _Rows] = {}
    origin: dict[tuple[int, str, tuple[int, ...]], str] = {}
    held: dict[tuple[int, ...], dict[int, set[str]]] = {}
    # Group the arrays; a rank may have each only once.
    for (step, texts), one in found:
        at = axes.coordinates(one.ranks)
        before = origin.setdefault((step, one.name, at), one.origin)
        if before != one.origin:
            words = (
                ", ".join(f"{axis} {number}" for axis, number in zip(axes.values, at, strict=True))
                or "the rank"
            )
            raise FormatError(
                f"{folder}: {shorten(one.name, 80)!r} of {words} is there twice: {before} and "
                f"{one.origin}; were two runs dumped into one folder? keep one of them"
            )
        row = steps.setdefault(step, _Rows())
        row.arrays.setdefault(one.name, {})[at] = one
        row.texts.update(texts)
        held.setdefault(at, {}).setdefault(step, set()).add(one.name)
    # All ranks must have the same steps.
    every = {at: _own_steps(names, held.values()) for at, names in held.items()}
    kinds = {frozenset(one) for one in every.values()}
    if len(kinds) > 1 and "dp" not in axes.values:
        counts = {at: len(held) for at, held in every.items()}
        least, most = min(counts, key=counts.__getitem__), max(counts, key=counts.__getitem__)
        lost = sorted(every[most] - every[least])
        raise FormatError(
            f"{folder}: {_rank_words(axes, least)} has {counts[least]} steps, "
            f"{_rank_words(axes, most)} has "
            f"{counts[most]} (step {', '.join(map(str, lost[:4]))}); expected the same steps of "
            "every rank: a rank is cut off, or of another run"
        )
    return steps


def _own_steps(
    names: Mapping[int, set[str]], ranks: Collection[Mapping[int, set[str]]]
) -> set[int]:
    """Return the numbers of the forward passes that one rank ran.

    `names` are the names of its arrays by step, `ranks` those of every rank. The last step is left
    out if it holds only late outputs of the step before. It stays if another rank lacks that step
    and has such outputs in an earlier one, for then the other rank's files are cut off.
    """
    steps = sorted(names)
    last = names[steps[-1]]
    others = (one for one in ranks if steps[-1] not in one)
    late = last <= _late_names([names[step] for step in steps])
    alone = late and all(last.isdisjoint(own) for one in others for own in one.values())
    return set(steps[:-1] if alone and steps[0] >= 0 else steps)


def _late_names(steps: Sequence[Collection[str]]) -> set[str]:
    """Return the names of arrays that are written one step late: only the first step lacks them.

    `steps` are the names of each step's arrays. Arrays that describe the batch are never late.
    """
    if len(steps) < 2:
        return set()
    late = set.intersection(*map(set, steps[1:])) - set(steps[0])
    return {name for name in late if not name.startswith("model.") and _kind_of(name) is None}


def _refuse_other_order(folder: Path, steps: Mapping[int, _Rows], axes: _Axes) -> None:
    """Raise FormatError if two ranks of a dump hold the same passes in different orders.

    Passes are matched by the token ids and positions that each rank stored of them.
    """
    said: dict[tuple[int, ...], dict[int, list[bytes]]] = {}
    for step in sorted(steps):
        for name, parts in steps[step].arrays.items():
            if _kind_of(name) not in ("ids", "positions"):
                continue
            for at, one in parts.items():
                held = np.ascontiguousarray(one.read()).tobytes()
                said.setdefault(at, {}).setdefault(step, []).append(held)
    for (at, own), (other, theirs) in combinations(said.items(), 2):
        if own == theirs or sorted(own.values()) != sorted(theirs.values()):
            continue
        step = next(step for step in own if own[step] != theirs.get(step))
        home = next((number for number in own if own[number] == theirs.get(step)), step)
        raise FormatError(
            f"{folder}: {_rank_words(axes, other)} has the passes of {_rank_words(axes, at)} in "
            f"another order: its {place_in_dump(step, 'step')} has the tokens of "
            f"{place_in_dump(home, 'step')}; number its files in the order in which they ran"
        )


def _rank_words(axes: _Axes, at: Sequence[int]) -> str:
    """Return a rank in words, such as "tp 1 pp 0", of its coordinates `at`, one for each axis."""
    return " ".join(f"{axis} {number}" for axis, number in zip(axes.values, at, strict=True)) or (
        "the rank"
    )


def _join_pass(
    folder: Path,
    step: int,
    stream: int,
    rows: _Rows,
    axes: _Axes,
    spec: RankSpec,
    widths: PointWidths,
    broken: Collection[str],
    lone: bool = False,
) -> tuple[Pass, list[RankDisagreement]]:
    """Return (a pass with its ranks put together, what ranks should hold alike and do not).

    `rows` are the arrays of `step` by name and rank. `stream` is the data-parallel rank whose
    requests are read. An array whose division is unclear is left out, with the reason in the
    pass's `left`, and so is one of which a part is in one of the `broken` files, named in its
    `torn`. Raises FormatError where ranks contradict each other or the layout, and where no array
    is left. With `lone` none need be left, since the caller adds others.
    """
    place = f"{folder}: {place_in_dump(step, 'step')}".removesuffix(": ")
    made = Pass(step, stream)
    made.texts = rows.texts
    order = list(axes.values)
    unequal: list[RankDisagreement] = []
    whole: dict[str, dict[tuple[int, ...], JoinedArray]] = {}
    dims: dict[str, tuple[Division, ...] | None] = {}
    # Take the arrays of this data-parallel rank, with their dims.
    for name, parts in rows.arrays.items():
        kept = {
            at: one
            for at, one in parts.items()
            if "dp" not in axes.values or at[order.index("dp")] == stream
        }
        if not kept:
            continue
        whole[name] = {
            at: JoinedArray(
                name, one.shape, one.dtype, one.read, "whole", one.stored, tiles=one.tiles
            )
            for at, one in kept.items()
        }
        try:
            dims[name] = axes.rename_divisions(dims_of(list(kept.values()), spec.dims(name)))
        except FormatError as error:
            if str(error).startswith("dims "):
                raise FormatError(f"{place}: {name}: {error}") from None
            raise
    # What a pass says of its batch first: it gives the count of tokens.
    names = sorted(whole, key=lambda name: _kind_of(name) is None)
    tokens: int | None = None
    for name in names:
        kind = _kind_of(name)
        odd: list[RankDisagreement] = []
        torn = _damaged_part(name, rows.arrays[name].values(), step, stream, broken)
        if torn:
            # Ranks that hold it whole do not say whether theirs is one summand of a sum.
            made.torn[name] = torn
            continue
        try:
            found = _join_axes(name, whole[name], axes, dims[name], widths, tokens, odd)
        except UnclearLayoutError as error:
            made.left[name] = str(error).removeprefix(f"{name}: ")
            continue
        except FormatError as error:
            raise FormatError(f"{place}: {error}") from None
        if kind is None:
            made.arrays[name] = found
            unequal += odd
            continue
        if odd:
            first, second = odd[0].ranks
            raise FormatError(
                f"{place}: {rank_of_axis(odd[0].axis)}s {first} and {second} are of other "
                f"runs: their {name} differ"
            )
        made.batch.setdefault(kind, found)
        if kind == "ids":
            tokens = int(np.prod(found.shape, dtype=np.int64))
    left = {**made.left, **{name: f"{file} is damaged" for name, file in made.torn.items()}}
    if left and not made.arrays and not lone:
        name, why = next(iter(left.items()))
        raise FormatError(f"{place}: {name}: {why}")
    # Put the arrays back in the order of the dump.
    made.arrays = {name: made.arrays[name] for name in whole if name in made.arrays}
    return _add_up_partials(made, unequal, whole, widths)


def _damaged_part(
    name: str, parts: Iterable[DumpedArray], step: int, stream: int, broken: Collection[str]
) -> str:
    """Return the damaged file that has a rank's part of an array in one step; "" without one.

    `parts` are the parts of the ranks whose files were read, `stream` is the data-parallel rank
    that is read, `broken` are the paths of all damaged files. A file of several arrays has those
    whose names begin with its own.
    """
    read = [one.ranks for one in parts]
    for below in broken:
        place = parse_dump_path(below.rpartition(".")[0])
        if f"{name}.".startswith(f"{place.name}.") and step == _step_of(place):
            ranks = place.ranks.items()
            own = any(ranks <= one.items() and bool(ranks) == bool(one) for one in read)
            if not own and place.ranks.get("dp", stream) == stream:
                return below
    return ""


def _step_of(place: DumpPlace) -> int:
    """Return the step that a path states; -1 for the only pass of a dump without steps."""
    return -1 if place.step is None else place.step


def _join_axes(
    name: str,
    parts: Mapping[tuple[int, ...], JoinedArray],
    axes: _Axes,
    dims: Sequence[Division] | None,
    widths: PointWidths,
    tokens: int | None,
    unequal: list[RankDisagreement],
) -> JoinedArray:
    """Return one array joined along every axis, in the order of `axes`.

    `parts` are by coordinates of their rank. `dims` says how the array is divided (None: its size
    decides, with `widths` of the model), `tokens` is the length of the step. Ranks that should be
    equal and are not are added to `unequal`. FormatError if a rank lacks its part.
    """
    held = dict(parts)
    for number, axis in enumerate(axes.values):
        groups: dict[tuple[int, ...], dict[int, JoinedArray]] = {}
        for at, one in held.items():
            groups.setdefault((*at[:number], -1, *at[number + 1 :]), {})[at[number]] = one
        size = len(axes.values[axis])
        held = {}
        for at, group in groups.items():
            few = axis not in ("pp", "dp") and len(group) < size
            if few and not _is_whole(name, group, widths):
                lost = [str(one) for one in axes.values[axis] if one not in group]
                words = f"{rank_of_axis(axis)} {', '.join(lost[:8])} of {size}"
                raise FormatError(f"{name}: {words} lacks it")
            said = () if axis == "pp" else dims
            held[at] = join_ranks(name, group, axis, said, widths, tokens, unequal)
    (found,) = held.values()
    return found


def _is_whole(name: str, group: Mapping[int, JoinedArray], widths: PointWidths) -> bool:
    """Return whether the arrays that ranks have of one point are not divided among them.

    Then nothing is lost where the other ranks have none, as where rank 0 alone keeps the logits.
    `group` is {rank: array}; an array with all columns of its point is undivided. True also for an
    array that describes the batch and for one of unknown width.
    """
    whole = widths.widths.get(name)
    each = {width_of(one.shape) for one in group.values()}
    return _kind_of(name) is not None or whole is None or all(one >= whole for one in each)


def _add_up_partials(
    made: Pass,
    unequal: list[RankDisagreement],
    parts: Mapping[str, Mapping[tuple[int, ...], JoinedArray]],
    widths: PointWidths,
) -> tuple[Pass, list[RankDisagreement]]:
    """Return (the pass, the ranks' disagreements that remain) with partial products summed.

    `unequal` are arrays whose ranks differ, `parts` the ranks' arrays of each name. An array is a
    product before an all-reduce if its point is in SUMMED, the next replicated array is equal on
    all ranks, and no rank's values are another's. It is replaced in `made` by its sum.
    """
    wrong = {one.name for one in unequal}
    alike = [name for name, one in made.arrays.items() if one.how == "replicated"]
    left = []
    for one in unequal:
        after = alike[alike.index(one.name) + 1 :] if one.name in alike else []
        point, ranks = widths.points.get(one.name, ""), list(parts[one.name].values())
        summed = point in SUMMED and after and after[0] not in wrong
        if summed and may_be_summands(ranks, point):
            made.arrays[one.name] = sum_ranks(one.name, ranks)
        else:
            left.append(one)
    return made, left


def _late_outputs(passes: Sequence[Pass]) -> Iterator[Pass]:
    """Yield passes, each with the outputs that the dump has in the next pass's file.

    SGLang's hook writes a file when the inner model returns. What is computed after that, such as
    the logits, is in the next file: the first file lacks it and all others have it.
    """
    for stream in dict.fromkeys(one.stream for one in passes):
        own = [one for one in passes if one.stream == stream]
        late = _late_names([one.arrays for one in own]) if own[0].step >= 0 else set()
        for one, after in zip(own, [*own[1:], None], strict=True):
            arrays = {name: row for name, row in one.arrays.items() if name not in late}
            if after is not None:
                arrays |= {name: after.arrays[name] for name in sorted(late)}
            if arrays:
                yield Pass(one.step, one.stream, arrays, one.batch, one.texts, one.left)
