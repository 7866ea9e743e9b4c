"""Layout steps: both directions, moves that agree with the arrays, shapes that do not fit."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aprfmt.arch import grouped_rows, joining_steps, layout_steps
from aprfmt.arch.element_moves import compose_moves, invert_moves, merge_moves
from aprfmt.arch.grouped_rows import ByGroup, Tiled
from aprfmt.arch.joining_steps import Joined, KvB, Split, Stacked
from aprfmt.arch.layout_steps import (
    Added,
    ChannelsLast,
    HalvesBelow,
    HalvesExchanged,
    Oriented,
    Reshaped,
    RowsPermuted,
    Transposed,
    TransposedEach,
)
from aprfmt.arch.recurrent_steps import Depthwise, NegativeExp
from aprfmt.arch.spec import LayoutStep, Move
from aprfmt.errors import ArchError

sizes = st.integers(1, 5)


Case = tuple[LayoutStep, list[tuple[int, ...]], dict[str, int]]


def cases_of(a: int, b: int, c: int, d: int, tail: tuple[int, ...]) -> list[Case]:
    """Return each step with shapes of its logical tensors and hyperparameters."""
    hp = {
        "a": a,
        "b": b,
        "c": c,
        "n_heads": a,
        "kv_lora_rank": b,
        "qk_nope_head_dim": c,
        "value_head_dim": d,
        "delta_key_heads": a,
        "delta_value_heads": a * b,
    }
    rows: list[tuple[LayoutStep, list[tuple[int, ...]]]] = [
        (RowsPermuted("a"), [(2 * a * b, *tail)]),
        (Transposed(), [(*tail, a, b)]),
        (Oriented("a", "b"), [(*tail, a, b)]),
        (HalvesExchanged(), [(*tail, a, 2 * b)]),
        (HalvesBelow(), [(a, 2 * b)]),
        (ChannelsLast(), [(a, b, c, *tail)]),
        (Split(("a", "b", "c")), [(a, *tail), (b, *tail), (c, *tail)]),
        (Split(("a", "a"), axis=1), [(b, a, *tail), (b, a, *tail)]),
        (Split(("a", "a", "a"), interleaved=True), [(a, *tail)] * 3),
        (Split(("a", "a"), axis=1, interleaved=True), [(b, a, *tail)] * 2),
        (Stacked("a"), [(a, b, *tail)]),
        (Stacked("a", axis=2), [(b, c, a, *tail)]),
        (KvB(), [(a * (c + d), b)]),
        (Reshaped(("a", "b"), ("a*b",)), [(a, b)]),
        (ByGroup("a", ("a*b", "a*c", "a"), ((0, 1), (2,))), [(a * (b + c), *tail), (a, *tail)]),
        (Tiled("c", "2*b"), [(2 * b + a * b * c, *tail)]),
        (Tiled("c", axis=1), [(d, a * b * c, *tail)]),
        (Depthwise("a", "b"), [(a, b)]),
    ]
    return [(step, shapes, hp) for step, shapes in rows]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Return a step, shapes of the logical tensors, and hyperparameters."""
    a, b, c, d = (draw(sizes) for _ in range(4))
    tail = draw(st.sampled_from([(), (d,), (d, 2)]))
    return draw(st.sampled_from(cases_of(a, b, c, d, tail)))


def arrays(shapes: list[tuple[int, ...]]) -> list[Any]:
    """Return arrays whose elements are all different."""
    start = 0
    out = []
    for shape in shapes:
        count = math.prod(shape)
        out.append(np.arange(start, start + count, dtype=np.uint32).reshape(shape))
        start += count
    return out


def gathered(moves: list[list[Move]], inputs: list[Any]) -> list[list[int]]:
    flat = [x.reshape(-1) for x in inputs]
    return [
        [int(v) for m in row for v in flat[m.source][m.start : m.start + m.count]] for row in moves
    ]


@given(cases())
def test_undo_of_apply_is_the_identity_bit_for_bit(case: Case) -> None:
    check_both_ways(*case)


@pytest.mark.parametrize("number", range(len(cases_of(2, 3, 4, 5, ()))))
@pytest.mark.parametrize("tail", [(), (5,), (5, 2)])
def test_every_step_is_undone(number: int, tail: tuple[int, ...]) -> None:
    """Seen red: the rows of a group cut one part too early."""
    check_both_ways(*cases_of(2, 3, 4, 5, tail)[number])


def check_both_ways(step: LayoutStep, logical: list[tuple[int, ...]], hp: dict[str, int]) -> None:
    x = arrays(logical)
    stored = step.apply(x, hp)
    assert step.permutes
    assert [y.shape for y in stored] == step.stored_shapes(logical, hp, len(stored))
    assert step.shapes([y.shape for y in stored], hp) == logical
    back = step.undo(stored, hp)
    assert all(np.array_equal(p, q) and p.shape == q.shape for p, q in zip(x, back, strict=True))
    again = step.apply(back, hp)
    assert all(np.array_equal(p, q) for p, q in zip(stored, again, strict=True))


@given(cases())
def test_moves_agree_with_undo_and_apply(case: Case) -> None:
    step, logical, hp = case
    stored = step.apply(arrays(logical), hp)
    stored = arrays([y.shape for y in stored])
    moves = step.moves([y.shape for y in stored], hp)
    if moves is None:
        assert isinstance(step, (Transposed, KvB, ChannelsLast))
        return
    undone = step.undo(stored, hp)
    assert gathered(moves, stored) == [y.reshape(-1).tolist() for y in undone]
    back = invert_moves(moves, [y.size for y in stored])
    assert gathered(back, undone) == [y.reshape(-1).tolist() for y in stored]
    identity = compose_moves(back, moves)
    assert identity == [merge_moves([Move(i, 0, y.size)]) for i, y in enumerate(stored)]


def test_rows_permuted_is_llama_cpps_permutation() -> None:
    """The converter: reshape(heads, 2, rows / heads / 2, ...).swapaxes(1, 2)."""
    x = np.arange(3 * 8 * 5).reshape(24, 5)
    theirs = x.reshape(3, 2, 4, 5).swapaxes(1, 2).reshape(24, 5)
    assert np.array_equal(RowsPermuted("h").apply([x], {"h": 3})[0], theirs)
    j, i, head = 1, 2, 2
    assert theirs[head * 8 + 2 * i + j].tolist() == x[head * 8 + j * 4 + i].tolist()


def test_kv_b_is_the_converters_split() -> None:
    hp = {"n_heads": 3, "kv_lora_rank": 5, "qk_nope_head_dim": 4, "value_head_dim": 2}
    x = np.arange(3 * 6 * 5).reshape(18, 5)
    view = x.reshape(3, 6, 5)
    k, v = KvB().apply([x], hp)
    assert np.array_equal(k, view[:, :4].transpose(0, 2, 1))
    assert np.array_equal(v, view[:, 4:])


def test_tiled_is_the_converters_order_of_value_heads() -> None:
    """The converter: reshape(keys, each, head, ...), the first two axes exchanged."""
    x = np.arange(2 * 3 * 4 * 5).reshape(24, 5)
    theirs = x.reshape(2, 3, 4, 5).swapaxes(0, 1).reshape(24, 5)
    hp = {"delta_key_heads": 2, "delta_value_heads": 6}
    assert np.array_equal(Tiled("4").apply([x], hp)[0], theirs)
    assert np.array_equal(Tiled("4", axis=1).apply([x.T], hp)[0], theirs.T)
    behind = np.concatenate([-x[:7], x])
    assert np.array_equal(Tiled("4", "7").apply([behind], hp)[0], np.concatenate([-x[:7], theirs]))


def test_rates_are_negated_exponentials() -> None:
    x = np.array([-4.6, 0.0, 0.7, 2.77], np.float32)
    stored = NegativeExp().apply([x], {})[0]
    assert stored.dtype == np.float32 and stored[1] == -1.0
    np.testing.assert_allclose(stored, -np.exp(x), rtol=1e-6)
    np.testing.assert_allclose(NegativeExp().undo([stored], {})[0], x, atol=3e-7)
    assert np.isnan(NegativeExp().undo([np.ones(1, np.float32)], {})[0]).all()
    assert NegativeExp().moves([(4,)], {}) is None


def test_a_kernel_may_have_its_axis_of_one_in_two_places() -> None:
    hp, x = {"c": 6, "t": 4}, np.arange(24).reshape(6, 4)
    step = Depthwise("c", "t")
    assert step.apply([x], hp)[0].shape == (6, 1, 4)
    for shape in ((6, 1, 4), (6, 4, 1), (6, 4)):
        assert np.array_equal(step.undo([x.reshape(shape)], hp)[0], x)


def test_added_computes_in_float32() -> None:
    x = np.array([0.5, -1.25, 3.0, 1e-3], np.float32)
    stored = Added(1.0).apply([x], {})[0]
    assert stored.dtype == np.float32
    assert stored.tolist() == (x + np.float32(1)).tolist()
    assert Added(1.0).undo([stored], {})[0][:3].tolist() == x[:3].tolist()
    small = np.array([1e-9], np.float32)  # lost, as the docstring says
    assert Added(1.0).undo(Added(1.0).apply([small], {}), {})[0].tolist() == [0.0]
    assert Added(1.0).moves([(4,)], {}) is None


REFUSED: dict[str, tuple[LayoutStep, list[tuple[int, ...]], dict[str, int], str]] = {
    "odd head": (RowsPermuted("h"), [(9, 2)], {"h": 3}, "9 rows; expected 3 heads"),
    "partial head": (RowsPermuted("h"), [(10, 2)], {"h": 4}, "10 rows"),
    "two tensors": (RowsPermuted("h"), [(4,), (4,)], {"h": 1}, "2 tensors"),
    "other sizes": (Oriented("a", "b"), [(2, 3, 5)], {"a": 3, "b": 4}, "expected 3 by 4"),
    "rank 1": (Transposed(), [(4,)], {}, "two axes"),
    "no halves": (HalvesBelow(), [(4, 3)], {}, "the last one even"),
    "halves of a row": (HalvesBelow(), [(4,)], {}, "two axes, the last one even"),
    "parts": (Split(("a", "b")), [(5, 2)], {"a": 2, "b": 2}, r"expected 2 \+ 2"),
    "axis": (Split(("a", "a"), axis=1), [(5,)], {"a": 2}, "0 on axis 1"),
    "uneven turns": (Split(("a", "b"), interleaved=True), [(3,)], {"a": 1, "b": 2}, "1 \\+ 2"),
    "missing expert": (Stacked("n"), [(2, 3)] * 3, {"n": 4}, "3 tensors; expected 4"),
    "frames": (Stacked("n", axis=2), [(2, 3)], {"n": 2}, "1 tensors; expected 2"),
    "other expert": (Stacked("n"), [(2, 3), (3, 2)], {"n": 2}, "number 1 has shape"),
    "elements": (Reshaped(("a",), ("a",)), [(2, 3)], {"a": 5}, "6 elements"),
    "partial group": (ByGroup("g", ("6", "4"), ((0,), (1,))), [(10, 2)], {"g": 4}, "g divides"),
    "groups": (ByGroup("g", ("6", "4"), ((0,), (1,))), [(12, 2)], {"g": 2}, "12 rows"),
    "value heads": (Tiled("3"), [(10, 2)], {"delta_key_heads": 2, "delta_value_heads": 4},
                    "4 value heads of 3"),
    "turned kernel": (Depthwise("c", "t"), [(4, 1, 6)], {"c": 6, "t": 4},
                      "4 taps for each of 6"),
    "kv_b": (KvB(), [(1, 2, 3)], {"n_heads": 1, "kv_lora_rank": 2, "qk_nope_head_dim": 3,
                                  "value_head_dim": 4}, "expected k_b"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_shapes_that_do_not_fit(case: str) -> None:
    step, shapes, hp, message = REFUSED[case]
    with pytest.raises(ArchError, match=message):
        step.shapes(shapes, hp)
    with pytest.raises(ArchError):
        step.undo([np.zeros(shape) for shape in shapes], hp) if len(shapes) != 2 or not isinstance(
            step, RowsPermuted
        ) else step.moves(shapes, hp)


def test_sizes_that_are_none_are_refused_by_name() -> None:
    with pytest.raises(ArchError, match="q_lora_rank is None"):
        Stacked("q_lora_rank").shapes([(1,)], {"q_lora_rank": None})


def test_invert_wants_every_element_once() -> None:
    with pytest.raises(ArchError, match="never"):
        invert_moves([[Move(0, 1, 3)]], [4])
    with pytest.raises(ArchError, match="twice"):
        invert_moves([[Move(0, 0, 3), Move(0, 2, 2)]], [4])
    with pytest.raises(ArchError, match="never"):
        invert_moves([[Move(0, 0, 3)]], [4])
    assert invert_moves([[]], [0]) == [[]]


def test_compose_cuts_runs_in_the_middle() -> None:
    inner = [[Move(1, 10, 5), Move(0, 0, 5)]]
    assert compose_moves([[Move(0, 3, 4)]], inner) == [[Move(1, 13, 2), Move(0, 0, 2)]]
    assert compose_moves([[Move(0, 6, 2)]], inner) == [[Move(0, 1, 2)]]


def test_compose_refuses_to_read_beyond_the_end() -> None:
    with pytest.raises(ArchError, match="which has 4"):
        compose_moves([[Move(0, 2, 3)]], [[Move(0, 0, 4)]])


@given(st.permutations(range(12)), st.permutations(range(12)))
def test_compose_is_chaining(first: list[int], second: list[int]) -> None:
    inner, outer = ([[Move(0, i, 1) for i in order]] for order in (first, second))
    x = np.arange(100, 112)
    middle = np.array(gathered(inner, [x])[0])
    assert gathered(compose_moves(outer, inner), [x]) == gathered(outer, [middle])


def test_a_matrix_of_either_orientation_is_read_by_its_shape() -> None:
    hp, x = {"a": 3, "b": 4}, np.arange(24).reshape(2, 3, 4)
    step = Oriented("a", "b")
    for stored in (x, x.swapaxes(1, 2)):
        assert step.shapes([stored.shape], hp) == [(2, 3, 4)]
        np.testing.assert_array_equal(step.undo([stored], hp)[0], x)
    assert step.moves([x.shape], hp) == [[Move(0, 0, 24)]]
    assert step.moves([(2, 4, 3)], hp) is None
    assert step.apply([x], hp)[0].shape == (2, 4, 3)
    square = np.arange(9).reshape(3, 3)  # nothing tells: as it is, both ways
    assert step.apply([square], {"a": 3, "b": 3})[0] is square
    assert step.undo([square], {"a": 3, "b": 3})[0] is square


@pytest.mark.parametrize(("shape", "axis"), [((3,), 1), ((3, 2), 1), ((4, 2), 0), ((), 0)])
def test_a_stack_of_another_count_or_of_too_few_axes_is_refused(
    shape: tuple[int, ...], axis: int
) -> None:
    step = Stacked("n_experts", axis)
    for axes in ([shape], [(3, 3)]):
        if axes == [shape]:
            with pytest.raises(ArchError, match="expected 3 on"):
                step.stored_shapes(axes, {"n_experts": 3}, 3)
        else:
            assert step.stored_shapes(axes, {"n_experts": 3}, 3) == [(3,)] * 3


@pytest.mark.parametrize(
    ("step", "stored"),
    [
        (RowsPermuted("a"), [(12, 5)]), (RowsPermuted("a"), [(12,)]),
        (HalvesExchanged(), [(3, 4, 6)]), (Split(("a", "b")), [(5, 2)]),
        (Split(("a", "b"), axis=1), [(4, 5, 2)]), (Split(("a", "a"), interleaved=True), [(6, 2)]),
        (Stacked("a"), [(4, 5)] * 3), (Stacked("a", axis=1), [(4, 5)] * 3),
        (ByGroup("a", ("2*a", "a"), ((0,), (1,))), [(9, 5)]), (HalvesBelow(), [(3, 4)]),
        (Joined(("a", "b")), [(3, 5), (2, 5)]),
        (Tiled("a", axis=1), [(4, 18, 2)]), (Tiled("a", "b"), [(20, 2)]),
    ],
    ids=str,
)  # fmt: skip
def test_as_many_runs_as_are_allowed_are_listed_and_one_more_is_decoded(
    step: LayoutStep, stored: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    hp = {"a": 3, "b": 2, "delta_key_heads": 2, "delta_value_heads": 6}
    moves = step.moves(stored, hp)
    assert moves is not None
    x = arrays(stored)
    assert gathered(moves, x) == [y.reshape(-1).tolist() for y in step.undo(x, hp)]
    runs = sum(len(row) for row in moves)
    assert runs > 1
    if isinstance(step, (HalvesBelow, Joined)):
        return  # as many runs as rows or tensors: always listed
    for allowed, expected in ((runs, moves), (runs + 1, moves), (runs - 1, None)):
        for module in (layout_steps, grouped_rows, joining_steps):
            monkeypatch.setattr(module, "MAX_MOVES", allowed)
        assert step.moves(stored, hp) == expected


@pytest.mark.parametrize(
    ("step", "stored", "wrong", "said"),
    [
        (HalvesExchanged(), [(3, 4)], [[(3, 5)], [()], [(1,)]], "expected rows of two equal halve"),
        (HalvesBelow(), [(3, 4)], [[(3, 5)], [(4,)], [(2, 3, 4)]], "two axes, the last one even"),
        (Transposed(), [(3, 4)], [[(4,)], [()]], "expected two axes or more"),
        (ChannelsLast(), [(3, 4, 5)], [[(3, 4)], [()]], "expected three axes or more"),
        (TransposedEach(), [(3, 4), (2, 5, 6)], [[(3, 4), (4,)], [(4,)]], "two axes or more"),
        (RowsPermuted("a"), [(12, 5)], [[(9, 5)], [()]], "expected 3 heads with an even number"),
        (
            Joined(("a", "b")),
            [(3, 5), (2, 5)],
            [[(3, 5)], [(3, 5), (2, 4)], [(3, 5), (3, 5)], [(3,), ()], [(5, 5), (0, 5), (0, 5)]],
            "expected 2 parts of 3 \\+ 2 rows together, otherwise alike",
        ),
        (Split(("a", "b")), [(5, 2)], [[(4, 2)], [()], [(5, 2), (5, 2)]], "expected"),
        (
            Tiled("a", axis=1),
            [(4, 18, 2)],
            [[(4, 17, 2)], [(18,)]],
            "has (17|0) on axis 1; expected 0",
        ),
        (ByGroup("a", ("2*a", "a"), ((0, 1),)), [(9, 5)], [[(8, 5)], [()]], "expected"),
        (Oriented("a", "b"), [(3, 2)], [[(3,)], [(2, 4)]], "expected"),
    ],
    ids=str,
)
def test_a_shape_that_a_step_cannot_have_is_refused(
    step: LayoutStep, stored: list[tuple[int, ...]], wrong: list[list[tuple[int, ...]]], said: str
) -> None:
    hp, x = {"a": 3, "b": 2, "delta_key_heads": 2, "delta_value_heads": 6}, arrays(stored)
    assert step.permutes and step.shapes(stored, hp) == [y.shape for y in step.undo(x, hp)]
    for shapes in wrong:
        with pytest.raises(ArchError, match=said):
            step.shapes(shapes, hp)


def test_parts_are_cut_from_a_joined_tensor_in_their_order() -> None:
    """Also in other parts than are written, as long as they add up."""
    whole, step, hp = np.arange(10).reshape(5, 2), Joined(("a", "b")), {"a": 3, "b": 2}
    first, second = step.apply([whole], hp)
    assert np.array_equal(first, whole[:3]) and np.array_equal(second, whole[3:])
    assert step.shapes([(1, 2), (4, 2)], hp) == [(5, 2)]
    assert np.array_equal(step.undo([whole[:1], whole[1:]], hp)[0], whole)
    with pytest.raises(ArchError, match="expected 5 rows"):
        step.apply([whole[:4]], hp)


def test_each_of_several_tensors_is_transposed_by_itself() -> None:
    x = [np.arange(12).reshape(3, 4), np.arange(60).reshape(2, 5, 6)]
    step = TransposedEach()
    shapes = [one.shape for one in x]
    assert step.shapes(shapes, {}) == step.stored_shapes(shapes, {}, 2) == [(4, 3), (2, 6, 5)]
    assert step.moves(shapes, {}) is None
    for turned in (step.undo(x, {}), step.apply(x, {})):
        assert np.array_equal(turned[0], x[0].T)
        assert np.array_equal(turned[1], np.einsum("abc->acb", x[1]))
