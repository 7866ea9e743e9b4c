"""Products of float32 with encoded weights."""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from aprfmt import codecs
from aprfmt.base.encodings import ENCODINGS
from aprfmt.errors import CodecError
from tests.codecs.levels import (
    F32,
    U8,
    golden,
    guards_hold,
    level,
    misaligned,
    native,
    out_at,
    same_bits,
)

__all__ = ["level"]

KERNELS = [name for name, _, _ in native._kernels.decoders()]


def weights(name: str, rows: int, columns: int) -> tuple[U8, F32]:
    """Return encoded rows and their decoded values, small enough for products in float32."""
    row = ENCODINGS[name]
    count = rows * columns
    raw = np.frombuffer(golden.raw_bytes(count // row.block_size * row.type_size), np.uint8).copy()
    if name in ("MXFP4", "Q8_K", "F32", "BF16", "F8_E8M0"):  # exponents that overflow
        records = raw.reshape(-1, row.type_size)
        at = {"MXFP4": 0, "Q8_K": 3, "F32": 3, "BF16": 1, "F8_E8M0": 0}[name]
        records[:, at] = {"MXFP4": 120, "F8_E8M0": 120}.get(name, 0x3C)
    if name == "IQ1_M":  # the top nibble of its scale
        raw.reshape(-1, 56)[:, 55] &= 0x3F
    raw[(raw == 0x80) & name.endswith("FNUZ")] = 0  # their NaN
    return raw, codecs.decode(name, raw.tobytes(), (rows, columns))


def bound(x: F32, w: F32) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Return the bound of rounding errors: columns/32 + 8 roundings of the sum of magnitudes."""
    magnitudes = np.abs(x.astype(np.float64)) @ np.abs(w.astype(np.float64)).T
    limit: np.ndarray[tuple[int, ...], np.dtype[np.float64]]
    limit = magnitudes * (x.shape[1] / 32 + 8) * 2.0**-24 + 1e-37
    return limit


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("odd", [1, 5])
@pytest.mark.parametrize("name", KERNELS)
def test_products_stay_within_rounding(name: str, odd: int) -> None:
    """Also where single columns are left behind the last eight."""
    columns = 768 if ENCODINGS[name].block_size > 1 else 768 + odd
    raw, w = weights(name, 9, columns)
    x = np.random.default_rng(0).normal(size=(3, columns)).astype(np.float32)
    out = out_at(27, 5).reshape(3, 9)
    native.matmul(name, x, misaligned(raw, 3), out)
    exact = x.astype(np.float64) @ w.astype(np.float64).T
    assert (np.abs(out - exact) <= bound(x, w)).all()


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("columns", [256, 4096, 4096 + 256, 9216])
@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q5_0", "Q8_0", "BF16", "NVFP4"])
def test_a_product_depends_on_its_row_and_token_alone(name: str, columns: int) -> None:
    raw, _ = weights(name, 7, columns)
    x = np.random.default_rng(1).normal(size=(67, columns)).astype(np.float32)
    whole = np.empty((67, 7), np.float32)
    native.matmul(name, x, raw, whole)
    for tokens in (slice(0, 1), slice(66, 67), slice(3, 6), slice(0, 64)):
        some = np.empty((tokens.stop - tokens.start, 7), np.float32)
        native.matmul(name, x[tokens], raw, some)
        assert some.tobytes() == whole[tokens].tobytes()
    half = len(raw) // 7 * 3
    few = np.empty((67, 3), np.float32)
    native.matmul(name, x, raw[:half], few)
    assert few.tobytes() == whole[:, :3].tobytes()


def test_the_order_of_sums_is_as_documented() -> None:
    columns = 100
    rng = np.random.default_rng(2)
    w, x = rng.normal(size=(2, columns)).astype(np.float32)
    lanes = np.zeros((4, 8), np.float32)
    for i in range(columns):
        j, lane = i // 8 % 4, i % 8
        lanes[j, lane] += x[i] * w[i]
    s = (lanes[0] + lanes[1]) + (lanes[2] + lanes[3])
    total = ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]))
    out = np.empty((1, 1), np.float32)
    native.force("generic")  # rounds product and sum apart, as numpy does
    try:
        native.matmul("F32", x.reshape(1, -1), w, out)
    finally:
        native.force("best")
    assert out[0, 0] == total


def test_several_products_are_those_of_each() -> None:
    x = np.random.default_rng(4).normal(size=(2, 1024)).astype(np.float32)
    jobs, alone = [], []
    for name, rows in (("Q4_K", 700), ("Q6_K", 3), ("F32", 0), ("BF16", 900)):
        raw = weights(name, rows, 1024)[0]
        jobs.append((name, x, raw, np.empty((2, rows), np.float32)))
        alone.append(np.empty((2, rows), np.float32))
        native.matmul(name, x, raw, alone[-1])
    native.matmuls(jobs, threads=3)
    assert [job[3].tobytes() for job in jobs] == [out.tobytes() for out in alone]
    native.matmuls([])


def test_threads_change_nothing() -> None:
    raw, _ = weights("Q4_K", 1600, 1024)
    x = np.random.default_rng(3).normal(size=(2, 1024)).astype(np.float32)
    alone, split = np.empty((2, 1600), np.float32), np.empty((2, 1600), np.float32)
    native.matmul("Q4_K", x, raw, alone)
    native.matmul("Q4_K", x, raw, split, threads=3)
    assert alone.tobytes() == split.tobytes()


@pytest.mark.parametrize("rows", [1, 4, 7])
@pytest.mark.parametrize("name", KERNELS)
def test_every_level_of_fused_sums_gives_the_same_bits(name: str, rows: int) -> None:
    """Sixteen lanes add what eight do, in the same order; broken scales too."""
    if "avx512" not in native.LEVELS:
        pytest.skip("NOT-RUN: the processor has no AVX-512")
    raw, _ = weights(name, rows, 768)
    hard = np.frombuffer(golden.raw_bytes(raw.nbytes), np.uint8)  # infinite scales among them
    x = np.random.default_rng(6).normal(size=(1, 768)).astype(np.float32)
    for bits in (raw, hard):
        found = {}
        for wide in ("avx2", "avx512"):
            native.force(wide)
            out = np.empty((1, rows), np.float32)
            native.matmul(name, x, misaligned(bits, 5), out)
            found[wide] = out
        native.force("best")
        same_bits(found["avx512"], found["avx2"])


def test_no_tokens_and_no_rows_are_fine() -> None:
    """The result is empty: nothing is written beside it, and weights must have as many rows."""
    two = np.ones((2, 64), np.float32)
    for x, raw, shape in ((two[:0], bytes(68 * 3), (0, 3)), (two, b"", (2, 0))):
        out = out_at(0, 5).reshape(shape)
        native.matmul("Q8_0", x, raw, out)
        assert guards_hold(out)
    with pytest.raises(CodecError, match="Q8_0: found"):
        native.matmul("Q8_0", two, bytes(68), np.empty((2, 0), np.float32))


def test_what_does_not_fit_is_refused() -> None:
    x, raw, out = np.ones((2, 64), np.float32), bytes(68 * 3), np.empty((2, 3), np.float32)
    native.matmul("Q8_0", x, raw, out)
    wrong = (
        (x[:, :63].copy(), raw, out),
        (x, raw[:-1], out),
        (x, raw, out[:1]),
        (x, raw, np.empty((2, 4), np.float32)),
        (np.ones((1, 64), np.float32), raw, out),
    )
    for a, b, c in wrong:
        with pytest.raises(CodecError, match="Q8_0: found"):
            native.matmul("Q8_0", a, b, c)
    job = (native.number("Q8_0"), x, raw, out)
    for jobs, tokens in (((job,), 0), ((job,) * 9, 2), ((job,), 3)):
        with pytest.raises(CodecError, match="found"):
            native._kernels.matmuls(jobs, tokens, 1)
    with pytest.raises(CodecError, match="kernel 999 does not exist"):
        native._kernels.matmuls(((999, x, raw, out),), 2, 1)
    with pytest.raises(TypeError):
        native._kernels.matmuls(((1, x),), 2, 1)


def test_many_threads_share_work_from_many_callers() -> None:
    """A caller that finds the pool busy computes alone; a child process starts its own pool."""
    raw, _ = weights("Q4_K", 512, 1024)
    x = np.random.default_rng(8).normal(size=(1, 1024)).astype(np.float32)
    expected = np.empty((1, 512), np.float32)
    native.matmul("Q4_K", x, raw, expected)

    def caller(_: int) -> bool:
        good = True
        for _ in range(200):
            out = np.zeros((1, 512), np.float32)
            native.matmul("Q4_K", x, raw, out, threads=5)
            good = good and out.tobytes() == expected.tobytes()
        return good

    with ThreadPoolExecutor(4) as callers:
        assert all(callers.map(caller, range(4)))
    if hasattr(os, "fork"):
        child = os.fork()
        if not child:
            os._exit(0 if caller(0) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert caller(0)
