"""Decoding of ggml's types, bit by bit against gguf-py and libgguf."""

import numpy as np
import pytest

from aprfmt.base.encodings import ENCODINGS
from aprfmt.codecs import CODECS, decode_chunked
from aprfmt.codecs.nvfp4 import HALF_SCALES as HALF_NVFP4
from tests.codecs.data import GGML_BLOCKS, Array, assert_same_numbers, by_gguf, by_libgguf, decoded

# Types that neither library decodes are compared with the formulas below.
JUDGED = [name for name in GGML_BLOCKS if name not in ("Q8_1", "Q8_K", "Q2_0")]
BLOCKS = 256

# Where the float16 scales stand in a block: byte offsets.
HALF_SCALES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,),
    "IQ1_S": (0,), "IQ4_NL": (0,), "IQ4_XS": (0,), "TQ1_0": (52,), "TQ2_0": (64,), "Q1_0": (0,),
}  # fmt: skip
SCALES = {
    "largest": 0x7BFF, "smallest_normal": 0x0400, "subnormal": 0x03FF, "smallest": 0x0001,
    "zero": 0x0000, "minus_zero": 0x8000, "negative": 0xC2AB, "infinite": 0x7C00,
    "minus_infinite": 0xFC00, "nan": 0x7E00, "signalling_nan": 0x7C01,
}  # fmt: skip


def random_blocks(name: str, seed: int = 0, blocks: int = BLOCKS) -> Array:
    """Return raw bytes of any pattern."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (blocks, ENCODINGS[name].type_size), dtype=np.uint8)


def judge(name: str, blocks: Array) -> None:
    """Compare our numbers with every library that has the type; at least one must have it."""
    codec = CODECS[name]
    found = decoded(codec, {"": blocks.tobytes()}, len(blocks) * codec.block_size)
    judges = [numbers for by in (by_gguf, by_libgguf) if (numbers := by(name, blocks)) is not None]
    assert judges
    for expected in judges:
        assert_same_numbers(found, expected)


@pytest.mark.parametrize("name", JUDGED)
def test_any_bytes(name: str) -> None:
    judge(name, random_blocks(name))


@pytest.mark.parametrize("name", JUDGED)
def test_every_byte_value_in_every_place(name: str) -> None:
    size = ENCODINGS[name].type_size
    judge(name, np.repeat(np.arange(256, dtype=np.uint8)[:, None], size, axis=1))


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", HALF_SCALES)
def test_extreme_scales(name: str, scale: str) -> None:
    blocks = random_blocks(name, seed=1, blocks=16)
    for number, offset in enumerate(HALF_SCALES[name]):
        rows = blocks[number :: len(HALF_SCALES[name])]
        rows[:, offset : offset + 2] = np.array([SCALES[scale]], "<u2").view(np.uint8)
    judge(name, blocks)


@pytest.mark.parametrize("name", JUDGED)
def test_more_blocks_than_a_chunk(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk's end changes nothing: 3 blocks at a time against all at once."""
    codec, blocks = CODECS[name], random_blocks(name, seed=2, blocks=10)
    raw, count = {"": blocks.tobytes()}, 10 * CODECS[name].block_size
    whole = decoded(codec, raw, count)
    monkeypatch.setattr("aprfmt.codecs.base.CHUNK", 3 * codec.block_size)
    assert_same_numbers(decoded(codec, raw, count), whole)


def test_q8_1_has_36_bytes() -> None:
    """gguf-py says 40 (two float32); ggml's struct is two float16 and 32 bytes."""
    import gguf

    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType.Q8_1] == (32, 40)
    assert (CODECS["Q8_1"].block_size, CODECS["Q8_1"].type_size) == (32, 36)
    q = np.arange(-16, 16, dtype=np.int8)
    raw = np.array([1.5, 99], "<f2").tobytes() + q.tobytes()
    assert decoded(CODECS["Q8_1"], {"": raw}, 32).tolist() == [1.5 * int(v) for v in q]


def test_q8_k_scales_by_a_float32() -> None:
    q = np.arange(-128, 128, dtype=np.int8)
    raw = np.array([0.1], "<f4").tobytes() + q.tobytes() + bytes(32)
    expected = [float(np.float32(0.1) * np.float32(v)) for v in q]
    assert decoded(CODECS["Q8_K"], {"": raw}, 256).tolist() == expected


def test_q2_0_counts_from_minus_one() -> None:
    """Element i is bits 2*(i % 4) of byte i // 4, minus one."""
    data = np.random.default_rng(3).integers(0, 256, 16, dtype=np.uint8)
    raw = np.array([0.25], "<f2").tobytes() + data.tobytes()
    expected = [((int(data[i // 4]) >> 2 * (i % 4) & 3) - 1) * 0.25 for i in range(64)]
    assert decoded(CODECS["Q2_0"], {"": raw}, 64).tolist() == expected


def test_nvfp4_takes_its_sibling_scale_into_the_scales_of_its_blocks() -> None:
    """A value is code * (d * scale), rounded in that order."""
    codec, blocks = CODECS["NVFP4"], random_blocks("NVFP4", blocks=6)
    records = blocks.reshape(6, 36)
    d = HALF_NVFP4[records[:, :4]] * np.float32(2)
    plain = decoded(codec, {"": blocks.tobytes()}, 384).reshape(6, 4, 16)
    codes = plain / np.where(d == 0, 1, d)[..., None]
    one = np.array([0.37], "<f4")
    scaled = decoded(codec, {"": blocks.tobytes(), "scale": one.tobytes()}, 384)
    assert_same_numbers(scaled, (codes * (d * one)[..., None]).reshape(-1))
    experts = np.array([2.0, 0.37, 3.0], "<f4")
    raw = {"": blocks.tobytes(), "scale": experts.tobytes()}
    each = decoded(codec, raw, 384)
    expected = codes * (d * experts.repeat(2)[:, None])[..., None]
    assert_same_numbers(each, expected.reshape(-1))
    chunks = decode_chunked("NVFP4", raw, (3, 2, 64), np.empty(64, np.float32))
    assert_same_numbers(np.concatenate([chunk.copy() for chunk in chunks]), each)
