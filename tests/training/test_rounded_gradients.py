"""Gradients of recurrent states in bfloat16: right ones are not called wrong, wrong ones are seen.

Seen red: what one pass in bfloat16 shows taken for all that rounding does; rounding measured on the
CPU alone.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from aprfmt.inference.gradients import batch_gradients as passes
from aprfmt.model import open_model
from aprfmt.training import reference_gradients
from aprfmt.training.report import StepReport
from aprfmt.training.step import explain_step
from tests.inference.gradient_judge import write_batch
from tests.models import save_tiny, tiny

Change = Callable[[str, Any], Any]


def explained(name: str, seed: int, change: Change, folder: Path) -> StepReport:
    """Explain transformers' gradients of a tiny model in bfloat16, after a change by name."""
    model: Any = tiny(name, seed=seed).to(torch.bfloat16)
    model.save_pretrained(folder / "model")
    ids, _, labels = write_batch(folder / "batch.npz", False)
    logits = model(torch.tensor(ids)).logits[:, :-1].flatten(0, 1)
    wanted = torch.tensor(labels)[:, 1:].flatten()
    loss: Any = torch.nn.functional.cross_entropy(logits.float(), wanted)
    loss.backward()
    grads = {n: change(n, p.grad).contiguous() for n, p in model.named_parameters()}
    save_file(grads, folder / "grads.safetensors")
    return explain_step(
        folder / "model", batch=folder / "batch.npz", grads=[folder / "grads.safetensors"]
    )


@pytest.mark.parametrize(
    ("name", "seed"),
    [("qwen3_5", 0), ("qwen3_5", 3), ("mamba2", 2), ("olmo_hybrid", 1), ("falcon_h1", 2)],
)
def test_right_gradients_are_not_called_wrong(name: str, seed: int, tmp_path: Path) -> None:
    report = explained(name, seed, lambda name, g: g, tmp_path)
    assert report.exit_code != 1 and not report.causes
    open_ = [row for row in report.tensors if row.verdict != "agrees"]
    assert all("the trainer's rounding" in row.why for row in open_)


@pytest.mark.parametrize(
    ("name", "part", "role"),
    [("qwen3_5", "in_proj_a", "ssm_alpha.weight"), ("mamba2", "A_log", "ssm_a.weight")],
)
def test_wrong_gradients_are_seen(name: str, part: str, role: str, tmp_path: Path) -> None:
    """Rows of heads in the reverse order, and the other sign."""

    def change(key: str, g: Any) -> Any:
        wrong = -g if g.ndim == 1 else g.flip(0)
        return wrong if part in key else g

    report = explained(name, 0, change, tmp_path)
    wrong = {row.key for row in report.tensors if row.verdict == "differs"}
    assert report.exit_code == 1 and wrong
    assert all(key.endswith(role) for key in wrong)


def test_rounding_is_measured_on_any_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No GPU is asked for: its passes run on the CPU here, and say where they should."""
    save_tiny("llama", tmp_path / "model")
    write_batch(tmp_path / "batch.npz", False)
    ran = []
    right = passes.batch_gradients

    def run(*given: Any, device: str, dtype: str, **named: Any) -> Any:
        ran.append((device, dtype))
        return right(*given, device="cpu", dtype=dtype, **named)

    monkeypatch.setattr(passes, "batch_gradients", run)
    with open_model(tmp_path / "model") as model:
        computed, _ = reference_gradients.compute_gradients(
            model, tmp_path / "batch.npz", device="cuda:0", trained_in="bfloat16"
        )
        key = "L1.ffn_down.weight"
        usual = computed.rounding(key)
        assert usual is not None and ran == [("cuda:0", "float64"), ("cuda:0", "bfloat16")]
        assert computed.measured_rounding(key, usual) is not None
        assert ran[2:] == [("cuda:0", "bfloat16")], "one pass covers the usual rounding"
        most = computed.measured_rounding(key, 2.5 * usual)
        assert most is not None and most > usual
        assert {*ran[2:]} == {("cuda:0", "bfloat16")}
