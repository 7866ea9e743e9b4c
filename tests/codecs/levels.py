"""Shared by the tests of the native kernels: the levels, and difficult data."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from aprfmt.errors import CodecError

native = pytest.importorskip(
    "aprfmt.codecs.native", reason="NOT-RUN: the C extension is not built", exc_type=ImportError
)

golden = pytest.importorskip("aprfmt.codecs.native.golden")
moments = pytest.importorskip("aprfmt.codecs.native.moments")

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]


@pytest.fixture(params=["avx512", "avx2", "generic"])
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run a test on every level this processor has."""
    try:
        native.force(request.param)
    except CodecError as error:
        pytest.skip(f"NOT-RUN: {error}")
    yield request.param
    native.force("best")


def same_bits(found: F32, expected: F32) -> None:
    """Hold two arrays to equal bits; a NaN equals a NaN."""
    differ = (found.view(np.uint32) != expected.view(np.uint32)) & ~(
        np.isnan(found) & np.isnan(expected)
    )
    assert not differ.any(), (
        f"{np.count_nonzero(differ)} of {found.size} differ, first at {np.argmax(differ)}: "
        f"{found.reshape(-1)[np.argmax(differ)]} for {expected.reshape(-1)[np.argmax(differ)]}"
    )


def hard_rows(columns: int) -> F32:
    """Return rows of float32 that meet every branch of the encoders."""
    rng = np.random.default_rng(7)
    x = (rng.standard_t(3, size=(15, columns)) * 0.02).astype(np.float32)
    x[0] = (x[0] * 64).astype(np.float16)  # few bits: ties
    x[1] = (x[1].view(np.uint32) & 0xFFFF0000).view(np.float32)  # BF16 values: more ties
    x[2, :512] = 0
    x[2, 5] = -0.0
    x[3, :32] = 1
    x[4, :64] = -0.25
    x[5] = np.abs(x[5])
    x[6] = -np.abs(x[6])
    x[7] *= np.float32(1e-30)
    x[8] *= np.float32(1e-38)
    x[9] *= np.float32(1e-44)  # subnormal, most of them zero
    x[10] *= np.float32(1e30)
    x[11] = np.round(x[11] * 50) / 50
    x[12, :256] = -1 - 1e-7 * np.arange(256)
    x[13, :256] = -1 - 3e-5 * rng.normal(size=256)
    x[14] = np.where(rng.random(columns) < 0.5, np.float32(0.75), np.float32(-0.75))
    return x


def importance(columns: int) -> F32:
    """Return a harsh importance matrix with zeros in it."""
    rng = np.random.default_rng(8)
    weights: F32 = np.exp(rng.normal(size=columns) * 2).astype(np.float32)
    weights[::37] = 0
    return weights


def misaligned(data: Any, by: int) -> U8:
    """Return a copy of some bytes at an address that is `by` modulo 64."""
    source: U8 = np.frombuffer(memoryview(data).cast("B"), np.uint8)
    room = np.empty(source.size + 128, np.uint8)
    start = -room.ctypes.data % 64 + by
    result: U8 = room[start : start + source.size]
    result[:] = source
    return result


def out_at(count: int, by: int) -> F32:
    """Return float32 [count] that begins `by` elements after a 64-byte line, between guards."""
    room = np.full(count + 64, np.float32(-12345), np.float32)
    start = -room.ctypes.data % 64 // 4 + 16 + by
    result: F32 = room[start : start + count]
    return result


def guards_hold(out: F32) -> bool:
    """Say whether nothing outside the output was written."""
    room: Any = out.base
    start = (out.ctypes.data - room.ctypes.data) // 4
    around = np.concatenate([room[:start], room[start + out.size :]])
    return bool((around == np.float32(-12345)).all())
