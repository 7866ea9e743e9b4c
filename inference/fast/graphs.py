"""CUDA graphs of whole passes: recorded from the one forward pass, replayed with other tokens.

A prefill is recorded per number of tokens, a decoding step once per cache buffers: token, position
and number of cached positions are read from device memory. The first pass of a kind runs normally
(it places weights and compiles kernels), the second is recorded. A pass that needs the host in
between (experts whose weights are encoded or not all held, weights streamed under a budget) is
never recorded. torch_graphs.py and cuda/graph_maker.py implement `GraphMaker`.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from aprfmt.base.garbage_collector import pause_collector
from aprfmt.inference.backends.base import Array, Numbers
from aprfmt.inference.kv_cache import KVCache, State

# Most graphs held at the same time: each holds the memory of its activations.
KEPT = 6


class NotRecordable(Exception):
    """A pass did something that cannot be replayed; the message says what."""


class DeviceNumbers(Protocol):
    """int64 numbers on the device, with a copy on the host that transfers need not wait for."""

    device: Array
    host: Numbers

    def copy_to_device(self) -> None:
        """Enqueue the copy of `host` to `device`."""
        ...

    def copy_from_device(self, x: Array) -> None:
        """Enqueue the copy of another device array to `host`."""
        ...


class GraphMaker(Protocol):
    """Protocol of what records passes on one device."""

    errors: tuple[type[Exception], ...]  # of passes that cannot be recorded

    def allocate_numbers(self, count: int) -> DeviceNumbers:
        """Return `count` int64 numbers that a recorded pass reads on the device."""
        ...

    def record(self, first: Callable[[], None], then: Callable[[], None]) -> Callable[[], None]:
        """Run `first`, record `then` as a CUDA graph, and return the function that replays it.

        Both run on a stream created for that.
        """
        ...

    def wait(self) -> None:
        """Wait until the device has done everything that is enqueued."""
        ...


@dataclass(eq=False)
class PassInputs:
    """The device copies of a pass's inputs, used while it is recorded.

    `ids` and `positions` are the host arrays that the pass was called with (compared by identity).
    `cached` is the number of valid positions, one int64; None in a pass that begins a sequence.
    The functions in `after` are called once the pass is recorded; None before that begins.
    """

    ids: Numbers
    positions: Numbers
    on_device: Array  # ids, then positions
    cached: Array | None
    masks: dict[Hashable, Array] = field(default_factory=dict)
    after: list[Callable[[], None]] | None = None
    _fixed: dict[Hashable, Array] = field(default_factory=dict)

    def find_rows(self, x: Numbers) -> Array:
        """Return the device's copy of an array of the host: the pass's token ids or its positions.

        They choose rows of a table. Raises NotRecordable for any other array.
        """
        n = len(self.ids)
        if x is self.ids:
            return self.on_device[:n]
        if x is self.positions:
            return self.on_device[n : 2 * n]
        raise NotRecordable("rows are chosen on the host")

    def constant_array(self, x: Numbers, make: Callable[[], Array]) -> Array:
        """Return the device array `make` gives for host numbers `x` that every replay shares.

        A prefill's masks are such: only its tokens differ from replay to replay. The array is made
        before the recording begins, once for equal numbers, and held as long as the pass can be
        replayed. Raises NotRecordable in a step, or once the recording has begun.
        """
        key = (x.shape, x.tobytes())
        if key not in self._fixed:
            if self.after is not None or self.cached is not None:
                raise NotRecordable("a mask is brought to the device")
            self._fixed[key] = make()
        return self._fixed[key]


@dataclass(eq=False)
class _Recorded:
    """A pass that is recorded once, then replayed: it begins after `cached` positions of `cache`.

    What a replay leaves, and the next one overwrites: `logits`, the layers' `states`, and on the
    host, when the stream has finished, the numbers of `best`.
    """

    backend: Any
    forward: Callable[[Numbers, Numbers], Array]
    inputs: PassInputs
    numbers: DeviceNumbers  # ids, positions, cached
    best: DeviceNumbers
    cache: KVCache | None
    cached: int
    logits: Array = None
    states: dict[int, State] = field(default_factory=dict)
    replay: Callable[[], None] = lambda: None

    def run_unrecorded(self) -> None:
        """Run the pass once without recording, so that kernels and buffers of first use exist.

        The positions that it adds to the cache are removed after it; the replay writes the same
        values again.
        """
        self.backend.best(self.forward(self.inputs.ids, self.inputs.positions)[-1])
        self.rewind()
        self.inputs.masks.clear()
        self.inputs.after = []

    def run_recorded(self) -> None:
        """Run the pass while it is recorded, and return nothing.

        Sets `logits` and `states`, and copies the last row's argmax to `best`.
        """
        self.logits = self.forward(self.inputs.ids, self.inputs.positions)
        self.states.update({} if self.cache is None else self.cache.states())
        self.best.copy_from_device(self.backend.best(self.logits[-1]))

    def rewind(self) -> None:
        """Remove all positions from the cache but the `cached` ones that the pass begins after."""
        if self.cache is not None and self.cache.length != self.cached:
            self.cache.truncate(self.cached)

    def replay_for(self, ids: Numbers, cached: int) -> None:
        """Replay the pass for other tokens `ids` after `cached` positions; sets `logits`."""
        n, numbers = len(ids), self.numbers.host
        numbers[:n] = ids
        numbers[n : 2 * n] = np.arange(cached, cached + n)
        numbers[2 * n] = cached
        self.numbers.copy_to_device()
        self.replay()


class PassGraphs:
    """One session's recorded passes on one device; it implements PassRecorder."""

    def __init__(self, backend: Any, graph_maker: GraphMaker) -> None:
        """Start with no pass seen or recorded; `refused` is "" until one cannot be."""
        self._backend = backend
        self._maker = graph_maker
        self._seen: set[Hashable] = set()
        self._graphs: OrderedDict[tuple[Hashable, int | None], _Recorded] = OrderedDict()
        self._refused: set[Hashable] = set()
        self.refused = ""  # the reason of the last pass that could not be recorded
        self.best: Numbers | None = None  # valid when the stream has finished

    def replay_for(
        self,
        run: Callable[[Numbers, Numbers], Array],
        ids: Numbers,
        cache: KVCache | None,
        rows: Hashable,
        *,
        steps: bool,
    ) -> Array:
        """Return the logits of `run(ids, positions)`, replayed if the kind of pass was recorded.

        A kind is the number of ids, `rows` and whether there is a cache, or "step" for one token
        after others where `steps` allows it. The first pass of a kind runs, the second is recorded.
        Sets `best` of the last row if the pass was replayed, else None.
        """
        self.best = None
        cached = 0 if cache is None else cache.length
        kind: Hashable = (len(ids), rows, cache is not None)
        if cached:
            whole = cache is not None and cache.can_truncate  # a state is no fixed input
            kind = "step" if steps and whole and len(ids) == 1 else None
        fits = cache is None or cache.fits(len(ids))
        if kind is None or kind in self._refused or kind not in self._seen or not fits:
            self._seen.add(kind)
            return run(ids, np.arange(cached, cached + len(ids)))
        key = (kind, None if cache is None else cache.generation)
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._record(run, ids, cached, cache)
            if graph is None:
                self._refused.add(kind)
                return run(ids, np.arange(cached, cached + len(ids)))
            self._graphs = OrderedDict(
                (other, kept) for other, kept in self._graphs.items() if other[0] != kind
            )
            self._graphs[key] = graph
            if len(self._graphs) > KEPT:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        graph.replay_for(ids, cached)
        if cache is not None:
            cache.commit(len(ids), graph.states)
        self.best = graph.best.host
        return graph.logits

    def _record(
        self,
        run: Callable[[Numbers, Numbers], Array],
        ids: Numbers,
        cached: int,
        cache: KVCache | None,
    ) -> _Recorded | None:
        """Return a recorded pass; None if that is not possible, the reason in `refused`."""
        n = len(ids)
        ids, positions = np.array(ids), np.arange(cached, cached + n)
        numbers, best = self._maker.allocate_numbers(2 * n + 1), self._maker.allocate_numbers(2)
        numbers.host[:] = [*ids.tolist(), *positions.tolist(), cached]
        numbers.copy_to_device()
        at = numbers.device[2 * n :] if cached else None
        inputs = PassInputs(ids, positions, numbers.device, at)
        found = _Recorded(self._backend, run, inputs, numbers, best, cache, cached)
        refusals: tuple[type[Exception], ...] = (NotRecordable, *self._maker.errors)
        self._backend.recording = inputs
        try:
            # Freed meanwhile, another session's graph or pinned memory ends the recording.
            with pause_collector():
                found.replay = self._maker.record(found.run_unrecorded, found.run_recorded)
        except refusals as error:
            self.refused = str(error).splitlines()[0]
            return None
        finally:
            self._backend.recording = None
            self._maker.wait()
            found.rewind()  # the replay advances the cache
        for finish in inputs.after or ():
            finish()
        inputs.masks.clear()
        return found
