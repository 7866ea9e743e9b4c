"""Turns an engine's tensors into records under our keys: [tokens, ...], rows by position."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.base.deferred import Deferred
from aprfmt.base.protocols import Value
from aprfmt.inference.capture import (
    POINTS,
    PointInstance,
    key_name,
    parse_key,
    point_instances,
    resolve_alias,
)
from aprfmt.inference.engines.parts import cut_to_vocabulary, has_vocabulary_axis
from aprfmt.inference.engines.point_shapes import row_sizes
from aprfmt.inference.engines.tiles import MeasuredTiles
from aprfmt.inference.forward import LogitRows
from aprfmt.inference.layer_heads import kv_head_count
from aprfmt.inference.trace import KeptValues, Positions, Record, Trace, ValueStore, order_slots
from aprfmt.measure.distances import exact_16_bit_type, measure_blocks, rel_l2
from aprfmt.measure.tolerances import BASE, DISCRETE, ONE_OPERATION
from aprfmt.model import Model
from aprfmt.tensors.digest import decoded_sha256
from aprfmt.tensors.stats import Stats, compute_stats

Numbers = NDArray[Any]
_FEW = 64  # of so many rows one is looked at first
DROPPED = 0.1  # by which the share of zeros may be from the p that the other values show
# Points with an axis of heads, and the hyperparameter that counts them.
HEADED: Mapping[str, str] = {
    "q_mm": "n_heads", "q": "n_heads", "q_b": "n_heads", "q_norm": "n_heads", "q_rope": "n_heads",
    "k_mm": "n_kv_heads", "k": "n_kv_heads", "k_norm": "n_kv_heads", "k_rope": "n_kv_heads",
    "q_attn": "n_heads", "k_attn": "n_kv_heads",
    "v_mm": "n_kv_heads", "v": "n_kv_heads", "v_norm": "n_kv_heads", "k_nope": "n_heads",
    "k_cache": "n_kv_heads", "v_cache": "n_kv_heads",
}  # fmt: skip


# What values were given as: own key before aliases are resolved, and rank of the name.
Origin = tuple[str, int]


class Masks(Mapping[str, NDArray[np.bool_]]):
    """By key, a mask of the values that exist; stored as bits, as most values are missing."""

    def __init__(self) -> None:
        """Start without masks."""
        self._bits: dict[str, tuple[NDArray[np.uint8], tuple[int, ...]]] = {}

    def store(self, key: str, mask: NDArray[np.bool_]) -> None:
        """Store the mask of a key's existing values; it replaces an earlier one of the same key."""
        self._bits[key] = (np.packbits(mask), mask.shape)

    def __getitem__(self, key: str) -> NDArray[np.bool_]:
        """Return the mask of a key, in its shape."""
        bits, shape = self._bits[key]
        return np.unpackbits(bits, count=math.prod(shape)).view(np.bool_).reshape(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._bits)

    def __len__(self) -> int:
        return len(self._bits)


class Collector:
    """Takes values in any order and makes a Trace of them.

    `tokens` is the length of the pass, None if not known. Values of an alias are recorded under the
    key of the equal point. Values are written to disk at once; `unknown` maps names without a
    record to the reason, `lost` are those of them whose names say a point that the model has.
    """

    def __init__(
        self,
        spool: ValueStore,
        model: Model | None,
        *,
        tokens: int | None,
        dtype: str,
        device: str = "cpu",
        positions: Positions = "all",
        wanted: Collection[str] | None = None,
        hashes: bool = False,
        logits_rows: LogitRows = "all",
    ) -> None:
        """Start without records; values are written to `spool`.

        `wanted` are the keys to record (None: all), `positions` and `logits_rows` the rows of them.
        `hashes`: also record the SHA-256 of values.
        """
        self._spool = spool
        self.hp: Mapping[str, Value] | None = None if model is None else model.hyper
        self.known: Mapping[str, PointInstance] = {}
        if model is not None:
            self.known = point_instances(model.spec.block, model.hyper, model.roles)
        self._tokens, self._dtype, self._device = tokens, dtype, device
        self._positions, self._hashes = positions, hashes
        self._logits_rows = logits_rows
        self._wanted = None if wanted is None else {self.record_key(key) for key in wanted}
        self._ranks: dict[str, int] = {}
        self._origins: dict[str, Origin] = {}  # own key and rank of each record's values
        self._again: Origin | None = None  # the origin that alone is taken, None: any
        self.giver = ""  # the array whose values are added
        self._givers: dict[str, str] = {}  # the array of each record's values
        # (array, key, origin, tiles) not recorded
        self._second: list[tuple[str, str, Origin, MeasuredTiles | None]] = []
        self._tiles: dict[str, MeasuredTiles] = {}  # of records whose values were not read
        self.records: dict[str, Record] = {}
        self.seen = Masks()
        self.unknown: dict[str, str] = {}
        self.lost: set[str] = set()  # arrays of `unknown` that are points, by their names

    def record_key(self, key: str) -> str | None:
        """Return the key that a capture point is recorded under.

        None if the model has no such point.
        """
        if not self.known:
            return key
        if key not in self.known:
            return None
        instance = resolve_alias(key, self.known)
        return None if instance is None else instance.key

    def set_tokens(self, tokens: int) -> None:
        """Set the number of tokens of the pass whose values are collected."""
        self._tokens = tokens

    def heads(self, point: str, layer: int) -> int | None:
        """Return a layer's number of heads at a point of q, k or v; None if not known."""
        if self.hp is None or point not in HEADED:
            return None
        if point[0] in "kv" and self.known and not self.known["L0.kv_a"].absent:
            return int(self.hp["n_heads"])  # MLA expands one latent to every head
        if HEADED[point] == "n_kv_heads" and layer < int(self.hp["n_layers"]):
            return kv_head_count(self.hp, layer)
        return int(self.hp[HEADED[point]])

    def cut_to_vocabulary(self, name: str, point: str, values: Numbers) -> Numbers:
        """Return an array without columns after the vocabulary; other points unchanged.

        `name` is the dumped array's. ValueError where it has fewer columns than the vocabulary.
        Columns after it that are not padding are noted in `unknown`.
        """
        if self.hp is None or not values.ndim or not has_vocabulary_axis(point):
            return values
        values, remark = cut_to_vocabulary(values, int(self.hp["vocab_size"]))
        if remark:
            self.unknown[f"{name} (after the vocabulary)"] = remark
        return values

    def refuse_unlike(self, point: str, values: Numbers, rows: Sequence[int] | None = None) -> None:
        """Raise ValueError if an array cannot be a capture point's value: integers, or transposed.

        Points whose values are ids may have integers. `rows` are the token positions of the array's
        rows; None: all tokens.
        """
        if values.dtype.kind in "iub" and point not in DISCRETE:
            raise ValueError(
                f"holds {values.dtype}, no floats; were bfloat16 numbers saved by their bits? save "
                "them as float32"
            )
        tokens = self._tokens
        if rows is not None or tokens is None or values.ndim != 2 or tokens in (1, len(values)):
            return
        if values.shape[1] == tokens and len(values) > 1:
            sizes = self._row_sizes(point)
            hint = "; is it transposed? `aprfmt trace MODEL --map` reads such arrays"
            raise ValueError(
                f"shape {list(values.shape)}; expected a row for each of {tokens} tokens"
                f"{hint if sizes is None or math.prod(sizes) == len(values) else ''}"
            )

    def join_head_rows(self, point: str, values: Numbers) -> Numbers:
        """Return a head norm's [tokens * heads, head size] as [tokens, heads * head size].

        `point` is the capture point of `values`. An array of another shape is returned unchanged.
        """
        sizes, tokens = self._row_sizes(point), self._tokens
        if sizes is None or len(sizes) != 2 or tokens is None:
            return values
        heads, size = sizes
        return values.reshape(tokens, -1) if values.shape == (tokens * heads, size) else values

    def _row_sizes(self, point: str) -> tuple[int, ...] | None:
        """Return the shape of a capture point's value for one token; None if it is not known."""
        return None if self.hp is None else row_sizes(POINTS[point].shape, self.hp, self.known)

    def add(
        self,
        point: str,
        layer: int,
        values: Numbers,
        *,
        rows: Sequence[int] | None = None,
        rank: int = 0,
        seen: NDArray[np.bool_] | None = None,
    ) -> None:
        """Record [tokens, ...] values of a point (`scores`, `probs`: [heads, tokens, keys]).

        `rows` are the token positions of the rows, None for all of them from 0 on. If a key gets
        several values, the one with the lowest rank is recorded, of equal ranks the last. `seen` is
        a mask of the values that exist (a printed text leaves most out); None: all of them.
        """
        key = self._choose_key(point, layer, rank)
        if key is None:
            return
        # Keep only the rows of logits, then the positions, that are asked for.
        axis = 1 if POINTS[point].rows == "scores" else 0
        count = int(values.shape[axis])
        there = self._row_positions(point, count, rows)
        if POINTS[point].rows == "logits" and there is not None and self._logits_rows != "all":
            final = self._logits_rows == "last"
            kept = [len(there) - 1] if final else [int(row) for row in self._logits_rows]
            values, there = values[kept], tuple(there[row] for row in kept)
        if there is not None and self._positions != "all":
            last = self._tokens - 1 if self._tokens else there[-1]
            wanted = {last} if self._positions == "last" else set(self._positions)
            kept = [row for row, position in enumerate(there) if position in wanted]
            values = np.take(values, kept, axis)
            seen = None if seen is None else np.take(seen, kept, axis)
            there = tuple(there[row] for row in kept)
        # Store the values and their statistics.
        values = narrow_values(values)
        known = self._again is None and (seen is None or seen.all())
        stats = compute_stats(values) if known else None
        record = self._record(key, point, layer, tuple(values.shape), there, stats)
        if self._hashes and seen is None:
            record = replace(record, sha256=decoded_sha256(values))
        self.records[key] = record
        if seen is not None:
            self.seen.store(key, seen)
        self._spool.keep(record, values)

    @property
    def takes_unread(self) -> bool:
        """Whether `add_unread` can be used: all rows are wanted, and statistics alone."""
        everything = self._positions == "all" and self._logits_rows == "all"
        return everything and self._again is None and not self._hashes

    def add_unread(
        self,
        point: str,
        layer: int,
        shape: tuple[int, ...],
        tiles: MeasuredTiles,
        *,
        rows: Sequence[int] | None = None,
        rank: int = 0,
    ) -> None:
        """Record a point's shape and where its values are stored, without reading them.

        `tiles` read the stored values when their statistics are asked for. `rows` are the token
        positions of the rows, None for all of them from 0 on. Of several values of a point the one
        with the lowest `rank` is recorded. Only for float32 values, and where `takes_unread` is
        true.
        """
        key = self._choose_key(point, layer, rank, tiles)
        if key is None:
            return
        there = self._row_positions(point, shape[0], rows)
        stats = Deferred(tiles.stats)
        self.records[key] = self._record(key, point, layer, shape, there, stats)
        self._spool.keep(self.records[key], np.empty(0, np.float32))

    def _choose_key(
        self, point: str, layer: int, rank: int, tiles: MeasuredTiles | None = None
    ) -> str | None:
        """Return the key under which a point's value is to be recorded, and note its origin.

        None for a point that is not wanted, and where a value of a lower rank is recorded
        already. `tiles` is given instead of values that were not read.
        """
        own = key_name(point, layer)
        key = self.record_key(own)
        if key is None or (self._wanted is not None and key not in self._wanted):
            return None
        if self._again is not None:
            if (own, rank) != self._again:
                return None
        else:
            before = self._origins.get(key)
            if self._ranks.get(key, rank) < rank or (key != own and key in self.records):
                if self._givers.get(key) != self.giver:
                    self._second.append((self.giver, key, (own, rank), tiles))
                return None
            if before is not None and self._givers[key] != self.giver:
                self._second.append((self._givers[key], key, before, self._tiles.get(key)))
            self._givers[key] = self.giver
        self._ranks[key] = rank
        self._origins[key] = own, rank
        self._tiles.pop(key, None)
        if tiles is not None:
            self._tiles[key] = tiles
        return key

    def _record(
        self,
        key: str,
        point: str,
        layer: int,
        shape: tuple[int, ...],
        there: tuple[int, ...] | None,
        stats: Stats | Deferred[Stats | None] | None,
    ) -> Record:
        """Return the Record of a point's values, with the run's dtype and device.

        `there` are the positions of its rows, None if they are not known. The record has no
        SHA-256.
        """
        known = self.known.get(key)
        return Record(
            POINTS[point if known is None else known.point.name].name,
            layer if known is None else known.layer,
            shape,
            there,
            self._dtype,
            None,
            self._device,
            stats,
        )

    def note_unlike_seconds(self, add: "Callable[[str, Collector], None]") -> None:
        """Note in `unknown` and `lost` the arrays that differ from another of the same point.

        Of two arrays for one point only one is recorded; the other is compared with it. `add` adds
        an array to a collector again, by its name. Arrays of other tokens are not compared; a
        difference within the rounding of the run's dtype is ignored.
        """
        bound = BASE.get(self._dtype, BASE["float32"]).rel_l2
        for name, key, origin, tiles in self._second:
            apart = _distance_of_tiles(tiles, self._tiles.get(key))
            if apart is not None and apart <= bound:
                continue
            held, kept = KeptValues(), self._fetch(key)
            add(name, self.for_reading_again(key, held, origin))
            values = held.fetch(key)
            if values is None or kept is None or values.shape != kept.shape:
                if apart is None:
                    continue
                values = kept = np.zeros(0)
            if not (rel_l2(values, kept) if apart is None else apart) <= bound:
                made = self._derivation_text(values, kept, key)
                if made:
                    point = parse_key(key)[0]
                    self.unknown[name] = f"another array is {point}; this is {made}"
                    continue
                self.lost.add(name)
                why = (
                    "one of the two was written over after it was captured, or is of another run; "
                    "copy what a hook gets (clone)"
                )
                p = _dropped_share(values, kept) or _dropped_share(kept, values)
                if p:
                    why = f"one is the other after dropout of {p:.2g}; run the model in eval mode"
                self.unknown[name] = (
                    f"another array of the same point ({parse_key(key)[0]}) has other values, and "
                    f"was taken: {why}"
                )

    def _derivation_text(self, values: Numbers, kept: Numbers, key: str) -> str:
        """Return in words how a layer makes `values` from `kept`, the recorded values of `key`.

        Some modules return another value than the point's: that of another point, `kept` times a
        factor of the model, or `kept` plus a stream. "" if none of these gives `values`.
        """
        point, layer = parse_key(key)
        dtypes = (self._dtype, exact_16_bit_type(values))
        bound = max(ONE_OPERATION[dtype].rel_l2 for dtype in dtypes if dtype in ONE_OPERATION)
        for name, factor in (self.hp or {}).items():
            scales = name.endswith("_scale") and isinstance(factor, float) and factor != 1
            if scales and rel_l2(values, kept * values.dtype.type(factor)) <= bound:
                return f"{point} times {name}"
        near = (f"L{layer}.", f"L{layer - 1}.out", "embd")
        # Most are apart in a few rows already, and are not read to the end.
        few = slice(max(1, len(values) // _FEW))
        nothing = np.broadcast_to(kept.dtype.type(0), kept.shape)
        with np.errstate(over="ignore", invalid="ignore"):
            most = 2 * bound * float(np.linalg.norm(values))
            for other, record in self.records.items():
                if other == key or record.shape != kept.shape or not other.startswith(near):
                    continue
                stream = self._fetch(other)
                if stream is None:
                    continue
                for text, base in ((other, nothing), (f"{point} plus {other}", kept)):
                    if np.linalg.norm(values[few] - base[few] - stream[few]) > most:
                        continue
                    if rel_l2(values, base + stream) <= bound:
                        return text
        return ""

    def for_reading_again(
        self, key: str, store: ValueStore, origin: Origin | None = None
    ) -> "Collector":
        """Return a collector that puts the values of one record into `store`, without statistics.

        Give it the same arrays again: it stores only the one that this collector recorded under
        `key`, or the one with the (key, rank) `origin`.
        """
        again = copy(self)
        again._spool, again._wanted, again._again = store, {key}, origin or self._origins.get(key)
        again._ranks, again._origins, again.records, again.unknown = {}, {}, {}, {}
        again.lost, again._tiles = set(), {}
        return again

    def add_joined(self, slot: str, layer: int, values: Numbers) -> None:
        """Record a joined result's values [tokens, ...], such as qkv, under its name (`L3.qkv`)."""
        key = key_name(slot, layer)
        if self._again is not None and self._again != (key, 0):
            return
        self._origins[key] = key, 0
        shape = tuple(values.shape)
        there = self._row_positions("q", len(values), None)
        stats = None if self._again else compute_stats(values)
        record = Record(slot, layer, shape, there, self._dtype, None, self._device, stats)
        self.records[key] = record
        self._spool.keep(record, narrow_values(values))

    def _row_positions(
        self, point: str, count: int, rows: Sequence[int] | None
    ) -> tuple[int, ...] | None:
        """Return the token positions of a point's `count` rows; None if they are not known.

        `rows` are the positions if the file says them; they are returned as they are.
        """
        if rows is not None:
            return tuple(rows)
        if POINTS[point].rows == "keys":
            return tuple(range(count))
        if self._tokens is None or count == self._tokens:
            return tuple(range(count))
        # An engine that computes only the rows it needs computes the last one.
        return (self._tokens - 1,) if count == 1 else None

    def trace(
        self,
        run: Mapping[str, Value],
        *,
        resolution: float = 0.0,
        fetch_unread: Callable[[str], Numbers | None] = lambda name: None,
    ) -> Trace:
        """Return what was recorded as a Trace, in execution order.

        Every alias of the model is known. `run` are facts of the run. `resolution` is half a unit
        of the last printed decimal, 0 for exact values. `fetch_unread` returns the values of an
        array that is no capture point, by its name.
        """
        # Bring the records into execution order.
        order = list(self.known) or sorted(self.records, key=_key_order)
        known = [key for key in order if key in self.records]
        known += [key for key in self.records if key not in set(known)]
        aliases = {
            key: target
            for key, instance in self.known.items()
            if instance.alias_of and (target := self.record_key(key)) in self.records
        }
        records = {key: self.records[key] for key in order_slots(known)}
        facts = dict(run) | {"unknown": dict(self.unknown)}
        if self.lost:
            facts["lost"] = sorted(self.lost)
        return Trace(
            facts,
            records,
            {key: target for key, target in aliases.items() if target is not None},
            self._fetch,
            Deferred(lambda: _first_not_finite([records[key] for key in known])),
            self.seen,
            resolution,
            self._tiles.get,
            fetch_unread,
        )

    def close(self) -> None:
        """Close the files in which values that were not read are stored."""
        for tiles in self._tiles.values():
            tiles.close()

    def _fetch(self, key: str) -> Numbers | None:
        """Return the values recorded under a key, read from where they are stored if need be.

        None if they are nowhere.
        """
        tiles = self._tiles.get(key)
        return self._spool.fetch(key) if tiles is None else tiles.read(self.records[key].shape)


def _first_not_finite(records: Iterable[Record]) -> str | None:
    """Return the key of the first record with a NaN or infinity where none is expected."""
    for record in records:
        finite = record.point not in POINTS or POINTS[record.point].finite
        if finite and (stats := record.stats) is not None and stats.nan + stats.inf:
            return record.key
    return None


def _dropped_share(before: Numbers, after: Numbers) -> float:
    """Return the dropout probability p if `after` is `before` after dropout, else 0.0.

    Then the fraction p of the values that are not 0 became 0, and the others are 1 / (1 - p)
    times as large.
    """
    known = before != 0
    zero = known & (after == 0)
    if not zero.any():
        return 0.0
    rest = np.asarray(after, np.float64)[known & ~zero] / before[known & ~zero]
    if not rest.size:
        return 0.0
    factor, share = float(np.median(rest)), zero.sum() / known.sum()
    p = 1 - 1 / factor if factor > 1 else 0.0
    return p if np.allclose(rest, factor, 1e-3) and abs(p - share) < DROPPED else 0.0


def _distance_of_tiles(
    values: MeasuredTiles | None, reference: MeasuredTiles | None
) -> float | None:
    """Return relative L2 of values that were not read; None where they have to be read whole."""
    if values is None or reference is None:
        return None
    if (values.rows, values.width) != (reference.rows, reference.width):
        return None
    found = measure_blocks(values, reference, (values.rows, values.width))
    return None if found is None else found.rel


def _key_order(key: str) -> tuple[int, int, int]:
    """Return a sort key: points before the layers, then the layers, then points after them."""
    layer, _, point = key.rpartition(".")
    row = list(POINTS).index(point) if point in POINTS else len(POINTS)
    if layer:
        return (1, int(layer[1:]), row)
    return (0 if point.startswith("embd") else 2, 0, row)


def narrow_values(values: Numbers) -> Numbers:
    """Return values in a trace's dtypes: float32, float64, or int64 for ids."""
    if values.dtype.kind in "iub":
        return np.ascontiguousarray(values, np.int64)
    wide = values.dtype == np.float64
    return np.ascontiguousarray(values, np.float64 if wide else np.float32)


def drop_batch_axis(values: Numbers, where: str) -> Numbers:
    """Return values without a batch axis of one; ValueError for a single number."""
    if values.ndim > 2 and values.shape[0] == 1:
        values = values[0]
    if values.ndim < 1:
        raise ValueError(f"{where}: a single number")
    return values


def split_heads(
    values: Numbers, heads: int | None, tokens: int | None, like: Numbers | None, first: bool
) -> Numbers:
    """Return [tokens, heads, d] of [tokens, width], [tokens, heads, d] or [heads, tokens, d].

    `heads` and `tokens` are the sizes, None if unknown. If both axes have the same length,
    similarity to `like` [tokens, heads, d] decides, and without `like`, `first`: whether this
    engine usually puts heads first. An array with another number of axes, or with two and unknown
    `heads`, is returned unchanged.
    """
    if values.ndim == 2:
        return values if heads is None else values.reshape(len(values), heads, -1)
    if values.ndim != 3:
        return values
    # Three axes: find which of the first two counts heads.
    a, b = values.shape[:2]
    if a == b and (heads is None or heads == a):
        if like is not None and like.shape == values.shape:
            swapped = values.swapaxes(0, 1)
            return max((values, swapped), key=lambda x: _mean_cosine(x, like))
        return values.swapaxes(0, 1) if first else values
    if (tokens is not None and b == tokens and a != tokens) or (heads == a and heads != b):
        return values.swapaxes(0, 1)
    return values


def _mean_cosine(x: Numbers, like: Numbers) -> float:
    """Return the mean |cosine| of the vectors of two arrays [tokens, heads, d]."""
    dot = np.abs(np.sum(x * like, axis=-1))
    norms = np.linalg.norm(x, axis=-1) * np.linalg.norm(like, axis=-1)
    return float(np.mean(dot / np.maximum(norms, 1e-30)))


def pairs_to_halves(x: Numbers, start: int = 0, stop: int | None = None) -> Numbers:
    """Return x with rotated elements moved from adjacent pairs to split halves of the last axis.

    Elements 0, 2, 4 ... come first, then 1, 3, 5 ... Only elements from `start` to `stop` (None:
    the end) are moved.
    """
    end = x.shape[-1] if stop is None else stop
    pairs = x[..., start:end]
    return np.concatenate(
        [x[..., :start], pairs[..., 0::2], pairs[..., 1::2], x[..., end:]], axis=-1
    )
