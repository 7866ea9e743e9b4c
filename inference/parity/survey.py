"""Every operation of a run judged on the run's own inputs, in one pass of the reference."""

from contextlib import closing

from aprfmt.inference.backends.base import Backend
from aprfmt.inference.parity.matched import matched_weights
from aprfmt.inference.parity.operations import arithmetics
from aprfmt.inference.parity.request import ParityRequest
from aprfmt.inference.replay.patched_model import PatchedModel
from aprfmt.inference.replay.recorded_trace import RecordedTrace
from aprfmt.inference.replay.shadow import OperationResiduals, operation_residuals
from aprfmt.inference.trace import Trace
from aprfmt.inference.weights import free_budget, model_weights
from aprfmt.measure.tolerances import one_operation
from aprfmt.measure.trace_view import backend_name, weights_between
from aprfmt.model import Model


def judge_operations(
    model: Model, reference: Backend, a: Trace, b: Trace, request: ParityRequest
) -> OperationResiduals:
    """Return how far every operation of the run `b` is off; `reference` is the backend of `a`."""
    if request.through is not None:
        weights = matched_weights(model, request.through, request.memory)
    else:
        memory = request.memory
        weights = model_weights(model, free_budget() if memory is None else memory)
    kinds = (weights_between(a, b), "activate")

    def bound(key: str) -> float:
        return one_operation(*arithmetics(key, a, b), backend_name(b), kinds).rel_l2

    ids = tuple(request.ids)
    patched = PatchedModel(model.spec, model.hyper, weights, reference, ids)
    with closing(weights):
        return operation_residuals(patched, RecordedTrace(b, ids, {}), bound)
