"""A hole of whole pages in a weight is warned of; pruned, padded and masked weights are not.

Seen red: PASS of a sector of zeros without a warning; a warning of zeroed rows and columns.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.cli.run import aprfmt

NAME, PAGE = "blocks.1.ff.proj.weight", 4096
RNG = np.random.default_rng(6)


def warned(path: Path) -> list[tuple[str, str]]:
    told = aprfmt("validate", path, "--json").json
    return [(one["level"], one["where"]) for one in told["findings"] if one["check"] == "values"]


def saved(folder: Path, values: Any, name: str = NAME) -> tuple[Path, int]:
    """Return the file, and the offset of the first page of it that lies in the weight."""
    others = {f"norm.{i}.weight": np.ones(16 + i, np.float32) for i in range(3)}
    save_file(others | {name: values}, folder / "m.safetensors")
    from aprfmt import open as open_model

    info = open_model(folder / "m.safetensors").source.tensors[name].info
    return folder / "m.safetensors", info.offset + -info.offset % PAGE


def drawn(*shape: int, dtype: str = "<f2") -> Any:
    return RNG.normal(0, 0.04, shape).astype(dtype)


@pytest.mark.parametrize("dtype", ["<f2", "<f4"])
@pytest.mark.parametrize("pages", [1, 3])
def test_lost_pages_of_a_weight_are_warned_of(pages: int, dtype: str, tmp_path: Path) -> None:
    path, at = saved(tmp_path, drawn(300, 56, dtype=dtype))
    assert warned(path) == []
    data = bytearray(path.read_bytes())
    data[at : at + pages * PAGE] = bytes(pages * PAGE)
    path.write_bytes(data)
    assert warned(path) == [("warning", NAME)]
    # A run that fills no page of the file is none that a disk lost.
    data = bytearray(saved(tmp_path, drawn(300, 56, dtype=dtype))[0].read_bytes())
    data[at + 100 : at + PAGE] = bytes(PAGE - 100)
    path.write_bytes(data)
    assert warned(path) == []


def test_patterns_of_zeros_are_no_holes(tmp_path: Path) -> None:
    rows, columns, spread, triangle = (drawn(96, 6000) for _ in range(4))
    rows[40:60] = 0  # rows of an embedding, pruned neurons
    columns[:, 1500:] = columns[:, 1500:] * (np.arange(4500) % 6000 < 2000)  # pruned heads
    spread[RNG.random(spread.shape) < 0.3] = 0
    spread[3, :3000] = 0
    triangle = np.tril(drawn(96, 96).repeat(60, axis=1), 3000)
    for values in (rows, columns[:, :3600].copy(), spread, triangle):
        assert warned(saved(tmp_path, values)[0]) == []
    hole = drawn(96, 6000)
    hole[3, 50:5900] = 0
    assert warned(saved(tmp_path, hole)[0]) == [("warning", NAME)]
    assert warned(saved(tmp_path, hole, "attn_mask")[0]) == []
