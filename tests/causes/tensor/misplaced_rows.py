"""Seeded faults of `aprfmt/causes/tensor/misplaced_rows.py`."""

from typing import Any

from aprfmt.causes.tensor import misplaced_rows
from tests.causes.faults import EMBEDDING, UP, Fault, K, bits, moved, rows_of


def _twice(x: Any) -> Any:
    x = x.copy()
    x[30:37] = x[10:17]
    return x


def other_layer(data: dict[str, bytes]) -> None:
    """Put rows 3 to 14 of the next layer into rows 8 to 19."""
    there, here = bits(data, UP.replace("layers.1.", "layers.2.")), bits(data, UP)
    here[8:20] = there[3:15]
    data[UP] = here.tobytes()


FAULTS = (
    Fault(
        "rows of another layer",
        "wrong_rows",
        UP,
        other_layer,
        misplaced_rows.explain_misplaced_rows,
        "rows 8-19: A's rows 3-14 of L2.ffn_up.weight",
    ),
    Fault(
        "rows twice",
        "wrong_rows",
        EMBEDDING,
        moved(EMBEDDING, _twice),
        misplaced_rows.explain_misplaced_rows,
        "rows 30-36: A's rows 10-16",
    ),
    Fault(
        "head twice",
        "wrong_rows",
        K,
        moved(K, rows_of(lambda x: x[[0, 0]])),
        misplaced_rows.explain_misplaced_rows,
        "head 1 holds the values of head 0",
    ),
)
