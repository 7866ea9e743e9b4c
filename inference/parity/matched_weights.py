"""Quantization-matched weights: every matrix encoded and decoded again, for all runs.

So a difference between the runs is the forward pass, never the quantization; the distance from
the stored weights is measured separately.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.arch.role_vocabulary import split_key
from aprfmt.base.encoding_names import unknown_name_message
from aprfmt.base.encodings import find_encoding as encoding_row
from aprfmt.codecs import CODECS, decode, encodable_names, encode
from aprfmt.errors import CodecError, UsageError
from aprfmt.inference.rows import ArrayRows, StoredRows
from aprfmt.inference.weights import Weights, free_budget
from aprfmt.model import Model
from aprfmt.tensors.view import View

Numbers = NDArray[Any]


class ThroughRows(ArrayRows):
    """A tensor that is encoded and decoded whenever it is read; the result is not held here."""

    by_rows = False

    def __init__(self, tensor: View, through: str) -> None:
        """Take a tensor, and the encoding `through` that its values are rounded by."""
        self._tensor, self._through = tensor, through
        self.shape = tensor.shape
        self.encoding = through
        self.nbytes = 4 * math.prod(tensor.shape)

    def numpy(self) -> Numbers:
        """Return the tensor's values after encoding and decoding them, float32."""
        values = np.ascontiguousarray(self._tensor.numpy(), np.float32)
        found: Numbers = decode(self._through, encode(self._through, values), self.shape)
        return np.asarray(found, np.float32)


def weights_through_encoding(model: Model, through: str, budget: int | None) -> Weights:
    """Return a model's weights, the matrices of its layers encoded and decoded again.

    `budget` is in bytes; None: a fraction of the free memory.
    """
    rows = rows_through_encoding(model, through, StoredRows, ThroughRows)
    return Weights(rows, free_budget() if budget is None else budget, str(model.path))


def rows_through_encoding(
    model: Model, through: str, stored: Callable[..., Any], changed: Callable[..., Any]
) -> dict[str, Any]:
    """Return {role key: rows} of a model, its layers' matrices changed.

    Rows of the matrices are `changed(tensor, through)`, those of other tensors `stored(tensor)`.
    Embeddings, head, norms and vectors are not changed: NF4 and K-quant recipes leave them out too.
    Raises UsageError for an encoding that is not known, or whose blocks do not fit the rows.
    """
    if through not in CODECS:
        raise UsageError(f"--through {through}: {unknown_name_message(through, encodable_names())}")
    row = encoding_row(through)
    rows: dict[str, Any] = {}
    count = 0
    for key, tensor in model.roles.items():
        layer, role = split_key(key)
        if layer is None or len(tensor.shape) < 2 or "norm" in role:
            rows[key] = stored(tensor)
            continue
        try:
            row.nbytes(tensor.shape)
        except CodecError as error:
            raise UsageError(f"--through {through}: {key}: {error}; choose another") from error
        rows[key] = changed(tensor, through)
        count += 1
    if not count:
        raise UsageError(f"{model.path}: has no matrix that --through {through} would change")
    return rows
