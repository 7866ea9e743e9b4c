"""Finds the capture points among llama.cpp's graph nodes, from its callback or from printed text.

A node is recognised by (name, operation), where the last occurrence is used, or by the weight it
reads. Layouts converted here: rows of llama's Q and K in adjacent pairs, rope on adjacent pairs, a
joined qkv, tiled value heads of a delta net, keys padded to the cache's size, the head axis before
the tokens.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.arch.grouped_rows import Tiled
from aprfmt.arch.layout_steps import RowsPermuted
from aprfmt.arch.role_vocabulary import split_key
from aprfmt.errors import ArchError
from aprfmt.inference.capture import POINTS, WHOLE
from aprfmt.inference.engines.record_collector import HEADED, Collector, pairs_to_halves
from aprfmt.inference.points import Name
from aprfmt.model import Model
from aprfmt.tensors.view import View

Numbers = NDArray[Any]
Mask = NDArray[np.bool_]
CellColumns = NDArray[np.int64] | None
_NODE = re.compile(r"(.*?)-(\d{1,6})")
_WEIGHT = re.compile(r"(?:blk\.(\d{1,6})\.)?([\w.]+\.(?:weight|bias))")
# Operations that only repeat another node's result; a later view must not replace the node itself.
VIEWS = ("VIEW", "PERMUTE", "TRANSPOSE", "RESHAPE")


@dataclass(frozen=True)
class GraphNode:
    """One evaluated node: `shape` outermost first, `scale` of a SOFT_MAX if known."""

    name: str
    op: str
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    scale: float | None = None


@dataclass(frozen=True)
class NodePoint:
    """The capture point that a node's values are of, and which of their columns; None for all."""

    point: str
    layer: int
    rank: int
    columns: CellColumns = None


@dataclass
class GraphReader:
    """Puts nodes into a Collector; `model` is the GGUF that ran, None if not available."""

    collector: Collector
    model: Model | None
    tokens: int
    outputs: Sequence[int] | None = None  # positions with logits, None: all
    _roles: Mapping[str, list[tuple[str, CellColumns]]] = field(default_factory=dict)
    _routed: dict[int, dict[str, Numbers]] = field(default_factory=dict)
    _scaled_q: set[int] = field(default_factory=set)
    _scores: dict[int, tuple[Numbers, Mask | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Look up the roles of the model's stored tensors, if there is a model."""
        if self.model is not None:
            self._roles = stored_roles(self.model)

    def points_of_node(self, node: GraphNode) -> list[NodePoint]:
        """Return the capture points whose value a llama.cpp graph node has; [] if it has none's.

        They are found by the llama.cpp names in the table of points.
        """
        text, layer = self._split_name(node.name)
        weights = [place for source in node.sources for place in self._roles_of_weight(source)]
        found = []
        # A name of the table fits by the node's text, or by the weight it reads.
        for point in POINTS.values():
            for rank, name in enumerate(point.llama_cpp):
                if name.op and name.op != node.op:
                    continue
                if name.role:
                    found += self._points_by_weight(point.name, name, rank, weights)
                elif name.text == text and (name.op or node.op not in VIEWS):
                    found.append(NodePoint(point.name, layer, rank))
        layered = [p for p in found if POINTS[p.point].layered == (p.layer != WHOLE)]
        return list({(p.point, p.layer): p for p in reversed(layered)}.values())

    def _split_name(self, name: str) -> tuple[str, int]:
        """Return (text, layer) of a node's name such as "Qcur-3"; layer WHOLE without a number."""
        match = _NODE.fullmatch(name)
        return (match[1], int(match[2])) if match else (name, WHOLE)

    def _roles_of_weight(self, source: str) -> list[tuple[str, int, CellColumns]]:
        """Return (role, layer, columns) of each tensor in a stored weight; [] for an activation.

        `source` is the name of what a node reads. `columns` are the columns of the product that
        are the tensor's, None for all.
        """
        match = _WEIGHT.fullmatch(source)
        if match is None:
            return []
        if source not in self._roles:
            return [(match[2], WHOLE if match[1] is None else int(match[1]), None)]
        keys = ((*split_key(key), columns) for key, columns in self._roles[source])
        return [(role, WHOLE if layer is None else layer, columns) for layer, role, columns in keys]

    def _points_by_weight(
        self, point: str, name: Name, rank: int, weights: list[tuple[str, int, CellColumns]]
    ) -> list[NodePoint]:
        """Return the capture points that a node may be, by the weights it reads; [] for none.

        `point` is the point, `name` one of the point's names in the table of points, `rank` its
        number there. `weights` are the (role, layer, columns) that the node reads; those with the
        role of `name` count.
        """
        return [
            NodePoint(point, layer, rank, cut) for role, layer, cut in weights if role == name.role
        ]

    def wants(self, node: GraphNode) -> bool:
        """Return whether a node is a capture point, or shows that queries are scaled early."""
        return bool(self.points_of_node(node)) or self._layer_of_query_scale(node) is not None

    def _layer_of_query_scale(self, node: GraphNode) -> int | None:
        """Return the layer whose queries a SCALE node scales; None for any other node."""
        if node.op != "SCALE" or not node.sources:
            return None
        text, layer = self._split_name(node.sources[0])
        return layer if text == "Qcur" else None

    def add(self, node: GraphNode, values: Numbers, seen: Mask | None = None) -> None:
        """Record a graph node's values, given in its own shape (outermost first).

        `seen` is a mask of the values that exist; None for all.
        """
        scaled = self._layer_of_query_scale(node)
        if scaled is not None:
            self._scaled_q.add(scaled)
        # Scores wait for the softmax's scale, experts for their weights.
        for place in self.points_of_node(node):
            if place.point == "scores":
                self._scores[place.layer] = (values, seen)
                continue
            if place.point == "probs":
                self._add_scores(place.layer, node.scale)
            if place.point in ("experts", "expert_w") and seen is None:
                self._add_routed(place, values)
                continue
            cut, mask = values, seen
            if place.columns is not None:
                cut = values[..., place.columns]
                mask = None if seen is None else seen[..., place.columns]
            self._record(place, cut, mask)

    def _add_scores(self, layer: int, scale: float | None) -> None:
        """Record a layer's scores: its stored products kq times the softmax's scale.

        Nothing is recorded if no products are stored. `scale` is what the node says. If it is
        None the model's is taken, and 1 if queries are scaled already or scores are soft-capped.
        """
        if layer not in self._scores:
            return
        if scale is None:
            hp = self.collector.hp
            if hp is None:
                self.collector.unknown[f"kq-{layer}"] = "its scale is not known without the model"
                return
            scale = float(hp["attn_scale"])
            if layer in self._scaled_q or hp["attn_softcap"] is not None:
                scale = 1.0
        values, seen = self._scores.pop(layer)
        self._record(NodePoint("scores", layer, 0), values * np.float32(scale), seen)

    def _add_routed(self, place: NodePoint, values: Numbers) -> None:
        """Record a layer's chosen experts and their weights, largest weight first.

        `values` are those of one of the two points; both are recorded when the second comes.
        llama.cpp has them in the order of scores.
        """
        shaped = self._to_point_shape(place.point, place.layer, values)
        if shaped is None:
            return
        routed = self._routed.setdefault(place.layer, {})
        routed[place.point] = shaped
        experts, weights = routed.get("experts"), routed.get("expert_w")
        if experts is None or weights is None or experts.shape != weights.shape:
            return
        order = np.argsort(-weights, axis=-1, kind="stable")
        for point, x in (("experts", experts), ("expert_w", weights)):
            rank = place.rank if point == "expert_w" else 0
            sorted_ = np.take_along_axis(x, order, -1)
            self.collector.add(point, place.layer, sorted_, rank=rank)

    def _record(self, place: NodePoint, values: Numbers, seen: Mask | None) -> None:
        """Record a node's values at its capture point.

        Note in `unknown` if the shape does not fit.
        """
        point, layer = place.point, place.layer
        shaped = self._to_point_shape(point, layer, values)
        if shaped is None:
            self.collector.unknown[f"{point} of layer {layer}"] = f"shape {list(values.shape)}"
            return
        mask = None if seen is None else self._to_point_shape(point, layer, seen)
        axis = 1 if POINTS[point].rows == "scores" else 0
        rows: Sequence[int] | None = None
        if POINTS[point].rows != "keys" and self.outputs is not None:
            rows = self.outputs if shaped.shape[axis] == len(self.outputs) else None
            rows = None if shaped.shape[axis] == self.tokens else rows
        self.collector.add(point, layer, shaped, rows=rows, rank=place.rank, seen=mask)

    def _to_point_shape(self, point: str, layer: int, values: Any) -> Any | None:
        """Return a capture point's value [tokens, ...] from a node's four axes.

        None if impossible.
        """
        try:
            return self._tokens_first(point, layer, values)
        except ValueError:  # from numpy: sizes that are zero, or not divisible into heads
            return None

    def _tokens_first(self, point: str, layer: int, values: Any) -> Any | None:
        """Return a node's values as [tokens, ...] in our layout.

        None for a shape or point that is not read. ValueError if sizes do not divide into heads.
        """
        while values.ndim > 2 and values.shape[0] == 1:
            values = values[0]
        kind = POINTS[point].rows
        if kind == "scores":
            return values[..., : self.tokens] if values.ndim == 3 else None
        if kind == "keys":
            return None  # the cache may be stored transposed; k_rope and v have the same values
        if point in HEADED:
            heads = self.collector.heads(point, layer)
            if values.ndim == 2 and heads is not None:
                values = values.reshape(len(values), heads, -1)
            if values.ndim == 3:
                values = self._pairs_to_halves(point, layer, values)
            return values
        if point.startswith("k_pe"):
            values = values.reshape(self.tokens, 1, -1)
            adjacent = point == "k_pe_rope" and self._rotates_adjacent_pairs
            return pairs_to_halves(values) if adjacent else values
        if point == "expert_w" and values.ndim == 3:  # [tokens, used, 1]
            return values.reshape(len(values), -1)
        return values if values.ndim == 2 else None

    @property
    def _rotates_adjacent_pairs(self) -> bool:
        """Whether the model is known and its rope rotates adjacent elements together."""
        return self.model is not None and self.model.hyper["rope_style"] == "interleaved"

    def _pairs_to_halves(self, point: str, layer: int, values: Any) -> Any:
        """Return q or k with adjacent pairs as split halves; other values unchanged.

        Pairs are adjacent in llama's permuted rows, and after a rope that rotates them so.
        """
        if self.model is None or point[0] not in "qk":
            return values
        tensor = self.model.roles.get(f"L{layer}.attn_{point[0]}.weight")
        permuted = tensor is not None and any(
            isinstance(step, RowsPermuted) for step in tensor.layout
        )
        adjacent = point.endswith("_rope") and self._rotates_adjacent_pairs
        return pairs_to_halves(values) if permuted or adjacent else values


def _heads_in_order(tensor: View, model: Model) -> CellColumns:
    """Return, for each column of the model's product, the column of the stored weight's product.

    None where no layout step of the weight tiles the heads of its rows: then the order is the same.
    """
    columns = [np.arange(tensor.stored[0].info.shape[0])]
    tiled = [step for step in tensor.layout if isinstance(step, Tiled) and step.axis == 0]
    for step in tiled:
        columns = step.undo(columns, model.hyper)
    return columns[0] if tiled else None


def stored_roles(model: Model) -> dict[str, list[tuple[str, CellColumns]]]:
    """Return {stored name: [(tensor key, its rows; None: all, in order)]} of a model's tensors.

    Tensors made of several stored ones, and joined ones that are not divided by rows, are left out.
    """
    found: dict[str, list[tuple[str, CellColumns]]] = {}
    for tensor in model.roles.values():
        if len(tensor.stored) != 1:
            continue  # experts and split heads: no one node is the role's
        info = tensor.stored[0].info
        if len(tensor.roles) == 1:
            found[info.name] = [(tensor.name, _heads_in_order(tensor, model))]
            continue
        rows = [np.arange(info.shape[0] if info.shape else 0)]
        try:
            for step in tensor.layout:
                rows = step.undo(rows, model.hyper)
        except ArchError:  # not by rows
            continue
        found[info.name] = list(zip(tensor.roles, rows, strict=True))
    return found
