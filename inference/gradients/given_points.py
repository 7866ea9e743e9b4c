"""Gradients of capture points that a trainer saved, read as dL/d(point) of a batch's documents.

An array's name is that of the table of points (`L2.attn_out`, `logits`), or of the transformers
module whose result the point is (`model.layers.2.self_attn.o_proj`, with `#in` what the module
reads). Its shape is [samples, tokens, ...] as the batch's, with scores and probabilities
[samples, heads, tokens, keys].
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.inference.batch import Batch
from aprfmt.inference.capture import POINTS, PointInstance, point_instances, resolve_alias
from aprfmt.inference.engines.modules import ModuleMap, ModuleReader, stated_placement
from aprfmt.inference.engines.record_collector import Collector
from aprfmt.inference.gradients.documents import Document, documents, join_documents
from aprfmt.inference.trace import KeptValues
from aprfmt.model import Model

Array = NDArray[Any]
# Points that a module's result is only where the model does nothing more to it: a factor or a
# clipping between the two gives another gradient. By the hyperparameter that says so.
_CHANGED: Mapping[str, tuple[str, ...]] = {
    "embedding_scale": ("embd", "embd_scaled"),
    "ssm_scales": ("ssm_gate", "ssm_conv_in", "ssm_dt"),
    "qkv_clip": ("q", "k", "v", "q_norm", "k_norm"),
    "attn_out_scale": ("attn_out",),
    "ssm_out_scale": ("attn_out", "ssm_out"),
    "ffn_down_scale": ("ffn_out",),
    "ffn_gate_scale": ("ffn_gate",),
    "key_scale": ("k",),
}
# Architectures whose router's first result are probabilities, no logits.
_PROBABILITIES = ("gemma4", "gemma4_unified", "llama4")
# Points that have no gradient of the loss, and why: a choice has no derivative.
_CHOSEN = "it says what was chosen, and a choice has no derivative"
_INDEXER = "an indexer only chooses keys: the loss gives it no gradient"
WITHOUT_GRADIENT: Mapping[str, str] = {
    "experts": _CHOSEN,
    "router_margin": "it says how sure a choice is, and nothing is computed of it",
    **dict.fromkeys(("index_blocks", "index_keys"), _CHOSEN),
    **dict.fromkeys(
        """index_q index_q_rope index_k index_k_rope index_w index_scores index_block_scores
        index_margin index_compress_kv index_compress_gate index_compressed_k""".split(),
        _INDEXER,
    ),
}
# The same of parameters, by the beginning of their role.
ROLES_WITHOUT_GRADIENT: Mapping[str, str] = {
    "exp_probs_b": "it chooses experts alone: the loss gives it no gradient, and a trainer moves "
    "it by a rule of its own",
    "indexer": _INDEXER,
}
_PARAMETERS = (".weight", ".bias")


@dataclass(frozen=True)
class GivenPoints:
    """dL/d(point) by key, rows of all documents one after the other, as `BatchGradients.points`.

    `names` are the arrays that they were read from. `refused` are those of another shape than the
    batch's, and `left` those that are no point of their own, each with the reason.
    """

    values: Mapping[str, Array]
    names: Mapping[str, str]
    refused: Mapping[str, str]
    left: Mapping[str, str]


def point_names(names: Collection[str], model: Model) -> list[str]:
    """Return the names of arrays that are of a capture point or a module, not a parameter.

    These are points' own names, modules that give points, and `#in` names. If there are any,
    other names that are no parameter's are returned too, as modules without a point.
    """
    known = point_instances(model.spec.block, model.hyper, model.roles)
    modules = ModuleMap(names, stated_placement(model.spec.block))
    read = [name for name in names if name in known or modules.read(name)]
    if not read:
        return []
    # Where some are, so are other modules, which only the names of their parameters extend.
    others = [name for name in names if name.endswith("#in") or not name.endswith(_PARAMETERS)]
    return list(dict.fromkeys((*read, *others)))


def read_points(
    model: Model, batch: Batch, shapes: Mapping[str, Sequence[int]], read: Callable[[str], Array]
) -> GivenPoints:
    """Return the points' gradients in some arrays of a trainer's batch.

    `shapes` are the arrays' by name, `read` gives one of them. Arrays by a point's own name come
    before those of modules.
    """
    known = point_instances(model.spec.block, model.hyper, model.roles)
    parts = documents(batch)
    kept = [KeptValues() for _ in parts]
    readers = [_reader(model, shapes, part, each) for part, each in zip(parts, kept, strict=True)]
    found: dict[str, Array] = {}
    names: dict[str, str] = {}
    left: dict[str, str] = {}
    refused: dict[str, str] = {}
    for name in sorted(shapes, key=lambda each: each not in known):
        targets = _targets(name, known, readers[0][1])
        if isinstance(targets, str) or (why := _why_changed(name, known, model, readers[0][1])):
            left[name] = targets if isinstance(targets, str) else why
            continue
        bare = [WITHOUT_GRADIENT.get(key.rpartition(".")[2], "") for key in targets]
        if all(bare):
            left[name] = bare[0]
            continue
        fresh = [key for key in targets if key not in found]
        if not fresh:
            left[name] = f"{targets[0]} is {names[targets[0]]} already"
            continue
        scores = POINTS[fresh[0].rpartition(".")[2]].rows == "scores"
        values = np.asarray(read(name), np.float64)
        rows, columns = batch.mask.shape
        copied = model.spec.block.streams == "altup" and values.ndim == 4
        if copied and values.shape[1:3] == (rows, columns):
            values = np.moveaxis(values, 0, 2)  # copies of the stream, before the samples
            values = values.reshape(*values.shape[:2], -1)
        cut = [_fit_to_batch(values, batch, part, scores) for part in parts]
        if any(each is None for each in cut):
            refused[name] = f"shape {list(shapes[name])}; expected [{rows}, {columns}, ...]"
            continue
        if name in known:
            found[fresh[0]] = join_documents([x for x in cut if x is not None])
            names[fresh[0]] = name
            continue
        for (collector, reader), x in zip(readers, cut, strict=True):
            assert x is not None
            reader.add(name, x[None])
            collector.records.clear()
        for key in fresh:
            every = [each.fetch(key) for each in kept]
            if all(x is not None for x in every):
                found[key] = join_documents([x for x in every if x is not None])
                names[key] = name
        if not set(fresh) & found.keys():
            left[name] = readers[0][0].unknown.get(name, "the model has no such point")
    return GivenPoints(found, names, refused, left)


def _reader(
    model: Model, names: Collection[str], part: Document, kept: KeptValues
) -> tuple[Collector, ModuleReader]:
    """Return (collector, reader) that put modules' values of one document into `kept`."""
    collector = Collector(kept, model, tokens=len(part.ids), dtype="float64")
    return collector, ModuleReader(
        collector,
        names,
        block=model.spec.block,
        architecture=model.spec.name,
        tokens=len(part.ids),
        scaled_embedding=False,
    )


def _targets(
    name: str, known: Mapping[str, PointInstance], reader: ModuleReader
) -> list[str] | str:
    """Return the keys of the points that an array's name means, or why there are none."""
    if name in known:
        points = [known[name]]
    else:
        readings = reader.modules.read(name)
        points = [
            known[key]
            for one in readings
            if (key := PointInstance(one.point, one.layer, "", False).key) in known
        ]
    targets = [each for one in points if (each := resolve_alias(one.key, known)) is not None]
    keys = [one.key for one in targets if one.point.rows in ("tokens", "logits", "scores")]
    if targets and not keys:
        return "its rows are not those of the batch's tokens"
    return list(dict.fromkeys(keys)) or "the model has no such point"


def _why_changed(
    name: str, known: Mapping[str, PointInstance], model: Model, reader: ModuleReader
) -> str:
    """Return why a module's gradient is not that of its point; "" where it may be.

    A hyperparameter such as a scale may come between the module's result and the point.
    """
    if name in known:
        return ""
    for one in reader.modules.read(name):
        point = one.point.name
        if point == "router" and model.spec.name in _PROBABILITIES:
            return "the module gives probabilities, and the point is before the softmax"
        for hyper, points in _CHANGED.items():
            if point in points and hyper in model.hyper and not _is_neutral(model.hyper[hyper]):
                return f"{hyper} is between the module's result and the point, or before it"
    return ""


def _is_neutral(value: object) -> bool:
    """Return whether a hyperparameter is 1, or a row of ones, or None."""
    return value is None or bool(np.all(np.asarray(value) == 1))


def _fit_to_batch(values: Array, batch: Batch, part: Document, scores: bool) -> Array | None:
    """Return one document's values in an array of the batch; None where its shape does not fit.

    The array is [rows, tokens, ...] or has both axes joined, or both and that of heads. `scores`:
    it is [rows, heads, tokens, keys], and is cut in its last two axes.
    """
    rows, columns = batch.mask.shape
    if values.ndim and values.shape[0] == rows * columns and (rows > 1 or values.ndim < 3):
        values = values.reshape(rows, columns, *values.shape[1:])
    elif values.ndim == 2 and values.shape[0] % (rows * columns) == 0:
        values = values.reshape(rows, columns, -1)  # rows of the heads of each token
    if values.ndim and values.shape[0] == columns and rows == 1 and values.ndim < 3:
        values = values[None]
    if values.ndim < 3 or len(values) != rows:
        return None
    x, inside = values[part.row], slice(part.start, part.start + len(part.ids))
    if scores:
        return x[:, inside, inside] if x.ndim == 3 and x.shape[1:] == (columns, columns) else None
    if x.shape[0] != columns and (x.ndim != 3 or x.shape[1] != columns):
        return None
    found: Array = x[inside] if x.shape[0] == columns else x[:, inside]
    return found
