"""Where a run's weights lie by its device, its number type and the kernels that are there."""

from typing import Any

import pytest

from aprfmt.errors import BackendUnavailableError
from aprfmt.inference.fast import placement

GPUS = (("cuda:0", 10), ("cuda:1", None))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kernels", [False, True])
def test_a_gpu_keeps_weights_encoded_where_its_kernels_read_them(
    kernels: bool, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def stays_encoded(encoding: str, dtype: str) -> bool:
        asked.append((encoding, dtype))
        return encoding == "Q8_0"

    monkeypatch.setattr(placement, "find_gpus", lambda device: (GPUS, kernels))
    monkeypatch.setattr(placement, "stays_encoded", stays_encoded)
    on = placement.place_torch("cuda:all", "bfloat16", deterministic)
    assert (on.dtype, on.torch, on.deterministic, on.gpus) == (
        "bfloat16",
        True,
        deterministic,
        GPUS,
    )
    assert on.fused is (kernels and not deterministic) and not on.native
    assert [on.keeps_encoded(name) for name in ("Q8_0", "F32")] == [kernels, False]
    assert asked == [("Q8_0", "bfloat16"), ("F32", "bfloat16")] * kernels
    # Kernels that multiply few rows by stored bytes are those of the CPU.
    assert not any(on.multiplies_stored(name) for name in ("Q8_0", "Q4_K", "F32"))
    assert (on.few_rows, on.copied_at) == (0, 0)
    assert (on.workspace, on.pinned) == (placement.WORKSPACE, placement.PINNED)


@pytest.mark.parametrize("kernels", [False, True])
def test_a_cpu_multiplies_stored_blocks_by_its_kernels_alone(
    kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Kernels:
        KERNELS = ("Q8_0", "F32", "BF16")

    asked = ("float32", False)
    monkeypatch.setattr(placement, "kernels_apply", lambda *given: given == asked)
    monkeypatch.setattr(placement, "native_kernels", lambda: Kernels if kernels else None)
    for made, torch in ((placement.place_numpy, False), (placement.place_torch, True)):
        on = made("cpu", *asked)
        assert (on.torch, on.gpus, on.native) == (torch, (), kernels)
        found = [on.multiplies_stored(name) for name in ("Q8_0", "BF16", "Q4_K", "F32")]
        assert found == [kernels, kernels, False, False]  # float32 is read as it is
        assert not on.keeps_encoded("Q8_0") and on.few_rows and on.copied_at
        other = made("cpu", "float32", True)
        assert not other.native and not other.multiplies_stored("Q8_0")


@pytest.mark.parametrize(("device", "dtype"), [("cuda", "float32"), ("cpu", "bfloat16")])
def test_numpy_computes_on_the_cpu_in_its_own_types(device: str, dtype: str) -> None:
    with pytest.raises(BackendUnavailableError, match=f"^backend numpy: found {device}:{dtype}; "):
        placement.place_numpy(device, dtype, False)
    assert not placement.place_numpy("cpu", "float64", False).torch
