"""`aprfmt.step` has what the command has, and answers the same.

Seen red, each alone: `check_gradients` not handed on; an option that two runs have no use for
passed over; texts of renames not read.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import aprfmt
from aprfmt.cli.step import command
from aprfmt.errors import UsageError
from aprfmt.training.options import StepOptions
from tests.cli.run import aprfmt as run
from tests.training.test_batch import made

OF_OUTPUT = {"model", "verbose", "html", "dry_run", "force", "between", "json", "quiet"}


def test_every_option_of_the_command_is_one_of_the_function() -> None:
    names = {each.name for each in command.params} - OF_OUTPUT
    assert names - StepOptions.__annotations__.keys() <= {"allow_http", "debug", "form"}, names
    assert StepOptions.__annotations__.keys() <= names


def saved(folder: Path, change: Any = lambda key, g: (key, g)) -> dict[str, str]:
    """Write gradients after a change of (name, values); return the paths as texts."""
    model, batch, grads = made("qwen2")
    path = folder / "grads.safetensors"
    save_file(dict(change(key, np.ascontiguousarray(g)) for key, g in grads.items()), path)
    return {"model": str(model), "batch": str(batch), "grads": str(path)}


CALLS: dict[str, tuple[dict[str, Any], list[str], int]] = {
    "renames": ({"rename": "mine.=model."}, ["--rename", "mine.=model."], 0),
    "several renames": ({"rename": ["mine.=model."]}, ["--rename", "mine.=model."], 0),
    "accepted": (
        {"accept": ["unread:mine*", "unread:parameter"], "rename": "mine.norm=model.norm"},
        ["--accept", "unread:mine*", "--accept", "unread:parameter",
         "--rename", "mine.norm=model.norm"], 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_the_function_answers_as_the_command(name: str, tmp_path: Path) -> None:
    options, words, code = CALLS[name]
    files = saved(tmp_path, lambda key, g: (key.replace("model.", "mine."), g))
    found = aprfmt.step(files["model"], grads=files["grads"], batch=files["batch"], **options)
    done = run(
        "step", files["model"], "--grads", files["grads"], "--batch", files["batch"], *words,
        "--json",
    )  # fmt: skip
    assert found.exit_code == code, found.pronounced.says
    body = done.json
    assert (body["exit"], body["says"]) == (code, found.pronounced.says)


def test_gradients_are_checked_without_a_backward(tmp_path: Path) -> None:
    files = saved(tmp_path)
    grads = load_file(files["grads"])
    name = "model.norm.weight"
    save_file({name: grads[name] * 2}, files["grads"])
    found = aprfmt.step(
        files["model"], grads=files["grads"], batch=files["batch"], check_gradients=True
    )
    assert found.computed_on is not None and "torch" not in found.computed_on
    assert [cause.cause for cause in found.causes] == ["gradient_factor"]


def test_two_runs_are_compared(tmp_path: Path) -> None:
    files = saved(tmp_path)
    found = aprfmt.step(
        files["model"],
        between=["cpu", "cpu:float32"],
        batch=files["batch"],
        optimizer="adamw:lr=1e-3",
    )
    assert found.exit_code == 0 and [run.update is None for run in found.runs] == [False, False]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "give --batch FILE"),
        ({"grads": "x"}, "leave out --grads"),
        ({"after": "x"}, "leave out --after"),
        ({"check_gradients": True, "dtype": "float32"}, "leave out --check-gradients, --dtype"),
        ({"optimizer_state": "x"}, "leave out --optimizer-state"),
        ({"trained_in": "bfloat16"}, "leave out --trained-in"),
        ({"rename": "a=b"}, "leave out --rename"),
    ],
)
def test_what_two_runs_have_no_use_for_is_refused(options: Any, says: str) -> None:
    model, batch, _ = made("qwen2")
    own = options and {"batch": batch, **options}
    with pytest.raises(UsageError, match=says):
        aprfmt.step(model, between=["cpu", "cpu:float32"], **own)
