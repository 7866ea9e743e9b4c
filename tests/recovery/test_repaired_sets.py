"""Shard indexes made anew, sets written by their index, and which parts of a file differ.

Files are written and read back by the safetensors library.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from aprfmt.errors import AprfmtError, FormatError, OutputError, UsageError
from aprfmt.recovery import evidence
from aprfmt.recovery.by_index import write_by_index
from aprfmt.recovery.evidence import differing_blocks, differing_pages
from aprfmt.recovery.index_repair import write_index
from aprfmt.recovery.salvage import salvage
from tests.cli.run import aprfmt

INDEX = "model.safetensors.index.json"
Arrays = Mapping[str, np.ndarray]


def shard(number: int, count: int = 2) -> str:
    return f"model-{number:05}-of-{count:05}.safetensors"


def array(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape or (3, 4)).astype(np.float32)


ONE, TWO = {"a": array(1), "b": array(2, 5)}, {"c": array(3, 2, 2)}


def write_set(folder: Path, shards: Mapping[str, Arrays], said: object = None) -> Path:
    """Write shards, and an index of names by shard or of any text."""
    folder.mkdir(exist_ok=True)
    for name, arrays in shards.items():
        save_file(dict(arrays), folder / name, metadata={"format": "pt"})
    if said is not None:
        (folder / INDEX).write_text(said if isinstance(said, str) else json.dumps(said))
    return folder


def index_of(shards: Mapping[str, Arrays]) -> dict[str, str]:
    return {name: file for file, arrays in shards.items() for name in arrays}


@pytest.mark.parametrize("old", ["", "damaged", "of another time"])
def test_an_index_names_each_tensor_s_shard_and_all_bytes(old: str, tmp_path: Path) -> None:
    shards = {shard(1): ONE, shard(2): TWO}
    said = {
        "": None,
        "damaged": "{",
        "of another time": {"metadata": {"total_size": 1, "by": "me"}, "weight_map": {"z": "y"}},
    }[old]
    folder = write_set(tmp_path / "m", shards, said)
    made = write_index(folder)
    found = json.loads((folder / INDEX).read_text())
    assert found["weight_map"] == index_of(shards)
    total = sum(each.nbytes for arrays in shards.values() for each in arrays.values())
    assert found["metadata"] == {"total_size": total} | ({"by": "me"} if "time" in old else {})
    assert (made.path, made.tensors, made.shards) == (folder / INDEX, 3, tuple(shards))
    assert made.size == (folder / INDEX).stat().st_size


def test_an_index_elsewhere_needs_a_free_name(tmp_path: Path) -> None:
    folder = write_set(tmp_path / "m", {shard(1, 1): ONE})
    output = tmp_path / "other.json"
    assert write_index(folder, output).path == output and not (folder / INDEX).exists()
    with pytest.raises(OutputError, match="exists; use --force"):
        write_index(folder, output)
    output.write_text("x")
    write_index(folder / INDEX, output, force=True)
    assert json.loads(output.read_text())["weight_map"] == index_of({shard(1, 1): ONE})


def test_one_file_beside_an_index_is_its_shard(tmp_path: Path) -> None:
    folder = write_set(tmp_path / "m", {"model.safetensors": ONE})
    with pytest.raises(UsageError, match="holds no shards"):
        write_index(folder)
    write_set(folder, {}, {"weight_map": {"a": "lost.safetensors"}})
    assert write_index(folder).shards == ("model.safetensors",)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UsageError, match="holds no shards"):
        write_index(folder)
    with pytest.raises(UsageError, match="no such folder"):
        write_index(tmp_path / "nowhere")


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_a_numbered_set_is_whole(lost: int, tmp_path: Path) -> None:
    shards = {shard(i, 3): {f"t{i}": array(i)} for i in (1, 2, 3) if i != lost}
    with pytest.raises(UsageError, match=f"shard {lost} of 3 is missing"):
        write_index(write_set(tmp_path / "m", shards))


# What an old index says of the doubled tensor `a` -> which shard is to be written without it.
DOUBLED: Mapping[str, tuple[dict[str, str], int | None]] = {
    "nothing": ({}, None),
    "the first": ({"a": shard(1), "c": shard(2)}, 2),
    "the second": ({"a": shard(2), "b": shard(1)}, 1),
    "another": ({"a": "z", "b": shard(1), "c": shard(2)}, None),
    "one alone": ({"a": shard(1), "b": shard(1)}, None),
}


@pytest.mark.parametrize("case", DOUBLED)
def test_a_tensor_in_two_shards_is_refused_with_what_to_do(case: str, tmp_path: Path) -> None:
    named, stale = DOUBLED[case]
    shards = {shard(1): ONE, shard(2): {**TWO, "a": ONE["a"]}}
    folder = write_set(tmp_path / "m", shards, {"weight_map": named})
    with pytest.raises(FormatError) as caught:
        write_index(folder)
    said = str(caught.value)
    assert f"tensor 'a' stands in {shard(1)} and in {shard(2)}; " in said
    if stale is None:
        assert said.endswith("take the file away that is not of this model")
    else:
        assert f"the index names {shard(3 - stale)}, and {shard(stale)} for other tensors" in said
        assert f"write {shard(stale)} without the copy" in said


# --- by the index -------------------------------------------------------------------------------


@pytest.mark.parametrize("keeps", [1, 2])
def test_a_set_is_written_as_its_index_says(keeps: int, tmp_path: Path) -> None:
    shards = {shard(1): ONE, shard(2): {**TWO, "a": array(9)}}
    named = index_of({shard(1): ONE, shard(2): TWO}) | {"a": shard(keeps)}
    folder = write_set(tmp_path / "m", shards, {"metadata": {"by": "me"}, "weight_map": named})
    extra = folder / "model-00009-of-00009.safetensors"
    extra.write_bytes((folder / shard(1)).read_bytes())
    (folder / "config.json").write_text("{}")
    for name in ("sub", ".cache", "__pycache__"):
        (folder / name).mkdir()
    made = write_by_index(folder, tmp_path / "out")
    assert (made.shards, made.tensors) == ((shard(1), shard(2)), 3)
    assert made.removed == {shard(3 - keeps): ("a",)}
    assert made.left_out == (extra.name, "sub")
    found = {name: load_file(made.folder / name) for name in shards}
    wanted = {
        file: {name: each for name, each in arrays.items() if named[name] == file}
        for file, arrays in shards.items()
    }
    for file, arrays in wanted.items():
        assert found[file].keys() == arrays.keys()
        assert all(np.array_equal(found[file][name], each) for name, each in arrays.items())
    index = json.loads((made.folder / INDEX).read_text())
    total = sum(each.nbytes for arrays in wanted.values() for each in arrays.values())
    assert index == {"metadata": {"by": "me", "total_size": total}, "weight_map": named}
    names = {each.name for each in made.folder.iterdir()}
    assert names == {*shards, INDEX, "config.json"}
    assert (made.folder / "config.json").read_text() == "{}"


def test_what_an_index_cannot_decide_is_refused(tmp_path: Path) -> None:
    folder = write_set(tmp_path / "m", {shard(1): ONE, shard(2): TWO})
    with pytest.raises(UsageError, match=r"has no model\.safetensors\.index\.json"):
        write_by_index(folder, tmp_path / "out")
    right = index_of({shard(1): ONE, shard(2): TWO})
    write_set(folder, {}, {"weight_map": right})
    with pytest.raises(UsageError, match="is the folder itself"):
        write_by_index(folder / INDEX, folder)
    with pytest.raises(UsageError, match="hold what it says and no more"):
        write_by_index(folder, tmp_path / "out")
    write_set(folder, {}, {"weight_map": right | {"c": shard(1)}})
    with pytest.raises(FormatError, match=f"tensor 'c' is not in {shard(1)}"):
        write_by_index(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    write_set(folder, {}, {"weight_map": {k: v for k, v in right.items() if k != "c"}})
    made = write_by_index(folder / INDEX, tmp_path / "out")  # the second shard is not named
    assert made.left_out == (shard(2),) and not made.removed
    with pytest.raises(OutputError):
        write_by_index(folder, tmp_path / "out")
    assert write_by_index(folder, tmp_path / "out", force=True).tensors == 2


# --- differing parts ----------------------------------------------------------------------------


class Bytes:
    """A file in memory; `drop` is what a mapped one forgets."""

    def __init__(self, data: bytes) -> None:
        self.view, self.size = memoryview(data), len(data)

    def drop(self, start: int, stop: int) -> None:
        assert 0 <= start <= stop


STEP = 4
SIZES = st.integers(0, 40)


@settings(max_examples=100, deadline=None)
@given(st.binary(min_size=30, max_size=40), st.lists(st.integers(0, 29)), SIZES, SIZES)
def test_ranges_hold_every_differing_byte(
    data: bytes, changed: list[int], first: int, last: int
) -> None:
    """Each is of one step, from where the range asked for begins, and has a differing byte."""
    start, stop = sorted(min(each, len(data)) for each in (first, last))
    broken = bytearray(data)
    for at in changed:
        broken[at] ^= 1 << (at % 8)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(evidence, "_STEP", STEP)
        patched.setattr(evidence, "_WINDOW", 2 * STEP)
        found = list(
            differing_pages(Bytes(bytes(broken)), Bytes(data), start, stop, "why")  # type: ignore[arg-type]
        )
    odd = {at for at in range(start, stop) if broken[at] != data[at]}
    steps = sorted({(at - start) // STEP for at in odd})
    wanted = [(start + STEP * i, min(start + STEP * (i + 1), stop), "why") for i in steps]
    assert [(each.start, each.stop, each.why) for each in found] == wanted


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 24), st.integers(0, 26), st.integers(1, 9), st.integers(0, 25))
def test_blocks_are_those_whose_digest_is_another(
    size: int, there: int, step: int, changed: int
) -> None:
    data = bytes(range(size))
    broken = bytearray(range(there))
    if changed < there:
        broken[changed] ^= 0xFF
    blocks = [(at, min(at + step, size)) for at in range(0, size, step)]
    digests = [hashlib.sha256(data[a:b]).hexdigest() for a, b in blocks]
    found = differing_blocks(
        Bytes(bytes(broken)),  # type: ignore[arg-type]
        {"size": step, "sha256": digests},
        size,
    )
    wanted = [
        (a, b) for a, b in blocks if a < there and (b > there or bytes(broken[a:b]) != data[a:b])
    ]
    assert [(each.start, each.stop) for each in found] == wanted


def test_a_damaged_shard_ends_the_making_of_an_index(tmp_path: Path) -> None:
    folder = write_set(tmp_path / "m", {shard(1): ONE, shard(2): TWO})
    (folder / shard(2)).write_bytes(b"\xff" * 20)
    with pytest.raises(AprfmtError):
        write_index(folder)
    assert not (folder / INDEX).exists()


@pytest.mark.parametrize(
    ("empty_entry", "lost", "first"),
    [(True, True, True), (False, True, False), (True, False, False)],
)
def test_shards_are_mended_before_the_index_that_is_made_from_them(
    empty_entry: bool, lost: bool, first: bool, tmp_path: Path
) -> None:
    """Seen red: two repairs were named, and not that the second reads what the first writes."""
    shards = {shard(1): ONE, shard(2): TWO}
    listed = index_of(shards) | ({"head.weight": shard(2)} if lost else {})
    folder = write_set(tmp_path / "m", shards, {"metadata": {}, "weight_map": listed})
    if empty_entry:
        path = folder / shard(2)
        raw = path.read_bytes()
        size = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + size])
        header["head.weight"] = {"dtype": "", "shape": [], "data_offsets": [0, 0]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :])
    told = aprfmt("validate", folder).out
    assert ("mend the damaged shards first (see layout), then: aprfmt repair" in told) == first
    assert ("aprfmt repair --index" in told) == lost, told


def test_a_damaged_file_is_not_replaced_by_less_of_it(tmp_path: Path) -> None:
    """Seen red: the only copy was replaced. One with surplus bytes alone loses nothing."""
    path = tmp_path / "model.safetensors"
    save_file({"a": np.ones((4, 4), np.float32), "b": np.ones((4, 4), np.float32)}, path)
    sound = path.read_bytes()
    path.write_bytes(sound[:-8])
    with pytest.raises(UsageError, match="1 of its tensors would be left out for good"):
        salvage(path, path, force=True)
    assert path.read_bytes() == sound[:-8]
    path.write_bytes(sound + b"surplus!")
    salvage(path, path, force=True)
    assert load_file(path).keys() == {"a", "b"}
