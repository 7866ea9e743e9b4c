"""When numbers fitted to a run are confirmed: rows, bits and points that they were not found on."""

import numpy as np
import pytest

from aprfmt.causes.forward.mismatch import Change
from aprfmt.diagnosis.trace_results import Agreement, change_numbers
from aprfmt.measure.proofs import certainty_of


def change(**values: object) -> Change:
    return Change("x", "says", (), values=values)


def test_numbers_are_counted_wherever_they_stand() -> None:
    values = {"a": 1.5, "b": {"c": [1, 2.0, "3"], "d": True}, "e": np.array([4.0, 5.0]),
              "f": np.float32(6), "g": np.array([True, False]), "h": None}  # fmt: skip
    assert change_numbers(values) == [1.5, 1, 2.0, 4.0, 5.0, 6.0]


@pytest.mark.parametrize(("agrees", "values", "holds"), [
    (Agreement(), {}, True),  # nothing was fitted
    (Agreement(), {"mask": "by chunks", "keys": True}, True),
    (Agreement(1, 1e6), {"eps": 1e-5}, False),  # any row gives a number
    (Agreement(2, 1e3), {"eps": 1e-5}, True),
    (Agreement(2, 47.0), {"eps": 1e-5}, False),
    (Agreement(1, 1e3, ("L1.q",)), {"eps": 1e-5}, True),
    (Agreement(1, 500.0), {"rows": [0, 1, 1, 3]}, True),  # a choice of rows, by a row's values
    (Agreement(1, 15.0), {"rows": [0, 1, 1, 3]}, False),
    (Agreement(2, 100 * 17.0), {"factors": np.linspace(1, 2, 100)}, False),  # one a column
    (Agreement(4, 400 * 17.0), {"factors": np.linspace(1, 2, 100)}, True),
])  # fmt: skip
def test_numbers_are_confirmed_by_what_they_were_not_found_on(
    agrees: Agreement, values: dict[str, object], holds: bool
) -> None:
    assert certainty_of(agrees.proof(change(**values))) == ("confirmed" if holds else "explained")


def test_what_agrees_nowhere_is_only_located() -> None:
    assert certainty_of(Agreement(0, 0.0).proof(change(window=9))) == "located"
