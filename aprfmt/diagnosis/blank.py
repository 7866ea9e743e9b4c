"""What holds no values: buffers of zeros that were saved, and the bounds below which bugs hide."""

from collections.abc import Iterable, Iterator

from aprfmt.compare.explain.reading import Reader
from aprfmt.compare.thresholds import DISCRETE, SMALLEST_BUG
from aprfmt.compare.traces import TraceLike
from aprfmt.diagnosis.direct import NO_POINT, place_of
from aprfmt.errors import AprfmtError
from aprfmt.model import Model

WINDOW = 1 << 20  # elements looked at together


def blank_trace(trace: TraceLike) -> int:
    """Return how many points a trace has if every value it kept is zero, else 0."""
    count = 0
    for key, record in trace.records.items():
        if record.point in DISCRETE or place_of(key) == NO_POINT:
            continue
        values = trace.values(key)
        if values is None or not values.size:
            continue
        if values.any():
            return 0
        count += 1
    return count


def blank_model(model: Model) -> int:
    """Return how many tensors a model has if every value of all of them is zero, else 0."""
    for tensor in model.values():
        try:
            if _any(Reader(tensor)):
                return 0
        except AprfmtError:
            return 0  # what cannot be read is said where it is compared
    return len(model)


def _any(reader: Reader) -> bool:
    import numpy as np

    step = max(1, WINDOW // max(1, reader.columns))
    try:
        return any(
            bool(reader.take(np.arange(start, min(reader.rows, start + step))).any())
            for start in range(0, reader.rows, step)
        )
    finally:
        reader.drop()


def rounding_hides(label: str, bounds: Iterable[tuple[float, str]]) -> Iterator[str]:
    """Yield below which distance nothing can be said, by (tolerance, dtype) of the points."""
    counts: dict[tuple[float, str], int] = {}
    for bound, dtype in bounds:
        if bound > SMALLEST_BUG:
            counts[bound, dtype] = counts.get((bound, dtype), 0) + 1
    for (bound, dtype), count in sorted(counts.items()):
        yield (
            f"{label}: differences below relL2 {bound:g} at {count} points: in {dtype} they cannot "
            f"be told from rounding, and real bugs go down to {SMALLEST_BUG:g}; run float32"
        )
