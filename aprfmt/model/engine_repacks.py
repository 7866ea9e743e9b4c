"""Layouts that an engine gives its weights after loading, for its kernels, and their undoing.

Each row of REPACKS is a plain permutation of the elements. A *state* is the weights that an engine
saved. Where every matrix of a kind has the layout, the engine made it; where only some have it,
they were loaded wrongly, and the state is compared as it is.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from aprfmt.arch.engine_parameters import EngineParameter, find_layout, role_base
from aprfmt.base.encodings import ENCODINGS
from aprfmt.base.protocols import LazyTensor, TensorInfo, Value
from aprfmt.errors import FormatError
from aprfmt.model.engine_tiles import (
    Shape,
    aiter_shape,
    amx_shape,
    join_trtllm_blocks,
    trtllm_blocks_shape,
    trtllm_rows_shape,
    undo_aiter_tiles,
    undo_amx_tiles,
    undo_trtllm_gates,
    undo_trtllm_rows,
)
from aprfmt.model.rank_tensors import (
    Cells,
    EngineReading,
    RankTensor,
    element_array,
    in_published_axes,
)

GATE_AND_UP = ["ffn_gate_exps", "ffn_up_exps"]
DOWN = "ffn_down_exps"
EXPERTS = "_exps"  # how the roles of experts' stacks end
ROUTER = "ffn_gate_inp"  # an engine may leave it as it is where it transposes the others


@dataclass(frozen=True)
class Repack:
    """A layout that an engine gives matrices: `says` describes it, `undo` undoes it.

    `kind(parameter)` returns what its matrices are called in a sentence ("matrices", "routers"), or
    "" for a parameter that never has this layout. `undo` returns a rank's array in the order in
    which it was loaded. `loaded_shape(shape, bytes of an element)` returns the shape that this
    order has, and raises ValueError for a shape that never has the layout. `source` is where the
    layout is documented. `axes` are the axes that it has more than the parameter.
    """

    says: str
    source: str
    kind: Callable[[EngineParameter], str]
    undo: Callable[[Cells], Cells]
    loaded_shape: Callable[[Shape, int], Shape]
    axes: int = 0


def _stacks_of_gate_and_up(parameter: EngineParameter) -> str:
    """Return "stacks of experts" for gate and up matrices of experts in one tensor; else "".

    The two must have equal sizes.
    """
    roles = [role_base(key) for key in parameter.keys]
    equal = len(set(parameter.shapes)) == 1 and parameter.axis == 1 and len(parameter.shape) == 3
    return "stacks of experts" if roles == GATE_AND_UP and equal else ""


def _stacks_of_experts(parameter: EngineParameter) -> str:
    """Return "stacks of experts" for experts' matrices with three axes; "" for other parameters."""
    experts = all(role_base(key).endswith(EXPERTS) for key in parameter.keys)
    return "stacks of experts" if experts and len(parameter.shape) == 3 else ""


def _stacks_of_down(parameter: EngineParameter) -> str:
    """Return "stacks of experts" for the down matrices of experts in one tensor; else ""."""
    down = [role_base(key) for key in parameter.keys] == [DOWN]
    return "stacks of experts" if down and len(parameter.shape) == 3 else ""


def _all_matrices(parameter: EngineParameter) -> str:
    """Return what a weight of layers, of experts or of the output is; "" for other parameters."""
    if [role_base(key) for key in parameter.keys] == ["output"]:
        return "output matrices"
    return _stacks_of_experts(parameter) or _dense_matrices(parameter)


def _dense_matrices(parameter: EngineParameter) -> str:
    """Return "routers" or "matrices" for two-dimensional weights of layers; "" for others."""
    layers = all(key.startswith("L") and key.endswith(".weight") for key in parameter.keys)
    if parameter.vocabulary or len(parameter.shape) != 2 or not layers:
        return ""
    return "routers" if role_base(parameter.keys[0]).startswith(ROUTER) else "matrices"


def _exchange_halves(array: Cells) -> Cells:
    """Return [experts, 2 * rows, ...] with the two halves of the rows exchanged."""
    halves = array.reshape(array.shape[0], 2, array.shape[1] // 2, *array.shape[2:])
    return halves[:, ::-1].reshape(array.shape)


def _same_shape(shape: Shape, size: int) -> Shape:
    """Return the shape of an array whose rows are exchanged: its own."""
    return shape


def _transposed_shape(shape: Shape, size: int) -> Shape:
    """Return a shape with its last two axes exchanged."""
    return (*shape[:-2], shape[-1], shape[-2])


def _transpose(array: Cells) -> Cells:
    """Return an array with its last two axes exchanged."""
    return np.swapaxes(array, -1, -2)


# Sources: vllm/model_executor/layers/quantization/ (utils/flashinfer_utils.py, fbgemm_fp8.py,
# compressed_tensors/schemes/compressed_tensors_w8a8_fp8.py), vllm_ascend/ops/fused_moe/, and
# sglang/srt/layers/quantization/ (unquant.py, fbgemm_fp8.py).
REPACKS = (
    Repack(
        "up before gate: right for FlashInfer's kernels, wrong for Triton's",
        "vLLM's swap_w13_to_w31, SGLang's load_up_proj_weight_first",
        _stacks_of_gate_and_up,
        _exchange_halves,
        _same_shape,
    ),
    Repack(
        "each expert's matrix as [in, out]: right for kernels of Ascend and of triton_kernels",
        "transpose(1, 2) of vLLM Ascend and SGLang's NPU, SGLang's use_triton_kernels",
        _stacks_of_experts,
        _transpose,
        _transposed_shape,
    ),
    Repack(
        "rows and columns exchanged, [in, out]: right for kernels of FP8 and INT8 that ask for it",
        "weight.t() of vLLM's compressed_tensors_w8a8_fp8 and fbgemm_fp8, SGLang's fbgemm_fp8",
        _dense_matrices,
        _transpose,
        _transposed_shape,
    ),
    Repack(
        "tiles of 16 rows and 32 columns: right for AITER's kernels",
        "AITER's shuffle_weight, which vLLM and SGLang call on ROCm",
        _all_matrices,
        undo_aiter_tiles,
        aiter_shape,
    ),
    Repack(
        "pairs of columns of 32 rows at a time: right for AMX, the matrix instructions of Intel",
        "convert_weight_packed of SGLang's and vLLM's kernels for CPUs",
        _all_matrices,
        undo_amx_tiles,
        amx_shape,
    ),
    Repack(
        "up before gate, rows in turn and exchanged in 32 at a time: right for TensorRT-LLM's FP8",
        "vLLM's rotate_weights_for_fi_trtllm_fp8_per_tensor_moe, after swap_w13_to_w31",
        _stacks_of_gate_and_up,
        undo_trtllm_gates,
        trtllm_rows_shape,
    ),
    Repack(
        "rows exchanged in 32 at a time: right for TensorRT-LLM's kernels of FP8",
        "vLLM's rotate_weights_for_fi_trtllm_fp8_per_tensor_moe",
        _stacks_of_down,
        undo_trtllm_rows,
        trtllm_rows_shape,
    ),
    Repack(
        "up before gate in blocks of 128 bytes: right for TensorRT-LLM's kernels",
        "convert_moe_weights_to_flashinfer_trtllm_block_layout of vLLM, after swap_w13_to_w31",
        _stacks_of_gate_and_up,
        lambda array: undo_trtllm_gates(join_trtllm_blocks(array)),
        trtllm_blocks_shape,
        axes=1,
    ),
    Repack(
        "blocks of 128 bytes: right for TensorRT-LLM's kernels",
        "convert_moe_weights_to_flashinfer_trtllm_block_layout of vLLM",
        _stacks_of_down,
        lambda array: undo_trtllm_rows(join_trtllm_blocks(array)),
        trtllm_blocks_shape,
        axes=1,
    ),
)


class RepackedTensor(LazyTensor):
    """A rank's tensor with an engine's layout undone when its bytes are read."""

    __slots__ = ("_held", "_repack", "info")

    info: TensorInfo
    makes = True

    def __init__(self, held: LazyTensor, repack: Repack) -> None:
        """Store the tensor and its layout; the shape is that of the elements as loaded.

        Raises ValueError where the tensor cannot have the layout.
        """
        size = max(1, held.info.nbytes // max(1, math.prod(held.info.shape)))
        shape = repack.loaded_shape(tuple(held.info.shape), size)
        nbytes = ENCODINGS[held.info.encoding].row_bytes(shape)
        self.info = replace(held.info, shape=shape, row_bytes=nbytes)
        self._held, self._repack = held, repack

    @property
    def made_of(self) -> tuple[LazyTensor, ...]:
        """The tensor as the engine holds it."""
        return (self._held,)

    def raw(self, start: int = 0, stop: int | None = None) -> memoryview:
        """Return bytes [start, stop) of the elements in the order that they were loaded in."""
        whole = memoryview(self._repack.undo(element_array(self._held)).tobytes())
        return whole[start : self.info.nbytes if stop is None else stop]

    def drop(self, start: int = 0, stop: int | None = None) -> None:
        """Release the pages of the tensor."""
        self._held.drop()


def undo_repacks(
    found: Iterable[tuple[Sequence[EngineParameter], RankTensor]],
    published: Mapping[str, LazyTensor],
    hyper: Mapping[str, Value],
) -> tuple[dict[str, RankTensor], list[str]]:
    """Return ({name: tensor in the published layout}, sentences on the layouts that were undone).

    They are an engine's tensors of kinds that it stored in another layout. `found` are all of its
    tensors, each with the parameters that it may be; `published` is the model's tensors by name.
    Both results are empty if every tensor is in the layout as loaded.
    """
    rows = list(found)
    undone: dict[str, RankTensor] = {}
    said = []
    for repack in REPACKS:
        left = [row for row in rows if row[1].name not in undone and not row[0][0].megatron]
        for kind, held in _kinds_that_may_be_in(repack, left).items():
            if _all_in_layout(repack, held, published, hyper):
                undone |= {whole.name: _with_layout_undone(repack, whole) for _, whole in held}
                said.append(f"{len(held)} {kind[0]} hold {repack.says} ({repack.source})")
    return undone, said


def _kinds_that_may_be_in(
    repack: Repack, rows: Iterable[tuple[Sequence[EngineParameter], RankTensor]]
) -> dict[tuple[str, str, str], list[tuple[Sequence[EngineParameter], RankTensor]]]:
    """Return the tensors of `rows` that may have a layout, by kind, encoding and part of a stack.

    A kind is left out of which one tensor has the parameter's own axes, if the layout has more.
    """
    kinds: dict[tuple[str, str, str], list[tuple[Sequence[EngineParameter], RankTensor]]] = {}
    plain = set()
    for parameters, whole in rows:
        kind = repack.kind(parameters[0])
        leaf = whole.name.rpartition("_")[2] if kind == "stacks of experts" else ""
        key = (kind, whole.parts[0].info.encoding, leaf)
        if kind and _may_be_in(repack, parameters[0], whole):
            kinds.setdefault(key, []).append((parameters, whole))
        elif kind and repack.axes and len(whole.shape) == len(parameters[0].shape):
            plain.add(key)
    return {key: held for key, held in kinds.items() if key not in plain}


def _may_be_in(repack: Repack, parameter: EngineParameter, whole: RankTensor) -> bool:
    """Return whether a state's tensor has axes and sizes with which an engine uses a layout."""
    if len(whole.shape) != len(parameter.shape) + repack.axes:
        return False
    try:
        _with_layout_undone(repack, whole)
    except ValueError:
        return False
    return True


def _all_in_layout(
    repack: Repack,
    held: Sequence[tuple[Sequence[EngineParameter], RankTensor]],
    published: Mapping[str, LazyTensor],
    hyper: Mapping[str, Value],
) -> bool:
    """Return whether an engine stores all its tensors of one kind in the layout `repack`.

    `held` are the engine's tensors with their published parameters. None may equal the published
    tensor as stored only, and more than half must equal it once the layout is undone. The others
    have other values in either layout, and are compared later.
    """
    equal, left = 0, len(held)
    for parameters, whole in held:
        as_held = _is_published(parameters, whole, published, hyper)
        without = _is_published(parameters, _with_layout_undone(repack, whole), published, hyper)
        if as_held and not without:
            return False
        equal, left = equal + (without and not as_held), left - 1
        if 2 * (equal + left) <= len(held):
            return False
    return True


def _with_layout_undone(repack: Repack, whole: RankTensor) -> RankTensor:
    """Return a state's tensor with the layout undone on every rank.

    Raises ValueError where it cannot have the layout.
    """
    parts = tuple(RepackedTensor(part, repack) for part in whole.parts)
    return RankTensor(whole.name, parts, whole.ranks)


def _is_published(
    parameters: Sequence[EngineParameter],
    whole: RankTensor,
    published: Mapping[str, LazyTensor],
    hyper: Mapping[str, Value],
) -> bool:
    """Return whether a state's tensor, read as one of `parameters`, has the published bytes."""
    for parameter in parameters:
        local = in_published_axes(whole.shape, parameter.shape)
        layout = find_layout(parameter, local, len(whole.parts))
        stored = [published[name].info.encoding for one in parameter.parts for name in one.stored]
        if layout is None or set(stored) != {part.info.encoding for part in whole.parts}:
            continue
        reading = EngineReading(parameter, whole, layout)
        try:
            if all(
                made.tobytes() == bytes(published[name].raw())
                for part in parameter.parts
                for name, made in zip(
                    part.stored, reading.published_tensors(part, hyper), strict=True
                )
            ):
                return True
        except FormatError:
            continue  # a block encoding, whose elements have no bytes of their own
    return False
