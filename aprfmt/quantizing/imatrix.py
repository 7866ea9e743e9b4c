"""Read and write importance matrices of llama.cpp: mean squares of the inputs of each column.

Two containers. GGUF: `NAME.in_sum2` [experts, columns] and `NAME.counts` [experts, 1], both F32,
with `imatrix.datasets`, `imatrix.chunk_count`, `imatrix.chunk_size` in the metadata. The legacy
file, all integers int32 and little-endian: entries; for each the name's length, the name, calls,
values, float32 values; then optionally the number of chunks, and length and name of the data set.
The weight used by an encoder is sum / count, and 1 for an expert that was never called.

Source: llama.cpp, tools/imatrix/imatrix.cpp and tools/quantize/quantize.cpp.
"""

from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.base.protocols import LazyTensor, Source, TensorInfo, TypedValue, Value
from aprfmt.base.text_escape import shorten
from aprfmt.errors import FormatError
from aprfmt.formats import open_sink, open_source
from aprfmt.formats.cursor import Cursor
from aprfmt.formats.foreign_formats import text_kind
from aprfmt.formats.mapped_file import open_bytes
from aprfmt.quantizing.mixture import base_name
from aprfmt.tensors.digest import file_sha256

_MAGIC = b"GGUF"
_SUMS, _COUNTS = ".in_sum2", ".counts"
_LONGEST_NAME = 1 << 12


@dataclass(frozen=True)
class ImportanceMatrix:
    """Importances by GGUF tensor name: float32 [columns] or [experts * columns]."""

    path: Path
    sha256: str
    entries: Mapping[str, NDArray[Any]]
    datasets: tuple[str, ...]
    chunks: int | None

    def of(self, name: str) -> NDArray[Any] | None:
        """Return a tensor's importance by GGUF name or role key; None if the file has none.

        It is float32 [columns] or [experts * columns].
        """
        base, suffix, layer = base_name(name)
        stored = f"{base}.{suffix}" if layer is None else f"blk.{layer}.{base}.{suffix}"
        return self.entries.get(stored)

    def records(self) -> list[tuple[str, Any, str]]:
        """Return (key, value, GGUF type) of the keys that llama-quantize writes into its output."""
        found: list[tuple[str, Any, str]] = [("quantize.imatrix.file", self.path.name, "string")]
        if self.datasets:
            found.append(("quantize.imatrix.dataset", self.datasets[0], "string"))
        found.append(("quantize.imatrix.entries_count", len(self.entries), "uint32"))
        if self.chunks is not None:
            found.append(("quantize.imatrix.chunks_count", self.chunks, "uint32"))
        return found


@dataclass
class InputSums:
    """Sums of squares [experts, columns] of a weight's inputs, and their rows [experts]."""

    sums: "NDArray[Any]"
    counts: "NDArray[Any]"

    @classmethod
    def empty(cls, experts: int, columns: int) -> "InputSums":
        """Return sums of no rows, zeros for each expert."""
        return cls(np.zeros((experts, columns)), np.zeros(experts))

    def add(self, expert: int, inputs: "NDArray[Any]") -> None:
        """Add the squares of rows of inputs [..., columns] to one expert's sums; count them."""
        rows = inputs.reshape(-1, self.sums.shape[1])
        self.sums[expert] += np.einsum("ij,ij->j", rows, rows, dtype=np.float64)
        self.counts[expert] += len(rows)


@dataclass(frozen=True)
class CollectedImatrix:
    """The sums collected over a text, by GGUF tensor name.

    `dataset` is the text's name, `chunks` the number of windows, `chunk_size` their tokens.
    """

    entries: Mapping[str, InputSums]
    dataset: str
    chunks: int
    chunk_size: int

    def write(self, path: Path, force: bool = False) -> None:
        """Write the matrix to a file in llama.cpp's GGUF form.

        Raises OutputError if `path` exists and `force` is not given.
        """
        arrays = {}
        for name in sorted(self.entries):
            entry = self.entries[name]
            arrays[name + _SUMS] = entry.sums.astype("<f4")
            arrays[name + _COUNTS] = entry.counts.reshape(-1, 1).astype("<f4")
        infos = [
            TensorInfo(name, array.shape, "F32", 0, array.nbytes, 4 * array.shape[-1])
            for name, array in arrays.items()
        ]
        metadata: dict[str, Value | TypedValue] = {
            "general.type": "imatrix",
            "imatrix.datasets": TypedValue([self.dataset], "array:string"),
            "imatrix.chunk_count": TypedValue(self.chunks, "uint32"),
            "imatrix.chunk_size": TypedValue(self.chunk_size, "uint32"),
        }
        with open_sink(path, "gguf", force=force) as sink:
            sink.plan(metadata, infos)
            for name, array in arrays.items():
                sink.write(name, [memoryview(array.tobytes())])


def read_imatrix(path: Path) -> ImportanceMatrix:
    """Return the importance matrix of a file: a GGUF, or llama.cpp's older binary format.

    Raises FormatError (TruncatedError) if it is neither of them, or damaged.
    """
    with closing(open_bytes(path)) as file:
        text = text_kind(bytes(file.view[:1024]))
        if text:
            raise FormatError(f"{path}: is {text}; expected an importance matrix of llama-imatrix")
        legacy = bytes(file.view[:4]) != _MAGIC
        read = _read_legacy(Cursor(file.view, str(path))) if legacy else None
    if read is None:
        with open_source(path) as source:  # all files of a split
            read = _read_gguf(source)
    return _make_matrix(path, file_sha256(path), read)


def _make_matrix(path: Path, digest: str, read: "_Read") -> ImportanceMatrix:
    """Return the importance matrix of what was read from the file `path`.

    `digest` is the file's SHA-256. Raises FormatError if it has no entries, a NaN or an infinity.
    """
    entries, datasets, chunks = read
    if not entries:
        raise FormatError(f"{path}: holds no importance of any tensor; expected NAME{_SUMS}")
    for name, values in entries.items():
        if not np.isfinite(values).all():
            at = int(np.argmin(np.isfinite(values)))
            raise FormatError(
                f"{path}: {shorten(name, 100)}: importance {at} is {values[at]}, expected a finite "
                "number; the matrix is damaged"
            )
    return ImportanceMatrix(path, digest, entries, datasets, chunks)


_Read = tuple[dict[str, "NDArray[Any]"], tuple[str, ...], int | None]


def _read_legacy(cursor: Cursor) -> _Read:
    """Return (entries by name, names of data sets, chunks or None) of a legacy file.

    Raises FormatError where it is damaged.
    """
    found: dict[str, NDArray[Any]] = {}
    for _ in range(cursor.count(4, 12, "imatrix entries")):
        length = cursor.count(4, 1, "length of an imatrix name", _LONGEST_NAME)
        name = cursor.text(length, "imatrix name")
        label = shorten(name, 100)
        calls = cursor.uint(4, f"{label}: calls")
        count = cursor.count(4, 4, f"{label}: values", 1 << 31)
        values = np.frombuffer(cursor.take(4 * count, f"{label}: values"), "<f4").astype(np.float32)
        if not count or calls >= 1 << 31:
            raise FormatError(
                f"{cursor.where}: {label}: {count} values over {calls} calls; expected a positive "
                "number of values; the file is damaged or not an importance matrix"
            )
        if name in found:
            raise FormatError(f"{cursor.where}: {label} occurs twice; expected every tensor once")
        found[name] = values / np.float32(calls) if calls else values
    if not cursor.remaining:
        return found, (), None
    chunks = cursor.uint(4, "imatrix chunks")
    if not cursor.remaining:
        return found, (), chunks
    length = cursor.count(4, 1, "length of the data set's name", 1 << 20)
    return found, (cursor.text(length, "data set name"),), chunks


def _read_gguf(source: Source) -> _Read:
    """Return (entries by name, names of data sets, chunks or None) of an imatrix GGUF.

    Raises FormatError for a GGUF of another type, or sums that do not fit their counts.
    """
    path = source.path
    found: dict[str, NDArray[Any]] = {}
    kind = source.metadata.get("general.type", "imatrix")
    if kind != "imatrix":
        raise FormatError(
            f"{path}: general.type is {shorten(str(kind), 100)!r}; expected 'imatrix'"
        )
    tensors = source.tensors
    for name in tensors:
        if name.endswith(_SUMS):
            found[name.removesuffix(_SUMS)] = _mean_squares(path, name, tensors)
    datasets = source.metadata.get("imatrix.datasets", ())
    chunks = source.metadata.get("imatrix.chunk_count")
    several = isinstance(datasets, Iterable) and not isinstance(datasets, (str, bytes))
    texts = tuple(map(str, datasets)) if several else ()
    return found, texts, chunks if type(chunks) is int else None


def _mean_squares(path: Path, name: str, tensors: Mapping[str, LazyTensor]) -> NDArray[Any]:
    """Return the mean squares of one weight, float32 [experts * columns]; 1 for unused experts.

    `name` is that of its sums. Raises FormatError for missing counts, or sizes that do not fit.
    """
    # Both tensors must exist, in F32.
    counted, label = tensors.get(name.removesuffix(_SUMS) + _COUNTS), shorten(name, 100)
    if counted is None:
        raise FormatError(
            f"{path}: {label} without {label.removesuffix(_SUMS)}{_COUNTS}; expected both"
        )
    arrays = []
    for tensor in (tensors[name], counted):
        if tensor.info.encoding != "F32":
            raise FormatError(
                f"{path}: {shorten(tensor.info.name, 100)} is {tensor.info.encoding}; expected F32 "
                "in an imatrix"
            )
        arrays.append(np.frombuffer(tensor.raw(), "<f4").astype(np.float32))
    # One row of sums for each count.
    sums, counts = arrays
    if not counts.size or not sums.size or sums.size % counts.size:
        raise FormatError(
            f"{path}: {label} has {sums.size} sums for {counts.size} counts; expected a multiple"
        )
    table = sums.reshape(counts.size, -1)
    called = counts > 0
    with np.errstate(over="ignore"):  # of a tiny count; what is infinite then is refused as such
        table[called] /= counts[called, None]
    table[~called] = 1
    return table.reshape(-1)
