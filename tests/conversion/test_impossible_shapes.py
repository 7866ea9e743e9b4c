"""Shapes that the configuration excludes are written by no command without a word.

Seen red: the shapes not asked before a plan is made; a plain copy not asked; a placeholder of an
unknown architecture that passes; an inspection that counts nothing.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import aprfmt
from aprfmt.errors import ConversionError
from tests.cli.run import aprfmt as command
from tests.conversion.folders import llama_folder, tensors_of, write_mixed

DOWN = "model.layers.0.mlp.down_proj.weight"
Row = tuple[str, tuple[int, ...], bytes]
KINDS: dict[str, tuple[Callable[[Row], Row], str]] = {
    "nothing gathered": (lambda row: (row[0], (0,), b""), "a placeholder without values"),
    "a scalar": (lambda row: (row[0], (1,), row[2][:2]), "a placeholder without values"),
    "a part": (lambda row: (row[0], (512,), row[2][:1024]), "one rank's part of flat parameters"),
    "joined axes": (lambda row: (row[0], (4096,), row[2]), r"store it in the shape \[64, 64\]"),
    "half the rows": (lambda row: (row[0], (32, 64), row[2][:4096]), "correct the configuration"),
}


def changed(folder: Path, change: Callable[[Row], Row], name: str = DOWN) -> Path:
    """Write a llama folder in BF16 of which one tensor is changed."""
    llama_folder(folder, "BF16")
    rows = tensors_of(folder)
    rows[name] = change(rows[name])
    write_mixed(folder / "model.safetensors", rows)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_a_conversion_of_impossible_shapes_is_refused(kind: str, tmp_path: Path) -> None:
    change, says = KINDS[kind]
    source = changed(tmp_path / "s", change)
    for target, scheme in (("m.gguf", None), ("q.gguf", "Q8_0"), ("m.apr", None)):
        with pytest.raises(ConversionError, match=says) as caught:
            aprfmt.convert(source, tmp_path / target, quantize=scheme)
        assert "L0.ffn_down.weight is [" in str(caught.value)
        assert "expected [64, 64]" in str(caught.value)
        assert not (tmp_path / target).exists()
    copied = aprfmt.convert(source, tmp_path / "kept.safetensors", arch="none")
    assert copied.verified is not None


@pytest.mark.parametrize("words", [
    ("merge", "s", "m.safetensors"),
    ("split", "s", "x.safetensors", "--max-shard-size", "20k"),
    ("import", "s", "-o", "m.apr"),
    ("convert", "s", "t", "--to", "safetensors"),
])  # fmt: skip
def test_a_plain_copy_of_impossible_shapes_is_refused(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    changed(tmp_path / "s", KINDS["nothing gathered"][0])
    done = command(*words)
    assert done.code == 2 and "convert --arch none" in done.err and "ZeRO stage 3" in done.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s"]
    shutil.rmtree("s")
    llama_folder(tmp_path / "s", "BF16")
    assert command(*words).code == 0


def test_a_change_of_settings_is_written_with_a_warning(tmp_path: Path) -> None:
    source = changed(tmp_path / "s", KINDS["nothing gathered"][0])
    setting = "config.json:max_position_embeddings=256"
    done = command("set", source, "-o", tmp_path / "t", setting)
    assert done.code == 0 and "L0.ffn_down.weight: shape [0]" in done.err, done.err
    llama_folder(tmp_path / "sound", "BF16")
    done = command("set", tmp_path / "sound", "-o", tmp_path / "u", setting)
    assert done.code == 0 and "shape" not in done.err


def test_a_size_that_is_wrong_can_still_be_set(tmp_path: Path) -> None:
    """The command that mends a size is not refused for what it mends."""
    source = llama_folder(tmp_path / "s", "BF16", ffn=96)
    told = json.loads((source / "config.json").read_text()) | {"num_key_value_heads": 4}
    (source / "config.json").write_text(json.dumps(told))
    setting = "config.json:num_key_value_heads=2"
    assert command("set", source, "-o", tmp_path / "t", setting).code == 0
    assert command("convert", tmp_path / "t", tmp_path / "m.gguf").code == 0


def test_a_repaired_file_of_impossible_shapes_is_warned_of(tmp_path: Path) -> None:
    for name, kind in (("bad", KINDS["nothing gathered"][0]), ("good", lambda row: row)):
        whole = changed(tmp_path / name, kind) / "model.safetensors"
        cut = tmp_path / name / "cut.safetensors"
        cut.write_bytes(whole.read_bytes()[:-64])
        out = tmp_path / f"{name}-out" / "model.safetensors"
        out.parent.mkdir()
        shutil.copy(tmp_path / name / "config.json", out.parent)
        done = command("repair", cut, "--from", whole, "-o", out)
        assert done.code == 0 and ("shape" in done.err) == (name == "bad"), done.err


def test_inspect_counts_impossible_shapes(tmp_path: Path) -> None:
    source = changed(tmp_path / "s", KINDS["nothing gathered"][0])
    found = command("inspect", source, "--json").json
    row = {"role": "L0.ffn_down.weight", "shape": [0], "expected": [64, 64]}
    assert found["roles"]["misshapen"] == [row]
    assert "1 of 21 tensors have impossible shapes" in found["summary"]["line"]
    llama_folder(tmp_path / "sound", "BF16")
    assert "impossible shapes" not in command("inspect", tmp_path / "sound").out


@pytest.mark.parametrize("prefix", ["", "module.", "student."])
def test_weights_without_values_fail_where_no_architecture_is_known(
    prefix: str, tmp_path: Path
) -> None:
    rows = tensors_of(llama_folder(tmp_path / "s", "BF16"))
    for name in list(rows):
        rows[f"{prefix}{name}"] = rows.pop(name)
    write_mixed(tmp_path / "sound.safetensors", rows)
    shapes = {row.name: row for row in aprfmt.validate(tmp_path / "sound.safetensors").checks}
    assert shapes["shapes"].outcome == "NOT_RUN"
    rows[f"{prefix}{DOWN}"] = ("BF16", (0,), b"")
    rows[f"{prefix}buffer"] = ("BF16", (0,), b"")  # an empty buffer is no lost weight
    write_mixed(tmp_path / "x.safetensors", rows)
    found = {row.name: row for row in aprfmt.validate(tmp_path / "x.safetensors").checks}
    assert found["shapes"].outcome == "FAIL", found["shapes"]
    assert found["shapes"].where == f"{prefix}{DOWN}", found["shapes"]
