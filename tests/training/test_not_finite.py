"""NaN and infinity in the files of a step: one line of the tensor, or a cause that counts them.

Seen red, each alone: no check before the backward, before differences of the loss, before a
comparison of runs; no check of a piece before the step; a cause
without a count.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from aprfmt.errors import FormatError, UsageError
from aprfmt.training.device_comparison import compare_runs
from aprfmt.training.step import explain_step
from tests.training import adapters
from tests.training.steps import (
    LR,
    Q1,
    WD,
    adamw_all,
    gradients,
    save,
    save_arrays,
    stepped_optimizer,
    weights,
)  # fmt: skip
from tests.training.test_batch import made

RECIPE = f"adamw:lr={LR},wd={WD},step=1"
BAD = pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
PLACES = ((0, 3), (-1, -1))
TABLE = "model.embed_tokens.weight"


def planted(values: np.ndarray, bad: float) -> np.ndarray:
    """Return a copy of a matrix with two numbers replaced."""
    found = values.astype(np.float32).copy()
    for place in PLACES:
        found[place] = bad
    return found


@BAD
@pytest.mark.parametrize("way", ["grads", "check", "update", "between"])
def test_weights_of_before_the_step_are_refused_beside_a_batch(
    way: str, bad: float, tmp_path: Path
) -> None:
    model, batch, grads = made("qwen2")
    folder = tmp_path / "model"
    folder.mkdir()
    for each in model.iterdir():
        (folder / each.name).write_bytes(each.read_bytes())
    held = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    held[name] = torch.from_numpy(planted(held[name].numpy(), bad))
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    save_arrays(tmp_path / "grads.npz", grads)
    given: dict[str, Any] = {"batch": batch}
    if way == "update":
        given |= {"after": model, "optimizer": RECIPE}
    elif way != "between":
        given |= {"grads": [tmp_path / "grads.npz"], "differences": way == "check"}
    with pytest.raises(UsageError) as caught:
        if way == "between":
            compare_runs(folder, batch, ["cpu", "cpu:bfloat16"])
        else:
            explain_step(folder, **given)
    text = str(caught.value)
    assert f"{name}: 2 of its {held[name].numel()} numbers are NaN or infinite" in text
    assert "\n" not in text


@pytest.mark.parametrize("way", ["grads", "check", "between"])
def test_rows_that_no_token_of_the_batch_reads_may_be_nan(way: str, tmp_path: Path) -> None:
    """Nothing of the batch is computed from them. Seen red: all weights decoded once more."""
    model, batch, grads = made("llama")
    folder = tmp_path / "model"
    folder.mkdir()
    for each in model.iterdir():
        (folder / each.name).write_bytes(each.read_bytes())
    held = load_file(folder / "model.safetensors")
    with np.load(batch) as file:
        unread = sorted({*range(held[TABLE].shape[0])} - {*file["input_ids"].reshape(-1).tolist()})
    held[TABLE][unread] = float("nan")
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    save_arrays(tmp_path / "grads.npz", grads)
    if way == "between":
        assert compare_runs(folder, batch, ["cpu", "cpu:float64"]).exit_code == 0
        return
    given: dict[str, Any] = {"batch": batch, "grads": [tmp_path / "grads.npz"]}
    if way == "check":  # the table is moved as a whole
        with pytest.raises(UsageError, match=f"{TABLE}: before the step .* are NaN"):
            explain_step(folder, **given, differences=True)
        return
    report = explain_step(folder, **given)
    assert {row.verdict for row in report.tensors} == {"agrees"}, report.causes


@BAD
@pytest.mark.parametrize("moved", [True, False])
@pytest.mark.parametrize("given", [True, False])
def test_weights_of_before_the_step_are_refused_without_a_batch(
    given: bool, moved: bool, bad: float, tmp_path: Path
) -> None:
    values = {**weights(), Q1: planted(weights()[Q1], bad)}
    after = {name: w - LR * np.sign(gradients(1)[name]) for name, w in values.items()}
    if not moved:
        after[Q1] = values[Q1]
    grads = [save_arrays(tmp_path / "grads.npz", gradients(1))] if given else []
    with pytest.raises(UsageError, match=f"{Q1}: before the step 2 of its"):
        explain_step(
            save(tmp_path / "before", values, "F32"),
            after=save(tmp_path / "after", after, "F32"),
            grads=grads,
            optimizer=f"adam:lr={LR},step=1",
        )


@BAD
def test_weights_of_after_the_step_and_gradients_are_counted(bad: float, tmp_path: Path) -> None:
    (right,), _ = stepped_optimizer(adamw_all)
    before = save(tmp_path / "before", weights(), "F32")
    grads = save_arrays(tmp_path / "grads.npz", gradients(1))
    after = save(tmp_path / "after", {**right, Q1: planted(right[Q1], bad)}, "F32")
    (cause,) = explain_step(before, after=after, grads=[grads], optimizer=RECIPE).causes
    assert (cause.cause, cause.roles) == ("nonfinite", ("L1.attn_q.weight",))
    assert "the weight after the step holds 2 NaN or infinite numbers" in cause.says
    wrong = {**gradients(1), Q1: planted(gradients(1)[Q1], bad)}
    given = save_arrays(tmp_path / "wrong.npz", wrong)
    after = save(tmp_path / "right", right, "F32")
    (cause,) = explain_step(before, after=after, grads=[given], optimizer=RECIPE).causes
    assert (cause.cause, cause.roles) == ("nonfinite", ("L1.attn_q.weight",))
    assert "the gradient holds 2 NaN or infinite numbers" in cause.says
    assert explain_step(before, after=after, grads=[grads], optimizer=RECIPE).exit_code == 0


@BAD
@pytest.mark.parametrize("between", [True, False])
def test_factors_of_an_adapter_are_refused(between: bool, bad: float, tmp_path: Path) -> None:
    values = adapters.adapter(False)
    name = [*values][1]
    folder = adapters.write(tmp_path / "adapter", {**values, name: planted(values[name], bad)})
    base = save(tmp_path / "base", weights(), "F32")
    ids = np.arange(12, dtype=np.int64).reshape(2, 6)
    batch = save_arrays(tmp_path / "batch.npz", {"input_ids": ids})
    grads = save_arrays(tmp_path / "grads.npz", adapters.gradients(values))
    with pytest.raises(FormatError, match="holds 2 NaN or infinite numbers") as caught:
        if between:
            compare_runs(base, batch, ["cpu", "cpu:bfloat16"], adapter=folder)
        else:
            explain_step(base, adapter=folder, batch=batch, grads=[grads])
    assert name in str(caught.value)
