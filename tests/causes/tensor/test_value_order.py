"""The same values at other places are said to be that, and not of another checkpoint.

Seen red: values of two types compared within a bound, which two samples of one kind meet as well.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from aprfmt.compare import diff
from tests.compare.test_verdicts import edited
from tests.conversion.folders import llama_folder, tensors_of, write_mixed

KEY, NAME = "L1.ffn_up.weight", "model.layers.1.mlp.up_proj.weight"


def _tiles(x: Any) -> Any:
    return x.reshape(-1, 16, x.shape[1] // 16, 16).transpose(0, 3, 2, 1).reshape(x.shape)


def _shuffled(x: Any) -> Any:
    return np.random.default_rng(2).permutation(x.ravel()).reshape(x.shape)


def _one_other(x: Any) -> Any:
    made = _shuffled(x)
    made[0, 0] += 1
    return made


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "tiles transposed": (_tiles, "value_order"),
    "shuffled": (_shuffled, "value_order"),
    "shuffled, one other": (_one_other, "stale_tensor"),
    "drawn": (lambda x: np.random.default_rng(3).standard_normal(x.shape), "stale_tensor"),
}


@pytest.mark.parametrize("kind", ["F32", "BF16"])
@pytest.mark.parametrize("name", CHANGES)
def test_an_order_without_a_name(name: str, kind: str, tmp_path: Path) -> None:
    change, cause = CHANGES[name]
    good = llama_folder(tmp_path / "good", "F32", hidden=64, layers=2)

    def edit(data: dict[str, bytes]) -> None:
        x = np.frombuffer(data[NAME], np.float32).reshape(-1, 64)
        data[NAME] = np.ascontiguousarray(change(x), np.float32).tobytes()

    bad = edited(good, tmp_path / "bad", edit)
    if kind == "BF16":
        rows = tensors_of(bad)
        _, shape, raw = rows[NAME]
        values = np.frombuffer(raw, np.float32).astype(ml_dtypes.bfloat16)
        write_mixed(bad / "model.safetensors", rows | {NAME: (kind, shape, values.tobytes())})
    (row,) = [row for row in diff(good, bad).tensors if row.key == KEY]
    assert row.explanation is not None and row.explanation.certainty == "located"
    assert row.explanation.cause == cause
    assert "checkpoint" not in row.explanation.says or cause == "stale_tensor"
