"""A minimal reproduction in one file: inputs, weights, config, command, versions of an operation.

The file is safetensors: tensors `input/KEY`, `weight/ROLE` (stored bytes as U8 where the encoding
keeps whole rows, else F32), `expected` (the reference's result) and `found` (the other run's).
Header key `aprfmt.bundle` holds one JSON object, schema 1. `replay_bundle` runs it without
the model.
"""

import math
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.arch import ARCHS
from aprfmt.arch.hyperparameters import convert_value
from aprfmt.arch.value_checks import MAX_SIZE
from aprfmt.base.protocols import Source, TensorInfo
from aprfmt.base.version import __version__
from aprfmt.errors import (
    AprfmtError,
    ArchError,
    BackendUnavailableError,
    FormatError,
    TensorNotFoundError,
    UsageError,
)
from aprfmt.formats import FORMATS, open_sink, open_source
from aprfmt.formats.bounded_json import dumps, loads
from aprfmt.inference.backends.base import Backend
from aprfmt.inference.device import DeviceChoice, parse_run
from aprfmt.inference.parity.cell import PER_LAYER, BundledRows, OperationCell
from aprfmt.inference.parity.parity_records import Parity
from aprfmt.inference.rows import ArrayRows, RowSource
from aprfmt.inference.trace_file import byte_windows
from aprfmt.measure.distances import rel_l2
from aprfmt.measure.nonfinite import equal_or_both_nan

Numbers = NDArray[Any]
HEADER = "aprfmt.bundle"
SCHEMA = 1
MAX_HEADER = 64 << 20
LARGEST = 1 << 20  # of a hyperparameter, far above any model's: tables and loops are made of them
_LONG = ("context_length", "rope_theta", "rope_theta_local", "vocab_size")  # up to MAX_SIZE
_DTYPES: Mapping[str, str] = {"F32": "float32", "F64": "float64", "I64": "int64"}
_NAMES: Mapping[str, str] = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class ReproductionBundle:
    """A cell with its results in two runs, and how they came to be.

    A *cell* is one operation cut out of the model with its inputs and weights. `runs` are the
    reference run and the other as `torch:cpu:float32`; `expected` is the reference's result,
    `found` the other run's. `shadow`: the other run was an engine that computes no single
    operation, and `found` is its recorded value. `residual` is the distance of the two results,
    `bound` the largest one that rounding explains.
    """

    cell: OperationCell
    expected: Numbers
    found: Numbers
    runs: tuple[str, str]
    residual: float
    bound: float
    shadow: bool
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class ReplayResult:
    """What a replay found: residuals are relative L2 distances.

    `reference` is the reference's result now against the recorded one, `other` the other run's now
    against the recorded one, None for an engine; `distance` is the distance of the two results now.
    `recorded` is the distance of the two recorded results, `bound` the largest one that rounding
    explains. `largest` is the largest difference of one element, `at` its index.
    """

    key: str
    runs: tuple[str, str]
    reference: float
    other: float | None
    distance: float
    recorded: float
    bound: float
    largest: float
    at: tuple[int, ...]
    shadow: bool
    facts: Mapping[str, Any]

    @property
    def reproduced(self) -> bool:
        """Whether the recorded difference shows again: the two results differ beyond rounding."""
        return not self.distance <= self.bound

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain data for JSON."""
        return {
            "key": self.key,
            "runs": list(self.runs),
            "reproduced": self.reproduced,
            "apart": self.distance,
            "bound": self.bound,
            "recorded": self.recorded,
            "reference_moved": self.reference,
            "other_moved": self.other,
            "max_abs_diff": self.largest,
            "max_at": list(self.at),
            "shadow": self.shadow,
            "bundle": dict(self.facts),
        }


def used_versions() -> dict[str, str]:
    """Return {name: version} of aprfmt, Python, the machine type and the loaded libraries.

    Only libraries on which a result depends count.
    """
    found = {"aprfmt": __version__, "python": platform.python_version(),
             "machine": platform.machine()}  # fmt: skip
    for name in ("numpy", "torch", "cupy", "transformers"):
        module = sys.modules.get(name)
        if module is not None and hasattr(module, "__version__"):
            found[name] = str(module.__version__)
    return found


def save_bundle(
    path: Path, bundle: ReproductionBundle, command: Sequence[str], *, force: bool = False
) -> None:
    """Write a reproduction, atomically; OutputError where `path` cannot be written.

    `command` is the command line that made it, which the file records. With `force` the file may
    exist.
    """
    cell = bundle.cell
    tensors: dict[str, Numbers] = {
        f"input/{key}": _to_bundle_dtype(x) for key, x in cell.inputs.items()
    }
    stored: dict[str, dict[str, Any]] = {}
    for role, rows in cell.weights.items():
        tensors[f"weight/{role}"], encoding = _weight_to_store(rows)
        stored[role] = {"encoding": encoding, "shape": list(rows.shape)}
    tensors |= {
        "expected": _to_bundle_dtype(bundle.expected),
        "found": _to_bundle_dtype(bundle.found),
    }
    header = {
        "schema": SCHEMA,
        "key": cell.key,
        "point": cell.point,
        "layer": cell.layer,
        "architecture": cell.architecture,
        "hyper": {name: _tuples_to_lists(value) for name, value in cell.hyper.items()},
        "ids": list(cell.ids),
        "vocab_rows": list(cell.rows),
        "roles": {role: list(shape) for role, shape in cell.shapes.items()},
        "weights": stored,
        "runs": list(bundle.runs),
        # JSON has no infinity: what a NaN or infinity on one side makes of a distance
        "residual": bundle.residual if math.isfinite(bundle.residual) else "Infinity",
        "bound": bundle.bound,
        "shadow": bundle.shadow,
        "command": list(command),
        "versions": used_versions(),
        "facts": dict(bundle.facts),
    }
    infos = [
        TensorInfo(
            name, x.shape, "U8" if x.dtype == np.uint8 else _NAMES[x.dtype.name], 0, x.nbytes, None
        )
        for name, x in tensors.items()
    ]
    infos = FORMATS["safetensors"].order(infos)
    with open_sink(path, "safetensors", force=force) as sink:
        sink.plan({HEADER: dumps(header, str(path))}, infos)
        for info in infos:
            sink.write(info.name, byte_windows(tensors[info.name]))


def _to_bundle_dtype(x: Numbers) -> Numbers:
    """Return values in a dtype that a bundle holds: float32, float64 or int64."""
    if x.dtype.name in _NAMES:
        return x
    return x.astype(np.int64 if x.dtype.kind in "iub" else np.float32)


def _weight_to_store(rows: RowSource) -> tuple[Numbers, str]:
    """Return (array to store, encoding): stored bytes as U8 where rows have them, else numbers."""
    if isinstance(rows, BundledRows):
        return np.frombuffer(rows.stored, np.uint8), rows.encoding
    values = _to_bundle_dtype(np.ascontiguousarray(rows.numpy()))
    return values, _NAMES[values.dtype.name]


def _tuples_to_lists(value: Any) -> Any:
    """Return a value with its tuples as lists, as JSON has them."""
    return [_tuples_to_lists(item) for item in value] if isinstance(value, (list, tuple)) else value


def load_bundle(path: Path) -> ReproductionBundle:
    """Return the reproduction in a file.

    Raises FormatError for a file that is not one, or whose tensors and header do not fit together.
    """
    with open_source(path) as source:
        return parse_bundle(source, path)


def parse_bundle(source: Source, path: Path) -> ReproductionBundle:
    """Return the reproduction in an open file; `path` begins the messages.

    Raises FormatError for a file that is not one, or whose tensors and header do not fit together.
    """
    text = source.metadata.get(HEADER)
    if not isinstance(text, str):
        raise FormatError(
            f"{path}: has no {HEADER!r} in its header; expected a file of parity --bundle"
        )
    header = loads(text, f"{path}: {HEADER}", max_bytes=MAX_HEADER)
    try:
        return _make_bundle(header, source, path)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        if isinstance(error, AprfmtError):
            raise
        raise FormatError(
            f"{path}: {HEADER} is not complete: {type(error).__name__} {error!s:.200}"
        ) from error


def _read_hyper(found: Mapping[str, Any], architecture: str, where: str) -> dict[str, Any]:
    """Return {name: value} of the hyperparameters `found` in a header, each checked by its rule.

    Numbers that tables and loops are made of are bounded. Raises FormatError; `where` begins the
    messages.
    """
    kept = {}
    for rule in ARCHS[architecture].hyper:
        if rule.name not in found:
            continue  # not needed unless the pass reads it, which then raises an error of its own
        value = kept[rule.name] = found[rule.name]
        if rule.name == "n_layers":
            continue  # 0 where the operation comes after the layers
        try:
            convert_value(rule, value, f"{where}: {rule.name}")
        except ArchError as error:
            raise FormatError(str(error)) from error
        most = MAX_SIZE if rule.name in _LONG else LARGEST
        if isinstance(value, (int, float)) and not -most <= value <= most:
            raise FormatError(f"{where}: {rule.name} is {value:.6g}; expected at most {most}")
    if type(kept.get("n_layers")) is not int or kept["n_layers"] not in (0, 1):
        raise FormatError(f"{where}: n_layers is {kept.get('n_layers')!r:.40}; expected 0 or 1")
    short = [name for name in PER_LAYER if name in kept and len(kept[name]) != kept["n_layers"]]
    if short:
        raise FormatError(f"{where}: {short[0]} is not of {kept['n_layers']} layers")
    return kept


def run_cell(bundle: ReproductionBundle, backend: Backend, path: Path) -> Numbers:
    """Return the result of a reproduction's operation on a backend.

    Raises FormatError where the file's contents do not fit the operation; `path` begins the
    message.
    """
    try:
        return bundle.cell.run(backend)
    except (ArchError, TensorNotFoundError, UsageError) as error:
        raise FormatError(f"{path}: {error!s:.400}") from error
    except AprfmtError:
        raise
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise FormatError(
            f"{path}: {bundle.cell.key!r:.60} cannot be run from what the file holds: "
            f"{type(error).__name__} {error!s:.200}"
        ) from error


def _make_bundle(header: Any, source: Source, path: Path) -> ReproductionBundle:
    """Return the reproduction of a header and the file's arrays.

    Raises FormatError for what is checked here, and any error of Python for a header that lacks an
    entry: parse_bundle turns these into FormatError.
    """
    if not isinstance(header, dict) or header.get("schema") != SCHEMA:
        found = header.get("schema") if isinstance(header, dict) else type(header).__name__
        raise FormatError(f"{path}: {HEADER}: schema {found!r}; expected {SCHEMA}")

    def read_array(name: str) -> Numbers:
        """Return the bundle's array `name`, in the machine's byte order."""
        tensor = source.tensors[name]
        dtype = np.dtype(_DTYPES[tensor.info.encoding]).newbyteorder("<")
        values = np.frombuffer(bytes(tensor.raw()), dtype).reshape(tensor.info.shape)
        return values.astype(dtype.newbyteorder("="))

    # Inputs, and weights in their stored encoding where the file has bytes.
    inputs = {
        name.removeprefix("input/"): read_array(name)
        for name in source.tensors
        if name.startswith("input/")
    }
    weights: dict[str, RowSource] = {}
    for role, row in header["weights"].items():
        name, shape = f"weight/{role}", tuple(int(size) for size in row["shape"])
        tensor = source.tensors[name]
        if tensor.info.encoding == "U8":
            weights[role] = BundledRows(bytes(tensor.raw()), str(row["encoding"]), shape)
        else:
            weights[role] = ArrayRows(read_array(name))
        if weights[role].shape != shape:
            raise FormatError(f"{path}: {name} has shape {list(weights[role].shape)}, not {shape}")
    # The cell, its numbers checked, and the two results it is about.
    architecture = str(header["architecture"])
    shapes = {role: tuple(int(s) for s in shape) for role, shape in header["roles"].items()}
    cell = OperationCell(
        architecture,
        _read_hyper(header["hyper"], architecture, f"{path}: {HEADER}"),
        str(header["key"]),
        str(header["point"]),
        int(header["layer"]),
        tuple(int(i) for i in header["ids"]),
        inputs,
        weights,
        shapes,
        tuple(int(i) for i in header["vocab_rows"]),
    )
    first, second = (str(run) for run in header["runs"])
    facts = {"command": header["command"], "versions": header["versions"], **header["facts"]}
    return ReproductionBundle(
        cell,
        read_array("expected"),
        read_array("found"),
        (first, second),
        float(header["residual"]),
        float(header["bound"]),
        bool(header["shadow"]),
        facts,
    )


def replay_bundle(path: Path, between: Sequence[str] = ()) -> ReplayResult:
    """Run a reproduction again without the model, and return how its results differ now.

    It runs on its recorded runs, or on the two of `between`. Raises UsageError where `between` is
    not two runs, BackendUnavailableError for a run that is not possible here.
    """
    bundle = load_bundle(path)
    if len(between) not in (0, 2):
        raise UsageError(f"{path}: is of two runs, found {len(between)} to replay it on")
    names = tuple(between) or bundle.runs
    choices: list[DeviceChoice] = [parse_run(name) for name in names]
    expected = run_cell(bundle, choices[0].open(), path)
    engine = choices[1].is_engine
    if engine and not bundle.shadow:
        raise BackendUnavailableError(
            f"{path}: {choices[1]} is an engine, which computes no single operation; name a backend"
        )
    found = bundle.found if engine else run_cell(bundle, choices[1].open(), path)
    x, y = (np.asarray(value, np.float64).reshape(-1) for value in (found, expected))
    with np.errstate(invalid="ignore"):
        delta = np.where(equal_or_both_nan(x, y), 0.0, np.abs(x - y))
    delta[np.isnan(delta)] = np.inf  # one side alone is no number
    at = int(np.argmax(delta)) if delta.size else 0
    place = tuple(int(i) for i in np.unravel_index(at, expected.shape)) if delta.size else ()
    return ReplayResult(
        bundle.cell.key,
        (str(choices[0]), str(choices[1])),
        rel_l2(expected, bundle.expected),
        None if engine else rel_l2(found, bundle.found),
        rel_l2(found, expected),
        bundle.residual,
        bundle.bound,
        float(delta[at]) if delta.size else 0.0,
        place,
        engine,
        bundle.facts,
    )


def choose_bundle(found: Parity, runs: Sequence[str]) -> ReproductionBundle | None:
    """Return the reproduction of the first pair of runs that has a cell; wrong operations first.

    A cell is one operation cut out of the model. Where no operation is wrong by itself the cell is
    of the first point beyond tolerance: a replay then shows that the operation alone agrees. None
    if no pair has a cell. `runs` are the runs' names.
    """
    pairs = [pair for pair in found.pairs if pair.cell is not None]
    pairs.sort(key=lambda pair: pair.first_operation is None)
    for pair in pairs:
        # The measured operation of the cell's point, and both results computed again.
        cell = pair.cell
        operation = next((o for o in pair.operations if cell and o.key == cell.key), None)
        if cell is None or operation is None:
            continue
        first, second = runs[pair.a], runs[pair.b]
        expected = cell.run(parse_run(first).open())
        if operation.shadow:
            if pair.recorded is None:
                continue
            other = pair.recorded
        else:
            other = cell.run(parse_run(second).open())
        facts = {
            "model": found.model,
            "ids": list(found.ids),
            "first_point": pair.first,
            "cause": pair.cause,
            "through": found.through,
            "backends": [dict(found.runs[pair.a].backend), dict(found.runs[pair.b].backend)],
        }
        return ReproductionBundle(
            cell,
            expected,
            other,
            (first, second),
            operation.residual,
            operation.bound,
            operation.shadow,
            facts,
        )
    return None
