"""Sets of APR shards: written, opened by any member, and refused where the members disagree."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aprfmt.errors import ConversionError, FormatError, UsageError
from aprfmt.formats import open_source
from aprfmt.formats.apr import shards
from aprfmt.formats.apr.reader import open_source as open_apr
from tests.formats.apr_files import METADATA, AprFile, Tensor
from tests.formats.apr_writing import check, info, write

INFOS = [info(name, (8,)) for name in ("a", "b", "c", "d", "e")]
META = {"model_type": "m", "hidden_size": 8, "tokenizer.vocabulary": ["x"]}


@pytest.fixture
def model(tmp_path: Path) -> list[Path]:
    """Three shards and their manifest, last."""
    return write(tmp_path / "m.apr", INFOS, META, max_shard_size=64)


def test_names_sizes_and_manifest(model: list[Path]) -> None:
    assert [path.name for path in model] == [
        "m-00000-of-00003.apr",
        "m-00001-of-00003.apr",
        "m-00002-of-00003.apr",
        "m-manifest.json",
    ]
    manifest = json.loads(model[-1].read_text())
    sizes = [path.stat().st_size for path in model[:-1]]
    assert manifest == {
        "version": "2.0",
        "shard_count": 3,
        "total_size": sum(sizes),
        "tensor_count": 5,
        "shards": [
            {"filename": model[at].name, "index": at, "size": sizes[at], "tensors": list(names)}
            for at, names in enumerate(["ab", "cd", "e"])
        ],
        "weight_map": {"a": 0, "b": 0, "c": 1, "d": 1, "e": 2},
    }


def test_every_member_opens_the_whole_set(model: list[Path]) -> None:
    for path in model:
        with open_apr(path) as source:
            check(source, INFOS)
            assert source.files == tuple(model[:-1])
            assert source.footer_state() == "present" and source.footer_matches() is True
            assert source.metadata["tokenizer.vocabulary"] == ["x"]
            assert "sharding" not in source.metadata
            assert not source.notes
    with open_apr(model[0]) as source:
        one = source.shards[1].parsed
        assert one.header.flags & 0x0010
        assert one.metadata["sharding"] == {
            "shard_count": 3,
            "shard_index": 1,
            "total_size": 160,
            "pattern": None,
        }
        assert one.metadata["hidden_size"] == 8
        assert "tokenizer.vocabulary" not in one.metadata


def test_a_set_is_merged_into_one_plain_file(model: list[Path], tmp_path: Path) -> None:
    with open_apr(model[0]) as source:
        write(tmp_path / "one.apr", INFOS, source.metadata, like=source)
    write(tmp_path / "fresh.apr", INFOS, {**META, "param_count": 40, "total_size": 0})
    assert (tmp_path / "one.apr").read_bytes() == (tmp_path / "fresh.apr").read_bytes()


def test_what_fits_stays_one_file_and_a_large_tensor_stands_alone(tmp_path: Path) -> None:
    assert [p.name for p in write(tmp_path / "x.apr", INFOS, max_shard_size=160)] == ["x.apr"]
    large = [info("a", (2,)), info("big", (100,)), info("c", (2,))]
    assert len(write(tmp_path / "y.apr", large, max_shard_size=40)) == 4
    with pytest.raises(UsageError, match="size > 0"):
        write(tmp_path / "z.apr", INFOS, max_shard_size=0)


def test_shards_are_published_together(tmp_path: Path) -> None:
    (tmp_path / "m-00001-of-00003.apr").write_bytes(b"old")
    with pytest.raises(OSError, match="exists"):
        write(tmp_path / "m.apr", INFOS, max_shard_size=64)
    with pytest.raises(ConversionError):
        write(tmp_path / "n.apr", [*INFOS, info("\ud800", (1,))], max_shard_size=64)
    assert [path.name for path in tmp_path.iterdir()] == ["m-00001-of-00003.apr"]


def test_a_missing_shard_is_named(model: list[Path]) -> None:
    model[1].unlink()
    for path in (model[0], model[2], model[3]):
        with pytest.raises(FormatError, match=r"m-00001-of-00003\.apr"):
            open_apr(path)
        with open_apr(path, partial=True) as source:
            assert sorted(source.tensors) == ["a", "b", "e"]
            assert any("m-00001-of-00003.apr is missing" in note.text for note in source.notes)


def test_a_renamed_shard_opens_alone_only_with_partial(model: list[Path], tmp_path: Path) -> None:
    lone = model[1].rename(tmp_path / "other.apr")
    with pytest.raises(FormatError, match="does not follow STEM-00001-of-00003"):
        open_apr(lone)
    with open_apr(lone, partial=True) as source:
        assert list(source.tensors) == ["c", "d"]
        assert "shard 1 of 3" in source.notes[0].text


def shard(number: Any, count: Any, *names: bytes) -> bytes:
    sharding = {"shard_count": count, "shard_index": number, "total_size": 0, "pattern": None}
    tensors = tuple(Tensor(name) for name in names)
    return AprFile(tensors, {**METADATA, "sharding": sharding}, flags=0x0410).build()


def test_names_may_count_from_one(tmp_path: Path) -> None:
    for number, name in enumerate((b"a", b"b")):
        (tmp_path / f"m-0000{number + 1}-of-00002.apr").write_bytes(shard(number, 2, name))
    for number in (1, 2):
        with open_apr(tmp_path / f"m-0000{number}-of-00002.apr") as source:
            assert list(source.tensors) == ["a", "b"]


@pytest.mark.parametrize(
    ("second", "says"),
    [
        (shard(0, 2, b"b"), "says it is shard 0 of 2"),
        (shard(1, 3, b"b"), "says it is shard 1 of 3"),
        (shard(1, 2, b"a"), "tensor 'a' stands in m-00000-of-00002.apr and in m-00001"),
        (AprFile().build(), "says it is shard 0 of 1"),
        (shard(2, 2, b"b"), "shard_index 2 of shard_count 2"),
        (b"junk", "m-00001-of-00002.apr: has 4 bytes"),
    ],
    ids=["same_number", "other_count", "same_tensor", "no_shard", "outside", "junk"],
)
def test_shards_that_do_not_belong_together_are_refused(
    second: bytes, says: str, tmp_path: Path
) -> None:
    (tmp_path / "m-00000-of-00002.apr").write_bytes(shard(0, 2, b"a"))
    (tmp_path / "m-00001-of-00002.apr").write_bytes(second)
    with pytest.raises(FormatError) as caught:
        open_apr(tmp_path / "m-00000-of-00002.apr")
    assert says in str(caught.value)


@pytest.mark.parametrize("number", ["1", 1.0, True, None, -1], ids=repr)
def test_odd_shard_numbers(number: Any, tmp_path: Path) -> None:
    path = tmp_path / "m-00000-of-00002.apr"
    path.write_bytes(shard(number, 2, b"a"))
    if number == -1:
        with pytest.raises(FormatError, match="shard_index -1"):
            open_apr(path)
    else:  # not a shard by any reader's rule
        with open_apr(path) as source:
            assert list(source.tensors) == ["a"]


def test_shards_whose_metadata_differs_are_remarked_on(tmp_path: Path) -> None:
    for number in (0, 1):
        sharding = {"shard_count": 2, "shard_index": number, "total_size": 0}
        metadata = {"hidden_size": 8 + number, "sharding": sharding}
        file = AprFile((Tensor(b"ab"[number : number + 1]),), metadata)
        (tmp_path / f"m-0000{number}-of-00002.apr").write_bytes(file.build())
    with open_apr(tmp_path / "m-00000-of-00002.apr") as source:
        assert [note.text for note in source.notes] == [
            "metadata hidden_size is 9, m-00000-of-00002.apr says 8"
        ]
        assert source.metadata["hidden_size"] == 8


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"shard_count": 4}, "shard_count is 4, but it lists 3"),
        ({"tensor_count": 4}, "tensor_count is 4"),
        ({"shards": []}, "lists 0 shards"),
        ({"shards": "x"}, "no array 'shards'"),
        ({"weight_map": []}, "no object 'weight_map'"),
        ({"weight_map": {"a": 0, "b": 0, "c": 1, "d": 1, "e": 1}}, "disagree on tensor 'e'"),
        ({"weight_map": {"a": 0, "b": 0, "c": 1, "d": 1, "e": 7}}, "disagree on tensor 'e'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_manifest_that_contradicts_itself_is_refused(
    changes: dict[str, Any], says: str, model: list[Path]
) -> None:
    edit(model[-1], **changes)
    with pytest.raises(FormatError) as caught:
        open_apr(model[-1])
    assert says in str(caught.value)


@pytest.mark.parametrize("name", ["../m-00000-of-00003.apr", "/etc/passwd", "a\\b", "", 3, None])
def test_a_manifest_names_nothing_outside(name: Any, model: list[Path]) -> None:
    manifest = json.loads(model[-1].read_text())
    manifest["shards"][0]["filename"] = name
    model[-1].write_text(json.dumps(manifest))
    with pytest.raises(FormatError, match="as a file of the model"):
        open_apr(model[-1])


def test_a_manifest_and_its_shards_must_agree(model: list[Path]) -> None:
    os.replace(model[1], model[2])
    model[1].write_bytes(model[2].read_bytes())
    with pytest.raises(FormatError, match=r"m-00002-of-00003\.apr (holds|lacks) tensor"):
        open_apr(model[-1])


def test_sizes_of_a_manifest_are_remarked_on(model: list[Path]) -> None:
    manifest = json.loads(model[-1].read_text())
    manifest["shards"][1]["size"] += 1
    model[-1].write_text(json.dumps(manifest))
    with open_source(model[-1]) as source:
        assert any("the manifest says" in note.text for note in source.notes)


def test_the_reference_writers_manifest(apr_reference: Path) -> None:
    for name in ("shard_manifest.json", "shard-00000-of-00002.apr", "shard-00001-of-00002.apr"):
        with open_source(apr_reference / name) as source:
            assert list(source.tensors) == ["layer0.weight", "layer1.weight"]
            assert not source.notes


def test_a_half_written_set_is_refused(model: list[Path]) -> None:
    journal = {
        "schema": "aprfmt.journal/1",
        "moves": [[".m-00001-of-00003.apr.1-0a0a0a0a-0b0b0b0b.aprfmt-tmp", model[1].name]],
        "removes": [],
    }
    (model[0].parent / ".aprfmt-journal-0a0a0a0a.json").write_text(json.dumps(journal))
    for path in (model[0], model[-1]):
        with pytest.raises(FormatError, match="interrupted"):
            open_apr(path)


@pytest.mark.parametrize("limit", ["MAX_COUNT", "MAX_SHARDS"])
def test_a_manifest_may_list_as_many_as_its_limit(
    limit: str, model: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = json.loads(model[-1].read_text())
    count = said["tensor_count" if limit == "MAX_COUNT" else "shard_count"]
    monkeypatch.setattr(shards, limit, count)
    assert len(shards.parse_manifest(said, model[-1])) == said["shard_count"]
    monkeypatch.setattr(shards, limit, count - 1)
    with pytest.raises(FormatError, match=f"{count}"):
        shards.parse_manifest(said, model[-1])


@pytest.mark.parametrize(
    ("number", "count", "found"),
    [
        (0, 2, True), (1, 2, True), (2, 2, "expected 0 to 1"), (-1, 2, "expected 0 to 1"),
        (0, 1, None), (0, None, None), ("0", 2, None), (True, 2, None),
        (0, shards.MAX_SHARDS, True), (0, shards.MAX_SHARDS + 1, "expected 0 to"),
    ],
)  # fmt: skip
def test_a_shards_number_is_one_of_its_set(number: Any, count: Any, found: Any) -> None:
    sharding = {"shard_index": number, "shard_count": count}
    parsed: Any = SimpleNamespace(metadata={"sharding": sharding}, where="m.apr")
    if isinstance(found, str):
        with pytest.raises(FormatError, match=found):
            shards.shard_number_of(parsed)
    else:
        wanted = shards.ShardNumber(number, count) if found else None
        assert shards.shard_number_of(parsed) == wanted
    parsed.metadata = {}
    assert shards.shard_number_of(parsed) is None
