"""Tables of statistics: one row a point, as .csv or .json, and no values.

    name,mean,std,min,max,l2
    model.layers.0.self_attn.q_proj,0.01,1.2,-4.1,4.0,38.2

Names are our keys or transformers' module paths. Such a table shows where two runs begin to differ
and never why: many tensors have the same mean and deviation.
"""

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from aprfmt.base.text_escape import shorten
from aprfmt.errors import AprfmtError, FormatError
from aprfmt.formats.bounded_json import loads
from aprfmt.formats.mapped_file import MappedFile
from aprfmt.inference.capture import find_key, key_name, parse_key
from aprfmt.inference.engines.modules import ModuleMap, stated_placement
from aprfmt.inference.record import Record
from aprfmt.inference.trace import Trace
from aprfmt.model import Model
from aprfmt.tensors.stats import Stats

COLUMNS = ("mean", "std", "min", "max", "l2")
MAX_BYTES, MAX_ROWS = 16 << 20, 1 << 16


def _read_table(path: Path) -> bytes:
    """Return the bytes of a table; FormatError if it is too large."""
    with closing(MappedFile(path)) as file:
        if file.size > MAX_BYTES:
            raise FormatError(f"{path}: {file.size} bytes; at most {MAX_BYTES} of a table are read")
        return bytes(file.view)


def is_table(path: Path) -> bool:
    """Return whether a file is a readable table of statistics (.csv or .json)."""
    if not path.is_file() or path.suffix not in (".csv", ".json"):
        return False
    try:
        return bool(_table_rows(path))
    except AprfmtError:
        return False


def _table_rows(path: Path) -> dict[str, Mapping[str, Any]]:
    """Return {name: its columns}; {} if the file is not a table of statistics.

    Raises FormatError for more than MAX_ROWS rows and for a damaged CSV.
    """
    # JSON: an object of names, or one under "statistics".
    if path.suffix == ".json":
        said = loads(_read_table(path), str(path), max_bytes=MAX_BYTES)
        said = said.get("statistics", said) if isinstance(said, dict) else said
        rows = said if isinstance(said, dict) else {}
        known = all(isinstance(row, dict) and set(COLUMNS) & set(row) for row in rows.values())
        return rows if known else {}
    # CSV: a column of names, and at least one statistic.
    reader = csv.DictReader(io.StringIO(_read_table(path).decode("utf-8", "replace")))
    fields = reader.fieldnames or ()
    if "name" not in fields or not set(COLUMNS) & set(fields):
        return {}
    found: dict[str, Mapping[str, Any]] = {}
    try:
        for row in reader:
            if len(found) >= MAX_ROWS:
                raise FormatError(f"{path}: more than {MAX_ROWS} rows")
            found[str(row["name"])] = row
    except csv.Error as error:
        raise FormatError(f"{path}: is not readable as CSV: {error}") from error
    return found


@contextmanager
def load_table(
    path: Path, ids: Sequence[int] | None = None, model: Model | None = None
) -> Iterator[Trace]:
    """Yield a table as a trace of statistics; FormatError for an entry that is not a number.

    `ids` are the tokens, which a table does not say. `model` tells where its norms stand.
    """
    rows = _table_rows(path)
    records: dict[str, Record] = {}
    unknown: dict[str, str] = {}
    modules = ModuleMap(rows, None if model is None else stated_placement(model.spec.block))
    for name, row in rows.items():
        key = _point_key(name, modules)
        if key is None:
            unknown[name] = "not a capture point"
            continue
        point, layer = parse_key(key)
        stats = _row_stats(row, f"{path}: {shorten(name, 200)!r}")
        records[key] = Record(point, layer, (stats.count,), None, "float32", None, "", stats)
    known = None if ids is None else [int(i) for i in ids]
    run = {
        "format": "statistics", "path": str(path), "ids": known, "ids_given": known is not None,
        "backend": {"backend": "statistics"}, "unknown": unknown,
    }  # fmt: skip
    yield Trace(run, records)


def _point_key(name: str, modules: ModuleMap) -> str | None:
    """Return the key of the point that an array's name means; None if it means none."""
    if find_key(name) is not None:
        return name
    found = modules.read(name)
    return key_name(found[0].point.name, found[0].layer) if found else None


def _row_stats(row: Mapping[str, Any], where: str) -> Stats:
    """Return the statistics of a row; FormatError for a column that is no number.

    A column that is missing, empty or not finite is None in it. `nan` is 1 if one is not finite.
    """
    numbers: dict[str, float | None] = {}
    for column in COLUMNS:
        said = row.get(column)
        try:
            numbers[column] = None if said in (None, "") else float(said)
        except (TypeError, ValueError):
            raise FormatError(
                f"{where}: {column} is {shorten(str(said), 80)!r}; expected a number"
            ) from None
    # Values that are not finite count as such, and leave the statistic open.
    bad = any(value is not None and not math.isfinite(value) for value in numbers.values())
    count = row.get("count")
    size = int(count) if isinstance(count, (int, str)) and str(count).isdigit() else 0
    held = {name: value if value is not None and math.isfinite(value) else None
            for name, value in numbers.items()}  # fmt: skip
    ends = [abs(value) for value in (held["min"], held["max"]) if value is not None]
    return Stats(
        size, held["mean"], held["std"], held["min"], held["max"], max(ends, default=None),
        held["l2"], int(bad), 0, 0,
    )  # fmt: skip
