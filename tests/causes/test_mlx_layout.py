"""Kernels with their input channels last: MLX's own layout in a file that says so, else a fault."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.cli.run import aprfmt

RNG = np.random.default_rng(4)


def compared(
    folder: Path, a: str, b: str, *, moved: str = "b", rolled: bool = False, axes: int = 2,
    name: str = "conv.weight",
) -> Any:  # fmt: skip
    """Return `diff` of two files of formats `a` and `b`; `moved` has the channels last.

    `axes` are those of the kernel's window, `name` is its tensor's.
    """
    kernel = RNG.normal(size=(6, 8, 5, 4, 3)[: 2 + axes]).astype(np.float32)
    for side, form in (("a", a), ("b", b)):
        own = kernel if side != moved else np.ascontiguousarray(np.moveaxis(kernel, 1, -1))
        own = np.roll(own, 1, 0) if rolled and side == moved else own
        tensors = {name: own, "other.bias": kernel[0].reshape(-1)[:4].copy()}
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


@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize(("a", "b", "moved"), [("pt", "mlx", "b"), ("mlx", "pt", "a")])
def test_kernels_of_every_number_of_axes_are_mlx_s(
    a: str, b: str, moved: str, axes: int, tmp_path: Path
) -> None:
    """Seen red: a kernel of sounds as a matrix with its rows and columns exchanged."""
    (found,) = compared(tmp_path, a, b, moved=moved, axes=axes)["causes"]
    assert (found["cause"], found["level"]) == ("mlx_layout", "confirmed")
    assert f"{moved.upper()} has the input channels last" in found["says"]


@pytest.mark.parametrize(
    ("a", "b", "name"),
    [
        ("pt", "pt", "conv.weight"),
        ("mlx", "mlx", "conv.weight"),
        ("pt", "mlx", "mlp.experts.down_proj"),
        ("pt", "mlx", "mlp.switch_mlp.up_proj.weight"),
    ],
)
def test_a_stack_or_files_of_one_writer_have_no_such_order(
    a: str, b: str, name: str, tmp_path: Path
) -> None:
    (found,) = compared(tmp_path, a, b, axes=1, name=name)["causes"]
    assert (found["cause"], found["level"]) == ("transpose", "confirmed")


def test_other_values_are_no_layout(tmp_path: Path) -> None:
    told = compared(tmp_path, "pt", "mlx", rolled=True)
    assert all(one["level"] != "confirmed" for one in told["causes"])
