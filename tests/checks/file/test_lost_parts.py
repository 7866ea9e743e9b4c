"""A packed weight that lacks a part is one finding: nothing that follows from it is another.

Seen red: the weight's codes judged as a matrix of another shape, its other parts as tensors of no
role, and its scales as codes without a scale.
"""

from pathlib import Path

import pytest

from aprfmt import validate
from tests.conversion.dialect_folders import write_folder
from tests.conversion.folders import tensors_of, write_mixed

WEIGHT = "model.layers.1.mlp.up_proj"
# The dialect, and the part that one weight loses.
LOST = {
    "gptq": "scales",
    "awq": "qzeros",
    "compressed_packed": "weight_scale",
    "modelopt": "weight_scale_2",
}


@pytest.mark.parametrize("dialect", LOST)
def test_what_follows_from_a_lost_part_is_not_said(dialect: str, tmp_path: Path) -> None:
    write_folder(tmp_path / "m", dialect)
    rows = tensors_of(tmp_path / "m")
    before = {one.check for one in validate(tmp_path / "m").warnings}
    del rows[f"{WEIGHT}.{LOST[dialect]}"]
    write_mixed(tmp_path / "m" / "model.safetensors", rows)
    report = validate(tmp_path / "m")
    (failed,) = [one for one in report.checks if one.outcome == "FAIL"]
    assert failed.name == "layout" and LOST[dialect] in failed.found and WEIGHT in failed.found
    assert "convert again" in failed.todo and "damaged" not in failed.todo
    assert {one.check for one in report.warnings} <= before
    assert WEIGHT not in "".join(one.finding.found for one in report.warnings)
