"""Floating-point encodings, exhaustively: 65,536 halves, 256 bytes, 64 and 16 small codes."""

import ml_dtypes
import numpy as np
import pytest

from aprfmt.codecs import CODECS
from tests.codecs.data import Array, assert_same_numbers, decoded, libgguf_blocks

HALVES = np.arange(1 << 16, dtype="<u2")
SMALL = {
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "F6_E2M3": ml_dtypes.float6_e2m3fn,
    "F6_E3M2": ml_dtypes.float6_e3m2fn,
    "F4": ml_dtypes.float4_e2m1fn,
}


def floats(patterns: list[int]) -> Array:
    return np.array(patterns, np.uint32).view(np.float32)


def test_all_bf16_patterns_are_shifted() -> None:
    found = decoded(CODECS["BF16"], {"": HALVES.tobytes()}, 1 << 16)
    expected = HALVES.view(ml_dtypes.bfloat16).astype(np.float32)
    assert np.array_equal(found.view(np.uint32), HALVES.astype(np.uint32) << 16)
    assert_same_numbers(found, expected)


def test_all_f16_patterns_keep_payload_and_signalling() -> None:
    found = decoded(CODECS["F16"], {"": HALVES.tobytes()}, 1 << 16)
    assert_same_numbers(found, HALVES.view(np.float16).astype(np.float32))
    nan = np.isnan(found)
    words = HALVES[nan].astype(np.uint32)
    expected = (words & 0x8000) << 16 | 0x7F800000 | (words & 0x3FF) << 13
    assert nan.sum() == 2 * 1023
    assert np.array_equal(found[nan].view(np.uint32), expected)


def test_torch_agrees_on_halves() -> None:
    torch = pytest.importorskip("torch", reason="NOT-RUN: torch is not installed")
    for name, kind in (("BF16", torch.bfloat16), ("F16", torch.float16)):
        found = decoded(CODECS[name], {"": HALVES.tobytes()}, 1 << 16)
        tensor = torch.from_numpy(HALVES.view(np.int16).copy()).view(kind)
        assert_same_numbers(found, tensor.to(torch.float32).numpy())


@pytest.mark.parametrize("name", ["BF16", "F16"])
def test_decoded_halves_encode_to_themselves(name: str) -> None:
    """All 65,536 come back, but for the quiet bit of signalling NaNs."""
    codec = CODECS[name]
    wide = decoded(codec, {"": HALVES.tobytes()}, 1 << 16)
    back = np.frombuffer(codec.encode(wide)[""], "<u2")
    quiet = 0x0040 if name == "BF16" else 0x0200
    assert np.array_equal(back, np.where(np.isnan(wide), HALVES | quiet, HALVES))


@pytest.mark.parametrize("name", ["BF16", "F16"])
def test_rounds_to_nearest_even_as_libgguf(name: str) -> None:
    """Any bits, and both neighbours and the middle of every two adjacent halves."""
    rng = np.random.default_rng(0)
    anything = rng.integers(0, 1 << 32, 1 << 18, dtype=np.uint64).astype(np.uint32)
    wide = decoded(CODECS[name], {"": HALVES.tobytes()}, 1 << 16)
    finite = np.sort(wide[np.isfinite(wide)].astype(np.float64))
    middle = ((finite[:-1] + finite[1:]) / 2).astype(np.float32).view(np.uint32)
    near = np.concatenate([middle - 1, middle, middle + 1])
    x = np.concatenate([anything, near])
    x = x[: len(x) // 32 * 32].view(np.float32).reshape(-1, 32)
    found = np.frombuffer(CODECS[name].encode(x)[""], "<u2")
    expected = libgguf_blocks(name, x).reshape(-1).view("<u2")
    kept = np.ones(found.shape, bool) if name == "BF16" else ~np.isnan(x.reshape(-1))
    assert np.array_equal(found[kept], expected[kept])


def test_nan_stays_nan_and_keeps_its_high_payload() -> None:
    x = floats([0x7F800001, 0xFFC12345, 0x7FABCDEF])
    bf16 = np.frombuffer(CODECS["BF16"].encode(x)[""], "<u2")
    assert [hex(word) for word in bf16] == ["0x7fc0", "0xffc1", "0x7feb"]
    f16 = np.frombuffer(CODECS["F16"].encode(x)[""], "<u2")
    assert [hex(word) for word in f16] == ["0x7e00", "0xfe09", "0x7f5e"]


def test_halves_overflow_to_infinity() -> None:
    x = np.array([65519.996, 65520.0, -1e38, 3.4e38], np.float32)
    f16 = np.frombuffer(CODECS["F16"].encode(x)[""], "<f2")
    assert f16.tolist() == [65504.0, float("inf"), float("-inf"), float("inf")]
    bf16 = np.frombuffer(CODECS["BF16"].encode(floats([0x7F7FFFFF]))[""], "<u2")
    assert hex(bf16[0]) == "0x7f80"


@pytest.mark.parametrize("name", SMALL)
def test_all_codes_of_small_floats(name: str) -> None:
    codec = CODECS[name]
    width = 8 * codec.type_size // codec.block_size
    codes = np.arange(1 << width, dtype=np.uint8)
    stream = np.unpackbits(codes[:, None], axis=1, bitorder="little")[:, :width]
    raw = np.packbits(stream.reshape(-1), bitorder="little").tobytes()
    found = decoded(codec, {"": raw}, len(codes))
    expected = codes.view(SMALL[name]).astype(np.float32)
    assert_same_numbers(found, expected)
    assert np.array_equal(np.signbit(found), np.signbit(expected))


def test_four_bit_floats_begin_with_the_low_nibble() -> None:
    assert decoded(CODECS["F4"], {"": b"\x21"}, 2).tolist() == [0.5, 1.0]


def test_six_bit_floats_begin_with_the_lowest_bits() -> None:
    """Codes 1, 2, 3, 4 as a little-endian 24-bit number."""
    raw = (1 | 2 << 6 | 3 << 12 | 4 << 18).to_bytes(3, "little")
    steps = decoded(CODECS["F6_E2M3"], {"": raw}, 4)
    assert steps.tolist() == [0.125, 0.25, 0.375, 0.5]


@pytest.mark.parametrize("name", ["F4", "F6_E2M3", "F6_E3M2"])
def test_packed_floats_may_end_within_a_block(name: str) -> None:
    codec = CODECS[name]
    raw = bytes(range(1, 1 + 4 * codec.type_size))
    whole = decoded(codec, {"": raw}, 4 * codec.block_size)
    short = decoded(codec, {"": raw}, 4 * codec.block_size - 1)
    assert_same_numbers(short, whole[:-1])
