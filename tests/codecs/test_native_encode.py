"""The C encoders against the numpy codecs and libgguf, byte for byte, on every level of kernels."""

import numpy as np
import pytest

from aprfmt import codecs
from aprfmt.base.encodings import ENCODINGS
from aprfmt.codecs import bnb4
from aprfmt.errors import CodecError
from tests.codecs.levels import F32, hard_rows, importance, level, misaligned, native

__all__ = ["level"]

ENCODERS = [name for name, _, _ in native._kernels.encoders()]
BLOCKS = [name for name in ENCODERS if ENCODINGS[name].block_size > 1]
WEIGHED = [
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ4_NL",
    "IQ4_XS",
]


def bad_blocks(name: str, found: bytes, expected: bytes, columns: int) -> str:
    """Return where two encodings differ, as text; empty if nowhere."""
    size, per_row = ENCODINGS[name].type_size, columns // ENCODINGS[name].block_size
    a, b = (np.frombuffer(data, np.uint8).reshape(-1, size) for data in (found, expected))
    wrong = np.flatnonzero((a != b).any(axis=1))
    if not wrong.size:
        return ""
    rows = sorted({int(i) // per_row for i in wrong})
    return f"{wrong.size} of {len(a)} blocks, rows {rows}, first {a[wrong[0]]} for {b[wrong[0]]}"


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("fma", ["fused", "strict"])
@pytest.mark.parametrize("weighed", [False, True], ids=["plain", "importance"])
@pytest.mark.parametrize("name", ENCODERS)
def test_encodes_as_by_numpy(name: str, weighed: bool, fma: str) -> None:
    columns = 768
    x = hard_rows(columns)
    weights = importance(columns) if weighed else None
    expected = codecs.codec(name).encode(x, fma=fma, importance=weights)[""]  # type: ignore[arg-type]
    found = native.ENCODERS[name, fma](x, importance=weights)[""]
    assert not bad_blocks(name, found, expected, columns)


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("fma", ["fused", "strict"])
@pytest.mark.parametrize("name", WEIGHED)
def test_elements_that_alone_have_importance_encode_as_by_numpy(name: str, fma: str) -> None:
    rng = np.random.default_rng(4)
    weights = np.where(rng.random(1024) < 0.08, 1, 0).astype(np.float32)
    x = (-np.abs(rng.normal(size=(40, 1024))) * 1e-6 - rng.random((40, 1))).astype(np.float32)
    expected = codecs.codec(name).encode(x, fma=fma, importance=weights)[""]  # type: ignore[arg-type]
    found = native.ENCODERS[name, fma](x, importance=weights)[""]
    assert not bad_blocks(name, found, expected, 1024)


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("weighed", [False, True], ids=["plain", "importance"])
@pytest.mark.parametrize("name", BLOCKS)
def test_strict_bytes_are_those_of_libgguf(name: str, weighed: bool) -> None:
    libgguf = pytest.importorskip("libgguf", reason="NOT-RUN: libgguf is not installed")
    columns = 1024
    rng = np.random.default_rng(3)
    x: F32 = rng.normal(size=(24, columns)).astype(np.float32)
    x[::2] = (x[::2].view(np.uint32) & 0xFFFF0000).view(np.float32)  # BF16 values
    weights = importance(columns) if weighed and name in WEIGHED else None
    expected = np.asarray(libgguf.quantize_rows(x, ENCODINGS[name].ggml, imatrix=weights))
    found = native.ENCODERS[name, "strict"](x, importance=weights)[""]
    assert not bad_blocks(name, found, expected.tobytes(), columns)


def test_the_two_arithmetics_differ_where_ggml_multiplies_and_adds() -> None:
    x = hard_rows(4096)
    for name in ("Q4_0", "Q4_K", "Q6_K"):
        fused, strict = (native.ENCODERS[name, fma](x)[""] for fma in ("fused", "strict"))
        assert fused != strict
    for name in ("Q8_0", "MXFP4", "F16"):
        assert native.ENCODERS[name, "fused"](x)[""] == native.ENCODERS[name, "strict"](x)[""]


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("name", ENCODERS)
def test_any_number_of_blocks_gives_the_same_blocks(name: str) -> None:
    row = ENCODINGS[name]
    columns = max(row.block_size, 8)
    x = np.random.default_rng(5).normal(size=(19, columns)).astype(np.float32)
    encoder = native.ENCODERS[name, "fused"]
    whole = encoder(x)[""]
    one = len(whole) // len(x)
    for rows in (1, 2, 7, 8, 9, 16, 18):
        assert encoder(x[:rows])[""] == whole[: rows * one]
    shifted = misaligned(x, 4).view(np.float32)
    out = misaligned(bytes(len(whole)), 3)
    encoder.into(shifted, out, columns)
    assert out.tobytes() == whole


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("name", ["F16", "BF16"])
def test_plain_elements_of_every_kind_encode_as_by_numpy(name: str) -> None:
    rng = np.random.default_rng(6)
    bits = rng.integers(0, 1 << 32, 200_003, np.uint32)
    ties = (np.arange(1 << 16, dtype=np.uint32) << 16) + np.uint32(0x8000)
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
    near = np.concatenate([halves + np.uint32(d) for d in (0x0FFF, 0x1000, 0x1001)])
    x = np.concatenate([bits, ties, near]).view(np.float32)
    expected = codecs.codec(name).encode(x)[""]
    assert native.ENCODERS[name, "fused"](x)[""] == expected


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("name", ["NF4", "FP4"])
def test_codes_of_four_bits_encode_as_by_numpy(name: str) -> None:
    rng = np.random.default_rng(9)
    for count in (1, 2, 7, 63, 64, 65, 127, 1000, 64 * 40 + 33):
        for block in (32, 64, 4096):
            x = rng.normal(size=count).astype(np.float32)
            x[: count // 3] = 0
            codec = codecs.codec(name).with_options(blocksize=block)
            assert isinstance(codec, bnb4.Bnb4Codec)
            expected = codec.encode_coded(x, bnb4.encode_coded)
            assert codec.encode_coded(x, native.encode_coded) == expected


def test_what_does_not_fit_an_encoder_is_refused() -> None:
    encoder = native.ENCODERS["Q4_K", "fused"]
    x = np.ones((2, 256), np.float32)
    with pytest.raises(CodecError, match="multiple of 256"):
        encoder(np.ones((2, 128), np.float32))
    with pytest.raises(CodecError, match="float64"):
        encoder(x.astype(np.float64))
    with pytest.raises(CodecError, match="257 columns"):
        encoder(x, importance=np.ones(257, np.float32))
    for bad in (np.nan, np.inf, -np.inf):
        x[1, 200] = bad
        with pytest.raises(CodecError, match="element 456 is"):
            encoder(x)
    out = bytearray(288)
    for columns, room, weights in ((256, 287, None), (512, 288, np.ones(256)), (0, 288, None)):
        with pytest.raises(CodecError, match="Q4_K: found"):
            bad_weights = None if weights is None else weights.astype(np.float32)
            encoder.into(np.ones(512, np.float32), memoryview(out)[:room], columns, bad_weights)
    assert encoder(np.ones((0, 256), np.float32)) == {"": b""}


def test_wrong_shapes_of_four_bit_codes_are_refused() -> None:
    x, packed, absmax = np.ones(128, np.float32), np.empty(64, np.uint8), np.empty(2, np.float32)
    bounds, order = np.zeros(15, np.float32), np.arange(16, dtype=np.uint8)
    native.encode_coded(x, packed, absmax, 64, bounds, order)
    wrong = (
        (packed[:63], absmax, 64, bounds, order),
        (packed, absmax[:1], 64, bounds, order),
        (packed, absmax, 0, bounds, order),
        (packed, absmax, 64, bounds[:14], order),
        (packed, absmax, 64, bounds, order[:15]),
    )
    for a, b, block, c, d in wrong:
        with pytest.raises(CodecError, match="4-bit code"):
            native.encode_coded(x, a, b, block, c, d)
