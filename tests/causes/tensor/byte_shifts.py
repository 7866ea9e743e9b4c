"""Seeded faults of `aprfmt/causes/tensor/byte_shifts.py`."""

import numpy as np

from aprfmt.causes.tensor import byte_shifts
from tests.causes.faults import EMBEDDING, UP, Fault, Q, moved, raw
from tests.diagnosis.engine_changes import changed
from tests.diagnosis.making import engine

FAULTS = (
    Fault("five bytes late", "byte_offset", UP, raw(UP, lambda old: old[5:] + b"12345"),
          byte_shifts.explain_byte_offset, "begins 5 bytes too late", quantized=False),
    Fault("one value early", "byte_offset", Q, raw(Q, lambda old: b"??" + old[:-2]),
          byte_shifts.explain_byte_offset, "2 bytes (1 values) too early"),
    Fault("three rows down", "row_offset", EMBEDDING, moved(EMBEDDING, lambda x: np.roll(x, 3, 0)),
          byte_shifts.explain_byte_offset, "row i"),
)  # fmt: skip


ENGINE_FAULTS = (
    engine("rows-one-off", "llama", "embedding read one row on", "row_offset",
           "token_embd.weight",
           weights=changed("token_embd.weight", lambda x: np.roll(x, -1, 0))),
)  # fmt: skip
