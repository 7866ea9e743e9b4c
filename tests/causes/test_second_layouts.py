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


# --- a second layout that lacks experts ----------------------------------------------------------


def experts_of(held: Tensors, numbers: tuple[int, ...]) -> Tensors:
    """Return the tensors of single experts with these numbers, of all layers."""
    ends = tuple(f".experts.{number}.{part}_proj.weight" for number in numbers
                 for part in ("gate", "up", "down"))  # fmt: skip
    return {name: x for name, x in held.items() if name.endswith(ends)}


def first_of_stacks(held: Tensors) -> Tensors:
    """Return the stacks of each layer with the first four of six experts."""
    return {name: x[:4].copy() for name, x in stacked_experts(held).items()}


Short = tuple[Callable[[Tensors], Tensors], bool]  # (second layout of a model's, stacks are read)
SHORT: dict[str, Short] = {
    "the last experts": (lambda held: experts_of(held, (0, 1, 2, 3)), True),
    "the first": (lambda held: experts_of(held, (1, 2, 3, 4, 5)), True),
    "one in the middle": (lambda held: experts_of(held, (0, 1, 3, 5)), True),
    "in stacks": (first_of_stacks, False),
}


@pytest.fixture(params=SHORT)
def short(request: Any, tmp_path: Path) -> tuple[Path, Tensors, Tensors]:
    """Return (a model's folder, tensors that hold all of it, a second layout of some experts)."""
    base = tmp_path / "base"
    save_tiny("qwen3_moe", base)
    held = load_file(base / WEIGHTS)
    make, stacks = SHORT[request.param]
    others = {name: x for name, x in held.items() if ".experts." not in name}
    return base, others | stacked_experts(held) if stacks else held, make(held)


@pytest.mark.parametrize("stale", [True, False])
def test_a_second_layout_of_some_experts_is_compared(
    stale: bool, short: tuple[Path, Tensors, Tensors], tmp_path: Path
) -> None:
    base, held, second = short
    second = {name: noisy(x) if stale else x for name, x in second.items()}
    folder = folder_with(base, tmp_path / "both", held | second)
    found = answer("diagnose", base, folder)
    (cause,) = found["causes"]
    assert cause["cause"] == ("stale_layout" if stale else "stored_twice")
    assert set(cause["where"]) == set(second)
    assert "of a layer's experts)" in cause["says"]
    checked = answer("validate", folder)
    levels = {row["check"]: row["level"] for row in checked["findings"]}
    assert levels["second_layouts"] == ("fail" if stale else "warning")
    assert not {"completeness", "unexpected"} & set(levels)


def test_one_stale_expert_of_some_is_seen(tmp_path: Path) -> None:
    base = tmp_path / "base"
    save_tiny("qwen3_moe", base)
    held = load_file(base / WEIGHTS)
    others = {name: x for name, x in held.items() if ".experts." not in name}
    second = experts_of(held, (1, 3, 5))
    name = "model.layers.1.mlp.experts.5.up_proj.weight"
    folder = folder_with(
        base, tmp_path / "both", others | stacked_experts(held) | second | {name: -second[name]}
    )
    stale, copies = sorted(answer("diagnose", base, folder)["causes"], key=lambda one: one["cause"])
    assert (stale["cause"], copies["cause"]) == ("stale_layout", "stored_twice")
    assert name in stale["where"] and len(stale["where"]) == 3  # one parameter, three experts of it


def test_experts_that_no_layout_has_are_missing(tmp_path: Path) -> None:
    base = tmp_path / "base"
    save_tiny("qwen3_moe", base)
    held = load_file(base / WEIGHTS)
    kept = {name: x for name, x in held.items() if ".experts." not in name}
    folder = folder_with(base, tmp_path / "some", kept | experts_of(held, (0, 1, 2, 3)))
    checked = answer("validate", folder)
    assert "completeness" in {row["check"] for row in checked["findings"]}
    short = folder_with(base, tmp_path / "short", kept | first_of_stacks(held))
    assert answer("validate", short)["outcome"] == "FAIL"
