"""A packed file beside values that were decoded from its own codes, rightly or not.

Such values do not show that the file is wrong: it is the file that has the codes.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.causes.packed_source import UP, Array, copied, judged, plain, source, values
from tests.cli.run import aprfmt as command
from tests.conversion.folders import llama_folder
from tests.diagnosis import packing

__all__ = ["source", "values"]

ORDERED = partial(packing.fed_back, act_order=True)


def in_order(p: packing.Packed) -> packing.Packed:
    """Return a packing whose inputs have the groups in order."""
    return replace(p, group=np.sort(p.group))


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("stated", [True, False])
def test_values_decoded_without_the_order_do_not_accuse_it(
    stated: bool, swapped: bool, values: Array, source: Path, tmp_path: Path
) -> None:
    """Seen red: "A's g_idx belongs to no order of its inputs", of a sound file."""
    p = ORDERED(values)
    section = packing.gptq_section(desc_act=stated)
    packed = copied(source, tmp_path / "a", packing.gptq(UP, p), section)
    engine = copied(source, tmp_path / "b", plain(in_order(p).values(), "float16"))
    pair = (engine, packed) if swapped else (packed, engine)
    found = judged(*pair).explanation
    assert found is not None and found.cause == "group_index"
    whole, broken = ("B", "A") if swapped else ("A", "B")
    said = found.evidence[0]
    if stated:
        assert said.startswith(f"{broken}'s values are {whole}'s codes decoded with the groups")
        assert found.side == broken and not found.leaves_side_open
    else:
        assert f"or {whole}'s parts are right, and {broken}'s values were decoded so" in said
        assert not found.side and found.leaves_side_open


def test_an_index_that_is_no_order_is_left_open(
    values: Array, source: Path, tmp_path: Path
) -> None:
    """Groups of unlike sizes are no order of activation, whatever config.json says."""
    p = packing.nearest(values)
    group = p.group.copy()
    group[40] = 0
    rows = packing.gptq(UP, replace(p, group=group))
    packed = copied(source, tmp_path / "a", rows, packing.gptq_section(desc_act=True))
    found = judged(packed, copied(source, tmp_path / "b", plain(p.values(), "float16"))).explanation
    assert found is not None and found.cause == "group_index" and found.leaves_side_open


def _zero_points(values: Array) -> tuple[packing.Rows, Array, dict[str, Any]]:
    """Return GPTQ's tensors, values decoded by the other rule of zero points, and the section."""
    p = packing.nearest(values)
    return packing.gptq(UP, p), replace(p, zeros=p.zeros - 1).values(), packing.gptq_section()


def _small_floats(values: Array) -> tuple[packing.Rows, Array, dict[str, Any]]:
    """Return FP8 tensors, their bytes read as the other 8-bit float, and the section."""
    rows = packing.fp8(UP, values, per="row", top=224.0)
    codes = np.frombuffer(rows[f"{UP}.weight"][2], ml_dtypes.float8_e5m2).reshape(values.shape)
    read = codes.astype(np.float32) * packing.number(rows[f"{UP}.weight_scale"])
    section = packing.compressed_section(
        "float-quantized", num_bits=8, type="float", strategy="channel", symmetric=True
    )
    return rows, read, section


@pytest.mark.parametrize(
    ("make", "cause"), [(_zero_points, "zero_point"), (_small_floats, "fp8_variant")]
)
def test_values_decoded_by_another_rule_leave_the_side_open(
    make: Any, cause: str, values: Array, source: Path, tmp_path: Path
) -> None:
    rows, read, section = make(values)
    packed = copied(source, tmp_path / "a", rows, section)
    found = judged(packed, copied(source, tmp_path / "b", plain(read, "float32"))).explanation
    assert found is not None and found.cause == cause
    assert found.leaves_side_open and not found.side, found.evidence


def test_coarse_values_of_other_groups_were_not_trained(tmp_path: Path) -> None:
    """Seen red: "14 of 16 matrices differ ...: trained further"."""
    base = llama_folder(tmp_path / "base", "F32", hidden=128, ffn=256)

    def wrong(name: str, x: Array) -> packing.Rows:
        return packing.decoded(name, in_order(ORDERED(x)), dtype=np.float16)

    there = packing.folder(base, "order-lost-decoded", None, wrong)
    shown = command("diff", base, there, "--json").json
    assert shown["verdict"] == "different"
    assert "derived" not in {one["cause"] for one in shown["findings"]}
