"""Arrays that any engine dumped: a folder of .npy, .pt or raw .bin files, or one file of several.

One file is an .npz, a .safetensors, or what torch.save wrote. Names are the engine's own; what is
nested in a .pt is named by its path (`model.layers.0.1`). Every size is checked against the file
before anything is read, nothing is unpickled, and a name never leaves its folder.
"""

import io
import math
import os
import re
import struct
import sys
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.base.dump_names import SHAPES_FILE, tuple_member
from aprfmt.base.protocols import Source
from aprfmt.errors import AprfmtError, FormatError, UnsupportedError
from aprfmt.formats import open_source
from aprfmt.formats.bounded_json import load_file
from aprfmt.formats.mapped_file import (
    changed_error,
    file_identity,
    first_bytes,
    in_mapped_file,
    open_regular,
)
from aprfmt.formats.pytorch.layout import is_zip
from aprfmt.formats.pytorch.state_dict import ALONE
from aprfmt.inference.engines.modules import is_of_tower, points_named
from aprfmt.inference.engines.node_names import parse_node_name
from aprfmt.inference.engines.npz import MAX_MEMBER, MAX_MEMBERS, ORDER, NpzFile, read_header
from aprfmt.inference.engines.stored_arrays import (
    INTEGERS,
    FilePool,
    Region,
    StoredArray,
    StoredBytes,
    region_of,
)
from aprfmt.inference.engines.tiles import Tiles
from aprfmt.model.hf_folder import captured_files
from aprfmt.model.sidecar_files import file_row

Numbers = NDArray[Any]
IDS = "input_ids"
MAX_JSON = 16 << 20
PICKLED = (".pt", ".pth")  # files of torch.save
_SEVERAL = (*PICKLED, ".npz")  # files that may hold several arrays
ARRAYS = (".npy", ".bin", *_SEVERAL)
STORED = ".safetensors"  # may hold captures, or parameters
# Files that a model's folder has, and a folder of captures has not.
_OF_MODELS = ("config.json", "params.json", "model_index.json")
_OF_WEIGHTS = (".gguf", ".apr", ".index.json")
RAW = ("float32", "float16", "float64", "int32", "int64", "bfloat16")  # dtypes of a .bin


MOST_PARTS = 1000  # files of one dump, by a file's name
_READ = 1 << 18  # of a file that is read: the pieces of two ranks fit a core's own cache


def _no_bytes(name: str) -> StoredBytes | None:
    """Return None: the stored bytes of no array are offered."""
    return None


def _no_tiles(name: str) -> Tiles | None:
    """Return None: every array is read as a whole."""
    return None


def _no_region(name: str) -> Region | None:
    """Return None: no file has the array's values as plain bytes."""
    return None


@dataclass(frozen=True)
class Captures:
    """Arrays by the engine's names, in the order of the file. `read` gives one of them.

    `stored` gives an array's stored bytes, None where they are compressed or computed. `tiles`
    gives one whose blocks can be read by themselves: it holds what `read` returns, on two axes.
    `region` says where a file has the array's bytes, None where they are not in it as they are.
    """

    path: Path
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]
    read: Callable[[str], Numbers]
    others: tuple[str, ...] = ()  # files of the folder that hold no array
    listed: tuple[int, ...] | None = None  # token ids that a .pt holds as a list
    values: Mapping[str, Any] = field(default_factory=dict)  # of a .pt: what is no array
    rows: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # positions, where not all
    left: Mapping[str, str] = field(default_factory=dict)  # arrays that are not read, and why
    lost: frozenset[str] = frozenset()  # those of `left` that are points, or rows of them
    facts: Mapping[str, Any] = field(default_factory=dict)  # of a dump: ranks, passes, remarks
    alone: bool = False  # a file of torch.save that is one tensor
    stored: Callable[[str], StoredBytes | None] = _no_bytes
    tiles: Callable[[str], Tiles | None] = _no_tiles
    region: Callable[[str], Region | None] = _no_region
    opens: bool = False  # `read` and `stored` open the file by themselves: it may be closed
    repeats: "tuple[RepeatedRows, ...]" = ()  # requests of a dump with the same tokens

    @property
    def ids(self) -> list[int] | None:
        """Token ids that were dumped as `input_ids` or as a list; None without any.

        FormatError for ids that are not those of one sequence.
        """
        if IDS not in self.shapes:
            return None if self.listed is None else list(self.listed)
        shape = self.shapes[IDS]
        if self.dtypes[IDS][:3] not in ("int", "uin") or math.prod(shape) != max(shape, default=0):
            raise FormatError(
                f"{self.path}: {IDS} is {self.dtypes[IDS]} {list(shape)}; expected the ids of one "
                "sequence"
            )
        return [int(i) for i in self.read(IDS).reshape(-1)]

    @property
    def names(self) -> list[str]:
        """Names of the arrays that may be a point's value: all but the token ids."""
        return [name for name in self.shapes if name != IDS]


@dataclass(frozen=True)
class RepeatedRows:
    """Two requests of a dump with the same first tokens, and the arrays of each for these tokens.

    `requests` names both. `own` are the rows of the request that is read as the trace, `other`
    those of the second request.
    """

    requests: str
    own: Captures
    other: Captures


@contextmanager
def open_captures(path: Path) -> Iterator[Captures]:
    """Yield the Captures of a folder or file of arrays, closed after the `with`.

    FormatError for anything else, or what is damaged.
    """
    with ExitStack() as stack:
        if path.is_dir():
            yield _open_folder(path, stack)
        elif _is_npz(path):
            yield _with_missing_parts(_captures_of_npz(NpzFile(path, stack)))
        else:
            yield _with_missing_parts(_open_tensors(path, stack))


# `dump_part1of2`, `x-00001-of-00002`: a file's number, and how many there are.
_PART = re.compile(
    r"(?:(?:part|shard|chunk|piece)[_.-]?|(?<=[_.-])(?=\d{5}\D))(\d{1,5})[_.-]?of[_.-]?(\d{1,5})(?!\d)",
    re.IGNORECASE,
)


def _with_missing_parts(found: Captures) -> Captures:
    """Return the Captures of one file with the other parts as `left`, where its name counts them.

    They are the parts that the name of the file speaks of; what they hold is not compared.
    """
    name = found.path.name
    said = _PART.search(name)
    if said is None or not 0 <= int(said[1]) <= int(said[2]) <= MOST_PARTS:
        return found
    beside = set(_sorted_names(found.path.parent)) if found.path.parent.is_dir() else set()
    start, end = said.span(1)
    names = {at: f"{name[:start]}{at:0{end - start}}{name[end:]}" for at in range(int(said[2]) + 1)}
    first = 0 if int(said[1]) == 0 or names[0] in beside else 1
    others = [names[at] for at in range(first, first + int(said[2])) if at != int(said[1])]
    why = {True: "is not read: give the folder of all parts", False: "is not there"}
    left = {each: f"part of the same dump; it {why[each in beside]}" for each in others}
    return replace(found, left={**found.left, **left})


def _is_npz(path: Path) -> bool:
    """Return whether a file is a zip archive, and none of torch.save: the `.npz` of numpy."""
    head = first_bytes(path)
    return head[:2] == b"PK" and not is_zip(head)


def _captures_of_npz(file: NpzFile) -> Captures:
    """Return the arrays of an .npz; those that hold no numbers are `left`, with the reason."""
    held = {name: row for name, row in file.arrays.items() if row[1].kind != "U"}
    left = {name: "holds text" for name in file.arrays if name not in held and name != ORDER}
    left |= file.left
    return Captures(
        file.path,
        {name: shape for name, (shape, _) in held.items()},
        {name: dtype.name for name, (_, dtype) in held.items()},
        file.read,
        left=left,
        lost=frozenset(filter(points_named, left)),
    )


def is_folder_of_arrays(path: Path) -> bool:
    """Return whether a path is a folder of arrays: .npy, .pt, .bin with shapes, or .safetensors.

    A folder with a model's configuration is a model, even if its weights are saved as .pt. A
    folder's .safetensors count where all of them hold captured arrays.
    """
    if not path.is_dir():
        return False
    names = _sorted_names(path)
    if SHAPES_FILE in names or any(name.endswith(".npy") for name in names):
        return True
    model = any(name in _OF_MODELS or name.endswith(".index.json") for name in names)
    if not model and any(name.endswith(PICKLED) for name in names):
        return True
    return bool(stored_capture_files(path)) or _are_parts_of_one_run(captured_files(path))


def _are_parts_of_one_run(files: Sequence[Path]) -> bool:
    """Return whether several .npz files can be of one run: at most one of them has token ids.

    Or several have the same ids, and no array is in two files.
    """
    if len(files) < 2:
        return False
    try:
        with ExitStack() as stack:
            opened = [NpzFile(path, stack) for path in files]
            ids = [file.read(IDS) for file in opened if IDS in file.arrays]
            counts = Counter(name for file in opened for name in file.arrays if name != IDS)
            same = all(np.array_equal(ids[0], one) for one in ids[1:])
            return len(ids) <= 1 or (same and max(counts.values(), default=0) <= 1)
    except AprfmtError:
        return False


def stored_capture_files(folder: Path) -> list[str]:
    """Return the names of a folder's .safetensors if they together hold outputs of modules.

    [] where one holds parameters, or where other files of the folder are a model's weights.
    """
    names = [name for name in _sorted_names(folder) if not name.startswith(".")]
    files = [name for name in names if name.endswith(STORED)]
    if not files or any(name.endswith(_OF_WEIGHTS) for name in names) or len(files) > MAX_MEMBERS:
        return []
    held: list[tuple[str, Sequence[int]]] = []
    try:
        for name in files:
            with open_source(folder / name) as source:
                held += [(own, tensor.info.shape) for own, tensor in source.tensors.items()]
            if any(own.endswith(_PARAMETERS) for own, _ in held):
                return []
    except AprfmtError:
        return []
    return files if _are_outputs(held) else []


def is_pickled_captures(path: Path) -> bool:
    """Return whether a file of torch.save has the token ids of a pass, or outputs of modules."""
    try:
        with open_source(path) as source:
            known = IDS in source.tensors or _token_ids(source.metadata) is not None
            return known or _are_outputs(_shapes(source))
    except AprfmtError:
        return False


def is_stored_captures(path: Path) -> bool:
    """Return whether a .safetensors file has outputs of modules, and no parameters."""
    try:
        with open_source(path) as source:
            return _are_outputs(_shapes(source))
    except AprfmtError:
        return False  # opening it as a model raises the reason


_PARAMETERS = (".weight", ".bias")


def _shapes(source: Source) -> list[tuple[str, Sequence[int]]]:
    """Return (name, shape) of every tensor of a file."""
    return [(name, tensor.info.shape) for name, tensor in source.tensors.items()]


def _are_outputs(arrays: Sequence[tuple[str, Sequence[int]]]) -> bool:
    """Return whether arrays, given as (name, shape), were captured and are no parameters.

    That needs a name of a capture point, of a module whose output is one, or of a tower's module;
    the logits alone count only next to the run's token ids. No name may end as a parameter's does.
    All arrays that have a row for each token must have equally many rows, and the logits as many or
    one. Parameters with such names fail this: a norm's has one axis, and a matrix has a row for
    each output. Arrays of three axes are not looked at.
    """
    if any(name.endswith(_PARAMETERS) for name, _ in arrays):
        return False
    rows: set[int] = set()
    head_rows: set[int] = set()
    per_token = any(name == IDS for name, _ in arrays)
    for name, shape in arrays:
        if 0 in shape:
            continue  # it holds nothing, so that it says nothing
        per_token |= is_of_tower(name)  # whose modules are no points
        kinds = {point.rows for point in points_named(name)}
        held = _without_leading_ones(shape)
        count = held[0] if len(held) == 2 else 1
        if "logits" in kinds:
            head_rows.add(count)
        elif kinds:
            per_token = True
            # llama.cpp's last nodes have only the rows that logits are wanted of.
            last = count == 1 and parse_node_name(name) is not None
            if "tokens" in kinds and len(held) <= 2 and not last:
                rows.add(count)
    ids = next((math.prod(shape) for name, shape in arrays if name == IDS), 0)
    if ids in rows:  # joined passes may give a module more rows, as where it expands a cache
        return True
    return per_token and len(rows) <= 1 and (not rows or head_rows <= {1, *rows})


def _without_leading_ones(shape: Sequence[int]) -> Sequence[int]:
    """Return a shape without the axes of size 1 before its last two: a batch of one sequence."""
    while len(shape) > 2 and shape[0] == 1:
        shape = shape[1:]
    return shape


def _sorted_names(folder: Path) -> list[str]:
    """Return the names in a folder, sorted; FormatError if it cannot be listed."""
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise FormatError(f"{folder}: cannot be listed: {error.strerror}") from error


def read_array_file(path: Path, stack: ExitStack) -> Captures:
    """Open one file and return its arrays by name, "" for an array without one.

    FormatError for a damaged file. `stack` closes it.
    """
    if path.suffix == ".npy":
        row = _open_npy(path)
        return Captures(
            path,
            {"": row.shape},
            {"": np.dtype(row.dtype).name},
            lambda _: row.read(),
            stored=lambda _: row.stored(),
            region=lambda _: row.region,
            opens=True,
        )
    if _is_npz(path):
        file = NpzFile(path, stack)
        for name, why in file.left.items():
            raise UnsupportedError(f"{path}: {name!r}: {why}")
        return Captures(
            path,
            {name: shape for name, (shape, _) in file.arrays.items()},
            {name: dtype.name for name, (_, dtype) in file.arrays.items()},
            file.read,
        )
    found = _open_tensors(path, stack)
    if list(found.shapes) == [path.stem] and found.alone:
        (shape,), (dtype,) = found.shapes.values(), found.dtypes.values()
        return replace(
            found,
            shapes={"": shape},
            dtypes={"": dtype},
            read=lambda _: found.read(path.stem),
            stored=lambda _: found.stored(path.stem),
            tiles=lambda _: found.tiles(path.stem),
            region=lambda _: found.region(path.stem),
        )
    return found


def _open_folder(folder: Path, stack: ExitStack) -> Captures:
    """Return the arrays of a folder by file name; FormatError for too many or a double name.

    A damaged file is put into `left`, with the reason; FormatError where all are damaged. An
    array of a file that holds several is called FILE.NAME. It is called NAME if the folder has
    only this file, or if NAME alone is the name of a capture point and no other file has it.
    """
    stored = stored_capture_files(folder)
    files = [name for name in _sorted_names(folder) if name.endswith(ARRAYS) or name in stored]
    if not files:
        raise FormatError(
            f"{folder}: no .npy or .bin file in it, and no .pt; expected one dumped array a file"
        )
    if len(files) > MAX_MEMBERS:
        raise FormatError(f"{folder}: {len(files)} files; at most {MAX_MEMBERS} are read")
    found: dict[str, _FileArray] = {}
    held: dict[str, tuple[Captures, str]] = {}  # arrays of files that hold several
    ids: tuple[int, ...] | None = None
    stated = raw_shapes(folder)
    broken: dict[str, FormatError] = {}
    # Open every file; a .pt may hold several arrays.
    opened: dict[str, Captures] = {}
    single: dict[str, _FileArray] = {}
    for file in files:
        stem, path = file.rpartition(".")[0], folder / file
        try:
            if file.endswith((*_SEVERAL, STORED)):
                opened[file] = _open_several(path, stack)
            else:
                raw = not file.endswith(".npy")
                single[file] = _open_raw(path, stated.get(stem)) if raw else _open_npy(path)
        except FormatError as error:
            broken[file] = error
    if len(broken) == len(files):
        raise broken[files[0]]
    counts = Counter(name for inside in opened.values() for name in inside.shapes)

    def is_point(stem: str, name: str) -> bool:
        """Return whether an array of the file `stem` may be called `name` alone, not FILE.NAME.

        It may where no other file has the name, and the name alone is that of a capture point.
        """
        return counts[name] == 1 and bool(points_named(name)) > bool(points_named(f"{stem}.{name}"))

    for file in files:
        stem = file.rpartition(".")[0]
        if file in broken:
            continue
        if file in opened:
            inside = opened[file]
            ids = ids or inside.listed
            alone = list(inside.shapes) == [stem] or len(files) == 1
            names = {
                each if alone or each == IDS or is_point(stem, each) else f"{stem}.{each}": each
                for each in inside.shapes
            }
        else:
            names = {stem: stem}
        for name, own in names.items():
            if name == IDS and IDS in held and file in opened:
                apart = all(count == 1 for each, count in counts.items() if each != IDS)
                if apart and np.array_equal(held[IDS][0].read(IDS), opened[file].read(IDS)):
                    continue  # each part of a run may repeat them
                raise FormatError(
                    f"{folder}: {held[IDS][0].path.name} and {file} each hold the token ids of a "
                    "pass; give the path of one of them, or a folder for each request"
                )
            if name in found or name in held:
                raise FormatError(
                    f"{folder}: {name!r} is there in two files, the second is {file}; keep one of "
                    "them"
                )
            if file in opened:
                held[name] = inside, own
            else:
                found[name] = single[file]
    # Join the arrays of both kinds of files under their names.
    shapes = {name: row.shape for name, row in found.items()}
    dtypes = {
        name: row.dtype if row.dtype == "bfloat16" else np.dtype(row.dtype).name
        for name, row in found.items()
    }
    for name, (inside, own) in held.items():
        shapes[name], dtypes[name] = inside.shapes[own], inside.dtypes[own]

    def read(name: str) -> Numbers:
        """Return the values of a name in the folder: a file's, or an array's inside a file."""
        if name not in held:
            return found[name].read()
        inside, own = held[name]
        return inside.read(own)

    pool = FilePool(stack)

    def tiles(name: str) -> Tiles | None:
        """Return a folder's array by its name, as blocks of rows and columns.

        None where it has to be read as a whole.
        """
        if name in held:
            inside, own = held[name]
            return inside.tiles(own)
        region = found[name].region
        return None if region is None else pool.array(region, str(region.path)).tiles()

    left = {file: str(why).removeprefix(f"{folder / file}: ") for file, why in broken.items()}
    lost = {
        file
        for file in broken
        if file.endswith((*_SEVERAL, STORED)) or points_named(file.rpartition(".")[0])
    }
    others = _other_files(folder, files)
    return Captures(
        folder, shapes, dtypes, read, others, ids, left=left, lost=frozenset(lost), tiles=tiles
    )


def _open_several(path: Path, stack: ExitStack) -> Captures:
    """Return the arrays of a file that may hold several; `stack` closes the file."""
    return read_array_file(path, stack) if path.suffix == ".npz" else _open_tensors(path, stack)


def _other_files(folder: Path, files: Collection[str]) -> tuple[str, ...]:
    """Return the files of a folder that hold no array, no text and no description of arrays."""
    return tuple(
        name
        for name in _sorted_names(folder)
        if name not in files
        and name != SHAPES_FILE
        and not name.endswith(".map.json")
        and file_row(name).reading not in ("text", "without effect")
        and (folder / name).is_file()
    )


# Dtypes of files of one array -> how such numbers are called where they are stored by range.
_ENCODINGS: Mapping[str, str] = {
    "<f4": "F32", "<f2": "F16", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
}  # fmt: skip


@dataclass(frozen=True)
class _FileArray:
    """An array in a separate file, from a byte on; `dtype` says the byte order, too.

    `identity` is the file's content; "" where it may change.
    """

    path: Path
    shape: tuple[int, ...]
    dtype: str
    start: int = 0
    fortran: bool = False
    identity: str = ""

    @property
    def nbytes(self) -> int:
        """The size in bytes of the array's numbers in the file."""
        return math.prod(self.shape) * _item_size(self.dtype)

    @property
    def region(self) -> Region | None:
        """Where the file has the numbers; None where they are not little-endian floats in order."""
        code = _ENCODINGS.get(self.dtype)
        if code is None or self.fortran or not self.identity or sys.byteorder != "little":
            return None
        return Region(self.path, self.identity, self.start, self.nbytes, code, self.shape)

    def _open(self) -> int:
        """Return a file descriptor; FormatError where the file changed since it was described.

        A file that became too short is returned: the caller, who reads it, reports that.
        """
        fd = open_regular(self.path)
        facts = os.fstat(fd)
        whole = facts.st_size >= self.start + self.nbytes
        if whole and self.identity and file_identity(facts) != self.identity:
            os.close(fd)
            raise changed_error(self.path)
        return fd

    def read(self) -> Numbers:
        """Return the array's numbers in their shape; FormatError if the file was cut off."""
        raw = np.empty(self.nbytes, np.uint8)
        with os.fdopen(self._open(), "rb", buffering=0) as file:
            file.seek(self.start)
            if _read_into(file, raw.data) < len(raw):
                raise FormatError(f"{self.path}: was cut off while it was read")
        order: Any = "F" if self.fortran else "C"
        return decode_numbers(raw, self.dtype, str(self.path)).reshape(self.shape, order=order)

    def stored(self) -> StoredBytes:
        """Return the bytes of the array's numbers, in their order in the file."""
        return StoredBytes(f"{self.dtype} {self.fortran}", self._windows)

    def _windows(self) -> Generator[memoryview, None, None]:
        """Yield the bytes of the array's numbers in windows; FormatError if the file is cut off."""
        left = self.nbytes
        buffer = memoryview(bytearray(min(_READ, left)))
        with os.fdopen(self._open(), "rb", buffering=0) as file:
            file.seek(self.start)
            while left:
                got = file.readinto(buffer[: min(_READ, left)])
                if not got:
                    raise FormatError(f"{self.path}: was cut off while it was read")
                yield buffer[:got]
                left -= got


def _read_into(file: io.RawIOBase, buffer: memoryview) -> int:
    """Fill a buffer from a file's position on; return how many bytes the file had for it."""
    done = 0
    while done < len(buffer) and (got := file.readinto(buffer[done:])):
        done += got
    return done


def _open_npy(path: Path) -> _FileArray:
    """Return where the array of a .npy file is, with its shape and dtype; no number is read.

    Raises FormatError for a file that is damaged or too large, or holds anything but numbers.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        facts = os.fstat(file.fileno())
        size = facts.st_size
        (shape, dtype), fortran = read_header(file, str(path), size)
        start = file.tell()
    if size > MAX_MEMBER:
        raise FormatError(f"{path}: {size} bytes; at most {MAX_MEMBER} of an array are read")
    if dtype.kind not in "fiub":
        raise FormatError(f"{path}: holds {dtype}; expected numbers")
    return _FileArray(path, shape, dtype.str, start, fortran, file_identity(facts))


def raw_shapes(folder: Path) -> dict[str, tuple[list[int], str]]:
    """Return {name: (shape, dtype)} of raw files, as shapes.json says them; {} without it.

    Raises FormatError where shapes.json is not an object, or gives a size or dtype that cannot be
    read.
    """
    path = folder / SHAPES_FILE
    if not path.is_file():
        return {}
    said = load_file(path, MAX_JSON)
    if not isinstance(said, dict):
        raise FormatError(f"{path}: holds a {type(said).__name__}; expected names and shapes")
    found = {}
    for name, row in said.items():
        shape = row.get("shape") if isinstance(row, dict) else row
        dtype = row.get("dtype", "float32") if isinstance(row, dict) else "float32"
        if not isinstance(shape, list) or not all(type(n) is int and 0 <= n for n in shape):
            raise FormatError(f"{path}: {name!r}: {str(row)[:80]!r}; expected a list of sizes")
        if dtype not in RAW:
            raise FormatError(
                f"{path}: {name!r}: dtype {str(dtype)[:40]!r}; expected one of {', '.join(RAW)}"
            )
        found[name.removesuffix(".bin")] = (shape, dtype)
    return found


def _open_raw(path: Path, stated: tuple[list[int], str] | None) -> _FileArray:
    """Return the array of a raw .bin file; FormatError if its size does not fit the shape.

    `stated` are shape and dtype of shapes.json; without them it is one axis of float32.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        facts = os.fstat(file.fileno())
    size = facts.st_size
    if size > MAX_MEMBER:
        raise FormatError(f"{path}: {size} bytes; at most {MAX_MEMBER} of an array are read")
    shape, dtype = stated or ([size // 4], "float32")  # a single axis, until a mapping says more
    if math.prod(shape) * _item_size(dtype) != size:
        raise FormatError(
            f"{path}: {size} bytes; {dtype} {shape} takes "
            f"{math.prod(shape) * _item_size(dtype)}; say "
            f"its shape in {SHAPES_FILE}"
        )
    return _FileArray(path, tuple(shape), dtype, identity=file_identity(facts))


def _item_size(dtype: str) -> int:
    """Return the bytes of one number of a dtype."""
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize


def decode_numbers(raw: bytes | NDArray[np.uint8], dtype: str, where: str) -> Numbers:
    """Return the numbers of raw bytes as a flat array in this machine's byte order.

    `dtype` is numpy's name, or "bfloat16", whose numbers become float32. `where` names the file and
    array in errors. FormatError if the bytes end inside a number.
    """
    kind = np.dtype("<u2" if dtype == "bfloat16" else dtype)
    if len(raw) % kind.itemsize:
        raise FormatError(f"{where}: ends inside a number; was it cut off?")
    if dtype == "bfloat16":
        return (np.frombuffer(raw, kind).astype(np.uint32) << np.uint32(16)).view(np.float32)
    return np.frombuffer(raw, kind).astype(kind.newbyteorder("="), copy=isinstance(raw, bytes))


FLOATS: dict[str, str] = {
    "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64",
}  # fmt: skip
_DTYPES = FLOATS | {name: np.dtype(kind).name for name, kind in INTEGERS.items()}


def _open_tensors(path: Path, stack: ExitStack) -> Captures:
    """Return the arrays of a .safetensors or torch.save file, unread; `stack` closes it.

    FormatError for anything else.
    """
    wanted = "a file of arrays (.npz, .safetensors or .pt)"
    try:
        source = stack.enter_context(open_source(path, wanted=wanted))
    except struct.error as error:
        raise FormatError(f"{path}: is no file of arrays: {error}") from error
    pickled = source.format == "pytorch"
    names = {name: name for name in source.tensors}
    if pickled:
        names = _names_without_stem(list(source.tensors), path.stem)

    def array(name: str) -> StoredArray:
        """Return the array of this name as the file stores it, unread."""
        tensor = source.tensors[names[name]]
        info = tensor.info
        return StoredArray(
            f"{path}: {name}",
            info.encoding,
            tuple(info.shape),
            info.nbytes,
            tensor.raw,
            tensor.drop,
        )

    # Describe every tensor; values are read later.
    infos = {name: source.tensors[own].info for name, own in names.items()}
    dtypes = {name: _DTYPES.get(row.encoding, row.encoding) for name, row in infos.items()}
    ids = _token_ids(source.metadata) if pickled else None
    values = source.metadata if pickled else {}
    shapes = {name: row.shape for name, row in infos.items()}
    alone = pickled and list(source.tensors) == [ALONE]
    return Captures(
        path,
        shapes,
        dtypes,
        lambda name: array(name).read(),
        (),
        ids,
        values,
        alone=alone,
        stored=lambda name: array(name).stored(),
        tiles=lambda name: (
            array(name).tiles() if in_mapped_file(source.tensors[names[name]]) else None
        ),
        region=lambda name: region_of(source.tensors[names[name]]),
    )


def _names_without_stem(paths: list[str], stem: str) -> dict[str, str]:
    """Return {array name: path of the tensor in the .pt file}.

    A tensor that is alone has the name `stem`, the file's. A module's outputs are often saved as
    the tuple that it returns: an only element has the tuple's name.
    """
    if paths == [ALONE]:
        return {stem: ALONE}
    numbered: dict[str, set[str]] = {}  # arrays under each numbered member of a name
    for path in paths:
        parts = path.split(".")
        for at, part in enumerate(parts):
            if part.isdigit():
                numbered.setdefault(".".join(parts[:at]), set()).add(path)
    known = set(paths)
    found: dict[str, str] = {}
    for path in paths:
        above, number = tuple_member(path) or ("", -1)
        only = number == 0 and numbered[above] == {path} and above not in known
        found[above if only else path] = path
    return found


def _token_ids(values: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return a torch.save file's token ids; None if `input_ids` is no list of whole numbers."""
    said = values.get(IDS)
    if not isinstance(said, list) or not said or not all(type(one) is int for one in said):
        return None
    return tuple(said)
