"""The frozen base of an adapter as bitsandbytes quantizes it, for gradients beside another base."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from aprfmt.arch.role_vocabulary import split_key
from aprfmt.base.encodings import ENCODINGS
from aprfmt.base.protocols import LazyTensor, TensorInfo
from aprfmt.codecs import decode, encode
from aprfmt.formats.mapped_file import MemoryTensor
from aprfmt.inference.gradients.changes import QuantizedBase
from aprfmt.model import Model
from aprfmt.tensors.view import View, decode_tensor

DTYPES = {"BF16": "bfloat16", "F16": "float16"}  # of a weight; else float32


def quantized_matrices(
    model: Model, base: QuantizedBase
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Yield (role key, values in the role's layout) of every matrix that is quantized.

    These are the linear layers of attention and MLP, as transformers quantizes them: not the
    tables, the head, norms, routers and stacked experts. Each stored tensor is quantized as a
    whole in the type that it has, and decoded again.
    """
    done: dict[tuple[str, ...], list[LazyTensor]] = {}
    for key, view in model.roles.items():
        layer, role = split_key(key)
        linear = role.startswith(("attn_", "ffn_")) and role.endswith(".weight")
        apart = "norm" in role or role.startswith("ffn_gate_inp")
        if layer is None or not linear or apart or len(view.shape) != 2:
            continue
        if view.names not in done:
            done = {view.names: [_quantized(tensor, base) for tensor in view.stored]}
        again = View(*done[view.names], role=view.role, group=view.group, hp=view.sizes)
        yield key, again.numpy().astype(np.float32)


def _quantized(tensor: LazyTensor, base: QuantizedBase) -> MemoryTensor:
    """Return a stored tensor quantized as `base` says and decoded, as F32 under its name."""
    info, row = tensor.info, ENCODINGS["F32"]
    options = {
        "blocksize": base.block,
        "double_quantization": base.nested,
        "dtype": DTYPES.get(info.encoding, "float32"),
    }
    values = np.ascontiguousarray(decode_tensor(tensor), np.float32)
    coded = encode(base.encoding, values, options=options)
    found = np.ascontiguousarray(decode(base.encoding, coded, info.shape), np.float32)
    made = TensorInfo(
        info.name, info.shape, "F32", 0, row.nbytes(info.shape), row.row_bytes(info.shape)
    )
    return MemoryTensor(made, found.tobytes())
