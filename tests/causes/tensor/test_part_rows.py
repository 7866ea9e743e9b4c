"""Codes in another order of rows beside scales that stayed, in every form of packed weight.

Seen red: "this tensor holds other values: of another checkpoint, or damaged".
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprfmt.causes.tensor import part_rows, table
from tests.causes.hypotheses import load_function
from tests.causes.packed_source import FFN, HIDDEN, UP, Array, copied, judged, source, values
from tests.causes.tensor.test_misread_codes import INT8, WRITERS, in_fp8, of_int8
from tests.diagnosis import packing
from tests.diagnosis.faults_packed import ROW

__all__ = ["source", "values"]

SAID = "they did not move with the codes"
BY_HEAD = np.arange(FFN).reshape(4, 2, -1).transpose(1, 0, 2).reshape(-1)
ORDERS = {"by head": BY_HEAD, "reversed": np.arange(FFN)[::-1], "two exchanged": np.r_[1, 0, 2:FFN]}


def fp8(values: Array) -> tuple[packing.Rows, Any]:
    codes, scale = in_fp8(values)
    rows = {
        f"{UP}.weight": ("F8_E4M3", (FFN, HIDDEN), codes.tobytes()),
        f"{UP}.weight_scale": packing.row(scale),
    }
    return rows, ROW


def int8(values: Array) -> tuple[packing.Rows, Any]:
    return of_int8(values)[0], INT8


def words(name: str) -> Any:
    make, section = WRITERS[name]
    return lambda values: (make(values)[0], section)


FORMS = {"fp8": fp8, "int8": int8, "int4": words("int4"), "gptq": words("gptq")}


def reordered(rows: packing.Rows, name: str, order: Array, axis: int) -> packing.Rows:
    """Return the tensors with one in another order along an axis."""
    dtype, shape, raw = rows[name]
    held = np.frombuffer(raw, np.uint8).reshape(*shape[:2], -1)
    return rows | {name: (dtype, shape, np.take(held, order, axis).tobytes())}


def codes_of(rows: packing.Rows) -> str:
    """Return the name of the tensor of codes, the largest."""
    return max(rows, key=lambda name: len(rows[name][2]))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("form", FORMS)
def test_codes_that_moved_alone_are_named(
    form: str, order: str, values: Array, source: Path, tmp_path: Path
) -> None:
    rows, section = FORMS[form](values)
    a = copied(source, tmp_path / "a", rows, section)
    axis = int(form == "gptq")  # its words are [in, out]
    moved = reordered(rows, codes_of(rows), ORDERS[order], axis)
    found = judged(a, copied(source, tmp_path / "b", moved, section)).explanation
    assert found is not None and found.confirmed, found
    if found.cause == "packing_order":  # equal parts of integers' codes have a row before this one
        assert order == "by head" and "in 8 equal parts" in found.evidence[0], found
        return
    assert found.cause == "row_offset" and SAID in found.evidence[0], found
    count = int((ORDERS[order] != np.arange(FFN)).sum())
    what = "columns" if axis else "rows"
    assert found.evidence[1].startswith(f"{count} of {FFN} {what} moved: ")


def test_without_its_row_nothing_is_known_of_moved_codes(
    values: Array, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, section = fp8(values)
    a = copied(source, tmp_path / "a", rows, section)
    b = copied(source, tmp_path / "b", reordered(rows, codes_of(rows), BY_HEAD, 0), section)
    find = part_rows.explain_moved_codes
    rest = tuple(row for row in table.TABLE if load_function(row.find) is not find)
    assert len(rest) == len(table.TABLE) - 1
    monkeypatch.setattr(table, "TABLE", rest)
    found = judged(a, b).explanation
    assert found is None or not found.confirmed, found


@pytest.mark.parametrize("form", ["fp8", "int8", "int4"])
def test_scales_that_moved_as_well_are_no_such_fault(
    form: str, values: Array, source: Path, tmp_path: Path
) -> None:
    """The whole rows moved then."""
    rows, section = FORMS[form](values)
    a = copied(source, tmp_path / "a", rows, section)
    moved = rows
    for name in rows:
        if rows[name][1][:1] == (FFN,):
            moved = reordered(moved, name, BY_HEAD, 0)
    found = judged(a, copied(source, tmp_path / "b", moved, section)).explanation
    assert found is not None and SAID not in found.evidence[0], found


@pytest.mark.parametrize("form", ["fp8", "int8"])
def test_other_codes_are_no_order_of_them(
    form: str, values: Array, source: Path, tmp_path: Path
) -> None:
    rows, section = FORMS[form](values)
    a = copied(source, tmp_path / "a", rows, section)
    name = codes_of(rows)
    dtype, shape, raw = reordered(rows, name, BY_HEAD, 0)[name]
    held = np.frombuffer(raw, np.uint8).copy()
    held[7] ^= 1
    found = judged(a, copied(source, tmp_path / "b", rows | {name: (dtype, shape, held.tobytes())},
                             section)).explanation  # fmt: skip
    assert found is None or SAID not in found.evidence[0], found
