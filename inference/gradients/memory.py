"""What a backward pass takes, said before it runs: shapes alone, on torch's meta device."""

import math
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from aprfmt.inference.backends.base import ITEM_SIZES
from aprfmt.inference.batch import Batch
from aprfmt.inference.forward import Span
from aprfmt.inference.gradients.adapter_pairs import AdapterPair
from aprfmt.inference.gradients.backend import GradientBackend
from aprfmt.inference.gradients.batch_gradients import (
    Activations,
    Pass,
    PointGradients,
    as_new_leaves,
    prepare,
    tensors_of,
)
from aprfmt.inference.gradients.documents import Document, documents
from aprfmt.model import Model

# Bytes that torch's allocator keeps for cuBLAS on a GPU, for each pair of handle and stream; a
# handle is of one thread, and autograd's backward has its own. 32 MiB is the size on Hopper, the
# most; on older ones it is 8 MiB. Source: torch, notes/cuda.rst; CublasHandlePool.cpp.
WORKSPACE, THREADS = 32 << 20, 2
PASSING = 2  # of the largest array, what an operation's result and its gradient take besides


@dataclass(frozen=True)
class GradientMemory:
    """Bytes of a backward pass in one dtype.

    `weights` are all weights as the pass has them, `gradients` those of what trains, `activations`
    what the graph of the longest sequence holds, `points` the wanted points' gradients and values.
    `passing` is the working space of the largest operation, `workspaces` that of cuBLAS on a GPU,
    which no model changes.
    """

    weights: int
    gradients: int
    activations: int
    passing: int
    points: int
    workspaces: int = 0

    @property
    def peak(self) -> int:
        """The most bytes on the device at any time: the sum of all fields."""
        return (
            self.weights
            + self.gradients
            + self.activations
            + self.passing
            + self.points
            + self.workspaces
        )

    def to_json(self) -> dict[str, Any]:
        """Return {field: bytes}, with `peak`, as commands print it."""
        return asdict(self) | {"peak": self.peak}


class _Saved:
    """Counts what autograd saves for the backward, each storage once, weights left out."""

    def __init__(self, known: set[int]) -> None:
        """Begin with no bytes; `known` are the storages of weights, which are not counted."""
        self._known = known
        self._seen: set[int] = set()
        self.bytes = 0
        self.largest = 0

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """Add a tensor's storage to the bytes, once and if it is no weight's; return the tensor.

        It is the pack hook of torch.autograd.graph.saved_tensors_hooks.
        """
        where = x.untyped_storage()._cdata
        if where not in self._known and where not in self._seen:
            self._seen.add(where)
            self.bytes += x.untyped_storage().nbytes()
            self.largest = max(self.largest, x.untyped_storage().nbytes())
        return x


def gradient_memory(
    model: Model,
    batch: Batch,
    *,
    dtype: str = "float64",
    points: Collection[str] | None = (),
    trained: Collection[str] | None = None,
    pairs: Sequence[AdapterPair] = (),
    activations: Activations = "all",
    device: str = "cpu",
) -> GradientMemory:
    """Return the memory that `batch_gradients` with the same arguments takes on its device.

    Nothing is decoded or computed. Experts are taken to be chosen evenly.
    """
    backend = GradientBackend("meta", dtype)
    made, leaves, factors = prepare(model, backend, trained, pairs)
    longest = max(documents(batch), key=lambda each: len(each.ids))
    if points is None or points:
        made.recorder = PointGradients(points, backend)
    held = made.weights.holder.placed_tensors()
    known = {x.untyped_storage()._cdata for x in (*held, *factors.values())}
    size = ITEM_SIZES[dtype]
    roles = sum(math.prod(made.weights[role].shape) for role in model.roles)
    trains = sum(x.numel() for x in (*leaves.leaves.values(), *factors.values()))
    trains_held = sum(x.numel() for x in factors.values())
    saved = _stage_bytes(made, longest, known, activations)
    recorded = 0
    if made.recorder is not None:
        recorded = sum(x.numel() * 2 * size for x in made.recorder.held.values())
    many = len(documents(batch))
    made.weights.close()
    return GradientMemory(
        (roles + trains_held) * size,
        trains * size,
        saved.bytes,
        PASSING * max(saved.largest, roles and max(x.numel() for x in held) * size),
        recorded * many,
        THREADS * WORKSPACE if device.startswith("cuda") else 0,
    )


def _stage_bytes(
    made: Pass, document: Document, known: set[int], activations: Activations
) -> _Saved:
    """Return a counter with the bytes that autograd saves in a pass over one sequence.

    With `activations` "layer" it counts the largest stage, plus the inputs of all stages. `known`
    are the storages of weights, which are not counted.
    """
    labels = document.labels
    rows = [int(row) for row in range(len(labels)) if labels[row] >= 0 or made.recorder]
    made.rebuild()
    if activations == "all":
        saved = _Saved(known)
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda x: x):
            out = made.run(document, rows, Span(), record=True)
            torch.log_softmax(made.backend.wide(out), -1)
        return saved
    most = _Saved(known)
    streams, entering = 0, None
    for stage in range(int(made.model.hyper["n_layers"]) + 2):
        saved = _Saved(known)
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda x: x):
            out = made.run(document, rows, Span(stage, stage + 1, entering), record=True)
        entering = as_new_leaves(out)
        streams += sum(x.untyped_storage().nbytes() for x in tensors_of(entering))
        if saved.bytes > most.bytes:
            most = saved
    most.bytes += streams
    return most
