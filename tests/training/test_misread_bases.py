"""What the numbers of a weight say of how it was quantized to 4 bits.

Seen red, each alone: a block size of which the true one is a part; numbers near the 16 values taken
for quantized ones; the code of BF16 numbers looked for with the room of float32.
"""

import numpy as np
import pytest

from aprfmt.base.encodings import ENCODINGS
from aprfmt.base.protocols import TensorInfo
from aprfmt.codecs import decode, encode
from aprfmt.formats.mapped_file import MemoryTensor
from aprfmt.inference.gradients.misread_base import quantization_of
from tests.training.steps import rounded

SHAPE = (64, 128)


def stored(values: "np.ndarray[tuple[int, ...], np.dtype[np.float32]]", kind: str) -> MemoryTensor:
    """Return a tensor of float32 values [64, 128], as F32 or as BF16."""
    row = ENCODINGS[kind]
    data = values.tobytes()
    if kind == "BF16":
        data = (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    info = TensorInfo("w", SHAPE, kind, 0, row.nbytes(SHAPE), row.row_bytes(SHAPE))
    return MemoryTensor(info, data)


def weight() -> "np.ndarray[tuple[int, ...], np.dtype[np.float32]]":
    """Return normal values [64, 128]."""
    return np.random.default_rng(3).normal(0, 0.1, SHAPE).astype(np.float32)


@pytest.mark.parametrize("kind", ["F32", "BF16"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("block", [32, 64, 256])
@pytest.mark.parametrize("encoding", ["NF4", "FP4"])
def test_numbers_show_their_quantization(
    encoding: str, block: int, nested: bool, kind: str
) -> None:
    options = {"blocksize": block, "double_quantization": nested}
    values = np.asarray(decode(encoding, encode(encoding, weight(), options=options), SHAPE))
    values = rounded(values.astype(np.float32)) if kind == "BF16" else values
    found = quantization_of(stored(np.ascontiguousarray(values, np.float32), kind))
    assert found is not None and (found.encoding, found.block) == (encoding, block)


@pytest.mark.parametrize("kind", ["F32", "BF16"])
def test_other_numbers_show_none(kind: str) -> None:
    values = weight()
    assert quantization_of(stored(rounded(values) if kind == "BF16" else values, kind)) is None
    coded = encode("NF4", values, options={"blocksize": 64})
    near = np.asarray(decode("NF4", coded, SHAPE)) * (1 + 0.2 * weight())
    near = near.astype(np.float32)
    assert quantization_of(stored(rounded(near) if kind == "BF16" else near, kind)) is None
