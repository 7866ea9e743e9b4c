"""How the files of a dump's ranks belong together, by themselves."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.errors import FormatError
from aprfmt.inference.engines import dump_folders
from aprfmt.inference.engines.rank_joining import (
    DumpedArray,
    JoinedArray,
    PointWidths,
    UnclearLayoutError,
)
from aprfmt.inference.engines.rank_types import ranks_of_another_type

Ranks = Sequence[Mapping[str, int]]
FOUR: Ranks = [{"dp": d, "tp": t} for d in range(2) for t in range(2)]
# what -> (the ranks' numbers, sizes that files name, axes, axes of other names)
FOUND: dict[str, tuple[Ranks, dict[str, int], dict[str, list[int]], dict[str, str]]] = {
    "none": ([{}], {}, {}, {}),
    "one rank": ([{"tp": 0}], {"tp": 1}, {}, {}),
    "one axis": ([{"tp": 1}, {"tp": 0}], {"tp": 2}, {"tp": [0, 1]}, {}),
    "two axes": (FOUR, {}, {"tp": [0, 1], "dp": [0, 1]}, {}),
    "two that go together": (
        [{"tp": 0, "ep": 0}, {"tp": 1, "ep": 1}],
        {},
        {"tp": [0, 1]},
        {"ep": "tp"},
    ),
    "the other way round": (
        [{"tp": 0, "ep": 1}, {"tp": 1, "ep": 0}],
        {},
        {"tp": [0, 1]},
        {"ep": "tp"},
    ),
    "two of four that go together": (
        [{"tp": t, "ep": e, "dp": e} for t in range(2) for e in range(2)],
        {},
        {"tp": [0, 1], "ep": [0, 1]},
        {"dp": "ep"},
    ),
    "the process as well": (
        [{"tp": t, "rank": t} for t in range(2)],
        {},
        {"tp": [0, 1]},
        {"rank": "tp"},
    ),
    "processes of two axes": (
        [{**one, "rank": n} for n, one in enumerate(FOUR)],
        {},
        {"tp": [0, 1], "dp": [0, 1]},
        {},
    ),
    "the process alone": ([{"rank": 0}, {"rank": 1}], {}, {"rank": [0, 1]}, {}),
    "processes of one tp rank each": (
        [{"tp": 0, "rank": 0}, {"tp": 0, "rank": 1}],
        {},
        {"rank": [0, 1]},
        {},
    ),
}
LACKING: dict[str, tuple[Ranks, dict[str, int], str]] = {
    "the last": ([{"tp": 0}], {"tp": 2}, "rank 1 of 2 is missing; there are 0$"),
    "the first": ([{"tp": 1}], {}, "rank 0 is missing; there are 1, and perhaps more$"),
    "in between": ([{"tp": 0}, {"tp": 2}], {}, "rank 1 is missing; there are 0, 2, and perhaps"),
    "beyond the size": ([{"tp": 0}, {"tp": 2}], {"tp": 2}, "rank 1 is missing; .* perhaps more$"),
    "a pair": (FOUR[:3], {}, "the rank tp 1, dp 1 is missing; 3 of 4 are there$"),
}


def test_numbers_of_ranks_are_axes_or_other_names_of_them() -> None:
    for what, (ranks, sizes, values, alias) in FOUND.items():
        axes = dump_folders._find_axes(Path("d"), ranks, sizes)
        assert (dict(axes.values), dict(axes.alias)) == (values, alias), what
        assert len({axes.coordinates(one) for one in ranks}) == (len(ranks) if values else 1), what
    for ranks, sizes, says in LACKING.values():
        with pytest.raises(FormatError, match=says):
            dump_folders._find_axes(Path("d"), ranks, sizes)


def rows_of(*arrays: tuple[str, tuple[int, ...]]) -> Any:
    """Return arrays (name, rank) of a step; each holds its rank's numbers."""
    found = dump_folders._Rows(texts={"rids": ["a"]})
    for name, at in arrays:
        value = np.array([at], np.float32)
        one = DumpedArray(name, {}, value.shape, "float32", partial(np.asarray, value), f"{at}")
        found.arrays.setdefault(name, {})[at] = one
    return found


def test_a_pass_has_the_arrays_of_its_own_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is unclear is left out and named; where nothing else is there, it is the error."""

    def join(name: str, whole: Any, *given: object) -> JoinedArray:
        if name.startswith("odd"):
            raise UnclearLayoutError(f"{name}: two ways")
        (one,) = whole.values()
        return JoinedArray(name, one.shape, one.dtype, one.read)

    monkeypatch.setattr(dump_folders, "_join_axes", join)
    axes = dump_folders._Axes({"tp": [0], "dp": [0, 1]}, {})
    spec: Any = SimpleNamespace(dims=lambda name: None)

    def passed(stream: int, *arrays: tuple[str, tuple[int, ...]]) -> Any:
        rows = rows_of(*arrays)
        made, odd = dump_folders._join_pass(
            Path("d"), 3, stream, rows, axes, spec, PointWidths(), ()
        )
        assert not odd and made.texts == {"rids": ["a"]}
        return made

    every = [(name, (0, dp)) for name in ("y", "odd.x", "x") for dp in range(2)]
    for stream in range(2):
        made = passed(stream, *every, ("other", (0, 1 - stream)))
        assert [*made.arrays] == ["y", "x"] and made.left == {"odd.x": "two ways"}
        assert all(one.read().tolist() == [[0, stream]] for one in made.arrays.values())
    for ids in ([], [("model.input_ids", (0, 0))]):
        with pytest.raises(FormatError, match=r"^d: step 3: odd\.x: two ways$"):
            passed(0, *every[2:4], *ids)
    assert not passed(1, ("x", (0, 0))).arrays


@pytest.mark.parametrize(
    "kinds, says",
    [
        (("", "bfloat16"), [("tp rank 1", "bfloat16")]),
        (("float32 of 16 bits", "float32 of 16 bits"), []),
        (("float16", "", ""), [("tp rank 0", "float16")]),
        (("", ""), []),
        (("bfloat16", "bfloat16"), []),
        (("", "bfloat16 in one"), []),
    ],
)
def test_a_rank_that_holds_a_shorter_type_is_named(
    kinds: Sequence[str], says: list[tuple[str, str]]
) -> None:
    found = []
    for at in range(5):
        for rank, kind in enumerate(kinds):
            short = kind and (at == 4 or not kind.endswith("one"))
            x = np.full((3, 8), 1.0 if short else 1 / 3, np.float32)
            read, dtype = partial(np.asarray, x), kind.split()[0] if short else "float32"
            found.append((0, DumpedArray(f"a{at}", {"tp": rank}, x.shape, dtype, read, "f")))
    assert list(ranks_of_another_type(found, "tp")) == says
