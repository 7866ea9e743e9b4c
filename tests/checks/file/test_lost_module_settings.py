"""An MLX folder whose config.json lost the settings of single modules.

Their names and shapes say which sizes fit, and the printed `set` states them. Seen red: "quantize
again", and a command that put a module's settings under "model" and "layers", where none reads
them.
"""

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aprfmt.cli.check_output import LONG_COMMAND
from aprfmt.model.config_paths import path_of_name
from tests.cli.run import aprfmt
from tests.conversion.folders import tensors_of, write_mixed
from tests.diagnosis import packing
from tests.diagnosis.faults_packed import mlx, source

SECTION = {"group_size": 32, "bits": 4, "mode": "affine"}
Sizes = Callable[[str], tuple[int, int]]  # of a weight's name: its bits and group size


def mixed(sizes: Sizes, name: str) -> tuple[Path, dict[str, Any]]:
    """Return an MLX folder of a tiny model, and the settings of modules beside the section's."""

    def make(weight: str, x: Any) -> Any:
        bits, size = sizes(weight)
        return mlx(weight, packing.nearest(x, bits=bits, size=size))

    made = packing.folder(source("llama"), f"lost-{name}", SECTION, make, key="quantization")
    own = {
        weight.removesuffix(".weight"): {"group_size": size, "bits": bits}
        for weight in tensors_of(made)
        if f"{weight.removesuffix('.weight')}.scales" in tensors_of(made)
        for bits, size in [sizes(weight)]
        if (bits, size) != (4, 32)
    }
    return made, own


def stated(folder: Path, at: Path, modules: dict[str, Any]) -> Path:
    """Return a copy of a folder whose config.json states these settings of modules."""
    shutil.copytree(folder, at)
    config = json.loads((at / "config.json").read_text())
    for key in ("quantization", "quantization_config"):
        if key in config:
            config[key] = {**SECTION, **modules}
    (at / "config.json").write_text(json.dumps(config))
    return at


def wide_mlp(weight: str) -> tuple[int, int]:
    return (8, 32) if ".mlp." in weight else (4, 32)


def wide_down(weight: str) -> tuple[int, int]:
    return (8, 16) if "down_proj" in weight else (4, 32)


def two_sorts(weight: str) -> tuple[int, int]:
    return (8, 32) if "v_proj" in weight else (2, 32) if "gate_proj" in weight else (4, 32)


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        (wide_mlp, "8 bits in groups of 32 fit"),
        (wide_down, "8 bits in groups of 16 fit"),
        (two_sorts, "2 bits in groups of 32 fit"),
    ],
)
def test_lost_settings_of_modules_are_found_and_stated(
    sizes: Sizes, says: str, tmp_path: Path
) -> None:
    made, own = mixed(sizes, sizes.__name__)
    right, wrong = stated(made, tmp_path / "right", own), stated(made, tmp_path / "wrong", {})
    assert aprfmt("validate", right).code == 0
    told = aprfmt("validate", wrong)
    assert told.code == 1 and says in told.out and "quantize again" not in told.out
    (command,) = [line[6:] for line in told.out.splitlines() if line.startswith("next: ")]
    assert len(command) <= LONG_COMMAND or told.out.count("--in-place") == 1
    assert aprfmt(*shlex.split(command)[1:]).code == 0
    assert aprfmt("validate", wrong).code == 0
    assert aprfmt("diff", right, wrong).code == 0


def test_settings_that_one_module_never_fits_are_not_stated(tmp_path: Path) -> None:
    """Scales that lost a column fit no sizes: the weight has to be packed again."""
    made, _ = mixed(wide_mlp, "cut")
    wrong = stated(made, tmp_path / "wrong", {})
    rows = dict(tensors_of(wrong))
    name = "model.layers.1.mlp.up_proj.scales"
    dtype, (out, groups), raw = rows[name]
    width = len(raw) // (out * groups)
    cut = b"".join(raw[i * groups * width : ((i + 1) * groups - 1) * width] for i in range(out))
    rows[name] = (dtype, (out, groups - 1), cut)
    write_mixed(wrong / "model.safetensors", rows)
    told = aprfmt("validate", wrong)
    assert told.code == 1 and "aprfmt set" not in told.out and "quantize again" in told.out


@pytest.mark.parametrize(
    ("section", "name", "path"),
    [
        (SECTION, "model.q", ("quantization", "model.q")),
        (SECTION, "model.q.bits", ("quantization", "model.q", "bits")),
        (SECTION, "bits", ("quantization", "bits")),
        (SECTION | {"model.q": {}}, "model.q.bits", ("quantization", "model.q", "bits")),
        (SECTION | {"model.q": {}}, "model.k", ("quantization", "model.k")),
        ({"quant_method": "x", "bits": 4}, "a.b", ("quantization", "a", "b")),
        ({"weights": {}}, "weights.num_bits", ("quantization", "weights", "num_bits")),
    ],
)
def test_a_module_is_one_key_of_an_mlx_section(
    section: dict[str, Any], name: str, path: tuple[str, ...]
) -> None:
    assert path_of_name({"quantization": section}, f"quantization.{name}") == path
