"""Matrices of 8-bit codes whose scale is lost: found by their numbers, never taken for values.

Seen red: the sample's bound at 1000, the largest number not asked for, integers of any name taken,
`refuse_lone_codes` left out of the choice of encodings and of opening a run.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from aprfmt.model import open_model
from tests.cli.run import aprfmt

Dtype = Any
E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
NAMES = {np.dtype(E4M3): "F8_E4M3", np.dtype(E5M2): "F8_E5M2", np.dtype(np.int8): "I8",
         np.dtype(np.float32): "F32"}  # fmt: skip
ONE = "model.layers.1.mlp.up_proj.weight"


def scaled(kind: Dtype, values: Any) -> Any:
    """Return the codes of a matrix whose largest number is the type's largest."""
    limits: Any = ml_dtypes.finfo
    largest = 127.0 if kind is np.int8 else float(limits(kind).max)
    codes = values * (largest / np.abs(values).max())
    return np.rint(codes).astype(kind) if kind is np.int8 else codes.astype(kind)


def save(path: Path, tensors: dict[str, Any]) -> Path:
    """Write a safetensors file and return its path."""
    header, data = {}, b""
    for name, array in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": NAMES[array.dtype], "shape": list(array.shape),
                        "data_offsets": [len(data), len(data) + len(raw)]}  # fmt: skip
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def found_in(path: Path) -> list[str]:
    with open_model(path) as model:
        return [*model.lone_codes]


def with_scale(kind: Dtype, values: Any) -> dict[str, Any]:
    """Return a weight's codes, and a scale under a name that its configuration does not state."""
    scale = np.array([0.01], np.float32)
    return {ONE: scaled(kind, values), f"{ONE}_scale_inv": scale}


@pytest.mark.parametrize("kind", [E4M3, E5M2, np.int8])
def test_codes_are_told_from_values_by_their_numbers(kind: Dtype, tmp_path: Path) -> None:
    """Behind rows of zeros too, and where only one block reaches the largest number."""
    draw = np.random.default_rng(3).standard_normal((1024, 96)).astype(np.float32)
    codes = scaled(kind, draw)
    late = codes.copy()
    late[:512] = 0
    small = scaled(kind, draw)
    small[np.abs(small.astype(np.float32)) == np.abs(small.astype(np.float32)).max()] = 1
    light = np.tile(draw * 0.02, (1, 4)).astype(kind)
    light[700, 5] = codes.reshape(-1)[np.abs(draw).argmax()]
    tensors = {
        "a.weight": codes,
        "late.weight": late,
        "cast.weight": (draw * 0.02).astype(kind),  # of integers, zeros
        "light.weight": light,
        "short.weight": small,
        "a.bias": codes[0],
        "float.weight": draw,
    }
    assert found_in(save(tmp_path / "a.safetensors", tensors)) == ["a.weight", "late.weight"]


def test_weights_of_three_values_and_tables_of_integers_are_no_codes(tmp_path: Path) -> None:
    draw = np.random.default_rng(3)
    tensors = {
        "a.weight": draw.integers(-1, 2, (64, 64)).astype(np.int8),
        "a.relative_positions": draw.integers(-127, 128, (64, 64)).astype(np.int8),
        "b.weight": draw.standard_normal((64, 64)).astype(E4M3),  # a toy, of the size of 1
    }
    assert found_in(save(tmp_path / "a.safetensors", tensors)) == []


@pytest.mark.parametrize("scale", ["weight_scale", "scale_weight", "weight_scale_inv"])
def test_codes_with_a_scale_of_any_name_are_not_alone(scale: str, tmp_path: Path) -> None:
    draw = np.random.default_rng(3).standard_normal((64, 64)).astype(np.float32)
    tensors = {"a.weight": scaled(E4M3, draw), f"a.{scale}": np.array([0.01], np.float32)}
    assert found_in(save(tmp_path / "a.safetensors", tensors)) == []


@pytest.fixture(scope="module")
def folders(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Make a copy of the demo model with one weight as codes of a type, or cast to it."""

    def make(name: str, kind: Dtype, change: Callable[[Dtype, Any], Any]) -> Path:
        folder = tmp_path_factory.mktemp("lone") / name
        shutil.copytree(demo_model, folder)
        with open_model(demo_model) as model:
            tensors = {n: np.asarray(v.numpy(), np.float32) for n, v in model.items()}
        changed = change(kind, tensors[ONE])
        tensors |= changed if isinstance(changed, dict) else {ONE: changed}
        save(folder / "model.safetensors", tensors)
        return folder

    return make


@pytest.mark.parametrize("kind", [E4M3, E5M2])
def test_every_command_says_so_and_none_takes_them_for_values(
    kind: Dtype, folders: Callable[..., Path], tmp_path: Path
) -> None:
    lost = folders("lost", kind, scaled)
    says = f"1 weight of {NAMES[np.dtype(kind)]} codes without a scale in the file ({ONE})"
    for args in (
        ("convert", lost, tmp_path / "a.gguf", "--encoding", "BF16"),
        ("convert", lost, tmp_path / "a.safetensors", "--generic", "--encoding", "F32"),
        ("quantize", lost, tmp_path / "a.gguf", "--type", "Q8_0"),
        ("run", lost, "--ids", "1,2", "--max-tokens", "1"),
        ("eval", lost, "--ids", "1,2,3"),
    ):
        done = aprfmt(*args)
        assert done.code == 2 and says in done.err, args
        assert not (tmp_path / "a.gguf").exists()
    assert aprfmt("convert", lost, tmp_path / "copy").code == 0  # bytes are copied
    assert "1 weight of codes without a scale" in aprfmt("inspect", lost).out.splitlines()[0]
    assert f"{ONE}: {NAMES[np.dtype(kind)]} values up to" in aprfmt("validate", lost).out


def test_codes_with_a_scale_that_nothing_states_are_unread(folders: Callable[..., Path]) -> None:
    """They are refused as packed weights that cannot be read: the scale is not lost."""
    with open_model(folders("odd", E4M3, with_scale)) as model:
        assert model.unread is not None and not model.lone_codes


def test_values_that_were_cast_are_values(folders: Callable[..., Path], tmp_path: Path) -> None:
    cast = folders("cast", E4M3, lambda kind, values: values.astype(kind))
    assert aprfmt("convert", cast, tmp_path / "a.gguf", "--encoding", "BF16").code == 0
    assert aprfmt("run", cast, "--ids", "1,2", "--max-tokens", "1").code == 0
    assert "without a scale" not in aprfmt("inspect", cast).out
