"""Zero points that a rule changed, and the key that mends what is read by the other rule.

Seen red: the row left out of the table (damage is named), the key left untried (B is made anew).
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprfmt.compare import diff
from tests.cli.run import aprfmt
from tests.conversion.dialect_folders import write_folder
from tests.conversion.folders import tensors_of, write_mixed
from tests.model.relations.edits import remedied, same

Array = Any


def _nibbles(raw: bytes) -> Array:
    held = np.frombuffer(raw, np.uint8)
    return np.stack([held & 15, held >> 4], -1).reshape(-1)


def _with_zeros(source: Path, target: Path, edit: Callable[[Array], Array]) -> list[str]:
    """Write a copy with every weight's zero points as `edit` gives them; return what changed."""
    shutil.copytree(source, target)
    rows, changed = tensors_of(source), []
    for name, (kind, shape, raw) in rows.items():
        if name.endswith(".qzeros"):
            made = edit(_nibbles(raw).copy())
            pairs = made.reshape(-1, 2)
            rows[name] = kind, shape, (pairs[:, 0] | pairs[:, 1] << 4).astype(np.uint8).tobytes()
            changed += [name.replace("qzeros", "weight")] if rows[name][2] != raw else []
    write_mixed(target / "model.safetensors", rows)
    return changed


def _few(codes: Array, value: int) -> Array:
    """Leave few places with a value: others become the one beside it."""
    at = np.flatnonzero(codes == value)[2:]
    codes[at] = 7
    return codes


@pytest.mark.parametrize("dialect", ["awq", "gptq"])
@pytest.mark.parametrize(("old", "new"), [(0, 15), (15, 0), (7, 8)])
@pytest.mark.parametrize("few", [True, False])
def test_zero_points_of_one_value_that_became_another_are_named(
    dialect: str, old: int, new: int, few: bool, tmp_path: Path
) -> None:
    write_folder(tmp_path / "made", dialect)

    def before(codes: Array) -> Array:
        codes[codes == new] = 3
        codes[:40] = old
        return _few(codes, old) if few and old != 7 else codes

    def after(codes: Array) -> Array:
        codes[codes == old] = new
        return codes

    _with_zeros(tmp_path / "made", tmp_path / "good", before)
    changed = _with_zeros(tmp_path / "good", tmp_path / "bad", after)
    assert len(changed) > 8
    report = diff(tmp_path / "good", tmp_path / "bad")
    (found,) = report.findings
    assert found.cause == "zero_point" and found.confirmed and len(found.keys) == len(changed)
    assert f"zero points {old} became {new}" in found.says


@pytest.mark.parametrize("left", [0, 1])
def test_a_zero_point_beside_others_of_its_value_is_damage(left: int, tmp_path: Path) -> None:
    write_folder(tmp_path / "made", "awq")

    def several(codes: Array) -> Array:
        codes[:9] = 8
        return codes

    def one(codes: Array) -> Array:
        codes[np.flatnonzero(codes == 8)[left]] = 9
        return codes

    _with_zeros(tmp_path / "made", tmp_path / "good", several)
    _with_zeros(tmp_path / "good", tmp_path / "bad", one)
    report = diff(tmp_path / "good", tmp_path / "bad")
    assert {row.cause for row in report.findings if row.confirmed} == {"bit_rot"}


@pytest.mark.parametrize("stated", ["gptq", "gptq_v2"])
def test_the_format_that_claims_other_zero_points_is_set(stated: str, tmp_path: Path) -> None:
    write_folder(tmp_path / "good", "gptq")
    good, bad = tmp_path / "good", tmp_path / "bad"
    if stated == "gptq":
        _state(good, "gptq_v2")
    shutil.copytree(good, bad)
    _state(bad, stated)
    said = aprfmt("diagnose", good, bad, "--json").json
    assert [one["cause"] for one in said["causes"]] == ["zero_point"], said["sentence"]
    remedy = said["causes"][0]["remedy"]["command"]
    assert remedy.startswith("aprfmt set ") and "checkpoint_format" in remedy
    words = remedy.replace("bad-fixed", str(tmp_path / "OUT-fixed"))
    remedied(words, tmp_path / "fixed")
    same(good, tmp_path / "OUT-fixed")


def _state(folder: Path, value: str) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["checkpoint_format"] = value
    path.write_text(json.dumps(config))
