"""Zeros, pruned copies, orders of codes and functions of values, each rule at its bounds."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.causes.forward import rope
from aprfmt.causes.tensor import (
    coarse_damage,
    code_orders,
    outliers,
    pruned_copies,
    value_functions,
)
from aprfmt.errors import FormatError

RNG = np.random.default_rng(33)


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """Each test draws the same numbers, whichever ran before it."""
    RNG.bit_generator.state = np.random.default_rng(99).bit_generator.state


# --- runs of zeros ------------------------------------------------------------------------------


class Reader:
    """A tensor of float32 numbers."""

    encoding = "F32"

    def __init__(self, values: Any) -> None:
        self.values = np.asarray(values, np.float64)
        self.shape = self.values.shape
        self.rows, self.columns = self.shape

    def take(self, rows: Any) -> Any:
        return self.values[rows]


def test_a_run_of_zeros_is_one_where_the_other_has_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a whole gap or a row, where more than half of the others are there; to a row's end."""
    monkeypatch.setattr(coarse_damage, "GAP", 4)
    monkeypatch.setattr(coarse_damage, "_half_step", lambda x: 0.1)
    y = np.ones((1, 10))

    def holes(x: Any, y: Any = y) -> list[int]:
        found = coarse_damage._find_zero_runs(np.asarray(x, float)[None], np.asarray(y, float))
        return np.flatnonzero(found[0]).tolist()

    full = np.ones(10)

    def zeros(*at: int) -> Any:
        made = full.copy()
        made[list(at)] = 0
        return made

    assert holes(full) == holes(zeros(0, 1, 2)) == holes(zeros(2, 3, 4, 5)) == []
    assert holes(zeros(0, 1, 2, 3)) == [0, 1, 2, 3] == holes(zeros(*range(4), 8, 9))
    assert holes(zeros(*range(10))) == list(range(10))
    assert holes(zeros(4, 5, 6, 7, 8)) == [4, 5, 6, 7, 8] and holes(zeros(8, 9)) == []
    some = full.copy()
    some[2:4] = 0.05  # rounded away by the other's step
    assert holes(zeros(0, 1, 2, 3), some[None]) == []
    some[2] = 0.2
    assert holes(zeros(0, 1, 2, 3), some[None]) == [0, 1, 2, 3]
    short = coarse_damage._find_zero_runs(np.zeros((1, 3)), np.ones((1, 3)))
    assert short.all()


@pytest.mark.parametrize("label", ["A", "B"])
def test_zeros_are_damage_where_all_else_is_within_rounding(
    label: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coarse_damage, "_find_zero_runs", lambda x, y: (x == 0) & (y != 0))
    right = RNG.normal(size=(8, 6)) + 4

    def told(wrong: Any, slack: Any = 0.01, **more: Any) -> list[str]:
        sides = (right, wrong) if label == "B" else (wrong, right)
        facts = {
            "a": Reader(sides[0]),
            "b": Reader(sides[1]),
            "numbers": None,
            "key": "k",
            "before": SimpleNamespace(relative=0.5),
            "slack": lambda: slack,
            "windows": lambda size: iter([np.arange(0, 3), np.arange(3, 8)]),
        }
        found: Any = list(coarse_damage.explain_zero_runs(SimpleNamespace(**facts | more)))  # type: ignore[arg-type]
        assert len(found) < 2 and all(one.cause == "bit_rot" for one in found)
        return list(found[0].evidence) if found else []

    def lost(*rows: int, columns: Any = slice(None), **changed: float) -> Any:
        made = right.copy()
        for row in rows:
            made[row, columns] = 0
        for name, value in changed.items():
            made[int(name[1:])] *= value
        return made

    text = "zeros stand where values should; all others are within the rounding of the coarser one"
    assert told(lost(2)) == [text, f"{label} holds zeros in 6 values, in row 2"]
    assert told(lost(2, 3)) == [text, f"{label} holds zeros in 12 values, in rows 2-3"]
    end = ", to the end: the data was cut short"
    assert told(lost(6, 7))[1] == f"{label} holds zeros in 12 values, in rows 6-7{end}"
    assert told(lost(7))[1] == f"{label} holds zeros in 6 values, in row 7"
    assert told(lost(6, 7, columns=slice(2, None)))[1].endswith("in rows 6-7")
    # Rows beside them may differ, others not; nothing without any rounding, or of other shapes.
    assert told(lost(2, r1=2.0, r3=0.5)) and not told(lost(2, r5=1.2)) and not told(right)
    assert not told(lost(2), slack=0.0) and not told(lost(2), numbers=object())
    assert not told(lost(2), **{"a" if label == "B" else "b": Reader(right[:7])})
    both = right.copy()
    both[5, :3] = 0
    other = {"a" if label == "B" else "b": Reader(both)}
    lines = {label: "6 values, in row 2", "AB".replace(label, ""): "3 values, in row 5"}
    assert told(lost(2), **other) == [text, *(f"{one} holds zeros in {lines[one]}" for one in "AB")]
    assert not told(lost(0, 3, 6))  # no row is left that is measured
    assert not told(lost(2, r0=1.005, r4=1.005, r5=1.005, r6=1.005, r7=1.005), slack=0.0049)
    assert told(lost(2, r5=1.004), slack=0.005)


# --- pruned copies ------------------------------------------------------------------------------


def test_a_pruning_is_one_of_most_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pruned_copies, "FEW", 2)
    monkeypatch.setattr(pruned_copies, "NEARLY_ALL", 0.75)
    left: list[Any] = []
    context: Any = SimpleNamespace(record_not_tried=lambda *given: left.append(given[:2]))

    def copied(pair: Any) -> Any:
        if pair.kind == "broken":
            raise FormatError("gone")
        if pair.kind != "pruned":
            return None
        return SimpleNamespace(
            key=pair.key, zeros=0.25 + pair.at / 100, encoding="Q4_0", before=0.5, after=0.01
        )

    monkeypatch.setattr(pruned_copies, "_pruned_copy", copied)

    def told(*kinds: str) -> dict[str, Any]:
        left.clear()
        dropped: list[str] = []
        pairs: Any = {}
        rows: Any = {}
        for at, kind in enumerate(kinds):
            key = f"t{at}"
            pairs[key] = SimpleNamespace(
                key=key, kind=kind, at=at, drop=lambda key=key: dropped.append(key)
            )
            shape = None if kind == "absent" else (4,) if kind == "vector" else (4, 4)
            rows[key] = SimpleNamespace(
                key=key, shape_b=shape, is_unexplained=lambda weak, kind=kind: kind != "known"
            )
        found = pruned_copies._explain_pruned(context, pairs, rows)
        asked = [f"t{at}" for at, kind in enumerate(kinds) if kind in ("pruned", "broken", "other")]
        assert dropped == asked
        assert left == [
            ((pruned_copies.CAUSE,), f"t{at}") for at, kind in enumerate(kinds) if kind == "broken"
        ]
        return found

    found = told("pruned", "pruned", "pruned", "other")
    assert list(found) == ["t0", "t1", "t2"]
    text, line = found["t1"].evidence
    assert text.startswith("3 of 4 matrices were pruned, 25 to 27 % of the values are zero")
    assert text.endswith("within what Q4_0 rounds off")
    assert line == "0.5 of the norm, 0.01 with B's zeros put into A"
    assert told("pruned", "pruned", "pruned", "other", "other") == told("pruned") == {}
    assert list(told("pruned", "pruned")) == ["t0", "t1"]
    assert list(told("pruned", "pruned", "vector", "absent")) == ["t0", "t1"]
    assert list(told("pruned", "pruned", "pruned", "broken")) == ["t0", "t1", "t2"]
    assert told("pruned", "pruned", "known", "broken") == {}


# --- orders of codes ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Told:
    """What a rule says of a pair, as plain values."""

    cause: str
    says: tuple[str, str]
    of: str
    values: list[int]
    either: bool = False


def test_the_first_order_of_codes_that_fits_is_told_of_its_side(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known: dict[str, Any] = {}
    decoded = [False]

    def order(reader: Any, other: Any, field: str, bits: int) -> Any:
        assert {reader.name, other.name} == {"a", "b"} and bits == {"qs": 4, "qh": 1}[field]
        return known.get(f"{reader.name} {field}")

    monkeypatch.setattr(code_orders, "_code_fields", lambda reader: [("qs", 4), ("qh", 1)])
    monkeypatch.setattr(code_orders, "_order_of_field", order)
    monkeypatch.setattr(code_orders, "is_decoded_copy", lambda made, values: decoded[0])
    monkeypatch.setattr(code_orders, "_blocks_of", lambda reader, raw: raw)
    monkeypatch.setattr(code_orders, "_field_bytes", lambda blocks, field: blocks)
    monkeypatch.setattr(code_orders, "unpack_whole", lambda data, bits: data - bits)
    monkeypatch.setattr(code_orders, "_with_field", lambda blocks, field, codes, bits: codes)

    def told(failed: int = 0, **more: Any) -> tuple[list[Any], int]:
        schemes = SimpleNamespace(failed_orders=failed)

        def side(name: str) -> Any:
            return SimpleNamespace(
                name=name,
                encoding=f"type of {name}",
                rows=4,
                shape=(4, 2),
                raw=lambda rows: np.asarray(rows)[:, None] + 0,
                take=lambda rows: np.asarray(rows),
                decode_rows=lambda raw: raw + 100,
            )

        facts = {
            "a": side("a"),
            "b": side("b"),
            "numbers": None,
            "context": SimpleNamespace(schemes=schemes),
            "guess": lambda cause, says, label, take: Told(
                cause, says, label, take(np.array([1, 3])).ravel().tolist()
            ),
        }
        found: Any = list(code_orders.guess_code_order(SimpleNamespace(**facts | more)))  # type: ignore[arg-type]
        assert all(one.either == decoded[0] for one in found)
        told = [(one.cause, one.says, one.of, one.values) for one in found]
        return told, schemes.failed_orders

    turned = SimpleNamespace(says="turned", put_right=lambda codes: codes * 10)
    assert told() == ([], 1) and told(3) == ([], 4)
    for name, whose, label in (("a", "A's", "A"), ("b", "B's", "B")):
        for field, bits in (("qs", 4), ("qh", 1)):
            known.clear()
            known[f"{name} {field}"] = turned
            ((cause, (says, encoding), of, values),), failed = told()
            assert (cause, of, failed, encoding) == ("packing_order", label, 0, f"type of {name}")
            assert says == f"{whose} blocks have their codes ({field}) in another order: turned"
            assert values == [100 + 10 * (1 - bits), 100 + 10 * (3 - bits)]
    known["a qs"] = turned
    assert [row[2] for row in told()[0]] == ["B"]  # B's first, and no more
    decoded[0] = True
    ((_, (says, _), _, _),), _ = told()
    assert "both have the same codes" in says
    assert told(code_orders.FAILED) == ([], code_orders.FAILED)
    assert len(told(code_orders.FAILED - 1)[0]) == 1
    assert told(numbers=object()) == ([], 0) == told(b=SimpleNamespace(shape=(4, 3)))


# --- a few values -------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 4, 5])
def test_a_few_values_beyond_a_step_are_shown_up_to_four(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the bit whose flip brings them back, B's before A's, where the other side is fine."""
    far = [(7 * at, 1.5, 2.5 + at) for at in range(count)]
    bits: dict[str, str] = {}
    monkeypatch.setattr(outliers, "_values_beyond_step", lambda case: far)
    monkeypatch.setattr(outliers, "storage_noise", {"F32": 0.0, "Q8_0": 0.02, "Q2_K": 0.021}.get)

    def flipped(side: Any, other: Any, places: list[int]) -> str | None:
        assert places == [at for at, _, _ in far] and side is not other
        return bits.get(side.name)

    monkeypatch.setattr(outliers, "flipped_bit_text", flipped)

    def told(a: str = "F32", b: str = "Q8_0", **more: Any) -> list[Any]:
        case: Any = SimpleNamespace(
            **{
                "a": SimpleNamespace(name="A", encoding=a),
                "key": "k",
                "shape": (5, 6),
                "b": SimpleNamespace(name="B", encoding=b),
                "numbers": None,
                "before": SimpleNamespace(count=30, relative=0.5),
            }
            | more
        )
        return list(outliers.explain_outliers(case))

    (found,) = told()
    assert not found.confirmed and found.proof is None and len(found.evidence) == 2
    shown = [f"[{7 * at // 6}, {7 * at % 6}]: 1.5 | {2.5 + at:g}" for at in range(min(count, 4))]
    many = f"{count} value{'s' * (count > 1)} of 30 further apart: {'; '.join(shown)}"
    assert found.evidence[1] == many + " ..." * (count > 4)
    for names, said in ((("B",), "B"), (("A",), "A"), (("A", "B"), "B")):
        bits.update({name: f"bit of {name}" for name in names})
        (found,) = told()
        assert (
            found.evidence[2] == f"flipping bit of {said} of {said} brings it back within the bound"
        )
        assert found.confirmed and found.proof is not None
        (coarse,) = told(b="Q2_K") if said == "A" else told("Q2_K")
        assert not coarse.confirmed and len(coarse.evidence) == 3
        bits.clear()
    assert told("F32", "F32") == told(numbers=object()) == []
    far.clear()
    assert told() == []


def test_values_beyond_a_step_are_few_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of a hundred at most, and no more than are looked at; none where a step is not known."""

    def beyond(wrong: list[int], count: int = 400, known: bool = True) -> list[Any]:
        x = np.arange(400.0).reshape(4, 100)
        y = x.copy()
        y.reshape(-1)[wrong] += 1.01
        y[0, 50] += 1.0  # within a step

        def chunks(a: Any, b: Any) -> Any:
            for start in range(0, 4, 2):
                part = slice(start, start + 2)
                yield x[part], y[part], lambda: np.ones((2, 100)) if known else None

        monkeypatch.setattr(outliers, "value_chunks", chunks)
        side = SimpleNamespace(side=None)
        case: Any = SimpleNamespace(a=side, b=side, before=SimpleNamespace(count=count))
        return outliers._values_beyond_step(case)

    monkeypatch.setattr(
        outliers, "steps_between", lambda x, y, step: (np.abs(x - y) / step).ravel()
    )
    assert beyond([3, 250]) == [(3, 3.0, pytest.approx(4.01)), (250, 250.0, pytest.approx(251.01))]
    assert len(beyond([1, 2, 300, 301])) == 4 and beyond([1, 2, 300, 301, 302]) == []
    assert beyond([]) == [] == beyond([3], known=False)
    assert len(beyond([7], count=50)) == 1 and beyond([7, 8], count=50) == []
    most = list(range(60, 60 + outliers.FEW))
    assert len(beyond(most, count=10**6)) == len(most)
    assert beyond([*most, 300], count=10**6) == []


# --- functions of values ------------------------------------------------------------------------


def test_functions_of_values_are_what_they_are_called() -> None:
    x = np.array([-2.0, -0.5, 0.25, 3.0])
    by_name = {
        "the reciprocals of": 1 / x,
        "the absolute values of": abs(x),
        "the squares of": x * x,
        "the exponentials of": np.exp(x),
        "the negated exponentials of": -np.exp(x),
        "the negated exponentials, taken twice, of": -np.exp(-np.exp(x)),
        "softplus of": np.log(1 + np.exp(x)),
        "the sigmoid of": 1 / (1 + np.exp(-x)),
        "the hyperbolic tangent of": np.tanh(x),
        "1 minus": 1 - x,
    }
    found = {one.says: one.of(x) for one in value_functions._value_functions()}
    assert found.keys() == by_name.keys()
    for name, values in by_name.items():
        assert np.allclose(found[name], values), name


# --- rows of a table of positions ---------------------------------------------------------------


def test_the_rows_of_a_table_of_positions_are_told_by_what_was_added(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = RNG.normal(size=(12, 5))
    x = RNG.normal(size=(4, 5))
    monkeypatch.setattr(
        rope, "positions_change", lambda ours, theirs: ("positions", theirs.tolist())
    )
    monkeypatch.setattr(rope, "hyper_change", lambda cause, says, **values: (cause, says, values))
    monkeypatch.setattr(rope, "token_positions", lambda patched: np.arange(4))
    solved: list[Any] = [None]
    monkeypatch.setattr(rope, "positions_by_rows", lambda case: solved[0])
    monkeypatch.setattr(rope, "usual_positions", lambda ours: [ours + 1, ours * 0])

    def told(
        rows: Any,
        *,
        offset: int = 2,
        position: str = "learned",
        layer: int = -1,
        point: str = "embd",
        shown: bool = True,
        near: float = 1e-6,
    ) -> list[Any]:
        theirs = x + (0 if rows is None else table[rows] if isinstance(rows, list) else rows)
        call = SimpleNamespace(location=SimpleNamespace(point=point), args=(x, None))
        early = SimpleNamespace(location=SimpleNamespace(point="x"))
        case: Any = SimpleNamespace(
            layer=layer,
            calls=lambda name: [early, call],
            gives_point_value=lambda one: shown and one is call,
            array=np.asarray,
            view=SimpleNamespace(theirs=theirs, tolerance=near),
            agree=lambda ours, theirs: np.allclose(ours, theirs, atol=1e-6),
            patched=SimpleNamespace(
                spec=SimpleNamespace(block=SimpleNamespace(position=position)),
                weights={"position_embd.weight": SimpleNamespace(numpy=lambda: table)},
                hp={"position_offset": offset},
            ),
        )
        return list(rope.find_position_rows(case))

    assert told([2, 3, 4, 5]) == []
    assert told([3, 4, 5, 6]) == [("positions", [1, 2, 3, 4])]
    assert told([2, 2, 2, 2]) == [("positions", [0, 0, 0, 0])]
    assert told([0, 1, 2, 3]) == [
        (
            "positions",
            "position 0 takes row 0 of the table; the model says row 2",
            {"position_offset": 0},
        )
    ]
    assert told([1, 2, 3, 9]) == [] and told(RNG.normal(size=(4, 5))) == []
    (none,) = told(None)
    assert none.says == "no position is added to the embedding"
    made: dict[str, Any] = {}
    none.make(SimpleNamespace(with_weights=made.update), None)
    assert (
        not made["position_embd.weight"].any() and made["position_embd.weight"].shape == table.shape
    )
    usual = [("positions", [1, 2, 3, 4]), ("positions", [0, 0, 0, 0])]
    earlier = [
        (
            "positions",
            f"position 0 takes row {row} of the table; the model says row 2",
            {"position_offset": row},
        )
        for row in (0, 1)
    ]
    found = told([2, 3, 4, 5], shown=False)
    assert found[:2] + found[3:] == [*usual, *earlier] and found[2].says == none.says
    solved[0] = np.array([3, 2, 1, 0])
    assert told([2, 3, 4, 5], shown=False) == [("positions", [3, 2, 1, 0])]
    for more in ({"position": "rope"}, {"layer": 1}, {"point": "out"}):
        assert told([3, 4, 5, 6], **more) == []
    assert told([3, 4, 5, 6], layer=0) == [("positions", [1, 2, 3, 4])]
