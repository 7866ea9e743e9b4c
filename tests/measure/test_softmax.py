"""The softmax of rows and its logarithm: by hand, for large scores, over another axis."""

import math

import numpy as np
import pytest

from aprfmt.measure.softmax import log_softmax, log_sum_exp, softmax

SCORES = np.array([[0.0, math.log(3.0)], [1000.0, 1000.0]])  # exponentials of 1000 overflow
SHARES = np.array([[0.25, 0.75], [0.5, 0.5]])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rows_add_up_to_one_in_their_own_type(dtype: type[np.floating]) -> None:
    scores = SCORES.astype(dtype)
    np.testing.assert_allclose(softmax(scores), SHARES, rtol=1e-6)
    np.testing.assert_allclose(softmax(scores.T, axis=0), SHARES.T, rtol=1e-6)
    np.testing.assert_allclose(log_softmax(scores), np.log(SHARES), rtol=1e-6)
    assert softmax(scores).dtype == log_softmax(scores).dtype == dtype


def test_a_score_of_minus_infinity_has_no_share() -> None:
    scores = np.array([2.0, -np.inf, 2.0])
    np.testing.assert_array_equal(softmax(scores), [0.5, 0.0, 0.5])


def test_the_sum_of_exponentials_does_not_overflow() -> None:
    assert [log_sum_exp(row) for row in SCORES] == pytest.approx(
        [math.log(4.0), 1000.0 + math.log(2.0)]
    )
