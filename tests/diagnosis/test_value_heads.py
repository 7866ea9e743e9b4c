"""Value heads of delta nets in another order, in vectors with a value for each."""

import numpy as np
import pytest

from aprfmt.compare import diff
from tests.conversion.folders import tensors_of
from tests.diagnosis import files
from tests.diagnosis.engines import tiny_folder

# Six value heads of two key heads, and what B has of A's: numbers of places, or other values.
HEADS: dict[str, tuple[list[float], list[int] | list[float], str]] = {
    "tiled, two differ": (
        [-2.0, -2.6875, -3.1875, -2.6875, -2.6875, -0.75],
        [0, 3, 1, 4, 2, 5],
        "value_heads",
    ),
    "two exchanged": (
        [-2.0, -2.6875, -3.1875, -1.5, -2.5, -0.75],
        [0, 2, 1, 3, 4, 5],
        "row_offset",
    ),
    "one other": (
        [-2.0, -2.6875, -3.1875, -1.5, -2.5, -0.75],
        [-2.0, -2.6875, -3.25, -1.5, -2.5, -0.75],
        "bit_rot",
    ),
}


@pytest.mark.parametrize("case", HEADS)
def test_exchanged_values_of_a_short_vector_are_no_damage(case: str) -> None:
    """Seen red: "2 bits in 2 bytes differ: damage or an edit" of two heads that are tiled."""
    held, made, cause = HEADS[case]
    x, y = np.array(held, np.float32), np.array(made)
    y = x[y] if y.dtype.kind == "i" else y.astype(np.float32)
    source = tiny_folder("qwen3_5")
    name = "model.layers.0.linear_attn.dt_bias"
    a, b = (
        files.copy(source, f"heads-{case}-{label}", tensors=files.edit(name, lambda _, v=v: v))  # type: ignore[misc]
        for label, v in (("a", x), ("b", y))
    )
    report = diff(a, b)
    assert [finding.cause for finding in report.findings] == [cause]


def test_sizes_that_an_architecture_lacks_make_no_hypothesis() -> None:
    """Seen red: "not tried: value_heads" of a Mamba, which has no value heads."""
    source = tiny_folder("mamba2")
    name = next(name for name in tensors_of(source) if name.endswith("conv1d.weight"))
    b = files.copy(source, "other-taps", tensors=files.edit(name, lambda x: np.tanh(x[::-1])))
    assert diff(source, b).not_tried == ()
