"""Hashes as docs and manifests promise them, computed here by hand; and what a manifest notices.

Seen red: a matrix decoded whole, pages kept, parts of packed weights left out, float64 hashed as
float32, the shape left out, a tensor that is gone, damage outside of tensors beside damaged
tensors, a text that came later.
"""

import hashlib
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import aprfmt
from aprfmt.formats.mapped_file import MappedFile, open_bytes
from aprfmt.model.manifest import bytes_between
from aprfmt.tensors import digest
from aprfmt.tensors.digest import decoded_sha256, raw_sha256, view_sha256
from aprfmt.tensors.view import View
from tests.checks.file import bases
from tests.cli.run import aprfmt as command
from tests.conversion.folders import llama_folder, tensors_of, write_mixed

UP = "model.layers.0.mlp.up_proj.weight"


def sha256(*pieces: bytes) -> str:
    return hashlib.sha256(b"".join(pieces)).hexdigest()


NAN = np.array([0x7FC00001, 0x7FC00002], np.uint32).view(np.float32)
# values -> what is hashed: float32, float64, int64 or complex64, little-endian
VALUES: dict[str, tuple[Any, Any]] = {
    "float32": (np.array([1.5, -0.0], np.float32), "<f4"),
    "bfloat16": (np.array([1.5, 3e38], ml_dtypes.bfloat16), "<f4"),
    "float16": (np.array([1.5, 65504], np.float16), "<f4"),
    "float64": (np.array([1 + 2**-50, 1e300]), "<f8"),
    "int8": (np.array([-1, 7], np.int8), "<i8"),
    "uint32": (np.array([2**32 - 1], np.uint32), "<i8"),
    "bool": (np.array([True, False]), "<i8"),
    "complex64": (np.array([1 + 2j], np.complex64), "<c8"),
    "matrix": (np.arange(6, dtype=np.float32).reshape(2, 3), "<f4"),
    "transposed": (np.arange(6, dtype=np.float32).reshape(2, 3).T, "<f4"),
    "scalar": (np.array(2.0, np.float32), "<f4"),
    "empty": (np.zeros((0, 4), np.float32), "<f4"),
    "nan": (NAN[:1], "<f4"),
    "another nan": (NAN[1:], "<f4"),
}


@pytest.mark.parametrize("name", VALUES)
def test_decoded_hash_is_of_shape_and_widened_values(name: str) -> None:
    values, wide = VALUES[name]
    shape = ",".join(str(size) for size in values.shape).encode()
    expected = sha256(shape, b"\n", values.astype(wide).tobytes(order="C"))
    assert decoded_sha256(values) == expected


def test_no_two_of_these_values_have_one_hash() -> None:
    x = np.arange(6, dtype=np.float32)
    made: list[Any] = [
        x,
        x.reshape(2, 3),
        x.reshape(3, 2),
        x.astype(np.int64),
        x.reshape(2, 3).T,
        NAN[:1],
        NAN[1:],
        np.zeros((0, 4), np.float32),
        np.zeros((4, 0), np.float32),
    ]
    assert len({decoded_sha256(values) for values in made}) == len(made)
    assert decoded_sha256(np.array([1.0 + 2**-50])) != decoded_sha256(np.array([1.0]))


@pytest.mark.parametrize("to", ["x.gguf", "x.apr", "nf4", "q4.gguf"])
def test_hashes_by_bands_are_those_of_whole_tensors(
    to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digest, "BAND", 300)
    source = llama_folder(tmp_path / "s", "BF16", hidden=64, kv_heads=2)
    how = {"nf4": "NF4", "q4.gguf": "Q4_0"}.get(to)
    aprfmt.convert(source, tmp_path / to, to="safetensors" if to == "nf4" else None, quantize=how)
    with aprfmt.open(tmp_path / to) as model:
        views = [*model.roles.values(), *(model[name] for name in model)]
        assert len(views) > 30
        for view in views:
            assert view_sha256(view) == decoded_sha256(view.numpy())


def test_a_matrix_is_hashed_without_being_decoded_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digest, "BAND", 1 << 15)
    source = llama_folder(tmp_path / "s", "BF16", hidden=256, ffn=1024)
    released: list[int] = []
    real = MappedFile.drop

    def drop(self: MappedFile, start: int, stop: int) -> None:
        released.append(stop - start)
        real(self, start, stop)

    monkeypatch.setattr(MappedFile, "drop", drop)
    monkeypatch.setattr(View, "numpy", None)
    with aprfmt.open(source) as model:
        view_sha256(model[UP])
        assert len(released) >= 1024 * 256 >> 15


def test_raw_hash_of_a_packed_weight_is_over_all_its_parts(tmp_path: Path) -> None:
    source = llama_folder(tmp_path / "s", "F32")
    aprfmt.convert(source, tmp_path / "nf4", to="safetensors", quantize="NF4")
    parts = tensors_of(tmp_path / "nf4")
    with aprfmt.open(tmp_path / "nf4") as model:
        tensor = model[UP]
        own = {suffix: part.info.name for suffix, part in tensor.parts.items()}
        assert len(own) > 2
        in_order = [parts[own[suffix]][2] for suffix in sorted(own)]
        assert raw_sha256(tensor.stored[0]) == sha256(*in_order)
        assert raw_sha256(model["model.norm.weight"].stored[0]) == sha256(
            parts["model.norm.weight"][2]
        )


def failures(model: Path, manifest: Path, *options: str) -> list[dict[str, str]]:
    done = command("hash", model, "--check", manifest, "--json", *options)
    found: list[dict[str, str]] = done.json["failures"]
    assert done.code == (1 if found else 0)
    return found


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, Path]:
    """A folder and its manifest."""
    folder = llama_folder(tmp_path / "m", "BF16")
    assert command("hash", folder, "--write").code == 0
    return folder, folder / "model.safetensors.aprfmt-hash.json"


def test_a_tensor_that_is_gone_or_new_is_named(written: tuple[Path, Path]) -> None:
    folder, manifest = written
    weights = folder / "model.safetensors"
    rows = tensors_of(folder)
    assert failures(folder, manifest) == []
    write_mixed(weights, {name: row for name, row in rows.items() if name != UP})
    found = failures(folder, manifest)
    assert found[0] == {"key": "L0.ffn_up.weight", "what": "missing in the model"}
    write_mixed(weights, rows | {"extra": ("F32", (1,), bytes(4))})
    assert failures(folder, manifest)[0] == {"key": "extra", "what": "not in the manifest"}
    assert failures(folder, manifest, "--tensor", "L1.ffn_up") == []


def test_damage_outside_of_tensors_is_named_beside_damage_inside(
    written: tuple[Path, Path],
) -> None:
    folder, manifest = written
    weights = folder / "model.safetensors"
    bases.element(folder, UP, 0, b"\xff\x7f", 2)
    inside = {"key": "L0.ffn_up.weight", "what": "decoded values differ"}
    assert failures(folder, manifest) == [inside]
    weights.write_bytes(weights.read_bytes().replace(b'"format":"pt"', b'"format":"np"', 1))
    outside = "bytes outside the tensors differ (header, metadata, tokenizer or padding)"
    assert failures(folder, manifest) == [inside, {"key": weights.name, "what": outside}]


def test_a_text_that_came_later_is_named(written: tuple[Path, Path]) -> None:
    folder, manifest = written
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    assert failures(folder, manifest) == [
        {"key": "generation_config.json", "what": "not in the manifest"}
    ]


def test_texts_are_not_compared_with_a_manifest_of_another_format(tmp_path: Path) -> None:
    """The same model in GGUF has other keys and texts: they are left, and that is said."""
    folder = llama_folder(tmp_path / "m", "F32", layers=1)
    assert command("hash", folder, "--write").code == 0
    (listed,) = folder.glob("*.aprfmt-hash.json")
    assert command("convert", folder, tmp_path / "m.gguf").code == 0
    assert command("hash", folder, "--check", listed).out == "equal to the manifest, 12 tensors\n"
    other = command("hash", tmp_path / "m.gguf", "--check", listed)
    assert other.code == 0 and other.out == (
        "equal to the manifest in what was compared: 12 tensors; not compared: section keys and "
        "texts (the manifest is of safetensors)\n"
    )


def test_bytes_between_parts_come_whole_and_at_their_place(tmp_path: Path) -> None:
    """Gaps of several windows, parts that touch, overlap or hold nothing."""
    path = tmp_path / "x.bin"
    held = np.random.default_rng(0).integers(0, 256, (20 << 20) + 5, np.uint8)
    path.write_bytes(held.tobytes())
    parts = [(0, 3), (3, 3), (17 << 20, (17 << 20) + 9), ((17 << 20) + 4, (17 << 20) + 6)]
    with closing(open_bytes(path)) as file:
        end = (file.size, file.size)
        seen = np.zeros(file.size, bool)
        for at, piece in bytes_between(file, [*parts, end]):
            assert not seen[at : at + len(piece)].any()
            seen[at : at + len(piece)] = True
            assert np.array_equal(held[at : at + len(piece)], np.frombuffer(piece, np.uint8))
    wanted = np.ones(len(held), bool)
    for first, last in parts:
        wanted[first:last] = False
    assert np.array_equal(seen, wanted)
