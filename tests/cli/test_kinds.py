"""Things are called what they are, each with the next command; `-` is stdin.

Seen red: an adapter resolved as a llama that lacks all its tensors, a projector "near clip", a web
page "starts with 3c 21", `https:/host` "no such file", a hub cache that "holds no model".
"""

import io
import json
import shutil
import struct
import sys
from pathlib import Path
from types import SimpleNamespace
from zipfile import ZipFile

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.cli.run import aprfmt

A = np.ones((4, 8), np.float32)


def peft(folder: Path) -> Path:
    """Write a folder as PEFT writes an adapter."""
    folder.mkdir()
    base = "base_model.model.model.layers.0.self_attn.q_proj"
    save_file(
        {f"{base}.lora_A.weight": A, f"{base}.lora_B.weight": A.T.copy()},
        folder / "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 16, "base_model_name_or_path": "org/base"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def written(path: Path, arch: str, kind: str | None, *names: str, tokens: int = 0) -> Path:
    """Write a GGUF by gguf-py."""
    writer = gguf.GGUFWriter(path, arch)
    if kind is not None:
        writer.add_type(kind)
    if tokens:
        writer.add_tokenizer_model("llama")
        writer.add_token_list([f"t{i}" for i in range(tokens)])
    for name in names:
        writer.add_tensor(name, A.T.copy() if name.endswith(".lora_b") else A)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def legacy(path: Path) -> Path:
    """Write an importance matrix in llama.cpp's older form."""
    name = b"blk.0.ffn_up.weight"
    body = struct.pack("<ii", 1, len(name)) + name + struct.pack("<ii", 3, 8)
    path.write_bytes(body + np.ones(8, "<f4").tobytes())
    return path


@pytest.fixture(scope="module")
def things(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("kinds")
    return {
        "peft": peft(folder / "peft"),
        "lora": written(folder / "lora.gguf", "llama", "adapter", "blk.0.attn_q.weight.lora_a",
                        "blk.0.attn_q.weight.lora_b"),
        "imatrix": written(folder / "imatrix.gguf", "llama", "imatrix",
                           "blk.0.ffn_up.weight.in_sum2", "blk.0.ffn_up.weight.counts"),
        "mmproj": written(folder / "mmproj.gguf", "clip", "mmproj", "v.patch_embd.weight"),
        "vocabulary": written(folder / "vocab.gguf", "llama", None, tokens=7),
    }  # fmt: skip


SAID = {
    "peft": ("adapter", "a LoRA adapter of rank 4, alpha 16 for org/base", "merge it"),
    "lora": ("adapter", "a LoRA adapter of rank 4", "merge it"),
    "imatrix": ("imatrix", "an importance matrix (imatrix) for 1 weights", "quantize"),
    "mmproj": ("projector", "a multimodal projector (mmproj)", "another file"),
    "vocabulary": ("vocabulary", "a vocabulary of 7 tokens without weights", "tokenize"),
}


@pytest.mark.parametrize("name", SAID)
def test_what_is_no_whole_model_is_named(name: str, things: dict[str, Path]) -> None:
    kind, says, todo = SAID[name]
    done = aprfmt("inspect", things[name])
    first = done.out.splitlines()[0]
    assert done.code == 0 and not done.err
    assert f": is {says}" in first and todo in first
    assert aprfmt("inspect", things[name], "--json").json["summary"]["kind"] == kind
    ran = aprfmt("run", things[name], "--ids", "1")
    assert ran.code == 2 and ran.err.count("\n") == 1 and says in ran.err and todo in ran.err


def test_the_older_importance_matrix_is_named(tmp_path: Path) -> None:
    path = legacy(tmp_path / "imatrix.dat")
    done = aprfmt("inspect", path)
    assert done.code == 2 and "is an importance matrix" in done.err and "--imatrix" in done.err
    from aprfmt.quantizing.imatrix import read_imatrix

    assert list(read_imatrix(path).entries) == ["blk.0.ffn_up.weight"]  # the file is one


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("<!DOCTYPE html>\n<html>", "a web page saved in place of the file"),
        ("\n<html lang=en>", "a web page saved in place of the file"),
        ("Entry not found", "a web page saved in place of the file"),
        ('{"error":"no"}', 'error message (JSON) saved in place of the file: {"error":"no"}'),
        ('{ "error" : "\x1b[2J"}', "(JSON) saved in place of the file: "),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5519056\n",
         "a git-lfs pointer, not the file itself of 5519056 bytes: fetch it with git lfs pull"),
        ("version https://git-lfs.github.com/spec/v1\n", "not the file itself: fetch it"),
    ],
)  # fmt: skip
def test_what_was_saved_in_place_of_a_file_is_named(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_text(text)
    done = aprfmt("inspect", tmp_path / "a.gguf")
    assert done.code == 2 and says in done.err and "\x1b" not in done.err


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5519056\n"


@pytest.mark.parametrize("left", [POINTER, "<!DOCTYPE html>\n<html>"])
@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "model-00002-of-00002"])
def test_what_was_saved_in_place_of_a_part_is_named(
    name: str, left: str, demo_model: Path, tmp_path: Path
) -> None:
    """A shard, and JSON beside the weights, as a lone file is. Seen red: a damaged header."""
    folder = tmp_path / "m"
    if name.startswith("model"):
        assert aprfmt("split", demo_model, folder, "--max-shard-size", "3MB").code == 0
        (path, *_) = sorted(folder.glob("*00002-of-*.safetensors"))
    else:
        shutil.copytree(demo_model, folder)
        path = folder / name
    path.unlink()
    path.write_text(left)
    done = aprfmt("validate", folder)
    says = "a git-lfs pointer, not the file itself" if left is POINTER else "a web page saved in"
    assert done.code in (1, 2) and says in done.out + done.err, (done.out, done.err)


def test_a_hub_cache_is_looked_into(demo_model: Path, tmp_path: Path) -> None:
    def snapshot(name: str, commit: str) -> Path:
        target = tmp_path / "hub" / f"models--{name}" / "snapshots" / commit
        shutil.copytree(demo_model, target)
        return target.parent.parent

    one = snapshot("org--a", "0" * 40)
    for place in (tmp_path, tmp_path / "hub", one, one / "snapshots"):
        assert "qwen2" in aprfmt("inspect", place).out.splitlines()[0]
    old = one / "snapshots" / ("0" * 40) / "config.json"
    snapshot("org--a2", "1" * 40)
    done = aprfmt("inspect", tmp_path)
    assert done.code == 2 and "org/a, org/a2" in done.err
    # refs/main decides, whatever is newer
    other = one / "snapshots" / ("f" * 40)
    other.mkdir()
    (one / "refs").mkdir()
    (one / "refs" / "main").write_text("0" * 40)
    assert aprfmt("inspect", one, "--json").json["config"] == str(old)


def test_a_configuration_stands_for_its_folder(demo_model: Path, tmp_path: Path) -> None:
    done = aprfmt("inspect", demo_model / "config.json")
    assert done.out == aprfmt("inspect", demo_model).out
    (tmp_path / "config.json").write_text("{}")
    with ZipFile(tmp_path / "pytorch_model.bin", "w") as archive:
        archive.writestr("notes.txt", "of another program")
    done = aprfmt("inspect", tmp_path)
    assert (
        done.code == 2 and "pytorch_model.bin: is a zip archive that torch.save did not" in done.err
    )


@pytest.mark.parametrize(
    ("args", "text"),
    [(("tokenize", "{}", "-"), "Once upon a time\n"),
     (("logits", "{}", "--ids", "-"), "5,80 300\n"),
     (("run", "{}", "--prompt", "-", "--max-tokens", "2", "--quiet"), "Once upon a time\n"),
     (("eval", "{}", "--text", "-"), "Once upon a time there was\n")],
)  # fmt: skip
def test_a_dash_is_stdin(
    args: tuple[str, ...],
    text: str,
    demo_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = text
    if "--text" in args:
        (tmp_path / "t.txt").write_text(text)
        given = str(tmp_path / "t.txt")
    line = [str(demo_model) if arg == "{}" else arg for arg in args]
    plain = [given.removesuffix("\n") if arg == "-" else arg for arg in line]
    expected = aprfmt(*plain, "--json").json
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(text.encode())))
    found = aprfmt(*line, "--json").json
    for key in ("ids", "text", "top", "loss", "loss_tokens"):
        assert found.get(key) == expected.get(key)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"\xff")))
    assert "stdin is not UTF-8" in aprfmt(*line).err
