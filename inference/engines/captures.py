"""Arrays that any engine dumped: a folder of .npy or raw .bin files, one .npz, one .safetensors.

Names are the engine's own. Every size is checked against the file before anything is read, nothing
is unpickled, and a name never leaves its folder.
"""

import math
import os
import struct
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.codecs import decode
from aprfmt.errors import AprfmtError, FormatError
from aprfmt.formats import open_source
from aprfmt.formats.bounded_json import load_file
from aprfmt.formats.mapped_file import open_regular
from aprfmt.inference.engines.npz import MAX_MEMBER, MAX_MEMBERS, NpzFile, read_header
from aprfmt.model.sidecar_files import file_row

Numbers = NDArray[Any]
IDS = "input_ids"
SHAPES = "shapes.json"  # of raw .bin files: name -> shape, or {"shape": ..., "dtype": ...}
MAX_JSON = 16 << 20
RAW = ("float32", "float16", "float64", "int32", "int64", "bfloat16")  # dtypes of a .bin


@dataclass(frozen=True)
class Captures:
    """Arrays by the engine's names, in the order of the file. `read` gives one of them."""

    path: Path
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]
    read: Callable[[str], Numbers]
    others: tuple[str, ...] = ()  # files of the folder that hold no array

    @property
    def ids(self) -> list[int] | None:
        """The token ids, if the engine dumped them as `input_ids`; FormatError for a batch."""
        if IDS not in self.shapes:
            return None
        shape = self.shapes[IDS]
        if self.dtypes[IDS][:3] not in ("int", "uin") or math.prod(shape) != max(shape, default=0):
            raise FormatError(
                f"{self.path}: {IDS} is {self.dtypes[IDS]} {list(shape)}; expected the ids of one "
                "sequence"
            )
        return [int(i) for i in self.read(IDS).reshape(-1)]

    @property
    def names(self) -> list[str]:
        """The names of what may be a point's value."""
        return [name for name in self.shapes if name != IDS]


@contextmanager
def open_captures(path: Path) -> Iterator[Captures]:
    """Open dumped arrays; FormatError for anything else, or what is damaged."""
    with ExitStack() as stack:
        if path.is_dir():
            yield _folder(path)
        elif _starts(path) == b"PK":
            file = NpzFile(path, stack)
            yield Captures(
                path, {name: shape for name, (shape, _) in file.arrays.items()},
                {name: dtype.name for name, (_, dtype) in file.arrays.items()}, file.read,
            )  # fmt: skip
        else:
            yield _tensors(path, stack)


def is_folder_of_arrays(path: Path) -> bool:
    """Say whether a path is a folder with .npy files, or .bin files and their shapes."""
    if not path.is_dir():
        return False
    return (path / SHAPES).is_file() or any(name.endswith(".npy") for name in _listed(path))


def _starts(path: Path) -> bytes:
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read(2)


def _listed(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise FormatError(f"{folder}: cannot be listed: {error.strerror}") from error


def _folder(folder: Path) -> Captures:
    files = [name for name in _listed(folder) if name.endswith((".npy", ".bin"))]
    if not files:
        raise FormatError(f"{folder}: no .npy or .bin file in it; expected one dumped array a file")
    if len(files) > MAX_MEMBERS:
        raise FormatError(f"{folder}: {len(files)} files; at most {MAX_MEMBERS} are read")
    found: dict[str, _FileArray] = {}
    stated = raw_shapes(folder)
    for file in files:
        name, path = file.rpartition(".")[0], folder / file
        if name in found:
            raise FormatError(f"{folder}: {name!r} is there as .npy and as .bin; keep one of them")
        found[name] = _npy(path) if file.endswith(".npy") else _raw(path, stated.get(name))
    return Captures(
        folder, {name: row.shape for name, row in found.items()},
        {name: row.dtype if row.dtype == "bfloat16" else np.dtype(row.dtype).name
         for name, row in found.items()},
        lambda name: found[name].read(), _others(folder, files),
    )  # fmt: skip


def _others(folder: Path, files: Collection[str]) -> tuple[str, ...]:
    """Return the files of a folder that hold no array, no text and no description of arrays."""
    return tuple(
        name
        for name in _listed(folder)
        if name not in files
        and name != SHAPES
        and not name.endswith(".map.json")
        and file_row(name).reading not in ("text", "without effect")
        and (folder / name).is_file()
    )


@dataclass(frozen=True)
class _FileArray:
    """An array in a file of its own, from a byte on; `dtype` says the byte order, too."""

    path: Path
    shape: tuple[int, ...]
    dtype: str
    start: int = 0
    fortran: bool = False

    def read(self) -> Numbers:
        """Return the numbers."""
        with os.fdopen(open_regular(self.path), "rb") as file:
            file.seek(self.start)
            raw = file.read(math.prod(self.shape) * _size(self.dtype))
        order: Any = "F" if self.fortran else "C"
        flat = numbers(raw, self.dtype, str(self.path))
        if flat.size != math.prod(self.shape):
            raise FormatError(f"{self.path}: was cut off while it was read")
        return flat.reshape(self.shape, order=order)


def _npy(path: Path) -> _FileArray:
    with os.fdopen(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        (shape, dtype), fortran = read_header(file, str(path), size)
        start = file.tell()
    if size > MAX_MEMBER:
        raise FormatError(f"{path}: {size} bytes; at most {MAX_MEMBER} of an array are read")
    if dtype.kind not in "fiub":
        raise FormatError(f"{path}: holds {dtype}; expected numbers")
    return _FileArray(path, shape, dtype.str, start, fortran)


def raw_shapes(folder: Path) -> dict[str, tuple[list[int], str]]:
    """Return (shape, dtype) of raw files by name, as shapes.json says them; {} without it."""
    path = folder / SHAPES
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


def _raw(path: Path, stated: tuple[list[int], str] | None) -> _FileArray:
    with os.fdopen(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
    if size > MAX_MEMBER:
        raise FormatError(f"{path}: {size} bytes; at most {MAX_MEMBER} of an array are read")
    shape, dtype = stated or ([size // 4], "float32")  # a single axis, until a mapping says more
    if math.prod(shape) * _size(dtype) != size:
        raise FormatError(
            f"{path}: {size} bytes; {dtype} {shape} takes {math.prod(shape) * _size(dtype)}; say "
            f"its shape in {SHAPES}"
        )
    return _FileArray(path, tuple(shape), dtype)


def _size(dtype: str) -> int:
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize


def numbers(raw: bytes, dtype: str, where: str) -> Numbers:
    """Return the numbers of raw bytes, in this machine's byte order."""
    if dtype == "bfloat16":
        return (np.frombuffer(raw, "<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    kind = np.dtype(dtype)
    if len(raw) % kind.itemsize:
        raise FormatError(f"{where}: ends inside a number; was it cut off?")
    return np.frombuffer(raw, kind).astype(kind.newbyteorder("="))


def _tensors(path: Path, stack: ExitStack) -> Captures:
    """Open a .safetensors file of arrays."""
    try:
        source = stack.enter_context(open_source(path))
    except struct.error as error:
        raise FormatError(f"{path}: is no file of arrays: {error}") from error
    integers = {"I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1", "BOOL": "?"}

    def read(name: str) -> Numbers:
        tensor = source.tensors[name]
        encoding, raw = tensor.info.encoding, bytes(tensor.raw())
        if encoding in integers:
            return np.frombuffer(raw, integers[encoding]).reshape(tensor.info.shape)
        try:
            values = decode(encoding, raw, tensor.info.shape)
        except AprfmtError as error:
            raise FormatError(f"{path}: {name}: {error}") from error
        return np.asarray(values, np.float64 if encoding == "F64" else np.float32)

    names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}
    return Captures(
        path, {name: tensor.info.shape for name, tensor in source.tensors.items()},
        {name: names.get(tensor.info.encoding, "int64" if tensor.info.encoding in integers else
                         tensor.info.encoding) for name, tensor in source.tensors.items()},
        read,
    )  # fmt: skip
