"""How rows are divided among ranks and groups, and lists of layers are read, each by itself."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.arch import draft_head, layer_kinds, value_checks
from aprfmt.arch.engine_parameters import (
    EngineParameter,
    Part,
    RankLayout,
    Section,
    companion_parameter,
    divide_parameter,
    find_layout,
    parts_of_one_factor,
    whole_parameter,
)
from aprfmt.arch.grouped_rows import ByGroup
from aprfmt.errors import ArchError

# --- sections -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "ranks", "copies", "share", "starts"),
    [
        (Section(12, 3), 2, 1, 6, (0, 6)),
        (Section(12, 3), 4, 1, 3, (0, 3, 6, 9)),
        (Section(12, 3), 8, 2, 3, (0, 0, 3, 3, 6, 6, 9, 9)),
        (Section(12, 3), 3, 1, -1, ()),
        (Section(12, 3), 6, 1, -1, ()),
        (Section(12, 5), 2, 1, -1, ()),
        (Section(12), 3, 1, 4, (0, 4, 8)),
        (Section(12, 12), 4, 4, 12, (0, 0, 0, 0)),
        (Section(12, 3, False), 4, 4, 12, (0, 0, 0, 0)),
        (Section(7, 3, False), 2, 2, 7, (0, 0)),
        (Section(2, 3), 2, 2, -1, ()),
    ],
)
def test_ranks_have_whole_units_or_the_same_ones(
    section: Section, ranks: int, copies: int, share: int, starts: tuple[int, ...]
) -> None:
    assert (section.copies(ranks), section.share(ranks)) == (copies, share)
    assert tuple(section.start(rank, ranks) for rank in range(len(starts))) == starts


def parameter(
    *sections: Section, columns: int = 4, axis: int = 0, divided: int | None = 0, **more: Any
) -> EngineParameter:
    parts = []
    for at, section in enumerate(sections):
        shape = (section.rows, columns) if axis == 0 else (columns, section.rows)
        parts.append(Part((f"t{at}.weight",), (), (f"r{at}",), (shape,), ((section,),), divided))
    return EngineParameter(("own",), tuple(parts), axis, **more)


def arrays_of(own: EngineParameter) -> list[Any]:
    at, made = 0, []
    for shape in own.shapes:
        count = int(np.prod(shape))
        made.append(np.arange(at, at + count).reshape(shape))
        at += count
    return made


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_what_ranks_hold_is_the_whole_put_together(ranks: int, axis: int) -> None:
    """Each rank has its units of every part; of those that hold the same any may be read."""
    own = parameter(Section(16, 2), Section(8, 2), Section(8, 2), axis=axis, divided=axis)
    layout = divide_parameter(own, ranks, 64)
    assert layout is not None and layout.axis == axis
    whole = arrays_of(own)
    held = [layout.rank_array(whole, rank) for rank in range(ranks)]
    cut = np.take(whole[0], range(16 // ranks * 1, 16 // ranks * 2), axis)
    assert np.array_equal(np.take(held[1], range(16 // ranks), axis), cut)
    for copy in range(3):
        for one, right in zip(layout.join_ranks(held, copy), whole, strict=True):
            assert np.array_equal(one, right)
    local = held[0].shape
    found = find_layout(own, local, ranks)
    assert found is not None and (found.axis, found.sections) == (axis, own.sections)
    wrong = held[-1].copy()
    assert layout.split_shares(wrong)[0].shape[axis] == 16 // ranks


def test_pieces_of_one_array_are_divided_each_for_itself() -> None:
    pieces = ((Section(12, 2), Section(4, 2, False)), (Section(8, 2),))
    parts = tuple(
        Part((f"t{at}",), (), (f"r{at}",), ((sum(one.rows for one in each), 3),), (each,), 0)
        for at, each in enumerate(pieces)
    )
    own = EngineParameter(("own",), parts)
    layout = divide_parameter(own, 2, 64)
    assert layout is not None
    whole = arrays_of(own)
    a, b = whole
    held = [layout.rank_array(whole, rank) for rank in range(2)]
    assert np.array_equal(held[0], np.concatenate([a[:6], a[12:], b[:4]]))
    assert np.array_equal(held[1], np.concatenate([a[6:12], a[12:], b[4:]]))
    for copy in range(2):
        made = layout.join_ranks(held, copy)
        assert all(np.array_equal(x, y) for x, y in zip(made, whole, strict=True))
    # A vector has no second axis: each rank has all of it.
    vectors = EngineParameter(
        ("own",), (Part(("t",), (), ("r",), ((6,),), ((Section(1, 1, False),),)),), 1
    )
    (vector,) = arrays_of(vectors)
    alone = RankLayout(vectors, 2)
    assert np.array_equal(alone.rank_array([vector], 1), vector)
    assert np.array_equal(alone.join_ranks([vector, vector + 1], 5)[0], vector + 1)
    cut = RankLayout(vectors, 2, 0)
    assert [cut.rank_array([vector], rank).tolist() for rank in range(2)] == [[0, 1, 2], [3, 4, 5]]
    assert np.array_equal(cut.join_ranks([vector[:3], vector[3:]])[0], vector)


def test_groups_of_queries_keys_and_values_stand_together() -> None:
    own = parameter(Section(8, 2), Section(4, 2), Section(4, 2), grouped=True)
    whole = arrays_of(own)
    q, k, v = whole
    one = RankLayout(own, 1)
    joined = one.rank_array(whole, 0)
    assert np.array_equal(joined, np.concatenate([q[:4], k[:2], v[:2], q[4:], k[2:], v[2:]]))
    assert all(np.array_equal(a, b) for a, b in zip(one.split_shares(joined), whole, strict=True))
    two = divide_parameter(own, 2, 64)
    assert two is not None
    held = [two.rank_array(whole, rank) for rank in range(2)]
    assert np.array_equal(held[1], np.concatenate([q[4:], k[2:], v[2:]]))
    assert all(np.array_equal(a, b) for a, b in zip(two.join_ranks(held), whole, strict=True))


def test_a_vocabulary_is_padded_and_other_axes_are_cut_evenly() -> None:
    table = parameter(Section(97), vocabulary=True)
    for ranks, multiple, padding in ((2, 64, 31), (2, 1, None), (4, 100, 3), (3, 64, None)):
        found = divide_parameter(table, ranks, multiple)
        assert (None if found is None else found.padding) == padding
    layout = divide_parameter(table, 2, 64)
    assert layout is not None
    (whole,) = arrays_of(table)
    held = [layout.rank_array([whole], rank) for rank in range(2)]
    assert [len(one) for one in held] == [64, 33]
    assert np.array_equal(layout.join_ranks(held)[0], whole)
    found = find_layout(table, (64, 4), 2)
    assert found is not None and (found.axis, found.padding) == (0, 31)
    assert find_layout(parameter(Section(97)), (64, 4), 2) is None
    across = parameter(Section(6, 2, False), Section(3, 1, False), columns=8, divided=1)
    own = divide_parameter(across, 4, 64)
    assert own is not None and (own.axis, own.sections, own.padding) == (1, (), 0)
    assert divide_parameter(across, 3, 64) is None
    whole_of = arrays_of(across)
    parts = [own.rank_array(whole_of, rank) for rank in range(4)]
    assert parts[0].shape == (9, 2)
    assert all(np.array_equal(a, b) for a, b in zip(own.join_ranks(parts), whole_of, strict=True))
    for one in (parameter(Section(6), divided=None), across):
        alone = divide_parameter(one, 1 if one is across else 4, 64)
        assert alone is not None and alone.axis is None
    assert divide_parameter(parameter(Section(6, 4)), 2, 64) is None


def test_a_layout_is_found_by_the_shape_of_one_rank() -> None:
    own = parameter(Section(12, 3))

    def found(local: Any, ranks: int = 2, of: EngineParameter = own) -> Any:
        layout = find_layout(of, local, ranks)
        return None if layout is None else (layout.axis, layout.sections)

    assert found((12, 4)) == (None, ()) and found((6, 4)) == (0, own.sections)
    assert found((12, 2)) == (1, ()) and found((6, 2)) is None and found((6,)) is None
    assert found((5, 4)) is None and found((4, 4), 3) == (0, ())
    both = parameter(Section(12, 3), Section(6, 3, False))
    assert found((12, 4), 2, both) == (0, both.sections)
    assert found((9, 4), 2, both) is None or found((9, 4), 2, both)[0] == 0
    every = found((6, 4), 2, parameter(Section(12, 3, False)))
    assert every == (0, ((Section(12, 3),),))


# --- companions of codes ------------------------------------------------------------------------


def test_scales_are_divided_as_the_rows_of_their_codes() -> None:
    leaves = ("weight", "weight_scale")
    own = parameter(Section(12, 3), Section(6, 3))

    def companion(shapes: Any, of: EngineParameter = own, slots: int = 1) -> Any:
        found = companion_parameter(of, leaves, shapes, slots)
        if found is None:
            return None
        assert found.names == () and not found.vocabulary
        return [
            (part.stored, part.shapes[0], part.sections[0][0], part.divided) for part in found.parts
        ]

    names = [("t0.weight_scale",), ("t1.weight_scale",)]
    rows = companion({"t0.weight": (12, 2), "t1.weight": (6, 2)})
    assert rows == [(names[0], (12, 2), Section(12, 3), 0), (names[1], (6, 2), Section(6, 3), 0)]
    blocks = companion({"t0.weight": (4, 2), "t1.weight": (2, 2)})
    assert [row[2] for row in blocks] == [Section(4, 1), Section(2, 1)]
    pieces = (Section(8, 2), Section(4, 2))
    two = EngineParameter(
        ("own",), (Part(("t0.weight",), (), ("r",), ((12, 4),), (pieces,), 0),), vocabulary=True
    )
    for count, rows_of in ((6, (Section(4, 1), Section(2, 1))), (5, (Section(5, 1, False),))):
        found = companion_parameter(two, leaves, {"t0.weight": (count, 2)})
        assert found is not None and found.parts[0].sections == (rows_of,)
    scalar = companion({"t0.weight": (), "t1.weight": (1,)})
    assert [row[1:] for row in scalar] == [((1,), Section(1, 1, False), None)] * 2
    assert companion({"t0.weight": (12, 2)}) is None
    one = parameter(Section(12, 3))
    assert len(companion({"t0.weight": ()}, one, 3)) == 3
    assert len(companion({"t0.weight": (12,)}, one, 3)) == 1
    across = parameter(Section(12, 3), divided=1)
    assert companion({"t0.weight": (12, 2)}, across)[0][3] == 1
    assert companion({"t0.weight": (12, 1)}, across)[0][3] is None
    assert companion({"t0.weight": (12,)}, across)[0][3] is None
    stack = EngineParameter(
        ("own",),
        (Part(("a.weight", "b.weight"), (), ("r",), ((2, 12, 4),), ((Section(12, 3),),), 1),),
        1,
    )
    assert companion({"a.weight": (12, 2), "b.weight": (12, 2)}, stack) == [
        (("a.weight_scale", "b.weight_scale"), (2, 12, 2), Section(12, 3), 1)
    ]
    joined = EngineParameter(("own",), (Part(("a.weight",), (), ("r", "s"), ((2,), (2,)), ()),))
    assert companion({"a.weight": (2,)}, joined) is None
    assert companion({}, EngineParameter(("own",), (Part((), (), ("r",), ((2,),), ()),))) is None
    for shape, expected in (((5, 2), 5), ((7,), 7), ((), 1)):
        made = whole_parameter("w", shape)
        assert made.parts[0].sections == ((Section(expected),),) and made.published


def test_parts_of_one_matrix_are_those_that_engines_join() -> None:
    """Of a layer by themselves, and of experts one by one; nothing where a part is missing."""
    held = {
        "L0.attn_q.weight": ["q0"],
        "L0.attn_k.weight": ["k0"],
        "L0.attn_v.weight": ["v0"],
        "L1.attn_q.weight": ["q1"],
        "L1.attn_k.weight": ["k1"],
        "L1.attn_v.weight": [],
        "L0.ffn_gate_exps.weight": ["g0", "g1"],
        "L0.ffn_up_exps.weight": ["u0", "u1"],
        "L1.ffn_gate.weight": ["g"],
        "L1.ffn_down.weight": ["d"],
        "L2.attn_q.bias": ["b"],
        "L2.attn_k.bias": ["b"],
        "L2.attn_v.bias": ["b"],
    }
    assert list(parts_of_one_factor(held)) == [("q0", "k0", "v0"), ("g0", "u0"), ("g1", "u1")]


# --- rows by groups -----------------------------------------------------------------------------


def test_parts_of_groups_are_joined_whole_and_put_back() -> None:
    step = ByGroup("n", ("n*two", "n*one"), ((0,), (1,)))
    hp = {"n": 3, "two": 2, "one": 1, "four": 4}
    stored = np.arange(18).reshape(9, 2)
    first, second = step.undo([stored], hp)
    assert first.tolist() == stored[[0, 1, 3, 4, 6, 7]].tolist()
    assert second.tolist() == stored[[2, 5, 8]].tolist()
    assert np.array_equal(step.apply([first, second], hp)[0], stored)
    assert step.shapes([(9, 2)], hp) == [(6, 2), (3, 2)]
    assert step.stored_shapes([(6, 2), (3, 2)], hp, 1) == [(9, 2)]
    moves: Any = step.moves([(9, 2)], hp)
    flat = stored.reshape(-1)
    for runs, logical in zip(moves, (first, second), strict=True):
        found = np.concatenate([flat[run.start : run.start + run.count] for run in runs])
        assert np.array_equal(found, logical.reshape(-1))
    together = ByGroup("n", ("n*two", "n*one"), ((1, 0),))
    (both,) = together.undo([stored], hp)
    assert np.array_equal(both, np.concatenate([second, first]))
    assert np.array_equal(together.apply([both], hp)[0], stored)
    for shape in ((8, 2), (12, 2), ()):
        with pytest.raises(ArchError):
            step.shapes([shape], hp)
    for shapes in ([(6, 2), (3, 3)], [(3, 2), (6, 2)], [(6, 2), ()]):
        with pytest.raises(ArchError):
            step.stored_shapes(shapes, hp, 1)
    with pytest.raises(ArchError, match="expected numbers that four divides"):
        ByGroup("four", ("n*two",), ((0,),)).shapes([(6, 2)], hp)


# --- kinds of layers ----------------------------------------------------------------------------


def test_a_list_of_layers_names_known_kinds_for_all_of_them() -> None:
    listed = value_checks.listed_kinds
    assert listed(["a", "b", "a", "x"], "k", 3, {"a", "b"}) == ["a", "b", "a"]
    with pytest.raises(
        ArchError, match="k: layer 1 is 'x'; the layers of this architecture are one of: a"
    ):
        listed(["a", "x"], "k", 2, ["a"])
    for short in (["a"], "ab", None, 3):
        with pytest.raises(ArchError):
            listed(short, "k", 2, ["a", "b"])
    read = layer_kinds.read_layer_kinds(("on",), ("off",), "kinds", "older")
    facts: Any = SimpleNamespace(first=lambda *keys: (["on", "off", "on"], keys[1]))
    assert read(facts, {"n_layers": 3}) == ((True, False, True), "older")
    assert read(SimpleNamespace(first=lambda *keys: None), {"n_layers": 3}) is None  # type: ignore[arg-type]


# --- draft heads --------------------------------------------------------------------------------


def test_a_draft_head_has_the_names_of_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed weights are those that the file packs, by the names that the head's rows have."""
    stored = {"own.q": "mtp.q", "own.k": "mtp.k", "own.x": "mtp.x", "own.b": "mtp.b"}
    asked: list[Any] = []
    monkeypatch.setattr(
        draft_head, "_group_names_by_head", lambda spec, style, hp, names: [(7, stored)]
    )
    monkeypatch.setattr(draft_head, "head_hyper", lambda spec, hp: ("hyper", hp))
    monkeypatch.setattr(draft_head, "head_spec", lambda spec: f"head of {spec}")
    groups = [
        SimpleNamespace(binding="first", stored=("own.q", "own.k"), roles=("q", "k")),
        SimpleNamespace(binding="second", stored=("own.x",), roles=("x",)),
    ]
    bound = SimpleNamespace(groups=groups, unbound=("own.x",), buffers=("own.b",))

    def packed(bound: Any, names: Any) -> Any:
        asked.append(names)
        return bound

    monkeypatch.setattr(draft_head, "bind_names", lambda spec, style, names: bound)
    monkeypatch.setattr(draft_head, "bind_packed", packed)
    monkeypatch.setattr(draft_head, "without_partial", lambda bound, hyper: bound)
    monkeypatch.setattr(draft_head, "model_role", lambda layer, key: f"L{layer}.{key}")
    spec: Any = "spec"
    hp: Any = "hp"
    (head,) = draft_head.find_heads(spec, "hf", hp, ["mtp.q"], {"mtp.q", "own.k", "other"})
    assert asked == [{"own.q"}]
    told: Any = [(one.binding, one.layer, one.stored, one.roles) for one in head.bound.groups]
    assert told == [
        ("first", 7, ("mtp.q", "mtp.k"), ("L7.q", "L7.k")),
        ("second", 7, ("mtp.x",), ("L7.x",)),
    ]
    assert (head.bound.unbound, head.bound.buffers) == (("mtp.x",), ("mtp.b",))
    assert head.hyper == ("hyper", "hp")  # type: ignore[comparison-overlap]
