"""Codes read as numbers of another kind: as integers, another float, words, or without scales."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import aprfmt
from aprfmt.causes.tensor import misread_codes, table
from tests.causes.hypotheses import load_function
from tests.causes.packed_source import FFN, HIDDEN, UP, Array, copied, judged, plain, source, values
from tests.causes.test_remedies import check_commands
from tests.conversion.folders import llama_folder
from tests.diagnosis import packing
from tests.diagnosis.faults_packed import INT4, ROW

torch: Any = pytest.importorskip("torch", reason="NOT-RUN: torch is not installed")

__all__ = ["source", "values"]

INT8 = packing.compressed_section(
    "int-quantized", num_bits=8, type="int", strategy="channel", symmetric=True
)


def in_fp8(values: Array) -> tuple[Array, Array]:
    """Return (bytes uint8, scale of every row) of torch's E4M3."""
    x = torch.from_numpy(values)
    scale = x.abs().amax(1, keepdim=True) / 448
    codes = (x / scale).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8).numpy(), scale.numpy()


def read_by_torch(dtype: str) -> Callable[[Array], Array]:
    """Return a function from bytes to their numbers in a type of torch, float32."""
    return lambda codes: torch.from_numpy(codes).view(getattr(torch, dtype)).float().numpy()


FLOATS = {
    "unsigned": ("uint8", False, "code_type", "read as unsigned integers, and their scales"),
    "unsigned, scaled": ("uint8", True, "code_type", "read as unsigned integers, times their"),
    "signed": ("int8", False, "code_type", "read as signed integers"),
    "signed, scaled": ("int8", True, "code_type", "read as signed integers, times their scales"),
    "another float": ("float8_e5m2", False, "fp8_variant", "read as F8_E5M2, and their scales"),
    "another float, scaled": ("float8_e5m2", True, "fp8_variant", "read as F8_E5M2, times"),
    "without scales": ("float8_e4m3fn", False, "quant_scale", "as numbers: their scales are"),
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("reading", FLOATS)
def test_bytes_of_8_bit_floats_read_as_other_numbers(
    reading: str, dtype: str, values: Array, source: Path, tmp_path: Path
) -> None:
    """Seen red: `bit_rot`, "all other values are within the rounding of the coarser encoding"."""
    kind, scaled, cause, says = FLOATS[reading]
    codes, scale = in_fp8(values)
    rows = {
        f"{UP}.weight": ("F8_E4M3", (FFN, HIDDEN), codes.tobytes()),
        f"{UP}.weight_scale": packing.row(scale),
    }
    a = copied(source, tmp_path / "a", rows, ROW)
    made = read_by_torch(kind)(codes) * (scale if scaled else 1)
    row = judged(a, copied(source, tmp_path / "b", plain(made, dtype)))
    assert row.explanation is not None and row.explanation.confirmed, row
    assert (row.explanation.cause, row.explanation.residual_after) == (cause, 0.0)
    assert says in row.explanation.evidence[0], row.explanation


@pytest.mark.parametrize("row", [0, 7, FFN - 1])
def test_one_value_that_is_no_code_is_not_passed_over(
    row: int, values: Array, source: Path, tmp_path: Path
) -> None:
    """In the first rows, which every guess is tried on, and in one that only the proof reads."""
    codes, scale = in_fp8(values)
    rows = {
        f"{UP}.weight": ("F8_E4M3", (FFN, HIDDEN), codes.tobytes()),
        f"{UP}.weight_scale": packing.row(scale),
    }
    a = copied(source, tmp_path / "a", rows, ROW)
    made = codes.astype(np.float32)
    made[row, 5] += 1
    found = judged(a, copied(source, tmp_path / "b", plain(made, "float32"))).explanation
    assert found is None or not found.confirmed, found


def test_the_bytes_are_known_without_the_packed_file(
    values: Array, source: Path, tmp_path: Path
) -> None:
    codes, _ = in_fp8(values)
    row = judged(source, copied(source, tmp_path / "b", plain(codes)))
    assert row.explanation is not None and row.explanation.confirmed, row
    assert row.explanation.cause == "code_type"
    assert "bytes of F8_E4M3 numbers, read as unsigned integers" in row.explanation.evidence[0]


@pytest.mark.parametrize("packed", [True, False])
def test_without_their_rows_nothing_is_known_of_bytes(
    packed: bool, values: Array, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes, scale = in_fp8(values)
    rows = {
        f"{UP}.weight": ("F8_E4M3", (FFN, HIDDEN), codes.tobytes()),
        f"{UP}.weight_scale": packing.row(scale),
    }
    a = copied(source, tmp_path / "a", rows, ROW) if packed else source
    b = copied(source, tmp_path / "b", plain(codes))
    row = judged(a, b)
    words = "codes of A" if packed else "bytes of F8_E4M3"
    assert row.cause == "code_type" and row.explanation is not None
    assert words in row.explanation.evidence[0]
    find = misread_codes.explain_misread_codes if packed else misread_codes.explain_whole_bytes
    rest = tuple(row for row in table.TABLE if load_function(row.find) is not find)
    assert len(rest) == len(table.TABLE) - 1
    monkeypatch.setattr(table, "TABLE", rest)
    left = judged(a, b).explanation
    assert left is None or words not in left.evidence[0]


@pytest.mark.parametrize("encoding", ["fp8", "Q2_K", "Q3_K", "TQ2_0", "Q4_0"])
@pytest.mark.parametrize("size", [1.0, 1e3])
def test_values_within_a_wide_bound_one_by_one_are_not_called_equal(
    encoding: str, size: float, values: Array, source: Path, tmp_path: Path
) -> None:
    """Seen red: half of unrelated numbers are within a bound taken from the largest of them."""
    if encoding == "fp8":
        codes, scale = in_fp8(values)
        rows = {
            f"{UP}.weight": ("F8_E4M3", (FFN, HIDDEN), codes.tobytes()),
            f"{UP}.weight_scale": packing.row(scale),
        }
        a = copied(source, tmp_path / "a", rows, ROW)
    else:
        a = tmp_path / "a.gguf"
        aprfmt.convert(wide(tmp_path / "wide"), a, encoding=encoding)
    b = tmp_path / "wide" if encoding != "fp8" else source
    shape = (FFN, HIDDEN) if encoding == "fp8" else (256, 256)
    other = np.abs(np.random.default_rng(9).normal(size=shape)) * size
    row = judged(a, copied(b, tmp_path / "b", plain(other)))
    said = " ".join(row.explanation.evidence) if row.explanation is not None else ""
    assert "all other" not in said and "all others" not in said, said
    assert row.explanation is None or not row.explanation.confirmed, row


def wide(folder: Path) -> Path:
    """A model whose rows are as long as the largest blocks."""
    return llama_folder(folder, "BF16", hidden=256, layers=1, ffn=256, heads=4, kv_heads=1)


@pytest.mark.parametrize("added", [126, 128])
def test_codes_without_minima_have_none_exchanged(
    added: int, values: Array, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen red: `quant_min`, "d and dmin are exchanged", of int8 that has neither."""
    rest = tuple(
        row
        for row in table.TABLE
        if load_function(row.find) is not misread_codes.explain_misread_codes
    )
    monkeypatch.setattr(table, "TABLE", rest)
    rows, p = of_int8(values)
    a = copied(source, tmp_path / "a", rows, INT8)
    row = judged(a, copied(source, tmp_path / "b", plain(p.codes - 128 + added)))
    assert row.explanation is None or row.explanation.cause != "quant_min", row


def test_other_whole_numbers_are_not_bytes_of_floats(
    values: Array, source: Path, tmp_path: Path
) -> None:
    codes, _ = in_fp8(np.random.default_rng(8).permuted(values))
    row = judged(source, copied(source, tmp_path / "b", plain(codes)))
    found = row.explanation
    assert found is None or (found.cause != "code_type" and not found.confirmed), row


def of_int8(values: Array) -> tuple[packing.Rows, packing.Packed]:
    """Return the tensors of compressed-tensors' int8 with a scale for every row, and the codes."""
    p = packing.nearest(values, 8, HIDDEN, symmetric=True, dtype=np.float32)
    p = packing.Packed(p.codes, p.scales, np.full_like(p.zeros, 128), p.group, 8)
    rows = {
        f"{UP}.weight": packing.row((p.codes - 128).astype(np.int8)),
        f"{UP}.weight_scale": packing.row(p.scales.astype(np.float32)),
    }
    return rows, p


def of_four_bits(write: Callable[..., packing.Rows], **how: Any) -> Callable[[Array], Any]:
    """Return a function that gives the tensors of a 4-bit writer, and the codes."""

    def made(values: Array) -> tuple[packing.Rows, packing.Packed]:
        p = packing.nearest(values, **how)
        return write(UP, p), p

    return made


WRITERS: dict[str, tuple[Callable[[Array], Any], dict[str, Any]]] = {
    "int8": (of_int8, INT8),
    "int4": (of_four_bits(packing.compressed, symmetric=True, dtype=ml_dtypes.bfloat16), INT4),
    "gptq": (of_four_bits(packing.gptq), packing.gptq_section()),
    "awq": (of_four_bits(packing.awq), packing.awq_section()),
}


def misread(p: packing.Packed, how: str) -> Array:
    """Return values of codes that are read in a wrong way; `p` counts them from 0."""
    half = 1 << p.bits - 1
    scales, zeros = p.scales[:, p.group], p.zeros[:, p.group]
    two = np.where(p.codes < half, p.codes, p.codes - 2 * half)
    return {
        "unsigned, unscaled": p.codes,
        "unsigned, scaled": p.codes * scales,
        "two's complement, scaled": two * scales,
        "unscaled": p.codes - zeros,
    }[how]


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize(
    "how", ["unsigned, unscaled", "unsigned, scaled", "two's complement, scaled", "unscaled"]
)
def test_integers_read_as_other_integers(
    how: str, writer: str, values: Array, source: Path, tmp_path: Path
) -> None:
    make, section = WRITERS[writer]
    rows, p = make(values)
    a = copied(source, tmp_path / "a", rows, section)
    row = judged(a, copied(source, tmp_path / "b", plain(misread(p, how))))
    assert row.explanation is not None and row.explanation.confirmed, row
    assert row.explanation.cause in ("code_type", "zero_point", "quant_scale")
    assert row.explanation.residual_after == 0.0, row.explanation


@pytest.mark.parametrize("sign", ["uint8", "int8"])
def test_two_codes_taken_for_one_byte(
    sign: str, values: Array, source: Path, tmp_path: Path
) -> None:
    rows, _ = WRITERS["int4"][0](values)
    a = copied(source, tmp_path / "a", rows, INT4)
    _, shape, raw = rows[f"{UP}.weight_packed"]
    held = np.frombuffer(raw, sign).reshape(shape[0], -1).astype(np.float32)
    row = judged(a, copied(source, tmp_path / "b", plain(held)))
    assert row.explanation is not None and row.explanation.confirmed, row
    assert row.explanation.cause == "code_type"
    assert "2 codes are taken for one value" in row.explanation.evidence[0]


def test_codes_read_as_values_are_written_again(
    values: Array, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command that is printed for them is run."""
    codes, _ = in_fp8(values)
    check_commands(
        "code_type", (source, copied(source, tmp_path / "b", plain(codes))), tmp_path, monkeypatch
    )
