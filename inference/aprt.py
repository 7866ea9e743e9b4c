"""APRT folders: the files that `apr trace --save-tensor` writes, and its stages.

A file is `APRT`, u32 layer (0xFFFFFFFF: whole model), u32 count, then `count` float32, all
little-endian; it stands at DIR/layer-N/STAGE.bin, whole-model stages at DIR/STAGE.bin. It says
neither shape nor positions. Layout: requirements taken from aprender's trace documentation.
"""

import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.errors import FormatError, OutputError, TruncatedError
from aprfmt.inference.capture import POINTS, SLOTS, STAGE_ALIASES, STAGES, WHOLE, key_name
from aprfmt.inference.trace import Record, Trace
from aprfmt.stats import compute

Numbers = NDArray[Any]
MAGIC = b"APRT"
WHOLE_MODEL = 0xFFFFFFFF
_HEADER = struct.Struct("<4sII")
_FOLDER = re.compile(r"layer-(\d{1,9})")
# What a joined stage is called among our slots.
_JOINED = {points: slot for slot, points in SLOTS.items() if len(points) > 1}


def save_aprt(folder: Path, trace: Trace, *, force: bool = False) -> list[Path]:
    """Write every stage whose points were all kept; return the files.

    Raises OutputError for a folder that is there and not empty, unless `force`.
    """
    if folder.exists() and not force and any(folder.iterdir()):
        raise OutputError(f"{folder}: exists and is not empty; choose another or use --force")
    written = []
    layers = sorted({record.layer for record in trace.records.values()})
    for layer in layers:
        target = folder if layer == WHOLE else folder / f"layer-{layer}"
        for stage, points in STAGES.items():
            if POINTS[points[0]].layered != (layer != WHOLE):
                continue
            values = _joined(trace, points, layer)
            if values is None:
                continue
            data = np.ascontiguousarray(values, "<f4")
            number = WHOLE_MODEL if layer == WHOLE else layer
            path = target / f"{stage}.bin"
            try:
                target.mkdir(parents=True, exist_ok=True)
                path.write_bytes(_HEADER.pack(MAGIC, number, data.size) + data.tobytes())
            except OSError as error:
                raise OutputError(f"{path}: cannot be written: {error.strerror}") from error
            written.append(path)
    return written


def _joined(trace: Trace, points: tuple[str, ...], layer: int) -> Numbers | None:
    """Return the points' values side by side, each token's in one row; None if one is missing."""
    parts = [trace.values(key_name(point, layer)) for point in points]
    found = [part for part in parts if part is not None]
    if len(found) != len(points):
        return None
    if len(found) == 1:
        return found[0]
    return np.concatenate([part.reshape(len(part), -1) for part in found], axis=-1)


def load_aprt(folder: Path) -> Trace:
    """Read an APRT folder; positions are unknown and shapes are counts.

    A stage of one point is recorded under the point's key, a joined one under its slot's name
    (`L3.qkv`). Raises FormatError for files that are not what the layout says.
    """
    if not folder.is_dir():
        raise FormatError(f"{folder}: is no folder of APRT files")
    values: dict[str, Numbers] = {}
    records: dict[str, Record] = {}
    for path, layer in _files(folder):
        name = STAGE_ALIASES.get(path.stem, path.stem)
        points = STAGES.get(name)
        if points is None:
            raise FormatError(f"{path}: stage {path.stem!r} is not known; expected one of "
                              f"{', '.join(STAGES)}")  # fmt: skip
        data = read_aprt(path, layer)
        point = _JOINED[points] if len(points) > 1 else points[0]
        key = key_name(point, layer)
        values[key] = data
        records[key] = Record(
            point, layer, data.shape, None, "float32", None, "", compute(data)
        )  # fmt: skip
    if not records:
        raise FormatError(f"{folder}: holds no APRT file (layer-N/STAGE.bin or STAGE.bin)")
    return Trace({"format": "aprt", "path": str(folder)}, records, {}, values.get)


def _files(folder: Path) -> Iterator[tuple[Path, int]]:
    layers = {}
    for entry in os.scandir(folder):
        match = _FOLDER.fullmatch(entry.name)
        if match and entry.is_dir():
            layers[int(match[1])] = Path(entry.path)
    for number in sorted(layers):
        yield from ((path, number) for path in sorted(layers[number].glob("*.bin")))
    yield from ((path, WHOLE) for path in sorted(folder.glob("*.bin")))


def read_aprt(path: Path, layer: int) -> Numbers:
    """Return one file's values; `layer` is what its place says. NaN bits are kept."""
    with open(path, "rb") as file:
        head = file.read(_HEADER.size)
        if len(head) < _HEADER.size:
            raise TruncatedError(f"{path}: {len(head)} bytes; an APRT header has {_HEADER.size}")
        magic, number, count = _HEADER.unpack(head)
        if magic != MAGIC:
            raise FormatError(f"{path}: starts with {magic.hex(' ')}; expected APRT")
        expected = WHOLE_MODEL if layer == WHOLE else layer
        if number != expected:
            raise FormatError(f"{path}: says layer {number}, its folder says {expected}")
        size = os.fstat(file.fileno()).st_size - _HEADER.size
        if size != 4 * count:
            kind = TruncatedError if size < 4 * count else FormatError
            raise kind(f"{path}: {size} bytes follow the header; {count} values take {4 * count}")
        values: Numbers = np.frombuffer(file.read(size), "<f4").astype(np.float32, copy=False)
        return values
