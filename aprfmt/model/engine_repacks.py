"""Layouts that an engine gives its weights after loading, for its kernels, and their undoing.

Each row of REPACKS is a plain permutation of the elements. A *state* is the weights that an engine
saved. Where every matrix of a kind has the layout, the engine made it; where only some have it,
they were loaded wrongly, and the state is compared as it is.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from aprfmt.arch.engine_parameters import EngineParameter, find_layout, role_base
from aprfmt.base.encodings import ENCODINGS
from aprfmt.base.protocols import LazyTensor, TensorInfo, Value
from aprfmt.errors import FormatError
from aprfmt.model.rank_tensors import (
    Cells,
    EngineReading,
    RankTensor,
    element_array,
    in_published_axes,
)

GATE_AND_UP = ["ffn_gate_exps", "ffn_up_exps"]
EXPERTS = "_exps"  # how the roles of experts' stacks end
ROUTER = "ffn_gate_inp"  # an engine may leave it as it is where it transposes the others


@dataclass(frozen=True)
class Repack:
    """A layout that an engine gives matrices: `says` describes it, `undo` undoes it.

    `kind(parameter)` returns what its matrices are called in a sentence ("matrices", "routers"), or
    "" for a parameter that never has this layout. `undo` returns a rank's array in the order in
    which it was loaded. `source` is where the layout is documented.
    """

    says: str
    source: str
    kind: Callable[[EngineParameter], str]
    undo: Callable[[Cells], Cells]


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
    ),
    Repack(
        "each expert's matrix as [in, out]: right for kernels of Ascend and of triton_kernels",
        "transpose(1, 2) of vLLM Ascend and SGLang's NPU, SGLang's use_triton_kernels",
        _stacks_of_experts,
        _transpose,
    ),
    Repack(
        "rows and columns exchanged, [in, out]: right for kernels of FP8 and INT8 that ask for it",
        "weight.t() of vLLM's compressed_tensors_w8a8_fp8 and fbgemm_fp8, SGLang's fbgemm_fp8",
        _dense_matrices,
        _transpose,
    ),
)


class RepackedTensor(LazyTensor):
    """A rank's tensor with an engine's layout undone when its bytes are read."""

    __slots__ = ("_held", "_undo", "info")

    info: TensorInfo
    makes = True

    def __init__(self, held: LazyTensor, undo: Callable[[Cells], Cells]) -> None:
        """Store the tensor and how its layout is undone; its shape is that of the result."""
        shape = undo(np.broadcast_to(np.zeros((), np.bool_), held.info.shape)).shape
        nbytes = ENCODINGS[held.info.encoding].row_bytes(shape)
        self.info = replace(held.info, shape=shape, row_bytes=nbytes)
        self._held, self._undo = held, undo

    @property
    def made_of(self) -> tuple[LazyTensor, ...]:
        """The tensor as the engine holds it."""
        return (self._held,)

    def raw(self, start: int = 0, stop: int | None = None) -> memoryview:
        """Return bytes [start, stop) of the elements in the order that they were loaded in."""
        whole = memoryview(self._undo(element_array(self._held)).tobytes())
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
        kinds: dict[tuple[str, str, str], list[tuple[Sequence[EngineParameter], RankTensor]]] = {}
        for parameters, whole in rows:
            same_axes = len(whole.shape) == len(parameters[0].shape)
            kind = repack.kind(parameters[0]) if same_axes else ""
            if kind and not parameters[0].megatron and whole.name not in undone:
                info = whole.parts[0].info
                leaf = whole.name.rpartition("_")[2] if kind == "stacks of experts" else ""
                kinds.setdefault((kind, info.encoding, leaf), []).append((parameters, whole))
        for (kind, *_), held in kinds.items():
            if _all_in_layout(repack, held, published, hyper):
                undone |= {whole.name: _with_layout_undone(repack, whole) for _, whole in held}
                said.append(f"{len(held)} {kind} hold {repack.says} ({repack.source})")
    return undone, said


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
    """Return a state's tensor with the layout undone on every rank."""
    parts = tuple(RepackedTensor(part, repack.undo) for part in whole.parts)
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
