"""APRT folders: the files that `apr trace --save-tensor` writes, and its stages.

A *stage* is what `apr` calls a capture point, or several of them in one file. A *slot* is our name
for several points of a layer that are joined along the last axis, as `qkv` for q, k and v.

A file is `APRT`, u32 layer (0xFFFFFFFF: whole model), u32 count, then `count` float32, all
little-endian. Its path is DIR/layer-N/STAGE.bin, for whole-model stages DIR/STAGE.bin. It holds
neither shape nor positions nor tokens: aprfmt writes these into a file next to it. Source of the
layout: aprender's trace documentation.
"""

import hashlib
import math
import os
import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from reprlib import repr as short_repr
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.base.protocols import Value
from aprfmt.base.text_escape import shorten
from aprfmt.errors import FormatError, TruncatedError
from aprfmt.formats.atomic import FileSet
from aprfmt.formats.bounded_json import dumps, load_file
from aprfmt.formats.mapped_file import Buffer, MappedFile
from aprfmt.inference.capture import POINTS, SLOTS, STAGE_ALIASES, STAGES, WHOLE, key_name
from aprfmt.inference.trace import Form, Record, Trace
from aprfmt.inference.trace_file import refuse_partial_trace
from aprfmt.measure.tolerances import BASE
from aprfmt.tensors.stats import compute_stats

NAME = "aprfmt-trace.json"
SCHEMA = 1
MAX_BYTES = 64 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class StageFacts:
    """One stage's file: its SHA-256, and the values' shape, token positions and arithmetic."""

    sha256: str
    shape: tuple[int, ...]
    positions: tuple[int, ...] | None
    dtype: str
    form: Form | None
    device: str


@dataclass(frozen=True)
class FolderFacts:
    """What identifies the run of a folder, and its stages by path (`layer-3/attn_out.bin`)."""

    run: Mapping[str, Value]
    files: Mapping[str, StageFacts]


def stage_facts(record: Record, shape: tuple[int, ...], sha256: str) -> StageFacts:
    """Return the aprfmt-trace.json entry of a stage's file, from the record of its first point.

    `shape` and `sha256` are those of the file's values and bytes. Files hold float32 values, so a
    float64 run is recorded as float32.
    """
    dtype = "float32" if record.dtype == "float64" else record.dtype
    return StageFacts(sha256, shape, record.positions, dtype, record.form, record.device)


def facts_to_json(facts: FolderFacts) -> dict[str, Any]:
    """Return the JSON object of aprfmt-trace.json."""
    return {
        "schema": SCHEMA,
        "run": dict(facts.run),
        "files": {
            name: {
                "sha256": row.sha256,
                "shape": list(row.shape),
                "positions": None if row.positions is None else list(row.positions),
                "dtype": row.dtype,
                "form": row.form,
                "device": row.device,
            }
            for name, row in facts.files.items()
        },
    }


def read_facts(folder: Path) -> FolderFacts | None:
    """Return what a folder's aprfmt-trace.json records; None if it has no such file.

    Raises FormatError for a file with other contents.
    """
    path = folder / NAME
    return parse_facts(load_file(path, max_bytes=MAX_BYTES), str(path)) if path.exists() else None


def parse_facts(data: Any, where: str) -> FolderFacts:
    """Return what the JSON value `data` of an aprfmt-trace.json records; FormatError names a fault.

    `where` is the file's path, for messages.
    """
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        found = data.get("schema") if isinstance(data, dict) else type(data).__name__
        raise FormatError(f"{where}: schema {short_repr(found)}; expected {SCHEMA}")
    run, files = data.get("run"), data.get("files")
    if not isinstance(run, dict) or not isinstance(files, dict):
        raise FormatError(f"{where}: run or files is missing or not an object")
    if run.get("ids") is not None:
        _parse_numbers(run["ids"], f"{where}: ids")
    return FolderFacts(
        run,
        {name: _parse_stage(row, f"{where}: {shorten(name, 200)}") for name, row in files.items()},
    )


def _parse_stage(row: Any, where: str) -> StageFacts:
    """Return the entry of one stage's file from its JSON object; FormatError names what is wrong.

    `where` names the entry in messages.
    """
    if not isinstance(row, dict):
        raise FormatError(f"{where}: is not an object")
    for name in ("sha256", "dtype", "device"):
        if not isinstance(row.get(name), str):
            raise FormatError(f"{where}: {name} is {short_repr(row.get(name))}; expected text")
    if not _SHA256.fullmatch(row["sha256"]):  # an empty one would not be compared
        found = short_repr(row["sha256"])
        raise FormatError(f"{where}: sha256 is {found}; expected 64 hexadecimal digits")

    if row["dtype"] not in BASE:
        found = short_repr(row["dtype"])
        raise FormatError(f"{where}: dtype {found}; expected one of {', '.join(BASE)}")
    form = row.get("form")
    if form not in ("fused", "stepped", None):
        raise FormatError(f"{where}: form is {short_repr(form)}; expected fused, stepped or null")
    positions = row.get("positions")
    return StageFacts(
        row["sha256"],
        _parse_numbers(row.get("shape"), f"{where}: shape"),
        None if positions is None else _parse_numbers(positions, f"{where}: positions"),
        row["dtype"],
        form,
        row["device"],
    )


def _parse_numbers(values: Any, where: str) -> tuple[int, ...]:
    """Return a list of non-negative integers as a tuple; FormatError for anything else.

    `where` names the list in messages.
    """
    if not isinstance(values, list) or not all(
        isinstance(value, int) and not isinstance(value, bool) and value >= 0 for value in values
    ):
        raise FormatError(f"{where} is {short_repr(values)}; expected whole numbers not negative")
    return tuple(values)


Numbers = NDArray[Any]
MAGIC = b"APRT"
WHOLE_MODEL = 0xFFFFFFFF
_HEADER = struct.Struct("<4sII")
_FOLDER = re.compile(r"layer-(\d{1,9})")
# Our slot name of each joined stage.
_JOINED = {points: slot for slot, points in SLOTS.items() if len(points) > 1}


def save_aprt(folder: Path, trace: Trace, *, force: bool = False) -> list[Path]:
    """Write every stage whose points were all recorded, and aprfmt-trace.json; return the files.

    All files appear together. Raises OutputError for an existing folder that is not empty, unless
    `force`: then a folder that holds only APRT files is replaced.
    """
    refuse_partial_trace(trace, folder)

    written = []
    facts: dict[str, StageFacts] = {}
    layers = sorted({record.layer for record in trace.records.values()})
    with FileSet(force=force, folder=folder, ours=_is_our_name, nested=True) as files:
        for layer in layers:
            target = folder if layer == WHOLE else folder / f"layer-{layer}"
            for stage, points in STAGES.items():
                if POINTS[points[0]].layered != (layer != WHOLE):
                    continue
                values = _join_points(trace, points, layer)
                if values is None:
                    continue
                data = np.ascontiguousarray(values, "<f4")
                number = WHOLE_MODEL if layer == WHOLE else layer
                head, body = _HEADER.pack(MAGIC, number, data.size), data.tobytes()
                out = files.create(target / f"{stage}.bin")
                out.write(head)
                out.write(body)
                out.close()  # more stages than files that a process may have open
                written.append(out.path)
                record = trace.find_record(key_name(points[0], layer))
                assert record is not None
                name = (target / f"{stage}.bin").relative_to(folder).as_posix()
                digest = hashlib.sha256(head)
                digest.update(body)
                facts[name] = stage_facts(record, values.shape, digest.hexdigest())
        description = folder / NAME
        out = files.create(description)
        said = facts_to_json(FolderFacts(trace.run, facts))
        out.write(dumps(said, str(description)).encode())
        written.append(out.path)
    return written


def _is_our_name(name: str) -> bool:
    """Return whether `save_aprt` writes a file or folder of this name."""
    folder, slash, file = name.rpartition("/")
    if slash:
        return _FOLDER.fullmatch(folder) is not None and file.endswith(".bin")
    return name.endswith(".bin") or name == NAME or _FOLDER.fullmatch(name) is not None


def _join_points(trace: Trace, points: tuple[str, ...], layer: int) -> Numbers | None:
    """Return the values of a stage's points joined by token [tokens, width].

    A stage of one point keeps its own shape. None if a point was not recorded.
    """
    parts = [trace.recorded_values(key_name(point, layer)) for point in points]
    found = [part for part in parts if part is not None]
    if len(found) != len(points):
        return None
    if len(found) == 1:
        return found[0]
    return np.concatenate([part.reshape(len(part), -1) for part in found], axis=-1)


def is_aprt(path: Path) -> bool:
    """Return whether a path is a folder of APRT files."""
    if not path.is_dir() or (path / "config.json").is_file():  # pytorch_model.bin is no stage
        return False
    return any(path.glob("layer-*/*.bin")) or any(path.glob("*.bin"))


def load_aprt(folder: Path) -> Trace:
    """Return the trace in an APRT folder.

    Tokens, positions and shapes are known if aprfmt wrote it. In a foreign folder they are not:
    `ids` is absent, shapes are counts. A stage of one point is recorded under the point's key, a
    stage of several under their slot's name (`L3.qkv`). Raises FormatError for files that do not
    fit the layout or aprfmt-trace.json.
    """
    if not folder.is_dir():
        raise FormatError(f"{folder}: is not a folder of APRT files")
    facts = read_facts(folder)
    values: dict[str, Numbers] = {}
    records: dict[str, Record] = {}
    for path, layer in _stage_files(folder):
        name = STAGE_ALIASES.get(path.stem, path.stem)
        points = STAGES.get(name)
        if points is None:
            raise FormatError(
                f"{path}: stage {path.stem!r} is not known; expected one of {', '.join(STAGES)}"
            )
        known = None if facts is None else _facts_of_stage(path, folder, facts)
        data = read_aprt(path, layer, "" if known is None else known.sha256)
        # Without facts the shape is the count, and positions are not known.
        point = _JOINED[points] if len(points) > 1 else points[0]
        key = key_name(point, layer)
        record = Record(point, layer, data.shape, None, "float32", None, "", compute_stats(data))
        if known is not None:
            if math.prod(known.shape) != data.size:
                raise FormatError(
                    f"{path}: {data.size} values; {NAME} says shape {list(known.shape)}"
                )
            data = data.reshape(known.shape)
            record = replace(
                record,
                shape=known.shape,
                positions=known.positions,
                dtype=known.dtype,
                form=known.form,
                device=known.device,
            )
        values[key], records[key] = data, record
    if not records:
        raise FormatError(f"{folder}: holds no APRT file (layer-N/STAGE.bin or STAGE.bin)")
    run = {} if facts is None else dict(facts.run)
    return Trace(run | {"format": "aprt", "path": str(folder)}, records, {}, values.get)


def _facts_of_stage(path: Path, folder: Path, facts: FolderFacts) -> StageFacts:
    """Return what aprfmt-trace.json records of a stage's file; FormatError if it has no entry.

    `folder` is the trace's folder; entries are named by paths relative to it.
    """
    name = path.relative_to(folder).as_posix()
    if name not in facts.files:
        raise FormatError(
            f"{path}: is not in {NAME}, so its tokens are not known; without that file "
            "the folder is read as a foreign one"
        )
    return facts.files[name]


def _stage_files(folder: Path) -> Iterator[tuple[Path, int]]:
    """Yield (path, layer) of the stage files of a folder, whole-model stages last."""
    layers = {}
    for entry in os.scandir(folder):
        match = _FOLDER.fullmatch(entry.name)
        if match and entry.is_dir():
            layers[int(match[1])] = Path(entry.path)
    for number in sorted(layers):
        yield from ((path, number) for path in sorted(layers[number].glob("*.bin")))
    yield from ((path, WHOLE) for path in sorted(folder.glob("*.bin")))


def read_aprt(path: Path, layer: int, sha256: str = "") -> Numbers:
    """Return one file's values as float32; `layer` is the layer in its path. NaN bits are kept.

    `sha256` is the expected digest, "" if not known. Raises FormatError if it differs.
    """
    with closing(MappedFile(path)) as file:  # refuses pipes and devices
        if sha256 and hashlib.sha256(file.view).hexdigest() != sha256:
            raise FormatError(
                f"{path}: is another file than {NAME} was written for (SHA-256 "
                f"{sha256[:12]}...); without that file the folder is read as a foreign one"
            )
        return parse_aprt(file.view, path, layer)


def parse_aprt(buffer: Buffer, path: Path, layer: int) -> Numbers:
    """Return the values in one file's bytes as float32; `layer` is the layer in its path.

    Raises FormatError for bytes that do not fit the layout, TruncatedError if they end early.
    """
    size = len(buffer) - _HEADER.size
    if size < 0:
        raise TruncatedError(f"{path}: {len(buffer)} bytes; an APRT header has {_HEADER.size}")
    magic, number, count = _HEADER.unpack(buffer[: _HEADER.size])
    if magic != MAGIC:
        raise FormatError(f"{path}: starts with {magic.hex(' ')}; expected APRT")
    expected = WHOLE_MODEL if layer == WHOLE else layer
    if number != expected:
        raise FormatError(f"{path}: says layer {number}, its folder says {expected}")
    if size != 4 * count:
        kind = TruncatedError if size < 4 * count else FormatError
        raise kind(f"{path}: {size} bytes follow the header; {count} values take {4 * count}")
    values: Numbers = np.frombuffer(bytes(buffer[_HEADER.size :]), "<f4").astype(
        np.float32, copy=False
    )
    return values
