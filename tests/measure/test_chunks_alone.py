"""How the values of a pair come in chunks of rows, and in steps of their encodings."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.measure import tensors
from aprfmt.measure.bounds import BEYOND_SHARE
from aprfmt.measure.coarse_steps import WideStepsOfBlocks


class Side:
    """A tensor of float32 numbers, which counts what is asked of it."""

    encoding = "F32"

    def __init__(self, shape: tuple[int, ...], asked: list[Any], **more: Any) -> None:
        self.values = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
        self.shape, self.asked = shape, asked
        self.encodings = [more.get("name", "F32")]
        self.row_bytes = more.get("row_bytes", 4)
        self.restored = more.get("restored", False)
        self.lattice = more.get("lattice")

    def numpy(self) -> Any:
        self.asked.append("all")
        return self.values

    def rows(self, start: int, stop: int) -> Any:
        self.asked.append((start, stop))
        return self.values.reshape(-1, self.shape[-1])[start:stop]

    def __getitem__(self, part: slice) -> Any:
        self.asked.append((part.start, part.stop))
        return self.values[part]

    def drop(self) -> None:
        self.asked.append("drop")


def chunks(shape: tuple[int, ...], a: Any = None, b: Any = None) -> list[Any]:
    """What is asked of each side, chunk by chunk, and where its steps begin and end."""
    asked: tuple[list[Any], list[Any]] = ([], [])
    sides: list[Any] = [
        Side(shape, own, **more or {}) for own, more in zip(asked, (a, b), strict=True)
    ]
    found = []
    for x, y, steps in tensors.value_chunks(sides[0], sides[1]):
        found.append((asked[0][-1], steps._rows))
        assert np.array_equal(x, y) and asked[0] == asked[1]
    assert asked[0].count("drop") == (0 if asked[0] == ["all"] else len(found))
    return found


def test_values_come_in_chunks_of_rows_where_rows_are_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All at once where one side decodes no rows, or has none; a long vector in pieces."""
    monkeypatch.setattr(tensors, "CHUNK", 8)
    assert chunks((5, 4)) == [((0, 2), (0, 2)), ((2, 4), (2, 4)), ((4, 5), (4, 5))]
    assert chunks((2, 1, 4)) == [((0, 2), (0, 2))]
    assert chunks((3, 9)) == [((at, at + 1), (at, at + 1)) for at in range(3)]
    assert chunks((17,)) == [((0, 8), (0, 1)), ((8, 16), (0, 1)), ((16, 24), (0, 1))]
    assert chunks((8,)) == [((0, 8), (0, 1))]
    whole: tuple[Any, ...] = ({"row_bytes": None}, {"restored": True})
    for more in whole:
        for shape, rows in (((5, 4), 5), ((17,), 1)):
            assert chunks(shape, more) == chunks(shape, None, more) == [("all", (0, rows))]
    for more in ({"name": "Q4_0"}, {"lattice": object()}):
        assert chunks((17,), more) == chunks((17,), None, more) == [("all", (0, 1))]
        assert len(chunks((5, 4), more)) == 3
    assert chunks((), None) == [("all", (0, 1))]
    assert chunks((3, 0)) == [("all", (0, 3))]


def test_a_copy_in_blocks_is_the_coarser_of_two_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WideStepsOfBlocks, "is_for", lambda encoding, columns: columns == 32)

    def copied(first: str, second: str, shape: Any = (2, 32), lattice: Any = None) -> str:
        a, b = (
            SimpleNamespace(encoding=name, shape=shape, lattice=lattice) for name in (first, second)
        )
        found: Any = tensors.block_copy(a, b)  # type: ignore[arg-type]
        return "" if found is None else "A" if found is a else "B"

    assert copied("Q4_0", "F32") == copied("Q4_0", "Q8_0") == "A"
    assert copied("F32", "Q4_0") == copied("Q8_0", "Q4_0") == "B"
    assert copied("Q4_0", "Q4_0") == copied("Q4_0", "F32", (32,)) == ""
    assert copied("Q4_0", "F32", lattice=object()) == copied("Q4_0", "F32", (2, 31)) == ""


def test_a_distance_is_usual_for_the_coarser_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """At its bound; with an importance matrix only where few values are beyond a step."""
    monkeypatch.setattr(tensors, "NMSE", {"Q4_0": 0.0625})
    monkeypatch.setattr(tensors, "NMSE_SLACK", 4.0)
    beyond = BEYOND_SHARE

    def judged(off: float, share: float, imatrix: bool, *names: str) -> str:
        diff = SimpleNamespace(encoding_a=names[0], encoding_b=names[1], verdict="")
        monkeypatch.setattr(tensors, "replace", lambda of, verdict, cause: f"{verdict}: {cause}")
        found: Any = tensors._judge_by_noise(diff, off, share, imatrix)  # type: ignore[arg-type]
        return found if isinstance(found, str) else ""

    usual = "WITHIN: mean square error usual for Q4_0"
    for names in (("Q4_0", "F32"), ("Q8_0", "Q4_0")):
        assert judged(0.5, 1.0, False, *names) == judged(0.5, beyond, True, *names) == usual
        assert judged(0.501, 0.0, False, *names) == judged(0.5, beyond * 1.01, True, *names) == ""
    assert judged(0.0, 0.0, False, "F32", "Q8_0") == ""
