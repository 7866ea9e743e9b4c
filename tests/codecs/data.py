"""Input for the codec suites, and the libraries that judge: gguf, libgguf, bitsandbytes."""

import ctypes
import os
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import gguf
import libgguf
import numpy as np
import numpy.typing as npt
import pytest

from aprfmt.base.encodings import ENCODINGS
from aprfmt.base.fork_types import DECODED
from aprfmt.codecs import CODECS
from aprfmt.codecs.base import Codec

Array = npt.NDArray[Any]

FORKED = [name for name, *_ in DECODED]
GGML_BLOCKS = [
    n
    for n, row in ENCODINGS.items()
    if row.ggml is not None and row.block_size > 1 and n not in FORKED
]
ENCODERS = [
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
    "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4",
]  # fmt: skip
COLUMNS = 512


def ggml_id(name: str) -> int:
    """Return the type's number in ggml."""
    number = ENCODINGS[name].ggml
    assert number is not None
    return number


def decoded(codec: Codec, raw: Mapping[str, bytes], count: int) -> Array:
    """Return `raw` decoded by the reference codec."""
    out: Array = np.full(count, 7, codec.dtype)
    codec.decode(raw, out)
    return out


def encoded(name: str, x: Array, fma: str, importance: Array | None = None) -> Array:
    """Return the reference codec's blocks as uint8 [blocks, type_size]."""
    codec = CODECS[name]
    raw = codec.encode(x, fma=fma, importance=importance)[""]  # type: ignore[arg-type]
    return np.frombuffer(raw, np.uint8).reshape(-1, codec.type_size)


def assert_same_numbers(found: Array, expected: Array) -> None:
    """Compare float32 bit by bit; any NaN equals any NaN, as payloads have no meaning."""
    found, expected = found.reshape(-1), expected.reshape(-1)
    nan = np.isnan(expected)
    assert np.array_equal(np.isnan(found), nan)
    differ = (found.view(np.uint32) != expected.view(np.uint32)) & ~nan
    at = int(np.argmax(differ))
    assert not differ.any(), f"{differ.sum()} differ, first {at}: {found[at]!r} {expected[at]!r}"


def assert_same_blocks(found: Array, expected: Array) -> None:
    """Compare encoded blocks and show the first that differs."""
    differ = (found != expected).any(axis=1)
    at = int(np.argmax(differ))
    assert not differ.any(), (
        f"{differ.sum()} of {len(differ)} blocks differ, first {at}:\n"
        f"{found[at].tobytes().hex()}\n{expected[at].tobytes().hex()}"
    )


def by_gguf(name: str, blocks: Array) -> Array | None:
    """Return gguf-py's numbers, or None where it cannot decode the type."""
    try:
        kind = gguf.GGMLQuantizationType(ggml_id(name))
        with np.errstate(all="ignore"):
            return np.asarray(gguf.quants.dequantize(blocks, kind))
    except (ValueError, NotImplementedError):
        return None


def by_libgguf(name: str, blocks: Array) -> Array | None:
    """Return libgguf's numbers, or None where it cannot decode the type."""
    try:
        return np.asarray(libgguf.dequantize_rows(blocks, ggml_id(name)))
    except ValueError:
        return None


def libgguf_blocks(name: str, x: Array, importance: Array | None = None) -> Array:
    """Return libgguf's blocks as uint8 [blocks, type_size]."""
    raw = libgguf.quantize_rows(x, ggml_id(name), importance)
    return np.asarray(raw).reshape(-1, ENCODINGS[name].type_size)


def libgguf_mode() -> Literal["fused", "strict"]:
    """Return the arithmetic libgguf was compiled with: a tie of Q4_0 tells.

    x * (1/d) + 8.5 is just below an integer here; rounded twice it becomes that integer.
    """
    x = tie_of_q4_0()
    fused, strict = encoded("Q4_0", x, "fused"), encoded("Q4_0", x, "strict")
    assert not np.array_equal(fused, strict)
    found = libgguf_blocks("Q4_0", x)
    return "fused" if np.array_equal(found, fused) else "strict"


def tie_of_q4_0() -> Array:
    """Return one block that the two arithmetics encode differently, found by search."""
    rng = np.random.default_rng(5)
    for _ in range(200):
        noise = rng.standard_normal((512, 32)).astype(np.float32)
        x = (noise.view(np.uint32) & 0xFFFF0000).view(np.float32)
        differ = (encoded("Q4_0", x, "fused") != encoded("Q4_0", x, "strict")).any(axis=1)
        if differ.any():
            return np.ascontiguousarray(x[np.argmax(differ)][None])
    raise AssertionError("no tie found")


class FusedLibrary:
    """A ggml library built with fused multiply-adds, named by APRFMT_LIBGGML_FUSED."""

    def __init__(self) -> None:
        path = os.environ.get("APRFMT_LIBGGML_FUSED", "")
        if not os.path.isfile(path):
            pytest.skip("NOT-RUN: APRFMT_LIBGGML_FUSED names no ggml library built with -mfma")
        self._quantize = ctypes.CDLL(path, os.RTLD_LAZY).ggml_quantize_chunk
        self._quantize.restype = ctypes.c_size_t
        number = ctypes.c_int64
        self._quantize.argtypes = [
            ctypes.c_int,
            ctypes.c_void_p,
            ctypes.c_void_p,
            number,
            number,
            number,
            ctypes.c_void_p,
        ]

    def blocks(self, name: str, x: Array, importance: Array | None) -> Array:
        """Return blocks as uint8 [blocks, type_size]."""
        rows, columns = x.shape
        row = ENCODINGS[name]
        out = np.zeros((x.size // row.block_size, row.type_size), np.uint8)
        weights = None if importance is None else importance.ctypes.data
        x = np.ascontiguousarray(x)
        self._quantize(ggml_id(name), x.ctypes.data, out.ctypes.data, 0, rows, columns, weights)
        return out


def ordinary(seed: int = 0, rows: int = 12) -> Iterator[tuple[str, Array]]:
    """Give named inputs [rows, COLUMNS] that weights look like."""
    rng = np.random.default_rng(seed)
    shape = (rows, COLUMNS)
    normal = rng.standard_normal(shape).astype(np.float32)
    yield "normal", normal
    yield "bfloat16", (normal.view(np.uint32) & 0xFFFF0000).view(np.float32)
    yield "float16", normal.astype(np.float16).astype(np.float32)
    yield "heavy", rng.standard_t(3, shape).astype(np.float32) * np.float32(0.02)
    yield "small_integers", rng.integers(-8, 8, shape).astype(np.float32)
    yield "positive", np.abs(normal) + np.float32(0.5)
    yield "negative", -np.abs(normal) - np.float32(3)
    yield "spikes", normal + (rng.random(shape) < 0.01).astype(np.float32) * np.float32(1e4)


def extreme(seed: int = 1, rows: int = 12) -> Iterator[tuple[str, Array]]:
    """Give named inputs [rows, COLUMNS] from the ends of float32: zeros, subnormals, overflow."""
    rng = np.random.default_rng(seed)
    shape = (rows, COLUMNS)
    normal = rng.standard_normal(shape).astype(np.float32)
    bits = rng.integers(0, 1 << 32, shape, dtype=np.uint64).astype(np.uint32).view(np.float32)
    half, sign = rng.random(shape) < 0.5, np.where(rng.random(shape) < 0.5, -1, 1)
    with np.errstate(all="ignore"):
        yield "any_bits", np.where(np.isfinite(bits), bits, 0).astype(np.float32)
        yield "scales", (normal * 10.0 ** rng.uniform(-45, 30, (rows, 1))).astype(np.float32)
        yield "mixed", (normal * 10.0 ** rng.uniform(-30, 8, shape)).astype(np.float32)
        yield "sparse", np.where(rng.random(shape) < 0.9, 0, normal).astype(np.float32)
        yield "signed_zeros", np.where(half, np.float32(-0.0), np.float32(0))
        yield "sparse_minus", np.where(half, np.float32(-0.0), normal).astype(np.float32)
        yield "constant", np.repeat(normal[:, :16], 32, axis=1)
        yield "constant_huge", np.repeat(normal[:, :16], 32, axis=1) * np.float32(1e37)
        yield "float16_edge", normal * np.float32(65504)
        yield "subnormal", normal * np.float32(1e-39)
        yield "below_smallest", normal * np.float32(1e-15)
        yield "powers", (np.exp2(rng.integers(-20, 20, shape)) * sign).astype(np.float32)
        zero_runs = np.repeat(rng.random((rows, 32)) < 0.5, 16, axis=1)
        yield "zero_runs", normal * zero_runs.astype(np.float32)


def importances(seed: int = 2) -> dict[str, Array | None]:
    """Return named importance matrices of COLUMNS columns."""
    rng = np.random.default_rng(seed)
    mild = rng.lognormal(0, 1, COLUMNS).astype(np.float32)
    return {
        "none": None,
        "mild": mild,
        "harsh": rng.lognormal(0, 3, COLUMNS).astype(np.float32),
        "half_zero": np.where(rng.random(COLUMNS) < 0.5, 0, mild).astype(np.float32),
        "nearly_zero": np.where(rng.random(COLUMNS) < 0.97, 0, mild).astype(np.float32),
        "zero": np.zeros(COLUMNS, np.float32),
        "tiny": np.full(COLUMNS, 1e-30, np.float32),
        "huge": mild * np.float32(1e20),
    }
