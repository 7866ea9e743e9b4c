"""What each label of a batch adds to the gradient of the last norm, from one backward pass."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.inference.batch import Batch
from aprfmt.inference.gradients.batch_gradients import Activations, BatchGradients, batch_gradients
from aprfmt.inference.gradients.documents import documents
from aprfmt.model import Model
from aprfmt.tensors import norms

POINT, WEIGHT, BIAS = "final_norm", "output_norm.weight", "output_norm.bias"
NEAR = 1e-6  # relative L2, of the sum over all labels from the batch's own gradient


@dataclass(frozen=True)
class LabelGradients:
    """The gradients of each label's own loss, in nats, by the weight of the last norm.

    `gradients` are float64 [labels, elements], in the order of the batch's rows and columns.
    `rows`, `columns` and `tokens` [labels] say where the label's token is, and which it is.
    """

    key: str
    gradients: NDArray[np.float64]
    rows: NDArray[np.int64]
    columns: NDArray[np.int64]
    tokens: NDArray[np.int64]

    def mean(self, factors: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the gradient [elements] of the mean over all labels, each times its factor."""
        found: NDArray[np.float64] = factors @ self.gradients / len(factors)
        return found


def label_gradients(
    model: Model, batch: Batch, *, device: str, dtype: str, activations: Activations = "all"
) -> LabelGradients | None:
    """Return what each label of a batch adds to the gradient of the last norm's weight.

    A row of what the norm gives reaches one label alone, so that its gradient is the label's own.
    None where the model has no such norm, or where these gradients do not add up to the weight's.
    """
    view = model.roles.get(WEIGHT)
    if view is None:
        return None
    found = batch_gradients(
        model,
        batch,
        device=device,
        dtype=dtype,
        points=(POINT,),
        trained=view.names,
        activations=activations,
    )
    rows, gradients = [], []
    at = 0
    every = _of_rows(model, found)
    for each in documents(batch):
        inside = np.flatnonzero(each.labels >= 0)
        if every is not None:
            gradients.append(every[at + inside] / each.weight)
        columns = each.start + inside + 1
        rows.append(np.stack([np.full(len(inside), each.row), columns, each.labels[inside]]))
        at += len(each.ids)
    if every is None or len(every) != at:
        return None
    row, column, token = np.concatenate(rows, axis=1)
    made = LabelGradients(WEIGHT, np.concatenate(gradients), row, column, token)
    if WEIGHT not in found.keys:
        return None
    whole = found.gradient(WEIGHT).reshape(-1)
    rest = norms.exact_norm(made.mean(np.ones(len(row))) - whole)
    return made if rest <= NEAR * norms.exact_norm(whole) else None


def _of_rows(model: Model, found: BatchGradients) -> NDArray[np.float64] | None:
    """Return each row's share [rows, elements] of the gradient of the last norm's weight.

    None where the pass has no gradient of the norm's result, or a share is not finite.
    The norm gives x * (weight + constant) + bias, and the gradient is that of its result times x.
    """
    given, values = found.points.get(POINT), found.values.get(POINT)
    if given is None or values is None or given.shape != values.shape:
        return None
    weight = _numbers(model, WEIGHT)
    bias = _numbers(model, BIAS) if BIAS in model.roles else np.zeros_like(weight)
    offset = float(model.spec.block.norm_offset)
    with np.errstate(divide="ignore", invalid="ignore"):
        rows: NDArray[np.float64] = given * ((values - bias) / (weight + offset))
    return rows if np.isfinite(rows).all() else None


def _numbers(model: Model, role: str) -> NDArray[Any]:
    """Return a role's numbers as float64 [elements]."""
    numbers: NDArray[Any] = np.asarray(model.roles[role].numpy(), np.float64).reshape(-1)
    return numbers
