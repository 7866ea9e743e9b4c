"""CUDA graphs of whole passes: recorded from the one forward pass, replayed with other tokens.

A prefill is recorded per number of tokens, a decoding step once per cache buffers: token, position
and number of cached positions are read from device memory. The first pass of a kind runs normally
(it places weights and compiles kernels), the second is recorded. A pass that needs the host in
between (experts whose weights are encoded or not all held, weights streamed under a budget) is
never recorded.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from aprfmt.inference.backends.base import Array, Numbers
from aprfmt.inference.fast.torch_weights import NotRecordable
from aprfmt.inference.kv_cache import KVCache, State

# Most graphs kept at the same time: each holds the memory of its activations.
KEPT = 6


@dataclass(eq=False)
class PassInputs:
    """The device copies of a pass's inputs, used while it is recorded.

    `ids` and `positions` are the host arrays that the pass was called with (compared by identity).
    `cached` is the number of valid positions, a 0-d int64 tensor; None in a pass that begins a
    sequence.
    """

    ids: Numbers
    positions: Numbers
    on_device: torch.Tensor  # ids, then positions
    cached: torch.Tensor | None
    masks: dict[Hashable, torch.Tensor] = field(default_factory=dict)

    def find(self, x: Numbers) -> torch.Tensor | None:
        """Return the device copy of the pass's ids or positions; None for any other array."""
        n = len(self.ids)
        if x is self.ids:
            return self.on_device[:n]
        return self.on_device[n : 2 * n] if x is self.positions else None


@dataclass(frozen=True)
class _Graph:
    graph: Any
    inputs: torch.Tensor  # ids, positions, cached
    host: torch.Tensor  # the same, pinned
    logits: torch.Tensor
    best: torch.Tensor  # pinned: valid when the stream has finished
    states: Mapping[int, State]  # that a replay leaves; overwritten by the next one

    def replay(self, ids: Numbers, cached: int) -> None:
        n = len(ids)
        numbers = self.host.numpy()
        numbers[:n] = ids
        numbers[n : 2 * n] = np.arange(cached, cached + n)
        numbers[2 * n] = cached
        self.inputs.copy_(self.host, non_blocking=True)
        self.graph.replay()


class TorchGraphs:
    """One session's recorded passes on one device."""

    def __init__(self, backend: Any, device: torch.device) -> None:
        self._backend = backend
        self._device = device
        self._seen: set[Hashable] = set()
        self._graphs: OrderedDict[tuple[Hashable, int | None], _Graph] = OrderedDict()
        self._refused: set[Hashable] = set()
        self.refused = ""  # the reason of the last pass that could not be recorded
        self.best: torch.Tensor | None = None  # on the host; valid when the stream has finished

    def run(
        self,
        run: Callable[[Numbers, Numbers], Array],
        ids: Numbers,
        cache: KVCache | None,
        rows: Hashable,
        *,
        steps: bool,
    ) -> Array:
        """Return the logits of a pass; sets `best` for the last row if the pass was replayed."""
        self.best = None
        cached = 0 if cache is None else cache.length
        kind: Hashable = (len(ids), rows, cache is not None)
        if cached:
            whole = cache is not None and cache.cuttable  # a state is no fixed input
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
        graph.replay(ids, cached)
        if cache is not None:
            cache.commit(len(ids), graph.states)
        self.best = graph.best
        return graph.logits

    def _record(
        self, run: Callable[[Numbers, Numbers], Array], ids: Numbers, cached: int,
        cache: KVCache | None,
    ) -> _Graph | None:  # fmt: skip
        """Record a pass; None if that is not possible: `refused` has the reason."""
        n = len(ids)
        ids, positions = np.array(ids), np.arange(cached, cached + n)
        inputs = torch.zeros(2 * n + 1, dtype=torch.int64, device=self._device)
        host = torch.zeros(2 * n + 1, dtype=torch.int64, pin_memory=True)
        host.numpy()[:] = [*ids.tolist(), *positions.tolist(), cached]
        inputs.copy_(host)
        recording = PassInputs(ids, positions, inputs, inputs[2 * n] if cached else None)
        self._backend.prepare()
        side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        best = torch.zeros(2, dtype=torch.int64, pin_memory=True)
        logits, states = None, dict[int, State]()
        self._backend.recording = recording
        try:
            with torch.cuda.stream(side):
                # Run it once first: the replay writes the same values again, and everything created
                # on first use (kernels, workspaces, buffers) then exists.
                self._backend.best(run(ids, positions)[-1])
                self._rewind(cache, cached)
                recording.masks.clear()
                torch.cuda.synchronize(self._device)
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    logits = run(ids, positions)
                    states |= {} if cache is None else cache.states()
                    best.copy_(self._backend.best(logits[-1]), non_blocking=True)
                finally:
                    graph.capture_end()
        except (NotRecordable, RuntimeError) as error:
            self.refused = str(error).splitlines()[0]
            logits = None
        finally:
            self._backend.recording = None
            torch.cuda.synchronize(self._device)
            self._rewind(cache, cached)  # the replay advances the cache
        return None if logits is None else _Graph(
            graph, inputs, host, logits, best, states
        )  # fmt: skip

    def _rewind(self, cache: KVCache | None, cached: int) -> None:
        if cache is not None and cache.length != cached:
            cache.truncate(cached)
