"""Seeded faults of `aprfmt/causes/hyperparameters.py`."""

from tests.diagnosis.changed_encoders import pooled_otherwise
from tests.diagnosis.fault import Fault

ENGINE_FAULTS = (
    Fault(
        "encoder-pooling",
        "bert",
        "the mean of all rows for the first",
        pooled_otherwise,
        ("pooling",),
        ("pooling",),
    ),
)
