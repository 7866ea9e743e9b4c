"""Seeded faults of `aprfmt/causes/forward/logits_row.py`."""

import numpy as np

from tests.diagnosis.making import engine

ENGINE_FAULTS = (
    engine("logits-late", "llama", "the head is given the row before", "logits_row", "logits",
           rename=lambda values: values | {
               "logits": np.concatenate([values["logits"][:1], values["logits"][:-1]])}),
)  # fmt: skip
