"""A sum in another order is rounding; what is larger than a unit of its operands is not."""

from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest

from aprfmt.causes.tensor import arithmetic
from aprfmt.compare import diff
from aprfmt.measure.encoding_noise import UNIT
from tests.conversion.folders import write_mixed

SHAPE = 48, 64
DTYPES: dict[str, Any] = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F16": np.float16}


def weights(dtype: Any, vector: bool) -> Any:
    """Return values of which one in each row is 4, and most are far smaller."""
    rng = np.random.default_rng(7)
    found = rng.standard_normal((SHAPE[1],) if vector else SHAPE) * 1e-2
    found[..., 0] = 4.0
    return found.astype(dtype)


def judged(folder: Path, a: Any, b: Any, dtype: str) -> Any:
    for name, values in (("a", a), ("b", b)):
        rows = {"w": (dtype, values.shape, values.tobytes())}
        write_mixed(folder / f"{name}.safetensors", rows)
    (row,) = diff(folder / "a.safetensors", folder / "b.safetensors").tensors
    return row


@pytest.mark.parametrize("vector", [False, True], ids=["matrix", "vector"])
@pytest.mark.parametrize("name", DTYPES)
def test_a_unit_of_the_largest_operand_is_rounding(name: str, vector: bool, tmp_path: Path) -> None:
    a = weights(DTYPES[name], vector)
    signs = np.sign(np.random.default_rng(1).standard_normal(a.shape))
    off = signs * UNIT[name] * 4.0  # half the distance of neighbours at 4
    b = (a.astype(np.float64) + off).astype(DTYPES[name])
    row = judged(tmp_path, a, b, name)
    assert (row.cause, row.explanation.confirmed) == ("rounding", True)
    assert "by at most" in row.explanation.evidence[1]  # its size is said


def test_an_adapter_merged_in_another_order_is_rounding(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    base = rng.standard_normal(SHAPE).astype(np.float32)
    up, down = rng.standard_normal((SHAPE[0], 2)), rng.standard_normal((2, SHAPE[1]))
    up, down = up.astype(np.float32), down.astype(np.float32) / 8
    by_terms = base.copy()
    for term in range(2):
        by_terms += up[:, term, None] * down[term]
    row = judged(tmp_path, base + up @ down, by_terms, "F32")
    assert (row.cause, row.explanation.confirmed) == ("rounding", True)


def merged_with_magnitudes(norms: Any, axis: int, dtype: str = "F32") -> Any:
    """Return a DoRA adapter merged in float32, `norms` giving the norm of each row or column."""
    rng = np.random.default_rng(11)
    values = rng.standard_normal((128, 256)).astype(np.float32) / 16
    count = values.shape[1 - axis]
    magnitudes = np.asarray(1 + rng.random(count), np.float32)
    factors = magnitudes / norms(values if axis else values.T)
    made = values * np.expand_dims(np.asarray(factors, np.float32), axis)
    return np.ascontiguousarray(made.astype(DTYPES[dtype]))


def exact_norms(values: Any) -> Any:
    return np.sqrt(np.square(values.astype(np.float64)).sum(axis=1)).astype(np.float32)


def summed_one_by_one(values: Any) -> Any:
    total = np.zeros(len(values), np.float32)
    for column in values.T:
        total += column * column
    return np.sqrt(total)


def off_by(share: float) -> Any:
    """Return a function that gives the norms of rows with a wrong factor of each row."""

    def norms(values: Any) -> Any:
        wrong = 1 + share * np.random.default_rng(2).standard_normal(len(values))
        return exact_norms(values) * wrong.astype(np.float32)

    return norms


@pytest.mark.parametrize("axis", [1, 0], ids=["rows", "columns"])
@pytest.mark.parametrize("norms", [summed_one_by_one, off_by(2.0**-23)], ids=["in turn", "a unit"])
def test_norms_summed_in_another_order_are_rounding(norms: Any, axis: int, tmp_path: Path) -> None:
    """Seen red: `derived`, and `scale` with a factor of its own for every row."""
    a, b = (merged_with_magnitudes(one, axis) for one in (exact_norms, norms))
    row = judged(tmp_path, a, b, "F32")
    assert row.cause == "rounding"
    assert f"factors of {'rows' if axis else 'columns'}" in row.explanation.evidence[0]


@pytest.mark.parametrize("axis", [1, 0], ids=["rows", "columns"])
@pytest.mark.parametrize(("dtype", "share"), [("F32", 1e-5), ("F32", 1e-3), ("BF16", 1e-2)])
def test_factors_further_from_one_are_no_rounding(
    dtype: str, share: float, axis: int, tmp_path: Path
) -> None:
    """A bound on the factor alone keeps other magnitudes from being called rounding."""
    a, b = (merged_with_magnitudes(one, axis, dtype) for one in (exact_norms, off_by(share)))
    assert judged(tmp_path, a, b, dtype).cause != "rounding"


@pytest.mark.parametrize("units", [16.0, 64.0])
def test_more_than_a_unit_of_the_largest_is_no_rounding(units: float, tmp_path: Path) -> None:
    a = weights(np.float32, False)
    rng = np.random.default_rng(2)
    off = units * 2.0**-23 * 4 * np.sign(rng.standard_normal(a.shape))
    row = judged(tmp_path, a, (a + off).astype(np.float32), "F32")
    assert row.cause != "rounding"


def test_a_few_values_are_damage_however_small(tmp_path: Path) -> None:
    a = weights(np.float32, False)
    b = a.copy()
    b.view(np.uint32)[3, 5] ^= 1 << 3
    row = judged(tmp_path, a, b, "F32")
    assert row.cause == "bit_rot"


@pytest.mark.parametrize(("fine", "coarse"), [("F32", "BF16"), ("F32", "F16"), ("F16", "BF16")])
def test_a_bit_of_the_finer_side_is_named_through_the_coarser(
    fine: str, coarse: str, tmp_path: Path
) -> None:
    """The value brought back is near the other one by what both encodings round."""
    values = np.random.default_rng(4).standard_normal(SHAPE).astype(DTYPES[fine])
    copy = values.astype(np.float32).astype(DTYPES[coarse])
    bits = values.view(np.uint32 if fine == "F32" else np.uint16)
    place = 5 * SHAPE[1] + 9
    bits.reshape(-1)[place] ^= np.asarray(1 << (8 * values.itemsize - 3), bits.dtype)
    for name, encoding, held in (("a", coarse, copy), ("b", fine, values)):
        rows = {"w": (encoding, held.shape, held.tobytes())}
        write_mixed(tmp_path / f"{name}.safetensors", rows)
    (row,) = diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors").tensors
    explanation: Any = row.explanation
    assert (row.cause, explanation.confirmed) == ("bit_rot", True)
    raw = (tmp_path / "b.safetensors").read_bytes()
    at = 8 + int.from_bytes(raw[:8], "little") + place * values.itemsize + values.itemsize - 1
    where = (
        f"byte {values.itemsize - 1} of the {fine} value at [5, 9] (byte {at} of the file, in w)"
    )
    said = f"flipping bit 5 of {where} of B brings it back within the bound"
    assert said in explanation.evidence


# What one side's values went through, by numpy or gguf-py, and whether the stored types show it.
THROUGH: dict[Any, Any] = {
    "BF16": lambda x: x.astype(ml_dtypes.bfloat16).astype(np.float32),
    "F16": lambda x: x.astype(np.float16).astype(np.float32),
    **{
        kind: lambda x, kind=kind: gguf.dequantize(gguf.quantize(x, kind), kind)
        for kind in (gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q8_0)
    },
}


@pytest.mark.parametrize("shape", [(96, 64), (1100, 1024)], ids=["all rows", "some rows"])
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("name", THROUGH, ids=str)
def test_what_was_made_again_is_accepted_as_rounding(
    name: Any,
    swapped: bool,
    shape: tuple[int, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seen red: exit 1 though encoding again gave every element, and, of a large tensor, confirmed
    with an element that is off in a row that was not encoded."""
    if shape[0] > 1000 and name is gguf.GGMLQuantizationType.Q4_0:
        return  # a search for its scheme comes first there, and looks at some rows only: located
    if shape[0] > 1000:
        monkeypatch.setattr(arithmetic, "REQUANTIZED", shape[0] * shape[1] // 2)
    fine = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
    coarse = THROUGH[name](fine)
    damaged = coarse.copy()
    damaged[1, 5] += 1.0  # in a row that a sample of every second one leaves out
    for other, code in ((coarse, 0), (damaged, 1)):
        sides = (other, fine) if swapped else (fine, other)
        for label, values in zip("ab", sides, strict=True):
            rows = {"w": ("F32", values.shape, values.tobytes())}
            write_mixed(tmp_path / f"{label}.safetensors", rows)
        found = diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
        assert found.exit_code() == 1
        assert found.exit_code(("within",)) == code, found.pronounced(("within",)).says
        made = "1 made again by rounding or quantizing" in found.pronounced(("within",)).says
        assert made == (not code)
