"""GGUF files made by our tables, read by transformers' own GGUF reader: the same tensors come back.

transformers undoes the converter's changes (row permutation, +1, transposition, stacking) with its
own code, so names and layout steps are checked by an independent reader.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from aprfmt.arch.binding import groups_for
from aprfmt.arch.hyperparameters import write_hyper
from tests.arch.tiny import IN_GGUF, Tiny, make, read

READ_BY_TRANSFORMERS = (
    "llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "gpt2", "stablelm",
    "starcoder2", "qwen2_moe", "qwen3_moe",
)  # fmt: skip
CASES = [
    tiny
    for tiny in IN_GGUF
    if tiny.arch in READ_BY_TRANSFORMERS and tiny.label not in ("mixed", "parallel")
]


def weights(model: Any) -> dict[str, Any]:
    """Return random weights that float32 holds exactly also with 1 added."""
    draw = np.random.default_rng(7)
    return {
        name: (draw.integers(-512, 512, tuple(t.shape)) / 1024).astype(np.float32)
        for name, t in model.state_dict().items()
    }


def logical(tiny: Tiny, stored: Mapping[str, Any]) -> dict[str, Any]:
    found = read(tiny)
    out: dict[str, Any] = {}
    for group in found.bound.groups:
        arrays = [stored[name] for name in group.stored]
        for step in group.binding.steps:
            arrays = step.undo(arrays, found.hp)
        out.update(zip(group.roles, arrays, strict=True))
    return out


def write_gguf(tiny: Tiny, stored: Mapping[str, Any], path: Path) -> None:
    """Write a file with the gguf package, its content by our tables."""
    found = read(tiny)
    writer = gguf.GGUFWriter(path, found.spec.called["gguf"][0])
    writer.add_name(tiny.arch)
    for key, value in write_hyper(found.spec, found.hp, "gguf").items():
        add: Any = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            list: writer.add_array,
        }[type(value)]
        add(key, value)
    roles = logical(tiny, stored)
    for group in groups_for(found.spec, "gguf", roles, found.hp):
        arrays = [roles[key] for key in group.roles]
        for step in reversed(group.binding.steps):
            arrays = step.apply(arrays, found.hp)
        for name, array in zip(group.stored, arrays, strict=True):
            writer.add_tensor(name, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("tiny", CASES, ids=lambda tiny: tiny.id)
def test_transformers_reads_back_every_tensor(tiny: Tiny, tmp_path: Path) -> None:
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    made = make(tiny)
    stored = weights(made.model)
    path = tmp_path / "tiny.gguf"
    write_gguf(tiny, stored, path)
    load: Any = load_gguf_checkpoint
    parsed = load(path, return_tensors=True, model_to_load=made.model)
    assert set(parsed["tensors"]) == set(made.shapes)
    for name, tensor in parsed["tensors"].items():
        assert np.array_equal(np.asarray(tensor).reshape(stored[name].shape), stored[name]), name
    config = parsed["config"]
    assert (
        config["num_hidden_layers" if "num_hidden_layers" in config else "n_layer"]
        == (read(tiny).hp["n_layers"])
    )
    assert config["tie_word_embeddings"] == read(tiny).hp["tied_embeddings"]
