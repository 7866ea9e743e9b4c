"""Encoding of ggml's types, byte by byte against libgguf, with and without importance."""

import hashlib

import numpy as np
import pytest

from aprfmt.base.encodings import ENCODINGS
from aprfmt.codecs import CODECS
from tests.codecs.data import (
    COLUMNS,
    ENCODERS,
    Array,
    FusedLibrary,
    assert_same_blocks,
    decoded,
    encoded,
    extreme,
    importances,
    libgguf_blocks,
    libgguf_mode,
    ordinary,
)

INPUTS = dict(ordinary(rows=4)) | dict(extreme(rows=4))
WEIGHTS = importances()


@pytest.fixture(scope="module")
def mode() -> str:
    """The arithmetic of the installed libgguf: x86-64 wheels are strict."""
    return libgguf_mode()


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("name", ENCODERS)
def test_bytes_of_libgguf(name: str, weights: str, mode: str) -> None:
    importance = WEIGHTS[weights]
    for x in INPUTS.values():
        expected = libgguf_blocks(name, x, importance)
        assert_same_blocks(encoded(name, x, mode, importance), expected)


@pytest.mark.parametrize("name", ENCODERS)
def test_powers_of_two_and_their_neighbours(name: str, mode: str) -> None:
    """Every exponent, one bit to either side: where log2, reciprocals and roundings turn."""
    exponents = np.arange(1, 255, dtype=np.uint32) << 23
    x = np.stack([exponents - 1, exponents, exponents + 1], axis=1).view(np.float32).reshape(-1)
    spread = np.zeros((len(x), 256), np.float32)
    spread[:, ::16] = x[:, None]
    spread[:, 1::16] = x[:, None] / 3
    assert_same_blocks(encoded(name, spread, mode), libgguf_blocks(name, spread))


def test_groups_as_small_as_those_that_count_as_zero(mode: str) -> None:
    """At the bounds below which ggml takes a group for zeros, and one bit to either side."""
    rng = np.random.default_rng(2)
    shape = rng.uniform(-1, 1, 256).astype(np.float32)
    shape[::16] = 1
    sizes = [np.float32(size) for size in (1e-30, 1e-15, 1e-12, 1e-8, 1e-7)]
    around = [np.nextafter(size, np.float32(end)) for size in sizes for end in (0, 1)]
    x = np.stack([np.clip(shape * size, -size, size) for size in (*sizes, *around)])
    weighed = np.ones(256, np.float32)
    for name in ENCODERS:
        for signed in (x, -x):
            assert_same_blocks(encoded(name, signed, mode), libgguf_blocks(name, signed))
            expected = libgguf_blocks(name, signed, weighed)
            assert_same_blocks(encoded(name, signed, mode, weighed), expected)


@pytest.mark.parametrize("name", ENCODERS)
def test_bytes_of_a_fused_ggml(name: str) -> None:
    library = FusedLibrary()
    for importance in WEIGHTS.values():
        for x in INPUTS.values():
            expected = library.blocks(name, x, importance)
            assert_same_blocks(encoded(name, x, "fused", importance), expected)


# SHA-256 of blocks made by ggml 0.20.2 (ggml-quants.c, gcc 12 -O2 -fno-tree-vectorize -mfma) from
# `golden_input`: without importance, with it, with most of it zero. Made by that library, not by
# this package.
FUSED_GOLDEN = {
    "Q4_0": ("63c2c0054426df6d", "a43f263239d771ca", "755930f7d76ebe3c"),
    "Q4_1": ("30004dce66400a2b", "79329306e790b7c2", "c9c20c81e6fcefba"),
    "Q5_0": ("43c9b2c87ee8ca84", "4de9294f1385cf15", "ce885ece9797e0c6"),
    "Q5_1": ("5c25e45919259b11", "ac3ed50a032407cc", "11e0a534a9112590"),
    "Q8_0": ("bac1dbf2ad29a586", "bac1dbf2ad29a586", "bac1dbf2ad29a586"),
    "Q2_K": ("e86744cdbfbc69bd", "f240ea506138e264", "982e4ca395d2f5cc"),
    "Q3_K": ("1c2d0186b536dc63", "37c828db1dfd0d26", "001ff1cf6c19f1fd"),
    "Q4_K": ("ef9a2491d61bb780", "d77e8a4b34156ae8", "b0fabf54b3f78ae9"),
    "Q5_K": ("8db3866d5752e2f6", "7ab7dea573964bae", "9889516c81a60818"),
    "Q6_K": ("32869236f68c8776", "8260e9c5cb3250a0", "bccf5d3dc6aff10c"),
    "IQ4_NL": ("3c9cfdfbd60a0216", "c064f9f857c10bbc", "69c3d07ddaf8011b"),
    "IQ4_XS": ("d7efb9d1f7f4a16d", "57d33c207676ace7", "a9b0199d9055206d"),
    "TQ1_0": ("66b0a3ce05d28464", "66b0a3ce05d28464", "66b0a3ce05d28464"),
    "TQ2_0": ("46c0e97f22990f20", "46c0e97f22990f20", "46c0e97f22990f20"),
    "MXFP4": ("26285d225b36c050", "26285d225b36c050", "26285d225b36c050"),
    "NVFP4": ("e830b63bb2c3e9c1", "e830b63bb2c3e9c1", "e830b63bb2c3e9c1"),
}


def golden_input() -> tuple[Array, list[Array | None]]:
    """Return x [64, 512] whose rows differ in magnitude, and importances, from integers only.

    No random generator of a library stands between this and the digests.
    """
    state, words = 1, []
    for _ in range(65 * COLUMNS):
        state = (state * 1103515245 + 12345) & 0x7FFFFFFF
        words.append(state >> 7 & 0xFFFF)
    noise = np.array(words, np.float64).reshape(65, COLUMNS)
    x = (noise[:64] - 32768) / 65536 * (1 + np.arange(64)[:, None] % 7)
    x[::2] = np.round(x[::2] * 256) / 256  # short fractions: ties
    whole = (1 + noise[64] % 97).astype(np.float32)
    return x.astype(np.float32), [None, whole, whole * (whole > 94).astype(np.float32)]


def digest(blocks: Array) -> str:
    return hashlib.sha256(blocks.tobytes()).hexdigest()[:16]


@pytest.mark.parametrize("name", FUSED_GOLDEN)
def test_fused_bytes_are_those_ggml_made(name: str) -> None:
    x, weights = golden_input()
    assert tuple(digest(encoded(name, x, "fused", w)) for w in weights) == FUSED_GOLDEN[name]


@pytest.mark.parametrize("name", ["Q4_0", "Q2_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL"])
def test_the_two_arithmetics_differ(name: str) -> None:
    """Otherwise the tests above could not distinguish them."""
    x, weights = golden_input()
    strict = [digest(encoded(name, x, "strict", importance)) for importance in weights]
    assert strict != list(FUSED_GOLDEN[name])


@pytest.mark.parametrize("name", ENCODERS)
def test_chunks_do_not_show(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, importance = INPUTS["normal"][:2], WEIGHTS["mild"]
    whole = encoded(name, x, "fused", importance)
    monkeypatch.setattr("aprfmt.codecs.base.ENCODE_CHUNK", 3 * ENCODINGS[name].block_size)
    assert_same_blocks(encoded(name, x, "fused", importance), whole)


# Largest error in steps, of clean data: a step of the type is that of its largest sub-block.
@pytest.mark.parametrize(
    ("name", "nmse"),
    [
        ("Q8_0", 5e-5), ("Q6_K", 5e-4), ("Q5_K", 2e-3), ("Q5_0", 3e-3), ("Q5_1", 2e-3),
        ("Q4_K", 7e-3), ("Q4_0", 1e-2), ("Q4_1", 8e-3), ("IQ4_NL", 7e-3), ("IQ4_XS", 7e-3),
        ("Q3_K", 4e-2), ("Q2_K", 1.2e-1), ("MXFP4", 2e-2), ("NVFP4", 1.5e-2),
        ("TQ1_0", 1.0), ("TQ2_0", 1.0),
    ],
)  # fmt: skip
def test_normal_weights_come_back_nearly(name: str, nmse: float) -> None:
    x = INPUTS["normal"]
    back = decoded(CODECS[name], {"": encoded(name, x, "fused").tobytes()}, x.size)
    error = np.square(back.astype(np.float64) - x.reshape(-1)).sum() / np.square(x).sum()
    assert error < nmse
