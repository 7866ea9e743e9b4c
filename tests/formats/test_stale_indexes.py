"""What an index of shards says against what the shards hold, and what stands beside it."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aprfmt.errors import FormatError
from aprfmt.formats.safetensors.index_check import (
    IndexFault,
    check_weight_map,
    find_replacement_shards,
)

FILES, NAMES = ("x", "y"), ("a", "b", "c")
INDEX = Path("model.safetensors.index.json")


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(st.sampled_from(NAMES), st.sampled_from(FILES)),
    st.fixed_dictionaries({file: st.sets(st.sampled_from(NAMES)) for file in FILES}),
)
def test_each_tensor_is_right_moved_absent_or_not_named(
    named: dict[str, str], stored: dict[str, set[str]]
) -> None:
    faults: list[IndexFault] = []
    check_weight_map(INDEX, named, stored, faults)
    there = set().union(*stored.values())
    right = {name for name, file in named.items() if name in stored[file]}
    moved = [name for name in named if name in there - right]
    absent = [name for name in named if name not in there]
    loose = there - set(named)
    wanted = [set(names) for names in (moved, absent, loose) if names]
    assert [set(fault.where) for fault in faults] == wanted
    said = " / ".join(fault.says for fault in faults)
    kinds = {"names another shard": moved, "that no shard holds": absent, "does not name": loose}
    assert [words for words in kinds if words in said] == [w for w, names in kinds.items() if names]
    for fault in faults:
        count = len(fault.where)
        assert (f"{count} tensors" if count > 1 else "tensor") in fault.says
        if "another shard" in fault.says:
            for (found, listed), name in zip(fault.examples, moved, strict=True):
                homes = {file for file in FILES if name in stored[file]}
                assert listed == named[name] and found in {f"{name} in {home}" for home in homes}
    if faults:
        with pytest.raises(FormatError, match=str(INDEX)):
            check_weight_map(INDEX, named, stored, None)
    else:
        check_weight_map(INDEX, named, stored, None)


def shard(number: int, count: int) -> str:
    return f"model-{number:05}-of-{count:05}.safetensors"


OLD, NEW = [shard(at, 2) for at in (1, 2)], [shard(at, 3) for at in (1, 2, 3)]
ONE = "model.safetensors"
# Files that are there, beside an index of OLD -> what is found instead, a part of what is said.
FOLDERS: Mapping[tuple[str, ...], tuple[list[str], str]] = {
    tuple(OLD): ([], ""),
    (OLD[0],): ([], ""),
    (): ([], ""),
    tuple(NEW): (NEW, f"none of the 2 shards it names is there ({OLD[0]}), while another set of 3"),
    tuple(NEW[:2]): ([], ""),
    (ONE,): ([ONE], f"none of the 2 shards it names is there ({OLD[0]}), while {ONE} is: "),
    (ONE, OLD[0]): ([ONE], f"1 of the 2 shards it names are missing ({OLD[1]}), while {ONE} is: "),
    (ONE, OLD[1]): ([ONE], f"1 of the 2 shards it names are missing ({OLD[0]}), while {ONE} is: "),
    (ONE, *OLD): ([], ""),
    (ONE, *NEW): (NEW, "while another set of 3 is, whole"),
    (OLD[0], *NEW): ([], ""),
}


@pytest.mark.parametrize("there", FOLDERS, ids=lambda there: "+".join(there) or "nothing")
def test_a_stale_index_is_told_by_what_stands_beside_it(
    there: tuple[str, ...], tmp_path: Path
) -> None:
    for name in there:
        (tmp_path / name).write_bytes(b"")
    wanted, says = FOLDERS[there]
    path, homes = tmp_path / INDEX, {name: tmp_path / name for name in OLD}
    faults: list[IndexFault] = []
    found = find_replacement_shards(path, homes, faults)
    assert found == ({name: tmp_path / name for name in wanted} if wanted else None)
    if not wanted:
        assert not faults and find_replacement_shards(path, homes, None) is None
        return
    (fault,) = faults
    left = [name for name in OLD if name not in there]
    assert says in fault.says and list(fault.where) == left
    assert fault.examples == tuple(zip(wanted, left, strict=False))
    assert fault.mended == (len(left) == 2)
    todo = (
        f"make the index anew: aprfmt repair --index {tmp_path}"
        if len(left) == 2
        else f"take it away, and {next(name for name in OLD if name in there)} with it"
    )
    with pytest.raises(FormatError) as caught:
        find_replacement_shards(path, homes, None)
    assert str(caught.value) == f"{path}: {fault.says} ({wanted[0]}); {todo}"
