"""Saved traces: one safetensors file, tensors under their keys, everything else in its header.

Header key `aprfmt.trace` holds one JSON object: schema, run (prompt, ids, model, backend,
versions), records (point, layer, shape, positions, dtype, form, device, statistics, hash),
aliases. Values are F32, F64 if the arithmetic was float64, I64 for expert ids.
"""

import math
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.base.protocols import Source, TensorInfo, Value
from aprfmt.errors import AprfmtError, FormatError, UsageError
from aprfmt.formats import FORMATS, open_sink, open_source
from aprfmt.formats.bounded_json import dumps, loads
from aprfmt.formats.positional_io import read_at
from aprfmt.formats.temporary_files import as_output_error
from aprfmt.inference.record import Record, record_from_json
from aprfmt.inference.trace import SCHEMA, Trace

Numbers = NDArray[Any]
HEADER = "aprfmt.trace"
MAX_HEADER = 64 << 20
_ENCODINGS: Mapping[str, str] = {"float32": "F32", "float64": "F64", "int64": "I64"}
_DTYPES: Mapping[str, str] = {name: dtype for dtype, name in _ENCODINGS.items()}
_WINDOW = 8 << 20
_NO_ROOM = "cannot hold the values of the trace while it runs (another place: TMPDIR)"


class Spool:
    """Values of a running trace in a temporary file, which is deleted when it is closed."""

    def __init__(self, folder: Path | None = None) -> None:
        """Open a temporary file in `folder`, or the system's; OutputError if that fails."""
        self._folder = folder or Path(tempfile.gettempdir())
        with as_output_error(self._folder, _NO_ROOM):
            self._file = tempfile.TemporaryFile(dir=folder)
        self._places: dict[str, tuple[int, str, tuple[int, ...]]] = {}
        self._end = 0

    def keep(self, record: Record, values: Numbers) -> None:
        """Append the values of a record, as F32, F64 or I64."""
        data = np.ascontiguousarray(values)
        if data.dtype.name not in _ENCODINGS:
            data = data.astype(np.int64 if data.dtype.kind in "iub" else np.float32)
        self._places[record.key] = (self._end, data.dtype.name, data.shape)
        with as_output_error(self._folder, _NO_ROOM):
            self._file.write(data.data.cast("B") if data.size else b"")
        self._end += data.nbytes

    def fetch(self, key: str) -> Numbers | None:
        """Return the values of a key, read from the file; None if it was not stored."""
        if key not in self._places:
            return None
        offset, dtype, shape = self._places[key]
        with as_output_error(self._folder, _NO_ROOM):
            self._file.flush()
        raw = read_at(self._file.fileno(), math.prod(shape) * np.dtype(dtype).itemsize, offset)
        return np.frombuffer(raw, dtype).reshape(shape)

    def close(self) -> None:
        """Close and delete the file; errors of delayed writes are ignored."""
        with suppress(OSError):
            self._file.close()

    def __enter__(self) -> "Spool":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close and delete the file, whatever the error."""
        self.close()


def refuse_partial_trace(trace: Trace, path: Path) -> None:
    """Raise UsageError for a trace that has only some values of its points (printed text)."""
    if trace.masks:
        raise UsageError(
            f"{path}: of {len(trace.masks)} points only printed values are there, which is not "
            "enough to save; compare the text itself with --reference"
        )


def save_trace(path: Path, trace: Trace, *, force: bool = False) -> None:
    """Write a trace whose values can be fetched; OutputError if `path` cannot be written.

    Records without values (statistics only) are written without a tensor. Raises UsageError for a
    trace of printed text, which has only some values: the missing ones would become zeros.
    """
    refuse_partial_trace(trace, path)

    infos = []
    for key in trace.records:
        values = trace.fetch(key)
        if values is not None:
            encoding = _ENCODINGS[values.dtype.name]
            infos.append(TensorInfo(key, values.shape, encoding, 0, values.nbytes, None))
    infos = FORMATS["safetensors"].order(infos)
    with open_sink(path, "safetensors", force=force) as sink:
        sink.plan({HEADER: dumps(_to_json(trace), str(path))}, infos)
        for info in infos:
            values = trace.fetch(info.name)
            assert values is not None
            sink.write(info.name, byte_windows(values))


def byte_windows(values: Numbers) -> Iterator[memoryview]:
    """Yield an array's bytes in windows of at most _WINDOW bytes, as a sink takes them."""
    data = np.ascontiguousarray(values)
    raw = data.data.cast("B") if data.size else memoryview(b"")
    for start in range(0, len(raw), _WINDOW):
        yield raw[start : start + _WINDOW]


def _to_json(trace: Trace) -> Mapping[str, Value]:
    """Return the JSON object of a trace's header."""
    found = trace.to_json()
    return {"schema": SCHEMA, "run": found.pop("trace"), **found}


def is_trace_file(path: Path) -> bool:
    """Return whether a file is a model container that holds a saved trace."""
    if not path.is_file():
        return False
    try:
        with open_source(path) as source:
            return HEADER in source.metadata
    except AprfmtError:
        return False  # opening it raises the reason


@contextmanager
def load_trace(path: Path) -> Iterator[Trace]:
    """Yield a saved trace; its values can be fetched until the `with` is left.

    Raises FormatError if the file is not a trace, or its records and tensors disagree.
    """
    with open_source(path) as source:
        yield read_trace(source)


def read_trace(source: Source) -> Trace:
    """Return the trace in an open file, valid while the file is open.

    Raises FormatError if the file holds none, or its records and tensors disagree.
    """
    text = source.metadata.get(HEADER)
    if not isinstance(text, str):
        raise FormatError(
            f"{source.path}: has no {HEADER!r} in its header; expected a trace saved by "
            "aprfmt trace --save"
        )
    where = f"{source.path}: {HEADER}"
    return _from_json(loads(text, where, max_bytes=MAX_HEADER), source, where)


def _from_json(header: Any, source: Source, where: str) -> Trace:
    """Return the trace of a header and the file's tensors; FormatError names what is wrong.

    `where` begins the messages.
    """
    if not isinstance(header, dict) or header.get("schema") != SCHEMA:
        found = header.get("schema") if isinstance(header, dict) else type(header).__name__
        raise FormatError(f"{where}: schema {found!r}; expected {SCHEMA}")
    rows, run, aliases = header.get("records"), header.get("run"), header.get("aliases")
    if not (isinstance(rows, list) and isinstance(run, dict) and isinstance(aliases, dict)):
        raise FormatError(f"{where}: records, run or aliases are missing or of another type")
    # Records, each held to the shape of its tensor.
    records = {}
    for index, row in enumerate(rows):
        record = record_from_json(row, f"{where}: record {index}")
        records[record.key] = record
        tensor = source.tensors.get(record.key)
        if tensor is not None and tensor.info.shape != record.shape:
            raise FormatError(
                f"{where}: {record.key} is recorded with shape {list(record.shape)}, its tensor "
                f"has {list(tensor.info.shape)}"
            )
    if not all(isinstance(value, str) for value in aliases.values()):
        raise FormatError(f"{where}: an alias is not a string")
    nonfinite = header.get("nonfinite")
    # Arrays that somebody put next to the records: nothing reads them, and verdicts name them.
    others = [name for name in source.tensors if name not in records]
    known = run.get("unknown")
    if others:
        told = known if isinstance(known, dict) else {}
        run = {**run, "unknown": {**told, **dict.fromkeys(others, "no record names it")}}

    def fetch(key: str) -> Numbers | None:
        """Return the trace's values under `key`; None if the file has no tensor of that name.

        Raises FormatError for a tensor of another dtype than a trace has.
        """
        tensor = source.tensors.get(key)
        if tensor is None:
            return None
        if tensor.info.encoding not in _DTYPES:
            raise FormatError(
                f"{where}: {key} is {tensor.info.encoding}; expected {', '.join(_DTYPES)}"
            )
        dtype = np.dtype(_DTYPES[tensor.info.encoding]).newbyteorder("<")
        values = np.frombuffer(bytes(tensor.raw()), dtype).reshape(tensor.info.shape)
        return values.astype(dtype.newbyteorder("="), copy=False)

    return Trace(run, records, aliases, fetch, nonfinite if isinstance(nonfinite, str) else None)
