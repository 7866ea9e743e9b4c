"""Scales that are all wrong by one factor are that, and not inverted.

Seen red: MXFP4 exponents 2 too small named "inverted, up to one factor", as most exponents of a
weight are equal and equal numbers are their own inverse; factors of quantized values named after
1/sqrt(n_layers), which they are by 3 % not.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import aprfmt
from tests.causes.packed_source import FFN, HIDDEN, UP, Array, copied, judged, plain, source, values
from tests.diagnosis import packing

__all__ = ["source", "values"]
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
SECTION: dict[str, Any] = {
    "config_groups": {"group_0": {
        "format": "mxfp4-pack-quantized", "input_activations": None, "output_activations": None,
        "targets": ["Linear"],
        "weights": {"actorder": None, "block_structure": None, "dynamic": False, "group_size": 32,
                    "num_bits": 4, "observer": "minmax", "observer_kwargs": {},
                    "scale_dtype": "torch.uint8", "strategy": "group", "symmetric": True,
                    "type": "float", "zp_dtype": None}}},
    "format": "mxfp4-pack-quantized", "ignore": ["lm_head"], "kv_cache_scheme": None,
    "quant_method": "compressed-tensors", "quantization_status": "compressed",
    "version": "0.13.0",
}  # fmt: skip


def float4(groups: Array, scale: Array) -> Array:
    """Return the codes of E2M1 nearest to groups / scale: sign in bit 3."""
    held = groups / scale[..., None]
    near = np.abs(np.abs(held)[..., None] - E2M1).argmin(-1)
    return near | ((held < 0) << 3)


def decoded(codes: Array) -> Array:
    """Return the numbers of codes of E2M1."""
    return E2M1[codes & 7] * np.where(codes > 7, -1, 1)


def exponents(x: Array) -> Array:
    """Return the exponents of the scales of groups of 32: floor(log2 max) - 2, as OCP has it."""
    top = np.abs(x.reshape(FFN, -1, 32)).max(-1)
    return (np.floor(np.log2(top)) - 2).astype(int)


def mxfp4(x: Array, stored: Callable[[Array], Array], right: Array) -> packing.Rows:
    """Return MXFP4 as compressed-tensors packs it; `stored` makes other exponents of the right."""
    codes = float4(x.reshape(FFN, -1, 32), 2.0**right).reshape(FFN, HIDDEN)
    packed = (codes[:, ::2] | (codes[:, 1::2] << 4)).astype(np.uint8)
    scale = (stored(right) + 127).astype(np.uint8)
    return {f"{UP}.weight_packed": packing.row(packed), f"{UP}.weight_scale": packing.row(scale)}


@pytest.mark.parametrize("off", [-3, -2, -1, 1, 2], ids="{:+d}".format)
@pytest.mark.parametrize("varied", [True, False], ids=["varied", "equal"])
def test_exponents_that_are_off_by_a_constant(
    off: int, varied: bool, source: Path, values: Array, tmp_path: Path
) -> None:
    right = exponents(values)
    right = right if varied else np.full_like(right, right.max())
    there = copied(source, tmp_path / "b", mxfp4(values, lambda e: e + off, right), SECTION)
    found = judged(source, there).explanation
    assert found is not None and (found.cause, found.certainty) == ("quant_scale", "confirmed")
    way = "large" if off > 0 else "small"
    assert f"{2.0**off:g} times what they should be" in found.evidence[0]
    assert f"their exponents are {abs(off)} too {way}" in found.evidence[0]


@pytest.mark.parametrize("off", [0, 1, -2], ids="{:+d}".format)
def test_inverted_exponents_are_told_from_a_constant(
    off: int, source: Path, values: Array, tmp_path: Path
) -> None:
    rows = np.exp2(np.arange(FFN) % 5)[:, None] * values
    right = exponents(rows)
    there = copied(source, tmp_path / "b", mxfp4(rows, lambda e: off - e, right), SECTION)
    first = copied(source, tmp_path / "a", plain(rows, "float32"))
    found = judged(first, there).explanation
    assert found is not None and found.cause == "quant_scale"
    assert "inverted" in found.evidence[0] and ("up to one" in found.evidence[0]) == bool(off)


def nvfp4(x: Array) -> Array:
    """Return x through NVFP4: E2M1 under E4M3 scales for 16 and one for the tensor."""
    groups = x.reshape(FFN, -1, 16)
    whole = np.abs(x).max() / (6 * 448)
    scale = (np.abs(groups).max(-1) / 6 / whole).astype(ml_dtypes.float8_e4m3fn).astype(float)
    scale = scale * whole
    return (decoded(float4(groups, scale)) * scale[..., None]).reshape(x.shape)


TYPES: dict[str, Callable[[Array], Array]] = {
    "nvfp4": nvfp4,
    "int4_groups": lambda x: packing.nearest(x).values(),
    "int4_symmetric": lambda x: packing.nearest(x, symmetric=True).values(),
}


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("factor", [0.25, 0.5, 1.5, 3.0])
def test_one_factor_of_other_types(
    kind: str, factor: float, source: Path, values: Array, tmp_path: Path
) -> None:
    """The factor is found to 5 %, and no other cause is confirmed."""
    there = copied(source, tmp_path / "b", plain(factor * TYPES[kind](values), "float32"))
    found = judged(source, there).explanation
    assert found is not None and found.cause in ("scale", "quant_scale"), found
    says = found.evidence[0]
    assert "inverted" not in says and "which is also" not in says
    number = next(float(word) for word in says.replace(",", "").split() if word[0].isdigit())
    assert number == pytest.approx(factor, rel=0.05)


@pytest.mark.parametrize("factor", [0.25, 1.5])
def test_one_factor_of_stored_types(
    factor: float, source: Path, values: Array, tmp_path: Path
) -> None:
    """FP8 under a scale for every 32 by 32, all of them wrong; and Q8_0, whose d are."""
    tiles = values.reshape(FFN // 32, 32, HIDDEN // 32, 32)
    scale = np.abs(tiles).max((1, 3), keepdims=True) / 448
    codes = (tiles / scale).reshape(values.shape).astype(ml_dtypes.float8_e4m3fn)
    rows = {
        f"{UP}.weight": packing.row(codes),
        f"{UP}.weight_scale_inv": packing.row(
            (factor * scale).reshape(FFN // 32, -1).astype(np.float32)
        ),
    }
    section = {"quant_method": "fp8", "weight_block_size": [32, 32], "fmt": "e4m3"}
    scaled = copied(source, tmp_path / "scaled", plain(factor * values, "float32"))
    aprfmt.convert(scaled, tmp_path / "b.gguf", quantize="Q8_0")
    for there in (copied(source, tmp_path / "fp8", rows, section), tmp_path / "b.gguf"):
        found = judged(source, there).explanation
        assert found is not None and found.cause in ("scale", "quant_scale"), there
        assert "inverted" not in found.evidence[0] and "which is also" not in found.evidence[0]


TOP = {ml_dtypes.float8_e4m3fn: 448.0, ml_dtypes.float8_e5m2: 57344.0}


def fp8(x: Array, kind: Any, per: str, inverted: bool) -> Array:
    """Return x through 8-bit floats under one scale for each `per`, or over it."""
    tall, wide = {"tensor": x.shape, "row": (1, x.shape[1]), "tile": (32, 32)}[per]
    tiles = x.reshape(x.shape[0] // tall, tall, x.shape[1] // wide, wide)
    top = TOP[kind] / 1.1  # scales that are powers of two would not tell
    scale = np.abs(tiles).max((1, 3), keepdims=True) / top
    codes = (tiles / scale).astype(kind).astype(float)
    return np.asarray(codes / scale if inverted else codes * scale).reshape(x.shape)


@pytest.mark.parametrize("per", ["tensor", "row", "tile"])
@pytest.mark.parametrize("kind", TOP)
def test_8_bit_floats_decoded_with_inverted_scales(
    kind: Any, per: str, source: Path, values: Array, tmp_path: Path
) -> None:
    """Seen red: the values show a scale up to a power of two, and other ones were said to stand."""
    for inverted in (True, False):
        held = plain(fp8(values, kind, per, inverted), "bfloat16")
        found = judged(source, copied(source, tmp_path / f"{inverted}", held)).explanation
        assert found is not None and found.certainty == "confirmed"
        assert found.cause == ("quant_scale" if inverted else "quantisation")
        assert ("inverted: 1/s stands for s" in found.evidence[0]) == inverted


def test_nvfp4_decoded_with_the_scale_of_the_tensor_inverted(
    source: Path, values: Array, tmp_path: Path
) -> None:
    """One factor is wrong in all groups, and its root leaves the bytes of the groups' scales."""
    whole = np.abs(values).max() / (6 * 448)
    for factor, says in (
        (whole**-2, "whole tensor is inverted"),
        (1.7e6, "e+06 times what they should be"),
    ):
        held = plain(factor * nvfp4(values), "bfloat16")
        found = judged(source, copied(source, tmp_path / says, held)).explanation
        assert found is not None and found.certainty == "confirmed"
        assert found.cause == "quant_scale" and says in found.evidence[0]


@pytest.mark.parametrize("turned", [False, True], ids=["B", "A"])
def test_what_is_wrong_in_a_is_not_written_over_b(
    turned: bool, source: Path, values: Array, tmp_path: Path
) -> None:
    """Seen red: with A's scales inverted, B was to be written again from A."""
    held = plain(fp8(values, ml_dtypes.float8_e4m3fn, "row", True), "bfloat16")
    pair = [source, copied(source, tmp_path / "b", held)]
    report = aprfmt.diff(*(pair[::-1] if turned else pair))
    (cause,) = report.causes
    assert (cause.cause, cause.level) == ("quant_scale", "confirmed")
    assert (cause.remedy is None) == turned
