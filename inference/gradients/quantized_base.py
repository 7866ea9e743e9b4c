"""The frozen base of an adapter as bitsandbytes quantizes it, for gradients with another base."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aprfmt.arch.role_vocabulary import split_key
from aprfmt.base.encodings import ENCODINGS
from aprfmt.base.protocols import LazyTensor, TensorInfo
from aprfmt.codecs import decode, encode
from aprfmt.formats.mapped_file import MemoryTensor
from aprfmt.inference.gradients.changes import Parts, QuantizedBase
from aprfmt.model import Model
from aprfmt.tensors.view import View, decode_tensor

HEAD, TABLE = "output.weight", "token_embd.weight"
DTYPES = {"BF16": "bfloat16", "F16": "float16"}  # of a weight; else float32


@dataclass(frozen=True)
class CodedBlocks:
    """A flat weight as quantized: codes [blocks, elements], scales [blocks], values of the codes.

    A *block* is the elements that share a scale. `table` [16] has the value of each code.
    """

    codes: NDArray[np.int64]
    scales: NDArray[np.float32]
    table: NDArray[np.float32]

    @classmethod
    def of(
        cls, values: NDArray[np.float32], table: NDArray[np.float32], block: int
    ) -> "CodedBlocks":
        """Return the nearest codes of flat values [n] and their scales, by blocks of `block`.

        A block's scale is its largest absolute value. `table` has the values by code.
        """
        rows = values.reshape(-1, block)
        scales = np.abs(rows).max(axis=1)
        units = rows / np.where(scales == 0, 1, scales)[:, None]
        order = np.argsort(table, kind="stable")
        edges = (table[order][1:] + table[order][:-1]) / 2
        return cls(order[np.searchsorted(edges, units)], scales, table)

    def numbers(self) -> NDArray[np.float32]:
        """Return the values of the codes times the scales, flat."""
        found: NDArray[np.float32] = (self.table[self.codes] * self.scales[:, None]).reshape(-1)
        return found


def matrices(model: Model, parts: Parts = "layers") -> Iterator[tuple[str, View]]:
    """Yield (role key, view) of every matrix that QLoRA quantizes.

    These are the linear layers of attention and MLP, as transformers quantizes them: not the
    tables, norms, routers and stacked experts. With `parts` the output head is one of them, or the
    only one; a head that is tied is the table, and is not.
    """
    head, table = (model.roles.get(key) for key in (HEAD, TABLE))
    if parts != "layers" and head is not None and (table is None or head.names != table.names):
        yield HEAD, head
    if parts == "head":
        return
    for key, view in model.roles.items():
        layer, role = split_key(key)
        linear = role.startswith(("attn_", "ffn_")) and role.endswith(".weight")
        apart = "norm" in role or role.startswith("ffn_gate_inp")
        if layer is not None and linear and not apart and len(view.shape) == 2:
            yield key, view


def with_values(view: View, change: Callable[[LazyTensor], NDArray[np.float32]]) -> View:
    """Return a view whose stored tensors hold the numbers that `change` makes of each, as F32."""
    row = ENCODINGS["F32"]
    made = []
    for tensor in view.stored:
        name, shape = tensor.info.name, tensor.info.shape
        info = TensorInfo(name, shape, "F32", 0, row.nbytes(shape), row.row_bytes(shape))
        made.append(MemoryTensor(info, np.ascontiguousarray(change(tensor), np.float32).tobytes()))
    return View(*made, role=view.role, group=view.group, hp=view.sizes)


def quantized_matrices(
    model: Model, base: QuantizedBase
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Yield (role key, values in the role's layout) of every matrix that is quantized.

    Each stored tensor is quantized as a whole in the type that it has, and decoded again.
    """
    done: dict[tuple[str, ...], tuple[LazyTensor, ...]] = {}
    for key, view in matrices(model, base.parts):
        if view.names not in done:
            done = {
                view.names: with_values(view, lambda tensor: _quantize_tensor(tensor, base)).stored
            }
        again = View(*done[view.names], role=view.role, group=view.group, hp=view.sizes)
        yield key, again.numpy().astype(np.float32)


def _quantize_tensor(tensor: LazyTensor, base: QuantizedBase) -> NDArray[np.float32]:
    """Return a stored tensor's numbers quantized as `base` says and decoded, in its shape."""
    info = tensor.info
    options = {
        "blocksize": base.block,
        "double_quantization": base.nested,
        "dtype": DTYPES.get(info.encoding, "float32"),
    }
    values = np.ascontiguousarray(decode_tensor(tensor), np.float32)
    coded = encode(base.encoding, values, options=options)
    return np.ascontiguousarray(decode(base.encoding, coded, info.shape), np.float32)
