"""Scales that were read in another way when a packed weight was decoded: the float side is wrong.

Seen red: a free factor for each group fits all of these, and was confirmed against the packed side
that is right, as an offset of nested absmax that was lost.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import aprfmt
from aprfmt.compare import diff
from tests.causes.packed_source import FFN, HIDDEN, UP, Array, copied, judged, plain, source, values
from tests.causes.test_one_factor_of_scales import SECTION, decoded, exponents, float4, mxfp4
from tests.diagnosis import packing

__all__ = ["source", "values"]

BIAS = 127
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
FP8 = {"quant_method": "fp8", "weight_block_size": [32, 32], "fmt": "e4m3"}


def small(held: Array) -> Array:
    """Return the numbers of bytes of F8_E4M3."""
    return held.view(ml_dtypes.float8_e4m3fn).astype(float)


# How an exponent's byte is read -> the numbers (float64), the words, whether either side may err.
EXPONENTS: dict[str, tuple[Callable[[Array], Array], str, bool]] = {
    "number": (lambda b: b, "read as whole numbers,", False),
    "signed": (lambda b: np.where(b < 128, b, b - 256), "read as signed whole numbers", False),
    "share": (lambda b: b / 255, "read as whole numbers over 255", False),
    "no bias": (lambda b: 2.0**b, "without their bias of 127", False),
    "bias 128": (lambda b: 2.0 ** (b - 128), "with a bias of 128", True),
    "float": (lambda b: small(b.astype(np.uint8)), "read as F8_E4M3 numbers", False),
    "inverse": (lambda b: 2.0 ** (BIAS - b), "values are divided by them", True),
}


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("reading", EXPONENTS)
def test_exponents_read_as_other_numbers(
    reading: str, swapped: bool, values: Array, source: Path, tmp_path: Path
) -> None:
    read, says, either = EXPONENTS[reading]
    x = values * 2.0**10 if reading == "signed" else values  # bytes on both sides of 128
    right = exponents(x)
    codes = float4(x.reshape(FFN, -1, 32), 2.0**right)
    made = decoded(codes) * read((right + BIAS).astype(float))[..., None]
    packed = copied(source, tmp_path / "a", mxfp4(x, lambda e: e, right), SECTION)
    floats = copied(source, tmp_path / "b", plain(made.reshape(FFN, HIDDEN)))
    found = judged(*((floats, packed) if swapped else (packed, floats))).explanation
    assert found is not None and (found.cause, found.certainty) == ("quant_scale", "confirmed")
    one, other = ("A", "B") if swapped else ("B", "A")
    assert found.says.startswith(f"{one}'s values are the codes of {other}") and says in found.says
    assert (f"or {other}'s scales are wrong" in found.says) is either
    assert found.side == ("" if either else one)


def nvfp4(x: Array) -> tuple[packing.Rows, Array, Array, Array]:
    """Return NVFP4 as ModelOpt packs it; its codes, scale bytes and the scale of the tensor."""
    groups = x.reshape(FFN, -1, 16)
    whole = np.float32(np.abs(x).max() / (6 * 448))
    scale = (np.abs(groups).max(-1) / 6 / whole).astype(ml_dtypes.float8_e4m3fn)
    codes = float4(groups, scale.astype(float) * whole)
    flat = codes.reshape(FFN, HIDDEN)
    rows = {
        f"{UP}.weight": packing.row((flat[:, ::2] | (flat[:, 1::2] << 4)).astype(np.uint8)),
        f"{UP}.weight_scale": packing.row(scale),
        f"{UP}.weight_scale_2": packing.row(whole.reshape(())),
    }
    return rows, decoded(codes), scale.view(np.uint8), whole


BLOCKS: dict[str, tuple[Callable[[Array, Any], Array], str]] = {
    "number": (lambda b, whole: b * float(whole), "numbers, where each is of F8_E4M3"),
    "exponent": (lambda b, whole: 2.0 ** (b.astype(float) - BIAS) * whole, "as F8_E8M0 numbers"),
    "left out": (lambda b, whole: small(b), "the scale of the whole tensor left out"),
    "divided": (lambda b, whole: small(b) / whole, "the scale of the whole tensor inverted"),
    "right": (lambda b, whole: small(b) * whole, ""),
}  # fmt: skip


@pytest.mark.parametrize("reading", BLOCKS)
def test_small_floats_read_as_other_numbers(
    reading: str, values: Array, source: Path, tmp_path: Path
) -> None:
    read, says = BLOCKS[reading]
    rows, numbers, held, whole = nvfp4(values)
    packed = copied(source, tmp_path / "a", rows, MODELOPT)
    made = (numbers * read(held, whole)[..., None]).reshape(FFN, HIDDEN)
    found = judged(packed, copied(source, tmp_path / "b", plain(made)))
    if not says:
        assert found.verdict in ("SAME_VALUES", "WITHIN"), found
        return
    assert found.explanation is not None and found.explanation.certainty == "confirmed", found
    assert found.explanation.cause == "quant_scale" and says in found.explanation.says


@pytest.mark.parametrize("ratio", [0.875, 2.0])
def test_the_scale_of_the_weight_it_is_fused_with(
    ratio: float, values: Array, source: Path, tmp_path: Path
) -> None:
    """Seen red: a scale that is near the right one was a fitted factor, and A the accused side."""
    rows, numbers, held, _ = nvfp4(values)
    gate, *_, other = nvfp4(values[::-1] * np.float32(ratio))
    rows |= {name.replace("up_proj", "gate_proj"): row for name, row in gate.items()}
    packed = copied(source, tmp_path / "a", rows, MODELOPT)
    made = (numbers * (small(held) * other)[..., None]).reshape(FFN, HIDDEN)
    found = judged(packed, copied(source, tmp_path / "b", plain(made))).explanation
    assert found is not None and (found.cause, found.certainty) == ("quant_scale", "confirmed")
    assert found.says.startswith("B's values") and "of ffn_gate.weight" in found.says
    assert found.side == "B" and not found.leaves_side_open


def test_tiles_divided_by_their_scales(values: Array, source: Path, tmp_path: Path) -> None:
    tiles = values.reshape(FFN // 32, 32, HIDDEN // 32, 32)
    scale = (np.abs(tiles).max((1, 3), keepdims=True) / 448).astype(np.float32)
    codes = (tiles / scale).astype(ml_dtypes.float8_e4m3fn)
    rows = {
        f"{UP}.weight": packing.row(codes.reshape(FFN, HIDDEN)),
        f"{UP}.weight_scale_inv": packing.row(scale.reshape(FFN // 32, -1)),
    }
    packed = copied(source, tmp_path / "a", rows, FP8)
    made = (codes.astype(np.float32) / scale).reshape(FFN, HIDDEN)
    found = judged(packed, copied(source, tmp_path / "b", plain(made))).explanation
    assert found is not None and found.cause == "quant_scale" and found.certainty == "confirmed"
    assert "B's values" in found.says and "or A's scales are wrong" in found.says
    assert found.leaves_side_open and not found.side


def test_exponents_of_blocks_read_as_numbers(values: Array, source: Path, tmp_path: Path) -> None:
    """Blocks of GGUF hold their exponents themselves."""
    aprfmt.convert(source, tmp_path / "a.gguf", encoding="MXFP4")
    with aprfmt.open(tmp_path / "a.gguf") as model:
        view = model.roles["L0.ffn_up.weight"]
        held = np.frombuffer(view.raw(), np.uint8).reshape(-1, 17)[:, :1].astype(float)
        right = view.numpy().reshape(-1, 32).astype(float)
    made = (right * held / 2.0 ** (held - BIAS)).reshape(FFN, HIDDEN)
    b = copied(source, tmp_path / "b", plain(made))
    (row,) = diff(tmp_path / "a.gguf", b, tensors=["L0.ffn_up.weight"]).tensors
    assert row.explanation is not None and row.explanation.certainty == "confirmed", row
    assert "B's values" in row.explanation.says and "whole numbers, where" in row.explanation.says


@pytest.mark.parametrize("many", [False, True], ids=["one factor", "a factor a group"])
def test_fitted_factors_of_decoded_codes_do_not_say_which_side_is_wrong(
    many: bool, values: Array, source: Path, tmp_path: Path
) -> None:
    rows, numbers, held, whole = nvfp4(values)
    packed = copied(source, tmp_path / "a", rows, MODELOPT)
    factor = np.random.default_rng(3).uniform(0.3, 0.8, held.shape) if many else 0.6414
    made = (numbers * (small(held) * whole * factor)[..., None]).reshape(FFN, HIDDEN)
    found = judged(packed, copied(source, tmp_path / "b", plain(made))).explanation
    assert found is not None and found.cause == "quant_scale", found
    assert found.certainty == "explained" and "or B's numbers are wrong" in found.says
    assert found.leaves_side_open and not found.side


def test_a_factor_of_each_group_is_no_other_float(
    values: Array, source: Path, tmp_path: Path
) -> None:
    """F8_E4M3FNUZ is half of F8_E4M3: factors take up what tells them apart."""
    groups = values.reshape(FFN, -1, 32)
    right = np.floor(np.log2(np.abs(groups).max(-1))) - 8
    scaled = np.clip(groups / 2.0 ** right[..., None], -448, 448)
    codes = scaled.astype(ml_dtypes.float8_e4m3fn).astype(float)
    made = (codes * (right + BIAS)[..., None]).reshape(FFN, HIDDEN)
    found = judged(source, copied(source, tmp_path / "b", plain(made))).explanation
    assert found is None or found.cause != "fp8_variant", found


def mxfp8(x: Array) -> tuple[Array, Array]:
    """Return the codes of MXFP8, float64 [groups, 32], and their exponents, [groups, 1]."""
    groups = x.reshape(-1, 32)
    right = np.floor(np.log2(np.abs(groups).max(-1, keepdims=True))) - 8
    scaled = np.clip(groups / 2.0**right, -448, 448)
    return scaled.astype(ml_dtypes.float8_e4m3fn).astype(float), right


@pytest.mark.parametrize("side", ["decoded", "original"])
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("reading", ["number", "signed", "share", "float"])
def test_exponents_read_as_other_numbers_between_floats(
    reading: str, swapped: bool, side: str, values: Array, source: Path, tmp_path: Path
) -> None:
    read, says, _ = EXPONENTS[reading]
    original = values * 2.0**18 if reading == "signed" else values  # bytes on both sides of 128
    codes, right = mxfp8(original)
    wrong = codes * read(right + BIAS)
    x = codes * 2.0**right if side == "decoded" else original
    a = copied(source, tmp_path / "a", plain(np.asarray(x).reshape(FFN, HIDDEN)))
    b = copied(source, tmp_path / "b", plain(wrong.reshape(FFN, HIDDEN)))
    found = judged(*((b, a) if swapped else (a, b))).explanation
    assert found is not None and (found.cause, found.certainty) == ("quant_scale", "confirmed")
    assert found.says.startswith("A's" if swapped else "B's") and says in found.says
    assert "wrong: both" not in found.says


@pytest.mark.parametrize("kind", ["other scales", "rounded", "powers", "no bias"])
def test_no_exponent_is_misread(kind: str, values: Array, source: Path, tmp_path: Path) -> None:
    codes, right = mxfp8(values)
    made = codes * 2.0**right
    rng = np.random.default_rng(5)
    factor = {
        "other scales": rng.uniform(0.3, 0.8, right.shape),
        "rounded": np.ones(right.shape),
        "powers": 2.0 ** rng.integers(-3, 3, right.shape),
        "no bias": np.full(right.shape, 2.0**BIAS),  # one factor on all, and huge numbers
    }[kind]
    x = values if kind == "rounded" else made
    a = copied(source, tmp_path / "a", plain(np.asarray(x).reshape(FFN, HIDDEN)))
    b = copied(source, tmp_path / "b", plain((made * factor).reshape(FFN, HIDDEN)))
    found = judged(a, b).explanation
    assert found is None or "bytes read as" not in found.says, found
    if kind == "rounded":
        assert found is not None and found.cause == "quantisation", found
        assert "E4M3 codes, one scale for every 32" in str(found.evidence)


def test_the_scale_of_the_weight_that_it_is_fused_with(
    values: Array, source: Path, tmp_path: Path
) -> None:
    rows, numbers, held, _ = nvfp4(values)
    gate, _, _, whole = nvfp4(values * 0.6)
    both = rows | {name.replace("up_proj", "gate_proj"): row for name, row in gate.items()}
    packed = copied(source, tmp_path / "a", both, MODELOPT)
    made = (numbers * (small(held) * whole)[..., None]).reshape(FFN, HIDDEN)
    found = judged(packed, copied(source, tmp_path / "b", plain(made))).explanation
    assert found is not None and (found.cause, found.certainty) == ("quant_scale", "confirmed")
    assert "of ffn_gate.weight, which it is fused with" in found.says
