"""Rows of chat tokens that were never trained, by their size beside other rows.

Seen red: the size not asked; rows near the mean judged by the mean's own length alone; rows that no
template writes named.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.checks.file.template_tokens import _find_untrained_rows

SIZE, WIDTH = 1500, 64
WANTED = {SIZE - 2: "<a>", SIZE - 1: "<b>"}


def table(**changed: Any) -> Any:
    """Return an embedding of trained rows, some of them replaced, in two chunks."""
    rng = np.random.default_rng(0)
    values = (rng.standard_normal((SIZE, WIDTH)) * 0.06).astype(np.float32)
    values *= rng.uniform(0.4, 1.6, (SIZE, 1)).astype(np.float32)
    for at, rows in changed.items():
        values[-int(at.removeprefix("last")) :] = rows(values, rng)
    half = SIZE // 2
    chunks = [(0, half, values[:half]), (half, SIZE, values[half:])]
    name = SimpleNamespace(info=SimpleNamespace(name="embd"))
    return SimpleNamespace(shape=(SIZE, WIDTH), stored=[name], chunks=lambda n: iter(chunks))


def noise(size: float) -> Any:
    """Return a function that makes the last rows noise of a size."""
    return lambda values, rng: rng.standard_normal((2, WIDTH)) * size


def near_mean(values: Any, rng: Any) -> Any:
    """Return the mean of the trained rows, with a little noise."""
    return values[:-2].mean(0) + rng.standard_normal((2, WIDTH)) * 2e-4


@pytest.mark.parametrize(("rows", "says", "level"), [
    (noise(1e-5), "of a usual row's length: 2: '<a>' (1498), '<b>' (1499)", "warning"),
    (noise(2e-4), "of a usual row's length: 2", "warning"),
    (noise(1e-20), "of a usual row's length: 2", "fail"),
    (noise(1e-30), "of a usual row's length: 2", "fail"),
    (near_mean, "the mean of all rows: 2: '<a>' (1498), '<b>' (1499)", "warning"),
])  # fmt: skip
def test_rows_that_were_never_trained_are_named(rows: Any, says: str, level: str) -> None:
    (found,) = _find_untrained_rows(table(last2=rows), WANTED)
    assert says in found.found and found.level == level, found


@pytest.mark.parametrize("size", [0.06, 0.02, 0.005, 0.3])
def test_small_and_large_rows_of_trained_tokens_are_quiet(size: float) -> None:
    assert not list(_find_untrained_rows(table(last2=noise(size)), WANTED))


def test_reserved_tokens_that_no_template_writes_are_quiet() -> None:
    made = table(last2=lambda values, rng: values[:2], last40=lambda v, rng: v[:40] * 1e-6)
    kept = {SIZE // 4: "<a>", SIZE // 3: "<b>"}
    assert not list(_find_untrained_rows(made, kept))
