"""What an agent is asked: files, a situation of the skill, and what is right.

Every task is made of the model that ships with the package. `fault` writes the files into a folder;
`sound` says whether a file that was mended is the right one, by libraries that are not ours. The
pairs on which real agents are judged are not in this repository.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

import aprfmt
from tests.conftest import ROOT

DEMO = ROOT / "fixtures" / "demo"
# What one has; the words stand in a comment of SKILL.md's table of commands.
Situation = Literal[
    "B answers badly", "rounding of the coarser", "one file alone", "made of that base"
]
Fault = Callable[[Path], tuple[Path | None, Path]]  # writes files; returns A and B


@dataclass(frozen=True)
class Task:
    """One task. `fault` returns A (None where there is one file only) and B.

    `says` are words that the first three lines must hold, "" where nothing is wrong; `mended`
    whether a command of the answer can put B right.
    """

    name: str
    situation: Situation
    fault: Fault
    says: tuple[str, ...] = ()
    mended: bool = False

    @property
    def control(self) -> bool:
        """Whether nothing is wrong."""
        return not self.says


def right(folder: Path) -> Path:
    """Write the demo model as a GGUF: what B should be."""
    path = folder / "right.gguf"
    if not path.exists():
        aprfmt.convert(DEMO, path)
    return path


def edited(**keys: Any) -> Fault:
    """Return a fault: a GGUF with other values of keys (`__` stands for a dot)."""

    def make(folder: Path) -> tuple[Path | None, Path]:
        values = {key.replace("__", "."): value for key, value in keys.items()}
        aprfmt.convert(right(folder), folder / "b.gguf", metadata=values)
        return DEMO, folder / "b.gguf"

    return make


def patched(name: str, at: int, data: bytes) -> Fault:
    """Return a fault: other bytes inside one tensor of the GGUF."""

    def make(folder: Path) -> tuple[Path | None, Path]:
        from gguf import GGUFReader

        path = folder / "b.gguf"
        shutil.copy(right(folder), path)
        tensor = next(one for one in GGUFReader(path).tensors if one.name == name)
        with path.open("r+b") as file:
            file.seek(tensor.data_offset + at)
            file.write(data)
        return DEMO, path

    return make


def retagged(folder: Path) -> tuple[Path | None, Path]:
    """BF16 bytes under the tag F16."""
    copy = folder / "b"
    shutil.copytree(DEMO, copy)
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes().replace(b'"dtype":"BF16"', b'"dtype":"F16" '))
    return DEMO, copy


def reordered(edit: Callable[[dict[str, Any]], None]) -> Fault:
    """Return a fault: a Hugging Face folder with tensors changed as whole arrays."""

    def make(folder: Path) -> tuple[Path | None, Path]:
        from safetensors.torch import load_file, save_file

        copy = folder / "b"
        shutil.copytree(DEMO, copy)
        tensors = load_file(copy / "model.safetensors")
        edit(tensors)
        save_file({k: v.contiguous() for k, v in tensors.items()}, copy / "model.safetensors",
                  metadata={"format": "pt"})  # fmt: skip
        return DEMO, copy

    return make


def exchange(one: str, other: str) -> Callable[[dict[str, Any]], None]:
    """Return an edit that exchanges two tensors."""

    def edit(tensors: dict[str, Any]) -> None:
        tensors[one], tensors[other] = tensors[other].clone(), tensors[one].clone()

    return edit


def scaled(name: str, factor: float) -> Callable[[dict[str, Any]], None]:
    """Return an edit that multiplies one tensor."""

    def edit(tensors: dict[str, Any]) -> None:
        tensors[name] = tensors[name] * factor

    return edit


def cut(folder: Path) -> tuple[Path | None, Path]:
    """The first half of the file."""
    data = right(folder).read_bytes()
    (folder / "b.gguf").write_bytes(data[: len(data) // 2])
    return None, folder / "b.gguf"


def alone(fault: Fault) -> Fault:
    """Return a fault of which one has the broken file only."""
    return lambda folder: (None, fault(folder)[1])


def quantized(scheme: str, base: Path | None = None, like: str = "") -> Fault:
    """Return a quantized copy; `like` is what its base lacks: another model's weights."""

    def make(folder: Path) -> tuple[Path | None, Path]:
        source = DEMO
        if like:
            _, source = reordered(scaled(like, 1.02))(folder)
        aprfmt.convert(source, folder / "q.gguf", quantize=scheme)
        return DEMO, folder / "q.gguf"

    return make


def converted(folder: Path) -> tuple[Path | None, Path]:
    """A sound conversion."""
    return DEMO, right(folder)


Q, K = (f"model.layers.1.self_attn.{x}_proj.weight" for x in "qk")
UP, GATE = (f"model.layers.2.mlp.{x}_proj.weight" for x in ("up", "gate"))
NAN = np.float32("nan").tobytes()
TASKS = (
    Task("rope base lost", "B answers badly", edited(qwen2__rope__freq_base=10000.0),
         ("rope_theta", "qwen2.rope.freq_base"), mended=True),
    Task("epsilon of another world", "B answers badly",
         edited(qwen2__attention__layer_norm_rms_epsilon=0.01), ("norm_eps",), mended=True),
    Task("one bit flipped", "B answers badly", patched("blk.1.ffn_down.weight", 4001, b"\x47"),
         ("blk.1.ffn_down.weight",), mended=True),
    Task("BF16 tagged F16", "B answers badly", retagged, ("dtype_mislabel",)),
    Task("gate and up exchanged", "B answers badly", reordered(exchange(UP, GATE)),
         ("layers.2.mlp",)),
    Task("one tensor scaled", "B answers badly", reordered(scaled(Q, 0.5)), (Q,)),
    Task("another chat template", "B answers badly",
         edited(tokenizer__chat_template="{{ messages[0].content }}"), ("chat_template",)),
    Task("generation ends elsewhere", "B answers badly",
         edited(tokenizer__ggml__eos_token_id=5), ("special_ids",)),
    Task("sound conversion", "B answers badly", converted),
    Task("sound quantization", "rounding of the coarser", quantized("Q4_K_M")),
    Task("half a file", "one file alone", cut, ("b.gguf", "few")),
    Task("a NaN", "one file alone", alone(patched("blk.0.attn_norm.weight", 8, NAN)),
         ("blk.0.attn_norm.weight",)),
    Task("its own base", "made of that base", quantized("Q5_K_M")),
    Task("another base", "made of that base", quantized("Q5_K_M", like=Q),
         ("blk.1.attn_q.weight",)),
)  # fmt: skip


def sound(task: Task, folder: Path, path: Path) -> bool:
    """Return whether a file is what B should have been: every key and every tensor."""
    if path.suffix != ".gguf":
        return _same_folder(path, DEMO)
    from gguf import GGUFReader

    mine, wanted = GGUFReader(path), GGUFReader(right(folder))
    tensors = {one.name: one.data.tobytes() for one in mine.tensors}
    if tensors != {one.name: one.data.tobytes() for one in wanted.tensors}:
        return False
    keys = [key for key in wanted.fields if not key.startswith(("GGUF.", "aprfmt.", "general."))]
    return all(
        key in mine.fields and mine.fields[key].contents() == wanted.fields[key].contents()
        for key in keys
    )


def _same_folder(path: Path, other: Path) -> bool:
    """Return whether two Hugging Face folders have the same tensors and configuration."""
    import torch
    from safetensors.torch import load_file

    mine, wanted = (load_file(one / "model.safetensors") for one in (path, other))
    config, right_config = (json.loads((one / "config.json").read_text()) for one in (path, other))
    return bool(config == right_config) and all(
        mine[name].dtype == held.dtype and torch.equal(mine[name], held)
        for name, held in wanted.items()
    )
