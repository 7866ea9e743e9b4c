"""The native encoders as objects, with the codecs' checks; numpy is imported when one is called."""

from collections.abc import Mapping

import numpy as np

import aprfmt.codecs.native._kernels as _kernels
from aprfmt.codecs.base import Array, as_rows, check_finite
from aprfmt.errors import CodecError


class Encoder:
    """The native encoder of one encoding in one arithmetic: `fma` is "fused" or "strict"."""

    def __init__(self, index: int, name: str, block_size: int, type_size: int, fma: str) -> None:
        """Set the encoder's sizes; `index` is its number in the C extension."""
        self.index, self.name, self.fma = index, name, fma
        self.block_size, self.type_size = block_size, type_size

    def into(self, x: object, out: object, columns: int, importance: object = None) -> None:
        """Fill the bytes `out` from float32 `x`, rows of `columns` elements.

        Values are not checked. Raises CodecError where lengths do not fit.
        """
        _kernels.encode(self.index, x, out, columns, importance, self.fma == "fused")

    def __call__(self, x: Array, *, importance: Array | None = None) -> Mapping[str, bytes]:
        """Return {"": bytes} of float32 `x` [..., columns], equal to what the numpy codec returns.

        Raises CodecError for another dtype, rows that are no whole blocks, an importance matrix of
        another width, and, unless an element is a block, NaN and infinity.
        """
        rows = as_rows(self.name, x)
        columns = rows.shape[1]
        if columns % self.block_size:
            raise CodecError(
                f"{self.name} rows must be a multiple of {self.block_size} elements, "
                f"found {columns}"
            )
        # Check the importance and the values, unless each element is a block.
        weights = None
        if self.block_size > 1:
            if importance is not None:
                weights = np.ascontiguousarray(importance, np.float32).reshape(-1)
                if weights.size != columns:
                    raise CodecError(
                        f"{self.name}: the importance matrix has {weights.size} columns, the "
                        f"tensor {columns}; was it made for another model?"
                    )
                check_finite(f"{self.name}: importance matrix", weights)
            bad = _kernels.first_not_finite(rows)
            if bad >= 0:
                check_finite(self.name, rows)  # words the error
        if not rows.size:
            return {"": b""}
        return {"": _kernels.encode(self.index, rows, None, columns, weights, self.fma == "fused")}
