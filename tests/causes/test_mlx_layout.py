"""Kernels with their input channels last: MLX's own layout in a file that says so, else a fault."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.cli.run import aprfmt

RNG = np.random.default_rng(4)


def compared(folder: Path, a: str, b: str, *, moved: str = "b", rolled: bool = False) -> Any:
    """Return `diff` of two files of formats `a` and `b`; `moved` has the channels last."""
    kernel = RNG.normal(size=(6, 3, 5, 4)).astype(np.float32)
    for side, form in (("a", a), ("b", b)):
        own = kernel if side != moved else np.ascontiguousarray(np.moveaxis(kernel, 1, -1))
        own = np.roll(own, 1, 0) if rolled and side == moved else own
        tensors = {"conv.weight": own, "other.bias": kernel[0, 0, 0]}
        save_file(tensors, folder / f"{side}.safetensors", {"format": form})
    return aprfmt("diff", folder / "a.safetensors", folder / "b.safetensors", "--json").json


@pytest.mark.parametrize(
    ("a", "b", "moved", "cause"),
    [
        ("pt", "mlx", "b", "mlx_layout"),
        ("mlx", "pt", "a", "mlx_layout"),
        ("pt", "pt", "b", "stored_shape"),
        ("mlx", "mlx", "b", "stored_shape"),
        ("mlx", "pt", "b", "stored_shape"),  # the other side is the one with MLX's layout
    ],
)
def test_channels_last_are_mlx_s_where_it_wrote_the_file(
    a: str, b: str, moved: str, cause: str, tmp_path: Path
) -> None:
    told = compared(tmp_path, a, b, moved=moved)
    (found,) = told["causes"]
    assert (found["cause"], found["level"]) == (cause, "confirmed")
    assert bool([line for line in told["next"] if " convert " in line]) <= (cause != "mlx_layout")
    assert f"{moved.upper()} has the input channels last" in found["says"]


def test_other_values_are_no_layout(tmp_path: Path) -> None:
    told = compared(tmp_path, "pt", "mlx", rolled=True)
    assert all(one["level"] != "confirmed" for one in told["causes"])
