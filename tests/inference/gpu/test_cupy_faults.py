"""Faults on the cupy side alone are found by `diagnose`, with their cause; a sound side is not.

The cupy backend runs a model with one number or the biases changed and saves its trace; the model
itself, on the CPU, is the other side. Emulated for some, on a GPU for all.
"""

from typing import Any

import pytest

from aprfmt.diagnosis import diagnose
from aprfmt.inference.fast.cupy_backend import CupyBackend
from tests.diagnosis.engines import tiny_folder, trace
from tests.inference.gpu.machine import on
from tests.inference.gpu.test_torch_faults import without_biases

# Cause -> (model, what the other side does otherwise).
FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "norm_eps": ("llama", {"hp": {"norm_eps": 1e-6}}),
    "rope_theta": ("llama", {"hp": {"rope_theta": 10000.0}}),
    "rope_pairing": ("llama", {"hp": {"rope_style": "interleaved"}}),
    "missing_bias": ("qwen2", {"weights": without_biases}),
}


def cupy() -> Any:
    return CupyBackend("cuda", "float32")


@on("cause", ["norm_eps", "rope_pairing"], FAULTS)
def test_a_fault_on_the_cupy_side_is_named(machine: Any, cause: str) -> None:
    base, how = FAULTS[cause]
    folder = tiny_folder(base)
    saved = trace(folder, f"{machine.name}-cupy-{cause}", backend=cupy, **how)
    found = diagnose(str(folder), str(saved))
    assert [finding.cause for finding in found.findings] == [cause]
    assert found.verdict == "bug"


@on("base", ["llama"], ["llama", "qwen2", "gemma2"])
def test_a_sound_cupy_side_raises_no_alarm(machine: Any, base: str) -> None:
    folder = tiny_folder(base)
    saved = trace(folder, f"{machine.name}-cupy-sound-{base}", backend=cupy)
    found = diagnose(str(folder), str(saved))
    assert found.verdict in ("same", "precision")
    assert all(finding.verdict != "bug" for finding in found.findings)


@pytest.mark.gpu
@pytest.mark.parametrize("machine", ["gpu"], indirect=True)
def test_a_fault_is_found_where_both_gpu_backends_run(machine: Any) -> None:
    """The same fault on the GPU's torch side, with cupy as the reference of the walk."""
    from tests.inference.gpu.on_gpu import cuda, need

    need()
    folder = tiny_folder("llama")
    saved = trace(folder, "gpu-both-eps", backend=cuda, hp={"norm_eps": 1e-6})  # type: ignore[arg-type]
    found = diagnose(f"{folder}@cupy", str(saved))
    assert [finding.cause for finding in found.findings] == ["norm_eps"]
