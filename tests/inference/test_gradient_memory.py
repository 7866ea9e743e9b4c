"""What a backward is said to take, against what autograd saves and the system counts."""

from pathlib import Path

import numpy as np
import pytest
import torch

from aprfmt.inference.batch import read_batch
from aprfmt.inference.gradients import batch_gradients as of_batch
from aprfmt.inference.gradients.batch_gradients import batch_gradients
from aprfmt.inference.gradients.documents import documents
from aprfmt.inference.gradients.memory import gradient_memory
from aprfmt.model import open_model
from tests.inference.gradient_judge import write_batch
from tests.models import save_tiny


class Counted:
    """Counts the storages that a real backward saves, less the leaves."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        base = x if x._base is None else x._base
        if not (base.is_leaf and base.requires_grad):
            self.sizes[storage._cdata] = storage.nbytes()
        return x


@pytest.mark.parametrize("name", ["llama", "qwen2_moe", "gpt_oss", "mamba2", "qwen3_5"])
def test_what_is_said_is_what_autograd_saves(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(name, tmp_path / "model")
    write_batch(tmp_path / "batch.npz", False)
    with open_model(tmp_path / "model") as model:
        batch = read_batch(tmp_path / "batch.npz", int(model.hyper["vocab_size"]))
        said = gradient_memory(model, batch)
        layer = gradient_memory(model, batch, activations="layer")
        float32 = gradient_memory(model, batch, dtype="float32")
        monkeypatch.setattr(of_batch, "documents", lambda *a: real(*a)[:1])
        counted = Counted()
        with torch.autograd.graph.saved_tensors_hooks(counted.pack, lambda x: x):
            batch_gradients(model, batch)
    saved = sum(counted.sizes.values())
    assert saved * 0.8 < said.activations < saved * 1.25, (saved, said)
    assert layer.activations < said.activations * 0.75
    assert said.weights == said.gradients == 2 * float32.gradients
    assert said.peak > layer.peak and said.to_json()["peak"] == said.peak


real = documents


def test_a_frozen_base_has_no_gradients_and_points_are_counted(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "model")
    write_batch(tmp_path / "batch.npz", False)
    with open_model(tmp_path / "model") as model:
        batch = read_batch(tmp_path / "batch.npz", int(model.hyper["vocab_size"]))
        one = gradient_memory(model, batch, trained=["model.norm.weight"], points=["L1.ffn_out"])
        width = int(model.hyper["hidden_size"])
        assert one.gradients == 8 * width
        found = batch_gradients(model, batch, points=["L1.ffn_out"])
        both = found.points["L1.ffn_out"].nbytes + found.values["L1.ffn_out"].nbytes
        assert one.points == both == 16 * width * np.load(tmp_path / "batch.npz")["input_ids"].size
