"""What a guess about a pair shows once it is applied to all its rows: how much, and how sure.

Seen red: rows that the guess is not about left out of its share, damage beside a sample passed
over, values within a bound as wide as they are, digits finer than the bound.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.causes.tensor import explanation
from aprfmt.causes.tensor.differing_pair import Distance
from aprfmt.causes.tensor.guess import Guess
from aprfmt.causes.tensor.proof import prove_values

ROWS, COLUMNS = 100, 50
EVERY = ROWS * COLUMNS


def case(after: Distance, changed: int = ROWS) -> Any:
    """Return a pair whose first `changed` rows differ, and of which a guess leaves `after`."""
    return SimpleNamespace(
        key="L0.ffn_up.weight", a=SimpleNamespace(rows=ROWS, columns=COLUMNS),
        before=Distance(1.0, changed * COLUMNS, EVERY, 1.0),
        changed_rows=np.arange(changed), distance=lambda *_: after,
        count_beyond_rounding=lambda guess: 0,
    )  # fmt: skip


def guess(**fields: Any) -> Guess:
    def values(rows: Any) -> Any:
        return np.random.default_rng(1).normal(size=(len(rows), COLUMNS)).astype(np.float32)

    return Guess("scale", ("B is 3 times A",), values, values, **fields)


def test_a_share_is_that_of_all_rows_that_differ() -> None:
    equal = Distance(0.0, 0, 80 * COLUMNS, 0.0)
    found = explanation._confirm_guess(case(equal), guess(rows=np.arange(80)), False)
    assert found is not None and (found.share, found.certainty) == (0.8, "explained")
    whole = explanation._confirm_guess(case(equal, 80), guess(rows=np.arange(80)), False)
    assert whole is not None and (whole.share, whole.certainty) == (1.0, "confirmed")


@pytest.mark.parametrize("stray", [0, 3])
def test_rows_far_from_all_of_a_sample_are_damage(
    stray: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explanation, "count_stray_rows", lambda case, rows: stray)
    near = Distance(0.001, 5, EVERY, 0.1)
    asked = guess(rows=np.arange(ROWS), sampled=True, slack=0.01)
    found = explanation._confirm_guess(case(near), asked, False)
    assert found is not None and found.confirmed is not bool(stray)
    assert (found.certainty == "confirmed") is not bool(stray)
    assert any("damage there" in line for line in found.evidence) is bool(stray)


def test_a_bound_as_wide_as_the_values_shows_nothing() -> None:
    """The other side is twice as large, and what is left is half of it."""
    wide = Distance(0.5, 9, EVERY, 1.0, (1.0, 2.0), rest=0.5)
    asked = guess(slack=0.6)
    assert wide.equal(0.6) and wide.leaves_factor(0.6)
    before = case(wide)
    assert explanation._confirm_guess(before, asked, False) is None
    same = Distance(0.5, 9, EVERY, 1.0, (1.0, 1.0), rest=0.5)
    assert explanation._confirm_guess(case(same), asked, False) is not None


def test_one_number_everywhere_shows_nothing_but_that() -> None:
    alike = Distance(0.0, 0, EVERY, 0.0, constant=True)
    assert explanation._confirm_guess(case(alike), guess(), False) is None
    assert explanation._confirm_guess(case(alike), guess(constant=True), False) is not None


def test_values_say_no_more_than_their_bound() -> None:
    """Six values of 24 digits judge; within a quarter each has two."""
    values = np.random.default_rng(2).normal(size=6).astype(np.float32)
    assert prove_values(values, 6, 0, 0.0).judged
    assert not prove_values(values, 6, 0, 0.25).judged
