"""Dumps of several sequences: which one is examined, and whether one has another's rows.

A and B are the two models, runs or traces that are compared; a *side* is one of them.

A server computes many requests in one batch. The values of one request may be another's: then the
right rows are in the same two dumps, and are found there before any operation is accused.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from aprfmt.base.deferred import Deferred
from aprfmt.diagnosis import trace_pair
from aprfmt.diagnosis.sides import Side, open_side_trace
from aprfmt.errors import AprfmtError
from aprfmt.inference.engines.dumps import dump_sequences as sequences_of_dump
from aprfmt.inference.replay.patched_model import PatchedModel
from aprfmt.inference.replay.recorded_trace import RecordedTrace
from aprfmt.inference.replay.shadow import run_shadow_pass
from aprfmt.inference.trace import Trace, no_blocks
from aprfmt.measure.findings import Finding
from aprfmt.measure.proofs import unfitted_proof
from aprfmt.measure.trace_view import dump_sequences, sequence_name
from aprfmt.measure.traces import PointDiff
from aprfmt.model import Model
from aprfmt.model.ledger import NotCompared, State

MOST = 64  # other sequences that are read
FEW = 16  # other sequences on which the model is run
Ids = tuple[int, ...]


@dataclass
class BatchSequences:
    """The sequences in both sides' dumps, of which that of `ids` is examined.

    Every other one is opened when it is first asked for.
    """

    sides: Mapping[str, Side]
    traces: Mapping[str, Trace]
    models: Mapping[str, Model | None]
    ids: Ids
    stack: ExitStack
    opened: dict[tuple[str, Ids], Trace | None] = field(default_factory=dict)
    compared: dict[Ids, Sequence[PointDiff]] = field(default_factory=dict)

    def others(self, label: str) -> list[Ids]:
        """Return the token ids of the other sequences in a side's dump, at most MOST.

        `label` is the side, "A" or "B". Some dumps do not say the ids.
        """
        found = dump_sequences(self.traces[label])[1]
        return [ids for ids in found if ids is not None and ids != self.ids][:MOST]

    def trace(self, label: str, ids: Ids) -> Trace | None:
        """Return a side's trace of the sequence with these token ids; None if it cannot be read."""
        if ids == self.ids:
            return self.traces[label]
        if (label, ids) not in self.opened:
            try:
                found = open_side_trace(self.sides[label], ids, self.stack, self.models[label])
            except AprfmtError:
                self.opened[label, ids] = None
            else:
                self.opened[label, ids] = found
        return self.opened[label, ids]

    def points(self, ids: Ids) -> Sequence[PointDiff]:
        """Return both sides' values of a sequence compared, one entry for each capture point.

        () where the sequence cannot be read on one of the sides.
        """
        if ids not in self.compared:
            a, b = (self.trace(label, ids) for label in "AB")
            self.compared[ids] = (
                () if a is None or b is None else trace_pair.compare_points(a, b, False)
            )
        return self.compared[ids]

    def is_beyond(self, ids: Ids) -> bool | None:
        """Return whether A and B differ beyond tolerance at any capture point of a sequence.

        None where nothing of the sequence can be compared.
        """
        judged = [pair.beyond for pair in self.points(ids) if pair.rel_l2 is not None]
        return any(judged) if judged else None

    def points_beyond(self, ids: Ids) -> list[str]:
        """Return the keys of capture points where A and B differ beyond tolerance on a sequence."""
        return [pair.key for pair in self.points(ids) if pair.beyond]

    def not_compared(self, explained: Collection[Ids]) -> Iterator[NotCompared]:
        """Yield the other sequences that are unequal, on one side only, or were not read.

        Sequences that agree within the tolerances were compared and are left out, and so are
        those in `explained`, of which a finding says what they are.
        """
        both = {label: set(self.others(label)) for label in "AB"}
        for ids in dict.fromkeys((*self.others("A"), *self.others("B"))):
            missing = [label for label in "AB" if ids not in both[label]]
            name = sequence_name(ids)
            if ids in explained:
                continue
            if missing and dump_sequences(self.traces[missing[0]])[0] > 1:
                side = "B" if missing == ["A"] else "A"
                state: State = "only in A" if side == "A" else "only in B"
                yield NotCompared("sequence", name, state, side=side)
                continue
            beyond = None if missing else self.is_beyond(ids)
            if beyond is None:
                yield NotCompared("sequence", name, "unread", "the ids are of another one")
            elif beyond:
                yield NotCompared("sequence", name, "unequal", "give its --ids")
        for label in "AB":
            count, _ = dump_sequences(self.traces[label])
            more = count - 1 - len(self.others(label))
            if more > 0:
                yield NotCompared("sequence", f"{more} more of {label}", "unread")

    def source_of(self, given: str, ids: Ids) -> tuple[Ids, list[str]] | None:
        """Return (ids of the sequence whose rows a dump has for `ids`, points) or None.

        `given` is the side. At all points where the sides differ on `ids` it has what the other
        side has for the returned sequence. None if there is none.
        """
        owner = "A" if given == "B" else "B"
        mine, points = self.trace(given, ids), self.points_beyond(ids)
        if mine is None or not points:
            return None
        for other in (self.ids, *self.others(owner)):
            source = self.trace(owner, other)
            if other == ids or len(other) != len(ids) or source is None:
                continue
            pairs = {pair.key: pair for pair in trace_pair.compare_points(source, mine, False)}
            if all(key in pairs and not pairs[key].beyond for key in points):
                return other, points
        return None


def first_differing_sequence(
    sides: Sequence[Side], models: Mapping[str, Model | None], stack: ExitStack
) -> Ids | None:
    """Return the ids of the first sequence of two dumps that differs, else of the first in both.

    None unless both sides are dumps of several sequences, some of which are in both.
    """
    lists = [sequences_of_dump(side.path) for side in sides]
    both = [ids for ids in lists[0] if ids in set(lists[1])]
    if not both or any(len(one) < 2 for one in lists):
        return None
    a, b = sides
    for ids in both[:MOST]:
        with ExitStack() as own:
            traces = {
                side.label: open_side_trace(side, ids, own, models[side.label]) for side in sides
            }
            batch = BatchSequences({a.label: a, b.label: b}, traces, models, ids, own)
            if batch.is_beyond(ids):
                return ids
    return both[0]


@dataclass(frozen=True)
class OtherRows:
    """The result that a dump has rows of another sequence: the finding, and traces put right.

    `unfit`: the examined sequence still has another's rows, since no dump has its own.
    """

    traces: Mapping[str, Trace]
    finding: Finding
    explained: frozenset[Ids]
    unfit: bool


def rows_of_another_sequence(batch: BatchSequences, dtype: str) -> OtherRows | None:
    """Return the result that a dump has one sequence's rows for another's; None if not.

    At all points that differ, the rows are those of another sequence in the other dump. The faulty
    side is the one that the model's own pass contradicts; without a model it is not known.
    """
    for given, owner in (("B", "A"), ("A", "B")):
        sources: dict[Ids, Ids] = {}
        points: list[str] = []
        for ids in (batch.ids, *batch.others(given)):
            found = batch.source_of(given, ids)
            if found is not None:
                sources[ids] = found[0]
                points = points or found[1]
        if sources:
            return _describe_rows(batch, sources, points, given, owner, dtype)
    return None


def _describe_rows(
    batch: BatchSequences,
    sources: Mapping[Ids, Ids],
    points: Sequence[str],
    given: str,
    owner: str,
    dtype: str,
) -> OtherRows:
    """Return the result that a side has rows of other sequences, with the finding's sentence.

    `given` is that side, `owner` the other one, whose rows they are. `sources` is {ids of a
    sequence: ids whose rows it has}; `points` are the keys at which the first of them differs.
    """
    ids, source = next(iter(sources.items()))
    back = next((one for one, of in sources.items() if of == ids), None)
    wrong = _departing_side(batch, ids, dtype)
    if back is None:
        how = f"its own rows are not in {given}"
    elif back == source:
        how = "the two are exchanged"
    else:
        how = f"its own are those of the sequence {sequence_name(back)}"
    more = len(sources) - (2 if back is not None else 1)
    also = f", and {more} more sequences have another's rows" if more > 0 else ""
    which = (
        f"{wrong} is not what the model makes of these ids, the other side is"
        if wrong
        else "which side is right is not known: no model that runs was given"
    )
    says = (
        f"{given}'s rows of the sequence {sequence_name(ids)} are those that {owner} has of the "
        f"sequence {sequence_name(source)}, at all {len(points)} points that differ; {how}{also}; "
        f"{which}"
    )
    # The examined sequence is compared further with the rows that are its own.
    traces = dict(batch.traces)
    side = wrong or given
    fitting = None
    if back is not None and ids == batch.ids:
        fitting = batch.trace(given, back) if side == given else batch.trace(owner, source)
    if fitting is not None:
        traces[side] = _with_values(traces[side], fitting, points)
    finding = Finding(
        "other_sequence", says, "capture", "bug", tuple(points), True, points[0],
        residual_after=0.0, of="all points that differ", side=side,
        values={"ids": list(ids), "rows_of": list(source)}, proof=unfitted_proof(len(points)),
    )  # fmt: skip
    unfit = fitting is None and ids == batch.ids
    return OtherRows(traces, finding, frozenset(sources), unfit)


def _with_values(trace: Trace, source: Trace, keys: Collection[str]) -> Trace:
    """Return a trace with the values at the points `keys` taken from another trace, `source`."""

    def fetch(key: str) -> Any:
        """Return the values at a point, of `source` for the points `keys`, else of `trace`."""
        return (source if key in keys else trace).fetch(key)

    held: Any = Deferred(lambda: trace.nonfinite)  # else `replace` would compute it
    return replace(trace, fetch=fetch, blocks=no_blocks, nonfinite=held)


def _differs_from_model(trace: Trace, model: Model, ids: Ids, dtype: str) -> bool | None:
    """Return whether a trace differs from the model's own pass on these ids; None if not known."""
    patched = PatchedModel.unpatched(model, ids, dtype)
    try:
        found = run_shadow_pass(patched, RecordedTrace(trace, ids, {}))
    finally:
        patched.weights.close()
    return bool(found.flagged) if found.compared_count else None


def _departing_side(batch: BatchSequences, ids: Ids, dtype: str) -> str:
    """Return which dump ("A" or "B") has rows of a sequence that the model contradicts.

    "" where it contradicts both or neither, or there is no model.
    """
    wrong = {}
    for label in batch.traces:
        trace, model = batch.trace(label, ids), batch.models[label]
        departs = (
            None
            if trace is None or model is None
            else _differs_from_model(trace, model, ids, dtype)
        )
        if departs is None:
            return ""
        wrong[label] = departs
    departing = [label for label, departs in wrong.items() if departs]
    return departing[0] if len(departing) == 1 else ""


def rows_of_other_ids(
    label: str, trace: Trace, model: Model, ids: Ids, dtype: str
) -> Finding | None:
    """Return the finding that a dump has, for one sequence, the model's rows for other ids.

    The other ids are those of another sequence in the same dump. None where the rows fit their
    own ids, or no sequence of the dump.
    """
    others = [one for one in dump_sequences(trace)[1] if one is not None and len(one) == len(ids)]
    if not others or not _differs_from_model(trace, model, ids, dtype):
        return None
    for other in others[:FEW]:
        if other == ids or _differs_from_model(trace, model, other, dtype) is not False:
            continue
        says = (
            f"{label}'s rows of the sequence {sequence_name(ids)} are what the model makes of the "
            f"sequence {sequence_name(other)} of the same dump, at every point"
        )
        return Finding(
            "other_sequence", says, "capture", "bug", tuple(trace.records), True,
            next(iter(trace.records)), residual_after=0.0, of="all points", side=label,
            values={"ids": list(ids), "rows_of": list(other)},
            proof=unfitted_proof(len(trace.records)),
        )  # fmt: skip
    return None
