"""Seeded faults of `aprfmt/causes/tensor/piece_order.py`."""

from collections.abc import Sequence

import numpy as np

from aprfmt.causes.tensor import piece_order
from tests.causes.faults import EMBEDDING, UP, Fault, K, Q, raw
from tests.compare.damage import Change


def _joined(name: str, size: int, first: int, order: Sequence[int] | None = None) -> Change:
    """Return a change that joins pieces of `size` 16-bit values in another order.

    The first piece has `first` values, as a tensor begins inside a rank's part. The order is that
    of the ranks' numbers as text, if none is given.
    """

    def change(old: bytes) -> bytes:
        values = np.frombuffer(old, np.uint16)
        pieces = np.split(values, range(first, len(values), size))
        ranks = sorted(range(len(pieces)), key=str) if order is None else order
        return np.concatenate([pieces[i] for i in ranks]).tobytes()

    return raw(name, change)


_FIND = piece_order.explain_piece_order
FAULTS = (
    Fault("ranks joined as text", "piece_order", EMBEDDING, _joined(EMBEDDING, 450, 333), _FIND,
          "runs that stand in another order", quantized=False),
    Fault("two pieces exchanged", "piece_order", Q, _joined(Q, 2100, 2100, (1, 0)), _FIND,
          "2 runs: B begins with A's values 2100 to 4095, 0 to 2099", quantized=False),
    Fault("every piece turned round", "piece_order", UP, _joined(UP, 503, 77, range(9)[::-1]),
          _FIND, "9 runs", quantized=False),
    Fault("the last piece first", "piece_order", K, _joined(K, 700, 650, (2, 0, 1)), _FIND,
          "2 runs", quantized=False),
)  # fmt: skip
