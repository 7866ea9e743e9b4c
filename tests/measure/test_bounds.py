"""Measures and steps used for verdicts, compared with numpy and with gguf.

Seen red: the largest difference placed in the first window, a step eight times too long,
rounded scales left out of the bound.
"""

import gguf
import numpy as np
import pytest

from aprfmt.codecs import CODECS, decode
from aprfmt.codecs.dialect import StoredPart
from aprfmt.codecs.dialects import DIALECTS
from aprfmt.codecs.lattice import PackedWeight
from aprfmt.measure.bounds import fit_errors, quantization_steps
from aprfmt.measure.numbers import PairSums
from tests.codecs.data import Array
from tests.codecs.packing import pack

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


def affine(values: Array, bits: int) -> PackedWeight:
    """Return MLX's weight of values [rows, columns]: BF16 rounds its scales after it has codes."""
    groups = values.reshape(len(values), -1, 64)
    low, high = groups.min(2), groups.max(2)
    scale = ((high - low) / (2**bits - 1)).astype(np.float32)
    codes = np.rint((groups - low[..., None]) / scale[..., None]).astype(np.uint32)
    words = pack(codes.reshape(values.shape), bits).view(np.uint32)
    stored = {".weight": StoredPart(words.tobytes(), "U32", words.shape)}
    for suffix, numbers in ((".scales", scale), (".biases", low)):
        raw = CODECS["BF16"].encode(numbers)[""]
        stored[suffix] = StoredPart(raw, "BF16", numbers.shape)
    return PackedWeight(DIALECTS["mlx"], stored, {"bits": bits, "group_size": 64})


@pytest.mark.parametrize(("bits", "mean"), [(8, 0.0), (8, 0.05), (6, 0.0), (4, 0.0), (4, 1.0)])
def test_a_bound_has_the_rounding_of_stored_scales_and_offsets(bits: int, mean: float) -> None:
    rng = np.random.default_rng(bits)
    values = (mean + 0.01 * rng.standard_normal((128, 256))).astype(np.float32)
    weight = affine(values, bits)
    copy = weight.decode()
    lattice = weight.lattice(copy)
    assert lattice is not None
    assert fit_errors(values, copy, lattice).how == "rounded to the nearest"
    assert (np.abs(copy - values) <= lattice.bound).all()
    # One value two bounds off is none of that rounding, and neither are codes one too high.
    other = copy.copy()
    other[3, 5] += 2 * lattice.bound[3, 5]
    assert fit_errors(values, other, lattice).largest > 1
    if mean < 1:  # an offset of many steps may be a step off
        assert not fit_errors(values, copy + lattice.step, lattice).how


@pytest.mark.parametrize("name", ["Q4_1", "Q5_1"])
def test_a_step_has_the_rounding_of_a_far_minimum(name: str) -> None:
    values = (30 + 0.01 * np.random.default_rng(1).standard_normal((8, 64))).astype(np.float32)
    raw = CODECS[name].encode(values)
    steps = quantization_steps(name, raw, values.size)
    assert steps is not None
    off = np.abs(decode(name, raw, values.shape) - values).reshape(-1) / steps
    assert 0.5 < off.max() <= 1
