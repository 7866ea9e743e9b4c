"""Logits of one row that stay on a device, for samplers that need no more than the argmax."""

from collections.abc import Callable, Sequence
from typing import Any

from aprfmt.inference.backends.base import Array, Backend, Numbers


class DeviceRow:
    """Logits [vocab] on a device, copied to the host only if more than the argmax is needed."""

    def __init__(self, backend: Backend, row: Array, best: Callable[[], Sequence[int]]) -> None:
        """Take logits on the device; `best()` waits and returns (argmax, whether one is NaN)."""
        self._backend = backend
        self._row = row
        self._best = best

    def argmax_or_none(self) -> int | None:
        """Return the first index of the highest logit; None if a logit is NaN."""
        place, nan = self._best()
        return None if nan else int(place)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Numbers:
        """Return the logits copied to the host as a numpy array."""
        values = self._backend.to_numpy(self._row)
        return values if dtype is None else values.astype(dtype)
