"""A small BF16 model whose first up projection is given, and copies of it in other types."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from aprfmt.compare import diff
from aprfmt.measure.records import TensorDiff
from tests.conversion.folders import float_bytes, llama_folder, tensors_of, write_mixed
from tests.diagnosis import packing

Array = Any
UP = "model.layers.0.mlp.up_proj"
KEY = "L0.ffn_up.weight"
HIDDEN, FFN = 96, 160


@pytest.fixture(scope="module")
def values() -> Array:
    """A matrix [160, 96] of BF16 numbers with somewhat heavy tails."""
    found = np.random.default_rng(4).standard_t(6, (FFN, HIDDEN)) / 10
    return found.astype(ml_dtypes.bfloat16).astype(np.float32)


@pytest.fixture(scope="module")
def source(values: Array, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in BF16 whose first up projection is given."""
    return llama_folder(
        tmp_path_factory.mktemp("packed") / "source",
        "BF16",
        hidden=HIDDEN,
        layers=1,
        ffn=FFN,
        heads=3,
        kv_heads=1,
        replaced={f"{UP}.weight": float_bytes(values, "BF16")},
    )


def copied(
    source: Path, folder: Path, rows: packing.Rows, section: dict[str, Any] | None = None
) -> Path:
    """Copy the model with the tensors of its up projection replaced."""
    folder.mkdir()
    config = json.loads((source / "config.json").read_text())
    if section is not None:
        config["quantization_config"] = section
    (folder / "config.json").write_text(json.dumps(config))
    kept = {name: row for name, row in tensors_of(source).items() if not name.startswith(UP)}
    write_mixed(folder / "model.safetensors", kept | rows)
    return folder


def judged(source: Path, there: Path) -> TensorDiff:
    """Return the record of the up projection."""
    (row,) = diff(source, there, tensors=[KEY]).tensors
    return row


def plain(values: Any, dtype: str = "bfloat16") -> packing.Rows:
    """Return values of a torch tensor or an array, in a plain type."""
    array = values if isinstance(values, np.ndarray) else values.float().numpy()
    return {f"{UP}.weight": packing.row(np.asarray(array, np.float32).astype(dtype))}
