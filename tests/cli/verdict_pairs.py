"""Small pairs of models and files that differ in one kind of thing each, or in nothing."""

import json
import shutil
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.conversion.folders import tensors_of, write_mixed
from tests.tokenizer.fake import write_gguf

Change = Callable[[Path], object]
UP = "model.layers.1.mlp.up_proj.weight"


def keys_of(name: str, **values: Any) -> Change:
    """Return a change that gives keys of a folder's JSON file other values."""

    def change(folder: Path) -> None:
        path = folder / name
        held = json.loads(path.read_text("utf-8"))
        path.write_text(json.dumps({**held, **values}), "utf-8")

    return change


def exchange_tokens(folder: Path) -> None:
    """Give two tokens of a folder's tokenizer each other's id."""
    path = folder / "tokenizer.json"
    held = json.loads(path.read_text("utf-8"))
    pieces = held["model"]["vocab"]
    one, other = sorted(pieces, key=pieces.__getitem__)[300:302]
    pieces[one], pieces[other] = pieces[other], pieces[one]
    path.write_text(json.dumps(held), "utf-8")


def tensors_changed(change: Callable[[dict[str, Any]], object]) -> Change:
    """Return a change of a folder's tensors, {name: (type, shape, bytes)}."""

    def changed(folder: Path) -> None:
        rows = dict(tensors_of(folder))
        change(rows)
        write_mixed(folder / "model.safetensors", rows)

    return changed


def zero(rows: dict[str, Any]) -> None:
    """Set all bytes of one matrix to zero."""
    kind, shape, data = rows[UP]
    rows[UP] = (kind, shape, bytes(len(data)))


def prefix(rows: dict[str, Any]) -> None:
    """Put a prefix before the name of every tensor."""
    for name in list(rows):
        rows[f"module.{name}"] = rows.pop(name)


OF_A_FOLDER: Mapping[str, Change] = {
    "nothing": lambda folder: None,
    "a key that changes the pass": keys_of("config.json", rms_norm_eps=0.01),
    "a key that nothing reads": keys_of("config.json", nobodys_key=1),
    "a chat template": lambda folder: (folder / "chat_template.jinja").write_text("{{ 1 }}"),
    "generation settings": keys_of("generation_config.json", temperature=0.123),
    "no generation settings": lambda folder: (folder / "generation_config.json").unlink(),
    "two tokens": exchange_tokens,
    "no tokenizer": lambda folder: (folder / "tokenizer.json").unlink(),
    "a tokenizer that cannot be read": lambda folder: (folder / "tokenizer.json").write_text("{"),
    "a file that nothing reads": lambda folder: (folder / "notes.bin").write_bytes(b"x"),
    "a matrix": tensors_changed(zero),
    "a lost tensor": tensors_changed(lambda rows: rows.pop(UP)),
    "a tensor of no role": tensors_changed(lambda rows: rows.update({"x.y": rows[UP]})),
    "names": tensors_changed(prefix),
    "an architecture of no table": keys_of(
        "config.json", model_type="nobodys", architectures=["NobodysForCausalLM"]
    ),
}


def without_tensors(path: Path, keys: Mapping[str, str]) -> Path:
    """Write a safetensors file that holds text metadata and no tensor; return its path."""
    header = json.dumps({"__metadata__": dict(keys)} if keys else {}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    return path


def keys_alone(path: Path, keys: Mapping[str, Any]) -> Path:
    """Write a GGUF of keys without a tensor; return its path."""
    return write_gguf(path, {"general.architecture": "llama", **keys})


WITHOUT_TENSORS: Mapping[str, tuple[Any, str, Mapping[str, Any], Mapping[str, Any]]] = {
    "no tensor, one key otherwise": (without_tensors, ".safetensors", {"x": "1"}, {"x": "2"}),
    "no tensor, one key more": (
        without_tensors, ".safetensors", {"x": "1"}, {"x": "1", "y": "2"},
    ),
    "no tensor, the same keys": (without_tensors, ".safetensors", {"x": "1"}, {"x": "1"}),
    "no tensor, no key": (without_tensors, ".safetensors", {}, {}),
    "keys of a GGUF": (keys_alone, ".gguf", {"some.key": 1}, {"some.key": 2}),
    "the same keys of a GGUF": (keys_alone, ".gguf", {"some.key": 1}, {"some.key": 1}),
}  # fmt: skip
PAIRS = (*OF_A_FOLDER, *WITHOUT_TENSORS)


def make_pair(name: str, demo: Path, folder: Path) -> tuple[Path, Path]:
    """Make the pair of a name in an empty folder; return the paths of A and B.

    `demo` is the folder of the model that both sides are copies of, where the pair is of models.
    """
    if name in WITHOUT_TENSORS:
        write, ending, *both = WITHOUT_TENSORS[name]
        a, b = (
            write(folder / f"{side}{ending}", keys) for side, keys in zip("ab", both, strict=True)
        )
        return a, b
    a, b = folder / "a", folder / "b"
    for side in (a, b):
        shutil.copytree(demo, side, ignore=shutil.ignore_patterns("__*", "golden.json"))
    OF_A_FOLDER[name](b)
    return a, b
