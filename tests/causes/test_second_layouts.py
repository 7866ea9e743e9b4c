"""Files that store parameters twice: in a stack and singly, joined and apart, packed and plain."""

import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.cli.run import aprfmt
from tests.models import save_tiny

Tensors = dict[str, np.ndarray]
WEIGHTS = "model.safetensors"
WIDE = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "intermediate_size": 128}  # fmt: skip


def noisy(x: np.ndarray) -> np.ndarray:
    """Return other values of the same size: those of an older state."""
    return (x + 0.02 * np.random.default_rng(3).normal(size=x.shape)).astype(x.dtype)


def stacked_experts(held: Tensors) -> Tensors:
    """Return the experts of each layer in two stacks, as transformers 5 stores them."""
    found: Tensors = {}
    for layer in range(3):
        prefix = f"model.layers.{layer}.mlp.experts."
        gate, up, down = (
            [held[f"{prefix}{expert}.{part}_proj.weight"] for expert in range(6)]
            for part in ("gate", "up", "down")
        )
        found[f"{prefix}gate_up_proj"] = np.concatenate([np.stack(gate), np.stack(up)], axis=1)
        found[f"{prefix}down_proj"] = np.stack(down)
    return found


def joined_heads(held: Tensors) -> Tensors:
    """Return query, key and value of each layer in one matrix."""
    return {
        f"model.layers.{layer}.self_attn.qkv_proj.weight": np.concatenate(
            [held[f"model.layers.{layer}.self_attn.{part}_proj.weight"] for part in "qkv"]
        )
        for layer in range(3)
    }


def folder_with(base: Path, folder: Path, tensors: Tensors) -> Path:
    """Return a copy of a model's folder with other tensors."""
    shutil.copytree(base, folder)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


@pytest.fixture(params=("experts", "heads", "packed"))
def twice(request: Any, tmp_path: Path) -> tuple[Path, Tensors, Tensors]:
    """Return (a model's folder, its tensors, tensors that store some of its parameters again)."""
    base = tmp_path / "base"
    if request.param == "experts":
        save_tiny("qwen3_moe", base)
        held = load_file(base / WEIGHTS)
        return base, held, stacked_experts(held)
    sizes: dict[str, Any] = {} if request.param == "heads" else WIDE
    save_tiny("llama", base, **sizes)
    plain = load_file(base / WEIGHTS)
    if request.param == "heads":
        return base, plain, joined_heads(plain)
    packed = tmp_path / "packed"
    aprfmt("quantize", base, packed, "--type", "COMPRESSED-INT4-g32")
    held = load_file(packed / WEIGHTS)
    return packed, held, {name: x for name, x in plain.items() if name not in held}


def answer(*arguments: object) -> Any:
    """Return the JSON of a command."""
    return aprfmt(*arguments, "--json").json


def test_other_values_in_a_second_layout_fail_and_are_named(
    twice: tuple[Path, Tensors, Tensors], tmp_path: Path
) -> None:
    base, held, again = twice
    stale = {name: noisy(x) for name, x in again.items()}
    folder = folder_with(base, tmp_path / "stale", held | stale)
    checked = answer("validate", folder)
    (failed,) = {row["check"] for row in checked["findings"] if row["level"] == "fail"}
    assert (checked["outcome"], failed) == ("FAIL", "second_layouts")
    assert set(answer("inspect", folder)["stored_again"]) == set(again)
    for command in ("diff", "diagnose"):
        found = answer(command, base, folder)
        (cause,) = found["causes"]
        assert (cause["cause"], cause["level"]) == ("stale_layout", "confirmed"), command
        assert set(cause["where"]) == set(again), command
        assert found["pronounced"]["exit"] == 1, command
    assert "hold A's values, which are read here" in aprfmt("diff", base, folder).out


def test_the_same_values_in_a_second_layout_are_a_warning(
    twice: tuple[Path, Tensors, Tensors], tmp_path: Path
) -> None:
    base, held, again = twice
    folder = folder_with(base, tmp_path / "twice", held | again)
    checked = answer("validate", folder)
    levels = {row["check"]: row["level"] for row in checked["findings"]}
    assert (checked["pronounced"]["exit"], levels["second_layouts"]) == (0, "warning")
    assert "unexpected" not in levels
    for command in ("diff", "diagnose"):
        (cause,) = answer(command, base, folder)["causes"]
        assert cause["cause"] == "stored_twice", command
    assert answer("diff", folder, folder)["pronounced"]["exit"] == 0


def test_a_stale_layout_that_is_read_is_not_called_the_other_sides(tmp_path: Path) -> None:
    base = tmp_path / "base"
    save_tiny("qwen3_moe", base)
    held = load_file(base / WEIGHTS)
    older = {name: noisy(x) if ".experts." in name else x for name, x in held.items()}
    folder = folder_with(base, tmp_path / "older", older | stacked_experts(held))
    said = aprfmt("diagnose", base, folder).out
    assert "bug: stale_layout" in said
    assert "hold A's values, which are not read here" in said
    assert "--drop" not in said


def test_the_command_leaves_the_stale_layout_out(tmp_path: Path) -> None:
    base = tmp_path / "base"
    save_tiny("qwen3_moe", base)
    held = load_file(base / WEIGHTS)
    stale = {name: noisy(x) for name, x in stacked_experts(held).items()}
    folder = folder_with(base, tmp_path / "stale", held | stale)
    (cause,) = answer("diff", base, folder)["causes"]
    words = shlex.split(cause["remedy"]["command"])[1:]
    words[2] = str(tmp_path / words[2])
    aprfmt(*words)
    assert answer("diff", base, words[2])["pronounced"]["exit"] == 0


def rounded(x: np.ndarray) -> np.ndarray:
    """Return the values in bfloat16."""
    return x.astype(ml_dtypes.bfloat16)


def untouched(x: np.ndarray) -> np.ndarray:
    """Return the values as they are."""
    return x


@pytest.mark.parametrize("change", [rounded, untouched])
def test_one_layout_alone_and_a_rounded_copy_are_no_fault(
    change: Callable[[np.ndarray], np.ndarray], tmp_path: Path
) -> None:
    base = tmp_path / "base"
    save_tiny("qwen3_moe", base)
    held = load_file(base / WEIGHTS)
    stacks = {name: change(x) for name, x in stacked_experts(held).items()}
    others = {name: x for name, x in held.items() if ".experts." not in name}
    alone = folder_with(base, tmp_path / "alone", others | stacks)
    both = folder_with(base, tmp_path / "both", held | stacks)
    assert not answer("inspect", alone)["stored_again"]
    assert "second_layouts" not in {row["check"] for row in answer("validate", alone)["findings"]}
    assert not {"stale_layout", "stored_twice"} & {
        row["cause"] for row in answer("diff", base, alone)["causes"]
    }
    levels = {row["check"]: row["level"] for row in answer("validate", both)["findings"]}
    assert levels["second_layouts"] == "warning"
