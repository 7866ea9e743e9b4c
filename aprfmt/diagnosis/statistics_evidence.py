"""Evidence from traces that hold statistics without values: where these differ."""

from collections.abc import Iterator
from typing import Any

from aprfmt.diagnosis.next_commands import mapping_command
from aprfmt.diagnosis.records import Evidence
from aprfmt.diagnosis.trace_pair import shared_keys
from aprfmt.inference.engines.statistics import COLUMNS
from aprfmt.measure.tolerances import statistics_tolerance
from aprfmt.measure.trace_view import TraceLike
from aprfmt.tensors.stats import compute_stats


def has_no_values(trace: TraceLike) -> bool:
    """Return whether a trace holds statistics only."""
    return bool(trace.records) and all(trace.recorded_values(key) is None for key in trace.records)


def differing_statistics(a: TraceLike, b: TraceLike, model: str) -> Iterator[Evidence]:
    """Yield evidence of each point whose statistics differ beyond rounding, with a next step."""
    if not (has_no_values(a) or has_no_values(b)):
        return
    apart = []
    for key in shared_keys(a, b):
        said = _differing_stats_text(_stats_of(a, key), _stats_of(b, key), _stats_bound(a, b, key))
        if said:
            apart.append(key)
            yield Evidence(
                "forward",
                f"{key}: statistics differ beyond rounding: {said}; an observation, no cause",
                (key,),
            )
    if not apart:
        yield Evidence("forward", "statistics of all common points agree; values may differ still")
    first = apart[0] if apart else "logits"
    yield Evidence(
        "forward",
        f"next: dump the values at {first} and around it (.npy, one array a file), then "
        f"{mapping_command(model, 'IDS', 'trace.safetensors')}, and diagnose that trace",
        (first,),
    )


def _stats_of(trace: TraceLike, key: str) -> Any:
    """Return the statistics of a trace's point, computed from values if it has them; or None."""
    values = trace.recorded_values(key)
    if values is not None:
        return compute_stats(values)
    record = trace.find_record(key)
    return None if record is None else record.stats


def _stats_bound(a: TraceLike, b: TraceLike, key: str) -> float:
    """Return the tolerance of a point's statistics, relative to the values' size."""
    mine, other = a.find_record(key), b.find_record(key)
    assert mine is not None and other is not None
    return statistics_tolerance(mine.dtype, other.dtype)


def _differing_stats_text(x: Any, y: Any, bound: float) -> str:
    """Return which statistics differ by more than the bound, as text; "" if none does."""
    if x is None or y is None:
        return ""
    size = max(abs(v) for v in (x.std, y.std, x.absmax, y.absmax, 1e-30) if v is not None)
    found = []
    for name in COLUMNS:
        mine, other = getattr(x, name), getattr(y, name)
        if mine is None or other is None:
            continue
        scale = max(abs(mine), abs(other)) if name in ("std", "l2") else size
        if abs(mine - other) > bound * max(scale, 1e-30):
            found.append(f"{name} {mine:.5g} against {other:.5g}")
    return ", ".join(found)
