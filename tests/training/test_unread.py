"""What a step's files hold that nothing reads is in the verdict's own list, by the ledger's words.

Seen red, each alone: arrays of the batch as a note alone, and exit 0 beside them; a state's arrays
that are no moments passed over; tensors without a role passed over; gradients of unknown names left
out of the list.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from aprfmt.training.device_comparison import compare_runs
from aprfmt.training.report import StepReport
from aprfmt.training.step import explain_step
from tests.training.steps import LR, WD, adamw_all, save, save_arrays, torch_steps, weights
from tests.training.test_batch import made

PLANTED = {f"planted.{i}.odd_thing": np.full((3, 2), i, np.float32) for i in range(50)}


def held(folder: Path, grads: bool = True, batch: bool = True) -> dict[str, Path]:
    """Write a right step's files into a folder: model, gradients and batch."""
    model, rows, values = made("qwen2")
    save_file(values, folder / "grads.safetensors")
    save_arrays(folder / "batch.npz", dict(np.load(rows)))
    return {"model": model, "grads": folder / "grads.safetensors", "batch": folder / "batch.npz"}


def test_two_of_all_names_unknown_leave_it_open(tmp_path: Path) -> None:
    files = held(tmp_path)
    grads = load_file(files["grads"])
    lost = list(grads)[3:5]
    for number, name in enumerate(lost):
        grads[f"strange_{number}"] = grads.pop(name)
    save_file(grads, files["grads"])

    def report(*accept: str) -> StepReport:
        """Return what is said of the file."""
        return explain_step(
            files["model"], grads=[files["grads"]], batch=files["batch"], accept=accept
        )

    found = report()
    said = found.pronounced
    assert (said.exit, said.word) == (2, "not decided")
    assert f"{len(grads) - 2} of {len(grads)} tensors; could not be compared" in said.says
    rows = {(row.kind, row.name) for row in said.not_compared}
    open_rows = {row.key for row in found.tensors if row.names[0] in lost}
    assert rows == {("gradient", "strange_0"), ("gradient", "strange_1")} | {
        ("parameter", key) for key in open_rows
    }
    assert report("unread:strange_*").exit_code == 2  # their parameters are open still
    accepted = report("unread:strange_*", *(f"unread:{key}" for key in open_rows)).pronounced
    assert accepted.exit == 0 and "accepted, not compared" in accepted.says


def in_gradients(folder: Path) -> StepReport:
    """Plant arrays among the gradients."""
    files = held(folder)
    save_file(load_file(files["grads"]) | PLANTED, files["grads"])
    return explain_step(files["model"], grads=[files["grads"]], batch=files["batch"])


def in_batch(folder: Path) -> StepReport:
    """Plant arrays in the batch."""
    files = held(folder)
    save_arrays(files["batch"], dict(np.load(files["batch"])) | PLANTED)
    return explain_step(files["model"], grads=[files["grads"]], batch=files["batch"])


def in_model(folder: Path) -> StepReport:
    """Plant tensors in the checkpoint before the step, none is given of after it."""
    files = held(folder)
    model = folder / "model"
    model.mkdir()
    for each in files["model"].iterdir():
        (model / each.name).write_bytes(each.read_bytes())
    save_file(load_file(model / "model.safetensors") | PLANTED, model / "model.safetensors")
    return explain_step(model, grads=[files["grads"]], batch=files["batch"])


def in_state(folder: Path) -> StepReport:
    """Plant arrays in the state of the optimizer."""
    (after,), state = torch_steps(adamw_all)
    before = save(folder / "before", weights(), "F32")
    return explain_step(
        before, after=save(folder / "after", after, "F32"),
        optimizer=f"adamw:lr={LR},wd={WD},decay_on=all,step=1",
        optimizer_state=save_arrays(folder / "state.npz", state | PLANTED),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("plant", "kind", "code"),
    [
        (in_gradients, "gradient", 2),
        (in_batch, "batch array", 2),
        (in_model, "tensor", 2),
        (in_state, "state array", 2),
    ],
)
def test_what_is_planted_is_listed(
    plant: Callable[[Path], StepReport], kind: str, code: int, tmp_path: Path
) -> None:
    report = plant(tmp_path)
    said = report.pronounced
    assert said.exit == code, said.says
    if kind.endswith("array"):
        accepted = replace(report, accept=("unread:planted.*",)).pronounced
        assert accepted.exit == 0 and f"accepted, not compared: 50 {kind}s" in accepted.says
    assert {row.name for row in said.not_compared if row.kind == kind} == PLANTED.keys()
    assert f"50 {kind}s: " in said.says


def test_two_runs_list_the_batchs_arrays(tmp_path: Path) -> None:
    files = held(tmp_path)
    save_arrays(files["batch"], dict(np.load(files["batch"])) | PLANTED)
    report = compare_runs(files["model"], files["batch"], ["cpu", "cpu:float32"])
    assert report.exit_code == 2 and "50 batch arrays" in report.pronounced.says
    body = report.to_json()
    assert set(body["between"]["unread"]) == PLANTED.keys()
    assert body["pronounced"]["exit"] == 2 and len(body["pronounced"]["not_compared"]) >= 50
