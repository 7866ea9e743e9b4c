"""The protocols of traces and records that comparing uses, and facts of a run.

A *slot* is a name for several points of a layer that are joined along the last axis, as `qkv` for
q, k and v.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from aprfmt.base.dump_names import place_in_dump, rank_of_axis
from aprfmt.base.protocols import Value
from aprfmt.codecs.base import Array
from aprfmt.measure.distances import ValueBlocks
from aprfmt.model.ledger import NotCompared, State
from aprfmt.tensors.stats import Stats

# Points of a model that chooses experts.
ROUTED = ("router", "router_margin", "experts", "expert_w", "moe_out")


SHOWN_IDS = 4  # token ids of a sequence in its name


class RecordLike(Protocol):
    """A record of a capture point: its key, shape, token positions, dtype and statistics."""

    @property
    def key(self) -> str:
        """The point with its layer, such as `L3.attn_out`."""
        ...

    @property
    def point(self) -> str:
        """The point without its layer, such as `attn_out`."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the recorded values."""
        ...

    @property
    def positions(self) -> tuple[int, ...] | None:
        """The token positions of the rows, None where not known."""
        ...

    @property
    def dtype(self) -> str:
        """The dtype of the arithmetic that computed the values."""
        ...

    @property
    def stats(self) -> Stats | None:
        """Statistics of the recorded values, None where they are not known."""
        ...


class TraceLike(Protocol):
    """A trace: records by key, with their values."""

    @property
    def run(self) -> Mapping[str, Value]:
        """Metadata of the run: ids, prompt, model, backend."""
        ...

    @property
    def records(self) -> Mapping[str, RecordLike]:
        """{key: record} in execution order."""
        ...

    def find_record(self, key: str) -> RecordLike | None:
        """Return the record of a key, or of the key it is an alias of; None without one."""
        ...

    def slot_parts(self, key: str) -> list[str]:
        """Return the keys of the points that a slot's key (`L3.qkv`) names, or the key itself."""
        ...

    def recorded_values(self, key: str) -> Array | None:
        """Return the recorded values, None where only statistics were kept."""
        ...

    def values_mask(self, key: str) -> Array | None:
        """Return which of the values are present (bool array), None for all."""
        ...

    def unread_values(self, name: str) -> Array | None:
        """Return the values of a dumped array that is no capture point; None if it has none."""
        ...

    def value_blocks(self, key: str) -> ValueBlocks | None:
        """Return the values of a key to be read in blocks; None if they can only be read whole."""
        ...

    @property
    def resolution(self) -> float:
        """Half a unit of the last decimal of values that were printed, else 0."""
        ...


class WrappedTrace:
    """A trace that delegates everything to another one; subclasses override methods."""

    def __init__(self, trace: TraceLike) -> None:
        """Wrap a trace."""
        self._trace = trace

    @property
    def run(self) -> Mapping[str, object]:
        """Metadata of the run: ids, prompt, model, backend."""
        return self._trace.run

    @property
    def records(self) -> Mapping[str, RecordLike]:
        """{key: record} in execution order."""
        return self._trace.records

    @property
    def resolution(self) -> float:
        """Half a unit of the last decimal of values that were printed, else 0."""
        return self._trace.resolution

    def find_record(self, key: str) -> RecordLike | None:
        """Return the record of a key, or of the key it is an alias of; None without one."""
        return self._trace.find_record(key)

    def slot_parts(self, key: str) -> list[str]:
        """Return the keys of the points that a slot's key (`L3.qkv`) names, or the key itself."""
        return self._trace.slot_parts(key)

    def recorded_values(self, key: str) -> Array | None:
        """Return the recorded values, None where only statistics were kept."""
        return self._trace.recorded_values(key)

    def values_mask(self, key: str) -> Array | None:
        """Return which of the values are present (bool array), None for all."""
        return self._trace.values_mask(key)

    def unread_values(self, name: str) -> Array | None:
        """Return the values of a dumped array that is no capture point; None if it has none."""
        return self._trace.unread_values(name)

    def value_blocks(self, key: str) -> ValueBlocks | None:
        """Return the values of a key to be read in blocks; None if they can only be read whole."""
        return self._trace.value_blocks(key)


def records_token_ids(trace: TraceLike) -> bool:
    """Return whether a trace itself has its token ids; False for ids that the user gave for it."""
    return trace.run.get("ids") is not None and not trace.run.get("ids_given")


def unread_arrays(*traces: TraceLike) -> tuple[NotCompared, ...]:
    """Return the captured arrays and files of traces that were not read, as NotCompared.

    Those that are a point of the model, or rows of one, should have been compared: they are
    `unreadable`.
    """
    found = {}
    for trace in traces:
        unknown = trace.run.get("unknown")
        lost = set(trace.run.get("lost") or ())
        for name, why in unknown.items() if isinstance(unknown, Mapping) else ():
            said = why if isinstance(why, str) else "not a capture point"
            state: State = "unreadable" if name in lost else "unread"
            found[name] = NotCompared("captured array", str(name), state, said)
    return tuple(found.values())


def dump_sequences(trace: TraceLike) -> tuple[int, tuple[tuple[int, ...] | None, ...]]:
    """Return (number of sequences in the dump that a trace is of, token ids of the others).

    The trace itself is of one sequence. (1, ()) for a trace that is of no dump. None in place of
    ids that the dump does not give.
    """
    dump = trace.run.get("dump")
    if not isinstance(dump, Mapping) or "sequences" not in dump:
        return 1, ()
    others = (None if ids is None else tuple(int(one) for one in ids) for ids in dump["others"])
    return int(dump["sequences"]), tuple(others)


def sequence_name(ids: Sequence[int] | None) -> str:
    """Return a sequence's name in a message: its number of tokens and its first ids."""
    if ids is None:
        return "of unknown ids"
    shown = ",".join(map(str, ids[:SHOWN_IDS]))
    return f"of {len(ids)} tokens {shown}" + ",..." * (len(ids) > SHOWN_IDS)


def other_sequences(*traces: TraceLike) -> tuple[NotCompared, ...]:
    """Return the sequences of the traces' dumps that were not read, as NotCompared, each once."""
    found: dict[object, NotCompared] = {}
    why = "the ids are of another one"
    for number, trace in enumerate(traces):
        count, others = dump_sequences(trace)
        for at, ids in enumerate(others):
            key: object = (number, at) if ids is None else ids
            found[key] = NotCompared("sequence", sequence_name(ids), "unread", why)
        more = count - 1 - len(others)
        if more > 0:
            name = f"{more} more of the dump"
            found[number, "more"] = NotCompared("sequence", name, "unread", why)
    return tuple(found.values())


def unequal_rank_sentences(*traces: TraceLike) -> tuple[str, ...]:
    """Return a sentence for each array of a dump that should be alike on all ranks and is not."""
    found = []
    for trace in traces:
        dump = trace.run.get("dump")
        rows = dump.get("unequal", ()) if isinstance(dump, Mapping) else ()
        for row in rows:
            place = place_in_dump(row["pass"])
            found.append(f"{row['name']}{f' ({place})' if place else ''}: {row['says']}")
    return tuple(found)


def dump_sentences(trace: TraceLike) -> tuple[str, ...]:
    """Return sentences on how a dump became a trace: its ranks and passes, and what was left out.

    () for a trace that is of no dump, or of one rank and pass without a remark.
    """
    dump = trace.run.get("dump")
    if not isinstance(dump, Mapping):
        return ()
    ranks = [f"{size} {rank_of_axis(axis)}s" for axis, size in dump.get("ranks", {}).items()]
    passes = dump.get("passes", 1)
    whole = [*ranks, *([f"{passes} passes"] if passes > 1 else [])]
    ways = [f"{count} arrays {how}" for how, count in dump.get("layouts", {}).items()]
    joined = [f"put together from {', '.join(whole)}" + "".join(f"; {way}" for way in ways)]
    return (*(joined if whole else ()), *(str(note) for note in dump.get("notes", ())))


def backend_name(trace: TraceLike) -> str:
    """Return the backend's or engine's name that ran a trace; "" where it is not known."""
    backend = trace.run.get("backend")
    if not isinstance(backend, Mapping):
        return ""
    return str(backend.get("backend") or backend.get("name") or "")


def run_arithmetic(trace: TraceLike, dtype: str) -> str:
    """Return the dtype that bounds a trace's errors: "tf32" for float32 with TF32 products."""
    backend = trace.run.get("backend")
    tf32 = isinstance(backend, Mapping) and bool(backend.get("tf32"))
    return "tf32" if tf32 and dtype == "float32" else dtype


def finer_weights_class(a: TraceLike, b: TraceLike) -> str:
    """Return the finer class of the two runs' weights: "exact", "half" or "quantized"."""
    order = ("exact", "half", "quantized")
    found = [str(run["weights"]) for run in (a.run, b.run) if run.get("weights") in order]
    return min(found, key=order.index, default="exact")


def shows_routing(trace: TraceLike) -> bool:
    """Return whether a trace has a point that only models with experts have."""
    return any(record.point in ROUTED for record in trace.records.values())
