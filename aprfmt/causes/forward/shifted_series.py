"""Finds a series of the residual stream that a run recorded one entry early or late.

A *series* is the outputs of all layers as a run lists them, and an *entry* one of them.

transformers' Mamba models list no embedding among their `hidden_states`: every entry belongs to the
next layer. A run may have other faults, so the series is not asked to equal the model's own.
It is judged by what reproduces: entries that no operation gives under their own names, and that the
model's operations give, from the entry before, under the next names.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from aprfmt.causes.forward.mismatch import Array, Change, Mismatch
from aprfmt.inference.capture import key_name, parse_key
from aprfmt.inference.replay.recorded_trace import RecordedTrace
from aprfmt.inference.replay.shadow import ShadowPass, ShadowPoint, run_shadow_pass
from aprfmt.measure.distances import ValueBlocks
from aprfmt.measure.trace_view import RecordLike, TraceLike, WrappedTrace
from aprfmt.measure.verdicts import Certainty

ENTERING = ("embd", "embd_scaled", "in")  # points of the stream that enters the first layer
NEARER = 0.25  # of the distance under its own name, where faults keep all entries from agreeing
SHOWN = 4  # entries that one sentence names
ENOUGH = 2  # entries that have to be NEARER


@dataclass(frozen=True)
class ShiftedSeries:
    """A series of layer outputs recorded one entry off: the finding, and the trace put right."""

    change: Change
    recorded: RecordedTrace


class RenamedTrace(WrappedTrace):
    """A trace whose records are given under other keys than they were recorded under."""

    def __init__(self, trace: TraceLike, moved: Mapping[str, str]) -> None:
        """Wrap a trace; `moved` is {recorded key: key that its values belong to}."""
        super().__init__(trace)
        kept = {key: key for key in trace.records if key not in moved}
        self._keys = {moved[key]: key for key in moved if key in trace.records} | kept
        self._moved = {*moved}

    @cached_property
    def records(self) -> Mapping[str, RecordLike]:
        """The trace's records by the keys that they really belong to."""
        return {key: self._rename_record(key, old) for key, old in self._keys.items()}

    def find_record(self, key: str) -> RecordLike | None:
        """Return the trace's record that really belongs to a key; None without one."""
        old = self._source(key)
        return None if old is None else self.records.get(key) or self._trace.find_record(old)

    def recorded_values(self, key: str) -> Array | None:
        """Return the recorded values that really belong to a key; None without any."""
        old = self._source(key)
        return None if old is None else self._trace.recorded_values(old)

    def values_mask(self, key: str) -> Array | None:
        """Return which of the values that belong to a key are there (bool array), None for all."""
        old = self._source(key)
        return None if old is None else self._trace.values_mask(old)

    def value_blocks(self, key: str) -> ValueBlocks | None:
        """Return the values that belong to a key, to be read in blocks; None if impossible."""
        old = self._source(key)
        return None if old is None else self._trace.value_blocks(old)

    def _source(self, key: str) -> str | None:
        """Return the recorded key whose values belong to `key`; None if these were moved away."""
        if key in self._keys:
            return self._keys[key]
        record = self._trace.find_record(key)
        return None if record is None or record.key in self._moved else key

    def _rename_record(self, key: str, old: str) -> RecordLike:
        """Return the record that was recorded under the key `old`, under the key it belongs to."""
        point, layer = parse_key(key)
        record = self._trace.records[old]
        made: RecordLike = replace(record, point=point, layer=layer)  # type: ignore[type-var]
        return made


def find_shifted_series(case: Mismatch) -> ShiftedSeries | None:
    """Return the series of layer outputs recorded one entry early or late; None if none was.

    The first differing point must be the stream that enters layer 0, which a lookup gives, or the
    output of layer 0. A stale embedding is no shift: what the layers make of it agrees as
    recorded.
    """
    for moved in _shifted_keys(case):
        recorded = case.recorded.with_trace(RenamedTrace(case.recorded.trace, moved))
        found = run_shadow_pass(case.patched, recorded)
        agree, judged = _agreeing_entries(case, found, moved)
        if not agree and not _all_nearer(case, found, moved):
            continue
        return ShiftedSeries(_shift_change(case, moved, agree, judged), recorded)
    return None


def _shifted_keys(case: Mismatch) -> Iterator[Mapping[str, str]]:
    """Yield {recorded key: key that it belongs to} for a series one entry early or late."""
    first, key = case.view.point in ENTERING and case.layer <= 0, case.view.key
    outputs = [key_name("out", layer) for layer in range(case.patched.n_layers)]
    entered = [k for k in case.plain if parse_key(k)[0] in ENTERING and parse_key(k)[1] <= 0]
    places = [*([key] if first else entered[-1:]), *outputs, "final_norm"]
    if first:
        pairs = [*pairwise(places)]
    elif entered and key in outputs[:1]:
        pairs = [*zip(outputs, places, strict=False)]
    else:
        return
    moved = {old: new for old, new in pairs if case.recorded.has_record(old)}
    if len(moved) > 1:
        yield moved


def _entries(
    case: Mismatch, found: ShadowPass, moved: Mapping[str, str]
) -> Iterator[tuple[str, ShadowPoint, ShadowPoint]]:
    """Yield (key, the point where it was recorded, the point where it belongs) of each entry.

    Only entries that are compared in both passes; `found` is the pass that reads the moved
    series. The stream that enters layer 0 is left out: a lookup shows no shift.
    """
    for key, view in case.found.views.items():
        after = found.views.get(moved.get(key, key))
        if view.residual is None or after is None or after.residual is None:
            continue
        if after.point not in ENTERING:
            yield key, view, after


def _agreeing_entries(
    case: Mismatch, found: ShadowPass, moved: Mapping[str, str]
) -> tuple[int, int]:
    """Return (entries that agree only with the next layer's output, entries compared).

    (0, 0) where one agrees as it was recorded, and no longer.
    """
    pairs = [(view, after) for _, view, after in _entries(case, found, moved)]
    entries = [(view, after) for view, after in pairs if view.flagged or after.flagged]
    if any(not view.flagged for view, _ in entries):
        return 0, 0
    return sum(not after.flagged for _, after in entries), len(entries)


def _all_nearer(case: Mismatch, found: ShadowPass, moved: Mapping[str, str]) -> bool:
    """Return whether all differing entries are much nearer to the next layer's output.

    Their distance from it is at most NEARER of that under their own name. The first one need only
    be nearer, since a whole layer lies between it and the token ids.
    """
    near = {
        key: (after.residual or 0.0) <= (1.0 if key == case.view.key else NEARER) * view.residual
        for key, view, after in _entries(case, found, moved)
        if view.residual is not None and (view.flagged or after.flagged)
    }
    return len({*near} - {case.view.key}) >= ENOUGH and all(near.values())


def _shift_change(case: Mismatch, moved: Mapping[str, str], agree: int, judged: int) -> Change:
    """Return the Change for a series recorded under other keys; `agree` of `judged` entries fit."""
    names = [f"what is named {name} is the model's {at}" for name, at in moved.items()]
    if len(names) > SHOWN:
        names[SHOWN - 1 : -1] = [f"{len(names) - SHOWN} more"]
    rest = "" if agree == judged else f"; {agree} of {judged} entries agree there"
    most: Certainty = "confirmed" if agree == judged else "explained" if agree else "located"
    target = moved[case.view.key]
    return Change(
        "capture_point",
        f"what is recorded was taken at another point: {'; '.join(names)}{rest}",
        tuple(moved),
        values={"recorded_as": case.view.point, "is": f"what belongs to {target}"},
        scoped=False,
        most=most,
    )
