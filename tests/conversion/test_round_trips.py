"""Every ordered pair of formats, there and back: original bytes, original values.

Seen red when broken, one at a time (each undone afterwards):
- permutation, `RowsPermuted.moves` leaving rows where they are:
  test_oracles.py::test_gguf_py_sees_permuted_rows.
- tag, BF16 written as F16 in `choose_encodings`: test_there_and_back[BF16-qwen2].
- +1, `PLUS_ONE` of gemma empty: test_oracles.py::test_transformers_reads_our_gguf[gemma2].
- tied head, a copy of the embedding written as output.weight: test_tied_head_stays_absent.
- alignment, tensors padded to 4 bytes: test_oracles.py::test_gguf_py_reads_any_alignment[8].
"""

from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aprfmt
from aprfmt.formats import writable_formats
from tests.conversion.folders import llama_folder, tensors_of

NAMES = {"apr": "m.apr", "gguf": "m.gguf", "safetensors": "m-hf"}


def convert(src: Path, folder: Path, name: str, **options: Any) -> Path:
    """Convert into `folder` and return what to open."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / NAMES[name]
    aprfmt.convert(src, target, to=name, **options)
    return target


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "mistral"])
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_there_and_back(arch: str, dtype: str, tmp_path: Path) -> None:
    from tests.models import save_tiny

    source = tmp_path / "source"
    save_tiny(arch, source, {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}[dtype])
    original = tensors_of(source)
    for order in permutations(["apr", "gguf", "safetensors"]):
        here, at = tmp_path / "-".join(order), source
        here.mkdir()
        for name in order:
            at = convert(at, here, name)
            assert aprfmt.diff(source, at).equal, (order, name)
        back = convert(at, here / "back", "safetensors") if order[-1] != "safetensors" else at
        assert tensors_of(back) == original, order


def test_every_ordered_pair_of_formats(tmp_path: Path) -> None:
    source = llama_folder(tmp_path / "source", "BF16")
    files = {}
    for name in writable_formats():
        folder = tmp_path / name
        folder.mkdir()
        files[name] = convert(source, folder, name)
    for first, second in permutations(files, 2):
        folder = tmp_path / f"{first}-{second}"
        folder.mkdir()
        result = convert(files[first], folder, second)
        assert aprfmt.diff(source, result).equal, (first, second)


@pytest.mark.parametrize("encoding", ["BF16", "F16"])
def test_every_half_pattern_survives(encoding: str, tmp_path: Path) -> None:
    """All 65,536 patterns, NaN payloads included, as a matrix and as a norm, both ways."""
    patterns = np.arange(65536, dtype="<u2").tobytes()
    source = llama_folder(
        tmp_path / "source",
        encoding,
        hidden=256,
        replaced={
            "model.layers.0.mlp.down_proj.weight": patterns,
            "model.layers.0.self_attn.q_proj.weight": patterns,
        },
    )
    original = tensors_of(source)
    for first, second in permutations(["apr", "gguf", "safetensors"], 2):
        folder = tmp_path / f"{first}-{second}"
        folder.mkdir()
        there = convert(source, folder, first)
        with aprfmt.open(there) as model:
            assert model.roles["L0.ffn_down.weight"].encoding == encoding
        back = convert(convert(there, folder, second), folder / "back", "safetensors")
        assert tensors_of(back) == original


@pytest.mark.parametrize("encoding", ["BF16", "F16"])
def test_every_half_pattern_survives_as_a_norm(encoding: str, tmp_path: Path) -> None:
    """A norm is F32 in GGUF; the recorded restoration gives signalling NaNs back, too."""
    names = [
        f"model.layers.{layer}.{norm}.weight"
        for layer in range(128)
        for norm in ("input_layernorm", "post_attention_layernorm")
    ]
    norms = {
        name: np.arange(i * 256, (i + 1) * 256, dtype="<u2").tobytes()
        for i, name in enumerate(names)
    }
    source = llama_folder(
        tmp_path / "s",
        encoding,
        hidden=256,
        layers=128,
        ffn=8,
        heads=1,
        kv_heads=1,
        vocab=3,
        replaced=norms,
    )
    there = convert(source, tmp_path, "gguf")
    back = convert(there, tmp_path, "safetensors")
    assert tensors_of(back) == tensors_of(source)


def test_tied_head_stays_absent(tmp_path: Path) -> None:
    source = llama_folder(tmp_path / "source", "BF16", tied=True)
    for name in writable_formats():
        folder = tmp_path / name
        folder.mkdir()
        with aprfmt.open(convert(source, folder, name)) as model:
            assert "output.weight" not in model.roles
            assert model.hyper["tied_embeddings"] is True


def test_an_edited_norm_is_not_restored(tmp_path: Path) -> None:
    """A GGUF whose norm was changed after the conversion is read as it stands."""
    source = llama_folder(tmp_path / "source", "BF16")
    there = convert(source, tmp_path, "gguf")
    with aprfmt.open(there) as model:
        offset = model["blk.0.attn_norm.weight"].offset
    data = bytearray(there.read_bytes())
    data[offset : offset + 4] = np.float32(1.2345678).tobytes()
    there.write_bytes(data)
    with aprfmt.open(there) as model:
        assert model.roles["L0.attn_norm.weight"].numpy()[0] == np.float32(1.2345678)
    report = aprfmt.diff(source, there, tensors=["L0.attn_norm.weight"])
    assert report.tensors[0].verdict == "DIFFERENT"


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    source = llama_folder(tmp_path / "source", "BF16")
    for name in ("apr", "gguf"):
        first, second = tmp_path / f"a-{name}", tmp_path / f"b-{name}"
        assert (
            convert(source, first, name).read_bytes() == convert(source, second, name).read_bytes()
        )
