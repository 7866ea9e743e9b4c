"""Fifty things that no table lists, planted into a model of each container."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

import aprfmt
from aprfmt.base.protocols import OrderedSink, TensorInfo
from aprfmt.formats import open_sink
from aprfmt.model import open_model
from tests.conversion.folders import llama_folder, tensors_of, write_mixed

MANY = 50
Plant = Callable[[Path, int], None]  # changes a model in place; the number makes it another one


def _tensor(seed: int) -> tuple[str, tuple[int, ...], bytes]:
    return "F32", (8,), (np.arange(8, dtype="<f4") + seed).astype("<f4").tobytes()


# --- a folder -------------------------------------------------------------------------------------


def _folder(path: Path) -> Path:
    return llama_folder(path, "F32", hidden=32, layers=1)


def folder_tensors(path: Path, seed: int) -> None:
    """Add tensors of no role."""
    rows = dict(tensors_of(path))
    rows |= {f"planted.{i}.weight": _tensor(seed) for i in range(MANY)}
    write_mixed(path / "model.safetensors", rows)


def folder_config(path: Path, seed: int) -> None:
    """Add keys to config.json, half of them below others."""
    config = json.loads((path / "config.json").read_text())
    config |= {f"planted_{i}": seed for i in range(MANY // 2)}
    config["planted"] = {"deep": {f"key_{i}": [seed] for i in range(MANY - MANY // 2)}}
    (path / "config.json").write_text(json.dumps(config))


def folder_files(path: Path, seed: int) -> None:
    """Add files: weights, numbers, and JSON."""
    for i in range(MANY):
        name = ("model-planted-%02d.safetensors", "planted-%02d.bin", "planted-%02d.json")[i % 3]
        (path / (name % i)).write_bytes(bytes([seed]) * 9)


def folder_generation(path: Path, seed: int) -> None:
    """Add a generation config of keys that transformers does not have."""
    keys = {f"planted_{i}": seed for i in range(MANY)}
    (path / "generation_config.json").write_text(json.dumps(keys))


def folder_tokenizer(path: Path, seed: int) -> None:
    """Add a tokenizer_config.json of keys that no tokenizer reads."""
    keys = {f"planted_{i}": seed for i in range(MANY)}
    (path / "tokenizer_config.json").write_text(json.dumps(keys))


def _folder_metadata(path: Path, seed: int) -> None:
    _rewritten(path / "model.safetensors", {f"planted.{i}": f"{seed}" for i in range(MANY)}, {})


# --- a single file -------------------------------------------------------------------------------


def _rewritten(
    path: Path,
    keys: Mapping[str, object],
    tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]],
) -> None:
    """Write a file anew by its own sink, with more keys and more tensors."""
    new = path.with_name("new" + path.suffix)
    with open_model(path) as model:
        source = model.source
        infos = [tensor.info for tensor in source.tensors.values()]
        infos += [
            TensorInfo(name, shape, kind, 0, len(data), None)
            for name, (kind, shape, data) in tensors.items()
        ]
        with open_sink(new, source.format) as sink:
            infos = sink.order(infos) if isinstance(sink, OrderedSink) else infos
            sink.plan({**model.typed, **keys}, infos)
            for name in (info.name for info in infos):
                stored = source.tensors.get(name)
                data = memoryview(tensors[name][2]) if stored is None else stored.raw()
                sink.write(name, [data])
    shutil.move(new, path)


def file_keys(path: Path, seed: int) -> None:
    """Add keys that no reader of the format knows, one namespace of the format's own among them."""
    names = [("planted.%d", "general.planted_%d", "tokenizer.planted_%d")[i % 3] % i
             for i in range(MANY)]  # fmt: skip
    _rewritten(path, dict.fromkeys(names, f"{seed}"), {})


def file_embedded(path: Path, seed: int) -> None:
    """Embed files that no loader knows, beside those that a conversion embeds."""
    with open_model(path) as model:
        files = json.loads(str(model.metadata.get("aprfmt.files", "{}")))
    files |= {f"planted-{i:02}.bin": f"{seed}" for i in range(MANY)}
    _rewritten(path, {"aprfmt.files": json.dumps(files)}, {})


def file_tensors(path: Path, seed: int) -> None:
    """Add tensors of no role."""
    _rewritten(path, {}, {f"planted.{i}.weight": _tensor(seed) for i in range(MANY)})


def _pytorch(path: Path) -> Path:
    """Return a folder whose weights are a file of torch.save."""
    torch = pytest.importorskip("torch", reason="NOT-RUN: torch is not installed")
    folder = _folder(path)
    rows = tensors_of(folder)
    saved = {
        name: torch.frombuffer(bytearray(data), dtype=torch.float32).reshape(shape).clone()
        for name, (_, shape, data) in rows.items()
    }
    (folder / "model.safetensors").unlink()
    torch.save(saved, folder / "pytorch_model.bin")
    return folder


def _planted_pytorch(path: Path, more: Mapping[str, object]) -> None:
    torch = pytest.importorskip("torch", reason="NOT-RUN: torch is not installed")
    weights = path / "pytorch_model.bin"
    torch.save({**torch.load(weights), **more}, weights)


def pytorch_tensors(path: Path, seed: int) -> None:
    """Add tensors of no role."""
    torch = pytest.importorskip("torch", reason="NOT-RUN: torch is not installed")
    _planted_pytorch(path, {f"planted.{i}.weight": torch.arange(8.0) + seed for i in range(MANY)})


def pytorch_keys(path: Path, seed: int) -> None:
    """Add values that are no tensors."""
    _planted_pytorch(path, {f"planted_{i}": seed for i in range(MANY)})


def _converted(kind: str) -> Callable[[Path], Path]:
    def make(path: Path) -> Path:
        target = path.with_suffix(f".{kind}")
        aprfmt.convert(_folder(path.with_name("of-" + path.name)), target)
        return target

    return make


def _single(path: Path) -> Path:
    """Return one safetensors file whose folder is not a model's."""
    folder = _folder(path)
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    return folder / "weights.safetensors"


# What is planted: the container, and the kind of the fifty items.
CASES: Mapping[str, tuple[Callable[[Path], Path], Plant, str]] = {
    "folder tensors": (_folder, folder_tensors, "tensor"),
    "folder config": (_folder, folder_config, "config key"),
    "folder files": (_folder, folder_files, "file"),
    "folder generation": (_folder, folder_generation, "generation setting"),
    "folder tokenizer": (_folder, folder_tokenizer, "tokenizer part"),
    "folder metadata": (_folder, _folder_metadata, "metadata key"),
    "safetensors keys": (_single, file_keys, "metadata key"),
    "safetensors tensors": (_single, file_tensors, "tensor"),
    "gguf keys": (_converted("gguf"), file_keys, "metadata key"),
    "gguf embedded files": (_converted("gguf"), file_embedded, "file"),
    "gguf tensors": (_converted("gguf"), file_tensors, "tensor"),
    "apr keys": (_converted("apr"), file_keys, "metadata key"),
    "apr tensors": (_converted("apr"), file_tensors, "tensor"),
    "pytorch keys": (_pytorch, pytorch_keys, "metadata key"),
    "pytorch tensors": (_pytorch, pytorch_tensors, "tensor"),
}
