"""What a hypothesis may read besides its two tensors: other tensors, sizes, the base, verdicts.

A *pair* is the two tensors that files A and B have of one role. The *base* is a third model that
both come from.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from aprfmt.base.protocols import LazyTensor, Value
from aprfmt.errors import AprfmtError, ArchError
from aprfmt.measure.alignment import TensorPair, align_models
from aprfmt.measure.encoding_noise import pair_noise
from aprfmt.measure.numbers import to_float64
from aprfmt.measure.records import TensorDiff
from aprfmt.measure.row_reader import KEPT, RowReader
from aprfmt.model import Model
from aprfmt.tensors import norms
from aprfmt.tensors.view import View, stored_by_name

if TYPE_CHECKING:
    from aprfmt.causes.tensor.row_sources import JoinedRows
    from aprfmt.codecs.base import Array

Found = TypeVar("Found")

SPOTS = 4  # rows of every tensor in the index
WIDTH = 64  # values read of each such row


@dataclass(frozen=True)
class ShapeIndex:
    """The tensors of one shape in one file: keys, encodings and a few sample values of each."""

    keys: tuple[str, ...]
    encodings: tuple[str, ...]
    values: "Array"  # float64 [tensors, samples]


@dataclass(frozen=True, slots=True)
class NotTried:
    """A hypothesis that could not be tried: the causes it can find, the tensor's key, and why."""

    causes: tuple[str, ...]
    key: str
    why: str


@dataclass
class SchemeCache:
    """Packing schemes found so far in this comparison, and how many searches found none.

    `decoded` are the keys of plain tensors whose values lie on such a scheme on one side alone:
    they are codes decoded again, as coarse as packed ones.
    """

    found: list[Any] = field(default_factory=list)  # (code, grouping)
    decoded: set[str] = field(default_factory=set)
    failed_searches: int = 0
    failed_orders: int = 0
    failed_fields: int = 0
    failed_types: Counter[tuple[str, str]] = field(default_factory=Counter)  # by both encodings


class PairContext:
    """Both models, and an optional third one (the base); gives tensors by key.

    `results` are the known records of pairs by key: they save passes and tell whether other tensors
    are equal. Everything is read on first use; the index reads SPOTS rows of every tensor, once.
    """

    def __init__(
        self,
        a: Model,
        b: Model,
        base: Model | None = None,
        results: Mapping[str, TensorDiff] | None = None,
    ) -> None:
        """Store the models without reading them; `results` are the known comparisons by key."""
        self.models: dict[str, Model] = {"a": a, "b": b}
        if base is not None:
            self.models["base"] = base
        self.schemes = SchemeCache()
        self.not_tried: list[NotTried] = []
        self.results: Mapping[str, TensorDiff] = results or {}
        self._readers: dict[tuple[str, str], RowReader] = {}
        self._indexes: dict[str, dict[tuple[int, ...], ShapeIndex]] = {}
        self.pools: dict[int, JoinedRows | None] = {}  # all rows of A by their number of columns

    def record_not_tried(self, causes: tuple[str, ...], key: str, error: AprfmtError | str) -> None:
        """Record that the search for some causes raised `error`.

        `key` is "" for several tensors.
        """
        self.not_tried.append(NotTried(causes, key, str(error)))

    @cached_property
    def pairs(self) -> Mapping[str, TensorPair]:
        """Every pair of tensors that files A and B both have, by key."""
        return {pair.key: pair for pair in align_models(self.models["a"], self.models["b"]).pairs}

    @cached_property
    def hyper(self) -> list[Mapping[str, Value]]:
        """Hyperparameters of both models; one that cannot be read is left out."""
        found: list[Mapping[str, Value]] = []
        for label in ("a", "b"):
            try:
                rows = self.models[label].hyper
                found.append({name: rows[name] for name in rows})
            except AprfmtError:
                continue
        return found

    def rotated_pairs(self, layer: int | None) -> str:
        """Return which elements of a head rope rotates together in a layer: "half", "interleaved".

        "none" if the layer does not rotate q and k, "" if the architecture is unknown. `layer` None
        (a tensor of the whole model) asks for any layer.
        """
        try:
            model = self.models["a"]
            rotates, style = model.hyper["rope_layers"], str(model.hyper["rope_style"])
        except AprfmtError:
            return ""
        at = any(rotates) if layer is None else layer < len(rotates) and rotates[layer]
        return style if at else "none"

    def has_role(self, label: str, key: str) -> bool:
        """Return whether model "a" or "b" has a role for a tensor, so that a pass reads it."""
        try:
            return key in self.models[label].roles
        except ArchError:
            return False

    def is_second_layout(self, label: str, key: str) -> bool:
        """Return whether a tensor stores what has a role again, in another layout."""
        try:
            return key in self.models[label].resolution.stored_again
        except ArchError:
            return False

    def sides(self, label: str) -> Mapping[str, View]:
        """Return {key: tensor} of one of the models, by the keys of `pairs`.

        `label` says which: "a", "b" or "base".
        """
        if label in ("a", "b"):
            picked = {key: pair.a if label == "a" else pair.b for key, pair in self.pairs.items()}
            return {key: side for key, side in picked.items() if side is not None}
        model = self.models[label]
        try:
            return dict(model.roles)
        except ArchError:
            return dict(model)

    def stored(self, label: str) -> list[LazyTensor]:
        """Return a model's stored tensors, with codes and scales of packed weights, each once."""
        return [*stored_by_name(self.models[label].values()).values()]

    def reader(self, label: str, key: str) -> RowReader | None:
        """Return the row reader of a model's tensor; None if it has no tensor of that key."""
        if label not in self.models:
            return None
        if (label, key) not in self._readers:
            side = self.sides(label).get(key)
            if side is None:
                return None
            self._readers[label, key] = RowReader(side)
        return self._readers[label, key]

    def shape_index(self, label: str, shape: tuple[int, ...]) -> ShapeIndex | None:
        """Return the sample values of all tensors of a shape; None if there are none."""
        if label not in self._indexes:
            self._indexes[label] = self._read_indexes(label)
        return self._indexes[label].get(shape)

    def _read_indexes(self, label: str) -> dict[tuple[int, ...], ShapeIndex]:
        """Return {shape: ShapeIndex} of a model's tensors; unreadable ones are left out."""
        found: dict[tuple[int, ...], list[tuple[str, str, Array]]] = {}
        # Read a few values of every tensor.
        for key in self.sides(label):
            reader = self.reader(label, key)
            if reader is None or not reader.size:
                continue
            if not reader.decodes_rows and reader.size > 16 * KEPT:
                continue  # four rows cannot be read without decoding all of it
            try:
                line = sample_line(reader)
            except AprfmtError:
                continue
            found.setdefault(reader.shape, []).append((key, reader.encoding, line))
            reader.drop()
        return {
            shape: ShapeIndex(
                tuple(row[0] for row in rows),
                tuple(row[1] for row in rows),
                np.stack([row[2] for row in rows]),
            )
            for shape, rows in found.items()
        }

    def keys_with_equal_sample(self, label: str, reader: RowReader) -> list[str]:
        """Return keys of a model's tensors whose sample values equal this tensor's, nearest first.

        Equal means within the rounding of both encodings. [] for a sample of one repeated value,
        because constant tensors prove nothing.
        """
        index = self.shape_index(label, reader.shape)
        if index is None:
            return []
        line = sample_line(reader)
        if not np.isfinite(line).all() or np.ptp(line) == 0:
            return []
        # Distance of every tensor's sample from this one's, within their encodings.
        values = np.where(np.isfinite(index.values), index.values, 0.0)
        norm = np.maximum(np.linalg.norm(values, axis=1), norms.exact_norm(line))
        away = np.linalg.norm(values - line, axis=1) / np.where(norm > 0, norm, 1.0)
        limits = np.array([1.5 * pair_noise(reader.encoding, name) for name in index.encodings])
        near = np.flatnonzero(away <= limits)
        return [index.keys[i] for i in near[np.argsort(away[near], kind="stable")]]


def sample_line(reader: RowReader) -> "Array":
    """Return a few values of a tensor, float64 1-d; its shape determines which."""
    if reader.columns == 1:
        at = np.unique(np.linspace(0, reader.rows - 1, SPOTS * WIDTH).astype(np.int64))
        return to_float64(reader.take(at)).reshape(-1)
    rows = np.unique(np.linspace(0, reader.rows - 1, SPOTS).astype(np.int64))
    columns = np.unique(np.linspace(0, reader.columns - 1, WIDTH).astype(np.int64))
    return to_float64(reader.take(rows)[:, columns]).reshape(-1)


def find_in_pairs(
    context: PairContext,
    pairs: Mapping[str, TensorPair],
    keys: Iterable[str],
    causes: tuple[str, ...],
    find: Callable[[TensorPair], Found | None],
) -> Iterator[tuple[str, Found]]:
    """Yield (tensor key, what `find` returns for its pair) for each key with a result, not None.

    A pair that cannot be read is recorded as not tried for `causes`, and the others go on. The
    mapped pages of a pair are released before the next one.
    """
    for key in keys:
        try:
            found = find(pairs[key])
        except AprfmtError as error:
            context.record_not_tried(causes, key, error)
            continue
        finally:
            pairs[key].drop()
        if found is not None:
            yield key, found
