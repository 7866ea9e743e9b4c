"""Seeded faults of `aprfmt/causes/tensor/overwritten_bytes.py`."""

from aprfmt.causes.tensor import overwritten_bytes
from tests.causes.faults import GATE, UP, Fault


def overwritten(data: dict[str, bytes]) -> None:
    """Put 768 bytes of gate into up, at no row's beginning."""
    data[UP] = data[UP][:1000] + data[GATE][300:1068] + data[UP][1768:]


FAULTS = (
    Fault(
        "bytes of another tensor",
        "bit_rot",
        UP,
        overwritten,
        overwritten_bytes.explain_overwritten,
        "768 of 8192 bytes are overwritten, in 1 range",
        quantized=False,
    ),
)
