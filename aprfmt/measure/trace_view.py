"""What comparing uses of a trace, and what a trace says of its run."""

from collections.abc import Mapping
from typing import Protocol

from aprfmt.base.protocols import Value
from aprfmt.codecs.base import Array
from aprfmt.model.ledger import NotCompared
from aprfmt.tensors.stats import Stats

# Points of a model that chooses experts.
ROUTED = ("router", "router_margin", "experts", "expert_w", "moe_out")


class RecordLike(Protocol):
    """What is used of a record: where it was taken, its shape, positions and arithmetic."""

    @property
    def key(self) -> str:
        """`L3.attn_out`."""
        ...

    @property
    def point(self) -> str:
        """`attn_out`."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the recorded values."""
        ...

    @property
    def positions(self) -> tuple[int, ...] | None:
        """Token positions of the rows, None where not known."""
        ...

    @property
    def dtype(self) -> str:
        """Of the arithmetic."""
        ...

    @property
    def stats(self) -> Stats | None:
        """Statistics of the recorded values, None where they are not known."""
        ...


class TraceLike(Protocol):
    """What is used of a trace."""

    @property
    def run(self) -> Mapping[str, Value]:
        """Ids, prompt, model."""
        ...

    @property
    def records(self) -> Mapping[str, RecordLike]:
        """By key, in execution order."""
        ...

    def find(self, key: str) -> RecordLike | None:
        """Return the record of a key or of the key it equals."""
        ...

    def parts(self, key: str) -> list[str]:
        """Return the keys that a key stands for: a joined slot's parts, or the key itself."""
        ...

    def values(self, key: str) -> Array | None:
        """Return the recorded values, None where only statistics were kept."""
        ...

    def mask(self, key: str) -> Array | None:
        """Return which of the values are there, None for all."""
        ...

    @property
    def resolution(self) -> float:
        """Half a unit of the last decimal of values that were printed, else 0."""
        ...


class WrappedTrace:
    """A trace as another one sees it: everything is the trace's own until a subclass says else."""

    def __init__(self, trace: TraceLike) -> None:
        self._trace = trace

    @property
    def run(self) -> Mapping[str, object]:
        """Ids, prompt, model."""
        return self._trace.run

    @property
    def records(self) -> Mapping[str, RecordLike]:
        """By key, in execution order."""
        return self._trace.records

    @property
    def resolution(self) -> float:
        """Half a unit of the last printed decimal, else 0."""
        return self._trace.resolution

    def find(self, key: str) -> RecordLike | None:
        """Return the record of a key or of the key it equals."""
        return self._trace.find(key)

    def parts(self, key: str) -> list[str]:
        """Return the keys that a key stands for."""
        return self._trace.parts(key)

    def values(self, key: str) -> Array | None:
        """Return the recorded values, None where only statistics were kept."""
        return self._trace.values(key)

    def mask(self, key: str) -> Array | None:
        """Return which of the values are there, None for all."""
        return self._trace.mask(key)


def states_token_ids(trace: TraceLike) -> bool:
    """Say whether a trace itself says its token ids (and does not only take the given ones)."""
    return trace.run.get("ids") is not None and not trace.run.get("ids_given")


def unread_arrays(*traces: TraceLike) -> tuple[NotCompared, ...]:
    """Return the arrays and files of captures that are no point, each with the reason."""
    found = {}
    for trace in traces:
        unknown = trace.run.get("unknown")
        for name, why in unknown.items() if isinstance(unknown, Mapping) else ():
            said = why if isinstance(why, str) else "not a capture point"
            found[name] = NotCompared("captured array", str(name), "unread", said)
    return tuple(found.values())


def unequal_ranks(*traces: TraceLike) -> tuple[str, ...]:
    """Return what ranks of a dump should hold alike and do not, as sentences."""
    found = []
    for trace in traces:
        dump = trace.run.get("dump")
        rows = dump.get("unequal", ()) if isinstance(dump, Mapping) else ()
        found += [f"{row['name']} (pass {row['pass']}): {row['says']}" for row in rows]
    return tuple(found)


def backend_name(trace: TraceLike) -> str:
    """Return what ran a trace: a backend's or an engine's name, "" where it is not known."""
    backend = trace.run.get("backend")
    if not isinstance(backend, Mapping):
        return ""
    return str(backend.get("backend") or backend.get("name") or "")


def run_arithmetic(trace: TraceLike, dtype: str) -> str:
    """Return the dtype that bounds a trace's errors: `tf32` for float32 with TF32 products."""
    backend = trace.run.get("backend")
    tf32 = isinstance(backend, Mapping) and bool(backend.get("tf32"))
    return "tf32" if tf32 and dtype == "float32" else dtype


def finer_weights_class(a: TraceLike, b: TraceLike) -> str:
    """Return the finer of the two runs' classes of weights: "exact", "half" or "quantized"."""
    order = ("exact", "half", "quantized")
    found = [str(run["weights"]) for run in (a.run, b.run) if run.get("weights") in order]
    return min(found, key=order.index, default="exact")


def shows_routing(trace: TraceLike) -> bool:
    """Say whether a trace shows that its model chooses experts."""
    return any(record.point in ROUTED for record in trace.records.values())
