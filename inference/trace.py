"""Traces: what a pass recorded at its capture points, and the recorder that fills them.

A *slot* is a name for several points of a layer that are joined along the last axis: `qkv` for q, k
and v.
"""

import re
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from aprfmt.base.data_frames import Row, Tabular
from aprfmt.base.deferred import Deferred, DeferredField
from aprfmt.base.protocols import Value
from aprfmt.errors import UsageError
from aprfmt.inference.backends.base import Array, Backend
from aprfmt.inference.capture import POINTS, SLOTS, WHOLE, PointInstance, key_name, resolve_alias
from aprfmt.inference.context import PassFacts
from aprfmt.inference.record import Form as Form
from aprfmt.inference.record import Record as Record
from aprfmt.inference.record import record_to_json
from aprfmt.measure.distances import ValueBlocks
from aprfmt.tensors.digest import decoded_sha256
from aprfmt.tensors.stats import Stats, merge_stats

Numbers = NDArray[Any]
Positions = Literal["all", "last"] | Sequence[int]
SCHEMA = 1
# What attention reads with a cache -> what it reads without one.
CACHED: Mapping[str, str] = {"k_cache": "k_rope", "v_cache": "v_norm"}


def no_blocks(key: str) -> ValueBlocks | None:
    """Return None: values are fetched as a whole."""
    return None


@dataclass(frozen=True)
class Trace(Tabular):
    """The records of one pass by key, in execution order, and access to their values.

    `run` has what identifies the run: ids, prompt, model, architecture, and the backend's facts.
    `aliases` maps keys that were asked for to the keys they equal by construction. `fetch` returns
    the recorded values of a key, None where only statistics were recorded. `nonfinite` is the first
    key with a NaN or an infinity; a pass with `stop` ended there. `masks` say which values are
    there of keys whose file holds only some, `resolution` half a unit of its last decimal. `blocks`
    gives the values that `fetch` returns piece by piece, None where they can only be fetched whole.
    `fetch_unread` returns the values of an array of the dump that is no capture point, by its name.
    """

    run: Mapping[str, Value]
    records: Mapping[str, Record]
    aliases: Mapping[str, str] = field(default_factory=dict)
    fetch: Callable[[str], Numbers | None] = lambda key: None
    nonfinite: DeferredField[str | None] = DeferredField(None)
    masks: Mapping[str, NDArray[np.bool_]] = field(default_factory=dict)
    resolution: float = 0.0
    blocks: Callable[[str], ValueBlocks | None] = no_blocks
    fetch_unread: Callable[[str], Numbers | None] = lambda name: None

    def __repr__(self) -> str:
        """Return a short text: the class, the model, and the number of records."""
        from aprfmt.base.object_repr import short_repr

        return short_repr(self, self.run.get("model", ""), f"{len(self.records)} records")

    def _ipython_key_completions_(self) -> list[str]:
        """Return the keys of the records."""
        return list(self.records)

    def find_record(self, key: str) -> Record | None:
        """Return the record of a key or of the key it equals; None where it was not captured.

        The key of a slot (`L3.qkv`) gives one record of its points together, if all were recorded.
        """
        found = self.records.get(self.aliases.get(key, key))
        return self._joined_record(key) if found is None else found

    def recorded_values(self, key: str) -> Numbers | None:
        """Return the recorded values of a key or of the key it equals; None where there are none.

        The values of a slot's points (`L3.qkv`) are joined along the last axis, token by token.
        """
        if self.aliases.get(key, key) in self.records:
            return self.fetch(self.aliases.get(key, key))
        if self._joined_record(key) is None:
            return None
        found = [self.fetch(self.aliases.get(part, part)) for part in self.slot_parts(key)]
        whole = [values.reshape(len(values), -1) for values in found if values is not None]
        return np.concatenate(whole, axis=-1) if len(whole) == len(found) else None

    def values_mask(self, key: str) -> NDArray[np.bool_] | None:
        """Return a mask of the values of a key that were recorded; None if all were.

        Traces of printed text have only some values of a point.
        """
        return self.masks.get(self.aliases.get(key, key))

    def unread_values(self, name: str) -> Numbers | None:
        """Return the values of a dumped array that is no capture point; None if it has none."""
        return self.fetch_unread(name)

    def value_blocks(self, key: str) -> ValueBlocks | None:
        """Return the values of a key to be read in blocks; None if they can only be read whole."""
        own = self.aliases.get(key, key)
        return self.blocks(own) if own in self.records and own not in self.masks else None

    def slot_parts(self, key: str) -> list[str]:
        """Return the keys of the points that a slot's key (`L3.qkv`) names, or the key itself."""
        layer, _, slot = key.rpartition(".")
        points = SLOTS.get(slot, ())
        return [f"{layer}.{point}" for point in points] if layer and len(points) > 1 else [key]

    def _joined_record(self, key: str) -> Record | None:
        """Return one record for the points of a slot together; None if there is none.

        There is none if `key` names no slot, or if the points are not all recorded on the same
        rows.
        """
        keys = self.slot_parts(key)
        found = [self.records.get(self.aliases.get(part, part)) for part in keys]
        parts = [record for record in found if record is not None]
        if len(keys) < 2 or len(parts) != len(found):
            return None
        first, rows = parts[0], parts[0].shape[0]
        if any(part.shape[:1] != (rows,) or part.positions != first.positions for part in parts):
            return None  # parts of unknown shape, or of other rows
        width = sum(part.count for part in parts) // rows if rows else 0
        slot = key.rpartition(".")[2]
        stats = Deferred(lambda: self.slot_stats(slot, first.layer))
        return replace(first, point=slot, shape=(rows, width), stats=stats, sha256=None)

    def slot_stats(self, name: str, layer: int) -> Stats | None:
        """Return the statistics over all capture points of a slot in a layer, merged into one.

        A slot is a key of SLOTS: a name that stands for one or several points, as "qkv" for q, k
        and v. None if a point was not recorded.
        """
        found = [self.find_record(key_name(point, layer)) for point in SLOTS[name]]
        stats = [record.stats for record in found if record is not None]
        parts = [part for part in stats if part is not None]
        return merge_stats(parts) if len(parts) == len(SLOTS[name]) else None

    def _repr_html_(self) -> str:
        """Return the HTML a notebook shows: the run, and the statistics of the first points."""
        from aprfmt.base.notebook import ROWS, Card, Table

        ids = self.run.get("ids")
        known = [one for one in self.records.values() if one.stats is not None]
        rows = [
            (
                one.key,
                list(one.shape),
                *(
                    "-" if number is None else f"{number:.4g}"
                    for number in (one.stats.mean, one.stats.std, one.stats.absmax)
                ),
            )
            for one in known[:ROWS]
            if one.stats is not None
        ]
        odd = f"first NaN or infinity: {self.nonfinite}" if self.nonfinite else ""
        return Card(
            f"Trace of {self.run.get('model') or self.run.get('path') or 'a saved run'}",
            odd,
            "bad",
            [
                ("architecture", self.run.get("architecture")),
                ("prompt", self.run.get("prompt")),
                ("tokens", len(ids) if isinstance(ids, Sequence) else None),
                ("points", len(self.records)),
            ],
            [Table(("point", "shape", "mean", "std", "largest"), rows, len(known))],
        ).html()

    def table_rows(self) -> Sequence[Row]:
        """Return a row for each point: key, layer, shape and statistics."""
        rows = [record_to_json(record) for record in self.records.values()]
        left_out = ("positions", "stats")
        return [
            {key: value for key, value in row.items() if key not in left_out}
            | (row["stats"] if isinstance(row["stats"], dict) else {})
            for row in rows
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the trace as JSON: the run, every record with its statistics, and the aliases."""
        return {
            "trace": dict(self.run),
            "records": [record_to_json(record) for record in self.records.values()],
            "aliases": dict(self.aliases),
            "nonfinite": self.nonfinite,
        }


def order_slots(keys: Iterable[str]) -> list[str]:
    """Return keys in order, with the key of a slot moved to where its first point stands.

    `L3.qkv` comes after `L3.attn_norm`, or before the layer's first key.
    """
    listed = list(keys)
    joined = {key for key in listed if len(SLOTS.get(key.rpartition(".")[2], ())) > 1}
    found = [key for key in listed if key not in joined]
    for key in (key for key in listed if key in joined):
        layer = key.rpartition(".")[0]
        after = f"{layer}.attn_norm"
        at = (
            found.index(after) + 1
            if after in found
            else next(
                (i for i, other in enumerate(found) if other.startswith(f"{layer}.")), len(found)
            )
        )
        found.insert(at, key)
    return found


class StoppedTrace(Exception):
    """A pass ended early because a point held a NaN or an infinity; not an error of the run."""


class Tracer:
    """The recorder of one pass.

    `wanted` are keys of `known` (aliases are followed, absent points dropped); `positions` are
    token positions, of which only those in the pass are recorded. `keep` receives every record
    with its values as they come; `hashes` adds their SHA-256; `stop` ends the pass at the first
    point that is not finite. `cached` passes read k_cache and v_cache; in others these equal
    k_rope and v, after its norm where there is one.
    """

    def __init__(
        self,
        backend: Backend,
        known: Mapping[str, PointInstance],
        wanted: Collection[str],
        *,
        positions: Positions = "all",
        keep: Callable[[Record, Numbers], None] | None = None,
        hashes: bool = False,
        stop: bool = False,
        cached: bool = False,
    ) -> None:
        """Resolve the wanted keys to points; nothing is recorded yet.

        `known` are the model's points by key. `keep` gets every record with its values, `hashes`
        adds a digest of the values to each, `stop` ends the pass at the first NaN or infinity.
        `cached`: the pass continues a cache, which k_cache and v_cache are read from.
        """
        self._backend = backend
        self._positions = positions
        self._keep = keep
        self._hashes = hashes
        self._stop = stop
        self._facts: PassFacts | None = None
        self.records: dict[str, Record] = {}
        self.aliases: dict[str, str] = {}
        self.nonfinite: str | None = None
        self._every: dict[str, tuple[int, ...]] = {}  # all positions, by what rows count
        self._wanted: set[tuple[str, int]] = set()
        for key in wanted:
            instance = known.get(key)
            if instance is None or instance.alias_of or instance.absent:
                instance = resolve_alias(key, known)
            if instance is not None:
                self._wanted.add((instance.point.name, instance.layer))
                if instance.key != key:
                    self.aliases[key] = instance.key
        if not cached:
            self._alias_cache(known)
        # Statistics that wait until the pass is over; None where values are stored as they come.
        self._pending = backend.pending() if keep is None and not hashes else None
        self._stepped = {layer for point, layer in self._wanted if POINTS[point].inner}

    def begin(self, facts: PassFacts) -> None:
        """Store the facts of the pass that begins.

        Raises UsageError for a second pass, or for wanted positions that it lacks.
        """
        if self._facts is not None:
            raise UsageError("a trace records one pass; make a new one for the next")
        self._facts = facts
        check_positions(self._positions, facts.positions.tolist())

    def _alias_cache(self, known: Mapping[str, PointInstance]) -> None:
        """Map wanted k_cache and v_cache to the points that a pass without a cache reads.

        `known` are the model's points by key.
        """
        for cached, own in CACHED.items():
            for layer in [layer for point, layer in self._wanted if point == cached]:
                self._wanted.discard((cached, layer))
                instance = resolve_alias(key_name(own, layer), known)
                if instance is not None:
                    self._wanted.add((instance.point.name, instance.layer))
                    self.aliases[key_name(cached, layer)] = instance.key

    def wants(self, point: str, layer: int) -> bool:
        """Return whether the point is recorded in this layer."""
        return (point, layer) in self._wanted

    def capture(self, point: str, layer: int, x: Array) -> Array:
        """Record the value of a point, and return it unchanged for the pass.

        Raises StoppedTrace if it is not finite and the trace ends there.
        """
        assert self._facts is not None
        x_rows, positions = self._select_rows(point, x, self._facts)
        if not positions:
            return x  # logits of other rows only: absent, never a record of nothing
        stats = None
        if self._pending is None:
            stats = self._backend.stats(x_rows)
        else:
            self._pending.add(x_rows)
        form: Form | None = None
        if layer != WHOLE:
            form = "stepped" if layer in self._stepped else "fused"
        record = Record(
            point,
            layer,
            tuple(int(size) for size in x_rows.shape),
            positions,
            self._backend.dtype,
            form,
            self._backend.device,
            stats,
        )
        if self._keep is not None or self._hashes:
            values = self._backend.to_numpy(x_rows)
            if self._hashes:
                record = replace(record, sha256=decoded_sha256(values))
            if self._keep is not None:
                self._keep(record, values)
        self.records[record.key] = record
        if stats is not None and self._note_nonfinite(record):
            raise StoppedTrace(record.key)
        return x

    def _note_nonfinite(self, record: Record) -> bool:
        """Note the record if it is the first that is not finite; return whether to stop there.

        Its key is stored in `nonfinite`.
        """
        stats = record.stats
        if self.nonfinite is None and POINTS[record.point].finite and stats is not None:
            if stats.nan + stats.inf:
                self.nonfinite = record.key
                return self._stop
        return False

    def _read_pending(self) -> None:
        """Add statistics that were computed on the device; drop records after the trace's end."""
        if self._pending is None:
            return
        measured: dict[str, Record] = {}
        for waited, stats in zip(self.records.values(), self._pending.read(), strict=True):
            record = measured[waited.key] = waited.with_stats(stats)
            if stats.nan + stats.inf and self._note_nonfinite(record):
                break
        self.records = measured
        self._pending = None

    @property
    def replay_key(self) -> Hashable | None:
        """A key that is equal for passes one recording serves; None if no recording can.

        Only traces whose statistics all wait on the device can be replayed.
        """
        if self._pending is None:
            return None
        chosen = self._positions if isinstance(self._positions, str) else tuple(self._positions)
        return frozenset(self._wanted), chosen

    def restart(self) -> None:
        """Discard what was recorded, to record the same pass once more."""
        self._facts, self.records, self.nonfinite = None, {}, None
        if self._pending is not None:
            self._pending = self._backend.pending()

    def join_statistics(self) -> None:
        """Make what is enqueued after the pass wait for the statistics."""
        if self._pending is not None:
            self._pending.join()

    @property
    def ran(self) -> bool:
        """Whether a pass was run with this recorder; a replayed pass does not count."""
        return self._facts is not None

    def replay_template(self) -> tuple[dict[str, Record], Any]:
        """Return (records, pending statistics) of a recorded pass, which each replay overwrites."""
        return self.records, self._pending

    def take_replay(self, template: tuple[dict[str, Record], Any]) -> None:
        """Take records and pending statistics from the template of a pass that was replayed."""
        self.records, self._pending = template

    def _select_rows(self, point: str, x: Array, facts: PassFacts) -> tuple[Array, tuple[int, ...]]:
        """Return (x at the chosen positions, these positions) for a point.

        What rows of the point are depends on its kind: tokens, keys, logits' rows, or the sequence.
        """
        kind = POINTS[point].rows
        if kind == "keys":
            return x, tuple(range(int(x.shape[0])))
        if kind == "sequence":
            return x, (int(facts.positions[-1]),)
        if self._positions == "all" and kind in self._every:
            return x, self._every[kind]  # of a long prompt they are slow to list at each point
        there = facts.positions.tolist()
        if kind == "logits":
            there = [there[row] for row in facts.logit_rows]
        if self._positions == "all":
            self._every[kind] = tuple(there)
            return x, self._every[kind]
        wanted = {int(facts.positions[-1])} if self._positions == "last" else set(self._positions)
        rows = [row for row, position in enumerate(there) if position in wanted]
        kept = tuple(there[row] for row in rows)
        if len(rows) == len(there):
            return x, kept
        return (x[:, rows] if kind == "scores" else x[rows]), kept

    def trace(
        self, run: Mapping[str, Value], fetch: Callable[[str], Numbers | None] | None = None
    ) -> Trace:
        """Return the trace of what was recorded; `run` says what ran, `fetch` returns values."""
        self._read_pending()
        return Trace(
            run,
            dict(self.records),
            dict(self.aliases),
            fetch if fetch is not None else lambda key: None,
            self.nonfinite,
        )


class ValueStore(Protocol):
    """A store of recorded values: takes them as they come, returns them later."""

    def keep(self, record: Record, values: Numbers) -> None:
        """Store a record's values."""
        ...

    def fetch(self, key: str) -> Numbers | None:
        """Return the values of a key, None where they were not stored."""
        ...


class KeptValues:
    """Recorded values in memory: pass `keep` to a Tracer and `fetch` to its trace."""

    def __init__(self) -> None:
        """Start without values."""
        self._values: dict[str, Numbers] = {}

    def keep(self, record: Record, values: Numbers) -> None:
        """Store a copy of a record's values, for a backend may write into an activation later."""
        self._values[record.key] = np.array(values)

    def fetch(self, key: str) -> Numbers | None:
        """Return the values of a key; None if it was not recorded."""
        return self._values.get(key)


def check_positions(chosen: Positions, available: Sequence[int]) -> None:
    """Raise UsageError for chosen positions that are not among those of a pass."""
    missing = [] if isinstance(chosen, str) else sorted(set(chosen) - set(available))
    if missing:
        raise UsageError(
            f"positions {', '.join(map(str, missing))} are not in the pass; it has {available[0]} "
            f"to {available[-1]}"
        )


def parse_positions(text: str) -> Positions:
    """Return the positions of a `--positions` argument: "all", "last", or a tuple of numbers.

    Raises UsageError for anything but all, last, or numbers like 1,3,8.
    """
    words: dict[str, Positions] = {"all": "all", "last": "last"}
    if text in words:
        return words[text]
    if not re.fullmatch(r"\d{1,9}(,\d{1,9})*", text):
        raise UsageError(f"positions {text!r}; expected all, last, or numbers like 1,3")
    return tuple(int(part) for part in text.split(","))
