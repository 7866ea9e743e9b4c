"""Faults on the GPU's side alone are found by `diagnose`, with their cause.

The GPU runs a model with one number or the biases changed and saves its trace; the model itself is
the other side.
"""

from collections.abc import Mapping
from typing import Any

import pytest

from aprfmt.diagnosis import diagnose
from tests.diagnosis.engines import tiny_folder, trace
from tests.inference.gpu.on_gpu import cuda, need

pytestmark = pytest.mark.gpu


def without_biases(weights: Any) -> Mapping[str, Any]:
    return {
        key: 0 * weights[key].numpy()
        for key in weights
        if ".attn_" in key and key.endswith(".bias")
    }


@pytest.mark.parametrize(
    ("base", "how", "cause"),
    [
        ("llama", {"hp": {"norm_eps": 1e-6}}, "norm_eps"),
        ("llama", {"hp": {"rope_theta": 10000.0}}, "rope_theta"),
        ("llama", {"hp": {"rope_style": "interleaved"}}, "rope_pairing"),
        ("qwen2", {"weights": without_biases}, "missing_bias"),
    ],
)
def test_a_fault_on_the_gpu_is_named(base: str, how: dict[str, Any], cause: str) -> None:
    need()
    folder = tiny_folder(base)
    saved = trace(folder, f"gpu-{cause}", backend=cuda, **how)  # type: ignore[arg-type]
    found = diagnose(str(folder), str(saved))
    assert [finding.cause for finding in found.findings] == [cause]
    assert found.verdict == "bug"


@pytest.mark.parametrize("base", ["llama", "qwen2", "gemma2"])
def test_a_sound_gpu_raises_no_alarm(base: str) -> None:
    need()
    folder = tiny_folder(base)
    saved = trace(folder, f"gpu-sound-{base}", backend=cuda)  # type: ignore[arg-type]
    found = diagnose(str(folder), str(saved))
    assert found.verdict in ("same", "precision")
    assert all(finding.verdict != "bug" for finding in found.findings)
