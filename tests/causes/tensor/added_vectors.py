"""Seeded faults of `aprfmt/causes/tensor/added_vectors.py`."""

import numpy as np

from aprfmt.causes.tensor import added_vectors
from tests.causes.faults import EMBEDDING, HIDDEN, NORM, UP, Fault, computed, rounded, values
from tests.compare.damage import Change

_DRAWN = np.random.default_rng(5).standard_normal(HIDDEN).astype(np.float32)


def _norm_added() -> Change:
    """Return a change that adds a norm's weights to every row of the embedding."""

    def change(data: dict[str, bytes]) -> None:
        data[EMBEDDING] = rounded(values(data, EMBEDDING) + values(data, NORM))

    return change


FAULTS = (
    Fault(
        "one row added",
        "added_vector",
        EMBEDDING,
        computed(EMBEDDING, lambda x: x + _DRAWN),
        added_vectors.guess_added_vector,
        "plus one vector, the same for all",
    ),
    Fault(
        "a norm added to rows",
        "added_vector",
        EMBEDDING,
        _norm_added(),
        added_vectors.guess_added_vector,
        "plus L1.attn_norm.weight",
    ),
    Fault(
        "one row added to some",
        "added_vector",
        EMBEDDING,
        computed(EMBEDDING, lambda x: np.concatenate([x[:30], x[30:] + _DRAWN])),
        added_vectors.guess_added_vector,
        "66 of 96 rows, from 30 on",
        quantized=False,
    ),
    Fault(
        "mean taken away",
        "added_vector",
        EMBEDDING,
        computed(EMBEDDING, lambda x: x - x.mean(0)),
        added_vectors.guess_added_vector,
        "minus the mean of all of them",
        quantized=False,
    ),
    Fault(
        "rows centred",
        "added_vector",
        UP,
        computed(UP, lambda x: x - x.mean(1, keepdims=True)),
        added_vectors.guess_added_vector,
        "minus the mean of its values",
        quantized=False,
    ),
    Fault(
        "numbers added to rows",
        "added_vector",
        UP,
        computed(UP, lambda x: x + np.resize(_DRAWN, len(x))[:, None]),
        added_vectors.guess_added_vector,
        "plus one number of its own",
        quantized=False,
    ),
)
