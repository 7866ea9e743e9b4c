"""What a plan holds for rows that change places: numbers, not objects.

Seen red: 151 bytes for a row of a folder, 251 for one of a GGUF, kept until the conversion ends,
and 51 where each layer has runs of its own; a model of twice the layers then takes more memory at
its peak.
"""

import gc
import tracemalloc
from pathlib import Path

import pytest

from aprfmt.base.columns import Columns
from aprfmt.conversion import convert
from aprfmt.conversion.options import Options
from aprfmt.conversion.plan import build_plan
from aprfmt.formats import FORMATS
from aprfmt.model import open_model
from tests.conversion.folders import llama_folder

HIDDEN = 512
ROWS = HIDDEN + HIDDEN // 2  # of q and k, in one layer
COUNTS = 1, 3  # layers of the two models


def held(source: Path, target: str) -> int:
    """Return the bytes that a plan and what it was made of keep."""
    with open_model(source) as model:
        model.roles  # noqa: B018 - not the plan's
        gc.collect()
        tracemalloc.start()
        try:
            plan = build_plan(model, FORMATS[target], Options())
            gc.collect()
            assert plan.outputs
            return tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("target", ["gguf", "safetensors"])
def test_a_row_takes_a_few_numbers(target: str, tmp_path: Path) -> None:
    sizes = []
    for layers in COUNTS:
        folder = llama_folder(tmp_path / f"m{layers}", "BF16", hidden=HIDDEN, layers=layers, ffn=64)
        source = folder
        if target == "safetensors":
            source = tmp_path / f"m{layers}.gguf"
            convert(folder, source, verify=False)
        held(source, target)  # what is loaded once
        sizes.append(held(source, target))
    each = (sizes[1] - sizes[0]) / ((COUNTS[1] - COUNTS[0]) * ROWS)
    assert each < 40, each


def test_columns_are_their_rows() -> None:
    rows = [(i, 2**40 + i, i % 3) for i in range(50)]
    found = Columns.from_rows(lambda *row: row, rows)
    assert list(found) == rows == found[:] and len(found) == 50
    assert found[-1] == rows[-1] and found[3:9:2] == rows[3:9:2]
    with pytest.raises(IndexError):
        found[50]
