"""Captured activations are no model: what they are, and the commands for them.

Seen red: captures compared as weights ("trained further"), inspected and validated as a model.
"""

import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.cli.run import aprfmt

Write = Any


def outputs(scale: float) -> dict[str, Any]:
    rng = np.random.default_rng(3)
    names = ("model.embed_tokens", "model.layers.0.self_attn", "model.layers.0", "lm_head")
    return {name: (scale * rng.standard_normal((5, 8))).astype(np.float32) for name in names}


def torch_file(arrays: dict[str, Any], path: Path) -> None:
    import torch

    torch.save({name: torch.from_numpy(each) for name, each in arrays.items()}, path)


WRITERS: dict[str, Write] = {
    ".safetensors": save_file,
    ".npz": lambda arrays, path: np.savez(path, **arrays),
    ".pt": torch_file,
}


@pytest.mark.parametrize("suffix", WRITERS)
@pytest.mark.parametrize("command", ["diff", "inspect", "validate", "qa"])
def test_a_command_for_models_names_those_for_captures(
    command: str, suffix: str, tmp_path: Path
) -> None:
    files = [tmp_path / f"{name}{suffix}" for name in "ab"]
    for scale, path in enumerate(files, 1):
        WRITERS[suffix](outputs(scale), path)
    given = files if command == "diff" else files[:1]
    done = aprfmt(command, *given)
    assert done.code == 2 and "holds captured activations" in done.err
    other = str(files[1]) if command == "diff" else "OTHER"
    assert f"aprfmt diagnose {files[0]} {other} --model MODEL compares them" in done.err
    shown = aprfmt(*shlex.split(f"trace --load {files[0]}"))
    assert shown.code == 0 and "L0" in shown.out


@pytest.mark.parametrize("suffix", [".npz", ".pt", ".bin", ""])
@pytest.mark.parametrize("kept", [4, 10, 40, 5000])
@pytest.mark.parametrize(
    "words",
    [("inspect",), ("validate",), ("hash",), ("diagnose", "MODEL"), ("trace", "--load"),
     ("trace", "MODEL", "--ids", "1,2", "--map")],
)  # fmt: skip
def test_an_archive_that_is_cut_holds_no_captures(
    words: tuple[str, ...], kept: int, suffix: str, demo_model: Path, tmp_path: Path
) -> None:
    """Whole, the same file is read, or named as what it is."""
    whole, path = tmp_path / "whole.npz", tmp_path / f"x{suffix}"
    held: dict[str, Any] = {"model.layers.0": np.ones((2, 1500), np.float32), "input_ids": [1, 2]}
    np.savez(whole, **held)
    given = [demo_model if word == "MODEL" else word for word in words]
    for data, says in ((whole.read_bytes()[:kept], True), (whole.read_bytes(), False)):
        path.write_bytes(data)
        done = aprfmt(*given, path)
        assert ("no zip directory at its end; the archive is cut" in done.err) == says, done.err
        assert not says or done.code == 2


def test_a_saved_trace_beside_its_model(demo_model: Path, tmp_path: Path) -> None:
    saved = tmp_path / "run.safetensors"
    made = aprfmt("trace", demo_model, "--payload", "--ids", "5,6,7", "--save", saved)
    assert made.code == 0
    done = aprfmt("diff", demo_model, saved)
    assert done.code == 2 and f"aprfmt diagnose {demo_model} {saved} compares them" in done.err
    assert aprfmt("diagnose", demo_model, saved).code == 0


def test_weights_and_a_named_architecture_are_no_captures(demo_model: Path, tmp_path: Path) -> None:
    assert aprfmt("inspect", demo_model / "model.safetensors").code == 0
    bare = tmp_path / "bare.safetensors"
    save_file({"a": np.zeros((2, 3), np.float32)}, bare)
    assert aprfmt("inspect", bare).code == 0
    save_file(outputs(1.0), bare)
    said = aprfmt("inspect", bare, "--arch", "llama")
    assert "captured" not in said.err


def test_a_header_of_a_whole_model_is_not_searched_for_captures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen red: a file of 900,000 tensors parsed three times, and each name asked for a point."""
    path = tmp_path / "a.safetensors"
    save_file(outputs(1.0), path)
    header = int.from_bytes(path.read_bytes()[:8], "little")
    asked: list[Path] = []

    def is_trace(path: Path) -> bool:
        asked.append(path)
        return True

    monkeypatch.setattr("aprfmt.inference.engines.opening.is_trace", is_trace)
    for longest, held in ((header, True), (header - 1, False)):
        monkeypatch.setattr("aprfmt.cli.captured_activations._LONGEST", longest)
        assert aprfmt("inspect", path).code == (2 if held else 0)
    assert asked == [path]
