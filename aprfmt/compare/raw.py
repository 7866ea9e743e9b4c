"""Comparing bytes: two tensors as streams of stored bytes, window by window, nothing decoded."""

from collections.abc import Generator, Iterable, Sequence
from contextlib import closing

from aprfmt.tensors.logical import LogicalTensor, Run, gather
from aprfmt.tensors.views import Tensor

WINDOW = 8 << 20


def byte_runs(side: "LogicalTensor | Tensor") -> list[Run] | None:
    """Return the runs that make up a tensor's bytes, or None where it has no single byte string."""
    if isinstance(side, Tensor):
        return None if side.parts else [Run(side.lazy, 0, side.nbytes)]
    return side.runs


def stored_runs(side: "LogicalTensor | Tensor") -> list[Run]:
    """Return the runs of everything a tensor is stored in: all tensors of a role, all parts."""
    tensors = [side.lazy] if isinstance(side, Tensor) else list(side.stored)
    parts = [
        part
        for tensor in tensors
        for part in ([tensor.parts[key] for key in sorted(tensor.parts)] or [tensor])
    ]
    return [Run(part, 0, part.info.nbytes) for part in parts]


def windows(runs: Sequence[Run], size: int = WINDOW) -> Generator[bytes | memoryview, None, None]:
    """Yield the concatenated bytes of the runs in windows of `size`, the last one shorter.

    Pages behind a window are dropped when the next one is asked for, or the generator closed.
    """
    if len(runs) == 1:
        run = runs[0]
        for start in range(run.start, run.start + run.nbytes, size):
            stop = min(start + size, run.start + run.nbytes)
            try:
                yield run.tensor.raw(start, stop)
            finally:
                run.tensor.drop(start, stop)
        return
    held: list[Run] = []
    length = 0
    try:
        for run in runs:
            at = 0
            while at < run.nbytes:
                take = min(size - length, run.nbytes - at)
                held.append(Run(run.tensor, run.start + at, take))
                length, at = length + take, at + take
                if length == size:
                    yield gather(held, 0, length)
                    drop(held)
                    held, length = [], 0
        if held:
            yield gather(held, 0, length)
    finally:
        drop(runs)


def drop(runs: Iterable[Run]) -> None:
    """Release the mapped pages of the tensors that runs are of."""
    for tensor in dict.fromkeys(run.tensor for run in runs):
        tensor.drop()


def first_difference(a: Sequence[Run], b: Sequence[Run]) -> int | None:
    """Return the offset of the first differing byte, or None if all are equal.

    Streams of different length differ at the end of the shorter one at the latest.
    """
    import numpy as np

    at = 0
    with closing(windows(a)) as of_a, closing(windows(b)) as of_b:
        for left, right in zip(of_a, of_b, strict=False):
            x, y = np.frombuffer(left, np.uint8), np.frombuffer(right, np.uint8)
            shorter = min(x.size, y.size)
            if not np.array_equal(x[:shorter], y[:shorter]):
                return at + int(np.argmax(x[:shorter] != y[:shorter]))
            at += shorter
            if x.size != y.size:
                return at
    total_a, total_b = sum(run.nbytes for run in a), sum(run.nbytes for run in b)
    return None if total_a == total_b else min(total_a, total_b)
