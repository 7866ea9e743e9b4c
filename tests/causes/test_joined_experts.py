"""Experts whose gate and up are one stored tensor, transposed in a file: one cause, its places.

Seen red: without the exchange of the joined tensor its parts are of another checkpoint.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprfmt.compare import diff
from tests.conversion.folders import tensors_of, write_mixed
from tests.models import save_tiny

NAME = "model.layers.1.mlp.experts.gate_up_proj"
KEYS = {"L1.ffn_gate_exps.weight", "L1.ffn_up_exps.weight"}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose joined tensor has square matrices, one of each expert."""
    folder = tmp_path_factory.mktemp("joined") / "good"
    save_tiny("gpt_oss", folder, "float32", hidden_size=64, intermediate_size=32)
    return folder


def _trained(x: Any) -> Any:
    return x + np.random.default_rng(4).standard_normal(x.shape).astype(np.float32) * x.std() / 9


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "transposed": (lambda x: x.swapaxes(1, 2), "transpose"),
    "another draw": (lambda x: np.random.default_rng(4).permutation(x.ravel()), ""),
    "trained": (_trained, ""),
}


@pytest.mark.parametrize("name", CHANGES)
def test_joined_experts_that_were_transposed(name: str, good: Path, tmp_path: Path) -> None:
    change, cause = CHANGES[name]
    bad = shutil.copytree(good, tmp_path / "bad")
    rows = tensors_of(good)
    kind, shape, raw = rows[NAME]
    assert shape[1] == shape[2]
    made = np.ascontiguousarray(change(np.frombuffer(raw, np.float32).reshape(shape)), np.float32)
    write_mixed(bad / "model.safetensors", rows | {NAME: (kind, shape, made.tobytes())})
    causes = [one for one in diff(good, bad).findings if one.cause == "transpose"]
    assert bool(causes) == bool(cause)
    if cause:
        assert causes[0].certainty == "confirmed" and {*causes[0].where} == KEYS
