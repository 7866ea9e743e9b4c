"""A config.json that states other bits or groups than the weights were packed with.

The side with the packed weights is accused, whatever the other one is stored in, and the printed
command mends it.

Seen red: the plain side was accused of scales that it lacks.
"""

import copy
import json
import shlex
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.cli.run import aprfmt
from tests.diagnosis import packing
from tests.diagnosis.faults_packed import gptq, mlx, nearest, packed, source

MLX = {"group_size": 32, "bits": 4, "mode": "affine"}
MXFP4 = MLX | {"mode": "mxfp4"}
INT4 = packing.compressed_section(
    "pack-quantized", num_bits=4, type="int", strategy="group", group_size=32, symmetric=True
)
OWN = "model.layers.1.mlp.up_proj"


def of_group(**changed: Any) -> Callable[[Any], None]:
    """Change keys of the one group of a section of compressed-tensors."""

    def change(section: Any) -> None:
        (group,) = section["config_groups"].values()
        group["weights"].update(changed)

    return change


Change = Callable[[Any], None]
# makers of weights, their section, what is wrong with it, what is said
CASES: dict[str, tuple[Any, Mapping[str, Any], Change, str]] = {
    "mlx-bits": (mlx, MLX, lambda s: s.update(bits=8), "config.json says 8 bits"),
    "mlx-groups": (mlx, MLX, lambda s: s.update(group_size=64), "in groups of 64"),
    "mlx-bits-and-groups": (
        mlx,
        MLX,
        lambda s: s.update(bits=8, group_size=16),
        "stored with 4 bits in groups of 32",
    ),
    "mlx-of-a-module": (
        mlx,
        MLX,
        lambda s: s.update({OWN: {"bits": 8, "group_size": 32}}),
        "stored with 4 bits in groups of 32",
    ),
    "mlx-mode": (packing.mlx_mxfp4, MXFP4, lambda s: s.pop("mode"), "the bytes have mode 'mxfp4'"),
    "mlx-mode-and-groups": (
        packing.mlx_mxfp4,
        MXFP4,
        lambda s: s.update(mode="nvfp4", group_size=16),
        "the bytes have mode 'mxfp4', group_size 32",
    ),
    "mlx-other-mode": (mlx, MLX, lambda s: s.update(mode="mxfp4"), "the bytes have mode 'affine'"),
    "gptq-bits": (gptq, packing.gptq_section(), lambda s: s.update(bits=8), "says 8 bits"),
    "compressed-bits": (packed, INT4, of_group(num_bits=8), "config.json says 8 bits"),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path, Path, str]:
    """Return (source, right copy, copy with a wrong section, what is to be said)."""
    write, section, change, says = CASES[request.param]
    symmetric = write is packed
    right = tmp_path / "right"
    made = packing.folder(
        source("llama"),
        f"claimed-{request.param}",
        section,
        write if section is MXFP4 else nearest(write, symmetric=symmetric),
        key="quantization" if "mode" in section else "quantization_config",
    )
    shutil.copytree(made, right)
    wrong = tmp_path / "wrong"
    shutil.copytree(made, wrong)
    config = json.loads((wrong / "config.json").read_text())
    stated = copy.deepcopy(dict(section))
    change(stated)
    for key in ("quantization", "quantization_config"):
        if key in config:
            config[key] = stated
    (wrong / "config.json").write_text(json.dumps(config))
    return source("llama"), right, wrong, says


def test_the_packed_side_is_accused_and_mended(case: tuple[Path, Path, Path, str]) -> None:
    plain, right, wrong, says = case
    assert aprfmt("diagnose", plain, right, "--json").code == 0
    for one in (plain, right):
        told = aprfmt("diagnose", one, wrong, "--json").json
        assert told["verdict"] == "bug"
        (found, *_) = told["causes"]
        assert (found["cause"], found["level"]) == ("packing_claim", "confirmed")
        assert found["says"].startswith("B: ")
        if one is plain:
            assert says in found["says"]
    words = shlex.split(
        aprfmt("diagnose", plain, wrong, "--json").json["causes"][0]["remedy"]["command"]
    )
    words = [word if word != "-o" else "--in-place" for word in words[1:]]
    words = words[:-1] if words[-2] == "--in-place" else words
    assert aprfmt(*words).code == 0
    assert aprfmt("diff", right, wrong, "--json").code == 0


def test_validate_offers_the_sizes_that_fit(case: tuple[Path, Path, Path, str]) -> None:
    """From the file alone: the shapes that the other keys ask for say which sizes were meant."""
    _, right, wrong, _ = case
    told = aprfmt("validate", wrong, "-v")
    assert told.code == 1
    lines = [line for line in told.out.splitlines() if "aprfmt set" in line]
    command = lines[0][lines[0].index("aprfmt set") :]
    assert aprfmt(*shlex.split(command)[1:]).code == 0
    assert aprfmt("diff", right, wrong, "--json").code == 0
