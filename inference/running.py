"""Opens a model where a request says it runs, and traces its passes: for all commands.

A `RunRequest` says what runs where, `open_run` opens it, `Run.trace` records a pass. A run is a
model with a session on one of our backends, or with an engine that runs whole passes.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from aprfmt.arch import check_arch
from aprfmt.base.encoding_names import encoding_name
from aprfmt.base.protocols import Value
from aprfmt.errors import ArchError, UsageError
from aprfmt.inference.cuda_driver import name_memory_errors
from aprfmt.inference.device import DeviceChoice, choose_device, parse_run, split_run
from aprfmt.inference.engines import ENGINES
from aprfmt.model import Model, open_model
from aprfmt.model.completeness import check_runnable
from aprfmt.model.lone_codes import refuse_lone_codes

if TYPE_CHECKING:
    from aprfmt.inference.backends.base import Backend
    from aprfmt.inference.capture import PointInstance
    from aprfmt.inference.forward import LogitRows
    from aprfmt.inference.session import Session
    from aprfmt.inference.trace import Positions, Trace, ValueStore

Asked = TypeVar("Asked", bound="RunRequest")


@dataclass(frozen=True)
class RunRequest:
    """What runs, where, and what is recorded of it.

    `model` is a path, unused where the caller has the model open. `threads`, `memory` (bytes for
    decoded weights) and `deterministic` are None and False where the machine decides. `through` is
    an encoding that the layers' matrices are encoded in and decoded from first. `draft`: the
    model's draft head is run, after the model. `wanted` are keys (`L3.attn_out`), None for every
    point there is; the first `behind` tokens only fill the cache.
    """

    ids: tuple[int, ...] | None = None
    choice: DeviceChoice = field(default_factory=choose_device)
    model: Path | str = ""
    arch: str | None = None
    allow_missing: Sequence[str] = ()
    threads: int | None = None
    memory: int | None = None
    deterministic: bool = False
    through: str | None = None
    draft: bool = False
    wanted: Collection[str] | None = None
    positions: "Positions" = "all"
    logits_rows: "LogitRows" = "all"
    behind: int = 0
    hashes: bool = False

    def __post_init__(self) -> None:
        """Replace the encoding `through` by its name in our table (`nf4`, `fp16` are spellings)."""
        if self.through is not None:
            object.__setattr__(self, "through", encoding_name(self.through))

    def with_choice(self: Asked, choice: DeviceChoice) -> Asked:
        """Return the same request on another backend, engine, device or dtype."""
        return replace(self, choice=choice)

    def open_backend(self) -> "Backend":
        """Return the backend that the request names, opened; UsageError for an engine."""
        return self.choice.open(deterministic=self.deterministic, threads=self.threads)

    def open_session(self, model: Model, backend: "Backend | None" = None) -> "Session":
        """Return a session of a model, which the caller closes (a context manager).

        It is on `backend`, or on a new one. With `draft` it is a DraftSession.
        """
        from aprfmt.inference.session import Session

        backend = self.open_backend() if backend is None else backend
        if self.through is None:
            main = Session.open(model, backend, memory=self.memory)
        else:
            from aprfmt.inference.parity.matched_weights import weights_through_encoding

            weights = weights_through_encoding(model, self.through, self.memory)
            main = Session(model.spec, model.hyper, weights, backend)
        if not self.draft:
            return main

        from aprfmt.inference.draft import DraftSession

        return DraftSession(model, main)


def make_request(
    text: Path | str,
    device: str | None = None,
    backend: str | None = None,
    dtype: str | None = None,
    **rest: Any,
) -> RunRequest:
    """Return the request of `MODEL[@RUN]`, or of MODEL with a device, backend and dtype.

    `rest` are further fields of the request. Raises UsageError for an unknown run after a model
    that exists, and for a run that is named twice; ArchError for an unknown `arch`, which an engine
    would never look up.
    """
    check_arch(rest.get("arch"))
    name, run = split_known_run(str(text))
    if run is None:
        return RunRequest(model=name, choice=choose_device(device, backend, dtype), **rest)
    if device or backend or dtype:
        raise UsageError(f"@{run} names the run already; leave --device, --backend, --dtype out")
    return RunRequest(model=name, choice=parse_run(run), **rest)


def split_known_run(text: str) -> tuple[str, str | None]:
    """Return (model, run) of `MODEL@RUN`; run is None if the text names none.

    Unlike `split_run`, it raises UsageError for an unknown run after a model that exists.
    """
    name, run = split_run(text)
    if run is None and not Path(text).exists():
        model, at, unknown = text.rpartition("@")
        if at and Path(model).exists():
            parse_run(unknown)  # says what is known
    return name, run


@dataclass(frozen=True)
class Run:
    """An open model where it runs; `own` is its session, None where an engine runs whole passes."""

    request: RunRequest
    model: Model
    own: "Session | None"

    @property
    def choice(self) -> DeviceChoice:
        """The backend or engine, device and dtype, and the reason for them."""
        return self.request.choice

    @property
    def session(self) -> "Session":
        """The session; raises UsageError for an engine, which has none."""
        if self.own is None:
            self.choice.open()  # says what takes an engine
            raise UsageError(f"{self.choice}: an engine has no session")
        return self.own

    @cached_property
    def points(self) -> "Mapping[str, PointInstance]":
        """{key: capture point} of the model, in execution order."""
        from aprfmt.inference.capture import point_instances

        if self.own is not None:
            return self.own.points
        return point_instances(self.model.spec.block, self.model.hyper, self.model.roles)

    @contextmanager
    def trace(
        self,
        request: RunRequest | None = None,
        *,
        place: "ValueStore | None" = None,
        stop: bool = False,
        facts: Mapping[str, Value] | None = None,
    ) -> "Iterator[Trace]":
        """Yield the trace of a request's tokens (None: this run's request), with its values.

        Values are on disk until the `with` is left, or in the store `place`. A NaN or an infinity
        ends the pass only if `stop`. Trace.run has `ids`, `model`, `weights`, `backend` and
        `facts`; for engines `unknown` too: names that are no point of ours or could not be split,
        each with the reason. Raises UsageError for a request without token ids.
        """
        from aprfmt.inference.trace_file import Spool
        from aprfmt.measure.tolerances import weights_class_of

        asked = self.request if request is None else request
        if asked.ids is None:
            raise UsageError(f"{asked.model}: a run needs token ids; give --ids or --prompt")
        if self.own is None:
            with self._trace_by_engine(asked, asked.ids) as trace:
                said = {"weights": weights_class_of(self.model), **trace.run, **(facts or {})}
                yield replace(trace, run=said)
            return
        weights = weights_class_of(self.model) if asked.through is None else "quantized"
        with nullcontext(place) if place is not None else Spool() as kept:
            yield self.own.trace(
                asked.ids,
                tuple(self.points) if asked.wanted is None else asked.wanted,
                positions=asked.positions,
                keep=kept.keep,
                fetch=kept.fetch,
                hashes=asked.hashes,
                stop=stop,
                logits_rows=asked.logits_rows,
                run={**(facts or {}), "model": str(self.model.path), "weights": weights},
                behind=asked.behind,
            )

    def _trace_by_engine(
        self, asked: RunRequest, ids: Sequence[int]
    ) -> "AbstractContextManager[Trace]":
        """Return a context manager of an engine's trace.

        Raises UsageError if the request needs a backend.
        """
        if asked.behind:
            raise UsageError(f"{asked.choice}: --behind needs a backend; an engine runs one pass")
        return ENGINES[asked.choice.backend](
            self.model,
            ids,
            asked.choice,
            wanted=asked.wanted,
            positions=asked.positions,
            threads=asked.threads,
            hashes=asked.hashes,
            logits_rows=asked.logits_rows,
        )


@contextmanager
def open_run(
    request: RunRequest, model: Model | None = None, tell: Callable[[Model], None] | None = None
) -> Iterator[Run]:
    """Yield the run that a request names; a `model` that is open already is used.

    `tell` is called with the model before anything of it is refused. Raises UsageError for an
    engine with a draft head or a change of the weights, BackendUnavailableError for a backend or
    engine that is not there, ArchError for a model that lacks what it needs, such as the scales of
    codes (for a `model` that is open already, the caller judges those).
    """
    choice = request.choice
    backend = None if choice.is_engine else request.open_backend()
    with ExitStack() as stack:
        opened = model is None
        if model is None:
            model = stack.enter_context(
                open_model(request.model, arch=request.arch, allow_missing=request.allow_missing)
            )
        model.cache_remote_reads()
        if tell is not None:
            tell(model)
        if opened:  # who opened it before, such as a comparison, has its own answer to such codes
            refuse_lone_codes(model, ArchError)
        if backend is None and request.draft:
            raise UsageError(f"{choice}: an engine's pass has no draft head; use a backend of ours")
        if backend is None:
            check_runnable(model.resolution, model.path)
            if request.through is not None:
                raise UsageError(
                    f"{choice}: an engine reads the file's own weights; write the model through "
                    f"{request.through} first (aprfmt quantize), and compare that"
                )
            yield Run(request, model, None)
            return
        stack.enter_context(name_memory_errors(choice.device))
        yield Run(request, model, stack.enter_context(request.open_session(model, backend)))


@contextmanager
def run_and_trace(
    request: RunRequest, model: Model | None = None, facts: Mapping[str, Value] | None = None
) -> "Iterator[Trace]":
    """Yield the trace of a request: `open_run` and `Run.trace` in one.

    `model` is an open model, None: it is opened here. `facts` are added to the trace's facts of the
    run. Raises UsageError for a request without token ids.
    """
    if request.ids is None:
        raise UsageError(f"{request.model}: a run needs token ids; give --ids or --prompt")
    with open_run(request, model) as run, run.trace(facts=facts) as trace:
        yield trace
