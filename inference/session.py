"""A model on a backend: prefill, step, generate and trace one sequence."""

import sys
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from aprfmt.arch.spec import ArchSpec
from aprfmt.base.protocols import Value
from aprfmt.base.registry import load_attribute
from aprfmt.base.version import __version__
from aprfmt.errors import ArchError, UsageError
from aprfmt.inference.backends.base import Backend, Heads
from aprfmt.inference.capture import PointInstance, point_instances
from aprfmt.inference.context import Recorder
from aprfmt.inference.forward import LogitRows, check_tokens, forward
from aprfmt.inference.kv_cache import KVCache
from aprfmt.inference.rope import depends_on_length, keys_stay_valid
from aprfmt.inference.sampling import DeviceLogits
from aprfmt.inference.trace import KeptValues, Positions, Record, StoppedTrace, Trace, Tracer
from aprfmt.inference.weights import Weights, model_weights
from aprfmt.model import Model
from aprfmt.model.completeness import check_predicts, check_runnable

Numbers = NDArray[Any]


class Session:
    """One sequence on one backend; logits are numpy, float32 (float64 in float64 runs)."""

    def __init__(
        self, spec: ArchSpec, hp: Mapping[str, Value], weights: Weights, backend: Backend
    ) -> None:
        """Open a session without tokens, for an architecture, hyperparameters and weights."""
        self.spec = spec
        self.hp = hp
        self.weights = weights
        self.backend = backend
        self.ids: list[int] = []
        self._cache: KVCache | None = None
        self._forward = load_forward(spec)
        self._graphs = backend.graphs()
        self._templates: dict[Hashable, Any] = {}  # of recorded traces

    @classmethod
    def open(cls, model: Model, backend: Backend, *, memory: int | None = None) -> "Session":
        """Return a session of a model; `memory` is the budget in bytes for decoded weights.

        None: the backend's budget. Raises ArchError for a model whose tensors are not those its
        architecture needs.
        """
        check_runnable(model.resolution, model.path)
        for key, shape, wanted in model.resolution.coverage.misshapen:
            raise ArchError(
                f"{model.path}: {key} has shape {list(shape)}; {model.spec.name} with these "
                f"hyperparameters expects {list(wanted)}"
            )
        budget = backend.budget() if memory is None else memory
        return cls(model.spec, model.hyper, model_weights(model, budget), backend)

    def close(self) -> None:
        """Stop reading weights ahead; the model stays open."""
        self.weights.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        """Close the session, whatever the error."""
        self.close()

    @cached_property
    def _depends_on_length(self) -> bool:
        """Whether the rotary angles of a position depend on the length of the sequence."""
        return self.spec.block.position == "rope" and depends_on_length(self.hp)

    @cached_property
    def _can_replay_steps(self) -> bool:
        """Whether a step's arithmetic depends on its token, its position and the cache alone.

        It is False where more is decided on the host: frequencies that depend on the length,
        chunks, factors on the queries by position, and learned positions, which come to an end.
        """
        block = self.spec.block
        chunked = block.window == "chunk" and any(self.hp["window_layers"])
        hosted = chunked or block.position == "learned"
        return not (self._depends_on_length or hosted or self.hp["temperature_scale"] is not None)

    @cached_property
    def _vocab_size(self) -> int:
        """The number of tokens of the vocabulary."""
        return int(self.hp["vocab_size"])

    @cached_property
    def points(self) -> dict[str, PointInstance]:
        """{key: capture point} of the model, in execution order."""
        return point_instances(self.spec.block, self.hp, self.weights)

    @property
    def cache(self) -> KVCache | None:
        """The key-value cache of the tokens so far, None before the first."""
        return self._cache

    def truncate(self, length: int = 0) -> None:
        """Forget the tokens from `length` on; the default forgets all.

        A recurrent state cannot go back, so the tokens before `length` run again with the next
        call.
        """
        if self._cache is not None:
            kept = min(length, self._cache.length)
            whole = self._cache.can_truncate or kept == self._cache.length
            self._cache.truncate(kept if whole else 0)
        self.ids = self.ids[:length]

    def extend(
        self, ids: Sequence[int], recorder: Recorder | None = None, logits_rows: LogitRows = "last"
    ) -> Numbers:
        """Run `ids` after the tokens so far, and return logits [rows, vocab] of `logits_rows`.

        Where the rotary frequencies depend on the length and change with it, the whole sequence
        is run again, so that a step always equals a prefill.
        """
        return self.backend.to_numpy(self._extend(ids, recorder, logits_rows))

    def _extend(self, ids: Sequence[int], recorder: Recorder | None, logits_rows: LogitRows) -> Any:
        """Run new tokens after those so far, and return their logits as an array of the backend.

        Raises UsageError if there are no ids or the model predicts no tokens.
        """
        check_predicts(self.spec, self.weights.subject)
        new, before = [int(i) for i in ids], len(self.ids)
        if not new:
            raise UsageError("no tokens to run; give at least one")
        if self._cache is None:
            self._cache = KVCache(self.backend, int(self.hp["n_layers"]))
        rows = logits_rows
        stale = (
            before
            and self._depends_on_length
            and not keys_stay_valid(self.hp, before, before + len(new))
        )
        if before and (stale or self._cache.length < before):
            self._cache.truncate(0)
            rows = _shift_rows(logits_rows, len(new), before)
            new, self.ids = self.ids + new, []
        logits = self._run_pass(new, self._cache, recorder, rows)
        self.ids = self.ids + new
        return logits

    def _run_pass(
        self, ids: Sequence[int], cache: KVCache | None, recorder: Recorder | None, rows: LogitRows
    ) -> Any:
        """Return the logits of `rows` from the forward pass, replayed where it was recorded."""
        forward_pass = partial(
            self._forward,
            self.backend,
            self.spec,
            self.hp,
            self.weights,
            cache=cache,
            recorder=recorder,
            logits_rows=rows,
        )
        tracer = (
            recorder if isinstance(recorder, Tracer) and recorder.replay_key is not None else None
        )
        if self._graphs is None or (recorder is not None and (tracer is None or cache is not None)):
            return forward_pass(ids)

        def run(ids: Numbers, positions: Numbers) -> Any:
            """Return the logits of one forward pass over `ids` that stand at `positions`."""
            return forward_pass(ids, positions=positions)

        tokens = check_tokens(ids, self._vocab_size)
        kind = rows if isinstance(rows, str) else tuple(rows)
        if tracer is None:
            return self._graphs.replay_for(run, tokens, cache, kind, steps=self._can_replay_steps)
        return self._run_traced(tracer, run, tokens, (kind, tracer.replay_key))

    def _run_traced(
        self, tracer: Tracer, run: Callable[..., Any], tokens: Numbers, kind: Hashable
    ) -> Any:
        """Return the logits of a pass whose statistics wait on the device, run or replayed.

        The tracer has the pass's records afterwards. `kind` is a key: passes with an equal one are
        replayed from the same recording.
        """
        assert self._graphs is not None

        def run_and_trace(ids: Numbers, positions: Numbers) -> Any:
            """Return the logits of a pass, recorded by the tracer from its beginning."""
            tracer.restart()
            logits = run(ids, positions)
            tracer.join_statistics()
            return logits

        logits = self._graphs.replay_for(run_and_trace, tokens, None, kind, steps=False)
        if not tracer.ran:
            tracer.take_replay(self._templates[kind, len(tokens)])
        elif self._graphs.best is not None:
            self._templates[kind, len(tokens)] = tracer.replay_template()
        return logits

    def prefill(self, ids: Sequence[int], logits_rows: LogitRows = "last") -> Numbers:
        """Discard the sequence so far, run a prompt and return logits [rows, vocab]."""
        self.truncate()
        return self.extend(ids, None, logits_rows)

    def logits_in_parts(self, ids: Sequence[int], rows: range, limit: int) -> Iterator[Numbers]:
        """Yield logits of the adjacent `rows` of a new sequence, at most `limit` rows at a time.

        Later rows run after the cache of earlier ones, so that only those yielded are held. Where
        the rotary frequencies depend on the length the whole sequence runs at once.
        """
        if self._depends_on_length:
            logits = self.prefill(ids, rows)
            yield from (logits[at : at + limit] for at in range(0, len(rows), limit))
            return
        ends = [*range(rows.start + limit, rows.stop, limit), rows.stop]
        yield self.prefill(ids[: ends[0]], range(rows.start, ends[0]))
        for start, stop in pairwise(ends):
            yield self.extend(ids[start:stop], None, "all")

    def logits_at_positions(
        self, ids: Sequence[int], positions: Numbers, limit: int
    ) -> Iterator[Numbers]:
        """Yield the logits of a sequence in arrays of at most `limit` rows.

        `positions` are those of the tokens. Every token attends to all before it, whatever the
        positions. Each array takes a pass over the whole sequence.
        """
        for start in range(0, len(ids), limit):
            rows = range(start, min(start + limit, len(ids)))
            yield self.backend.to_numpy(
                self._forward(
                    self.backend,
                    self.spec,
                    self.hp,
                    self.weights,
                    ids,
                    positions=positions,
                    logits_rows=rows,
                )
            )

    def logits_of_hidden_end(
        self, ids: Sequence[int], hidden_from: int, limit: int
    ) -> Iterator[Numbers]:
        """Yield logits of all rows of a sequence of which no token attends to the end.

        The end begins with token `hidden_from`: padding under an attention mask, whose own rows
        attend to the text alone. A row whose window has no text attends as without the mask. Logits
        come in arrays of at most `limit` rows, and each array takes a pass over the whole sequence.
        """
        backend = copy(self.backend)
        attend = self.backend.attention

        def attend_to_text(q: Any, k: Any, v: Any, heads: Heads) -> Any:
            """Return attention's result without the keys of the sequence's end, which is padding.

            A query whose window has no other key attends to all that it usually sees.
            """
            seen = np.zeros(heads.mask.shape, np.bool_)
            seen[:, :hidden_from] = True
            seen |= ~(heads.mask & seen).any(1, keepdims=True)
            return attend(q, k, v, self.backend.limit_keys(heads, seen))

        backend.attention = attend_to_text  # type: ignore[method-assign]
        for start in range(0, len(ids), limit):
            rows = range(start, min(start + limit, len(ids)))
            logits = self._forward(backend, self.spec, self.hp, self.weights, ids, logits_rows=rows)
            yield self.backend.to_numpy(logits)

    def step(self, token: int) -> Numbers:
        """Run one more token and return its logits [vocab]."""
        logits: Numbers = self.extend([token])[0]
        return logits

    def logits(self, ids: Sequence[int], recorder: Recorder | None = None) -> Numbers:
        """Return logits [tokens, vocab] of a whole sequence.

        The session's sequence and cache are not changed.
        """
        check_predicts(self.spec, self.weights.subject)
        return self.backend.to_numpy(self._run_pass(ids, None, recorder, "all"))

    def embedding(self, ids: Sequence[int]) -> Numbers:
        """Return the pooled last rows of a sequence, [1, hidden].

        Raises UsageError for a model without a pooling.
        """
        if self.hp["pooling"] is None:
            raise UsageError(f"{self.spec.name}: states no pooling; expected mean, cls or last")
        if self.spec.block.head == "none":
            return self.backend.to_numpy(self._run_pass(ids, None, None, "last"))
        kept = KeptValues()
        self.trace(ids, ("pooled",), keep=kept.keep)
        found = kept.fetch("pooled")
        assert found is not None
        return found

    def generate(
        self,
        ids: Sequence[int],
        sampler: Callable[[Numbers | DeviceLogits], int],
        limit: int,
        stop: Collection[int] = (),
    ) -> Iterator[int]:
        """Yield up to `limit` tokens after a prompt; ends before a token of `stop`.

        `sampler` chooses a token from logits [vocab].
        """
        self.truncate()
        given: Sequence[int] = ids
        for _ in range(limit):
            token = sampler(self._last_row(given))
            if token in stop:
                return
            yield token
            given = [token]

    def _last_row(self, ids: Sequence[int]) -> Any:
        """Return the last row's logits for a sampler: copied to the host only if it needs them."""
        logits = self._extend(ids, None, "last")
        best = None if self._graphs is None else self._graphs.best
        return self.backend.host_row(logits[-1], best)

    def trace(
        self,
        ids: Sequence[int],
        wanted: Collection[str],
        *,
        positions: Positions = "all",
        keep: Callable[[Record, Numbers], None] | None = None,
        fetch: Callable[[str], Numbers | None] | None = None,
        hashes: bool = False,
        stop: bool = True,
        logits_rows: LogitRows = "last",
        run: Mapping[str, Value] | None = None,
        behind: int = 0,
    ) -> Trace:
        """Return the trace of a sequence, with the wanted keys of `points` recorded.

        The first `behind` tokens only fill the cache; those after them are recorded, and so is what
        attention reads of the cache. Where the rotary frequencies change with the length the whole
        sequence is run, and recorded.

        `keep` gets every record with its values as they come, `fetch` returns them later
        (trace.KeptValues, trace_file.Spool). `hashes`: records get a digest of their values. `stop`
        ends the pass at the first NaN or infinity. `run` is added to the trace's facts of the run.
        Raises UsageError where filling the cache leaves no token to trace.
        """
        tracer = Tracer(
            self.backend,
            self.points,
            wanted,
            positions=positions,
            keep=keep,
            hashes=hashes,
            stop=stop,
            cached=behind > 0,
        )
        if not 0 <= behind < len(ids):
            raise UsageError(f"{behind} of {len(ids)} tokens to fill the cache; leave one to trace")
        try:
            if behind:
                self.prefill(ids[:behind])
                self.extend(ids[behind:], tracer, logits_rows)
            else:
                self._run_pass(ids, None, tracer, logits_rows)
        except StoppedTrace:
            pass  # the trace says where
        return tracer.trace(self.facts(ids) | dict(run or {}), fetch)

    def facts(self, ids: Sequence[int]) -> dict[str, Value]:
        """Return {name: value} of a trace's run: architecture, ids, backend, version."""
        return {
            "architecture": self.spec.name,
            "ids": [int(i) for i in ids],
            "backend": dict(self.backend.facts()),
            "aprfmt": __version__,
        }


def load_forward(spec: ArchSpec) -> Callable[..., Any]:
    """Return the forward pass that an architecture names; ArchError if it cannot be loaded."""
    if not spec.forward:
        return forward
    try:
        named: Callable[..., Any] = load_attribute(spec.forward)
    except (ImportError, AttributeError) as error:
        raise ArchError(
            f"{spec.name}: its forward pass {spec.forward!r} cannot be loaded: {error}"
        ) from error
    return named


def _shift_rows(rows: LogitRows, count: int, before: int) -> LogitRows:
    """Return rows of the last `count` tokens as rows of a sequence with `before` more in front."""
    if rows == "last":
        return rows
    wanted = range(count) if isinstance(rows, str) else rows
    return [before + row for row in wanted]


def peak_rss() -> int | None:
    """Return the process's highest resident memory in bytes; None where the system has none."""
    try:
        import resource
    except ImportError:
        return None
    kilo = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * kilo
