"""Scales spread over tiles of another size when a packed weight was decoded: the floats are wrong.

Seen red: a weight left at other values, located.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.causes.packed_source import FFN, HIDDEN, UP, Array, copied, judged, plain, source, values
from tests.causes.tensor.test_misread_scales import FP8, MODELOPT, nvfp4, small
from tests.causes.test_one_factor_of_scales import SECTION, decoded, exponents, float4, mxfp4
from tests.diagnosis import packing

__all__ = ["source", "values"]


def spread(scale: Array, tall: int, wide: int, wraps: bool = False) -> Array:
    """Return the number of each value of the matrix, of a grid over tiles of tall x wide."""
    rows, columns = (np.arange(n) // size for n, size in ((FFN, tall), (HIDDEN, wide)))
    down, across = scale.shape
    if wraps:
        return scale[rows % down][:, columns % across]
    return scale[rows.clip(max=down - 1)][:, columns.clip(max=across - 1)]


def fp8_tiles(x: Array) -> tuple[packing.Rows, Array, Array]:
    """Return FP8 in tiles of 32 x 32: its tensors, the codes' numbers, the scales [5, 3]."""
    tiles = x.reshape(FFN // 32, 32, HIDDEN // 32, 32)
    scale = (np.abs(tiles).max((1, 3)) / 448).astype(np.float32)
    codes = (tiles / scale[:, None, :, None]).astype(ml_dtypes.float8_e4m3fn).reshape(x.shape)
    rows = {f"{UP}.weight": packing.row(codes), f"{UP}.weight_scale_inv": packing.row(scale)}
    return rows, codes.astype(np.float32), scale


READINGS = {
    "halves": (16, 16, False),
    "halves, again": (16, 16, True),
    "twice": (64, 64, False),
    "rows alone": (16, 32, False),
    "columns alone": (32, 64, False),
}


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("reading", READINGS)
def test_scales_of_fp8_over_other_tiles(
    reading: str, swapped: bool, values: Array, source: Path, tmp_path: Path
) -> None:
    tall, wide, wraps = READINGS[reading]
    rows, numbers, scale = fp8_tiles(values)
    packed = copied(source, tmp_path / "a", rows, FP8)
    floats = copied(source, tmp_path / "b", plain(numbers * spread(scale, tall, wide, wraps)))
    found = judged(*((floats, packed) if swapped else (packed, floats))).explanation
    assert found is not None and (found.cause, found.certainty) == ("quant_scale", "confirmed")
    assert f"over tiles of {tall} x {wide}; the tiles are 32 x 32" in found.says
    assert found.side == ("A" if swapped else "B") and found.says.startswith(found.side)


def of_mxfp4(x: Array) -> tuple[packing.Rows, Any, Array, Array]:
    """Return MXFP4: its tensors, its claim, the codes' numbers, the scales of 32 values."""
    right = exponents(x)
    numbers = decoded(float4(x.reshape(FFN, -1, 32), 2.0**right)).reshape(FFN, HIDDEN)
    return mxfp4(x, lambda e: e, right), SECTION, numbers, 2.0**right


def of_nvfp4(x: Array) -> tuple[packing.Rows, Any, Array, Array]:
    """Return NVFP4: its tensors, its claim, the codes' numbers, the scales of 16 values."""
    rows, numbers, held, whole = nvfp4(x)
    return rows, MODELOPT, numbers.reshape(FFN, HIDDEN), small(held).reshape(FFN, -1) * whole


@pytest.mark.parametrize(("make", "wide"), [(of_mxfp4, 16), (of_nvfp4, 32), (of_mxfp4, 64)])
def test_scales_of_small_floats_over_other_groups(
    make: Callable[[Array], Any], wide: int, values: Array, source: Path, tmp_path: Path
) -> None:
    rows, section, numbers, scale = make(values)
    packed = copied(source, tmp_path / "a", rows, section)
    made = numbers * spread(scale.reshape(FFN, -1), 1, wide)
    found = judged(packed, copied(source, tmp_path / "b", plain(made))).explanation
    assert found is not None and (found.cause, found.certainty) == ("quant_scale", "confirmed")
    assert f"over tiles of 1 x {wide}" in found.says and found.side == "B"


def test_right_tiles_and_an_honest_source_are_no_fault(
    values: Array, source: Path, tmp_path: Path
) -> None:
    rows, numbers, scale = fp8_tiles(values)
    packed = copied(source, tmp_path / "a", rows, FP8)
    right = copied(source, tmp_path / "b", plain(numbers * spread(scale, 32, 32)))
    for pair in ((packed, right), (source, packed)):
        found = judged(*pair)
        assert found.verdict in ("SAME_VALUES", "WITHIN"), found


def test_one_value_off_is_no_reading_of_other_tiles(
    values: Array, source: Path, tmp_path: Path
) -> None:
    rows, numbers, scale = fp8_tiles(values)
    made = numbers * spread(scale, 16, 16)
    made[-1, -1] += 1
    packed = copied(source, tmp_path / "a", rows, FP8)
    found = judged(packed, copied(source, tmp_path / "b", plain(made))).explanation
    assert found is None or "over tiles of" not in found.says
