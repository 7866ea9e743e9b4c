"""Value heads of delta nets in another order, in vectors with a value for each."""

import numpy as np

from aprfmt.compare import diff
from tests.conversion.folders import tensors_of
from tests.diagnosis import files
from tests.diagnosis.engines import tiny_folder


def test_sizes_that_an_architecture_lacks_make_no_hypothesis() -> None:
    """Seen red: "not tried: value_heads" of a Mamba, which has no value heads."""
    source = tiny_folder("mamba2")
    name = next(name for name in tensors_of(source) if name.endswith("conv1d.weight"))
    b = files.copy(source, "other-taps", tensors=files.edit(name, lambda x: np.tanh(x[::-1])))
    assert diff(source, b).not_tried == ()
