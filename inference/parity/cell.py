"""One operation of a model alone: the inputs it reads, its weights, and nothing else.

Such an operation with its inputs and weights is a *cell*. It is run by the model's own forward
pass, shrunk to the one layer, with the given values at their points (`replay.shadow.value_at`).
Weights that the operation does not need are zeros that take no memory. What is needed is found by
leaving things out: an input or a weight without which the result is the same to the bit is not part
of the cell.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.arch import ARCHS
from aprfmt.arch.role_vocabulary import role_key, split_key
from aprfmt.arch.spec import HyperParam, HyperParams
from aprfmt.base.encodings import find_encoding as encoding_row
from aprfmt.codecs import decode
from aprfmt.errors import UsageError
from aprfmt.inference.backends.base import Backend
from aprfmt.inference.capture import WHOLE, key_name, parse_key, point_instances
from aprfmt.inference.replay.patched_model import PatchedModel
from aprfmt.inference.replay.shadow import value_at
from aprfmt.inference.rows import ArrayRows, RowSource, StoredRows
from aprfmt.inference.weights import Weights
from aprfmt.model import Model

Numbers = NDArray[Any]
# Hyperparameters with one value a layer.
PER_LAYER = ("moe_layers", "rope_layers", "window_layers")
# Whole-model points after the layers.
AFTER_LAYERS = ("final_norm", "head_in", "logits_raw", "logits")
# Rows of the vocabulary that a cell of the logits has.
VOCAB_ROWS = 256
_BUDGET = 1 << 62


class BundledRows(ArrayRows):
    """A weight held in its encoded bytes, with its decoded numbers."""

    def __init__(self, raw: bytes, encoding: str, shape: tuple[int, ...]) -> None:
        """Take stored bytes of an encoding, and decode them to `shape`."""
        super().__init__(decode(encoding, {"": raw}, shape))
        self.stored, self.encoding = raw, encoding
        self.nbytes = len(raw)

    def encoded(self, start: int, stop: int) -> bytes | memoryview | None:
        """Return the stored bytes of rows [start, stop); None if rows share bytes."""
        size = encoding_row(self.encoding).row_bytes(self.shape)
        return None if size is None else memoryview(self.stored)[start * size : stop * size]


class ZeroRows(ArrayRows):
    """Zeros of a shape that take no memory: a weight the operation does not need."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        """Take the shape; a single zero is stored."""
        super().__init__(np.broadcast_to(np.float32(0), shape))

    def decode_rows(self, start: int, stop: int) -> Numbers:
        """Return zeros [stop - start, last axis]."""
        return np.zeros((stop - start, self.shape[-1]), np.float32)

    def numpy(self) -> Numbers:
        """Return zeros of the whole shape as one array."""
        return np.zeros(self.shape, np.float32)


@dataclass(frozen=True)
class OperationCell:
    """One operation cut out of a model, with the inputs and weights it needs.

    `key` is the wanted point as it was called in the model, `point` and `layer` in the cell.
    `inputs` are values by the cell's keys (`L0.attn_norm`, the stream as `embd`), `weights` by
    the cell's role keys; `shapes` are those of every role of the layer.
    """

    architecture: str
    hyper: Mapping[str, Any]
    key: str
    point: str
    layer: int
    ids: tuple[int, ...]
    inputs: Mapping[str, Numbers]
    weights: Mapping[str, RowSource]
    shapes: Mapping[str, tuple[int, ...]]
    rows: tuple[int, ...] = ()  # of the vocabulary, where the cell has only some

    def run(self, backend: Backend) -> Numbers:
        """Return the operation's result on a backend, computed from the cell's inputs.

        Raises UsageError if the pass does not reach the point.
        """
        spec = ARCHS[self.architecture]
        hp = HyperParams({n: HyperParam(v, "config") for n, v in self.hyper.items()}, self.key)
        rows: dict[str, RowSource] = {
            key: self.weights.get(key) or ZeroRows(shape) for key, shape in self.shapes.items()
        }
        weights = Weights(rows, _BUDGET, f"cell of {self.key}")
        patched = PatchedModel(spec, hp, weights, backend, self.ids)
        with closing(weights):
            found = value_at(patched, self.inputs, key_name(self.point, self.layer))
        if found is None:
            raise UsageError(f"{self.key}: the pass never came to this point")
        return found


def cut_cell(
    model: Model,
    key: str,
    ids: Sequence[int],
    values: Callable[[str], Numbers | None],
    reference: Backend,
    columns: Sequence[int] = (),
    weights: Weights | None = None,
) -> OperationCell:
    """Return the smallest cell that gives the point `key` from recorded values.

    `values` gives the reference run's value of a key, None where it was not recorded; `columns`
    are rows of the vocabulary to include where the point is the logits; `weights` are those that
    ran, None for the model's. Raises UsageError where a value that comes before the point was not
    recorded.
    """
    name, layer = parse_key(key)
    known = point_instances(model.spec.block, model.hyper, model.roles)
    whole = name in AFTER_LAYERS
    hyper = _cell_hyper(model, None if layer == WHOLE else layer)
    held = _cell_roles(model, layer)
    cell = OperationCell(
        model.spec.name, hyper, key, name, WHOLE if layer == WHOLE else 0,
        tuple(int(i) for i in ids), {},
        {cell_key: _weight_rows(model, own, weights) for cell_key, own in held.items()},
        {cell_key: model.roles[own].shape for cell_key, own in held.items()},
    )  # fmt: skip
    if not name.startswith("embd"):
        cell = replace(cell, inputs=_recorded_inputs(model, key, layer, known, values))
    if whole and name.startswith("logits"):
        cell = _keep_vocab_ids(cell, columns)
    elif name == "embd" or not cell.inputs:
        cell = _select_embedding_rows(cell)
    return _copy_weights(_remove_unused(cell, reference))


def _cell_hyper(model: Model, layer: int | None) -> dict[str, Any]:
    """Return {name: value}: a model's hyperparameters as if it had only this layer, None: none."""
    kept = {name: model.hyper[name] for name in model.hyper}
    for name in PER_LAYER:
        if name in kept:
            kept[name] = [] if layer is None else [kept[name][layer]]
    kept["n_layers"] = 0 if layer is None else 1
    if layer is not None and kept.get("attn_scale_by_layer"):
        kept["attn_scale"] = float(kept["attn_scale"]) / (layer + 1)
        kept["attn_scale_by_layer"] = False
    return kept


def _cell_roles(model: Model, layer: int) -> dict[str, str]:
    """Return {role key in the cell: role key in the model} for the weights a cell may need.

    These are the roles of the layer, which is layer 0 of the cell, and those of the whole model.
    """
    found = {}
    for key in model.roles:
        own, role = split_key(key)
        if own is None:
            found[key] = key
        elif own == layer:
            found[role_key(0, role)] = key
    return found


def _weight_rows(model: Model, key: str, weights: Weights | None) -> RowSource:
    """Return the source of a weight's numbers for a cell.

    `weights` are those that ran, None for the model's. Their numbers are taken if they were
    encoded otherwise than the model's; else they are the same, and the model's are read.
    """
    if weights is not None and weights[key].encoding != model.roles[key].encoding:
        return ArrayRows(weights[key].numpy())
    return StoredRows(model.roles[key])


def _recorded_inputs(
    model: Model,
    key: str,
    layer: int,
    known: Mapping[str, Any],
    values: Callable[[str], Numbers | None],
) -> dict[str, Numbers]:
    """Return {cell's key: value} of every recorded value of the layer before the point `key`.

    `known` are the model's points by key; `values` gives the recorded value of a key, or None.
    Raises UsageError if the stream that enters the layer was not recorded.
    """
    stream = "embd_scaled" if not known["embd_scaled"].alias_of else "embd"
    last = int(model.hyper["n_layers"]) - 1
    before = f"L{layer}.in" if layer != WHOLE else f"L{last}.out"
    first = values(before)
    if first is None:
        raise UsageError(f"{key}: {before} was not recorded, and the operation may read it")
    found = {stream: first}
    for other, instance in known.items():
        if other == key:
            break
        inside = instance.layer == layer and (layer != WHOLE or instance.point.name in AFTER_LAYERS)
        if not inside or instance.alias_of or instance.absent:
            continue
        value = values(other)
        if value is not None:
            found[key_name(instance.point.name, WHOLE if layer == WHOLE else 0)] = value
    return found


def _keep_vocab_ids(cell: OperationCell, columns: Sequence[int]) -> OperationCell:
    """Return the cell with the logits of ids `columns` alone, at most VOCAB_ROWS of them.

    Without any they are the first ids. Each logit is computed by itself, so that the others are not
    needed. The cell's tokens become id 0, which its smaller embedding surely has.
    """
    chosen = [int(c) for c in columns][:VOCAB_ROWS] or list(range(VOCAB_ROWS))
    vocab = int(cell.hyper["vocab_size"])
    chosen = sorted({c for c in chosen if c < vocab})
    weights, shapes = dict(cell.weights), dict(cell.shapes)
    for role in ("token_embd.weight", "output.weight", "output.bias"):
        if role in weights:
            weights[role] = ArrayRows(_take_rows(weights[role], chosen))
            shapes[role] = weights[role].shape
    inputs = {
        name: value[..., chosen] if name in ("logits_raw", "logits") else value
        for name, value in cell.inputs.items()
    }
    return replace(
        cell,
        hyper=dict(cell.hyper) | {"vocab_size": len(chosen)},
        weights=weights,
        shapes=shapes,
        inputs=inputs,
        ids=tuple(0 for _ in cell.ids),
        rows=tuple(chosen),
    )


def _select_embedding_rows(cell: OperationCell) -> OperationCell:
    """Return the cell with only the rows of the embedding that its ids look up."""
    used = sorted(set(cell.ids))
    weights, shapes = dict(cell.weights), dict(cell.shapes)
    role = "token_embd.weight"
    weights[role] = ArrayRows(_take_rows(weights[role], used))
    shapes[role] = weights[role].shape
    return replace(
        cell,
        hyper=dict(cell.hyper) | {"vocab_size": len(used)},
        weights=weights,
        shapes=shapes,
        ids=tuple(used.index(i) for i in cell.ids),
    )


def _take_rows(rows: RowSource, chosen: Sequence[int]) -> Numbers:
    """Return the chosen rows of a matrix, or elements of a vector, decoded."""
    if len(rows.shape) == 1:
        return np.array(rows.numpy()[list(chosen)])
    return np.concatenate([rows.decode_rows(i, i + 1) for i in chosen])


def _remove_unused(cell: OperationCell, backend: Backend) -> OperationCell:
    """Return the cell without the weights and inputs that its result does not need.

    Weights are tried first, while every input is given, then inputs: an input that is left out
    would then be computed from zeros, so that only one that is not read can be removed.
    """
    expected = cell.run(backend)

    def gives_same_bits(other: OperationCell) -> bool:
        """Return whether the cell `other` gives the same result as the whole cell, bit by bit."""
        found = other.run(backend)
        return found.shape == expected.shape and found.tobytes() == expected.tobytes()

    bare = replace(cell, weights={})
    if gives_same_bits(bare):
        cell = bare
    for name in list(cell.weights):
        fewer = replace(cell, weights={k: v for k, v in cell.weights.items() if k != name})
        if gives_same_bits(fewer):
            cell = fewer
    for name in list(cell.inputs):
        fewer = replace(cell, inputs={k: v for k, v in cell.inputs.items() if k != name})
        if gives_same_bits(fewer):
            cell = fewer
    return cell


def _copy_weights(cell: OperationCell) -> OperationCell:
    """Return the cell with copies of its weights, stored bytes where rows are whole."""
    weights: dict[str, RowSource] = {}
    for role, rows in cell.weights.items():
        count = int(np.prod(rows.shape[:-1])) if rows.shape else 1
        plain = rows.encoding in ("F32", "F64") or len(rows.shape) < 2
        raw = None if plain else rows.encoded(0, count)
        if raw is None:
            weights[role] = ArrayRows(np.array(rows.numpy()))
        else:
            weights[role] = BundledRows(bytes(raw), rows.encoding, rows.shape)
    return replace(cell, weights=weights)
