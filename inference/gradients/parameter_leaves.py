"""A model's parameters as leaves of torch's graph, and their gradients as the file stores them."""

import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from aprfmt.arch.layout_steps import Added
from aprfmt.arch.recurrent_steps import NegativeExp
from aprfmt.arch.spec import LayoutStep
from aprfmt.errors import UnsupportedError
from aprfmt.inference.gradients.adapter_pairs import AdapterPair
from aprfmt.inference.gradients.backend import GradientBackend, PlacedPair
from aprfmt.inference.gradients.changes import RIGHT, BackwardChange
from aprfmt.inference.rows import as_floats
from aprfmt.inference.weights import Weights
from aprfmt.model import Model
from aprfmt.tensors.view import View, decode_tensor

Array = NDArray[Any]


class Leaves:
    """The weights of a model as leaves of torch's graph, placed where the pass looks for weights.

    `trained` are the stored names whose gradients are wanted, None for all. An expert of a stack is
    a view of its leaf. Roles of other names are placed frozen, by the pass itself.
    """

    def __init__(
        self,
        model: Model,
        weights: Weights,
        backend: GradientBackend,
        trained: "frozenset[str] | None" = None,
    ) -> None:
        """Place a leaf of every trained role in `weights`; on `meta`, frozen roles as well."""
        self._model = model
        self.leaves: dict[str, torch.Tensor] = {}
        for role, view in model.roles.items():
            frozen = trained is not None and not trained.intersection(view.names)
            if backend.device == "meta":
                leaf = backend.zeros(view.shape)
            elif frozen:
                continue  # the pass places it itself
            else:
                leaf = backend.array(as_floats(view.numpy()))
            if not frozen:
                leaf = leaf.detach().clone().requires_grad_()
                self.leaves[role] = leaf
            weights.holder.replace(role, backend, leaf)
            for i, part in enumerate(leaf.unbind() if _is_stack(role, view) else ()):
                weights.holder.replace(f"{role}[{i}]", backend, part)

    def gradients(self) -> dict[str, Array]:
        """Return {role: its gradient}, float64 numpy arrays, and clear the leaves' own.

        A role that the loss does not depend on is left out.
        """
        found = {}
        for role, leaf in self.leaves.items():
            if leaf.grad is not None:
                found[role] = leaf.grad.double().cpu().numpy()
                leaf.grad = None
        return found


def stored_gradients(
    views: Mapping[str, View], by_role: Mapping[str, Array]
) -> Iterator[tuple[str, Array]]:
    """Yield (stored name, gradient in the stored layout) for gradients by role.

    Roles that are stored together give one gradient; a role among them without one counts as zero.
    """
    done: set[str] = set()
    for role in by_role:
        if role in done:
            continue
        view = views[role]
        roles = view.roles or (role,)
        done.update(roles)
        logical = [by_role.get(each, np.zeros(views[each].shape)) for each in roles]
        yield from zip(view.names, stored_tensor_gradients(view, logical), strict=True)


def stored_tensor_gradients(view: View, logical: Sequence[Array]) -> list[Array]:
    """Return the gradients of a weight's stored tensors from those of the roles in them.

    `logical` are the roles' gradients. The derivative of every layout step is applied backward. A
    step that moves elements gives each stored element the gradient of the element it became. Of
    GGUF's two steps that change values, an added constant changes no gradient, and where -exp(x) is
    stored the gradient of x is divided by the stored value.
    """
    shapes = [[tuple(tensor.info.shape) for tensor in view.stored]]
    for step in view.layout:
        shapes.append(step.shapes(shapes[-1], view.sizes))
    arrays: Sequence[Array] = [
        np.asarray(x, np.float64).reshape(shape)
        for x, shape in zip(logical, shapes[-1], strict=True)
    ]
    for at in range(len(view.layout) - 1, -1, -1):
        arrays = _gradients_before_step(view, at, arrays, shapes[at])
    return list(arrays)


def _gradients_before_step(
    view: View, at: int, arrays: Sequence[Array], shapes: Sequence[tuple[int, ...]]
) -> Sequence[Array]:
    """Return the gradients before layout step number `at` from those after it.

    `shapes` are those of the arrays before the step. Raises UnsupportedError for a step that
    changes values and whose derivative is not known.
    """
    step = view.layout[at]
    if step.permutes:
        return moved_back(step, arrays, shapes, view.sizes)
    if isinstance(step, Added):
        return arrays
    if isinstance(step, NegativeExp):
        values: Sequence[Array] = [decode_tensor(tensor) for tensor in view.stored]
        for before in view.layout[:at]:
            values = before.undo(values, view.sizes)
        return [arrays[0] / np.asarray(values[0], np.float64)]
    raise UnsupportedError(
        f"{view.name}: stored through {step}, which changes values; its derivative is not known"
    )


def moved_back(
    step: LayoutStep,
    arrays: Sequence[Array],
    shapes: Sequence[tuple[int, ...]],
    sizes: Mapping[str, Any],
) -> list[Array]:
    """Return arrays of `shapes` with every element moved back to where it was before a layout step.

    `arrays` are in the layout that `step.undo` gives. `step.apply` is not used: it writes only one
    of the orientations that a file may have.
    """
    ends = np.cumsum([0, *(math.prod(shape) for shape in shapes)])
    places = step.undo(
        [
            np.arange(start, start + math.prod(shape)).reshape(shape)
            for start, shape in zip(ends, shapes, strict=False)
        ],
        sizes,
    )
    flat = np.zeros(int(ends[-1]))
    for place, array in zip(places, arrays, strict=True):
        flat[place.reshape(-1)] = array.reshape(-1)
    return [
        flat[start:stop].reshape(shape)
        for start, stop, shape in zip(ends, ends[1:], shapes, strict=False)
    ]


def _is_stack(role: str, view: View) -> bool:
    """Return whether a role's tensor is a stack: the matrices of all experts in one array."""
    return "_exps." in role or len(view.shape) > 2


def place_pairs(
    pairs: Sequence[AdapterPair],
    backend: GradientBackend,
    factors: MutableMapping[str, torch.Tensor],
    change: BackwardChange = RIGHT,
) -> Callable[[], None]:
    """Create a leaf of every LoRA factor in `factors`; return a function that uses them.

    `factors` are by stored name. The function sets `backend.pairs` from the leaves, by role. It
    has to run before every graph, as rows taken of a leaf are part of one. `change` is a mistake:
    it says how the factors are taken, and how often their product is in the frozen weight too.
    """
    for pair in pairs:
        values: tuple[Array, ...] = (pair.a, pair.b)
        if change.factors == "exchanged, gradients by name":
            values = (pair.b, pair.a)
        if pair.lengths is not None:
            values = (*values, pair.lengths)
        for name, each in zip(pair.names.values(), values, strict=True):
            factors[name] = backend.array(each).detach().clone().requires_grad_()

    def place() -> None:
        """Set `backend.pairs` to the LoRA pairs by role, taken from the leaves.

        The role of one projection in a fused weight gets that projection's rows of `b` and of the
        magnitudes.
        """
        placed = {}
        for pair in pairs:
            a, b, *more = (factors[name] for name in pair.names.values())
            if change.factors == "exchanged":
                a, b = b, a
            elif change.factors == "transposed":
                a, b = b.T, a.T
            for role, rows in pair.rows.items():
                at = torch.from_numpy(rows).to(b.device)
                lengths = more[0][at] if more else None
                merged = change.merged * pair.scale
                placed[role] = PlacedPair(
                    a, b[at], pair.scale, merged, lengths, change.lengths_in_graph
                )
        backend.pairs = placed

    return place
