"""Scales that were rewritten, shares of ranks, shifted bytes: each rule by itself."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.causes.tensor import byte_shifts, rank_parameters, recoded_scales
from aprfmt.measure.proofs import Proof

# --- scales -------------------------------------------------------------------------------------


def stored_part(values: Any, *, name: str = "m.w.weight_scale", encoding: str = "F32") -> Any:
    values = np.asarray(values)
    info = SimpleNamespace(
        name=name, encoding=encoding, shape=values.shape, nbytes=values.size * values.itemsize
    )
    return SimpleNamespace(info=info, raw=lambda: memoryview(values.tobytes()))


SCALES = np.array([[0.5, 2.0], [0.25, 3.0]], np.float32)


def test_only_numbers_under_the_name_of_a_scale_are_compared() -> None:
    right = stored_part(SCALES)
    found: Any = recoded_scales._scale_part(right, stored_part(SCALES * 2))
    assert found.x.tolist() == [0.5, 2.0, 0.25, 3.0] and found.y.tolist() == [1.0, 4.0, 0.5, 6.0]
    assert (found.bits, found.shape, found.flipped) == (32, (2, 2), 0)
    assert found.units == (2.0**-24, 2.0**-24)
    codes = np.arange(4, dtype=np.int32)
    others: list[tuple[Any, Any]] = [
        (right, stored_part(SCALES, name="m.scale.weight")),  # known numbers, no scale
        (stored_part(SCALES, name="m.w.weight"), right),
        (right, stored_part(codes, encoding="I32")),  # a scale, no known numbers
        (stored_part(codes, encoding="I32"), right),
        (right, stored_part(SCALES[:1])),
        (right, stored_part(np.where(SCALES == 3, np.inf, SCALES))),
        (stored_part(np.where(SCALES == 3, np.nan, SCALES)), right),
    ]
    for a, b in others:
        assert recoded_scales._scale_part(a, b) is None


def test_so_many_numbers_are_looked_at_on_either_side(monkeypatch: pytest.MonkeyPatch) -> None:
    for most in (4, 3):
        monkeypatch.setattr(recoded_scales, "MOST", most)
        found = recoded_scales._scale_part(stored_part(SCALES), stored_part(SCALES))
        assert (found is not None) == (most == 4)
    for a, b in ((SCALES[:1], SCALES), (SCALES, SCALES[:1])):
        monkeypatch.setattr(recoded_scales, "_numbers", lambda part: pytest.fail("was read"))
        assert recoded_scales._scale_part(stored_part(a), stored_part(b)) is None


@pytest.mark.parametrize("bits", [0x1, 0x3, 0x80000007])
def test_flipped_bits_are_counted_of_a_single_number_alone(bits: int) -> None:
    def of(values: Any) -> Any:
        made = np.asarray(values, np.float32)
        turned = (made.view(np.uint32) ^ np.uint32(bits)).view(np.float32)
        return recoded_scales._scale_part(stored_part(made), stored_part(turned))

    assert of([0.5]).flipped == bits.bit_count()
    assert of([0.5, 0.25]).flipped == 0
    half: Any = recoded_scales._scale_part(
        stored_part(np.array([0.5], np.float32)),
        stored_part(np.array([0.25], np.float16), encoding="F16"),
    )
    assert half.flipped == 0 and half.bits == 16 and half.units == (2.0**-24, 2.0**-11)


# --- shares of ranks ----------------------------------------------------------------------------


def even(
    arrays: Any, held: Any, *, axis: int | None = 0, own: int | None = 0, shares: int = 2
) -> Any:
    layout = SimpleNamespace(axis=axis, shares=lambda arrays, rank: [None] * shares)
    reading: Any = SimpleNamespace(layout=layout, parameter=SimpleNamespace(axis=own))
    return rank_parameters._even_shares(reading, arrays, held)


@pytest.mark.parametrize("axis", [0, 1])
def test_ranks_that_divide_joined_matrices_as_one_are_found(axis: int) -> None:
    q = np.arange(24, dtype=np.int16).reshape(4, 6)
    k = np.arange(100, 112, dtype=np.int16).reshape((2, 6) if axis == 0 else (4, 3))
    whole = np.concatenate([q, k], axis)
    held = np.split(whole, 3, axis)
    found = even([q, k], held, axis=axis, own=axis)
    assert (found.cause, found.nbytes, found.free) == ("shard_order", whole.nbytes, 1)
    assert found.sample == held[0].tobytes()
    assert found.says == (
        "each of 3 ranks holds 1/3 of the joined rows as they follow each other, where it should "
        "hold 1/3 of every matrix that is joined"
    )
    assert even([q, k], held, axis=axis, own=axis, shares=1) is None  # one matrix: as it should be
    assert even([q, k], held, axis=axis, own=1 - axis) is None  # joined along another axis
    assert even([q, k], held, axis=None, own=None) is None
    assert even([q, k], held[::-1], axis=axis, own=axis) is None
    assert even([q, k], held[:2], axis=axis, own=axis) is None


# --- bytes that begin elsewhere -----------------------------------------------------------------

LINE = bytes(np.random.default_rng(8).permutation(256).astype(np.uint8)[:240])


@pytest.mark.parametrize(
    ("shift", "encoding", "columns", "text", "more"),
    [
        (8, "F32", 1, "B's data begins 8 bytes (2 values) too late", "232 of 240 bytes of n"),
        (-8, "F32", 1, "B's data begins 8 bytes (2 values) too early", "232 of 240 bytes of n"),
        (6, "F32", 1, "B's data begins 6 bytes too late", "234 of 240 bytes of n"),
        (-6, "F16", 1, "B's data begins 6 bytes (3 values) too early", "234 of 240 bytes of n"),
        (34, "Q8_0", 1, "B's data begins 34 bytes too late", "206 of 240 bytes of n"),
        (8, "F32", 10, "B's data begins 8 bytes (2 values) too late", "232 of 240 bytes of n"),
        (40, "F32", 1, "B's data begins 40 bytes (10 values) too late", "200 of 240 bytes of n"),
        (40, "F32", 10, "row i of B is row i+1 of A", "5 of 6 rows are equal there"),
        (-80, "F32", 10, "row i of B is row i-2 of A", "4 of 6 rows are equal there"),
    ],
)
def test_a_shift_is_told_in_the_largest_unit_that_it_is_a_multiple_of(
    shift: int, encoding: str, columns: int, text: str, more: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def count(a: Any, b: Any, by: int, start: int, unit: int) -> int:
        seen.append(unit)
        return 0

    monkeypatch.setattr(byte_shifts, "_count_sourceless", count)
    monkeypatch.setattr(byte_shifts, "make_finding", lambda *given: given)
    side = SimpleNamespace(row_bytes=40, columns=columns, rows=6, encoding=encoding)
    case: Any = SimpleNamespace(b=side, key="k", before=SimpleNamespace(relative=0.5))
    held: Any = LINE
    found: Any = byte_shifts._offset_explanation(case, shift, (LINE, held), "n")
    cause, keys, says, before, after, proof = found
    by_rows = columns > 1 and shift % 40 == 0
    assert cause == ("row_offset" if by_rows else "byte_offset") and keys == ("k",)
    assert says[0] == text and says[1].startswith(more)
    assert says[1].endswith("; the others come round, or are equal where they stand")
    assert (before, after) == (0.5, 0.0)
    assert proof == Proof(240 - abs(shift), 1.0, 1, np.log2(240))
    size = {"F32": 4, "F16": 2, "Q8_0": 34}[encoding]
    assert seen == [40 if by_rows else size if shift % size == 0 else 1]


def test_the_share_of_a_shift_is_of_the_bytes_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first of them on; those that have no source count as not explained."""
    monkeypatch.setattr(byte_shifts, "make_finding", lambda *given: given)
    side = SimpleNamespace(row_bytes=240, columns=1, rows=1, encoding="U8")
    case: Any = SimpleNamespace(b=side, key="k", before=SimpleNamespace(relative=0.5))
    for start, lost, share in ((0, 0, 1.0), (32, 100, 2 / 3), (32, 0, 1.0), (182, 50, 0.5)):
        monkeypatch.setattr(byte_shifts, "_count_sourceless", lambda *given, lost=lost: lost)
        held: Any = LINE
        found: Any = byte_shifts._offset_explanation(case, 8, (LINE, held), "n", start)
        assert found[-1].share == pytest.approx(share)
        assert ("come round" in found[2][1]) == (not lost)


@pytest.mark.parametrize("unit", [1, 4])
@pytest.mark.parametrize("read", [4, 1 << 20])
def test_values_without_a_source_are_counted_in_their_unit(
    read: int, unit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(byte_shifts, "READ", read)
    a, size, shift = bytearray(LINE), 240, 12
    for sign in (1, -1):
        begin = a[shift:] if sign > 0 else a[:-shift]
        end, lost = (bytes(a[:shift]), bytes(b ^ 1 for b in a[-shift:]))
        round_ = bytes(begin) + end if sign > 0 else bytes(a[-shift:]) + bytes(begin)
        one: Any = round_
        assert byte_shifts._count_sourceless(bytes(a), one, sign * shift, 0, unit) == 0
        other = bytearray(round_)
        place = size - shift if sign > 0 else 0
        other[place : place + shift] = lost if sign > 0 else bytes(b ^ 1 for b in a[:shift])
        one = bytes(other)
        assert byte_shifts._count_sourceless(bytes(a), one, sign * shift, 0, unit) == shift
        still = bytearray(round_)
        still[place : place + shift] = a[place : place + shift]
        one = bytes(still)
        assert byte_shifts._count_sourceless(bytes(a), one, sign * shift, 0, unit) == 0
        still[place] ^= 1
        one = bytes(still)
        assert byte_shifts._count_sourceless(bytes(a), one, sign * shift, 0, unit) == unit
