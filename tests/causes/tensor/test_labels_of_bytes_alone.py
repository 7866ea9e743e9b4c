"""What bytes are labelled, which of their signs are left, and in which order parts are joined.

Each rule by itself: on both sides, with one part that fits and one that does not.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.causes.tensor import (
    arithmetic,
    block_signs,
    packed_parts,
    rank_parameters,
    shard_copies,
    stored_bytes,
)
from aprfmt.causes.tensor.guess import Guess
from aprfmt.errors import FormatError

RNG = np.random.default_rng(8)


class Reader:
    """Rows of float32 values under the label of an encoding, with the bytes of that encoding."""

    def __init__(self, encoding: str, values: Any, row_bytes: int | None = None) -> None:
        self.encoding = encoding
        self.values = np.asarray(values, np.float32)
        self.shape, self.size = self.values.shape, self.values.size
        self.rows, self.columns = self.shape
        self.row_bytes = row_bytes
        self.side = SimpleNamespace(layout=())

    def take(self, rows: Any) -> Any:
        return self.values[rows]

    def rows_as(self, encoding: str) -> Any:
        return lambda rows: (self.encoding, encoding, rows.tolist())


def case(a: Reader, b: Reader) -> Any:
    every = np.arange(a.rows)
    made = SimpleNamespace(a=a, b=b, numbers=None, key="k", sample=every)
    made.sample_a, made.sample_b = a.take(every), b.take(every)
    made.slack = lambda moved=True: 0.25 if moved else 0.125

    def guess(cause: str, says: Any, label: str, take: Any, slack: float = 0.25) -> Guess:
        left, right = (take, b.take) if label == "A" else (a.take, take)
        return Guess(cause, says, left, right, slack=slack)

    made.guess = guess
    return made


# --- signs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", ["A", "B"])
def test_lost_signs_are_those_of_a_packed_side_without_a_negative_value(packed: str) -> None:
    """Zeros have no sign: beside them the signs can be lost all the same."""
    right = np.array([[1, -2, 0, 3], [-4, 5, -6, 0]], np.float32)

    def told(values: Any, encoding: str = "IQ2_XS") -> list[Guess]:
        plain, held = Reader("F32", right), Reader(encoding, values)
        sides = (held, plain) if packed == "A" else (plain, held)
        return list(block_signs.guess_lost_signs(case(*sides)))

    (found,) = told(np.abs(right))
    assert found.cause == "quant_signs"
    assert found.says == (
        f"the signs of {packed} are lost: its values are the other side's magnitudes",
        "IQ2_XS",
    )
    rows = np.array([1, 0])
    assert np.array_equal(found.left(rows), np.abs(right)[rows])
    assert np.array_equal(found.right(rows), np.abs(right)[rows])
    one = np.abs(right)
    one[1, 1] = -5
    assert told(one) == told(np.zeros_like(right)) == []
    assert told(np.abs(right), "Q4_0") == [], "a type that stores a sign with each value"


# --- labels ---------------------------------------------------------------------------------------


def test_labels_of_one_size_are_tried_but_for_what_equal_bytes_were_asked_already() -> None:
    """BF16 beside F16 of the same rows is asked by the bytes; other sizes of rows are not."""
    values = RNG.normal(size=(3, 8))

    def told(a: Reader, b: Reader) -> list[str]:
        found = list(stored_bytes.guess_dtype_mislabel(case(a, b)))
        assert all(one.cause == "dtype_mislabel" for one in found)
        return [one.says[0] for one in found if "under the label" in one.says[0]]

    def says(label: str, name: str, own: str) -> str:
        whose = "A" if label == "B" else "B"
        return f"{label} holds {whose}'s values as {name}, under the label {own}"

    # The other side has the other name, and rows of the same size: the bytes say it.
    assert told(Reader("F16", values, 16), Reader("BF16", values, 16)) == []
    # The other side has another name: both of its labels are tried.
    assert told(Reader("F32", values, 32), Reader("BF16", values, 16)) == [says("B", "F16", "BF16")]
    assert told(Reader("F16", values, 16), Reader("F32", values, 32)) == [says("A", "BF16", "F16")]
    # Of two sides of one type, and so with rows of one size, each may be mislabelled.
    assert told(Reader("F16", values, 16), Reader("F16", values, 16)) == [
        says("B", "BF16", "F16"),
        says("A", "BF16", "F16"),
    ]
    # The other side's name is tried where its rows are not separate bytes.
    assert told(Reader("F16", values, 16), Reader("BF16", values)) == [says("A", "BF16", "F16")]


def test_a_label_is_taken_for_wrong_of_the_side_that_has_it() -> None:
    values = RNG.normal(size=(3, 8)).astype(np.float32)
    for label in "AB":
        coded, plain = Reader("BF16", values, 16), Reader("F32", values, 32)
        sides = (coded, plain) if label == "A" else (plain, coded)
        *_, found = stored_bytes.guess_dtype_mislabel(case(*sides))
        taken = [found.left(np.array([2, 0])), found.right(np.array([2, 0]))]
        read = taken.pop(0 if label == "A" else 1)
        assert read == ("BF16", "F16", [2, 0])
        assert np.array_equal(taken[0], values[[2, 0]])


def test_only_floats_of_8_bits_are_read_as_the_other_floats_of_8_bits() -> None:
    def read_as(name: str, encoding: str) -> Any:
        part = SimpleNamespace(encoding=encoding, _replace=lambda **to: to)
        weight: Any = SimpleNamespace(
            dialect=SimpleNamespace(main=".w"), parts={".w": part}, replace_parts=lambda to: to
        )
        return packed_parts._relabel_floats(name)(weight)

    assert read_as("F8_E5M2", "F8_E4M3") == {".w": {"encoding": "F8_E5M2"}}
    assert read_as("F8_E4M3", "F8_E5M2") == {".w": {"encoding": "F8_E4M3"}}
    for name in ("F8_E4M3", "F8_E5M2"):
        assert read_as(name, name) is None
        assert read_as(name, "I8") is read_as(name, "U8") is read_as(name, "I32") is None


def test_a_sum_with_one_is_rounded_and_not_what_is_added_to_one() -> None:
    """1 + 2 ** -9 is 1 in bfloat16, and 2 ** -9 itself is none the less: each by a guess."""
    fine = np.array([[2.0**-9, 0.5, -0.25, 2.0]], np.float32)
    a, b = Reader("F32", fine), Reader("F32", 3 * fine)
    b.side.layout = (SimpleNamespace(permutes=False),)
    found = [one for one in arithmetic.guess_rounding(case(a, b)) if isinstance(one, Guess)]
    first, *_ = found
    row = np.array([0])
    assert first.says[0].startswith("equal once 1 is added") and first.slack == 0.125
    assert np.array_equal(first.left(row), fine + 1)
    assert np.array_equal(first.right(row), 3 * fine + 1)
    by_a, by_b = (
        one
        for one in found
        if one.says[0].endswith("rounded to BF16 with 1 added, as it is stored")
    )
    assert by_a.says[0].startswith("B's values are A's, ")
    assert np.array_equal(by_a.left(row), [[1, 1.5, 0.75, 3]])
    assert np.array_equal(by_a.right(row), 3 * fine + 1)
    assert by_b.says[0].startswith("A's values are B's, ")
    assert np.array_equal(by_b.left(row), [[1 + 2.0**-7, 2.5, 0.25, 7]])
    assert np.array_equal(by_b.right(row), fine + 1)
    of_a, of_b = (one for one in found if one.says[0].endswith("rounded to BF16"))
    assert np.array_equal(of_a.left(row), fine) and np.array_equal(of_a.right(row), 3 * fine)
    assert np.array_equal(of_b.left(row), fine) and np.array_equal(of_b.right(row), 3 * fine)
    b.side.layout = (SimpleNamespace(permutes=True),)
    texts = [one.says[0] for one in arithmetic.guess_rounding(case(a, b)) if isinstance(one, Guess)]
    assert texts and not any("1 added" in text or "1 is added" in text for text in texts)


# --- parts ----------------------------------------------------------------------------------------


def test_a_matrix_that_cannot_be_read_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """q, k, v of the first layer cannot be read; the shards of both layers' MLPs are told."""
    noted: list[Any] = []
    dropped: list[str] = []
    qkv = [f"L0.attn_{part}.weight" for part in "qkv"]
    mlps = [f"L{n}.ffn_{part}.weight" for n in range(2) for part in ("gate", "up")]
    keys = [*qkv, *mlps]
    pairs: Any = {key: SimpleNamespace(drop=lambda key=key: dropped.append(key)) for key in keys}
    row: Any = SimpleNamespace(is_unexplained=lambda weak: True, stats=SimpleNamespace(rel_l2=0.75))
    error = FormatError("cut")
    orders = iter([(1, 0), (2, 0, 1, 3)])

    def find(parts: list[Any]) -> Any:
        if len(parts) == 3:
            raise error
        order = next(orders)
        return shard_copies.SharedParts(order, 0, 0.5, 0.0, 99, 0.0, np.arange(64.0))

    monkeypatch.setattr(shard_copies, "_find_joined", find)
    context: Any = SimpleNamespace(record_not_tried=lambda *given: noted.append(given))
    made = shard_copies._explain_joined(context, pairs, dict.fromkeys(keys, row))
    assert noted == [(("shard_order",), qkv[0], error)]
    assert list(made) == mlps and dropped == keys
    for key, finding in made.items():
        assert (finding.cause, finding.where) == ("shard_order", (key,))
        assert finding.residual_before == 0.75 and finding.residual_after == 0.0
    assert made[mlps[0]].evidence[1] == "the fused rows in 2 equal parts"
    assert made[mlps[3]].evidence[1] == "the fused rows in 4 equal parts"


def test_matrices_are_in_one_other_order_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three matrices of other sizes, the last first; one number of a rank more is another cause."""
    names = ["q", "k", "v"]
    shares = [[RNG.normal(size=(rows, 2)) for rows in (4, 2, 1)] for _ in range(2)]
    monkeypatch.setattr(rank_parameters, "_matrix_names", lambda reading: names)

    def told(held: Any, *, grouped: bool = False, given: Any = None) -> Any:
        mine = shares if given is None else given
        layout = SimpleNamespace(shares=lambda arrays, rank: arrays[rank])
        reading: Any = SimpleNamespace(
            layout=layout, parameter=SimpleNamespace(grouped=grouped, axis=0)
        )
        return rank_parameters._exchanged_matrices(reading, mine, held)

    def joined(order: Any) -> list[Any]:
        return [np.concatenate([one[at] for at in order]) for one in shares]

    turned = joined([2, 0, 1])
    found = told(turned)
    assert found.says == "v, q, k are joined in this order, where an engine has q, k, v"
    assert (found.cause, found.free) == ("fused_order", 3)
    assert found.nbytes == 2 * 7 * 2 * 8 and found.sample == turned[0].tobytes()
    assert told(joined([0, 1, 2])) is None, "as an engine joins them"
    assert told(turned, grouped=True) is None
    assert told([turned[0], joined([1, 0, 2])[1]]) is None, "another order on the second rank"
    wrong = [turned[0], turned[1].copy()]
    wrong[1][-1, -1] += 1
    assert told(wrong) is None
    assert told(turned, given=[shares[0], shares[1][:2]]) is None, "a rank without the third"
    names.append("gate")
    assert told(turned) is None, "four names, and three matrices"
    names[:] = ["q"]
    assert told([one[0] for one in shares], given=[one[:1] for one in shares]) is None
