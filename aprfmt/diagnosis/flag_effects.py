"""What a flag does that the tensors contradict: the model is run by the flag and by the tensors."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from aprfmt.base.protocols import Value
from aprfmt.diagnosis.finding_effects import make_run_pair
from aprfmt.inference.backends import BACKENDS
from aprfmt.inference.probe_ids import choose_ids
from aprfmt.inference.replay.patched_model import PatchedModel
from aprfmt.inference.replay.shadow import record_points
from aprfmt.inference.rows import RowSource, StoredRows
from aprfmt.inference.weights import Weights, free_budget
from aprfmt.measure.findings import Finding
from aprfmt.measure.proofs import unfitted_proof
from aprfmt.model import Model
from aprfmt.tensors.norms import exact_norm

_OF = "logits as a reader of the flag has them; after: with the flag the tensors ask for"


def measure_flag(one: Finding, model: Model, other: Model) -> Finding | None:
    """Return the finding on a flag with its measured effect on the logits.

    None if following the flag or the tensors gives the same logits. It is confirmed where the
    reading by the tensors agrees with the other model. A flag that denies a tied head is measured
    by the tensors alone, since loaders draw that head at random.
    """
    said = {name: bool(values[one.side.lower()]) for name, values in one.values.items()}
    ids = choose_ids([other.hyper, model.hyper], long=False)
    bound = make_run_pair(other, model).threshold_of("logits", ("float32", "float32")).rel_l2
    reference = compute_logits(PatchedModel.unpatched(other, ids, "float32"))
    believed = compute_logits(PatchedModel.unpatched(model, ids, "float32"))
    scale = exact_norm(reference) or 1.0
    before, after = None, exact_norm(believed - reference) / scale
    if said != {"tied_embeddings": False}:
        denied = one.keys if "tied_embeddings" in said or not any(said.values()) else ()
        read = compute_logits(_model_with_flag(model, said, denied, ids))
        if exact_norm(read - believed) / scale <= bound:
            return None
        before = exact_norm(read - reference) / scale
    agrees = bool(after <= bound)
    return replace(
        one,
        confirmed=agrees,
        residual_before=before,
        residual_after=after,
        of=_OF,
        proof=unfitted_proof() if agrees else None,
    )


def _model_with_flag(
    model: Model, values: Mapping[str, Value], drop: tuple[str, ...], ids: tuple[int, ...]
) -> PatchedModel:
    """Return the model as a loader that follows the flag reads it: with `values`, without `drop`.

    `values` are hyperparameters to set, `drop` role keys to leave out, `ids` the tokens to run.
    """
    rows: dict[str, RowSource] = {
        key: StoredRows(tensor) for key, tensor in model.roles.items() if key not in drop
    }
    weights = Weights(rows, free_budget(), str(model.path))
    backend = BACKENDS["numpy"]("cpu", "float32")
    return PatchedModel(model.spec, model.hyper.with_values(**values), weights, backend, ids)


def compute_logits(patched: PatchedModel) -> np.ndarray:
    """Return the logits of a pass (float64, [tokens, vocabulary]) and close the model's weights."""
    try:
        return np.asarray(record_points(patched)["logits"], np.float64)
    finally:
        patched.weights.close()
