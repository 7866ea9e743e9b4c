"""The loss of a trainer's batch and its gradients, by torch's autograd through the own pass.

A *document* is one sequence of the batch. A *leaf* is a tensor of torch's graph that gets a
gradient. A *stage* is the embedding, one layer, or the head.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from aprfmt.errors import UsageError
from aprfmt.inference.batch import Batch
from aprfmt.inference.capture import key_name
from aprfmt.inference.context import PassFacts, PassState, Recorder
from aprfmt.inference.forward import Span, StageOutput
from aprfmt.inference.gradients.adapter_pairs import AdapterPair
from aprfmt.inference.gradients.backend import TABLE, GradientBackend
from aprfmt.inference.gradients.changed_backend import ChangedBackend
from aprfmt.inference.gradients.changes import RIGHT, BackwardChange
from aprfmt.inference.gradients.documents import (
    Document,
    Reduction,
    documents,
    join_documents,
    routers,
)
from aprfmt.inference.gradients.finite_weights import check_finite_base
from aprfmt.inference.gradients.misread_base import misread_matrices
from aprfmt.inference.gradients.parameter_leaves import Leaves, place_pairs, stored_gradients
from aprfmt.inference.gradients.quantized_base import quantized_matrices
from aprfmt.inference.gradients.router_loss import RouterCounts, RouterTerms
from aprfmt.inference.session import load_forward
from aprfmt.inference.weights import Weights, model_weights
from aprfmt.model import Model
from aprfmt.model.completeness import check_predicts, check_runnable
from aprfmt.tensors.view import View

Array = NDArray[Any]
Activations = Literal["all", "layer"]


@dataclass(frozen=True)  # no slots: `parameters` is cached
class BatchGradients:
    """The loss in nats and its gradients, float64 arrays whatever dtype the pass was in.

    `by_role` are by role key in the role's layout, [out, in]; `adapter` those of LoRA factors by
    the adapter's stored names, and `factors` says which key each has: the role of its weight with
    `.lora_a` or `.lora_b` after it. `unreached` are keys whose parameter trains and that the loss
    does not depend on: their gradient is zero, and in no mapping. `points` are dL/d(point) by key,
    and `values` the points themselves, the rows of all documents one after the other. `dtype` and
    `device` are the pass's, `scored` the labels. `padding` is (row of the padding token in the
    embedding table, the part [width] of its gradient that comes of reading the row), None without.
    """

    loss: float
    scored: int
    by_role: Mapping[str, Array]
    adapter: Mapping[str, Array]
    factors: Mapping[str, str]
    unreached: tuple[str, ...]
    points: Mapping[str, Array]
    values: Mapping[str, Array]
    dtype: str
    device: str
    views: Mapping[str, View]
    padding: tuple[int, Array] | None = None

    @cached_property
    def parameters(self) -> Mapping[str, Array]:
        """{stored name: gradient} of all parameters, in the stored layout.

        A quantized tensor's gradient is that of its decoded numbers. The mapping has to be read
        while the model is open.
        """
        found: dict[str, Array] = {}
        for name, gradient in stored_gradients(self.views, self.by_role):
            found[name] = found[name] + gradient if name in found else gradient
        return found

    @property
    def norm(self) -> float:
        """The L2 norm of all gradients together, before any clipping."""
        every = (*self.by_role.values(), *self.adapter.values())
        return float(np.sqrt(sum(float(np.vdot(g, g)) for g in every)))

    @property
    def how(self) -> str:
        """Where and in which arithmetic the gradients were computed: `torch:cpu:float64`."""
        return f"torch:{self.device}:{self.dtype}"

    @cached_property
    def keys(self) -> Collection[str]:
        """The keys of all parameters that have a gradient: roles, and LoRA factors."""
        return {**self.by_role, **self.factors}.keys()

    def gradient(self, key: str) -> Array:
        """Return dL/dW of a parameter, float64 in the role's shape; KeyError for an unknown key."""
        return self.adapter[self.factors[key]] if key in self.factors else self.by_role[key]

    def gradient_near(self, key: str, given: Array) -> Array:
        """Return dL/dW of a parameter by the convention that the trainer's `given` one follows.

        torch's embedding with a `padding_idx`, as most models of transformers have it, passes no
        gradient to the row that it reads for the padding token. Other trainers do. Both ways are
        right: the one is taken that is nearer to the row of `given`. KeyError for an unknown key.
        """
        found = self.gradient(key)
        if key != TABLE or self.padding is None:
            return found
        row, part = self.padding
        without = found[row] - part
        theirs = given.reshape(found.shape)[row]
        if not np.linalg.norm(theirs - without) < np.linalg.norm(theirs - found[row]):
            return found
        made = found.copy()
        made[row] = without
        return made


class PointGradients:
    """A recorder that holds every wanted point in the graph, for its gradient after the backward.

    `wanted` are keys of points; None: all of them.
    """

    def __init__(self, wanted: Collection[str] | None, backend: GradientBackend) -> None:
        """Begin without points; `wanted` are the keys to record, None for all."""
        self._wanted = None if wanted is None else frozenset(wanted)
        self._backend = backend
        self.held: dict[str, torch.Tensor] = {}
        self.points: dict[str, list[torch.Tensor]] = {}
        self.values: dict[str, list[torch.Tensor]] = {}

    def begin(self, facts: PassFacts) -> None:
        """Do nothing at the start of a pass, as a backward may run one stage by stage."""

    def wants(self, point: str, layer: int) -> bool:
        """Return whether the gradient of a capture point in this layer is wanted."""
        return self._wanted is None or key_name(point, layer) in self._wanted

    def capture(self, point: str, layer: int, x: Any) -> Any:
        """Hold a capture point's tensor for its gradient, and return what the pass goes on with.

        The pass goes on with the tensor, or with a leaf of the same values if the tensor depends on
        no leaf. Chosen experts are integers: their ids are held as values.
        """
        if point == "experts" and torch.is_grad_enabled():
            self.values.setdefault(key_name(point, layer), []).append(torch.as_tensor(x))
        if not (isinstance(x, torch.Tensor) and x.is_floating_point() and torch.is_grad_enabled()):
            return x
        if x.requires_grad:
            x.retain_grad()
        else:
            x = x.detach().requires_grad_()
        self.held[key_name(point, layer)] = x
        return x

    def finish(self) -> None:
        """Move gradients and values of the ended pass to `points` and `values`.

        They stay on the device, in its dtype. A point without a gradient is left out.
        """
        for key, x in self.held.items():
            if x.grad is not None:
                self.points.setdefault(key, []).append(x.grad)
                self.values.setdefault(key, []).append(x.detach())
        self.held.clear()

    def joined(self) -> tuple[dict[str, Array], dict[str, Array]]:
        """Return ({key: gradient}, {key: value}) as numpy arrays, the documents' rows joined.

        Attention's scores and probabilities [heads, tokens, keys] are joined for one document only:
        of several they are flattened, document by document.
        """
        return tuple(  # type: ignore[return-value]
            {
                key: join_documents([_to_host(part) for part in parts])
                for key, parts in found.items()
            }
            for found in (self.points, self.values)
        )


def _to_host(x: torch.Tensor) -> Array:
    """Return a tensor as a numpy array, floats as float64."""
    found: Array = (x.double() if x.is_floating_point() else x).cpu().numpy()
    return found


@dataclass
class Pass:
    """What a backward runs: a model's pass on a backend, with the leaves placed.

    `rebuild` computes again what the graph has between leaves and weights (rows of LoRA factors).
    `change` says what the loss has besides cross-entropy, and `routers` adds the auxiliary losses
    of routers.
    """

    model: Model
    backend: GradientBackend
    weights: Weights
    recorder: PointGradients | None = None
    rebuild: Callable[[], None] = field(default=lambda: None)
    change: BackwardChange = RIGHT
    routers: RouterTerms | None = None

    def run(
        self,
        document: Document,
        rows: Sequence[int],
        span: Span,
        *,
        record: bool,
        recorder: Recorder | None = None,
    ) -> Any:
        """Return the logits [rows, vocab], or what leaves the last stage of `span`.

        `rows` are the tokens whose logits are wanted. `record`: capture points go to `recorder`, or
        to that of the pass.
        """
        model = self.model
        self.backend.document = document
        return load_forward(model.spec)(
            self.backend,
            model.spec,
            model.hyper,
            self.weights,
            document.ids,
            positions=document.positions,
            recorder=(recorder or self.routers or self.recorder) if record else None,
            logits_rows=rows,
            span=span,
        )

    def backward(self, document: Document, activations: Activations) -> float:
        """Add a document's gradients to the leaves; return what it adds to the batch's loss.

        With `activations` "layer" one layer's graph is in memory at a time.
        """
        scored = range(len(document.ids)) if self.recorder else np.flatnonzero(document.labels >= 0)
        rows = [int(row) for row in scored] or [0]  # a pass of no label still has routers
        stages = int(self.model.hyper["n_layers"]) + 2
        if activations == "all":
            self.rebuild()
            loss = self._loss(self.run(document, rows, Span(), record=True), document, rows)
            term = None if self.routers is None else self.routers.taken()
            whole = loss if term is None else loss + term.to(loss)
            whole.backward()  # type: ignore[no-untyped-call]
        else:
            loss = self._by_layer(document, rows, stages)
        if self.recorder is not None:
            self.recorder.finish()
        return float(loss.detach())

    def _loss(self, logits: torch.Tensor, document: Document, rows: Sequence[int]) -> torch.Tensor:
        """Return what a document adds to the batch's loss, from the logits of the tokens `rows`."""
        labels = torch.from_numpy(document.labels[list(rows)]).to(logits.device)
        wide = self.backend.wide(logits)
        reduction = "sum" if document.factors is None else "none"
        nats = functional.cross_entropy(
            wide,
            labels,
            ignore_index=-100,
            reduction=reduction,
            label_smoothing=self.change.smoothing,
        )
        if document.factors is not None:
            factors = torch.from_numpy(document.factors[list(rows)])
            nats = (nats * factors.to(nats)).sum()
        if self.change.z_loss:
            nats = nats + self.change.z_loss * wide[labels >= 0].logsumexp(-1).square().sum()
        return nats * document.weight

    def _by_layer(self, document: Document, rows: Sequence[int], stages: int) -> torch.Tensor:
        """Run the backward stage by stage; return what the document adds to the batch's loss.

        First all stages run without a graph, and their inputs are stored. Then each stage, the last
        one first, runs again from its input, with a graph.
        """
        entering: list[Any] = [None]
        with torch.no_grad():
            self.rebuild()
            for stage in range(stages - 1):
                span = Span(stage, stage + 1, entering[-1])
                entering.append(self.run(document, rows, span, record=False))
        total: torch.Tensor | None = None
        wanted: list[torch.Tensor | None] = []
        for stage in range(stages - 1, -1, -1):
            given = as_new_leaves(entering.pop())
            self.rebuild()
            out = self.run(document, rows, Span(stage, stage + 1, given), record=True)
            term = None if self.routers is None else self.routers.taken()
            if total is None:
                total = self._loss(out, document, rows)
                total.backward()  # type: ignore[no-untyped-call]
            else:
                pairs = [
                    (x, grad)
                    for x, grad in zip(tensors_of(out), wanted, strict=True)
                    if grad is not None and x.requires_grad
                ]
                ends, grads = [x for x, _ in pairs], [grad for _, grad in pairs]
                if term is not None and term.requires_grad:
                    ends, grads = [*ends, term], [*grads, torch.ones_like(term)]
                if ends:
                    torch.autograd.backward(ends, grads)
            wanted = [x.grad for x in tensors_of(given)]
        assert total is not None
        return total


def as_new_leaves(entering: Any) -> Any:
    """Return the tensors that enter a stage as new leaves, detached from the graph.

    None for None.
    """

    def leaf(x: torch.Tensor) -> torch.Tensor:
        """Return a tensor detached from its graph, as a leaf that gets a gradient."""
        return x.detach().requires_grad_()

    if isinstance(entering, StageOutput):
        state = entering.state
        shared = {at: (leaf(k), leaf(v)) for at, (k, v) in state.shared.items()}
        given = None if state.per_layer is None else leaf(state.per_layer)
        return StageOutput(leaf(entering.stream), PassState(given, shared))
    return None if entering is None else leaf(entering)


def tensors_of(carried: Any) -> list[torch.Tensor]:
    """Return the tensors between two stages as a list, in a fixed order; [] for None."""
    if carried is None:
        return []
    if not isinstance(carried, StageOutput):
        return [carried]
    state = carried.state
    given = [] if state.per_layer is None else [state.per_layer]
    return [carried.stream, *given, *(x for at in sorted(state.shared) for x in state.shared[at])]


def batch_gradients(
    model: Model,
    batch: Batch,
    *,
    device: str = "cpu",
    dtype: str = "float64",
    points: Collection[str] | None = (),
    trained: Collection[str] | None = None,
    pairs: Sequence[AdapterPair] = (),
    reduction: Reduction = "tokens",
    activations: Activations = "all",
    backend: GradientBackend | None = None,
    change: BackwardChange = RIGHT,
) -> BatchGradients:
    """Return the loss of a batch and its gradients.

    `points` are the keys of capture points whose gradients are wanted too, None for all. `trained`
    are the stored names of the parameters that train. None: all, or if there are `pairs` (an
    adapter's LoRA pairs) these alone. `activations` "layer" holds those of one layer at a time and
    runs every layer twice. `backend` is used in place of `device` and `dtype`. `change` is a
    mistake that the backward makes.

    The loss is that of the labels alone; auxiliary losses of routers that the batch states, or the
    mistake, are in the gradients. Raises UsageError for a batch without labels, or one that states
    a loss of routers of a model without them, and ArchError for a model that cannot be run.
    """
    check_runnable(model.resolution, model.path)
    check_predicts(model.spec, str(model.path))
    parts = documents(batch, reduction, change)
    if backend is None:
        right = not (
            change.is_of_backward or change.norm_tokens is not None or change.hides_padding
        )
        backend = GradientBackend(device, dtype) if right else ChangedBackend(device, dtype, change)
    made, leaves, factors = prepare(model, backend, trained, pairs, change)
    backend.padding_id, backend.padding = padding_id(model), None
    made.change = change
    if points is None or points:
        made.recorder = PointGradients(points, backend)
    losses = routers(batch, change)
    if losses.any:
        made.routers = RouterTerms(losses, _router_counts(made, parts), made.recorder)
    loss = sum(made.backward(each, activations) for each in parts)
    # Gradients of the roles, of the LoRA factors, and of the capture points.
    by_role = leaves.gradients()
    unreached = [role for role in leaves.leaves if role not in by_role]
    adapter: dict[str, Array] = {}
    keys: dict[str, str] = {}
    for pair in pairs:
        for key, name in pair.names.items():
            grad = factors[name].grad
            if grad is None:
                unreached.append(key)
            else:
                adapter[name], keys[key] = grad.double().cpu().numpy(), name
    found, values = ({}, {}) if made.recorder is None else made.recorder.joined()
    made.weights.close()
    if not all(np.isfinite(each).all() for each in (loss, *by_role.values(), *adapter.values())):
        check_finite_base(model)
    scored = sum(int((each.labels >= 0).sum()) for each in parts)
    return BatchGradients(
        loss,
        scored,
        by_role,
        adapter,
        keys,
        tuple(unreached),
        found,
        values,
        backend.dtype,
        backend.device,
        dict(model.roles),
        None
        if backend.padding is None or backend.padding_id is None
        else (backend.padding_id, _to_host(backend.padding)),
    )


def padding_id(model: Model) -> int | None:
    """Return the id of the padding token that a model's configuration states; None for none."""
    config = model.config or {}
    found = config.get("pad_token_id")
    return found if type(found) is int and found >= 0 else None


def _router_counts(made: Pass, parts: Sequence[Document]) -> RouterCounts:
    """Return how many tokens of all documents chose each expert; UsageError without routers."""
    counts = RouterCounts(int(made.model.hyper.get("n_experts_used") or 0))
    with torch.no_grad():
        made.rebuild()
        for each in parts:
            made.run(each, [0], Span(), record=True, recorder=counts)
    if not counts.counts:
        raise UsageError(
            f"{made.model.path}: has no routers, and the batch states a loss of routers; expected "
            "a model with experts, or a batch without it"
        )
    return counts


def prepare(
    model: Model,
    backend: GradientBackend,
    trained: Collection[str] | None,
    pairs: Sequence[AdapterPair],
    change: BackwardChange = RIGHT,
) -> tuple[Pass, Leaves, dict[str, torch.Tensor]]:
    """Return (the model's pass with its leaves placed, the leaves, LoRA factors by stored name).

    `trained` are stored names of the parameters that train; None: all, or with `pairs` none.
    `change` is a mistake with the pairs, or with the frozen base below them. Raises UsageError for
    a name that the model does not have.
    """
    names = {name for view in model.roles.values() for name in view.names}
    unknown = sorted(set(trained or ()) - names)
    if unknown:
        raise UsageError(
            f"{model.path}: no parameter {unknown[0]!r} that a pass reads; expected names like "
            f"{min(names)!r}"
        )
    weights = model_weights(model, 1 << 62)
    chosen = None if trained is None and not pairs else frozenset(trained or ())
    leaves = Leaves(model, weights, backend, chosen)
    factors: dict[str, torch.Tensor] = {}
    rebuild = place_pairs(pairs, backend, factors, change)
    if change.base is not None:
        for key, values in quantized_matrices(model, change.base):
            weights.holder.replace(key, backend, backend.array(values))
    if change.misread is not None and isinstance(backend, ChangedBackend):
        for key, values in misread_matrices(model, change.misread):
            backend.backward_weights[key] = backend.array(values)
    return Pass(model, backend, weights, None, rebuild), leaves, factors


def rounding(exact: BatchGradients, rounded: BatchGradients) -> Iterator[tuple[str, float]]:
    """Yield (key, relative L2 distance of the rounded gradient from the exact one).

    It is what rounding alone does: a trainer's gradient that is as far from float64's as this shows
    no fault. A key without a rounded gradient has 1.0, or 0.0 where the exact one is zero.
    """
    for key in exact.keys:
        gradient = exact.gradient(key)
        size = float(np.linalg.norm(gradient))
        there = key in rounded.keys
        apart = float(np.linalg.norm(gradient - rounded.gradient(key))) if there else size
        yield key, apart / size if size else float(apart > 0)
