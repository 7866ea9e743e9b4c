"""Protocols that a fast backend may implement: recorded passes, statistics read once at the end.

A session and a trace use them where `Backend.graphs` and `Backend.pending` give them.
"""

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, Protocol

from numpy.typing import NDArray

from aprfmt.tensors.stats import Stats

if TYPE_CHECKING:
    from aprfmt.inference.kv_cache import KVCache

Array = Any  # the backend's own
Numbers = NDArray[Any]  # numpy's


class PendingStats(Protocol):
    """Statistics that are enqueued on a device and read together."""

    def add(self, x: Array) -> None:
        """Enqueue the statistics of the next value."""
        ...

    def join(self) -> None:
        """Make the statistics added so far run before what is enqueued next."""
        ...

    def read(self) -> list[Stats]:
        """Return the statistics of every value added, in order."""
        ...


class PassRecorder(Protocol):
    """One session's recorded passes."""

    best: Any | None  # of the last pass, if it was replayed: what `host_row` takes

    def replay_for(
        self,
        run: Callable[[Numbers, Numbers], Array],
        ids: Numbers,
        cache: "KVCache | None",
        rows: Hashable,
        *,
        steps: bool,
    ) -> Array:
        """Return the logits of `run(ids, positions)`, by replaying a recorded pass if one fits.

        `cache` is the key-value cache that the pass continues. `rows` is a key that differs for
        passes that return logits of other rows. `steps`: a step's arithmetic depends on nothing but
        its token, its position and the cache.
        """
        ...
