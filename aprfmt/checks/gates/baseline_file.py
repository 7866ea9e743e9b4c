"""Reads and writes baseline files: what the gates of a model found before.

The file is a JSON object of `format` 1: for every gate its outcome, and every number with unit,
tolerance and the reason for it. Tolerances are read from the file, so a user may change them. Wall
times are left out: they say more about the machine than about the model.
"""

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from aprfmt.checks.records import QaReport
from aprfmt.checks.table import BASELINE
from aprfmt.errors import FormatError
from aprfmt.formats.atomic import FileSet
from aprfmt.formats.bounded_json import load_file

FORMAT = 1
MAX_BYTES = 16 << 20


def report_to_baseline(report: QaReport) -> dict[str, Any]:
    """Return a report as the JSON of a baseline file; numbers that are not finite are None."""
    return {
        "format": FORMAT,
        "model": report.subject,
        "ran": str(report.choice),
        "gates": {
            gate.name: {
                "outcome": gate.outcome,
                "measures": {
                    name: asdict(measure)
                    | {"value": measure.value if math.isfinite(measure.value) else None}
                    for name, measure in gate.measures.items()
                },
            }
            for gate in report.gates
            if gate.name != BASELINE
        },
    }


def write_baseline(report: QaReport, path: Path, *, force: bool = False) -> None:
    """Write a report as a baseline file; OutputError where it exists and `force` is not given."""
    with FileSet(force=force) as files:
        files.create(path).write((json.dumps(report_to_baseline(report), indent=1) + "\n").encode())


def read_baseline(path: Path) -> Mapping[str, Any]:
    """Return {gate: outcome and measures} of a baseline file; FormatError for any other file."""
    return parse_baseline(load_file(path, max_bytes=MAX_BYTES), path)


def parse_baseline(data: Any, path: Path) -> Mapping[str, Any]:
    """Return {gate: outcome and measures} of a baseline's JSON value; FormatError for another.

    `path` begins the messages.
    """
    if not isinstance(data, Mapping) or data.get("format") != FORMAT:
        raise FormatError(f'{path}: expected a baseline of "format": {FORMAT}')
    gates = data.get("gates")
    if not isinstance(gates, Mapping) or not all(_is_gate_record(gate) for gate in gates.values()):
        raise FormatError(f"{path}: its gates are no objects with outcome and measures")
    return gates


def _is_gate_record(gate: Any) -> bool:
    """Return whether a value is the record of a gate: an outcome, and measures with tolerances."""
    if not isinstance(gate, Mapping) or not isinstance(gate.get("measures"), Mapping):
        return False
    if gate.get("outcome") not in ("PASS", "FAIL", "NOT_RUN"):
        return False
    return all(
        isinstance(row, Mapping)
        and "value" in row
        and (row["value"] is None or _is_number(row["value"]))
        and _is_number(row.get("tolerance"))
        and row["tolerance"] >= 0
        and row.get("kind") in ("absolute", "relative")
        and all(isinstance(row.get(key, ""), str) for key in ("unit", "reason"))
        for row in gate["measures"].values()
    )


def _is_number(value: Any) -> bool:
    """Return whether a value is a number that a float can hold."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max
