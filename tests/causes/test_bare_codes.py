"""Codes of 8-bit floats stored as such, without the scales that they were made with.

Seen red: codes stored as F8 searched for a scheme under their own rounding (another factor for each
tensor was confirmed); a factor confirmed although some values are further apart than rounding; a
plain cast called codes without scales.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprfmt.codecs import fp8
from aprfmt.compare import TensorDiff, diff
from tests.conversion.folders import float_bytes, llama_folder, tensors_of, write_mixed

Array = np.ndarray[Any, np.dtype[Any]]
DOWN = "model.layers.1.mlp.down_proj.weight"
KEY = "L1.ffn_down.weight"
SIDE = 256
BLOCK = 128


def codes(values: Array, kind: Any) -> bytes:
    """Return the bytes of the numbers of an 8-bit float that are nearest to values."""
    order = np.argsort(kind.values[:256], kind="stable")
    order = order[np.isfinite(kind.values[order])]
    table = kind.values[order].astype(np.float64)
    at = np.clip(np.searchsorted(table, values), 1, len(table) - 1)
    low = values - table[at - 1] < table[at] - values
    return bytes(order[np.where(low, at - 1, at)].astype(np.uint8).reshape(-1))


def block_scales(values: Array, kind: Any, shape: str) -> Array:
    """Return the scale of every value, by blocks, by rows or one for all."""
    most = float(kind.values[np.isfinite(kind.values)].max())
    size = np.abs(values)
    if shape == "blocks":
        parts = size.reshape(SIDE // BLOCK, BLOCK, SIDE // BLOCK, BLOCK).max((1, 3))
        top = parts.repeat(BLOCK, 0).repeat(BLOCK, 1)
    else:
        top = size.max(1, keepdims=True) if shape == "rows" else size.max()
    return np.broadcast_to(top / most, values.shape)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama folder in BF16 whose weights have the size of trained ones."""
    folder = llama_folder(tmp_path_factory.mktemp("bare") / "a", "BF16", hidden=SIDE)
    rows = tensors_of(folder)
    for name, (dtype, shape, raw) in rows.items():
        wide = np.frombuffer(raw, "<u2").astype("<u4") << 16
        small = (wide.view("<f4") * np.float32(0.03)).reshape(shape)
        rows[name] = (dtype, shape, float_bytes(small, "BF16"))
    write_mixed(folder / "model.safetensors", rows)
    return folder


def values_of(folder: Path) -> Array:
    """Return the values of the tensor that is changed, float64 [SIDE, SIDE]."""
    wide = np.frombuffer(tensors_of(folder)[DOWN][2], "<u2").astype("<u4") << 16
    return wide.view("<f4").reshape(SIDE, SIDE).astype(np.float64)


def compared(source: Path, folder: Path, dtype: str, raw: bytes) -> TensorDiff:
    """Return the record of the changed tensor, stored so in a copy of the folder."""
    folder.mkdir()
    rows = tensors_of(source)
    rows[DOWN] = (dtype, (SIDE, SIDE), raw)
    write_mixed(folder / "model.safetensors", rows)
    (folder / "config.json").write_text((source / "config.json").read_text())
    (row,) = [row for row in diff(source, folder).tensors if row.key == KEY]
    return row


@pytest.mark.parametrize("shape", ["blocks", "rows", "one"])
@pytest.mark.parametrize("name", ["F8_E4M3", "F8_E5M2"])
def test_codes_without_their_scales_are_named(
    name: str, shape: str, source: Path, tmp_path: Path
) -> None:
    kind = {"F8_E4M3": fp8.E4M3, "F8_E5M2": fp8.E5M2}[name]
    values = values_of(source)
    raw = codes(values / block_scales(values, kind, shape), kind)
    found = compared(source, tmp_path / "b", name, raw).explanation
    assert found is not None and found.cause == "quant_scale", found
    assert found.confirmed and "as if each were 1" in found.says, found


@pytest.mark.parametrize("times", [1.0, 64.0])
def test_a_cast_to_codes_is_no_lost_scale(times: float, source: Path, tmp_path: Path) -> None:
    """Of values of the size of weights, and of values that one factor took into the range."""
    raw = codes(values_of(source) * times, fp8.E4M3)
    row = compared(source, tmp_path / "b", "F8_E4M3", raw)
    if times == 1.0:
        assert row.verdict == "WITHIN" or (row.explanation and row.explanation.verdict != "bug"), (
            row
        )
    else:
        assert row.explanation is not None and row.explanation.confirmed, row


@pytest.mark.parametrize(("times", "moved"), [(2.5, 0), (2.5, 3), (-1.0, 1), (0.7, 40)])
def test_a_factor_is_confirmed_where_no_value_is_beyond_rounding(
    times: float, moved: int, source: Path, tmp_path: Path
) -> None:
    values = values_of(source) * times
    rng = np.random.default_rng(0)
    values.reshape(-1)[rng.choice(values.size, moved, replace=False)] *= 1.02
    bits = values.astype(np.float32).view(np.uint32)
    raw = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2").tobytes()
    found = compared(source, tmp_path / "b", "BF16", raw).explanation
    assert found is not None and found.cause == "scale", found
    said = json.dumps(found.evidence)
    assert ("further apart than rounding" in said) == bool(moved), said
    assert ("equal within the rounding" in said) == (not moved), said
