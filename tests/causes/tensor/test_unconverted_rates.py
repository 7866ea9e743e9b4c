"""A GGUF that holds A_log, or exp(A_log), where llama.cpp's converter stores -exp(A_log).

Seen red: `nonfinite`, as the logarithm of such a rate is NaN though every stored value is finite.
"""

import shutil
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import numpy as np
import pytest

from tests.cli.run import aprfmt
from tests.models import save_tiny

_FOLDER = TemporaryDirectory(prefix="aprfmt-rates-")
SAYS = {
    "logarithms": "stores the logarithms of the decay rates, not the rates",
    "positive": "stores the decay rates without their sign",
}


@cache
def _sources(name: str) -> tuple[Path, Path]:
    """Return a tiny model's folder and its GGUF."""
    folder = Path(_FOLDER.name) / name
    save_tiny(name, folder / "model")
    path = folder / "model.gguf"
    assert aprfmt("convert", folder / "model", path, "--quiet").code == 0
    return folder / "model", path


def _edited(name: str, change: Any, path: Path, layers: int = 99) -> Path:
    """Write the GGUF with the decay rates of its first `layers` layers changed."""
    shutil.copy(_sources(name)[1], path)
    for tensor in gguf.GGUFReader(path, "r+").tensors:
        if tensor.name.endswith("ssm_a") and int(tensor.name.split(".")[1]) < layers:
            tensor.data[...] = change(np.array(tensor.data))
    return path


@pytest.mark.parametrize("name", ["mamba", "mamba2", "qwen3_next", "bamba"])
@pytest.mark.parametrize("what", SAYS)
def test_rates_that_were_not_converted_are_named(what: str, name: str, tmp_path: Path) -> None:
    def change(rates: Any) -> Any:
        return np.log(-rates) if what == "logarithms" else -rates

    folder, right = _sources(name)
    wrong = _edited(name, change, tmp_path / "wrong.gguf")
    for first, second, side in ((folder, wrong, "B"), (wrong, right, "A")):
        (row,) = aprfmt("diff", first, second, "--json").json["causes"]
        assert (row["cause"], row["level"]) == ("function_of", "confirmed"), row
        says = f"{side} {SAYS[what]}: its format stores minus their exponentials"
        assert says in row["says"], row


@pytest.mark.parametrize("name", ["mamba", "qwen3_next"])
def test_other_rates_above_zero_are_not_called_unconverted(name: str, tmp_path: Path) -> None:
    wrong = _edited(name, lambda rates: np.abs(rates) * 2 + 0.1, tmp_path / "wrong.gguf")
    found = aprfmt("diff", _sources(name)[0], wrong, "--json").json["causes"]
    assert [row["cause"] for row in found] == ["nonfinite"], found
