"""What each label of a batch adds to the gradients of the last norm and of the head."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.inference.batch import Batch
from aprfmt.inference.gradients.batch_gradients import Activations, BatchGradients, batch_gradients
from aprfmt.inference.gradients.documents import documents
from aprfmt.model import Model
from aprfmt.tensors import norms
from aprfmt.tensors.view import View

POINT, WEIGHT, BIAS = "final_norm", "output_norm.weight", "output_norm.bias"
LOGITS, HEAD, TABLE = "logits", "output.weight", "token_embd.weight"
CONDITION = 1e-12  # of the labels' products: directions below it are none
NEAR = 1e-6  # relative L2, of the sum over all labels from the batch's own gradient


@dataclass(frozen=True)
class HeadGradients:
    """The gradient of each label's own loss with respect to the head: an outer product.

    It is `logits` [labels, kept rows] times `inputs` [labels, elements], both float64: the
    gradient of the logits, and what the head reads. `key` is the head's, or that of a tied table.
    Of a table only rows `kept` are looked at: the others are also read as embeddings.
    """

    key: str
    kept: NDArray[np.int64]
    logits: NDArray[np.float64]
    inputs: NDArray[np.float64]

    def mean(self, factors: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the mean gradient [kept rows, elements] of all labels, each times its factor."""
        found: NDArray[np.float64] = (self.logits * factors[:, None]).T @ self.inputs
        return found / len(factors)

    def solve(self, given: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        """Return (relative L2 distance left, factors [labels]) that explain a head's gradient.

        `given` [rows, elements] is that gradient. The factors of the labels' gradients are solved
        by least squares.
        """
        part, many = given[self.kept], len(self.inputs)
        products = (self.logits @ self.logits.T) * (self.inputs @ self.inputs.T) / many
        wanted = np.einsum("lh,lh->l", self.logits @ part, self.inputs)
        factors = np.linalg.lstsq(products, wanted, rcond=CONDITION)[0]
        size = norms.exact_norm(part)
        off = norms.exact_norm(part - self.mean(factors))
        return (off / size if size else 0.0), factors


@dataclass(frozen=True)
class LabelGradients:
    """The gradient of each label's own loss in nats with respect to the last norm's weight.

    `gradients` are float64 [labels, elements], in the order of the batch's rows and columns.
    `rows`, `columns` and `tokens` [labels] say where the label's token is, and which it is.
    `head` has the gradients with respect to the head, None where they do not add up to the
    head's.
    """

    key: str
    gradients: NDArray[np.float64]
    rows: NDArray[np.int64]
    columns: NDArray[np.int64]
    tokens: NDArray[np.int64]
    head: HeadGradients | None = None

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
        points=(POINT, LOGITS),
        trained=[*view.names, *(name for each in _heads(model) for name in each.names)],
        activations=activations,
    )
    rows, gradients, places, weights = [], [], [], []
    at = 0
    every = _of_rows(model, found)
    for each in documents(batch):
        inside = np.flatnonzero(each.labels >= 0)
        if every is not None:
            gradients.append(every[at + inside] / each.weight)
        places.append(at + inside)
        weights.append(np.full(len(inside), each.weight))
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
    if rest > NEAR * norms.exact_norm(whole):
        return None
    head = _head_gradients(model, found, batch, np.concatenate(places), np.concatenate(weights))
    return replace(made, head=head)


def _heads(model: Model) -> list[View]:
    """Return the tensors that the head's product may use: its own weight, and the token table."""
    return [model.roles[key] for key in (HEAD, TABLE) if key in model.roles]


def _head_gradients(
    model: Model,
    found: BatchGradients,
    batch: Batch,
    places: NDArray[np.int64],
    weights: NDArray[np.float64],
) -> HeadGradients | None:
    """Return each label's gradient with respect to the head, taken from `found`.

    None where they do not add up to the head's gradient. `places` [labels] are the indices of the
    labels' rows among all rows that ran, `weights` [labels] their weights in the batch's loss.
    """
    logits, inputs = found.points.get(LOGITS), found.values.get(POINT)
    key = HEAD if HEAD in found.keys else TABLE
    if logits is None or inputs is None or key not in found.keys:
        return None
    whole = found.gradient(key)
    if logits.ndim != 2 or whole.shape != (logits.shape[1], inputs.shape[1]):
        return None
    kept = np.arange(len(whole))
    if key == TABLE:
        kept = np.setdiff1d(kept, batch.ids)
    own = logits[np.ix_(places, kept)] / weights[:, None]
    made = HeadGradients(key, kept, own.astype(np.float64), inputs[places].astype(np.float64))
    part = whole[kept]
    rest = norms.exact_norm(made.mean(np.ones(len(places))) - part)
    return made if len(kept) and rest <= NEAR * norms.exact_norm(part) else None


def _of_rows(model: Model, found: BatchGradients) -> NDArray[np.float64] | None:
    """Return what each row adds to the gradient of the last norm's weight: [rows, elements].

    None where the pass has no gradient of the norm's result, or a number is not finite. The norm
    gives x * (weight + constant) + bias, and the gradient is that of its result times x.
    """
    given, values = found.points.get(POINT), found.values.get(POINT)
    if given is None or values is None or given.shape != values.shape:
        return None
    weight = _flat_weight(model, WEIGHT)
    bias = _flat_weight(model, BIAS) if BIAS in model.roles else np.zeros_like(weight)
    offset = float(model.spec.block.norm_offset)
    with np.errstate(divide="ignore", invalid="ignore"):
        rows: NDArray[np.float64] = given * ((values - bias) / (weight + offset))
    return rows if np.isfinite(rows).all() else None


def _flat_weight(model: Model, role: str) -> NDArray[Any]:
    """Return the weight that has a role in the model, flattened to float64 [elements]."""
    numbers: NDArray[Any] = np.asarray(model.roles[role].numpy(), np.float64).reshape(-1)
    return numbers
