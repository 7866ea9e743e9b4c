"""Sharded models: written as the Hub names them, opened by their index, nothing outside read."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from aprfmt.errors import FormatError
from aprfmt.formats import detect_format, open_source
from aprfmt.formats.safetensors.reader import open_index
from aprfmt.formats.shard_set import member_path
from tests.formats.apr_writing import info, pattern
from tests.formats.safetensors.test_safetensors_write import patterns, write
from tests.formats.safetensors_cases import entry, file

INFOS = [info(f"layers.{at}.w", (4, 2), "BF16") for at in range(5)] + [info("norm", (4,))]


@pytest.fixture
def model(tmp_path: Path) -> list[Path]:
    """Three shards and their index, last."""
    return write(
        tmp_path / "model.safetensors",
        INFOS,
        patterns(INFOS),
        max_shard_size=32,
        metadata={"digest": "x"},
    )


def test_names_and_index(model: list[Path]) -> None:
    assert [path.name for path in model] == [
        "model-00001-of-00003.safetensors",
        "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
        "model.safetensors.index.json",
    ]
    homes = {
        "layers.0.w": model[0].name,
        "layers.1.w": model[1].name,
        "layers.2.w": model[1].name,
        "layers.3.w": model[2].name,
        "layers.4.w": model[2].name,
        "norm": model[0].name,
    }
    index = {"metadata": {"total_size": 96}, "weight_map": homes}
    assert model[-1].read_text() == json.dumps(index, indent=2, sort_keys=True) + "\n"


def test_the_library_reads_every_shard(model: list[Path]) -> None:
    read: dict[str, torch.Tensor] = {}
    for path in model[:-1]:
        read.update(load_file(path))
    assert sorted(read) == sorted(planned.name for planned in INFOS)
    assert read["layers.3.w"].view(torch.uint8).numpy().tobytes() == pattern(INFOS[3])


def test_the_index_opens_the_whole_model(model: list[Path]) -> None:
    assert detect_format(model[-1]).name == "safetensors"
    with open_index(model[-1]) as source:
        assert source.files == tuple(model[:-1])
        assert source.metadata == {"digest": "x", "format": "pt"}
        assert source.index_metadata == {"total_size": 96}
        assert not source.notes
        for planned in INFOS:
            assert source.tensors[planned.name].raw() == pattern(planned)
    with open_source(model[1]) as source:  # a shard is a file of its own
        assert sorted(source.tensors) == ["layers.1.w", "layers.2.w"]


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def remap(path: Path, **homes: Any) -> None:
    index = json.loads(path.read_text())
    index["weight_map"].update(homes)
    path.write_text(json.dumps(index))


def test_a_missing_shard_is_named(model: list[Path]) -> None:
    model[1].unlink()
    with pytest.raises(FormatError, match=r"model-00002-of-00003\.safetensors cannot be opened"):
        open_index(model[-1])
    with open_index(model[-1], partial=True) as source:
        assert len(source.tensors) == 4
        assert "model-00002-of-00003.safetensors is missing" in source.notes[0].text
    for path in (model[0], model[2]):
        path.unlink()
    with pytest.raises(FormatError, match="none of the shards"):
        open_index(model[-1], partial=True)


def test_index_and_shards_must_agree(model: list[Path]) -> None:
    original = model[-1].read_text()
    for changes, says in (
        ({"extra": model[0].name}, "'extra' is said to be in model-00001"),
        ({"norm": model[1].name}, "'norm' is said to be in model-00002"),
    ):
        remap(model[-1], **changes)
        with pytest.raises(FormatError, match=says):
            open_index(model[-1])
        model[-1].write_text(original)
    index = json.loads(original)
    del index["weight_map"]["norm"]
    model[-1].write_text(json.dumps(index))
    with pytest.raises(FormatError, match="holds tensor 'norm', which the index does not list"):
        open_index(model[-1])


def test_a_tensor_in_two_shards_is_refused(model: list[Path]) -> None:
    copy = model[0].parent / "copy.safetensors"
    copy.write_bytes(file({"norm": entry(), "own": entry(offsets=[16, 32])}, bytes(32)))
    remap(model[-1], own=copy.name)
    with pytest.raises(FormatError, match="'norm' stands in"):
        open_index(model[-1])


def test_a_wrong_total_size_is_remarked_on(model: list[Path]) -> None:
    for total in (97, "96", 1.5):
        edit(model[-1], metadata={"total_size": total})
        with open_index(model[-1]) as source:
            assert "the tensors of all shards take 96 bytes" in source.notes[0].text
    for metadata in ({}, {"total_size": 96.0}, None):
        edit(model[-1], metadata=metadata)
        with open_index(model[-1]) as source:
            assert not source.notes


def test_shards_whose_metadata_differs_are_remarked_on(tmp_path: Path) -> None:
    for name, value in (("a", "1"), ("b", "2")):
        data = file({"__metadata__": {"k": value}, name: entry()}, bytes(16))
        (tmp_path / f"{name}.safetensors").write_bytes(data)
    index = tmp_path / "m.safetensors.index.json"
    homes = {"a": "a.safetensors", "b": "b.safetensors"}
    index.write_text(json.dumps({"weight_map": homes}))
    with open_index(index) as source:
        assert source.metadata == {"k": "1"}
        assert "metadata 'k' differs" in source.notes[0].text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{}", "no weight_map"),
        ('{"weight_map": {}}', "no weight_map"),
        ('{"weight_map": []}', "no weight_map"),
        ("[]", "no weight_map"),
        ('{"metadata": 1, "weight_map": {"a": "b"}}', "metadata is int"),
        ('{"weight_map": {"a": "b", "a": "c"}}', "'a' stands twice"),
        ('{"weight_map": ', "not JSON"),
        ("", "not JSON"),
    ],
)
def test_a_broken_index_is_refused(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(text)
    with pytest.raises(FormatError, match=says):
        open_index(path)


OUTSIDE: tuple[Any, ...] = (
    "/etc/passwd", "/dev/zero", "//server/share/x", "../x.safetensors", "sub/../x.safetensors",
    "sub/../../x.safetensors", "..", ".", "", "./x.safetensors", "sub/", "/", "sub//x", "a/b/c",
    "C:\\x.safetensors", "C:x.safetensors", "\\\\server\\x", "..\\x.safetensors", "sub\\x",
    "file:///etc/passwd", "http://host/x.safetensors", "x.safetensors:stream", "nul\0",
    "x\n.safetensors", "\x1b[31m", "NUL", "nul.safetensors", "CON", "com1.safetensors",
    "x.safetensors.", "x.safetensors ", "n" * 300, 1, None, True, 1.5,
    ["x.safetensors"], {"a": "b"},
)  # fmt: skip


@pytest.mark.parametrize("name", OUTSIDE, ids=lambda name: ascii(name)[:30])
def test_an_index_names_plain_files_only(name: Any, model: list[Path]) -> None:
    remap(model[-1], norm=name)
    for partial in (False, True):
        with pytest.raises(FormatError, match="as a file of the model") as caught:
            open_index(model[-1], partial=partial)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_half_a_surrogate_pair_names_no_file(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="surrogate"):
        member_path(tmp_path, "\ud800.safetensors", "t")


@pytest.mark.parametrize("kind", ["folder", "pipe", "link_to_device", "link_to_folder", "dangling"])
def test_shards_are_regular_files(kind: str, model: list[Path]) -> None:
    shard = model[0]
    shard.unlink()
    if kind == "folder":
        shard.mkdir()
    elif kind == "pipe":
        os.mkfifo(shard)
    else:
        target = {"link_to_device": "/dev/zero", "link_to_folder": "/", "dangling": "nowhere"}
        shard.symlink_to(target[kind])
    with pytest.raises(FormatError, match="model-00001-of-00003"):
        open_index(model[-1])


def test_links_to_files_and_subfolders_are_followed(model: list[Path], tmp_path: Path) -> None:
    """The hub's cache links every file to a blob; some models keep shards in a subfolder."""
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    model[0].rename(blobs / "sha")
    model[0].symlink_to(blobs / "sha")
    (tmp_path / "sub").mkdir()
    model[1].rename(tmp_path / "sub" / model[1].name)
    inside = f"sub/{model[1].name}"
    remap(model[-1], **{"layers.1.w": inside, "layers.2.w": inside})
    with open_index(model[-1]) as source:
        assert len(source.tensors) == 6
    (tmp_path / "sub").rename(blobs / "sub")
    (tmp_path / "sub").symlink_to(blobs / "sub")
    with pytest.raises(FormatError, match="its folder is a link"):
        open_index(model[-1])


def test_a_half_written_set_is_refused(model: list[Path]) -> None:
    journal = {
        "schema": "aprfmt.journal/1",
        "moves": [[f".{model[1].name}.1-0a0a0a0a-0b0b0b0b.aprfmt-tmp", model[1].name]],
        "removes": [],
    }
    (model[0].parent / ".aprfmt-journal-0a0a0a0a.json").write_text(json.dumps(journal))
    with pytest.raises(FormatError, match="interrupted"):
        open_index(model[-1])
