"""What is said of rows, scales and tables in another order: each order is made, then named.

An order is applied to numbers of rows; the sentence has to name the one that was applied.
"""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aprfmt.causes.tensor import packed_scales, token_tables
from aprfmt.causes.tensor.fused_layouts import layout_words, worded_orders
from aprfmt.causes.tensor.packed_scales import _crowd_their_type, _minima_relation, _scale_relation
from aprfmt.causes.tensor.token_tables import extra_rows_text, is_token_table
from aprfmt.codecs import fp8

Array = np.ndarray
QKV = [("q", 8), ("k", 4), ("v", 4)]
PAIR = [("gate", 6), ("up", 6)]
ALL_QKV, ALL_PAIR = "all q, then all k, then all v", "all gate, then all up"

# What stands in B, the number of row of A at each of its places, parts, groups, experts.
LAYOUTS: dict[str, tuple[list[int], Any, int, int]] = {
    f"[q k v]: {ALL_QKV} in A became [q k v] per KV group in B": (
        [0, 1, 2, 3, 8, 9, 12, 13, 4, 5, 6, 7, 10, 11, 14, 15], QKV, 2, 1),
    f"[q k v]: {ALL_QKV} in A became all k, then all q, then all v in B": (
        [*range(8, 12), *range(8), *range(12, 16)], QKV, 2, 1),
    f"[gate up]: {ALL_PAIR} in A became [gate up] row by row in B": (
        [0, 6, 1, 7, 2, 8, 3, 9, 4, 10, 5, 11], PAIR, 0, 1),
    f"[gate up]: [gate up] row by row in A became {ALL_PAIR} in B": (
        [0, 2, 4, 6, 8, 10, 1, 3, 5, 7, 9, 11], PAIR, 0, 1),
    f"[gate up]: {ALL_PAIR} in A became [gate up] per part of 2 (tensor parallel) in B": (
        [0, 1, 2, 6, 7, 8, 3, 4, 5, 9, 10, 11], PAIR, 0, 1),
    f"[gate up] of each expert: {ALL_PAIR} in A became [gate up] row by row in B": (
        [0, 2, 1, 6, 8, 7, 3, 5, 4, 9, 11, 10], PAIR, 0, 2),
}  # fmt: skip


@pytest.mark.parametrize("says", LAYOUTS)
def test_a_layout_is_named(says: str) -> None:
    order, parts, heads, outer = LAYOUTS[says]
    if outer == 1:
        assert layout_words(np.array(order), parts, heads, outer) == says
    else:  # inside each of two experts: half of the rows are one expert's
        first = next(o for words, o in worded_orders(parts, heads, outer) if words == says)
        rows = np.arange(12).reshape(2, 2, 3)  # part, expert, row
        fused = rows.transpose(1, 0, 2)  # as it is stored: expert by expert
        moved = fused.transpose(0, 2, 1)  # rows of an expert's two parts alternate
        place = {int(row): at for at, row in enumerate(fused.reshape(-1))}
        wanted = [int(moved.reshape(-1)[place[row]]) for row in range(12)]
        assert first.tolist() == wanted


@pytest.mark.parametrize(("parts", "heads"), [(QKV, 2), (PAIR, 0), ([("q", 6), ("k", 6)], 3)])
def test_every_layout_and_its_inverse_are_orders_of_all_rows(parts: Any, heads: int) -> None:
    orders = list(worded_orders(parts, heads))
    count = sum(size for _, size in parts)
    for (there, one), (back, other) in zip(orders[::2], orders[1::2], strict=True):
        assert np.array_equal(np.sort(one), np.arange(count))
        assert np.array_equal(one[other], np.arange(count))
        begin, end = there.partition(": ")[2].split(" in A became ")
        assert back.endswith(f": {end.removesuffix(' in B')} in A became {begin} in B")


@pytest.mark.parametrize(
    ("by", "said"),
    [(1, "1: row i of B is row i+1 of A, 1 come round"), (4, "4: row i of B is row i+4 of A,"),
     (5, "5: row i of B is row i+5 of A, 5 come round; the halves are exchanged"),
     (9, "-1: row i of B is row i-1 of A, 1 come round")],
)  # fmt: skip
def test_a_rotation_is_told_by_the_shorter_way(by: int, said: str) -> None:
    found = layout_words((np.arange(10) + by) % 10, [("a", 3), ("b", 7)], 0)
    assert found.startswith(f"[a b]: rotated by {said}")
    assert ("halves" in found) == (by == 5)


@pytest.mark.parametrize("blocks", [24, 25])
def test_blocks_are_named_by_their_numbers_in_a(blocks: int) -> None:
    order = np.arange(blocks)
    order[[0, 2, 5]] = order[[5, 0, 2]]
    rows = (order[:, None] * 3 + np.arange(3)).reshape(-1)
    found = layout_words(rows, [("a", 7), ("b", 3 * blocks - 7)], 0)
    head = "[a b]: blocks of 3 rows in another order, by numbers of A: 5, 1, 0, 3, 4, 2, 6"
    assert found.startswith(head) and found.endswith(" ...") == (blocks > 24)
    scattered = np.random.default_rng(1).permutation(30)
    assert layout_words(scattered, [("a", 7), ("b", 23)], 0) == ""


# --- scales -------------------------------------------------------------------------------------

ROWS, GROUPS, WIDE = 6, 5, 16
TRUE = np.random.default_rng(2).uniform(0.5, 4.0, (ROWS, GROUPS))
TRUE[0, 0] = 0.3  # the same in no other order


def copy_of(stored: Array, **more: Any) -> Any:
    """Return a copy of ROWS rows with a scale for each WIDE elements."""
    grouping = SimpleNamespace(rows=1, columns=WIDE)
    values = np.ones((ROWS, GROUPS * WIDE))
    reader = SimpleNamespace(encoding="GPTQ", side=SimpleNamespace(stored=()))
    return SimpleNamespace(
        scales=stored.reshape(-1),
        y=values,
        grouping=grouping,
        again=False,
        scheme="",
        reader=reader,
        **more,
    )


def to_power(x: Array) -> Array:
    return np.asarray(2.0 ** np.ceil(np.log2(x)))


RELATIONS: dict[str, Callable[[Array], Array]] = {
    "they are ignored, as if each were 1": np.ones_like,
    "they are inverted: 1/s stands for s": lambda s: 1 / s,
    "they are inverted, up to one factor": lambda s: 7 / s,
    "each was rounded to a power of two": to_power,
    "each is that of the group before": lambda s: np.roll(s, 1, 1),
    "each is that of the group after": lambda s: np.roll(s, -1, 1),
    "each is that of the row of groups before": lambda s: np.roll(s, 1, 0),
    "each is that of the row of groups after": lambda s: np.roll(s, -1, 0),
    "they are transposed": lambda s: s.T.reshape(s.shape),
    "those of the groups stand in reverse": lambda s: s[:, ::-1],
    "those of the rows stand in reverse": lambda s: s[::-1],
    "one scale is shared by all rows": lambda s: s[:1] + 0 * s,
    "one scale is shared by all groups of a row": lambda s: s[:, :1] + 0 * s,
    "one scale is shared by all": lambda s: s[0, 0] + 0 * s,
    packed_scales.SHARED: lambda s: np.repeat(s.reshape(-1)[::6], 6).reshape(s.shape),
    "": lambda s: s * np.random.default_rng(5).uniform(1.2, 3, s.shape),
}


@pytest.mark.parametrize("says", RELATIONS)
def test_what_was_done_to_scales_is_named(says: str) -> None:
    stored = np.ascontiguousarray(RELATIONS[says](TRUE))
    wrong = np.abs(stored / TRUE - 1).reshape(-1) > 0.05
    found = _scale_relation(copy_of(stored), TRUE.reshape(-1), wrong, 1e-3)
    assert found.startswith(says) and bool(found) == bool(says)
    some = wrong & (np.cumsum(wrong) <= 5)  # a few cells are no rule of all
    if "shared" in says:
        assert _scale_relation(copy_of(stored), TRUE.reshape(-1), some, 1e-3) == ""


@pytest.mark.parametrize("sharing", [False, True])
def test_equal_scales_are_shared_only_where_they_are_right_somewhere(sharing: bool) -> None:
    """Seen red: other scales of few values, one right by accident, were said to be shared."""
    if sharing:
        stored = np.repeat(TRUE.reshape(-1)[::6], 6)
    else:
        stored = np.random.default_rng(6).choice([0.7, 1.3, 2.1, 2.9, 3.7], TRUE.size)
        stored[0] = TRUE[0, 0]
    wrong = np.abs(stored / TRUE.reshape(-1) - 1) > 0.05
    found = _scale_relation(copy_of(stored), TRUE.reshape(-1), wrong, 1e-3)
    assert found == (packed_scales.SHARED if sharing else "")


@pytest.mark.parametrize("value", [1.0, 1 / 3])
def test_scales_are_shared_only_where_their_type_tells_more_of_them(value: float) -> None:
    """Seen red: scales near each other, of values in BF16, were said to be one."""
    stored = 1 + np.arange(30) % 4 / 128  # all that BF16 has there
    right = np.where(np.arange(30) < 4, stored, stored * TRUE.reshape(-1))
    copy = copy_of(stored)
    copy.y = copy.y * value
    found = _scale_relation(copy, right, np.arange(30) >= 4, 1e-3)
    assert found == ("" if value == 1.0 else packed_scales.SHARED)


@pytest.mark.parametrize(
    ("steps", "crowded"),
    [
        ([0, 1, 3], True),
        ([0, 3, 7], False),
        ([0, -1, 3], False),  # seen red: signs were counted among scales, not in their range
        ([0, -1, 3, -3, 2], True),
        ([0, 1, 3, None], True),  # seen red: a range that began at the scale of an empty group
        ([0, 3, 7, None], False),
        ([None, None], False),
    ],
)
def test_scales_crowd_the_floats_of_their_range(steps: list[int | None], crowded: bool) -> None:
    """A step is one of BF16 above 1; a negative one is of a scale below 0, None of an empty group.

    Blocks of Q4_0, Q5_0 and IQ4_NL have scales of both signs, those of Q8_0 of one.
    """
    sizes = [0.0 if n is None else math.copysign(1 + abs(n) / 128, n) for n in steps]
    scales = np.repeat(np.array(sizes), 4)
    assert _crowd_their_type(copy_of(scales), scales) == crowded
    fine = copy_of(scales)
    fine.y = fine.y / 3
    assert not _crowd_their_type(fine, scales)


@pytest.mark.parametrize("apart", [0.0, 1e-3])
def test_scales_that_differ_in_their_bytes_are_not_shared(apart: float) -> None:
    stored = TRUE[0, 0] * (1 + apart * np.arange(30) / 30)
    copy = copy_of(stored)
    info = SimpleNamespace(shape=(30,), encoding="F64")
    part = SimpleNamespace(info=info, raw=lambda: stored.tobytes())
    copy.reader.side = SimpleNamespace(stored=(SimpleNamespace(parts={".absmax": part}),))
    copy.reader.rows, copy.reader.columns = copy.y.shape
    found = _scale_relation(copy, TRUE.reshape(-1), np.ones(30, bool), 1e-3)
    assert found == ("" if apart else "one scale is shared by all")


def test_powers_of_two_that_stand_for_others_are_not_shared() -> None:
    """Seen red: exponents, of which all groups have a few, were said to be shared or misread."""
    right = to_power(TRUE).reshape(-1)
    wrong = np.arange(right.size) % 3 > 0
    stored = np.where(wrong, right * np.where(right > 1, 0.5, 2.0), right)
    assert _scale_relation(copy_of(stored), right, wrong, 1e-3) == ""


@pytest.mark.parametrize("kind", [fp8.E4M3, fp8.E5M2])
def test_scales_that_were_rounded_are_of_the_coarsest_type_that_has_them(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = kind.values.astype(np.float64)
    values = np.unique(values[np.isfinite(values) & (values > 0)])
    nearest = values[np.abs(values - TRUE.reshape(-1, 1)).argmin(1)]
    found = _scale_relation(copy_of(nearest), TRUE.reshape(-1), np.ones(30, bool), 1e-4)
    assert f"rounded to {kind.name} " in found
    monkeypatch.setattr(packed_scales, "_are_fp8_codes", lambda copy: True)
    ignored = _scale_relation(copy_of(nearest), TRUE.reshape(-1), np.ones(30, bool), 1e-4)
    assert ignored == "they are ignored, as if each were 1"


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=2, max_size=8, unique=True), st.integers(2, 80))
def test_numbers_are_rounded_to_the_values_around_them(given_values: list[int], twice: int) -> None:
    values, x = np.sort(np.array(given_values, np.float64)), np.array([twice / 2])
    if not values[0] < x[0] <= values[-1]:
        return
    above = values[values >= x[0]].min()
    below = values[values <= x[0]].max()
    low, high = packed_scales._neighbours(values, x)
    assert (low[0], high[0]) == (values[values < x[0]].max(), above)
    assert packed_scales._round_up(values, x)[0] == above
    assert packed_scales._round_down(values, x)[0] == below
    nearest = packed_scales._round_nearest(values, x)[0]
    assert nearest == (below if x[0] - below < above - x[0] else above)


@pytest.mark.parametrize("rounded", [np.floor, np.rint, np.ceil])
def test_scales_that_were_rounded_any_way_are_told(rounded: Any) -> None:
    power = 2.0 ** np.floor(np.log2(TRUE))
    stored = np.where(rounded(TRUE / power) > 1, 2 * power, power)
    found = _scale_relation(copy_of(stored), TRUE.reshape(-1), np.ones(30, bool), 1e-4)
    assert found.startswith("each was rounded to a power of two")


LOW = -TRUE
MINIMA: dict[str, Callable[[Array], tuple[Array, Array]]] = {
    # the stored minima -> (stored, factor that repairs, offset that repairs)
    "minima have the other sign": lambda low: (-low, np.ones_like(low)),
    "minima are lost: each group starts at 0": lambda low: (0 * low, np.ones_like(low)),
    "minima are each that of the group before": lambda low: (np.roll(low, 1, 1), np.ones_like(low)),
    "minima are each that of the group after": lambda low: (np.roll(low, -1, 1), np.ones_like(low)),
    "": lambda low: (low * np.linspace(1.5, 4, low.size).reshape(low.shape), np.ones_like(low)),
}


@pytest.mark.parametrize("says", MINIMA)
def test_what_was_done_to_minima_is_named(says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_scales, "copy_cells", lambda copy, values: values.reshape(-1, 1))
    stored, factor = MINIMA[says](LOW)
    lattice = SimpleNamespace(low=stored, step=np.full(LOW.shape, 0.05))
    copy = copy_of(TRUE, lattice=lattice)
    offset = (LOW - stored).reshape(-1)
    found = _minima_relation(copy, factor.reshape(-1), offset)
    assert found.startswith(says) and bool(found) == bool(says)
    half = offset.size // 2
    for count in (half - 1, half):  # fewer are damage of some blocks
        some = np.where(np.arange(offset.size) < count, offset, 0)
        said = _minima_relation(copy, factor.reshape(-1), some)
        assert bool(said) == (count == half and "group" in says)


def test_exchanged_scales_of_scales_and_minima_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_scales, "copy_cells", lambda copy, values: values.reshape(-1, 1))
    factor = np.random.default_rng(6).uniform(1.5, 3, LOW.size)
    lattice = SimpleNamespace(low=LOW, step=np.full(LOW.shape, 0.05))
    offset = LOW.reshape(-1) * (1 / factor - factor)
    found = _minima_relation(copy_of(TRUE, lattice=lattice), factor, offset)
    assert "by the factors by which the minima are too small" in found
    assert _minima_relation(copy_of(TRUE, lattice=lattice), factor, 2 * offset) == ""


# --- tables of tokens ---------------------------------------------------------------------------

SIZES = st.one_of(st.none(), st.integers(7, 12))


@settings(max_examples=120, deadline=None)
@given(st.integers(8, 11), st.integers(8, 11), SIZES, SIZES)
def test_rows_behind_a_shorter_table_are_lost_only_if_its_ids_reach_them(
    a_rows: int, b_rows: int, a_ids: int | None, b_ids: int | None
) -> None:
    context: Any = SimpleNamespace(models={"a": a_ids, "b": b_ids})
    a, b = (SimpleNamespace(rows=rows, columns=4) for rows in (a_rows, b_rows))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(token_tables, "vocabulary_size", lambda ids: ids)
        patched.setattr(token_tables, "claims_more_rows", lambda ids: False)
        found = extra_rows_text(context, a, b)  # type: ignore[arg-type]
        wide: Any = SimpleNamespace(rows=b_rows, columns=5)
        assert extra_rows_text(context, a, wide) is None  # type: ignore[arg-type]
    few, long, short = min(a_rows, b_rows), "AB"[b_rows > a_rows], "BA"[b_rows > a_rows]
    own, longer = (a_ids, b_ids) if short == "A" else (b_ids, a_ids)
    if a_rows == b_rows or (own or 0) > few:
        assert found is None
        return
    assert found is not None and found[0] == few
    head = f"{long} has {abs(a_rows - b_rows)} more rows after the {few} of {short}, "
    why = (
        f"for ids that {short}'s tokenizer does not have" if (longer or 0) > few
        else "and neither side has a tokenizer that could reach them" if own is longer is None
        else "which no id of a tokenizer reaches"
    )  # fmt: skip
    assert found[1] == head + why


def test_a_table_of_tokens_has_one_width_and_two_lengths() -> None:
    key = "token_embd.weight"
    assert is_token_table(key, (9, 4), (8, 4)) and is_token_table("output.weight", (1, 4), (8, 4))
    for a, b in (
        ((9, 4), (9, 4)),
        ((9, 4), (8, 5)),
        ((0, 4), (8, 4)),
        ((9, 4), (8,)),
        (None, (8, 4)),
    ):
        assert not is_token_table(key, a, b)
    assert not is_token_table("L0.attn_q.weight", (9, 4), (8, 4))
