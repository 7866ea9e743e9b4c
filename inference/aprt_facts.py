"""`aprfmt-trace.json`: the facts about an APRT folder that its stage files do not hold.

One JSON object: schema, run (token ids, model, backend), files: path in the folder -> sha256 of
the whole file, shape, positions, dtype of the arithmetic, form, device. Readers of APRT look for
`*.bin` and never see it. A stage file that was changed later is an error.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as short_repr
from typing import Any

from aprfmt.base.protocols import Value
from aprfmt.base.text_escape import shorten
from aprfmt.errors import FormatError
from aprfmt.formats.bounded_json import load_file
from aprfmt.inference.trace import Form, Record
from aprfmt.measure.tolerances import BASE

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
