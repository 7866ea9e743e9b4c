"""What is said of the shards of an APR model that do not fit together."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aprfmt.errors import FormatError
from aprfmt.formats import journal
from aprfmt.formats.apr import reader
from aprfmt.formats.apr.metadata import TYPED
from aprfmt.formats.apr.shards import ShardNumber


def shard(
    name: str,
    number: int | None = 0,
    count: int = 2,
    *,
    size: int = 10,
    tensors: Any = ("a",),
    **metadata: Any,
) -> Any:
    return SimpleNamespace(
        file=SimpleNamespace(path=Path(name), size=size),
        parsed=SimpleNamespace(
            place=None if number is None else ShardNumber(number, count),
            metadata=metadata,
            entries=[SimpleNamespace(info=SimpleNamespace(name=one)) for one in tensors],
        ),
    )


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source is what it was made of, and a shard's number is its own."""
    monkeypatch.setattr(reader, "AprSource", lambda path, shards, notes=(): (path, shards, notes))
    monkeypatch.setattr(reader, "shard_number_of", lambda parsed: parsed.place)
    monkeypatch.setattr(reader, "refuse_mixed", lambda path, paths: None)


def notes_of(source: Any) -> list[tuple[str, str, str, str]]:
    return [(note.level, note.where, note.text, note.key) for note in source[2]]


@pytest.mark.usefixtures("joined")
def test_shards_are_each_of_another_number_of_one_count() -> None:
    path = Path("m.json")
    first, second = shard("0.apr"), shard("1.apr", 1)
    source: Any = reader._join_shards(path, [first, second], 2, ["note"])  # type: ignore[list-item]
    assert source == (path, [first, second], ["note"])
    single: Any = reader._join_shards(path, [shard("0.apr", None)], 1, [])
    assert len(single[1]) == 1
    for wrong, place in (
        (shard("x.apr", 0), "0 of 2"),
        (shard("x.apr", 1, 3), "1 of 3"),
        (shard("x.apr", None), "0 of 1"),
    ):
        with pytest.raises(FormatError) as error:
            reader._join_shards(path, [first, wrong], 2, [])
        assert str(error.value) == (
            f"m.json: x.apr says it is shard {place}; expected another number of 2, each once"
        )


def test_what_a_shard_says_otherwise_is_noted_with_its_file() -> None:
    key = next(one.name for one in TYPED if one.name not in reader._OF_ONE_FILE)
    own = next(one.name for one in TYPED if one.name in reader._OF_ONE_FILE)
    shards = [
        shard("0.apr", **{key: 5, own: 1}),
        shard("1.apr", **{key: 6, own: 2}),
        shard("2.apr"),
        shard("3.apr", **{key: 5}),
    ]
    (note,) = reader._contradictions(shards)
    assert (note.level, note.where, note.text) == (
        "warning",
        "1.apr",
        f"metadata {key} is 6, 0.apr says 5",
    )
    (note,) = reader._contradictions([shard("0.apr"), shards[0]])
    assert note.text == f"metadata {key} is 5, 0.apr says None"


@pytest.mark.usefixtures("joined")
def test_a_manifest_lists_the_shards_and_their_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.json"
    members = [
        SimpleNamespace(path=tmp_path / f"{at}.apr", tensors={"a"} if at == 0 else {"b"}, size=10)
        for at in range(2)
    ]
    required: list[Any] = []
    monkeypatch.setattr(reader, "read_manifest", lambda path: members)
    monkeypatch.setattr(reader, "require_files", lambda paths, where: required.append(paths))
    held = {"0.apr": shard("0.apr", 0), "1.apr": shard("1.apr", 1, tensors=("b",))}

    def opened(partial: bool) -> Any:
        return reader.open_manifest(path, lambda one: held[one.name], partial)

    for member in members:
        member.path.touch()
    for partial in (False, True):
        source = opened(partial)
        assert source == (path, [held["0.apr"], held["1.apr"]], [])
    assert required == [[one.path for one in members]]
    held["1.apr"].file.size = 11
    assert notes_of(opened(False)) == [
        ("warning", str(path), "1.apr has 11 bytes, the manifest says 10", "shard_size")
    ]
    for tensors, says in (
        (("b", "c"), "holds tensor 'c', which the manifest does not list for it"),
        ((), "lacks tensor 'b', which the manifest lists for it"),
        (("c",), "lacks tensor 'b', which the manifest lists for it"),
    ):
        held["1.apr"] = shard("1.apr", 1, tensors=tensors)
        with pytest.raises(FormatError) as error:
            opened(False)
        assert str(error.value) == f"{path}: 1.apr {says}"
    held["1.apr"] = shard("1.apr", 1, tensors=("b",))
    members[1].path.unlink()
    source = opened(True)
    assert source[1] == [held["0.apr"]]
    assert notes_of(source) == [
        ("warning", str(path), "1.apr is missing next to it", "missing_shard")
    ]
    members[0].path.unlink()
    with pytest.raises(FormatError, match="none of the shards it names is there"):
        opened(True)


@pytest.mark.usefixtures("joined")
def test_a_shard_finds_the_others_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [tmp_path / f"m-0000{at}-of-00002.apr" for at in (1, 2)]
    siblings: list[Any] = [names]
    monkeypatch.setattr(reader, "sibling_paths", lambda path, place: siblings[0])
    own, other = shard(str(names[1]), 1), shard(str(names[0]), 0)

    def opened(partial: bool = False, of: Any = own) -> Any:
        return reader.open_siblings(names[1], of, lambda path: other, partial)

    alone = shard("x.apr", None)
    assert opened(of=alone) == (names[1], [alone], ())
    names[0].touch()
    for partial in (False, True):
        assert opened(partial) == (names[1], [other, own], [])
    names[0].unlink()
    source = opened(True)
    missing = f"{names[0].name} is missing next to it"
    assert source[1] == [own]
    assert notes_of(source) == [("warning", str(names[1]), missing, "missing_shard")]
    with pytest.raises(FormatError) as error:
        opened()
    assert f"{names[1]}: is shard 1 of 2, {missing}; get the missing file" in str(error.value)
    siblings[0] = None
    source = opened(True)
    assert source[1] == [own]
    assert notes_of(source) == [
        (
            "warning",
            str(names[1]),
            "is shard 1 of 2; the others are not known by its name",
            "missing_shard",
        )
    ]
    with pytest.raises(FormatError, match=r"its name does not follow STEM-00001-of-00002\.apr"):
        opened()


# --- writings that were ended -------------------------------------------------------------------


def test_a_writing_that_was_completed_is_noted_with_its_files() -> None:
    moves = ((".a.tmp", "a.apr"), (".b.tmp", "b.apr"))
    note = journal._completed_note(Path("m"), journal.Journal(".j", moves, (), {}))
    assert (note.level, note.where, note.key) == ("warning", "m", "completed_write")
    assert note.text.endswith("while it published here; completed: a.apr, b.apr")
