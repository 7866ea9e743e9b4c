"""Adapters merged at a small factor, whose products are hardly more than what BF16 rounds off.

Seen red: the sound merge was said to hold values "of another checkpoint, or damaged", as twice the
bound of the rounding hid the rank of the difference.
"""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.cli.run import aprfmt as command
from tests.conversion.folders import float_bytes, write_mixed

SIZE, RANK = 256, 16
NAMES = [f"blocks.{layer}.attn.{name}.weight" for layer in (0, 1) for name in ("q", "k", "v")]


def moved(kind: str, weight: Any, share: float, rng: np.random.Generator) -> Any:
    """Return a weight [SIZE, SIZE] in BF16 after a change of `share` of its norm."""
    if kind == "adapter":
        change = rng.standard_normal((SIZE, RANK)) @ rng.standard_normal((RANK, SIZE))
    elif kind == "falling":  # a training's: singular values that fall on and on
        falling = np.arange(1, SIZE + 1) ** -0.6
        change = (rng.standard_normal((SIZE, SIZE)) * falling) @ rng.standard_normal((SIZE, SIZE))
    elif kind == "signs":  # one step of Adam
        few = rng.standard_normal((SIZE, 4)) @ rng.standard_normal((4, SIZE))
        change = np.sign(few)
    else:
        change = rng.standard_normal((SIZE, SIZE))
    size = share * np.linalg.norm(weight) / np.linalg.norm(change)
    return (weight + size * change).astype(ml_dtypes.bfloat16).astype(np.float32)


def compared(kind: str, share: float, folder: Path) -> Any:
    """Return the JSON of `diff` of a file and its copy with matrices moved in this way."""
    rng = np.random.default_rng(7)
    sides: dict[str, dict[str, Any]] = {"a": {}, "b": {}}
    for name in (*NAMES, *(f"blocks.{layer}.mlp.weight" for layer in range(4))):
        drawn = rng.standard_normal((SIZE, SIZE)) * 0.05
        weight = drawn.astype(ml_dtypes.bfloat16).astype(np.float32)
        after = moved(kind, weight, share, rng) if name in NAMES else weight
        sides["a"][name], sides["b"][name] = (_row(x) for x in (weight, after))
    for side, rows in sides.items():
        write_mixed(folder / f"{side}.safetensors", rows)
    return command("diff", folder / "a.safetensors", folder / "b.safetensors", "--json").json


def _row(values: Any) -> tuple[str, tuple[int, ...], bytes]:
    """Return a matrix as a row of safetensors, in BF16."""
    return "BF16", values.shape, float_bytes(values, "BF16")


@pytest.mark.parametrize("share", [0.012, 0.02, 0.1])
def test_a_small_merge_has_its_rank(share: float, tmp_path: Path) -> None:
    (cause,) = compared("adapter", share, tmp_path)["causes"]
    assert cause["cause"] == "lora_merge" and f"has rank {RANK} in every" in cause["says"]
    assert "damaged" not in cause["says"]


@pytest.mark.parametrize("share", [0.003, 0.012, 0.02])
@pytest.mark.parametrize("kind", ["falling", "signs", "drawn"])
def test_a_training_is_no_merge(kind: str, share: float, tmp_path: Path) -> None:
    """The innocents, of the same sizes: what rounding leaves has to be spread as rounding is."""
    causes = compared(kind, share, tmp_path)["causes"]
    assert all(one["cause"] != "lora_merge" for one in causes), causes
