"""Whether FP8 codes come back from values that were stored as a narrower float."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aprfmt.codecs import fp8
from aprfmt.codecs.code_recovery import (
    all_codes_recoverable,
    count_lost_codes,
    has_only_safe_scales,
)
from tests.codecs.weights import packed

E4M3 = ml_dtypes.float8_e4m3fn
STORED = {"BF16": (ml_dtypes.bfloat16, -126, 127), "F16": (np.float16, -14, 15)}


@pytest.mark.parametrize("stored", STORED)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_fp8_codes_come_back_over_all_scales(stored: str, data: st.DataObject) -> None:
    """Blocks of E4M3 as BF16 or F16: what is said to be lost is what a search of codes finds.

    Nothing is where no product leaves the range of the narrower type's normal numbers.
    """
    power = data.draw(st.integers(-149, 120))
    fraction = data.draw(st.floats(1, 2, width=32, exclude_max=True))
    scale = np.array([[np.ldexp(np.float32(fraction), power)]], np.float32)
    codes = np.arange(256, dtype=np.uint8).reshape(2, 128)
    weight = packed(
        "fp8_block",
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        {".weight": codes.view(E4M3), ".weight_scale_inv": scale},
    )
    with np.errstate(all="ignore"):
        values = weight.decode().reshape(-1)
        kept = values.astype(STORED[stored][0]).astype(np.float64)
        table = codes.reshape(-1).view(E4M3).astype(np.float64)
        again = np.clip(kept / scale[0, 0].astype(np.float64), -448, 448)  # infinities: the ends
        off = np.abs(again[:, None] - table[None])
        nearest = np.nanargmin(np.where(np.isnan(off), np.inf, off), axis=1)
        lost = (table[nearest] != table) & ~(np.isnan(kept) & np.isnan(table))
    assert count_lost_codes(weight, stored) == lost.sum()
    laid = weight.laid_out()
    assert laid is not None
    assert all_codes_recoverable(laid, 0, 2, stored, fp8.E4M3.values) == (not lost.any())
    assert not (has_only_safe_scales(weight, stored) and lost.any())
    _, smallest, largest = STORED[stored]
    if smallest + 10 <= power <= largest - 11:
        assert not lost.any()
        assert has_only_safe_scales(weight, stored), "nothing was to be tried"
