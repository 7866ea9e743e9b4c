"""Runs, orders, signs and codes that explain a tensor, each rule by itself."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.arch.spec import split_key
from aprfmt.causes.tensor import (
    block_signs,
    derived_weights,
    flat_shards,
    lost_bits,
    packed_codes,
    recurrent_layers,
    value_functions,
)
from aprfmt.causes.tensor.derived_weights import MatrixChange, Removal
from aprfmt.causes.tensor.lattices import Grouping
from aprfmt.codecs.lattice import Lattice

RNG = np.random.default_rng(5)


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """Each test draws the same numbers, whichever ran before it."""
    RNG.bit_generator.state = np.random.default_rng(99).bit_generator.state


class Reader:
    """A tensor of float32 values, as [rows, columns]."""

    encoding = "F32"

    def __init__(self, values: Any) -> None:
        held = np.asarray(values, np.float32)
        self.shape, self.size = held.shape, held.size
        self.values = held.reshape(-1, 1) if held.ndim == 1 else held.reshape(-1, held.shape[-1])
        self.rows, self.columns = self.values.shape
        self.whole = self.values

    def take(self, rows: Any) -> Any:
        return self.values[rows]


def case(a: Any, b: Any, **more: Any) -> Any:
    facts = {"key": "k", "slack": lambda: 1e-3, "numbers": None, "role": "", "context": None}
    return SimpleNamespace(a=Reader(a), b=Reader(b), **facts | more)


# --- one run of values --------------------------------------------------------------------------

MATRIX = RNG.normal(size=(12, 16)).astype(np.float32)
FLAT = MATRIX.reshape(-1)
MORE = RNG.normal(size=40).astype(np.float32)


@pytest.mark.parametrize("label", ["A", "B"])
@pytest.mark.parametrize("step", [50, 1 << 20])
def test_a_vector_may_be_a_run_of_a_matrix(
    step: int, label: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all of it, from inside, or with what stands beside it; 64 values judge a place."""
    monkeypatch.setattr(flat_shards, "STEP", step)

    def told(vector: Any, matrix: Any = MATRIX) -> str:
        sides = (matrix, vector) if label == "B" else (vector, matrix)
        (found,) = flat_shards.explain_flat_shard(case(*sides))
        assert found.confirmed is (found.proof is not None)
        first, shape = found.evidence
        assert shape.startswith(f"{label} has shape [{len(vector)}] where the other side has [")
        return first.removeprefix(f"{label} holds ")

    saved = "a flat part of the matrix: saved without gathering the ranks' parts (FSDP); it is "
    assert told(FLAT) == f"{saved}all values of 192, in their order"
    for start, stop in ((0, 64), (5, 100), (128, 192)):
        at = f"values {start} to {stop - 1} of 192, in their order"
        assert told(FLAT[start:stop]) == saved + at
        assert told(FLAT[start:stop] * (1 + 5e-4)).startswith("one run of values")
    end = "; 40 more are of tensors next to it, or padding"
    whole = f"{saved}all values of 192, in their order{end}"
    assert told(np.concatenate([FLAT, MORE])) == told(np.concatenate([MORE, FLAT])) == whole
    assert told(np.concatenate([FLAT[100:], MORE])) == (
        f"{saved}values 100 to 191 of 192, in their order{end}"
    )
    assert told(np.concatenate([MORE, FLAT[:100]])) == (
        f"{saved}values 0 to 99 of 192, in their order{end}"
    )
    none = "one run of values and no matrix, as where it was saved without gathering"
    wrong = FLAT.copy()
    wrong[150] += 1
    assert told(wrong).startswith(none) and told(FLAT[129:193].repeat(2)).startswith(none)
    early = FLAT.copy()
    early[3] += 0.05  # of the first 64 it shows, of all it is within
    assert told(early).startswith(none)
    near = FLAT.copy()
    near[3] += 1e-4
    assert told(near) == f"{saved}all values of 192, in their order"
    for a, b in ((FLAT[:63], MATRIX), (MATRIX, MATRIX), (FLAT, FLAT)):
        sides = (b, a) if label == "B" else (a, b)
        assert not list(flat_shards.explain_flat_shard(case(*sides)))


def test_a_value_is_looked_for_at_so_many_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flat_shards, "STEP", 8)
    side: Any = Reader(np.tile([1.0, 2.0], (20, 1)))
    found = list(flat_shards._places_of(2.0, side))
    assert found == [2 * at + 1 for at in range(flat_shards.TRIED)]
    assert list(flat_shards._places_of(3.0, side)) == []
    matrix: Any = Reader(MATRIX)
    for start, stop in ((0, 1), (15, 17), (16, 32), (7, 100), (190, 192)):
        assert np.array_equal(flat_shards.matrix_values(matrix, start, stop), FLAT[start:stop])


@pytest.mark.parametrize("step", [7, 1 << 20])
def test_a_run_is_one_from_its_first_value_to_its_last(
    step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flat_shards, "STEP", step)
    matrix: Any = Reader(MATRIX)
    for at in (0, 1, 6, 7, 63, 64, 99):
        values = FLAT[20:120].copy()
        exact: Any = Reader(values)
        assert flat_shards.is_run(exact, matrix, 0, 20, 100, 0.0)
        values[at] += 1
        moved: Any = Reader(values)
        assert not flat_shards.is_run(moved, matrix, 0, 20, 100, 0.0), at


def test_a_vector_is_a_run_of_a_longer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    long, least = RNG.normal(size=60), value_functions.LEAST
    longer = [False]
    monkeypatch.setattr(value_functions, "is_longer_table", lambda *given: longer[0])

    def told(a: Any, b: Any) -> list[Any]:
        made: list[Any] = []

        def guess(cause: str, says: Any, label: str, take: Any, rows: Any) -> Any:
            made.append((cause, says[0], label, take(rows)))

        list(value_functions.guess_prefix(case(a, b, guess=guess)))
        return made

    for start in (0, 7, 60 - least):
        part = long[start : start + least]
        what = f"the first {least}" if start == 0 else f"values {start} to {start + least - 1}"
        for a, b, one, other in ((part, long, "A", "B"), (long, part, "B", "A")):
            ((cause, says, label, rows),) = told(a, b)
            assert (cause, label) == ("row_offset", other)
            assert says == f"{one}'s values are {what} of {other}'s 60"
            assert np.array_equal(rows.reshape(-1), part.astype(np.float32))
    assert (
        not told(long[: least - 1], long) and not told(long, long) and not told(long[:32] + 5, long)
    )
    assert not told(long[:32], long.reshape(30, 2)) and not told(long[:32], long.reshape(1, 60, 1))
    longer[0] = True
    assert not told(long[:32], long) and told(long[7:39], long)


# --- orders -------------------------------------------------------------------------------------


# --- lost bits, rates that nobody filled --------------------------------------------------------


def test_some_choice_of_lost_bits_is_within_a_step_everywhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each value has the bits that bring it nearest; blocks of two bytes, the second is lost."""
    monkeypatch.setattr(lost_bits, "encoding_row", lambda name: SimpleNamespace(type_size=2))
    steps: list[Any] = [0.5]
    monkeypatch.setattr(
        lost_bits,
        "quantization_steps",
        lambda name, raw, count: None if steps[0] is None else np.full(count, steps[0]),
    )
    monkeypatch.setattr(lost_bits, "steps_between", lambda a, b, step: np.abs(a - b) / step)
    raw = np.array([[10, 99, 20, 99], [30, 99, 40, 99]], np.uint8)

    def decoded(held: Any) -> Any:
        blocks = held.reshape(-1, 2)
        return (blocks[:, 0] + blocks[:, 1] / 10.0).reshape(len(held), -1)

    side: Any = SimpleNamespace(
        encoding="own", columns=2, raw=lambda at: raw[at], decode_rows=decoded
    )

    def restored(theirs: Any, patterns: Any = (0, 10, 20)) -> bool:
        other: Any = SimpleNamespace(take=lambda at: np.asarray(theirs)[at])
        own: Any = SimpleNamespace(windows=lambda size: iter([np.array([0]), np.array([1])]))
        return lost_bits._is_restored(own, side, other, (1, 2), patterns)

    right = [[10.0, 21.0], [32.0, 40.5]]
    assert restored(right) and raw[0, 1] == 99
    assert not restored(right, (0, 10)) and not restored([[10.0, 21.0], [32.0, 43.0]])
    assert not restored([[9.4, 21.0], [32.0, 40.5]]) and restored([[9.5, 21.0], [32.0, 40.5]])
    assert not restored(right, ())
    steps[0] = None
    assert not restored(right)


def test_rates_of_mamba_that_were_never_filled_count_up() -> None:
    begun = np.log(np.arange(1, 7))
    right = RNG.normal(size=6)

    def told(a: Any, b: Any, **more: Any) -> list[str]:
        own = case(a, b, **{"role": "ssm_a.weight", "before": SimpleNamespace(relative=0.5)} | more)
        found = list(recurrent_layers.explain_initial_rates(own))
        assert all(not one.confirmed and one.cause == "stale_tensor" for one in found)
        return [one.evidence[0] for one in found]

    says = "{} holds log(1), log(2), ...: what training begins with, never filled"
    assert told(right, begun) == told(begun, begun * 1.005) == [says.format("B")]
    assert told(begun, right) == told(begun, begun * 1.1) == [says.format("A")]
    assert told(right, right) == told(right[:2], begun[:2]) == []
    assert told(right[:3], begun[:3]) == [says.format("B")]
    for more in ({"role": "ssm_d.weight"}, {"numbers": object()}):
        assert told(right, begun, **more) == []
    assert told(right[:5], begun) == []
    # Every row of Mamba's first kind counts the states. Seen red: "of another checkpoint".
    rows = np.tile(begun, (4, 1))
    other = RNG.normal(size=(4, 6))
    in_rows = says.replace(": what", " in every row: what")
    assert told(other, rows) == [in_rows.format("B")]
    assert told(rows, other) == [in_rows.format("A")]
    assert told(other, rows[:, :2]) == told(other, rows.T) == told(other, rows + np.eye(4, 6)) == []


# --- merges -------------------------------------------------------------------------------------


def matrix(key: str, rank: int = 4, size: float = 0.25, **more: Any) -> MatrixChange:
    return MatrixChange(key, rank, size, 0.5, True, **more)


def merged(low: list[MatrixChange], targets: list[str], files: Any = lambda key: "one") -> Any:
    def side(key: str) -> Any:
        return SimpleNamespace(stored=[SimpleNamespace(path=SimpleNamespace(name=files(key)))])

    pairs: Any = {key: SimpleNamespace(a=None, b=side(key)) for key in targets}
    matrices: Any = [SimpleNamespace(key=key) for key in (*targets, "L0.other.weight")]
    found = derived_weights._merge_explanations(pairs, matrices, low)
    assert list(found) == [change.key for change in low]
    texts = {one.evidence[0] for one in found.values()}
    assert len(texts) == 1
    first = next(iter(found.values()))
    return first.cause, first.confirmed, texts.pop()


def test_a_difference_of_low_rank_is_a_merge_into_all_targets_a_shard_or_some() -> None:
    every = [f"L{at}.q.weight" for at in range(4)]
    cause, sure, text = merged([matrix(key) for key in every], every)
    assert (cause, sure) == ("lora_merge", True)
    assert text.startswith("B - A has rank 4 in every q.weight in layers 0-3, 0.25 to 0.25 of")
    ranks = [matrix(key, 4 + at, 0.5 - at / 10) for at, key in enumerate(every)]
    assert "has ranks 4 to 7 in every" in merged(ranks, every)[2]
    assert ", 0.2 to 0.5 of the norm" in merged(ranks, every)[2]
    some = [matrix(key) for key in every[1:3]]

    def shard(key: str) -> str:
        return "second" if split_key(key)[0] in (1, 2) else "first"

    cause, sure, text = merged(some, every, shard)
    assert (cause, sure) == ("partial_merge", True)
    assert "in all 2 of q.weight in second, and is zero in first" in text
    cause, sure, text = merged(some, every)
    assert (cause, sure) == ("partial_merge", False)
    assert "in q.weight in layers 1-2, and is zero in q.weight in layers 0" in text
    # Of a shard all targets differ, or it is none.
    assert merged(some, every, lambda key: "first" if key == every[0] else "second")[1] is False
    assert merged([matrix(key) for key in every[:2]], every)[1] is True


def test_a_shard_has_the_first_or_the_last_layers_whole() -> None:
    targets = [f"L{at}.{role}.weight" for at in range(4) for role in "qk"]

    def run(*keys: str) -> bool:
        return derived_weights._is_run_of_layers(targets, set(keys))

    assert run(*targets[:2]) and run(*targets[:6]) and run(*targets[6:]) and run(*targets)
    assert not run(*targets[2:4]) and not run(*targets[:3]) and not run(*targets[:2], *targets[6:])
    assert not derived_weights._is_run_of_layers([*targets, "output.weight"], set(targets))


def test_one_direction_is_removed_where_all_matrices_lost_the_same() -> None:
    along, across = np.array([1.0, 0, 0]), np.array([0, 1.0, 0])

    def told(*lost: Any) -> str:
        changes = [
            matrix(
                f"L{at}.o.weight",
                1,
                0.25 + at / 8,
                removed=None if one is None else Removal(np.asarray(one[0], float), one[1]),
            )
            for at, one in enumerate(lost)
        ]
        found = derived_weights._removal_explanations(changes)
        assert not found or list(found) == [change.key for change in changes]
        return next((one.evidence[0] for one in found.values()), "")

    whole = "one direction of the stream was removed from 2 matrices that write to it"
    assert told((along, 1.0), (along, 1.04)).startswith(f"{whole}: B - A has rank 1, 0.25 to 0.38")
    assert told((along, 1.0), (-along, 1.0)).startswith(whole)
    part = "0.9 to 1 of one direction of the stream was removed from 2"
    assert told((along, 1.0), (along, 0.9)).startswith(part)
    assert told((along, 1.0), (across, 1.0)) == told((along, 1.0)) == told() == ""
    assert told((along, 1.0), (along, 1.0), None) == told((along, 1.0), (along[:2], 1.0)) == ""
    near = np.array([derived_weights.SAME_LINE, (1 - derived_weights.SAME_LINE**2) ** 0.5, 0])
    far = np.array([0.98, (1 - 0.98**2) ** 0.5, 0])
    assert told((along, 1.0), (near, 1.0)) and not told((along, 1.0), (far, 1.0))


def test_factors_of_rows_and_columns_make_a_share_of_a_difference() -> None:
    rng = np.random.default_rng(2)
    x = rng.normal(size=(40, 600))
    row, column = rng.uniform(0.5, 2, 40), rng.uniform(0.5, 2, 600)
    share = derived_weights._factored_share
    assert share(x, x * np.outer(row, column)) > 0.999
    assert share(x, x + 0.1 * rng.normal(size=x.shape)) < 0.2
    assert share(x, 3 * x) == pytest.approx(0.0, abs=0.5) and share(x, x) == 0.0
    assert share(x * 0, x) == 0.0 or share(x * 0, x) < 0.1
    least = derived_weights.NARROW
    for tall, wide, looked in (
        (least, least, True),
        (least - 1, 40, False),
        (40, least - 1, False),
    ):
        small = x[:tall, :wide]
        made = share(small, small * np.outer(row[:tall], column[:wide]))
        assert (made > 0.5) is looked


# --- signs and codes ----------------------------------------------------------------------------


def test_turned_signs_are_those_that_are_right_the_other_way() -> None:
    x = RNG.normal(size=16)

    def told(y: Any) -> list[Any]:
        own = case(x, y, before=SimpleNamespace(relative=2.0))
        return list(block_signs._find_flipped_signs(own, x, y, 3, ("turned", "here")))

    (found,) = told(-x)
    assert (found.cause, found.evidence[0]) == ("quant_signs", "turned")
    assert found.evidence[1] == "here; relative distance 2 there, 0 with them turned back"
    assert (found.proof.count, found.proof.free) == (16, 3) and found.residual_after == 0.0
    assert told(-x * (1 + 9e-4)) and not told(-x * (1 + 2e-3)) and not told(x)


def test_an_order_of_signs_is_one_that_most_of_them_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    order = np.array([1, 0, 3, 2, 5, 4, 7, 6])
    x = RNG.normal(size=(32, 32))
    size = np.abs(RNG.normal(size=x.shape))
    behind = np.sign(x).reshape(32, -1, 8)[..., np.argsort(order)].reshape(32, 32)
    wrong = np.arange(64) < 32  # blocks of 16 values: the first half of the rows

    def told(y: Any, blocks: Any = wrong) -> list[Any]:
        made: list[Any] = []

        def guess(cause: str, says: Any, label: str, take: Any, free: int) -> Any:
            made.append((cause, says, label, take, free))

        held: Any = Reader(y)
        rows = slice(0, 16)
        list(
            block_signs._guess_sign_order(
                case(x, y, guess=guess), held, "B", blocks, x[rows], y[rows]
            )
        )
        return made

    y = size * behind
    ((cause, (says, where), label, take, free),) = told(y)
    assert (cause, label, free) == ("quant_signs", "B", 8)
    assert says.endswith(f"that of each is at {order.tolist()}")
    assert where == "32 of 64 blocks of F32"
    right = np.abs(y).astype(np.float32) * np.where(np.arange(32)[:, None] < 16, np.sign(x), behind)
    for rows in (range(32), [30, 1]):
        assert np.allclose(take(np.array([*rows])), right[[*rows]])
    assert not told(np.abs(y)) and not told(size * np.sign(RNG.normal(size=x.shape)))
    for enough, said in ((512, True), (513, False)):
        monkeypatch.setattr(block_signs, "ENOUGH", enough)
        assert bool(told(y)) is said


def copy_of(x: Any, y: Any, repaired: Any, step: float = 0.5, **more: Any) -> Any:
    """A packed copy in cells of four values, which is right where its values are `repaired`."""
    asked: list[Any] = []

    def explained(cause: str, says: Any, values: Any, lattice: Any, free: int = 0) -> Any:
        asked.append(says)
        return (cause, says) if np.allclose(values, repaired) else None

    x, y = np.asarray(x, float), np.asarray(y, float)
    full = np.full(y.shape, step)
    facts = {
        "x": x,
        "y": y,
        "grouping": Grouping(1, 4),
        "bits": 4,
        "whose": "B's",
        "other": "A's",
        "lattice": Lattice(full, full * -8, full * 7),
        "explain_repaired": explained,
        "asked": asked,
        "scales": np.ones(y.size // 4),
        "rows": None,
        "scheme": "scheme",
    }
    return SimpleNamespace(**facts | more)


def test_codes_in_another_order_may_have_left_scales_and_zero_points_behind() -> None:
    x = RNG.normal(size=(2, 8))
    factor = np.repeat([[2.0, 0.5], [4.0, 1.5]], 4, axis=1)
    offset = np.repeat([[1.0, -1.0], [0.5, 2.0]], 4, axis=1)
    late = "the scales did not move with them"
    both = "scales and zero points did not move with them"
    for y, said in (
        (x, ("order",)),
        (x / factor, ("order", late)),
        ((x - offset) / factor, ("order", both)),
    ):
        moved = copy_of(x, y, x)
        found: Any = packed_codes._confirm_order(copy_of(x, x[::-1], x), moved, "order")
        assert found == ("packing_order", said)
    # In no order are they right.
    other = copy_of(x, x[::-1], x)
    assert (
        packed_codes._confirm_order(other, copy_of(x, RNG.normal(size=(2, 8)), x), "order") is None
    )
    assert other.asked == [("order",), ("order", late), ("order", both)]


def test_signed_codes_are_half_of_all_codes_off() -> None:
    """In every group those below are too low and those above too high, or the reverse."""
    x = np.array([[-3.0, -2.0, 1.0, 2.5], [-1.0, -0.5, 0.5, 3.0]])

    def told(y: Any, **more: Any) -> list[Any]:
        return list(packed_codes.explain_signs(copy_of(x, y, x, **more)))

    sign = np.sign(x)
    says = "B's codes are signed where they have an offset of 8, or reverse"
    assert told(x + 4 * sign) == [("zero_point", (says,))]
    assert told(x - 8 * sign, step=1.0) == [("zero_point", (says,))]
    assert told(x) == told(x + 2 * sign) == [] == told(x + 4 * sign, bits=0)
    odd = np.array([[-3.0, 6.0, 1.0, 2.5]])
    by_turns = copy_of(odd, [[1.0, 2.0, 5.0, 6.5]], odd)  # neither half is the upper one
    assert list(packed_codes.explain_signs(by_turns)) == []


@pytest.mark.parametrize("steps", [None, 0.5])
def test_scales_that_are_too_small_cut_values_at_the_ends(
    steps: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left lies within half a step, of both sides' where the other has steps too."""
    given: list[Any] = []
    monkeypatch.setattr(packed_codes, "explain_copy", lambda copy, *more: given.append(more))
    monkeypatch.setattr(packed_codes, "fit_errors", lambda x, y, lattice: "after")
    x = np.array([[5.0, -6.0, 1.0, 0.5]])
    own = None if steps is None else SimpleNamespace(step=np.full((1, 4), steps))
    source = SimpleNamespace(side=SimpleNamespace(lattice=own), columns=4)

    def told(y: Any, saturates: bool = True, rows: Any = None) -> list[Any]:
        given.clear()
        fit = SimpleNamespace(saturates=saturates, count=4, saturated=0.5)
        held = copy_of(x, y, x, source=source, fit=lambda: fit, rows=rows)
        list(packed_codes.explain_saturation(held))
        return given

    cut = np.array([[3.5, -4.0, 1.0, 0.5]])
    ((cause, texts, after, free, moved),) = told(cut)
    assert (cause, after, free, moved) == ("clipped_codes", "after", 0, 2.0)
    assert texts[1] == "2 of 4 values, by up to 4 steps"
    assert texts[2] == "twice the scales are nearer to A's in 50 % of the runs"
    room = 0.25 if steps is None else 0.5
    for off, said in ((room, True), (room + 0.01, False)):
        near = cut.copy()
        near[0, 2] += off
        assert bool(told(near)) is said and bool(told(near, rows=np.array([0]))) is said
    assert not told(cut, saturates=False) and not told(x)


def test_bytes_are_read_by_another_table_under_the_power_that_fits() -> None:
    """Each cell by itself; one whose values are none of the table is infinite."""
    read = np.array([0.0, 1.0, 2.0, 4.0, -1.0, -2.0, -4.0, np.nan])
    table = np.array([0.0, 3.0, 5.0, 6.0, -3.0, -5.0, -6.0, 7.0])
    codes = np.array([[1, 2, 3, 0, 4, 5, 6, 1]])
    scale = np.repeat([[0.5, 8.0]], 4, axis=1)
    y, x = read[codes] * scale, table[codes] * scale
    held: Any = copy_of(x, y, x, scales=np.array([0.5, 8.0]))
    found, lattice = packed_codes._reread_codes(held, read, table)
    assert np.allclose(found, x) and np.isinf(lattice.low).all() and (lattice.step > 0).all()
    assert (lattice.low < 0).all() and (lattice.high > 0).all()
    odd = y.copy()
    odd[0, 5] = 8 * 1.3
    half, _ = packed_codes._reread_codes(
        copy_of(x, odd, x, scales=np.array([0.5, 8.0])), read, table
    )
    assert np.allclose(half[0, :4], x[0, :4]) and np.isinf(half[0, 4:]).all()
