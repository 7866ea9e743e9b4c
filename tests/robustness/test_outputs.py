"""What a conversion says it will write, and what it will not write over."""

import json
from pathlib import Path
from typing import Any

import pytest

import aprfmt
from aprfmt.errors import OutputError
from tests.cli.run import aprfmt as command
from tests.conversion.folders import llama_folder

TARGETS: dict[str, dict[str, Any]] = {
    "a.gguf": {},
    "b.apr": {},
    "c": {"to": "safetensors"},
    "d.safetensors": {},
    "e.gguf": {"quantize": "Q8_0", "alignment": 4096},
    "f.gguf": {"max_shard_size": 60_000},
    "g.apr": {"max_shard_size": 60_000},
    "h": {"to": "safetensors", "max_shard_size": 60_000},
    "i": {"to": "safetensors", "quantize": "NF4-double"},
    "j.apr": {"quantize": "Q4_0"},
}


@pytest.mark.parametrize("target", TARGETS)
def test_a_dry_run_gives_the_exact_bytes_of_every_file(target: str, tmp_path: Path) -> None:
    source = llama_folder(tmp_path / "source", "BF16")
    dst = tmp_path / "out" / target
    dst.parent.mkdir()
    planned = aprfmt.convert(source, dst, dry_run=True, **TARGETS[target])
    assert list(dst.parent.iterdir()) == []
    written = aprfmt.convert(source, dst, **TARGETS[target])
    on_disk = {path: path.stat().st_size for path in dst.parent.rglob("*") if path.is_file()}
    assert dict(planned.sizes) == dict(written.sizes) == on_disk


def test_a_dry_run_of_a_rewrite_is_exact_as_well(tmp_path: Path) -> None:
    source = llama_folder(tmp_path / "source", "BF16")
    for name in ("a.gguf", "a.apr"):
        aprfmt.convert(source, tmp_path / name)
        planned = aprfmt.convert(tmp_path / name, tmp_path / f"again-{name}", dry_run=True)
        assert list(planned.sizes.values()) == [(tmp_path / name).stat().st_size]


def test_the_command_prints_the_bytes(tmp_path: Path) -> None:
    source = llama_folder(tmp_path / "source", "BF16")
    dst = tmp_path / "q.gguf"
    done = command("quantize", source, dst, "--type", "Q8_0", "--dry-run")
    body = command("quantize", source, dst, "--type", "Q8_0", "--json").json
    assert f"({dst.stat().st_size} bytes in 1 files)" in done.out
    assert body["file_bytes"] == dst.stat().st_size


# --- texts beside a single file ---------------------------------------------------------------


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return llama_folder(tmp_path / "source", "BF16")


FOREIGN = '{"model_type": "other"}'


@pytest.mark.parametrize("force", [False, True])
def test_a_foreign_config_is_left_alone(force: bool, source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "there"
    folder.mkdir()
    (folder / "config.json").write_text(FOREIGN)
    (folder / "other.gguf").write_bytes(b"weights it may belong to")
    with pytest.raises(OutputError, match=r"config\.json: is there already .*separate folder"):
        aprfmt.convert(source, folder / "x.safetensors", force=force)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "other.gguf"]
    assert (folder / "config.json").read_text() == FOREIGN


def test_a_config_without_any_weights_is_foreign_too(source: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(FOREIGN)
    done = command("convert", source, tmp_path / "x.safetensors", "--force")
    assert done.code == 2 and done.err.count("\n") == 1
    assert (tmp_path / "config.json").read_text() == FOREIGN
    assert not (tmp_path / "x.safetensors").exists()


def test_weights_and_their_config_are_replaced_together(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "there"
    folder.mkdir()
    target = folder / "x.safetensors"
    aprfmt.convert(source, target)
    other = llama_folder(tmp_path / "other", "BF16", hidden=32)
    with pytest.raises(OutputError):
        aprfmt.convert(other, target)
    aprfmt.convert(other, target, force=True)
    assert json.loads((folder / "config.json").read_text())["hidden_size"] == 32
    assert aprfmt.diff(other, target).equal


def test_the_same_config_may_be_there(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "there"
    folder.mkdir()
    (folder / "config.json").write_text((source / "config.json").read_text())
    aprfmt.convert(source, folder / "x.safetensors")
    assert aprfmt.diff(source, folder / "x.safetensors").equal


def test_shards_and_their_config_are_replaced_together(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "there"
    folder.mkdir()
    for _ in range(2):
        aprfmt.convert(source, folder / "x.safetensors", max_shard_size=60_000, force=True)
    assert aprfmt.diff(source, folder / "x.safetensors.index.json").equal
