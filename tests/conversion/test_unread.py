"""Quantizations that are not decoded: named with what they cover, copied, and never guessed at."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cli.run import aprfmt
from tests.conversion.dialect_folders import awq, write_mixture
from tests.conversion.folders import tensors_of

Rng = np.random.Generator


def size(word: str, sizes: Mapping[str, int]) -> int:
    """Return `o/4`, `o*2` or `7` as a number."""
    if word.isdigit():
        return int(word)
    by = int(word[2:] or 1)
    return sizes[word[0]] * by if word[1:2] == "*" else sizes[word[0]] // by


def stored(*parts: tuple[str, str, str]) -> Any:
    """Return a maker of parts: suffix, dtype, and the rows and columns as parts of the weight's."""

    def make(shape: tuple[int, int], rng: Rng) -> tuple[Mapping[str, Any], Any]:
        sizes = {"o": shape[0], "i": shape[1]}
        made = {}
        for suffix, kind, said in parts:
            at = [size(word, sizes) for word in said.split()]
            made[suffix] = rng.integers(1, 100, at).astype(kind)
        return made, np.zeros(shape)

    return make


# quant_method -> how its checkpoints store a weight, in outline
METHODS: Mapping[str, Any] = {
    "hqq": stored(("W_q", "u1", "o/2 i"), ("scale", "f2", "o*2 1"), ("zero", "f2", "o*2 1")),
    "hqq, codes viewed as floats": stored(("W_q", "f2", "o/4 i"), ("scale", "f2", "o*2 1")),
    "quanto": stored(("weight._data", "i1", "o i"), ("weight._scale", "f4", "o 1"),
                     ("input_scale", "f4", "1"), ("output_scale", "f4", "1")),
    "quanto, 4 bits": stored(("weight._data._data", "u1", "o/2 i"), ("weight._scale", "f4", "o 1"),
                             ("weight._shift", "f4", "o 1")),
    "quark": stored(("weight", "i4", "o i/8"), ("weight_scale", "f4", "o i/32")),
    "eetq": stored(("weight", "i1", "i o"), ("weight_scales", "f2", "o")),
    "fp_quant": stored(("qweight", "u1", "o i/2"), ("scales", "u1", "o i/32")),
    "aqlm": stored(("codes", "i2", "o i/8 1"), ("codebooks", "f2", "1 256 1 8"),
                   ("scales", "f2", "o 1 1 1")),
    "exl3": stored(("trellis", "i2", "i/16 o/16 64"), ("suh", "f2", "i"), ("svh", "f2", "o")),
    "bitnet": stored(("weight", "u1", "o/4 i"), ("weight_scale", "f4", "1")),
    "vptq": stored(("indices", "i4", "1 o i/8"), ("centroids.weight", "f2", "1 1024"),
                   ("res_centroids.weight", "f2", "1 1024"), ("perm", "i2", "i")),
    "spqr": stored(("dense_weights", "i8", "o"), ("row_offsets", "i4", "o"), ("in_perm", "i8", "i"),
                   ("col_vals", "i4", "7")),
    "gptq, as marlin": stored(("B", "i4", "i/16 o*2"), ("s", "f2", "i/32 o")),
}  # fmt: skip


def written(folder: Path, make: Any, section: Mapping[str, Any]) -> None:
    write_mixture(
        folder, lambda name: make if "_proj" in name else None, {"quantization_config": section}
    )


@pytest.mark.parametrize("method", METHODS)
def test_named_with_what_it_covers_and_copied(method: str, tmp_path: Path) -> None:
    make, method = METHODS[method], method.partition(",")[0]
    written(tmp_path / "m", make, {"quant_method": method, "bits": 4, "group_size": 32})
    shown = aprfmt("inspect", tmp_path / "m", "--json").json
    (note,) = [n["text"] for n in shown["notes"] if "not decoded" in n["text"]]
    count = len([name for name in tensors_of(tmp_path / "m") if "_proj" in name])
    assert f"quantization {method!r}" in note and f": 14 weights in {count} tensors (" in note
    assert next(name for name in tensors_of(tmp_path / "m") if "_proj" in name) in note
    assert shown["roles"]["required"] - len(shown["roles"]["missing"]) == 7  # none is guessed at
    for more in (["m.gguf"], ["f32", "--to", "safetensors", "--encoding", "F32"]):
        done = aprfmt("convert", tmp_path / "m", tmp_path / more[0], *more[1:])
        assert done.code == 2 and note.split(";")[0] in done.err, done.err
        assert len(done.err.strip().splitlines()) == 1
    for made in ("m.apr", "back"):
        source = tmp_path / ("m" if made == "m.apr" else "m.apr")
        done = aprfmt(
            "convert", source, tmp_path / made, "--to", "apr" if made == "m.apr" else "safetensors"
        )
        assert done.code == 0, done.err
    assert tensors_of(tmp_path / "back") == tensors_of(tmp_path / "m")
    assert aprfmt("diff", tmp_path / "m", tmp_path / "m.apr").code == 0


def test_a_layout_of_a_known_method_is_said(tmp_path: Path) -> None:
    section = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv"}
    written(tmp_path / "m", awq, section)
    shown = aprfmt("inspect", tmp_path / "m", "--json").json
    assert any("awq: the layout 'gemv' is not one we decode" in n["text"] for n in shown["notes"])
    done = aprfmt("convert", tmp_path / "m", tmp_path / "m.gguf", "--encoding", "F32")
    assert done.code == 2 and "'gemv'" in done.err
    assert aprfmt("convert", tmp_path / "m", tmp_path / "m.apr").code == 0


def test_validate_says_what_is_packed_and_not_what_would_be_missing(tmp_path: Path) -> None:
    written(tmp_path / "m", METHODS["hqq"], {"quant_method": "hqq"})
    found = aprfmt("validate", tmp_path / "m", "--json").json
    (row,) = [row for row in found["checks"] if row["name"] == "completeness"]
    assert "hqq" in json.dumps(row) and "L0.attn_q.weight" not in json.dumps(row)


def test_diagnose_says_that_they_are_not_decoded_and_blames_no_tensor(tmp_path: Path) -> None:
    written(tmp_path / "m", METHODS["spqr"], {"quant_method": "spqr"})
    write_mixture(tmp_path / "plain", lambda name: None, {})
    for sides in (("m", "plain"), ("plain", "m")):
        done = aprfmt("diagnose", *(tmp_path / side for side in sides), "--ids", "1,2", "--json")
        assert done.code == 2  # what they hold is not known, so nothing is established
        assert "'spqr' of config.json is not decoded here: 14 weights" in json.dumps(done.json)
        assert done.json["findings"] == []


def test_a_bias_beside_packed_weights_is_a_bias(tmp_path: Path) -> None:
    make = stored(("weight", "i1", "i o"), ("weight_scales", "f2", "o"), ("bias", "f2", "o"))
    written(tmp_path / "m", make, {"quant_method": "eetq"})
    shown = aprfmt("inspect", tmp_path / "m", "--json").json
    (note,) = [n["text"] for n in shown["notes"] if "not decoded" in n["text"]]
    assert "14 weights in 28 tensors" in note


def test_weights_without_their_zeros_are_named_by_how(tmp_path: Path) -> None:
    sparsity = {"format": "sparse-24-bitmask", "sparsity_structure": "2:4", "targets": ["Linear"]}
    section = {
        "quant_method": "compressed-tensors", "format": "dense", "config_groups": {},
        "sparsity_config": sparsity,
    }  # fmt: skip
    make = stored(("compressed", "f2", "o i/2"), ("bitmask", "u1", "o i/8"), ("shape", "i8", "2"))
    written(tmp_path / "m", make, section)
    done = aprfmt("convert", tmp_path / "m", tmp_path / "m.gguf")
    assert done.code == 2 and "(sparsity 'sparse-24-bitmask'): 14 weights in 42" in done.err
    write_mixture(tmp_path / "plain", lambda name: None, {"quantization_config": section})
    found = aprfmt("validate", tmp_path / "plain", "--json").json
    (row,) = [row for row in found["checks"] if row["name"] == "quantization"]
    assert row["outcome"] == "FAIL" and "no tensor is a part of such" in json.dumps(row)
