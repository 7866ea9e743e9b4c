"""A frozen base of 4 bits as a backward pass decodes it that reads its scales or codes wrongly."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from aprfmt.base.protocols import LazyTensor
from aprfmt.codecs import codec
from aprfmt.codecs.bnb4 import BLOCK_SIZES, Bnb4Codec
from aprfmt.inference.gradients.changes import Misreading, QuantizedBase
from aprfmt.inference.gradients.quantized_base import CodedBlocks, matrices, with_values
from aprfmt.measure.encoding_noise import UNIT
from aprfmt.model import Model
from aprfmt.tensors.view import decode_tensor

Floats = NDArray[np.float32]
FIRST = 64  # elements under one scale, unless they show another count


def base_quantization(model: Model) -> QuantizedBase | None:
    """Return how the matrices of a model's layers were quantized; None where they were not.

    The numbers of the first matrix tell it: each is a scale times one of 16 values.
    """
    for _, view in matrices(model):
        return quantization_of(view.stored[0])
    return None


def quantization_of(tensor: LazyTensor) -> QuantizedBase | None:
    """Return the encoding and block size that a tensor's numbers show; None if they show none."""
    values = decode_tensor(tensor).astype(np.float32).reshape(-1)
    room = 4 * max(UNIT.get(tensor.info.encoding, 0.0), UNIT["F32"])
    for block in sorted(BLOCK_SIZES, key=lambda size: (size != FIRST, size)):
        if values.size % block:
            continue
        for encoding in ("NF4", "FP4"):
            blocks = CodedBlocks.of(values, _values_of(encoding), block)
            if (np.abs(blocks.numbers() - values) <= room * np.abs(values)).all():
                return QuantizedBase(encoding, block)
    return None


def _values_of(encoding: str) -> Floats:
    """Return the 16 values of NF4 or FP4 by code, float32."""
    found = codec(encoding)
    assert isinstance(found, Bnb4Codec)
    return found.code


def misread_matrices(model: Model, misreading: Misreading) -> Iterator[tuple[str, Floats]]:
    """Yield (role key, values in the role's layout) of every matrix that is read wrongly.

    Nothing for a base that is not quantized.
    """
    base = base_quantization(model)
    if base is None:
        return
    other = "FP4" if base.encoding == "NF4" else "NF4"

    def misread(tensor: LazyTensor) -> Floats:
        """Return a quantized matrix as the mistake `misreading` reads it, float32 in its shape."""
        values = decode_tensor(tensor).astype(np.float32)
        blocks = CodedBlocks.of(values.reshape(-1), _values_of(base.encoding), base.block)
        scales = blocks.scales
        if misreading == "scales without their offset":
            scales = scales - scales.mean()
        elif misreading == "scales of the block before":
            scales = np.roll(scales, 1)
        elif misreading == "scales of the block after":
            scales = np.roll(scales, -1)
        elif misreading == "one scale for all blocks":
            scales = np.full_like(scales, scales.max())
        codes = blocks.codes
        if misreading == "codes of a byte exchanged":
            codes = codes.reshape(-1, 2)[:, ::-1].reshape(codes.shape)
        table = _values_of(other) if misreading == "codes of the other encoding" else blocks.table
        return CodedBlocks(codes, scales, table).numbers().reshape(values.shape)

    for key, view in matrices(model):
        again = with_values(view, misread)
        yield key, again.numpy().astype(np.float32)
