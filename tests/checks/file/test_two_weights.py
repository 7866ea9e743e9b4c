"""Weights in one file beside an index of other files: programs load different ones.

Seen red: the single file not looked for; equal bytes called other weights; the index's own single
file, or files that no loader takes first, called a rival; a rival called "nothing reads".
"""

import shutil
from pathlib import Path
from typing import Any

import pytest

import aprfmt
from aprfmt.base.outcome import Check
from tests.cli.run import aprfmt as command
from tests.conversion.folders import llama_folder

INDEX = "model.safetensors.index.json"


def shards(folder: Path) -> Check:
    """Return the answer of the check `shards` on a folder or file."""
    return next(row for row in aprfmt.validate(folder).checks if row.name == "shards")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A llama folder in shards."""
    source = llama_folder(tmp_path / "one", "BF16")
    aprfmt.convert(source, tmp_path / "m", to="safetensors", max_shard_size=40_000)
    assert (tmp_path / "m" / INDEX).is_file() and shards(tmp_path / "m").outcome == "PASS"
    return tmp_path / "m"


@pytest.mark.parametrize("kind", ["other values", "other encoding", "fewer tensors"])
def test_other_weights_in_one_file_beside_an_index_fail(kind: str, sharded: Path) -> None:
    others: dict[str, dict[str, Any]] = {
        "other values": {"seed": 1}, "other encoding": {}, "fewer tensors": {"layers": 1},
    }  # fmt: skip
    encoding = "F16" if kind == "other encoding" else "BF16"
    made = llama_folder(sharded.parent / "other", encoding, **others[kind])
    shutil.copy(made / "model.safetensors", sharded)
    for path in (sharded, sharded / "model.safetensors"):
        found = shards(path)
        assert found.outcome == "FAIL" and "other weights than this model's" in found.found
        assert "transformers loads model.safetensors and no shard" in found.found
    said = command("inspect", sharded).out.partition("\n")[0]
    assert "transformers loads it and no shard of the index" in said and "nothing reads" not in said
    done = command("validate", sharded)
    assert done.code == 1 and "are missing" not in done.out and "is in no table" not in done.out


def test_the_same_weights_a_second_time_are_a_warning(sharded: Path) -> None:
    shutil.copy(sharded.parent / "one" / "model.safetensors", sharded)
    for path in (sharded, sharded / "model.safetensors"):
        found = shards(path)
        assert found.outcome == "PASS" and "1 warning" in found.found, found


def test_a_pickled_single_file_beside_a_pickled_index_fails(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    source = llama_folder(tmp_path / "s", "F32")
    from safetensors.torch import load_file

    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    torch.save(tensors, source / "pytorch_model-00001-of-00001.bin")
    names = ",".join(f'"{name}": "pytorch_model-00001-of-00001.bin"' for name in tensors)
    (source / "pytorch_model.bin.index.json").write_text(f'{{"weight_map": {{{names}}}}}')
    assert shards(source).outcome == "PASS"
    torch.save({name: one + 1 for name, one in tensors.items()}, source / "pytorch_model.bin")
    assert "transformers loads pytorch_model.bin" in shards(source).found


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "consolidated.safetensors", "m.gguf", "adapter_model.safetensors"]
)
def test_files_that_no_loader_takes_before_the_index_are_no_rivals(
    name: str, sharded: Path
) -> None:
    shutil.copy(sharded.parent / "one" / "model.safetensors", sharded / name)
    assert shards(sharded).outcome == "PASS" and "warning" not in shards(sharded).found


def test_an_index_of_the_single_file_is_no_rival(tmp_path: Path) -> None:
    source = llama_folder(tmp_path / "s", "BF16")
    aprfmt.convert(source, tmp_path / "m", to="safetensors")
    with aprfmt.open(source) as model:
        names = ",".join(f'"{name}": "model.safetensors"' for name in model)
    (source / INDEX).write_text(f'{{"weight_map": {{{names}}}}}')
    for path in (source, source / "model.safetensors"):
        assert shards(path).outcome != "FAIL" and "transformers" not in shards(path).found
