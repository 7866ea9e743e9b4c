"""Folders, shards, indexes and damaged files as inputs of every command that takes a MODEL."""

from pathlib import Path

from tests.cli.run import aprfmt
from tests.conversion.folders import llama_folder


def test_a_container_only_copy_comes_back(tmp_path: Path) -> None:
    """`--arch none` keeps metadata through every format, also values the format has no type for."""
    source = llama_folder(tmp_path / "source", "BF16")
    assert aprfmt("convert", source, tmp_path / "a.gguf").code == 0
    at = tmp_path / "a.gguf"
    for name in ("b.safetensors", "c.apr", "d.gguf"):
        done = aprfmt("convert", at, tmp_path / name, "--arch", "none")
        assert done.code == 0, done.err
        at = tmp_path / name
    done = aprfmt("diff", tmp_path / "a.gguf", at, "--json")
    assert done.code == 0
    assert done.json["counts"]["SAME_BYTES"] == len(done.json["tensors"])


def test_any_shard_opens_the_whole_folder(tmp_path: Path) -> None:
    source = llama_folder(tmp_path / "source", "BF16")
    assert aprfmt("split", source, tmp_path / "s", "--max-shard-size", "60K").code == 0
    shard = sorted((tmp_path / "s").glob("model-00002-of-*.safetensors"))[0]
    assert aprfmt("convert", shard, tmp_path / "one", "--to", "safetensors").code == 0
    assert aprfmt("diff", source, tmp_path / "one").code == 0
    assert aprfmt("hex", tmp_path / "s", "--json").code == 0
    assert aprfmt("merge", tmp_path / "s", tmp_path / "merged").code == 0


def test_a_damaged_footer_is_said_when_converting(tmp_path: Path) -> None:
    source = llama_folder(tmp_path / "source", "BF16")
    assert aprfmt("import", source, "-o", tmp_path / "m.apr").code == 0
    data = bytearray((tmp_path / "m.apr").read_bytes())
    data[-200] ^= 1
    (tmp_path / "m.apr").write_bytes(data)
    assert "checksum" in aprfmt("convert", tmp_path / "m.apr", tmp_path / "y.gguf").err
    assert "checksum" in aprfmt("inspect", tmp_path / "m.apr", "--verify").err


def test_an_unknown_arch_option_is_an_error_everywhere(tmp_path: Path) -> None:
    source = llama_folder(tmp_path / "source", "BF16")
    for args in (["inspect", source], ["convert", source, tmp_path / "x.apr"]):
        done = aprfmt(*args, "--arch", "bogus")
        assert done.code == 2
        assert "bogus" in done.err
