"""Differences of a batch's loss along factors of an adapter, against autograd's gradients.

Seen red, each alone: the scale left out; `b` not taken by the role's rows; what DoRA divides by
taken from the changed factors; one role of joined projections left as it was.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from aprfmt.adapters.trained_pairs import trained_pairs
from aprfmt.inference.batch import read_batch
from aprfmt.inference.gradients.adapter_differences import AdapterLoss
from aprfmt.inference.gradients.batch_gradients import batch_gradients
from aprfmt.model import open_model
from aprfmt.model.adapter_reading import read_adapter
from aprfmt.training.memory import estimate_step
from aprfmt.training.report import StepReport
from aprfmt.training.step import explain_step
from tests.adapters.test_trained_pairs import FILE, written
from tests.inference.gradient_judge import write_batch
from tests.models import save_tiny

LLAMA = "model.layers.1.self_attn"
BASES = [
    ("llama", {f"{LLAMA}.q_proj": (64, 48), "model.layers.0.mlp.down_proj": (48, 72)}),
    ("phi3", {f"{LLAMA}.qkv_proj": (128, 64), "model.layers.0.mlp.gate_up_proj": (144, 64)}),
    ("gpt2", {"transformer.h.1.mlp.c_fc": (192, 48)}),
    ("mamba2", {"backbone.layers.1.mixer.out_proj": (45, 90)}),
]


def files(folder: Path, name: str, modules: dict[str, tuple[int, int]], dora: bool) -> Path:
    """Write a base, an adapter of some modules and a batch; return the adapter's folder."""
    save_tiny(name, folder / "base")
    write_batch(folder / "batch.npz", True)
    turned = name == "gpt2"
    adapter = written(folder / "adapter", name, modules, use_dora=dora, fan_in_fan_out=turned)
    if dora:
        tensors = load_file(adapter / FILE)
        for module, (out, _) in modules.items():
            key = f"base_model.model.{module}.lora_magnitude_vector"
            tensors[key] = np.linspace(0.5, 1.5, out, dtype=np.float32)
        save_file(tensors, adapter / FILE)
    return adapter


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize(("name", "modules"), BASES, ids=[name for name, _ in BASES])
def test_differences_are_autograds_gradients(
    name: str, modules: dict[str, tuple[int, int]], dora: bool, tmp_path: Path
) -> None:
    opened, adapter = read_adapter(files(tmp_path, name, modules, dora))
    rng = np.random.default_rng(1)
    with opened, open_model(tmp_path / "base") as model:
        batch = read_batch(tmp_path / "batch.npz", int(model.hyper["vocab_size"]))
        pairs = trained_pairs(adapter, model)
        right = batch_gradients(model, batch, pairs=pairs)
        loss = AdapterLoss(model, batch, pairs)
        assert loss.loss == pytest.approx(right.loss, rel=1e-12)
        assert {*right.factors} == {key for pair in pairs for key in pair.names}
        for key in right.factors:
            gradient = right.gradient(key)
            line = rng.standard_normal(gradient.shape)
            off = loss.along(key, line) - float(np.vdot(gradient, line))
            assert abs(off) <= 1e-6 * float(np.linalg.norm(gradient)), key
        loss.close()


def checked(folder: Path, change: Any) -> StepReport:
    """Check changed gradients of an adapter by differences."""
    adapter = files(folder, *BASES[0], True)
    opened, read = read_adapter(adapter)
    with opened, open_model(folder / "base") as model:
        batch = read_batch(folder / "batch.npz", int(model.hyper["vocab_size"]))
        made = batch_gradients(model, batch, pairs=trained_pairs(read, model)).adapter
    grads = {name: change(name, g).astype(np.float32) for name, g in made.items()}
    save_file(grads, folder / "grads.safetensors")
    return explain_step(
        folder / "base",
        adapter=adapter,
        batch=folder / "batch.npz",
        grads=[folder / "grads.safetensors"],
        differences=True,
    )


@pytest.mark.parametrize(
    ("part", "change", "cause"),
    [
        ("", lambda g: g, ""),
        ("lora_A", lambda g: 3 * g, "gradient_factor"),
        ("q_proj.lora_B", lambda g: 0 * g, "gradient_zero"),
        ("magnitude", lambda g: -g, "gradient_sign"),
        ("lora_B", lambda g: g[::-1].copy(), ""),
    ],
)
def test_gradients_of_factors_are_judged(
    part: str, change: Any, cause: str, tmp_path: Path
) -> None:
    report = checked(tmp_path, lambda name, g: change(g) if part and part in name else g)
    wrong = {row.key for row in report.tensors if row.verdict == "differs"}
    named = {name for row in report.tensors for name in row.names if part and part in name}
    assert named == {name for row in report.tensors for name in row.names if row.key in wrong}
    assert {one.cause for one in report.causes} == ({cause} if wrong else set())
    assert {row.verdict for row in report.tensors if row.key not in wrong} <= {"agrees"}


def test_memory_has_the_weights_that_pairs_are_merged_into(tmp_path: Path) -> None:
    adapter = files(tmp_path, *BASES[0], False)
    given: dict[str, Any] = {"batch": tmp_path / "batch.npz", "differences": True}
    plain = estimate_step(tmp_path / "base", **given).forward_bytes
    beside = estimate_step(tmp_path / "base", adapter=adapter, **given).forward_bytes
    assert plain is not None and beside is not None
    assert beside - plain == 8 * (64 * 48 + 48 * 72)
