"""Damage in one part of a packed weight: it is named, and is no other quantizer's work."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aprfmt.causes.tensor import packed_damage, table
from aprfmt.compare import diff
from tests.causes.hypotheses import load_function
from tests.conversion.folders import tensors_of, write_mixed
from tests.diagnosis import faults_packed as packs
from tests.diagnosis import packing
from tests.diagnosis.faults_undecoded import BY_ROW, PLAIN4

Edit = Callable[[bytearray, int], None]  # of a part's bytes, with those of one of its rows


def _byte(raw: bytearray, line: int) -> None:
    raw[len(raw) // 3] ^= 0x51


def _low_bit(raw: bytearray, line: int) -> None:
    raw[len(raw) // 2] ^= 1


def _row(raw: bytearray, line: int) -> None:
    raw[line : 2 * line] = bytes(b ^ 0x5A for b in raw[line : 2 * line])


def _zeros(raw: bytearray, line: int) -> None:
    raw[16:32] = bytes(16)


DAMAGED = [
    ("gptq", packs.GPTQ, packs.nearest(packs.gptq), ("qweight", "qzeros", "scales")),
    ("awq", packing.awq_section(), packs.nearest(packs.awq), ("qweight", "qzeros", "scales")),
    ("int4", packs.INT4, PLAIN4, ("weight_packed", "weight_scale")),
    ("fp8", packs.ROW, BY_ROW, ("weight", "weight_scale")),
]


@pytest.mark.parametrize("edit", [_byte, _low_bit, _row, _zeros], ids=lambda one: one.__name__)
@pytest.mark.parametrize(
    ("name", "section", "make", "part"),
    [(name, section, make, part) for name, section, make, parts in DAMAGED for part in parts],
)
def test_damage_of_a_part_is_no_quantizers_work(
    name: str, section: Any, make: Any, part: str, edit: Edit, tmp_path: Path
) -> None:
    """One byte, bit, row or run of codes, scales or zero points: never another cause."""
    whole, broken, stored = damaged(name, section, make, part, edit, tmp_path)
    report = diff(whole, broken)
    if report.counts.get("UNREADABLE"):
        return  # a scale that is no number is refused by its name
    [found] = [row for row in report.findings if row.confirmed]
    [told] = [row.explanation for row in report.tensors if row.explanation is not None]
    assert found.cause == told.cause == "bit_rot"
    assert any(stored in line for line in told.evidence)


def _exchanged(raw: bytearray, line: int) -> None:
    raw[0:4], raw[8:12] = raw[8:12], raw[0:4]


@pytest.mark.parametrize(("edit", "exchanged"), [(_exchanged, True), (_byte, False)])
def test_exchanged_codes_are_said_to_be_so(edit: Edit, exchanged: bool, tmp_path: Path) -> None:
    name, section, make, parts = DAMAGED[0]
    whole, broken, _ = damaged(name, section, make, parts[0], edit, tmp_path)
    [told] = [row.explanation for row in diff(whole, broken).tensors if row.explanation is not None]
    assert told.cause == "bit_rot"
    assert ("values are exchanged" in told.says) == exchanged
    assert ("damage or an edit, no transformation" in told.says) != exchanged


def test_without_its_row_the_damage_is_not_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, section, make, parts = DAMAGED[0]
    whole, broken, _ = damaged(name, section, make, parts[0], _byte, tmp_path)
    damage = packed_damage.explain_damaged_parts
    rows = tuple(row for row in table.TABLE if load_function(row.find) is not damage)
    assert len(rows) == len(table.TABLE) - 1
    monkeypatch.setattr(table, "TABLE", rows)
    confirmed = [row.cause for row in diff(whole, broken).findings if row.confirmed]
    assert confirmed != ["bit_rot"]


def damaged(
    name: str, section: Any, make: Any, part: str, edit: Edit, folder: Path
) -> tuple[Path, Path, str]:
    """Return a packed model, a copy with damage in one part of one weight, and that part's name."""
    whole = packing.folder(packs.source("llama"), f"damage-{name}", section, make)
    rows = dict(tensors_of(whole))
    stored = f"model.layers.0.self_attn.q_proj.{part}"
    dtype, shape, raw = rows[stored]
    data = bytearray(raw)
    edit(data, len(data) // shape[0])
    rows[stored] = (dtype, shape, bytes(data))
    shutil.copytree(whole, folder / "b")
    write_mixed(folder / "b" / "model.safetensors", rows)
    return whole, folder / "b", stored
