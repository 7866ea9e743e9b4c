"""A symmetric GPTQ file whose zero points follow the other format than config.json says.

Decided by the file alone: a symmetric zero point is the middle of the codes, 2 ** (bits - 1), which
the first format stores less one. Seen red: only config and packed names were compared.
"""

import shlex
from pathlib import Path

import pytest

from tests.cli.run import aprfmt
from tests.diagnosis import packing
from tests.diagnosis.engines import place
from tests.diagnosis.faults_packed import SIZES, source

FORMATS = {"gptq": 1, "gptq_v2": 0}  # checkpoint_format -> what a zero point is stored less


def made(name: str, bits: int, held: str, says: str | None, symmetric: bool, sym: bool) -> Path:
    """Return a folder of weights packed in the format `held`, which says the format `says`."""
    section = packing.gptq_section(bits, sym=sym)
    if says is not None:
        section["checkpoint_format"] = says

    def make(prefix: str, values: packing.Array) -> packing.Rows:
        codes = packing.nearest(values, bits, symmetric=symmetric)
        return packing.gptq(prefix, codes, offset=FORMATS[held])

    return packing.folder(source("llama", SIZES), f"zeros-{name}", section, make)


@pytest.mark.parametrize("held", FORMATS)
@pytest.mark.parametrize("bits", (2, 3, 4, 8))
def test_zero_points_of_the_other_format_fail_with_what_mends_them(bits: int, held: str) -> None:
    (other,) = FORMATS.keys() - {held}
    wrong = made(f"wrong-{bits}-{held}", bits, held, other, True, True)
    done = aprfmt("validate", wrong, "--json")
    (row,) = [row for row in done.json["checks"] if row["name"] == "quantization"]
    assert done.code == 1 and row["outcome"] == "FAIL", done.out
    words = shlex.split(row["todo"])
    assert words[:3] == ["aprfmt", "set", str(wrong)], row
    fixed = place(f"{wrong.name}-fixed")
    assert aprfmt(*words[1:-1], "-o", fixed, "--force").code == 0
    assert aprfmt("validate", fixed).code == 0
    right = made(f"right-{bits}-{held}", bits, held, held, True, True)
    assert aprfmt("diagnose", right, fixed).code == 0
    assert aprfmt("validate", right).code == 0


INNOCENT = {  # held, says, symmetric, sym
    "no format stated": ("gptq", None, True, True),
    "zero points of any value": ("gptq_v2", "gptq", False, True),
    "not said to be symmetric": ("gptq_v2", "gptq", True, False),
}


@pytest.mark.parametrize("name", INNOCENT)
def test_what_the_file_alone_does_not_decide_passes(name: str) -> None:
    held, says, symmetric, sym = INNOCENT[name]
    folder = made(name.replace(" ", "-"), 4, held, says, symmetric, sym)
    done = aprfmt("validate", folder, "--json")
    (row,) = [row for row in done.json["checks"] if row["name"] == "quantization"]
    assert row["outcome"] == "PASS", row
