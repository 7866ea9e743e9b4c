"""A GGUF's divisors of rope are believed over keys that only this program reads.

llama.cpp goes by `rope_freqs.weight`; a file that this program wrote has the scaling's own numbers
besides, as `aprfmt.hyper.rope_scaling` and in the config.json that it carries.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from tests.cli.run import aprfmt
from tests.conversion.folders import llama_folder

FREQS = "rope_freqs.weight"
Change = Callable[[np.ndarray], np.ndarray | None]


def source(folder: Path, factor: float = 32.0) -> Path:
    """Return a llama folder with a llama3 scaling of a length that no release has."""
    llama_folder(folder, "F32", heads=4, kv_heads=2)
    path = folder / "config.json"
    scaling = {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": factor, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    }  # fmt: skip
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_parameters": scaling}))
    return folder


def edited(path: Path, target: Path, change: Change, *, own_keys: bool = True) -> Path:
    """Write a copy of a GGUF with another rope_freqs.weight, by the library gguf."""
    reader, writer = gguf.GGUFReader(path), gguf.GGUFWriter(target, "llama")
    for field in reader.fields.values():
        own = field.name.startswith("aprfmt.") and not own_keys
        if field.name.startswith("GGUF.") or field.name == "general.architecture" or own:
            continue
        inner = field.types[1] if len(field.types) > 1 else None
        writer.add_key_value(field.name, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        data: Any = np.array(tensor.data)
        if tensor.name == FREQS:
            data = change(data)
        if data is not None:
            writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def converted(folder: Path) -> tuple[Path, Path]:
    model = source(folder / "m")
    target = folder / "m.gguf"
    assert aprfmt("convert", model, target).code == 0
    return model, target


@pytest.mark.parametrize("own_keys", [True, False])
@pytest.mark.parametrize(
    "change", [lambda x: np.full_like(x, 7), lambda x: x * np.float32(1.001), lambda x: None]
)
def test_other_divisors_are_another_scaling(change: Change, own_keys: bool, tmp_path: Path) -> None:
    """Seen red: equal, and the same in every quantity that a pass computes with."""
    model, target = converted(tmp_path)
    other = edited(target, tmp_path / "other.gguf", change, own_keys=own_keys)
    for first in (model, target):
        told = aprfmt("diff", first, other, "--json").json
        assert told["exit"] == 1
        assert [row["name"] for row in told["hyperparameters"]] == ["rope_scaling"]
    found = aprfmt("diagnose", target, other, "--json").json
    assert found["exit"] == 1 and found["causes"][0]["cause"] == "rope_scaling"


def test_a_contradiction_is_said(tmp_path: Path) -> None:
    _, target = converted(tmp_path)
    other = edited(target, tmp_path / "other.gguf", lambda x: np.full_like(x, 7))
    told = aprfmt("validate", other)
    assert "rope_freqs.weight" in told.out and "rope_scaling" in told.out


@pytest.mark.parametrize("own_keys", [True, False])
def test_the_same_divisors_are_the_same_scaling(own_keys: bool, tmp_path: Path) -> None:
    """As llama.cpp's converter writes them, without a key that says which scaling they are."""
    model, target = converted(tmp_path)
    other = edited(target, tmp_path / "other.gguf", lambda x: x, own_keys=own_keys)
    for first in (model, target):
        told = aprfmt("diff", first, other, "--json").json
        assert (told["exit"], told["hyperparameters"]) == (0, [])


def test_a_key_of_ours_alone_mends_no_divisors(tmp_path: Path) -> None:
    model, _ = converted(tmp_path)
    source(tmp_path / "eight", 8.0)
    aprfmt("convert", tmp_path / "eight", tmp_path / "eight.gguf")
    plain = edited(tmp_path / "eight.gguf", tmp_path / "plain.gguf", lambda x: x, own_keys=False)
    key = json.dumps(
        {
            "type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_context_length": 64,
        }
    )
    aprfmt("set", plain, f"aprfmt.hyper.rope_scaling={json.dumps(key)}", "-o", tmp_path / "s.gguf")
    told = aprfmt("diff", model, tmp_path / "s.gguf", "--json").json
    assert [row["name"] for row in told["hyperparameters"]] == ["rope_scaling"]
