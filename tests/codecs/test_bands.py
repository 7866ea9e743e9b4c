"""A packed weight cut into bands of rows: decoded one after the other they are the weight.

Seen red: a band that begins inside a tile, scales of the first matrix for every one, the last tile
left out.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from aprfmt.codecs.dialect import StoredPart
from aprfmt.codecs.dialects import DIALECTS
from aprfmt.codecs.lattice import PackedWeight
from aprfmt.codecs.way_back import lost_codes

TILE = {"quant_method": "fp8", "weight_block_size": [128, 128]}
PLAIN = {"quant_method": "fp8"}
# dialect, configuration, encoding of the codes, their shape, encoding of the scales, their shape
CASES: Mapping[str, tuple[str, Mapping[str, Any], str, tuple[int, ...], str, tuple[int, ...]]] = {
    "tiles": ("fp8_block", TILE, "F8_E4M3", (256, 384), "F32", (2, 3)),
    "short tiles": ("fp8_block", TILE, "F8_E4M3", (300, 200), "F32", (3, 2)),
    "one tile": ("fp8_block", TILE, "F8_E4M3", (16, 32), "F32", (1, 1)),
    "one number": ("fp8_block", PLAIN, "F8_E5M2", (300, 64), "F32", (1,)),
    "divided": ("fp8_block", PLAIN, "F8_E4M3", (96, 64), "BF16", (6, 4)),
    "micro": ("fp8_block", {"quant_method": "mxfp8"}, "F8_E4M3", (40, 64), "F8_E8M0", (40, 2)),
    "pairs": ("fp8_block", PLAIN, "I8", (40, 32), "F8_E8M0", (40, 2)),
    "experts": ("fp8_experts", TILE, "F8_E4M3", (3, 300, 200), "F32", (3, 3, 2)),
}
BYTES = {"F32": 4, "BF16": 2}


def weight(case: str) -> PackedWeight:
    name, config, encoding, shape, of_scales, grid = CASES[case]
    rng = np.random.default_rng(3)
    codes = rng.integers(0, 0x78, int(np.prod(shape)), np.uint8)
    scales: Any = rng.random(int(np.prod(grid)), np.float32) + np.float32(0.5)
    if of_scales == "BF16":
        scales = (scales.view(np.uint32) >> 16).astype("<u2")
    elif of_scales == "F8_E8M0":
        scales = rng.integers(100, 140, int(np.prod(grid)), np.uint8)
    dialect = DIALECTS[name]
    parts = {dialect.main: StoredPart(codes.tobytes(), encoding, shape),
             dialect.parts[0]: StoredPart(scales.tobytes(), of_scales, grid)}  # fmt: skip
    return PackedWeight(dialect, parts, config)


@pytest.mark.parametrize("elements", [1, 1 << 12, 1 << 15, 1 << 30])
@pytest.mark.parametrize("case", CASES)
def test_bands_together_are_the_weight(case: str, elements: int) -> None:
    whole = weight(case)
    values = whole.decode()
    bands = whole.bands(elements)
    found = [band.decode() for band in bands]
    assert [band.shape for band in bands] == [each.shape for each in found]
    joined = np.concatenate([each.reshape(-1, values.shape[-1]) for each in found])
    assert joined.tobytes() == values.tobytes()
    if elements == 1:
        assert len(bands) > 1 or case == "one tile"
    if elements >= 1 << 30:
        assert len(bands) == (values.shape[0] if values.ndim > 2 else 1)
    lost = [lost_codes(band, "F16") for band in bands]
    assert (None if None in lost else sum(n or 0 for n in lost)) == lost_codes(whole, "F16")


def test_other_dialects_stay_whole() -> None:
    one = weight("tiles")
    plain = one._replace(dialect=DIALECTS["gptq"])
    assert plain.dialect.bands is None and weight("experts").dialect.bands is not None
