"""Faults of packed copies, each by itself: what is found, and what is left to other causes."""

import itertools
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.causes.tensor import coarse_damage, coarse_groups, packed_codes, packed_parts
from aprfmt.causes.tensor.lattices import Grouping
from aprfmt.causes.tensor.packed_copies import PackedCopy
from aprfmt.codecs.lattice import Lattice
from aprfmt.codecs.weight_layout import AWQ_BACK, AWQ_ORDER
from aprfmt.measure.bounds import fit_errors

ROWS, COLUMNS, GROUP, BITS = 32, 128, 32, 4
CELLS = ROWS * COLUMNS // GROUP


def honest() -> Any:
    """Return (source, copy, step) of a copy in 4 bits with a minimum, in groups of a row."""
    x = np.random.default_rng(5).normal(size=(ROWS, COLUMNS))
    cells = x.reshape(CELLS, GROUP)
    low, high = cells.min(1, keepdims=True), cells.max(1, keepdims=True)
    step = (high - low) / 15
    low = np.round(low / step) * step
    code = np.clip(np.round((cells - low) / step), 0, 15)
    whole = [np.broadcast_to(each, cells.shape).reshape(x.shape) for each in (step, low)]
    return x, (low + code * step).reshape(x.shape), *whole


def copy_of(x: Any, y: Any, step: Any, low: Any, **other: Any) -> PackedCopy:
    side: Any = SimpleNamespace(encoding="F32", rows=len(x), columns=x.shape[1])
    side.side = SimpleNamespace(shape=x.shape)
    away = float(np.linalg.norm(x - y) / np.linalg.norm(x))
    case: Any = SimpleNamespace(key="L0.ffn_up.weight", before=SimpleNamespace(relative=away))
    given: dict[str, Any] = {
        "lattice": Lattice(step, low, low + 15 * step),
        "grouping": Grouping(1, GROUP),
        "bits": BITS,
        "rows": None,
        "scales": step.reshape(CELLS, GROUP)[:, 0],
    }
    return PackedCopy(
        case,
        side,
        side,
        x,
        y,
        scheme="codes of 4 bits",
        whose="B's",
        again=True,
        finite=True,
        **(given | other),
    )


def by_cells(numbers: Any) -> Any:
    return np.repeat(np.asarray(numbers, np.float64), GROUP).reshape(ROWS, COLUMNS)


# --- zero points --------------------------------------------------------------------------------


def test_zero_points_are_off_by_one_number() -> None:
    x, y, step, low = honest()
    for by, part, says, hint in (
        (1, 1.0, "one too low: every value is one step too large", "GPTQ"),
        (-1, 1.0, "one too high: every value is one step too small", "GPTQ"),
        (2, 1.0, "2 too low: every value is 2 steps too large", ""),
        (8, 1.0, "8 too low: every value is 8 steps too large", "the middle of the codes"),
        (16, 1.0, "16 too low: every value is 16 steps too large", ""),
        (17, 1.0, "", ""),  # more than there are codes
        (-2, 0.5, "2 too high: every value is 2 steps too small", ""),
        (0, 1.0, "", ""),
    ):
        off = by_cells(np.where(np.arange(CELLS) < part * CELLS, by, 0)) * step
        found = list(packed_codes.explain_zero_points(copy_of(x, y + off, step, low + off)))
        assert [one.says for one in found] == [f"B's zero points are {says}"] * bool(says), by
        for one in found:
            assert (one.cause, one.verdict, one.side) == ("zero_point", "bug", "B")
            where = f"in {int(CELLS * part)} of {CELLS} groups"
            assert (where in one.evidence) is (part < 1)
            assert not hint or any(text.startswith(hint) for text in one.evidence)
            assert any("format stores" in text for text in one.evidence) is (hint == "GPTQ")
        assert not list(packed_codes.explain_zero_points(copy_of(x, y + off, step, low, bits=0)))


def test_zero_points_of_groups_are_each_off_by_their_own_number() -> None:
    x, y, step, low = honest()
    numbers = np.arange(CELLS) % 4 - 1
    off = by_cells(numbers) * step
    (one,) = packed_codes.explain_group_zero_points(copy_of(x, y + off, step, low + off))
    assert one.cause == "zero_point" and one.proof is not None and one.proof.free == CELLS
    assert "off by -1 to +2 steps" in one.evidence
    assert f"in {CELLS * 3 // 4} of {CELLS} groups" in one.evidence
    assert not list(packed_codes.explain_group_zero_points(copy_of(x, y, step, low)))
    odd = copy_of(x, y + off, step, low + off, bits=0)
    assert not list(packed_codes.explain_group_zero_points(odd))


def test_codes_are_cut_at_the_ends_of_a_type() -> None:
    """All others are equal; without a cut, or where others differ too, it is another cause."""
    _, y, step, low = honest()
    cut = np.clip(y, low + 4 * step, low + 11 * step)
    ends = Lattice(step, low + 4 * step, low + 11 * step)
    copy = copy_of(y, cut, step, low, lattice=ends)
    (one,) = packed_codes.explain_cut_codes(copy)
    assert one.cause == "clipped_codes" and "by up to 4 steps" in one.evidence[1]
    assert not list(packed_codes.explain_cut_codes(copy_of(y, y, step, low)))


# --- groups of others ---------------------------------------------------------------------------

OF_OTHERS: Mapping[str, list[int]] = {
    "all have those of the last one": [3, 3, 3, 3],
    "all have those of group 2": [2, 2, 2, 2],
    "each has those of the one after": [1, 2, 3, 0],
    "1 of 4 have those of the one before": [0, 0, 2, 3],
    "each 2 have those of one": [0, 0, 1, 1],
    "each 2 have those of their first": [0, 0, 2, 2],
    "those of the first 1/2 of the inputs stand 2 times": [0, 1, 0, 1],
    "they stand in reverse": [3, 2, 1, 0],
    "2 of 4 have those of 2 others": [3, 1, 2, 0],
}


@pytest.mark.parametrize("what", ["codes", "values", "values of whole rows"])
def test_groups_have_the_codes_of_others(what: str) -> None:
    """With the scales that stayed in place, with all of them, and with one scale for a row."""
    x, y, step, low = honest()
    other: dict[str, Any] = {}
    if what == "values of whole rows":
        step, low = np.full_like(step, 0.5), np.full_like(low, -4.0)
        y = low + np.clip(np.round((x - low) / step), 0, 15) * step
        other = {"grouping": Grouping(1, 0), "scales": step[:, 0]}
    assert not list(packed_codes.explain_copied_groups(copy_of(x, y, step, low, **other)))
    for says, groups in OF_OTHERS.items():
        inputs = np.concatenate([np.arange(GROUP) + GROUP * at for at in groups])
        copy = copy_of(x, low + ((y - low) / step)[:, inputs] * step, step, low, **other)
        if what == "values":
            copy = copy_of(x, *(each[:, inputs] for each in (y, step, low)))
        (one,) = packed_codes.explain_copied_groups(copy)
        kind = what.split()[0]
        told = f"B's groups of 32 inputs have the {kind} of other groups: {says}"
        if other and groups == [0, 1, 0, 1]:  # groups of 64, which are tried before
            told = told.replace("32", "64").replace(says, "all have those of the first one")
        assert one.says == told
        assert (one.cause, one.certainty, one.side) == ("packing_order", "confirmed", "B")
        assert one.proof is not None and one.proof.free == (2 if "64" in told else 4)
        odd = replace(copy, y=copy.y + np.random.default_rng(1).normal(size=x.shape))
        assert not list(packed_codes.explain_copied_groups(odd))


# --- orders -------------------------------------------------------------------------------------


WRONG: Mapping[str, tuple[int, ...]] = {
    "AWQ's order of eight codes in a word was not undone": AWQ_ORDER,
    "AWQ's order of eight codes in a word was undone twice": AWQ_BACK,
    "the two halves of each byte are exchanged": (1, 0),
    "the codes of a word stand in reverse": tuple(range(7, -1, -1)),
}
EXPLAIN = (packed_codes.explain_output_order, packed_codes.explain_input_order)


def test_codes_stand_in_another_order() -> None:
    """With scales that moved along, and with scales that stayed in place; no order is none."""
    x, y, step, low = honest()
    steep = np.exp(np.arange(ROWS) / 8)[:, None]  # no two rows have scales alike
    for axis, what in enumerate(("outputs", "inputs")):
        assert not list(EXPLAIN[axis](copy_of(x, y, step, low)))
        for says, wrong in WRONG.items():
            order = np.arange(y.shape[axis]).reshape(-1, len(wrong))[:, list(wrong)].reshape(-1)
            copy = copy_of(x, *(np.take(each, order, axis) for each in (y, step, low)))
            (one,) = EXPLAIN[axis](copy)
            assert one.cause == "packing_order"
            assert one.says.startswith(f"B's codes stand in another order along the {what}: {says}")
            assert not any("did not move" in text for text in one.evidence)
            assert not list(EXPLAIN[1 - axis](copy))
            if axis == 0:
                # Of sampled rows the neighbours are not there.
                assert not list(EXPLAIN[0](replace(copy, rows=np.arange(ROWS))))
                codes = np.take((y - low) / step, order, 0)
                fixed = copy_of(steep * x, steep * (low + codes * step), steep * step, steep * low)
                (one,) = EXPLAIN[0](fixed)
                assert one.says.endswith(says) or says in one.says
                assert "scales and zero points did not move with them" in one.evidence


def test_codes_of_neighbours_that_are_alike_have_no_order() -> None:
    """Another order with scales of its own is as near then: the scales alone are wrong."""
    rng = np.random.default_rng(9)
    for axis in (0, 1):
        shape = (ROWS // 8, COLUMNS) if axis == 0 else (ROWS, COLUMNS // 8)
        x = np.repeat(rng.normal(size=shape), 8, axis) * (
            1 + 0.01 * rng.normal(size=(ROWS, COLUMNS))
        )
        low, high = (by_cells(how(x.reshape(CELLS, GROUP), 1)) for how in (np.min, np.max))
        step = (high - low) / 15
        times = by_cells(1 + 0.5 * rng.random(CELLS))
        y = (low + np.round((x - low) / step) * step) * times
        assert not list(EXPLAIN[axis](copy_of(x, y, step * times, low * times)))


def test_runs_of_halves_are_told_from_every_second_value() -> None:
    x, y, step, low = honest()
    for width in (16, 64):
        half = width // 2
        mixed = [i // 2 + half * (i % 2) for i in range(width)]
        for order, says in (
            (np.argsort(mixed), f"the low halves of {half} bytes are one run"),
            (np.asarray(mixed), f"the low halves of {half} bytes are every second value"),
        ):
            at = np.arange(COLUMNS).reshape(-1, width)[:, order].reshape(-1)
            copy = copy_of(x, *(each[:, at] for each in (y, step, low)))
            (one,) = packed_codes.explain_input_order(copy)
            assert says in one.says


# --- scales -------------------------------------------------------------------------------------


def wide(x: Any, y: Any, step: Any, low: Any, at: int, times: float) -> Any:
    """Return a copy one of whose cells has steps too wide, to which it was rounded."""
    factor = by_cells(np.where(np.arange(CELLS) == at, times, 1.0))
    step = step * factor
    y = np.where(factor > 1, np.round(x / step) * step, y)
    return copy_of(x, y, step, np.where(factor > 1, -8 * step, low))


def coarse_case(**other: Any) -> Any:
    side = SimpleNamespace(shape=(ROWS, COLUMNS), side=SimpleNamespace(encoding="F32"))
    before = SimpleNamespace(nonfinite=None, relative=0.1, changed=9)
    given = {"a": side, "b": side, "numbers": None, "before": before, "key": "t"}
    return SimpleNamespace(**(given | other))


def test_groups_with_steps_too_wide_are_found_of_a_right_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of matrices of one shape, all of them looked at, whose values are finite."""
    x, y, step, low = honest()
    held: list[Any] = []
    monkeypatch.setattr(coarse_groups, "block_copy", lambda a, b: None)
    monkeypatch.setattr(coarse_groups, "block_wide_steps", lambda a, b, copied: None)
    monkeypatch.setattr(coarse_groups, "packed_copies", lambda case: iter(held))

    def found(**other: Any) -> list[Any]:
        return list(coarse_groups.explain_coarse_groups(coarse_case(**other)))

    held[:] = [wide(x, y, step, low, 9, 12.0)]
    assert fit_errors(held[0].x, held[0].y, held[0].lattice).how
    (one,) = found()
    assert one.cause == "quant_scale" and one.says.startswith("B's scales are far too large")
    assert one.evidence[1].startswith(f"in 1 of {CELLS} blocks of {GROUP}, at [2, 32], about 13")
    flat = SimpleNamespace(shape=(ROWS * COLUMNS,), side=SimpleNamespace(encoding="F32"))
    other = SimpleNamespace(shape=(COLUMNS, ROWS), side=flat.side)
    odd = SimpleNamespace(nonfinite="NaN", relative=0.1, changed=9)
    for given in ({"numbers": [0]}, {"b": other}, {"a": flat, "b": flat}, {"before": odd}):
        assert not found(**given), given
    held[:] = [copy_of(x, y, step, low), wide(x, y, step, low, 9, 2.0)]
    assert not found()  # as honest copies have
    damaged = wide(x, y, step, low, 9, 12.0)
    held[:] = [copy_of(x, damaged.y + 9 * step, step, low, lattice=damaged.lattice)]
    assert not found()  # no copy


def test_wide_steps_of_blocks_are_the_quantized_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two of one encoding either's; what packed values show is not asked for blocks."""
    monkeypatch.setattr(coarse_groups, "packed_copies", lambda case: pytest.fail("asked"))
    for coarse, encodings in itertools.product("AB", ("QQ", "QF")):
        names = coarse + "AB".replace(coarse, "")
        sides = {
            name: SimpleNamespace(shape=(4, 64), side=SimpleNamespace(encoding=encoding, name=name))
            for name, encoding in zip(names, encodings, strict=True)
        }
        monkeypatch.setattr(coarse_groups, "block_copy", lambda a, b, it=sides[coarse].side: it)
        for wrong in ("A", "B", ""):
            monkeypatch.setattr(
                coarse_groups,
                "block_wide_steps",
                lambda a, b, copied, wrong=wrong: (
                    SimpleNamespace(text=lambda rows: "at") if copied.name == wrong else None
                ),
            )
            case = coarse_case(a=sides["A"], b=sides["B"])
            found = [one.says[:3] for one in coarse_groups.explain_coarse_groups(case)]
            seen = wrong and (encodings == "QQ" or wrong == coarse)
            assert found == [f"{wrong}'s"] * bool(seen), (coarse, encodings, wrong)


# --- parts --------------------------------------------------------------------------------------


class Weight(SimpleNamespace):
    def _replace(self, **changed: Any) -> "Weight":
        return Weight(**(vars(self) | changed))


def test_a_weight_is_read_without_its_order_of_activations() -> None:
    for suffix in (".g_idx", ".weight_g_idx"):
        parts = {".qweight": 1, ".scales": 2, suffix: 3, ".qzeros": 4}
        weight: Any = Weight(parts=parts)
        made: Any = packed_parts._ignore_activation_order(weight)
        assert made.parts == {".qweight": 1, ".scales": 2, ".qzeros": 4}
        assert packed_parts._ignore_activation_order(made) is None


def test_a_gptq_weight_is_read_by_the_other_rule() -> None:
    for now, other in (("gptq", "gptq_v2"), ("gptq_v2", "gptq"), (None, "gptq_v2")):
        config = {} if now is None else {"checkpoint_format": now}
        weight: Any = Weight(
            dialect=SimpleNamespace(name="gptq"),
            config=config,
            replace_parts=lambda **more: more["checkpoint_format"],
        )
        made: Any = packed_parts._other_gptq_format(weight)
        assert made == other
        weight.dialect.name = "awq"
        assert packed_parts._other_gptq_format(weight) is None


# --- zeros --------------------------------------------------------------------------------------


def zero_case(a: Any, b: Any, slack: float = 0.01) -> Any:
    def side(values: Any) -> Any:
        held = np.asarray(values, np.float64)
        return SimpleNamespace(
            shape=held.shape, rows=len(held), columns=held.shape[-1], take=lambda at: held[at]
        )

    return SimpleNamespace(
        a=side(a),
        b=side(b),
        key="t",
        numbers=None,
        slack=lambda: slack,
        windows=lambda rows: iter([np.arange(len(a))]),
        before=SimpleNamespace(relative=0.5),
    )


def zero_lines(a: Any, b: Any, **more: Any) -> list[str] | None:
    found = list(coarse_damage.explain_zero_runs(zero_case(a, b, **more)))
    return list(found[0].evidence[1:]) if found else None


def test_zeros_where_values_should_be_are_told_of_their_rows() -> None:
    x = np.random.default_rng(2).normal(size=(12, 64))
    near = x * (1 + 1e-3)

    def cut(at: slice) -> Any:
        held = near.copy()
        held[at] = 0
        return held

    assert zero_lines(x, cut(slice(3, 5))) == ["B holds zeros in 128 values, in rows 3-4"]
    assert zero_lines(cut(slice(3, 4)), x) == ["A holds zeros in 64 values, in row 3"]
    end = ", to the end: the data was cut short"
    assert zero_lines(x, cut(slice(9, None))) == [f"B holds zeros in 192 values, in rows 9-11{end}"]
    last = zero_lines(x, cut(slice(11, None)))
    assert last == ["B holds zeros in 64 values, in row 11"]  # one row alone is no end
    both = near.copy()
    both[7] = 0
    assert zero_lines(cut(slice(2, 3)), np.where(both == 0, 0, x)) == [
        "A holds zeros in 64 values, in row 2",
        "B holds zeros in 64 values, in row 7",
    ]
    assert zero_lines(x, near) is None and zero_lines(x, cut(slice(3, 5)), slack=0.0) is None
    far = cut(slice(3, 5))
    far[9] *= 2
    assert zero_lines(x, far) is None
