"""The form for agents of `logits`, `step` and `eval`: the next command, and each fault once.

Seen red: no next command although one says more; one thing in two FAIL lines without a name.
"""

import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import aprfmt
from tests.cli.run import Done
from tests.cli.run import aprfmt as command

UP = "model.layers.1.mlp.up_proj.weight"
IDS = ("--ids", "1,2,3")
AGENT = ("--format", "agent")
HUMAN = ("--format", "human")


def next_of(done: Done) -> list[str]:
    return [line.removeprefix("next: ") for line in done.out.splitlines() if line[:6] == "next: "]


def changed(demo: Path, folder: Path, change: Any) -> Path:
    """Return a copy of the demo in float32 whose tensors `change` has changed."""
    shutil.copytree(demo, folder)
    with aprfmt.open(demo) as model:
        rows = {name: np.array(model[name].numpy(), np.float32) for name in model}
    save_file(change(rows), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def broken(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the demo with one tensor of NaN."""
    there = tmp_path_factory.mktemp("next") / "nan"
    return changed(demo_model, there, lambda rows: {**rows, UP: np.full_like(rows[UP], np.nan)})


def test_logits_that_are_no_numbers_are_traced(broken: Path, demo_model: Path) -> None:
    assert next_of(command("logits", demo_model, *IDS, *AGENT)) == []
    (line,) = next_of(command("logits", broken, *IDS, *AGENT))
    done = command(*shlex.split(line)[1:])
    assert done.code == 1 and "L1.ffn_up" in done.out


@pytest.mark.parametrize("points", ["all", "logits"])
def test_logits_unlike_a_saved_trace_are_diagnosed(
    points: str, broken: Path, demo_model: Path, tmp_path: Path
) -> None:
    """Seen red: "KL mean 0" of a row that holds no number."""
    saved = tmp_path / "t.safetensors"
    asked = ("--payload", "--points", points, *IDS, "-o", saved)
    assert command("trace", demo_model, *asked).code == 0
    assert next_of(command("logits", demo_model, *IDS, "--reference", saved, *AGENT)) == []
    done = command("logits", broken, *IDS, "--reference", saved, *AGENT)
    (line,) = next_of(done)
    assert done.code == 1 and "KL mean inf max inf" in done.out
    assert command(*shlex.split(line)[1:]).code == 1


@pytest.mark.parametrize("fault", [False, True])
def test_a_step_that_differs_is_looked_at(fault: bool, demo_model: Path, tmp_path: Path) -> None:
    before = changed(demo_model, tmp_path / "before", dict)
    rows = load_file(before / "model.safetensors")
    rng = np.random.default_rng(0)
    grads = {k: rng.normal(size=v.shape).astype(np.float32) / 100 for k, v in rows.items()}
    save_file(grads, tmp_path / "grads.safetensors")
    rate = {name: np.float32(0.2 if fault and name == UP else 0.1) for name in rows}
    moved = {name: rows[name] - rate[name] * grads[name] for name in rows}
    after = changed(demo_model, tmp_path / "after", lambda _: moved)
    done = command("step", before, "--after", after, "--grads", tmp_path / "grads.safetensors",
                   "--optimizer", "sgd:lr=0.1", *AGENT)  # fmt: skip
    found = next_of(done)
    assert (done.code, len(found)) == (int(fault), int(fault)), done.out
    for line in found:
        shown = command(*shlex.split(line)[1:])
        assert shown.code == 1 and "1 DIFFERENT" in shown.out and UP in shown.out


@pytest.mark.parametrize("grads", ["of half the names", "wrong"])
def test_a_step_without_later_weights_leads_on(
    grads: str, demo_model: Path, tmp_path: Path
) -> None:
    """Seen red: a step that is not decided, or whose gradients alone differ, said no command."""
    before = changed(demo_model, tmp_path / "before", dict)
    rows = load_file(before / "model.safetensors")
    half = list(rows)[::2] if grads == "of half the names" else list(rows)
    save_file({k: np.zeros_like(rows[k], np.float32) for k in half}, tmp_path / "g.safetensors")
    np.savez(tmp_path / "batch.npz", input_ids=[[1, 2, 3, 4]], labels=[[1, 2, 3, 4]])
    more = ("--batch", tmp_path / "batch.npz") if grads == "wrong" else ()
    words = ["step", str(before), "--grads", str(tmp_path / "g.safetensors"), *map(str, more)]
    done = command(*words, *AGENT)
    (line,) = next_of(done)
    assert done.code == (1 if grads == "wrong" else 2)
    assert shlex.split(line) == ["aprfmt", *words, *AGENT, "-v"]
    again = command(*shlex.split(line)[1:])
    assert again.code == done.code and len(again.out.splitlines()) > len(rows)
    (line,) = next_of(again)  # everything is said: what is known of the model
    assert shlex.split(line)[1:] == ["inspect", str(before), "--account"]


def test_two_models_that_predict_otherwise_lead_on(demo_model: Path, tmp_path: Path) -> None:
    """Seen red: `eval --against` said no command at exit 0, however far the two are apart."""
    other = tmp_path / "q.gguf"
    assert command("quantize", demo_model, other, "--type", "Q4_K_M", "--quiet").code == 0
    for form in (AGENT, HUMAN, (*HUMAN, "-v")):
        done = command(
            "eval", other, "--ids", "1417,362,258,1168,1529,457,72", "--against", demo_model, *form
        )
        (line,) = next_of(done)
        assert shlex.split(line) == ["aprfmt", "diagnose", str(demo_model), str(other)]
        same = command(
            "eval", other, "--ids", "1417,362,258,1168,1529,457,72", "--against", other, *form
        )
        assert not next_of(same)


@pytest.mark.parametrize("name", ["logits", "eval"])
def test_a_pass_of_a_model_with_an_unread_tensor_leads_on(
    name: str, demo_model: Path, tmp_path: Path
) -> None:
    """Seen red: a PASS of what may be another model's, without a command."""
    from tests.conversion.folders import tensors_of, write_mixed

    model, text = tmp_path / "m", tmp_path / "text.txt"
    shutil.copytree(demo_model, model)
    rows = {**tensors_of(model), "planted.w": ("F32", (3,), bytes(12))}
    write_mixed(model / "model.safetensors", rows)
    text.write_text("What is 2+2?")
    words = ("--text", text) if name == "eval" else IDS
    for form in (AGENT, HUMAN):
        done = command(name, model, *words, *form)
        (line,) = next_of(done)
        assert done.code == 2 and "planted.w" in done.out
        assert shlex.split(line)[:2] == ["aprfmt", "inspect"]
        assert "planted.w" in command(*shlex.split(line)[1:]).out
        taken = command(name, model, *words, *form, "--accept", "unread:planted.w")
        assert taken.code == 0 and not next_of(taken)


def test_each_fault_of_an_evaluation_is_said_once(broken: Path, demo_model: Path) -> None:
    """Of two models by name; of a text without a label, whichever the model."""
    done = command("eval", demo_model, "--ids", "1", "--against", broken, *AGENT)
    assert (done.code, done.out.count("loss-measured")) == (2, 1)
    done = command("eval", broken, "--ids", "1,2,3,4", "--against", broken, *AGENT)
    lines = [line for line in done.out.splitlines() if " FAIL " in line]
    assert done.code == 1 and len(lines) == 2
    assert all(str(broken) in line for line in lines)
    assert (
        "same top token             0.00 %"
        in command("eval", broken, "--ids", "1,2,3,4", "--against", broken, "-v", *HUMAN).out
    )
