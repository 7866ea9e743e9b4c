"""Operations of two runs on equal inputs: single ones alone, or all of a run in one pass.

A *cell* is one operation with its inputs and weights, taken out of the model and run alone.
"""

from collections.abc import Sequence
from contextlib import closing
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.errors import AprfmtError
from aprfmt.inference.backends.base import Backend
from aprfmt.inference.device import DeviceChoice
from aprfmt.inference.parity.cell import AFTER_LAYERS, OperationCell, cut_cell
from aprfmt.inference.parity.matched_weights import weights_through_encoding
from aprfmt.inference.parity.parity_records import Operation
from aprfmt.inference.parity.request import ParityRequest
from aprfmt.inference.replay.patched_model import PatchedModel
from aprfmt.inference.replay.recorded_trace import RecordedTrace
from aprfmt.inference.replay.shadow import OperationResiduals, measure_operation_residuals
from aprfmt.inference.trace import Trace
from aprfmt.inference.weights import free_budget, model_weights
from aprfmt.measure.distances import rel_l2
from aprfmt.measure.tolerances import operation_tolerance
from aprfmt.measure.trace_view import backend_name, finer_weights_class, run_arithmetic
from aprfmt.measure.traces import PointDiff
from aprfmt.model import Model

Numbers = NDArray[Any]
# How many points beyond tolerance have their operations run alone to find the first wrong one.
MAX_OPERATIONS = 12


def run_single_operations(
    model: Model,
    first: DeviceChoice,
    second: DeviceChoice,
    a: Trace,
    b: Trace,
    beyond: Sequence[PointDiff],
    request: ParityRequest,
    amplified: bool,
) -> tuple[list[Operation], OperationCell | None]:
    """Return (results of single operations, the cell of the first wrong one).

    `beyond` are the points beyond tolerance. The operations of the first MAX_OPERATIONS of them
    run on equal inputs, until one is wrong by itself; where only rounding was `amplified`, that of
    the first one. If none is wrong, the cell is the first that could be cut, or None.
    """
    reference = request.with_choice(first).open_backend()
    other: Backend | None = None
    if not second.is_engine:
        other = request.with_choice(second).open_backend()
    found: list[Operation] = []
    fallback: OperationCell | None = None
    for point in beyond[: 1 if amplified else MAX_OPERATIONS]:
        try:
            cell = cut_point_cell(model, point, a, b, reference, other is None, request)
            operation = _run_operation(cell, point, a, b, reference, other)
        except AprfmtError:
            continue  # an input was not recorded: its operation cannot be run alone
        found.append(operation)
        fallback = fallback or cell
        if operation.wrong:
            return found, cell
    return found, fallback


def cut_point_cell(
    model: Model,
    point: PointDiff,
    a: Trace,
    b: Trace,
    reference: Backend,
    shadow: bool,
    request: ParityRequest,
) -> OperationCell:
    """Return the cell of a point: the operation that gives it, with its weights and inputs.

    Inputs are the values that the first run `a` recorded; with `shadow` those of `b`, where it
    has them.
    """
    columns: list[int] = []
    if point.key.rpartition(".")[2] in AFTER_LAYERS[1:]:
        x, y = a.recorded_values(point.key), b.recorded_values(point.key)
        if x is not None and y is not None:
            apart = np.max(np.abs(x.astype(np.float64) - y), axis=0)
            columns = [int(c) for c in np.argsort(-apart, kind="stable")]

    def values(key: str) -> Numbers | None:
        """Return the recorded values at a point that the operation reads; None if not recorded.

        They are those of run `a`, or with `shadow` those of run `b` where it has them.
        """
        theirs = b.recorded_values(key) if shadow else None
        return a.recorded_values(key) if theirs is None else theirs

    weights = None
    if request.through is not None:
        weights = weights_through_encoding(model, request.through, request.memory)
    return cut_cell(model, point.key, request.ids, values, reference, columns, weights)


def _run_operation(
    cell: OperationCell,
    point: PointDiff,
    a: Trace,
    b: Trace,
    reference: Backend,
    other: Backend | None,
) -> Operation:
    """Return how the results of one cell differ between both runs.

    `other` is the second run's backend, None for an engine, whose recorded value is used.
    """
    mine = cell.run(reference)
    if other is not None:
        theirs = other_result = cell.run(other)
    else:
        recorded = b.recorded_values(point.key)
        assert recorded is not None
        other_result = recorded[..., list(cell.rows)] if cell.rows else recorded
        theirs = other_result
    # How far the results are apart, and what rounding may do.
    residual = rel_l2(theirs, mine)
    bound = operation_tolerance(*operation_dtypes(point.key, a, b)).rel_l2
    if other is None and backend_name(b) in ("llama.cpp",):
        bound = max(bound, point.tolerance)
    # How far the inputs were apart in the whole runs, which says whether the operation amplifies.
    inputs = [_input_distance(key, point.key, a, b) for key in cell.inputs]
    known = [value for value in inputs if value is not None]
    before = max(known) if known else None
    output = float(point.rel_l2 or 0.0)
    return Operation(
        point.key,
        residual,
        bound,
        not residual <= bound,
        tuple(_key_in_model(one, point.key) for one in cell.inputs),
        tuple(cell.weights),
        before,
        output,
        output / before if before else None,
        other is None,
    )


def operation_dtypes(key: str, a: Trace, b: Trace) -> tuple[str, str]:
    """Return the two dtypes whose rounding bounds an operation of `b` against the one of `a`.

    The first is the arithmetic of `b`'s backend in the dtype of `a`'s record at `key`, the second
    that in the dtype of `b`'s. TF32 counts as float16.
    """
    record, second = a.find_record(key), b.find_record(key)
    mine = run_arithmetic(b, record.dtype if record else "float32")
    other = mine if second is None else run_arithmetic(b, second.dtype)
    # A product in TF32 rounds its inputs as float16 does.
    first, last = ("float16" if name == "tf32" else name for name in (mine, other))
    return first, last


def _key_in_model(cell_key: str, key: str) -> str:
    """Return the model's key of an input or weight that a cell calls `cell_key`.

    A cell is a model of one layer, layer 0, and the stream into it is `embd`. `key` is the cell's
    point in the model: `L0.attn_q` is `L7.attn_q` for a point of layer 7.
    """
    layer = key.partition(".")[0] if "." in key else ""
    name = cell_key.rpartition(".")[2]
    if name.startswith("embd"):
        return f"{layer}.in" if layer else name
    return f"{layer}.{name}" if layer else name


def _input_distance(cell_key: str, key: str, a: Trace, b: Trace) -> float | None:
    """Return the distance of a cell's input between the whole runs; None if not recorded.

    `cell_key` is the input's key in the cell, `key` the cell's point in the model.
    """
    own = _key_in_model(cell_key, key)
    x, y = a.recorded_values(own), b.recorded_values(own)
    return None if x is None or y is None or x.shape != y.shape else rel_l2(y, x)


def judge_operations(
    model: Model, reference: Backend, a: Trace, b: Trace, request: ParityRequest
) -> OperationResiduals:
    """Return how far every operation of the run `b` is off on its recorded inputs.

    `reference` is the backend of `a`, which computes the operations.
    """
    if request.through is not None:
        weights = weights_through_encoding(model, request.through, request.memory)
    else:
        memory = request.memory
        weights = model_weights(model, free_budget() if memory is None else memory)
    kinds = (finer_weights_class(a, b), "activate")

    def bound(key: str) -> float:
        """Return the tolerance (relative L2) of the operation that gives the point `key`."""
        return operation_tolerance(*operation_dtypes(key, a, b), backend_name(b), kinds).rel_l2

    ids = tuple(request.ids)
    patched = PatchedModel(model.spec, model.hyper, weights, reference, ids)
    with closing(weights):
        return measure_operation_residuals(patched, RecordedTrace(b, ids, {}), bound)
