"""APR_Q4 and APR_Q8 against their description, element by element in plain Python."""

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aprfmt.codecs import CODECS
from tests.codecs.data import decoded

FINITE = st.floats(-(2.0**100), 2.0**100, width=32)
TINY = 2.0**-149  # the least float32: its scale is 0


def f32(x: float) -> float:
    return float(np.float32(x))


def away(x: float) -> int:
    """Round half away from zero; exact, since x is a float32 and the sum a float64."""
    return int(math.copysign(math.floor(abs(x) + 0.5), x))


@example([TINY, 0.0])
@given(st.lists(FINITE, min_size=1, max_size=70))
def test_q4_encodes_as_described(values: list[float]) -> None:
    x = np.array(values, np.float32)
    raw = CODECS["APR_Q4"].encode(x)[""]
    assert len(raw) == 18 * -(-len(x) // 32)
    for block in range(0, len(x), 32):
        piece = [float(v) for v in x[block : block + 32]]
        largest = max(map(abs, piece))
        scale = f32(largest / 7) if largest else 1.0
        piece += [0.0] * (32 - len(piece))
        at = raw[18 * (block // 32) :]
        with np.errstate(over="ignore"):
            assert at[:2] == np.array([scale], np.float32).astype("<f2").tobytes()
        for i, value in enumerate(piece):
            # A scale that rounds to zero makes endless ratios: the ends of the codes.
            ratio = f32(value / scale) if scale else math.copysign(99.0, value) if value else 0.0
            nibble = at[2 + i // 2] >> 4 * (i % 2) & 15
            assert nibble == min(7, max(-8, away(ratio))) + 8


@example([TINY, 0.0])
@given(st.lists(FINITE, min_size=1, max_size=70))
def test_q8_encodes_as_described(values: list[float]) -> None:
    x = np.array(values, np.float32)
    raw = CODECS["APR_Q8"].encode(x)[""]
    largest = max(abs(float(v)) for v in x)
    scale = f32(largest / 127) if largest else 1.0
    assert raw[:4] == np.array([scale], "<f4").tobytes()
    codes = np.frombuffer(raw[4:], np.int8).tolist()
    if scale:
        assert codes == [min(127, max(-127, away(f32(float(v) / scale)))) for v in x]


@given(st.binary(min_size=18, max_size=18), st.integers(1, 32))
def test_q4_decodes_low_nibble_first(raw: bytes, count: int) -> None:
    found = decoded(CODECS["APR_Q4"], {"": raw}, count)
    scale = np.frombuffer(raw[:2], "<f2")[0].astype(np.float32)
    nibbles = [raw[2 + i // 2] >> 4 * (i % 2) & 15 for i in range(count)]
    with np.errstate(all="ignore"):
        expected = np.array([np.float32(q - 8) * scale for q in nibbles], np.float32)
    assert np.array_equal(found, expected, equal_nan=True)


@given(st.binary(min_size=4, max_size=60))
def test_q8_decodes_after_its_scale(raw: bytes) -> None:
    found = decoded(CODECS["APR_Q8"], {"": raw}, len(raw) - 4) if len(raw) > 4 else np.empty(0)
    scale = np.frombuffer(raw[:4], "<f4")[0]
    with np.errstate(all="ignore"):
        expected = np.frombuffer(raw[4:], np.int8).astype(np.float32) * scale
    assert np.array_equal(found, expected, equal_nan=True)


def test_q8_of_nothing_has_no_scale() -> None:
    assert CODECS["APR_Q8"].encode(np.zeros((0, 3), np.float32)) == {"": b""}
    assert decoded(CODECS["APR_Q8"], {"": b""}, 0).size == 0


@pytest.mark.parametrize("name", ["APR_Q4", "APR_Q8"])
def test_zeros_have_scale_one(name: str) -> None:
    raw = CODECS[name].encode(np.zeros(32, np.float32))[""]
    kind = "<f2" if name == "APR_Q4" else "<f4"
    assert np.frombuffer(raw[: np.dtype(kind).itemsize], kind)[0] == 1
    assert not decoded(CODECS[name], {"": raw}, 32).any()
