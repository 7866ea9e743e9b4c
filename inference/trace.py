"""Traces: what a pass recorded at its capture points, and the recorder that fills them."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from aprfmt.digest import decoded_sha256
from aprfmt.errors import UsageError
from aprfmt.inference.backends.base import Array, Backend
from aprfmt.inference.capture import POINTS, SLOTS, WHOLE, Instance, key_name, resolve
from aprfmt.inference.context import PassFacts
from aprfmt.stats import Stats, merge
from aprfmt.tensor import Value

Numbers = NDArray[Any]
Positions = Literal["all", "last"] | Sequence[int]
Form = Literal["fused", "stepped"]
SCHEMA = 1


@dataclass(frozen=True)
class Record:
    """One point of one pass.

    `shape` is that of the recorded values (`scores`: [heads, tokens, keys]), `positions` the token
    positions of their rows, None where they are not known (APRT). `dtype` is the arithmetic's.
    `form` says whether the layer's attention and biased products ran fused or step by step; None
    for whole-model points. `sha256` is over the decoded values as digest.py defines it.
    """

    point: str
    layer: int
    shape: tuple[int, ...]
    positions: tuple[int, ...] | None
    dtype: str
    form: Form | None
    device: str
    stats: Stats | None
    sha256: str | None = None

    @property
    def key(self) -> str:
        """`L3.attn_out`."""
        return key_name(self.point, self.layer)

    @property
    def count(self) -> int:
        """How many values were recorded."""
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True)
class Trace:
    """The records of one pass by key, in execution order, and how to get at the values.

    `run` has what identifies the run: ids, prompt, model, architecture, and the backend's facts.
    `aliases` maps keys that were asked for to the keys they equal by construction. `fetch` returns
    the recorded values of a key, None where only statistics were kept. `nonfinite` is the first
    key with a NaN or an infinity; the pass ended there if it was told to.
    """

    run: Mapping[str, Value]
    records: Mapping[str, Record]
    aliases: Mapping[str, str] = field(default_factory=dict)
    fetch: Callable[[str], Numbers | None] = lambda key: None
    nonfinite: str | None = None

    def find(self, key: str) -> Record | None:
        """Return the record of a key or of the key it equals; None where it was not captured."""
        return self.records.get(self.aliases.get(key, key))

    def values(self, key: str) -> Numbers | None:
        """Return the recorded values of a key or of the key it equals."""
        return self.fetch(self.aliases.get(key, key))

    def slot(self, name: str, layer: int) -> Stats | None:
        """Return the statistics of a slot of SLOTS, its parts joined; None where one is missing."""
        found = [self.find(key_name(point, layer)) for point in SLOTS[name]]
        stats = [record.stats for record in found if record is not None]
        parts = [part for part in stats if part is not None]
        return merge(parts) if len(parts) == len(SLOTS[name]) else None


class StoppedTrace(Exception):
    """A pass ended early because a point held a NaN or an infinity; not an error of the run."""


class Tracer:
    """The recorder of one pass.

    `wanted` are keys of `known` (aliases are followed, absent points dropped); `positions` are
    token positions, of which only those in the pass are recorded. `keep` receives every record
    with its values as they come; `hashes` adds their SHA-256; `stop` ends the pass at the first
    point that is not finite.
    """

    def __init__(
        self,
        backend: Backend,
        known: Mapping[str, Instance],
        wanted: Collection[str],
        *,
        positions: Positions = "all",
        keep: Callable[[Record, Numbers], None] | None = None,
        hashes: bool = False,
        stop: bool = False,
    ) -> None:
        self._backend = backend
        self._positions = positions
        self._keep = keep
        self._hashes = hashes
        self._stop = stop
        self._facts: PassFacts | None = None
        self.records: dict[str, Record] = {}
        self.aliases: dict[str, str] = {}
        self.nonfinite: str | None = None
        self._wanted: set[tuple[str, int]] = set()
        for key in wanted:
            instance = resolve(key, known)
            if instance is not None:
                self._wanted.add((instance.point.name, instance.layer))
                if instance.key != key:
                    self.aliases[key] = instance.key
        self._stepped = {layer for point, layer in self._wanted if POINTS[point].inner}

    def begin(self, facts: PassFacts) -> None:
        """Take note of the pass; UsageError for a second one, or for positions it lacks."""
        if self._facts is not None:
            raise UsageError("a trace records one pass; make a new one for the next")
        self._facts = facts
        chosen = self._positions
        if not isinstance(chosen, str):
            missing = sorted(set(chosen) - set(facts.positions.tolist()))
            if missing:
                raise UsageError(
                    f"positions {', '.join(map(str, missing))} are not in the pass; it has "
                    f"{int(facts.positions[0])} to {int(facts.positions[-1])}"
                )

    def wants(self, point: str, layer: int) -> bool:
        """Say whether the point is recorded."""
        return (point, layer) in self._wanted

    def capture(self, point: str, layer: int, x: Array) -> Array:
        """Record the point; the pass goes on with the same value."""
        assert self._facts is not None
        x_rows, positions = self._cut(point, x, self._facts)
        stats = self._backend.stats(x_rows)
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
        if self.nonfinite is None and POINTS[point].finite and stats.nan + stats.inf:
            self.nonfinite = record.key
            if self._stop:
                raise StoppedTrace(record.key)
        return x

    def _cut(self, point: str, x: Array, facts: PassFacts) -> tuple[Array, tuple[int, ...]]:
        """Return the rows of the chosen positions, and these positions."""
        kind = POINTS[point].rows
        if kind == "keys":
            return x, tuple(range(int(x.shape[0])))
        there = facts.positions.tolist()
        if kind == "logits":
            there = [there[row] for row in facts.logit_rows]
        if self._positions == "all":
            return x, tuple(there)
        wanted = {int(facts.positions[-1])} if self._positions == "last" else set(self._positions)
        rows = [row for row, position in enumerate(there) if position in wanted]
        kept = tuple(there[row] for row in rows)
        if len(rows) == len(there):
            return x, kept
        return (x[:, rows] if kind == "scores" else x[rows]), kept

    def trace(
        self, run: Mapping[str, Value], fetch: Callable[[str], Numbers | None] | None = None
    ) -> Trace:
        """Return what was recorded."""
        return Trace(
            run,
            dict(self.records),
            dict(self.aliases),
            fetch if fetch is not None else lambda key: None,
            self.nonfinite,
        )


class Kept:
    """Values kept in memory: pass `keep` to a Tracer and `fetch` to its trace."""

    def __init__(self) -> None:
        self._values: dict[str, Numbers] = {}

    def keep(self, record: Record, values: Numbers) -> None:
        """Copy: a backend may write into an activation later."""
        self._values[record.key] = np.array(values)

    def fetch(self, key: str) -> Numbers | None:
        """Return the values of a key."""
        return self._values.get(key)


def parse_positions(text: str) -> Positions:
    """Return the positions that `--positions` names: all, last, or 1,3,8; UsageError otherwise."""
    words: dict[str, Positions] = {"all": "all", "last": "last"}
    if text in words:
        return words[text]
    if not re.fullmatch(r"\d{1,9}(,\d{1,9})*", text):
        raise UsageError(f"positions {text!r}; expected all, last, or numbers like 1,3")
    return tuple(int(part) for part in text.split(","))
