"""Codes that are searched for, magnitudes beyond shared means, rounded keys and values."""

from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from aprfmt.causes.forward import rounding
from aprfmt.causes.tensor import foreign_values, lattices


def test_codes_are_searched_from_the_smallest_on() -> None:
    """Each code's numbers by the format: integers about 0 or above a minimum, floats by OCP."""
    books = lattices.code_books()
    names = [book.name for book in books]
    assert len(set(names)) == len(names) == 14
    held = {book.name: np.asarray(book.entries).tolist() for book in books}
    for entries in held.values():
        assert entries == sorted(set(entries)) and np.isfinite(entries).all()
    for bits in (2, 3, 4, 6, 8):
        most = 2**bits - 1
        assert held[f"codes of {bits} bits"] == list(range(-most, most + 1))
    for bits in (2, 4, 5):
        assert held[f"codes of {bits} bits above a minimum"] == list(range(2**bits))
    positive = [0.5, 1, 1.5, 2, 3, 4, 6]
    assert held["E2M1 codes"] == [*(-x for x in reversed(positive)), 0, *positive]
    assert max(held["E4M3 codes"]) == 448 and len(held["E4M3 codes"]) == 253
    assert max(held["E5M2 codes"]) == 57344 and len(held["E5M2 codes"]) == 247
    assert [len(held[f"{name} codes"]) for name in ("NF4", "FP4", "IQ4_NL")] == [16, 15, 16]
    sizes = [len(held[name]) for name in names if name.startswith("codes of") and "min" not in name]
    assert sizes == sorted(sizes)
    assert names.index("E4M3 codes") < names.index("codes of 6 bits")
    full = {book.name for book in books if book.full}
    assert full == {f"{name} codes" for name in ("NF4", "FP4", "IQ4_NL", "E5M2", "E4M3")}


@pytest.mark.parametrize(
    ("low", "high", "told"), [(-3, 3, 3), (-4, 3, 3), (-7, 7, 4), (-11, 4, 4), (-127, 127, 8)]
)
@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_a_scheme_has_the_bits_that_its_codes_need(
    low: int, high: int, told: int, dtype: str
) -> None:
    """Seen red: codes from -7 to 7 were codes of 3 bits."""
    rng = np.random.default_rng(3)
    codes = rng.integers(low, high + 1, (32, 4, 64))
    codes[..., :2] = low, high
    values = np.asarray(codes * rng.uniform(0.01, 0.02, (32, 4, 1)), np.float32).reshape(32, 256)
    if dtype == "BF16":
        values = values.astype(ml_dtypes.bfloat16).astype(np.float32)
    found = lattices.find_scheme(values, dtype)
    assert found is not None and found.width == told
    assert found.name == f"codes of {told} bits, one scale for every 64"


def test_magnitudes_are_those_beyond_a_rows_and_a_columns_mean() -> None:
    """So that every row and every column sums to 0, and a product of both leaves nothing."""
    values = np.random.default_rng(3).normal(size=(5, 7))
    found = foreign_values._centred_magnitudes(values)
    assert np.allclose(found.sum(0), 0) and np.allclose(found.sum(1), 0)
    assert not np.allclose(found, 0)
    sums = -(np.arange(5.0)[:, None] + np.arange(1.0, 8))
    assert np.allclose(foreign_values._centred_magnitudes(sums), 0)
    for row in (values[:1], values[:, :1]):
        assert np.array_equal(foreign_values._centred_magnitudes(row), np.abs(row))


@pytest.mark.parametrize("ops", [("scores",), ("mix",), ("scores", "mix"), ()])
def test_keys_are_rounded_for_scores_and_values_for_their_sum(ops: tuple[str, ...]) -> None:
    made: dict[str, Any] = {}

    def with_op(name: str, override: Any, layers: Any) -> Any:
        assert layers == {3}
        made[name] = override
        return patched

    patched: Any = SimpleNamespace(with_op=with_op)
    layers: Any = {3}
    result: Any = rounding.round_keys_and_values(np.rint, ops)(patched, layers)
    assert result is patched and set(made) == set(ops)
    at: Any = None
    q, k = np.array([0.25], np.float16), np.array([1.75], np.float16)
    for name in ops:
        more = ("mask",) if name == "scores" else ()
        given = made[name](lambda *parts: parts, at, q, k, *more)
        assert given[:2] == (0.25, 2.0) and given[2:] == more
        assert given[1].dtype == np.float16
