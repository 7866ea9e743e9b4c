"""A packed weight in bands of rows: decoded one after the other they are the weight.

Seen red: bands that begin at row 0 of every matrix, the last rows left out, codes of the first
matrix for every one.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from aprfmt.codecs.code_recovery import count_lost_codes
from aprfmt.codecs.dialect import StoredPart
from aprfmt.codecs.dialects import DIALECTS
from aprfmt.codecs.lattice import PackedWeight

TILE = {"quant_method": "fp8", "weight_block_size": [128, 128]}
PLAIN = {"quant_method": "fp8"}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
# dialect, what config.json says, and the encoding and shape of each part
Row = tuple[str, Mapping[str, Any], Mapping[str, tuple[str, tuple[int, ...]]]]
CASES: Mapping[str, Row] = {
    "tiles": ("fp8_block", TILE, {
        ".weight": ("F8_E4M3", (300, 200)), ".weight_scale_inv": ("F32", (3, 2))}),
    "one number": ("fp8_block", PLAIN, {
        ".weight": ("F8_E5M2", (300, 64)), ".weight_scale_inv": ("F32", (1,))}),
    "pairs": ("fp8_block", PLAIN, {
        ".weight": ("I8", (40, 32)), ".weight_scale_inv": ("F8_E8M0", (40, 2))}),
    "experts": ("fp8_experts", TILE, {
        "": ("F8_E4M3", (3, 300, 200)), "_scale_inv": ("F32", (3, 3, 2))}),
    "experts in columns": ("modelopt_experts", NVFP4, {
        "": ("U8", (3, 24, 20)), "_weight_scale": ("F8_E4M3", (3, 3, 20)),
        "_weight_scale_2": ("F32", (3,))}),
    "words in columns": ("gptq", {"quant_method": "gptq", "bits": 4, "group_size": 16}, {
        ".qweight": ("I32", (8, 24)), ".qzeros": ("I32", (4, 3)), ".scales": ("F16", (4, 24))}),
}  # fmt: skip


def weight(case: str) -> PackedWeight:
    name, config, stored = CASES[case]
    rng, parts = np.random.default_rng(3), {}
    for suffix, (encoding, shape) in stored.items():
        count = int(np.prod(shape))
        made: Any = rng.integers(1, 0x77, count * (4 if encoding == "I32" else 1)).astype(np.uint8)
        if encoding.startswith("F") and "_" not in encoding:
            made = rng.random(count).astype({"F32": np.float32, "F16": np.float16}[encoding])
        parts[suffix] = StoredPart(made.tobytes(), encoding, shape)
    return PackedWeight(DIALECTS[name], parts, config)


@pytest.mark.parametrize("elements", [1, 1 << 9, 1 << 30])
@pytest.mark.parametrize("case", CASES)
def test_bands_together_are_the_weight(case: str, elements: int) -> None:
    whole = weight(case)
    values, bands = whole.decode(), whole.split_bands(elements)
    found = [band.decode() for band in bands]
    assert [band.shape for band in bands] == [each.shape for each in found]
    assert np.concatenate(found).tobytes() == values.tobytes()
    matrices = values.shape[0] if values.ndim > 2 else 1
    assert len(bands) == (matrices if elements > values.size else len(bands)) >= matrices
    laid, main = whole.laid_out(), whole.parts[whole.dialect.main]
    assert laid is not None
    assert elements > 1 or len(bands) == laid.rows  # fewer elements than a row has: one row each
    if main.encoding.startswith("F8"):
        codes = np.frombuffer(main.raw, np.uint8).reshape(-1, values.shape[-1])
        assert np.array_equal(laid.unpack_rows(1, laid.rows), codes[1:])
    lost = [count_lost_codes(band, "F16") for band in bands]
    assert (None if None in lost else sum(n or 0 for n in lost)) == count_lost_codes(whole, "F16")


def test_a_weight_without_elements_is_its_one_band() -> None:
    parts = {
        ".weight": StoredPart(b"", "F8_E4M3", (0, 4)),
        ".weight_scale_inv": StoredPart(bytes(4), "F32", (1,)),
    }
    empty = PackedWeight(DIALECTS["fp8_block"], parts, PLAIN)
    assert [band.decode().shape for band in empty.split_bands(1)] == [(0, 4)]
    assert count_lost_codes(empty, "BF16") == 0
