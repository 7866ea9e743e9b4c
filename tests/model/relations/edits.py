"""Folders whose tensors stand under other names, and the command that a relation prints, run."""

import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from tests.cli.run import aprfmt


def edited(source: Path, target: Path, edit: Callable[[dict[str, Any]], dict[str, Any]]) -> Path:
    """Return a copy of a folder with one safetensors file whose tensors `edit` gives."""
    shutil.copytree(source, target)
    tensors = edit(load_file(target / "model.safetensors"))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        target / "model.safetensors",
        metadata={"format": "pt"},
    )
    return target


def with_names(source: Path, target: Path, name: Callable[[str], str]) -> Path:
    """Return a copy of a folder with every tensor under the name that `name` gives."""
    return edited(source, target, lambda held: {name(key): held[key] for key in held})


def substituted(pattern: str, new: str) -> Callable[[str], str]:
    """Return what replaces a regular expression at its first place in a name."""
    return lambda name: re.sub(pattern, new, name, count=1)


def remedied(remedy: str, out: Path) -> Path:
    """Run the command a relation prints, with OUT as `out`; return what it wrote."""
    words = [
        str(out) + word[3:] if word.startswith("OUT") else word for word in shlex.split(remedy)
    ]
    assert words[0] == "aprfmt"
    done = aprfmt(*words[1:])
    assert done.code == 0, done.err
    return next((Path(word) for word in words if word.startswith(str(out))), Path(words[-1]))


def same(a: Path, b: Path) -> None:
    """Assert that `diff` and `diagnose` call two models equal."""
    assert aprfmt("diff", a, b, "--only", "tensors", "--only", "hyperparameters").code == 0
    said = aprfmt("diagnose", a, b, "--json").json
    assert said["verdict"] in ("same", "precision"), said["sentence"]
