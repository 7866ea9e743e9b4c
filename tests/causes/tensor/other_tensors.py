"""Seeded faults of `aprfmt/causes/tensor/other_tensors.py`."""

import numpy as np

from aprfmt.causes.tensor import other_tensors
from tests.causes.faults import (
    EMBEDDING,
    GATE,
    HEAD,
    LAYER,
    UP,
    Fault,
    computed,
    copied,
    exchanged,
    moved,
    raw,
)


def layers(data: dict[str, bytes]) -> None:
    """Exchange layers 1 and 2."""
    for name in list(data):
        if name.startswith(LAYER):
            exchanged(name, name.replace("layers.1.", "layers.2."))(data)


FAULTS = (
    Fault("gate and up exchanged", "swapped_tensors", UP, exchanged(UP, GATE),
          other_tensors.guess_other_tensor, "are exchanged"),
    Fault("the embedding for the head", "tied_embedding", HEAD, copied(EMBEDDING, HEAD),
          other_tensors.guess_other_tensor, "B's head has the values of the embedding"),
    Fault("layers exchanged", "layer_order", UP, layers, other_tensors.guess_other_tensor,
          "layer 1 has the tensor of A's layer 2"),
    Fault("never filled", "stale_tensor", UP, raw(UP, lambda old: bytes(len(old))),
          other_tensors.explain_constant_side, "0 everywhere", confirmed=False),
    Fault("of another checkpoint", "stale_tensor", UP,
          computed(UP, lambda x: np.random.default_rng(8).standard_normal(x.shape)),
          other_tensors.guess_stale_tensor, "another checkpoint", confirmed=False),
    Fault("in any order", "value_order", UP,
          moved(UP, lambda x: np.random.default_rng(8).permutation(x.ravel()).reshape(x.shape)),
          other_tensors.explain_other_order, "in an order that has no name", quantized=False,
          confirmed=False),
)  # fmt: skip
