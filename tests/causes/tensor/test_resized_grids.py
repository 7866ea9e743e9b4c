"""A table of positions of another length is named as resized, and one of zeros as lost.

torch's own interpolation makes the tables. Seen red: "no cause of the table fits" of both; with
the kernel's coefficient -0.5; with kept rows not looked for.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from aprfmt import open as open_model
from aprfmt.causes.tensor.context import PairContext
from aprfmt.causes.tensor.explanation import explain_pair
from tests.cli.run import aprfmt

NAME = "vision_model.embeddings.position_embedding.weight"
WAYS: dict[str, dict[str, Any]] = {
    "bicubic interpolation": {"mode": "bicubic"},
    "bicubic interpolation with aligned corners": {"mode": "bicubic", "align_corners": True},
    "bilinear interpolation": {"mode": "bilinear"},
    "nearest interpolation": {"mode": "nearest"},
}


def table(rows: int, columns: int = 24) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))


def resized(old: torch.Tensor, kept: int, size: tuple[int, int], **how: Any) -> torch.Tensor:
    side = round((len(old) - kept) ** 0.5)
    grid = old[kept:].T.reshape(1, -1, side, side)
    grid = torch.nn.functional.interpolate(grid, size=size, **how)
    return torch.cat([old[:kept], grid.reshape(old.shape[1], -1).T])


def model(folder: Path, name: str, values: torch.Tensor) -> Path:
    others = {f"layers.{i}.fc.weight": table(20 + i) for i in range(6)}
    save_file(others | {NAME: values.contiguous()}, folder / f"{name}.safetensors")
    return folder / f"{name}.safetensors"


def explained(folder: Path, a: torch.Tensor, b: torch.Tensor) -> Any:
    one, other = (open_model(model(folder, name, x)) for name, x in (("a", a), ("b", b)))
    return explain_pair(one[NAME], other[NAME], PairContext(one, other))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kept", [0, 1, 5])
def test_an_interpolated_grid_is_named_with_its_kernel(way: str, kept: int, tmp_path: Path) -> None:
    old = table(16 + kept)
    for size in ((8, 8), (3, 3), (4, 7)):
        found = explained(tmp_path, old, resized(old, kept, size, **WAYS[way]))
        assert (found.cause, found.certainty) == ("resized_positions", "confirmed"), size
        text = f"B's table of positions is A's, resized: 4x4 to {size[0]}x{size[1]}, {way}"
        assert found.says == text
        assert (f"equal in both: {kept}" in found.evidence[1]) == bool(kept)


def test_smaller_grids_may_be_antialiased_and_rounded(tmp_path: Path) -> None:
    old = table(8 * 8 + 1)
    new = resized(old, 1, (5, 5), mode="bicubic", antialias=True)
    found = explained(tmp_path, old, new.half())
    assert found.says.endswith("8x8 to 5x5, bicubic interpolation with antialiasing")
    assert explained(tmp_path, new, old) is not None  # A is made of B
    assert explained(tmp_path, new, old).says.startswith("A's table of positions is B's")


def test_a_line_of_places_may_be_stretched(tmp_path: Path) -> None:
    old = table(30)
    line = torch.nn.functional.interpolate(old.T[None], size=61, mode="linear")[0].T
    found = explained(tmp_path, old, line)
    assert found.says.endswith("resized: 30 to 61 places, linear interpolation")


def test_other_tables_are_not_called_resized(tmp_path: Path) -> None:
    """Of noise, and with one damaged row in the grid or before it."""
    old = table(17)
    new = resized(old, 1, (8, 8), mode="bicubic")
    for row in (0, 40):
        damaged = new.clone()
        damaged[row] *= 1.01
        found = explained(tmp_path, old, damaged)
        assert found is None or found.cause != "resized_positions"
    assert explained(tmp_path, old, table(65)) is None


def test_a_model_of_a_resized_table_is_no_bug_and_one_of_zeros_is(tmp_path: Path) -> None:
    old = table(17)
    new = resized(old, 1, (8, 8), mode="bicubic")
    a = model(tmp_path, "a", old)
    told = aprfmt("diagnose", a, model(tmp_path, "twin", new))
    assert told.out.startswith("not comparable: resized_positions - "), told.out
    assert told.code == 2
    lost = aprfmt("diagnose", a, model(tmp_path, "lost", 0 * new))
    assert lost.out.startswith(f"bug: stale_tensor (explained) - {NAME} - B holds 0 everywhere")
    assert "shape [17, 24] in A, [65, 24] in B" in lost.out
    assert lost.code == 1 and "aprfmt convert" not in lost.out  # A's table fits no B
    other = aprfmt("diagnose", a, model(tmp_path, "other", 0 * new + 0.5 * table(65)))
    assert "shape [17, 24] in A and [65, 24] in B" in other.out, other.out


def test_zeros_in_place_of_a_weight_are_certain_and_a_gives_its_tensor(tmp_path: Path) -> None:
    """Seen red: located, and "what would undo it is not known"."""
    a = model(tmp_path, "a", table(17))
    told = aprfmt("diagnose", a, model(tmp_path, "b", torch.zeros(17, 24)))
    assert f"bug: stale_tensor (explained) - {NAME} - B holds 0 everywhere" in told.out
    assert "next: aprfmt convert" in told.out
    # Constant values that are not zero, and zeros in A, are made by more than one operation.
    for x, y in ((table(17), torch.ones(17, 24)), (torch.zeros(17, 24), table(17))):
        assert explained(tmp_path, x, y).certainty == "located"


def test_names_of_what_is_zero_in_sound_files_are_not_certain() -> None:
    from aprfmt.causes.tensor.other_tensors import explain_constant_side

    sides = [
        SimpleNamespace(
            rows=4, columns=8, size=32, shape=(4, 8), take=lambda at, x=x: np.full((len(at), 8), x)
        )
        for x in (1.5, 0.0)
    ]
    sides[0].take = lambda at: np.arange(8.0) + np.asarray(at)[:, None]
    for key, certain in (
        ("down.0.weight", True), ("x.lora_B.weight", False), ("controlnet_blocks.0.weight", False),
        ("exp_avg.fc.weight", False), ("blk.0.ffn_gate.weight", True), ("L0.ffn_gate.weight", True),
    ):  # fmt: skip
        case: Any = SimpleNamespace(
            key=key, a=sides[0], b=sides[1], sample_a=np.ones(1), before=SimpleNamespace(relative=1)
        )
        (found,) = explain_constant_side(case)
        assert (found.certainty == "explained") is certain, key
