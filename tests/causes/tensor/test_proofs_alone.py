"""What a proof says of a change: how many values judge it, and how many gave its numbers."""

import math

import numpy as np

from aprfmt.causes.tensor import proof


def test_each_proof_has_its_counts_in_their_places() -> None:
    fitted, accused = proof.fitted_proof(7.0), proof.accused_proof(5.0)
    assert (fitted.count, fitted.share, fitted.free) == (7.0, 1.0, 7.0)
    assert not fitted.judged and not fitted.accused
    assert (accused.count, accused.share, accused.free) == (5.0, 1.0, 0)
    assert accused.accused and accused.judged
    values = proof.prove_values(np.array([0.5, 0.25]), 9, 2, 0.0)
    assert (values.count, values.share, values.free) == (9, 1.0, 2)
    data = proof.prove_bytes(b"\x00\x01\x02\x03" * 4, 16, 3)
    assert (data.count, data.share, data.free) == (16, 1.0, 3)
    assert data.bits == math.log2(4)
