"""Orders of the rows of fused tensors, on joined rows of a few numbers each."""

from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from aprfmt.causes.tensor import fused_rows
from aprfmt.causes.tensor.fused_rows import (
    FAMILIES,
    RowOrder,
    ValueRows,
    fused_groups,
    segment_words,
)
from aprfmt.causes.tensor.row_sources import JoinedRows
from aprfmt.measure.row_reader import RowReader


class View:
    """A tensor of float32 numbers."""

    encoding, encodings, layout, restored, packed = "F32", ("F32",), (), False, None
    lattice = None
    parts: ClassVar[dict[str, Any]] = {}
    names = ("w",)

    def __init__(self, values: Any) -> None:
        self.values = np.asarray(values, np.float32)
        self.shape = self.values.shape

    def numpy(self) -> Any:
        return self.values

    def drop(self) -> None:
        pass


def joined(*parts: int, columns: int = 3, experts: int = 0) -> JoinedRows:
    """Return joined tensors q, k, v of so many rows, of each expert where there are some."""
    readers = []
    for count in parts:
        shape: tuple[int, ...] = (count, columns) if columns > 1 else (count,)
        shape = (experts, count // experts, columns) if experts else shape
        view: Any = View(np.arange(np.prod(shape)).reshape(shape))
        readers.append(RowReader(view))
    return JoinedRows(["q", "k", "v"][: len(parts)], readers)


def case_of(pool: JoinedRows, kv: int = 0) -> Any:
    """Return the pair of such rows, with so many key heads."""
    return SimpleNamespace(a=pool, sizes=lambda name: [kv] if kv and name == "n_kv_heads" else [])


QKV, GATE_UP = FAMILIES[0], FAMILIES[1]


def test_roles_of_a_family_have_their_weights_and_biases() -> None:
    assert QKV.keys_with_suffix("bias") == (
        ("attn_q.bias", "q"), ("attn_k.bias", "k"), ("attn_v.bias", "v")
    )  # fmt: skip
    assert [family.heads for family in FAMILIES] == [True, False, False]


def test_each_layer_is_asked_for_each_family_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_rows, "_explain_layer", lambda *given: given)
    context: Any = object()
    pairs: Any = {}
    rows: Any = {"L10.a": 1, "L2.b": 2, "L2.c": 3, "output.weight": 4}
    made: Any = list(fused_groups(context, pairs, rows))
    asked = [group() for group in made]
    assert [one[:3] for one in asked] == [(context, pairs, rows)] * 6
    assert [one[3:] for one in asked] == [(family, n) for family in FAMILIES for n in (2, 10)]


def test_parts_have_names_and_rows_and_experts_are_counted() -> None:
    assert fused_rows._part_sizes(joined(4, 2, 3), QKV) == [("q", 4), ("k", 2), ("v", 3)]
    assert fused_rows._experts(joined(4, 2, 2)) == 1
    assert fused_rows._experts(joined(4, 2, 2, columns=1)) == 1
    assert fused_rows._experts(joined(6, 6, experts=3)) == 3


def test_values_of_a_bias_of_experts_are_rows() -> None:
    view: Any = View([[1, 2], [3, 4], [5, 6]])
    plain = fused_rows._rows_of(view, (("ffn_up_exps.weight", "up"),))
    assert not isinstance(plain, ValueRows) and (plain.rows, plain.columns) == (3, 2)
    made = fused_rows._rows_of(view, (("ffn_up_exps.bias", "up"),))
    assert isinstance(made, ValueRows) and (made.rows, made.columns) == (6, 1)
    assert made.take([4, 0]).tolist() == [[5], [1]]
    pool = JoinedRows(["a", "b"], [made, made])
    assert fused_rows._experts(pool) == 3 and pool.rows == 12
    line: Any = View([1, 2])
    assert not isinstance(fused_rows._rows_of(line, (("attn_q.bias", "q"),)), ValueRows)


@pytest.mark.parametrize(
    ("at", "crossed", "inside"),
    [
        ([0, 1, 2, 3, 4, 5], [], [1, 1, 1]),
        ([1, 0, 2, 3, 5, 4], [], [1, 1, 1]),
        ([2, 1, 0, 3, 4, 5], [(1, 2), (2, 1)], [0, 0, 1]),
        ([0, 4, 2, 3, 1, 5], [(1, 3), (3, 1)], [0, 1, 0]),
        ([0, 1, 2, 2, 2, 5], [(3, 2)], [1, 1, 0]),
    ],
)
def test_rows_that_leave_their_part(at: list[int], crossed: Any, inside: list[int]) -> None:
    pool, order = joined(2, 2, 2), np.array(at)
    assert fused_rows._parts_crossed(pool, order) == crossed
    assert [fused_rows._moves_inside_part(pool, n, order) for n in range(3)] == inside


@pytest.mark.parametrize(
    ("at", "by"),
    [
        ([0, 1, 3, 4, 5, 6], 1),
        ([0, 1, 1, 2, 3, 4], -1),
        ([0, 1, 3, 4, 4, 5], 1),
        ([0, 1, 3, 4, 6, 7], 0),  # by one row and by two
        ([0, 1, 3, 2, 4, 5], 0),
        ([0, 1, 2, 3, 4, 5], 0),
    ],
)
def test_parts_that_are_cut_at_another_row(at: list[int], by: int) -> None:
    assert fused_rows._cut_shift(joined(2, 2, 2), np.array(at)) == by


def test_runs_of_rows_are_said_by_part() -> None:
    pool = joined(4, 2, 2)
    start = "rows of B, by those of A: "
    found = segment_words(pool, np.array([0, 4, 5, 3, 1, 2, 6, 7]))
    assert found == f"{start}q 1-2 is k 0-1; k 0-1 is q 1-2"
    found = segment_words(pool, np.array([0, 1, 2, 6, 4, 5, 3, 7]))
    assert found == f"{start}q 3 is v 0; v 0 is q 3"
    for count, more in ((6, ""), (8, " and 2 more runs")):
        at = np.arange(12)
        at[:count] = at[:count][::-1]
        said = segment_words(joined(8, 2, 2), at)
        assert said.count(" is ") == 6 and said.startswith(f"{start}q 0 is q {count - 1}; q 1 is ")
        assert said.endswith(more or "; q 5 is q 0")


def test_a_run_ends_where_a_part_of_either_side_does() -> None:
    pool = joined(4, 4, 4)
    start = "rows of B, by those of A: "
    found = segment_words(pool, np.array([0, 1, 2, 3, 2, 3, 4, 5, 8, 9, 10, 11]))
    assert found == f"{start}k 0-1 is q 2-3; k 2-3 is k 0-1"
    found = segment_words(pool, np.array([2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 0, 1]))
    assert found == (
        f"{start}q 0-1 is q 2-3; q 2-3 is k 0-1; k 0-1 is k 2-3; k 2-3 is v 0-1; v 0-1 is v 2-3; "
        "v 2-3 is q 0-1"
    )


def test_a_cut_and_unnamed_orders_are_told_apart() -> None:
    pool = joined(4, 4, 4)
    case = case_of(pool)

    def named(at: Any, family: Any = QKV) -> Any:
        return fused_rows._name_row_order(family, case, np.asarray(at))

    late: Any = named([0, 1, 2, 3, 5, 6, 7, 8, 8, 9, 10, 11])
    assert (late.cause, late.says) == ("row_offset", "[q k v]: cut 1 row too late")
    early: Any = named([0, 1, 2, 3, 2, 3, 4, 5, 8, 9, 10, 11])
    assert early.says == "[q k v]: cut 2 rows too early" and not early.named
    assert early.more[0].startswith("rows of B, by those of A: k 0-1 is q 2-3;")
    assert named([0, 0, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]) is None
    assert named([1, 0, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]) is None  # q alone
    mixed: Any = named([0, 5, 9, 3, 4, 1, 6, 10, 8, 2, 7, 11])
    assert mixed.cause == "fused_order" and not mixed.named
    assert mixed.says == "[q k v]: the rows stand in another order"
    turned: Any = named([4, 5, 6, 7, 8, 9, 10, 11, 0, 1, 2, 3])
    assert turned is not None and turned.named == (" in A became " in turned.says)


def test_a_row_by_row_layout_is_named_by_its_words() -> None:
    pool = joined(3, 3)
    at = np.array([0, 3, 1, 4, 2, 5])
    found: Any = fused_rows._name_row_order(GATE_UP, case_of(pool), at)
    assert found.named and found.cause == "fused_order"
    assert found.says.startswith("the rows of [gate up]: ")


class Pair:
    """A pair of joined rows whose distances are counted by numpy."""

    def __init__(self, a: JoinedRows, b: Any) -> None:
        self.a = a
        pool: Any = JoinedRows(a.keys, a.readers)
        pool.take = lambda index: b[np.asarray(index)]
        self.b = pool
        self.key, self.context = "q", None

    def slack(self) -> float:
        return 0.0

    def distance(self, left: Any, right: Any, rows: Any = None, slack: float = 0.0) -> Any:
        rows = np.arange(self.a.rows) if rows is None else rows
        x, y = left(rows), right(rows)
        apart = float(np.linalg.norm(x - y))
        return SimpleNamespace(
            changed=int((x != y).sum()), relative=apart, count=x.size, residual=apart,
            equal=lambda slack: apart <= slack,
        )  # fmt: skip


def test_parts_that_an_order_changes_have_a_finding_each() -> None:
    pool: Any = joined(2, 2, 2)
    whole = np.vstack([reader.whole for reader in pool.readers]) + np.arange(6)[:, None] * 100
    pool.take = lambda index: whole[np.asarray(index)]
    at = np.array([2, 1, 0, 3, 4, 5])
    case: Any = Pair(pool, whole[at])
    order = RowOrder("fused_order", "rows moved", at, ("how",), named=True)
    found = fused_rows._order_explanations(case, order, ("more",))
    assert set(found) == {"q", "k"}
    assert found["q"].evidence[:3] == ("rows moved", "how", "more")
    assert found["q"].residual_after == 0 and (found["q"].residual_before or 0) > 0
    unnamed = fused_rows._order_explanations(case, RowOrder("fused_order", "x", at), ())
    proofs = [one["q"].proof for one in (found, unnamed)]
    assert [proof and proof.free for proof in proofs] == [0, 2]  # rows that gave the order
    short = RowOrder("fused_order", "x", at[:5])
    assert fused_rows._order_explanations(case, short, ()) == {}
    wrong = RowOrder("fused_order", "x", np.array([2, 1, 0, 3, 5, 4]))
    assert fused_rows._order_explanations(case, wrong, ()) == {}


class LayerPair(Pair):
    """The pair of joined rows that a layer's tensors make, with one key head."""

    def __init__(self, key: str, a: JoinedRows, b: JoinedRows, context: Any) -> None:
        super().__init__(a, np.vstack([reader.whole for reader in b.readers]))
        self.b, self.key = b, key

    def sizes(self, name: str) -> list[int]:
        return [1]


Q, K, V = (f"L0.attn_{part}" for part in "qkv")
FIRST = {
    f"{Q}.weight": np.arange(12.0).reshape(4, 3), f"{K}.weight": 50 + np.arange(6.0).reshape(2, 3),
    f"{V}.weight": 90 + np.arange(6.0).reshape(2, 3),
}  # fmt: skip
BIASES = {f"{Q}.bias": [1.0, 2, 3, 4], f"{K}.bias": [5.0, 6], f"{V}.bias": [7.0, 8]}


def moved(values: dict[str, Any], at: Any) -> dict[str, Any]:
    """Return the tensors with the rows of all of them together taken at these places."""
    rows = np.concatenate([np.asarray(one) for one in values.values()])[at]
    ends = np.cumsum([len(one) for one in values.values()])[:-1]
    return dict(zip(values, np.split(rows, ends), strict=True))


def explained(
    a: dict[str, Any], b: dict[str, Any], *, known: tuple[str, ...] = (), family: Any = QKV
) -> Any:
    """Return the findings on layer 0 of two sides, of which `known` are explained otherwise."""
    pairs: Any = {
        key: SimpleNamespace(a=View(a[key]), b=View(b[key]) if key in b else None) for key in a
    }
    rows: Any = {}
    for key in a:
        same = key in b and np.array_equal(a[key], b[key])
        left = not same and key not in known
        rows[key] = SimpleNamespace(
            verdict="SAME_VALUES" if same else "DIFFERENT",
            is_unexplained=lambda weak, left=left: left and "row_offset" in weak,
        )
    context: Any = None
    return fused_rows._explain_layer(context, pairs, rows, family, 0)


SWAPPED = np.array([6, 1, 2, 7, 4, 5, 0, 3])  # rows of q and v


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_rows, "DifferingPair", LayerPair)
    monkeypatch.setattr(fused_rows, "find_joined_exchange", lambda *given: None)


@pytest.mark.usefixtures("layers")
def test_one_order_explains_the_parts_that_it_moves() -> None:
    found = explained(FIRST, moved(FIRST, SWAPPED))
    assert set(found) == {f"{Q}.weight", f"{V}.weight"}
    one = found[f"{Q}.weight"]
    assert one.evidence[0] == "[q k v]: the rows stand in another order"
    assert one.residual_after == 0 and one.residual_before > 100
    assert explained(FIRST, FIRST) == {}
    everything = tuple(FIRST)
    assert explained(FIRST, moved(FIRST, SWAPPED), known=everything) == {}
    assert explained(FIRST, moved(FIRST, SWAPPED), known=everything[:2])


@pytest.mark.usefixtures("layers")
def test_rows_that_are_no_others_are_not_explained() -> None:
    other = moved(FIRST, SWAPPED)
    other[f"{K}.weight"] = other[f"{K}.weight"] + 1000
    assert explained(FIRST, other) == {}
    short = moved(FIRST, SWAPPED)
    del short[f"{V}.weight"]
    assert explained(FIRST, short) == {}
    wide = {**FIRST, f"{V}.weight": np.zeros((2, 4))}
    assert explained(wide, {**moved(FIRST, SWAPPED), f"{V}.weight": np.zeros((2, 4))}) == {}


@pytest.mark.usefixtures("layers")
def test_biases_follow_the_weights_or_stay() -> None:
    both = {**FIRST, **BIASES}
    apart = {**moved(FIRST, SWAPPED), **moved(BIASES, SWAPPED)}
    found = explained(both, apart)
    assert set(found) == {f"{x}.{part}" for x in (Q, V) for part in ("weight", "bias")}
    assert "the biases moved with the weights" in found[f"{Q}.bias"].evidence
    assert "the biases stand as in A" not in found[f"{Q}.weight"].evidence
    found = explained(both, {**moved(FIRST, SWAPPED), **BIASES})
    assert set(found) == {f"{Q}.weight", f"{V}.weight"}
    assert all(one.evidence[-1] == "the biases stand as in A" for one in found.values())
    found = explained(both, {**FIRST, **moved(BIASES, SWAPPED)})
    assert set(found) == {f"{Q}.bias", f"{V}.bias"}
    says = "only the biases moved: the weights do not show it"
    assert all(one.evidence[-1] == says for one in found.values())


@pytest.mark.usefixtures("layers")
def test_parts_that_were_transposed_together_have_a_finding_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []

    def exchange(case: Any, parts: Any, kv: int, experts: int) -> Any:
        asked.append((parts, kv, experts))
        return SimpleNamespace(says="transposed as one", residual=0.25)

    monkeypatch.setattr(fused_rows, "find_joined_exchange", exchange)
    other = {**FIRST, f"{K}.weight": FIRST[f"{K}.weight"] * 3}
    found = explained(FIRST, other)
    assert asked == [([("q", 4), ("k", 2), ("v", 2)], 1, 1)]
    (key,) = found
    assert key == f"{K}.weight" and found[key].evidence == ("transposed as one",)
    assert found[key].residual_after == 0.25 and found[key].residual_before > 100
    assert explained(FIRST, other, known=tuple(FIRST)) == {} and len(asked) == 1


@pytest.mark.usefixtures("layers")
def test_equal_values_of_biases_are_held_against_known_layouts() -> None:
    """Where a value came from is not seen: the layout of rows by turns gives all of them."""
    names = ("L0.ffn_gate.bias", "L0.ffn_up.bias")
    first = dict(zip(names, ([1.0, 1, 2, 2], [1.0, 3, 3, 2]), strict=True))
    turns = np.array([0, 4, 1, 5, 2, 6, 3, 7])
    found = explained(first, moved(first, turns), family=GATE_UP)
    assert found and set(found) <= set(names)
    for one in found.values():
        assert one.evidence[0].startswith("the rows of [gate up]: ")
        assert one.evidence[-1] == "only the biases moved: the weights do not show it"
    assert explained(first, moved(first, turns), family=GATE_UP, known=names) == {}
    other = moved(first, turns)
    other[names[0]] = np.array([9.0, 1, 1, 3])
    assert explained(first, other, family=GATE_UP) == {}
