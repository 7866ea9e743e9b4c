"""Products on encoded weights against float64 of the codec's numbers.

Seen red, each alone: columns in another order than x's, the mins left out, a tile's rows written
past the end, some warps' share of the superblocks not added; rows of 16-bit floats taken for whole
blocks of 32, the columns behind the last 8 left out, x read from where its 16 bytes begin.
"""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from aprfmt.base.encodings import ENCODINGS
from aprfmt.codecs import decode, encode
from aprfmt.errors import CodecError
from aprfmt.inference.fast.cuda import MATVEC, MATVEC_TOKENS, matvec
from tests.inference.gpu.machine import on

NUMPY = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
# Error over the sum of magnitudes |x| |w|: float32 sums; a result of 16 bits is rounded besides.
BOUND = {"float32": 4e-7, "bfloat16": 4e-3, "float16": 5e-4}


def weights(encoding: str, rows: int, columns: int, seed: int) -> np.ndarray:
    """Return bytes whose scales are finite: random codes under scales of an encoded tensor."""
    random = np.random.default_rng(seed)
    x = (random.standard_normal((rows, columns)) + 0.1).astype(np.float32)
    return np.frombuffer(encode(encoding, x)[""], np.uint8).copy()


def run(
    machine: Any,
    encoding: str,
    shape: tuple[int, int],
    x: np.ndarray,
    *,
    raw: np.ndarray | None = None,
    dtype: str = "float32",
    tensor_cores: bool = True,
    lead: int = 0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return what the kernel gives, what float64 gives, and sums of magnitudes [tokens, rows].

    x begins `lead` elements behind a multiple of 16 bytes, between numbers that are not one.
    """
    m = machine
    raw = weights(encoding, *shape, shape[0]) if raw is None else raw
    exact = decode(encoding, {"": raw.tobytes()}, shape).astype(np.float64)
    inputs = x.astype(NUMPY[dtype])
    bits = f"u{inputs.itemsize}"
    poison = np.full(16, np.nan, NUMPY[dtype])
    around = np.concatenate([poison[:lead], inputs.reshape(-1), poison])
    data = m.put(np.concatenate([raw, np.full(32, 0xFF, np.uint8)]))
    given = m.put(around.view(bits))
    out = m.put(np.full((len(x) * shape[0]) + 32, 0xA5, bits))
    matvec(
        encoding,
        m.flat(data, None, 0, raw.size),
        m.flat(given, dtype, lead, x.size),
        m.flat(out, dtype, 0, len(x) * shape[0]),
        tensor_cores=tensor_cores,
    )
    found = m.get(out)
    assert (found[len(x) * shape[0] :] == 0xA5).all()
    values = found[: len(x) * shape[0]].view(NUMPY[dtype]).reshape(len(x), shape[0])
    wide = inputs.astype(np.float64)
    return values.astype(np.float64), wide @ exact.T, np.abs(wide) @ np.abs(exact).T


def error(found: np.ndarray, wanted: np.ndarray, magnitude: np.ndarray) -> float:
    assert np.isfinite(found).all()
    return float(np.max(np.abs(found - wanted) / magnitude))


@pytest.mark.parametrize("dtype", NUMPY)
@on("encoding", ("Q6_K", "Q5_1"), MATVEC)
def test_every_encoding_and_number_of_vectors(machine: Any, encoding: str, dtype: str) -> None:
    block = max(ENCODINGS[encoding].block_size, 32)
    random = np.random.default_rng(1)
    for rows, columns in ((1, block), (5, 3 * block), (37, 512 + block if block < 256 else 768)):
        for tokens in range(1, MATVEC_TOKENS + 1):
            x = random.standard_normal((tokens, columns)).astype(np.float32)
            result = run(machine, encoding, (rows, columns), x, dtype=dtype)
            assert error(*result) < BOUND[dtype]


# Sizes of models that no multiple of 32 divides, and rows that end anywhere in a lane's 8 columns.
UNEVEN = (
    1, 2, 7, 8, 9, 10, 20, 31, 33, 36, 40, 44, 52, 80, 100, 120, 131, 144, 255, 257, 262, 1000,
)  # fmt: skip


@pytest.mark.parametrize("dtype", NUMPY)
@on("encoding", ("BF16", "F16"), ("BF16", "F16"))
def test_rows_of_any_length(machine: Any, encoding: str, dtype: str) -> None:
    random = np.random.default_rng(6)
    for columns in UNEVEN:
        for tokens in range(1, MATVEC_TOKENS + 1):
            x = random.standard_normal((tokens, columns)).astype(np.float32)
            assert error(*run(machine, encoding, (5, columns), x, dtype=dtype)) < BOUND[dtype]


def test_four_rows_a_warp_of_any_length(machine: Any) -> None:
    x = np.random.default_rng(8).standard_normal((3, 10)).astype(np.float32)
    assert error(*run(machine, "BF16", (8193, 10), x)) < BOUND["float32"]


@pytest.mark.parametrize("dtype", NUMPY)
@on("encoding", ("BF16", "Q8_0"), MATVEC)
def test_x_at_any_place_gives_the_same_bits(machine: Any, encoding: str, dtype: str) -> None:
    columns = 2 * max(ENCODINGS[encoding].block_size, 32)
    x = np.random.default_rng(7).standard_normal((4, columns)).astype(np.float32)
    results = [
        run(machine, encoding, (21, columns), x, dtype=dtype, tensor_cores=False, lead=lead)
        for lead in (0, 1, 3, 7)
    ]
    for found, wanted, magnitude in results:
        assert error(found, wanted, magnitude) < BOUND[dtype]
        np.testing.assert_array_equal(found, results[0][0])


@on("blocks", (1, 3, 17), (1, 2, 3, 5, 8, 15, 16, 17, 33, 56))
def test_q4_k_on_tensor_cores(machine: Any, blocks: int) -> None:
    """Every split of superblocks over warps; rows around a tile, and several tiles a block."""
    random = np.random.default_rng(blocks)
    for rows in (1, 15, 16, 17, 33, 16 * 7 + 1):
        x = random.standard_normal((1, 256 * blocks)).astype(np.float32)
        assert error(*run(machine, "Q4_K", (rows, 256 * blocks), x)) < BOUND["float32"]


@pytest.mark.parametrize("magnitude", [1e-30, 1e-4, 1.0, 1e4, 1e30])
def test_q4_k_keeps_small_values_beside_large_ones(machine: Any, magnitude: float) -> None:
    random = np.random.default_rng(3)
    x = random.standard_normal((1, 1024)) * magnitude * 10.0 ** random.uniform(-4, 0, (1, 1024))
    assert error(*run(machine, "Q4_K", (40, 1024), x.astype(np.float32))) < BOUND["float32"]


def test_q4_k_every_bit_of_the_block_counts(machine: Any) -> None:
    """Random bytes, scales set to moderate numbers: all 6-bit scales and mins occur."""
    random = np.random.default_rng(9)
    rows, blocks = 48, 4
    raw = random.integers(0, 256, (rows, blocks, 144), dtype=np.uint8)
    scales = random.uniform(-1e-2, 1e-2, (rows, blocks, 2)).astype("<f2")
    raw[:, :, :4] = scales.view(np.uint8)
    x = random.standard_normal((1, 256 * blocks)).astype(np.float32)
    shape = (rows, 256 * blocks)
    for tensor_cores in (True, False):
        result = run(machine, "Q4_K", shape, x, raw=raw.reshape(-1), tensor_cores=tensor_cores)
        assert error(*result) < BOUND["float32"]


def test_a_vector_s_bits_do_not_depend_on_its_neighbours(machine: Any) -> None:
    x = np.random.default_rng(2).standard_normal((4, 512)).astype(np.float32)
    together, _, _ = run(machine, "Q6_K", (21, 512), x)
    for i in range(4):
        alone, _, _ = run(machine, "Q6_K", (21, 512), x[i : i + 1])
        np.testing.assert_array_equal(alone[0], together[i])


def test_zeros_and_values_that_are_not_finite(machine: Any) -> None:
    zero, _, _ = run(machine, "Q4_K", (16, 256), np.zeros((1, 256), np.float32))
    assert not zero.any()
    raw = weights("Q4_K", 16, 512, 1)
    for bad in (np.nan, np.inf):
        x = np.ones((1, 512), np.float32)
        x[0, 300] = bad
        m = machine
        out = m.put(np.zeros(16, np.float32))
        matvec("Q4_K", m.flat(m.put(raw)), m.flat(m.put(x)), m.flat(out))
        assert not np.isfinite(m.get(out)).any()


def test_sizes_that_do_not_fit_are_refused(machine: Any) -> None:
    m = machine
    raw, x = m.put(weights("Q8_0", 4, 64, 0)), m.put(np.zeros(64, np.float32))
    with pytest.raises(CodecError, match="64 inputs and 5 outputs do not fit"):
        matvec("Q8_0", m.flat(raw), m.flat(x), m.flat(m.put(np.zeros(5, np.float32))))
    with pytest.raises(CodecError, match="expected one of"):
        matvec("Q8_0", m.flat(raw), m.flat(x), m.flat(m.put(np.zeros(4, np.float64))))
