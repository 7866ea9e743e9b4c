"""Calibrated tolerances: measured over repeated runs, stored in a file with their evidence.

Each repeat runs all runs on another sequence of ids: the given ones, rotated. A bound is a multiple
of the largest distance seen and never above the table's: a distance beyond that is a difference to
explain, not a tolerance to raise.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from aprfmt.errors import FormatError, UsageError
from aprfmt.formats.atomic import FileSet
from aprfmt.formats.bounded_json import loads
from aprfmt.inference.device import DeviceChoice
from aprfmt.inference.parity.outcomes import compare_experts
from aprfmt.inference.parity.request import ParityRequest
from aprfmt.inference.parity.run_comparison import compare_runs, run_once
from aprfmt.measure import tolerances
from aprfmt.measure.trace_view import backend_name, finer_weights_class, run_arithmetic
from aprfmt.model import Model
from aprfmt.model.hf_folder import read_text

SCHEMA = "aprfmt.thresholds/1"
# How far above the largest distance seen a bound is set.
SAFETY = 5.0
MAX_FILE = 16 << 20


@dataclass(frozen=True)
class Calibration:
    """Measured bounds (tolerances.CalibratedBound), and points that no calibration may excuse."""

    rows: tuple[tolerances.CalibratedBound, ...]
    beyond: tuple[str, ...]
    repeats: int

    def to_json(self) -> dict[str, Any]:
        """Return plain data, as the file holds it."""
        return {
            "schema": SCHEMA,
            "unit": tolerances.UNIT,
            "max_unit": tolerances.MAX_UNIT,
            "safety": SAFETY,
            "repeats": self.repeats,
            "rows": [asdict(row) for row in self.rows],
            "beyond": list(self.beyond),
        }


@np.errstate(all="ignore")
def calibrate_tolerances(
    model: Model, choices: Sequence[DeviceChoice], request: ParityRequest, repeats: int
) -> Calibration:
    """Return the bounds measured from every run against the first, `repeats` times.

    Raises UsageError for fewer than two repeats, or if no point was compared.
    """
    if repeats < 2:
        raise UsageError(f"{repeats} repeat to calibrate with; give at least two")
    seen: dict[tuple[tuple[str, str], str, str, str], list[tuple[float, float]]] = {}
    beyond: list[str] = []
    moe = bool(model.hyper["n_experts"])
    shift = max(1, len(request.ids) // repeats)
    for repeat in range(repeats):
        at = repeat * shift % len(request.ids)
        turned = replace(request, ids=request.ids[at:] + request.ids[:at], calibrated=())
        with run_once(model, choices[0], turned) as first:
            a = first.trace
            for choice in choices[1:]:
                with run_once(model, choice, turned) as second:
                    b = second.trace
                    diff, _ = compare_runs(a, b, compare_experts(a, b), (), moe)
                    pair = tolerances.ordered_backends(backend_name(a), backend_name(b))
                    for point in diff.points:
                        record, other = a.find_record(point.key), b.find_record(point.key)
                        assert record is not None and other is not None  # points of both
                        if point.rel_l2 is None:
                            continue
                        if point.beyond:
                            beyond.append(f"{choice}: {point.key}: {point.rel_l2:.3g}")
                        dtypes = (run_arithmetic(a, record.dtype), run_arithmetic(b, other.dtype))
                        coarser = max(dtypes, key=lambda dtype: tolerances.BASE[dtype].rel_l2)
                        measured = (point.rel_l2, point.max_over_rms or 0.0)
                        key = (pair, finer_weights_class(a, b), record.point, coarser)
                        seen.setdefault(key, []).append(measured)
    if not seen:
        raise UsageError("no point was compared; the runs have none in common")
    rows = [
        _calibrated_row(pair, weights, point, dtype, found, repeats, str(model.path), moe)
        for (pair, weights, point, dtype), found in seen.items()
        if point not in tolerances.DISCRETE
    ]
    return Calibration(tuple(rows), tuple(dict.fromkeys(beyond)), repeats)


def _calibrated_row(
    pair: tuple[str, str],
    weights: str,
    point: str,
    dtype: str,
    found: Sequence[tuple[float, float]],
    repeats: int,
    model: str,
    moe: bool,
) -> tolerances.CalibratedBound:
    """Return the bound of one point from its measured distances.

    `found` are (relative L2, largest difference over RMS) of each comparison.
    """
    largest = max(rel for rel, _ in found)
    widest = max(ratio for _, ratio in found)
    table = tolerances.point_threshold(point, pair, (dtype, dtype), weights, moe=moe)
    bound = min(max(SAFETY * largest, _least_bound(dtype)), table.rel_l2)
    wide = min(max(SAFETY * widest, _least_bound(dtype)), table.max_over_rms)
    middle = median(rel for rel, _ in found)
    evidence = (
        f"{SAFETY:g} times the largest of {len(found)} comparisons in {repeats} sequences of "
        f"{model}: largest {largest:.3g}, median {middle:.3g}"
    )
    return tolerances.CalibratedBound(
        pair, weights, point, dtype, bound, wide, largest, len(found), evidence
    )


def _least_bound(dtype: str) -> float:
    """Return half a unit in the last place of a dtype, the smallest bound.

    Runs that were equal by chance get no bound of 0.
    """
    return tolerances.ROUNDOFF[dtype]


def save_calibration(path: Path, calibration: Calibration, *, force: bool = False) -> None:
    """Write the bounds as JSON, atomically; OutputError where that is not possible.

    With `force` the file may exist.
    """
    text = json.dumps(calibration.to_json(), indent=1) + "\n"
    with FileSet(force=force) as files:
        files.create(path).write(text.encode())


def load_calibration(path: Path) -> tuple[tolerances.CalibratedBound, ...]:
    """Return the bounds in a file of `save_calibration`; FormatError for another file."""
    found: Any = loads(read_text(path, MAX_FILE).encode(), str(path), max_bytes=MAX_FILE)
    return parse_calibration(found, path)


def parse_calibration(found: Any, path: Path) -> tuple[tolerances.CalibratedBound, ...]:
    """Return the bounds in `found`, a calibration file's JSON value; `path` begins the messages.

    Raises FormatError for anything else.
    """
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise FormatError(f"{path}: is no file of parity --calibrate; expected schema {SCHEMA}")
    rows = found.get("rows")
    if not isinstance(rows, list):
        raise FormatError(f"{path}: rows are missing")
    return tuple(_parse_row(row, f"{path}: row {index}") for index, row in enumerate(rows))


def _parse_row(row: Any, where: str) -> tolerances.CalibratedBound:
    """Return the bound in a row of a calibration file; FormatError says which entry is wrong.

    `where` names the row in messages.
    """
    if not isinstance(row, dict):
        raise FormatError(f"{where}: is no object")
    values = dict(row)
    kinds: dict[str, Any] = {
        "weights": str, "point": str, "dtype": str, "evidence": str, "runs": int,
        "rel_l2": (int, float), "max_over_rms": (int, float), "largest": (int, float),
    }  # fmt: skip
    pair = values.get("pair")
    if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(p, str) for p in pair)):
        raise FormatError(f"{where}: pair is {pair!r}; expected two backends")
    for name, kind in kinds.items():
        value = values.get(name)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise FormatError(f"{where}: {name} is {value!r}")
    for name in ("rel_l2", "max_over_rms"):
        if not (math.isfinite(values[name]) and values[name] > 0):
            raise FormatError(f"{where}: {name} is {values[name]!r}; expected a bound above 0")
    if values["dtype"] not in tolerances.BASE:
        raise FormatError(f"{where}: dtype is {values['dtype']!r}")
    table = tolerances.point_threshold(
        values["point"], (pair[0], pair[1]), (values["dtype"],) * 2, values["weights"], moe=True
    )
    if values["rel_l2"] > table.rel_l2 * 1.0001:
        raise FormatError(
            f"{where}: rel_l2 {values['rel_l2']} is above the table's {table.rel_l2}; a "
            "calibration only narrows"
        )
    return tolerances.CalibratedBound(
        (pair[0], pair[1]), values["weights"], values["point"], values["dtype"],
        float(values["rel_l2"]), float(values["max_over_rms"]), float(values["largest"]),
        values["runs"], values["evidence"],
    )  # fmt: skip
