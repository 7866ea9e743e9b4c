"""Measures and steps used for verdicts, compared with numpy and with gguf.

Seen red: the largest difference placed in the first window, a step eight times too long.
"""

import gguf
import numpy as np
import pytest

from aprfmt.measure.bounds import quantization_steps
from aprfmt.measure.numbers import PairSums

BLOCKS = 16


@pytest.mark.parametrize("rows", [1, 2, 3, 7])
@pytest.mark.parametrize("at", [(0, 0), (2, 4), (3, 0), (6, 4)])
def test_the_largest_difference_has_its_place_whatever_the_window(
    rows: int, at: tuple[int, int]
) -> None:
    rng = np.random.default_rng(3)
    a = rng.normal(size=(7, 5)).astype(np.float32)
    b = a + rng.uniform(0.01, 0.1, a.shape).astype(np.float32)
    b[at] = a[at] + 3
    found = PairSums(a.shape)
    for start in range(0, len(a), rows):
        found.add(a[start : start + rows], b[start : start + rows])
    stats = found.stats()
    assert stats.max_at == at and stats.changed == a.size
    reference = a.astype(np.float64)
    apart = reference - b
    assert stats.max_abs_diff == np.abs(apart).max()
    whole = np.linalg.norm(apart) / np.linalg.norm(reference)
    assert stats.rel_l2 == pytest.approx(whole, rel=1e-12)


# encoding -> bytes of a block that hold codes, and a byte that raises each of its codes by one
CODES = {
    "Q4_0": (slice(2, 18), 0x11), "Q4_1": (slice(4, 20), 0x11), "Q5_0": (slice(6, 22), 0x11),
    "Q5_1": (slice(8, 24), 0x11), "Q8_0": (slice(2, 34), 0x01), "Q2_K": (slice(16, 80), 0x55),
    "Q3_K": (slice(32, 96), 0x55), "Q4_K": (slice(16, 144), 0x11), "Q5_K": (slice(48, 176), 0x11),
    "Q6_K": (slice(0, 128), 0x11),
}  # fmt: skip
# encoding -> where a block holds its float16 scales
SCALES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2),
          "Q5_K": (0, 2), "Q6_K": (208,)}  # fmt: skip


@pytest.mark.parametrize("name", CODES)
def test_a_step_is_the_largest_of_its_block_that_gguf_decodes(name: str) -> None:
    """Every code is raised by one: gguf's decoded values then differ by one step of the block."""
    kind = gguf.GGMLQuantizationType[name]
    size, width = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(5)
    low = rng.integers(0, 256, (BLOCKS, width), np.uint8)
    for at in SCALES.get(name, (0,)):
        scales = rng.uniform(0.01, 0.02, (BLOCKS, 1)).astype(np.float16)
        low[:, at : at + 2] = scales.view(np.uint8)
    codes, one = CODES[name]
    low[:, codes] = 0
    high = low.copy()
    high[:, codes] = one
    moved = [gguf.quants.dequantize(rows.reshape(-1), kind) for rows in (low, high)]
    gaps = np.abs(moved[1] - moved[0]).reshape(BLOCKS, size).max(axis=1)
    found = quantization_steps(name, {"": low.tobytes()}, BLOCKS * size)
    assert found is not None and found.shape == (BLOCKS * size,)
    np.testing.assert_allclose(found.reshape(BLOCKS, size), gaps[:, None].repeat(size, 1), 1e-4)
