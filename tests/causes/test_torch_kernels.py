"""Kernels in torch's order inside a file of MLX's: named, unless the order is not torch's."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.cli.run import aprfmt

RNG = np.random.default_rng(5)
Tensors = dict[str, Any]


def kernel(*shape: int) -> Any:
    return RNG.normal(size=shape).astype(np.float32)


def asked(command: str, folder: Path, a: Tensors, b: Tensors, forms: str = "pt mlx") -> Any:
    """Return the JSON of `diff` or `diagnose` of two files; `forms` are their formats' names."""
    for side, tensors, form in zip("ab", (a, b), forms.split(), strict=True):
        save_file(tensors, folder / f"{side}.safetensors", {"format": form})
    return aprfmt(command, folder / "a.safetensors", folder / "b.safetensors", "--json").json


@pytest.mark.parametrize("command", ["diff", "diagnose"])
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("encoder.conv_in.weight", (8, 3, 5, 5)),
        ("patch.weight", (8, 3, 2, 4, 4)),
        ("block.conv1.weight", (8, 6, 3)),
        ("mixer.conv1d.weight", (8, 1, 4)),
        ("down.conv.weight", (8, 3, 3, 3)),  # of the same shape in both orders
    ],
)
def test_equal_bytes_under_mlx_s_name_are_no_equal_kernels(
    name: str, shape: tuple[int, ...], command: str, tmp_path: Path
) -> None:
    """Seen red: "equal", exit 0."""
    held = {name: kernel(*shape), "proj.weight": kernel(4, 4)}
    told = asked(command, tmp_path, held, held)
    (found,) = told["causes"]
    assert (found["cause"], found["level"], found["where"]) == ("torch_layout", "located", [name])
    assert told["verdict"] == ("different" if command == "diff" else "bug")
    assert "B states that MLX wrote it and has 1 kernel" in found["says"]


def test_a_file_turned_by_half_has_the_other_half_named(tmp_path: Path) -> None:
    """Seen red: `diagnose` said the same computation for all."""
    held = {"a.conv.weight": kernel(8, 3, 5, 5), "b.conv.weight": kernel(8, 4, 3, 3)}
    turned = {
        **held,
        "a.conv.weight": np.ascontiguousarray(held["a.conv.weight"].transpose(0, 2, 3, 1)),
    }
    told = asked("diagnose", tmp_path, held, turned)
    assert told["verdict"] == "bug"
    assert [(one["cause"], one["where"]) for one in told["causes"]] == [
        ("torch_layout", ["b.conv.weight"]),
        ("mlx_layout", ["a.conv.weight"]),
    ]


@pytest.mark.parametrize(
    ("name", "held", "forms"),
    [
        ("conv.weight", kernel(8, 3, 5, 5), "mlx mlx"),
        ("conv.weight", kernel(8, 3, 5, 5), "pt pt"),
        ("mlp.switch_mlp.conv.weight", kernel(8, 6, 3), "pt mlx"),
        ("heads.weight", kernel(8, 6, 3), "pt mlx"),  # a stack of matrices under another name
        ("conv.weight", kernel(8, 5, 5, 3), "pt mlx"),  # the window stands as MLX has it
        ("conv.weight", np.ones((8, 3, 3, 3), np.float32), "pt mlx"),
        ("conv.weight", kernel(8, 1, 1), "pt mlx"),
        ("conv.weight", kernel(8, 6), "pt mlx"),
    ],
)
def test_an_order_that_cannot_be_told_accuses_nothing(
    name: str, held: Any, forms: str, tmp_path: Path
) -> None:
    told = asked("diff", tmp_path, {name: held}, {name: held}, forms)
    assert (told["verdict"], told["causes"]) == ("equal", [])
