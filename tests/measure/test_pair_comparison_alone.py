"""A pair of tensors is compared by bytes, and by values where these differ."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.errors import CodecError
from aprfmt.measure import activation_scales, pair_comparison, tensors
from aprfmt.measure.alignment import TensorPair
from aprfmt.measure.pair_comparison import compare_pair


class Side:
    """A tensor of stored numbers, as much of one as comparing by bytes asks for."""

    def __init__(self, raw: bytes, encoding: str = "F32", **more: Any) -> None:
        self.data = raw
        self.encoding, self.encodings = encoding, (encoding,)
        self.names = more.get("names", ("w",))
        self.shape = more.get("shape", (len(raw) // 4,))
        self.steps: tuple[str, ...] = more.get("steps", ())
        self.damage = more.get("damage", "")
        self.stored = more.get("stored", (SimpleNamespace(packed=None, parts={}),))
        self.parts = more.get("parts", {})
        self.runs = raw if more.get("reads", True) else None

    def stored_runs(self) -> bytes:
        return self.data


RAW = np.arange(6, dtype="<f4").tobytes()
OTHER = RAW[:9] + b"\x7f" + RAW[10:]
asked: list[tuple[bytes, bytes]] = []
again: list[tuple[bytes, bytes]] = []


def first(a: Any, b: Any) -> int | None:
    """Return the first differing byte, and note what was read."""
    asked.append((a, b))
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)


@pytest.fixture(autouse=True)
def judged(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Note each comparison of values, which says DIFFERENT, and clear what was read."""
    asked.clear()
    again.clear()
    found: list[Any] = []

    def second(a: Any, b: Any) -> int | None:
        again.append((a, b))
        return 9 if a != b else None

    def by_values(diff: Any, a: Any, b: Any, imatrix: bool) -> Any:
        found.append(("values", diff.first_byte, a.encoding, b.encoding, imatrix))
        return diff

    def by_label(diff: Any, a: Any, b: Any) -> Any:
        found.append(("label", diff.first_byte, a.encoding, b.encoding))
        return diff

    monkeypatch.setattr(tensors, "compare_values", by_values)
    monkeypatch.setattr(tensors, "judge_mislabelled", by_label)
    monkeypatch.setattr(pair_comparison, "first_difference", second)
    return found


def compare(a: Any, b: Any, *layout: str, imatrix: bool = False) -> Any:
    return compare_pair(TensorPair("k", a, b, layout), imatrix, first)


def test_equal_bytes_are_read_once() -> None:
    found = compare(Side(RAW, names=("x", "y", "z")), Side(RAW, names=("w",)))
    assert (found.key, found.verdict) == ("k", "SAME_BYTES")
    assert len(asked) == 1 and not again
    assert (found.name_a, found.name_b) == ("x, y", "w")
    assert (found.shape_a, found.shape_b, found.encoding_a) == ((6,), (6,), "F32")


def test_a_differing_byte_is_noted_before_the_values_are_compared(judged: list[Any]) -> None:
    for imatrix in (False, True):
        found = compare(Side(RAW), Side(OTHER), imatrix=imatrix)
        assert found.first_byte == 9
    assert judged == [("values", 9, "F32", "F32", False), ("values", 9, "F32", "F32", True)]
    assert asked == again == [(RAW, OTHER)] * 2  # as stored first, then the logical ones
    sides: Any = (Side(RAW), Side(OTHER))
    assert compare_pair(TensorPair("k", *sides), first=first).first_byte == 9
    assert judged[-1] == ("values", 9, "F32", "F32", False)


def test_bytes_of_two_encodings_are_a_label_where_they_are_equal(judged: list[Any]) -> None:
    half = {"shape": (6,)}
    compare(Side(RAW[:12], "F16", **half), Side(RAW[:12], "BF16", **half))
    compare(Side(RAW[:12], "F16", **half), Side(OTHER[:12], "BF16", **half))
    compare(Side(RAW, "F32"), Side(RAW[:12], "F16", **half))  # not as many bytes
    assert judged == [
        ("label", None, "F16", "BF16"), ("values", 9, "F16", "BF16", False),
        ("values", None, "F32", "F16", False),
    ]  # fmt: skip
    assert asked == [(RAW[:12], RAW[:12]), (RAW[:12], OTHER[:12])] and not again


def test_equal_bytes_through_other_steps_are_the_same_values(judged: list[Any]) -> None:
    turned = Side(RAW, steps=("transposed", "joined"))
    found = compare(turned, Side(RAW, steps=("joined", "split")))
    assert found.verdict == "SAME_VALUES" and not judged
    assert found.layout == ("transposed in A", "split in B")
    found = compare(Side(RAW, steps=("joined",)), Side(RAW, steps=("joined",)))
    assert found.verdict == "SAME_BYTES" and found.layout == ()
    found = compare(Side(RAW), Side(RAW), "widened")
    assert found.verdict == "SAME_VALUES" and found.layout == ("widened",)


def test_bytes_that_no_runs_give_are_compared_by_values(judged: list[Any]) -> None:
    for a, b in (((True, False)), (False, True), (False, False)):
        compare(Side(RAW, reads=a), Side(OTHER, reads=b))
    assert judged == [("values", None, "F32", "F32", False)] * 3


def test_a_side_that_is_missing_or_damaged_is_said() -> None:
    assert compare(Side(RAW), None).verdict == "ONLY_IN_A"
    found = compare(None, Side(RAW))
    assert found.verdict == "ONLY_IN_B" and (found.name_a, found.encoding_a) == ("", "")
    assert found.shape_a is None and found.shape_b == (6,)
    found = compare(Side(RAW), Side(RAW, damage="is cut"))
    assert (found.verdict, found.cause) == ("UNREADABLE", "is cut")
    found = compare(Side(RAW, damage="lost"), None)
    assert (found.verdict, found.cause) == ("UNREADABLE", "lost")
    assert not asked


def test_other_shapes_are_not_read_but_packed_parts_are_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checked: list[Any] = []
    monkeypatch.setattr(activation_scales, "check_packed_parts", checked.append)
    plain, packed = Side(RAW), Side(RAW, shape=(2, 3))
    assert compare(plain, packed).verdict == "SHAPE_DIFFERS" and not checked
    packed.stored = (SimpleNamespace(packed=None), SimpleNamespace(packed=dict))
    assert compare(plain, packed).verdict == "SHAPE_DIFFERS" and checked == [packed]
    assert compare(packed, plain).verdict == "SHAPE_DIFFERS"

    def wrong(side: Any) -> None:
        raise CodecError("w: no whole groups")

    monkeypatch.setattr(activation_scales, "check_packed_parts", wrong)
    found = compare(plain, packed)
    assert (found.verdict, found.cause) == ("UNREADABLE", "w: no whole groups")
    assert not asked


def test_values_that_cannot_be_read_are_unreadable(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any) -> None:
        raise CodecError("w: its scale is NaN")

    monkeypatch.setattr(tensors, "compare_values", fails)
    found = compare(Side(RAW), Side(OTHER))
    assert (found.verdict, found.cause) == ("UNREADABLE", "w: its scale is NaN")
