"""Opening a run or a saved trace of any kind as one Trace."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aprfmt.base.protocols import Value
from aprfmt.errors import UsageError
from aprfmt.inference.aprt import is_aprt, load_aprt
from aprfmt.inference.device import Choice, choose, parse_run, split_run
from aprfmt.inference.engines import ENGINES
from aprfmt.inference.engines.collect import weights_of as weights_of
from aprfmt.inference.forward import LogitRows
from aprfmt.inference.session import Session
from aprfmt.inference.trace import Positions, Trace
from aprfmt.inference.trace_file import Spool, is_trace_file, load_trace
from aprfmt.model.completeness import refuse_to_run

if TYPE_CHECKING:
    from aprfmt.model import Model

Opener = Callable[[Path, "Sequence[int] | None", "Model | None"], AbstractContextManager[Trace]]


def _own(
    path: Path, ids: Sequence[int] | None, model: "Model | None"
) -> AbstractContextManager[Trace]:
    return load_trace(path)


def _aprt(
    path: Path, ids: Sequence[int] | None, model: "Model | None"
) -> AbstractContextManager[Trace]:
    return nullcontext(load_aprt(path))


def _npz(
    path: Path, ids: Sequence[int] | None, model: "Model | None"
) -> AbstractContextManager[Trace]:
    from aprfmt.inference.engines.npz import load_npz

    return load_npz(path, ids, model)


def _text(
    path: Path, ids: Sequence[int] | None, model: "Model | None"
) -> AbstractContextManager[Trace]:
    from aprfmt.inference.engines.llama_text import load_eval_text

    return load_eval_text(path, ids, model)


def _is_npz(path: Path) -> bool:
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.read(4) in (b"PK\x03\x04", b"PK\x05\x06") or path.suffix == ".npz"


def _is_text(path: Path) -> bool:
    from aprfmt.inference.engines.llama_text import is_eval_text

    return path.is_file() and is_eval_text(path)


# Kind of saved trace -> (whether a path is one, by content; how it is opened). In this order.
TRACES: Mapping[str, tuple[Callable[[Path], bool], Opener]] = {
    "aprt": (is_aprt, _aprt),
    "npz": (_is_npz, _npz),
    "aprfmt": (is_trace_file, _own),
    "llama-eval-callback": (_is_text, _text),
}


def trace_kind(path: Path) -> str | None:
    """Return the kind of saved trace a path is, None for what is none (a model, say)."""
    return next((kind for kind, (fits, _) in TRACES.items() if fits(path)), None)


def is_trace(path: Path) -> bool:
    """Say whether a path holds a saved trace of a known kind."""
    return trace_kind(path) is not None


def open_trace(
    path: Path, ids: Sequence[int] | None = None, model: "Model | None" = None
) -> AbstractContextManager[Trace]:
    """Open a saved trace of any kind; its values can be fetched until the `with` is left.

    `ids` are what it is of where it does not say, `model` what it was made from: its sizes name
    what a foreign file leaves open (a joined qkv, adjacent pairs, whether an embedding is the
    scaled one). Raises FormatError for a file that is no trace or is damaged.
    """
    from aprfmt.errors import FormatError

    kind = trace_kind(path)
    if kind is None:
        raise FormatError(
            f"{path}: is no saved trace; expected .safetensors of aprfmt trace --save, .npz of "
            "module outputs, the text of llama-eval-callback, or an APRT folder"
        )
    return TRACES[kind][1](path, ids, model)


def model_and_run(text: str) -> tuple[str, str | None]:
    """Split `MODEL@RUN` as `split_run` does, but refuse an unknown run behind a model that exists.

    Raises UsageError with the names there are.
    """
    name, run = split_run(text)
    if run is None and not Path(text).exists():
        model, at, unknown = text.rpartition("@")
        if at and Path(model).exists():
            parse_run(unknown)  # says what is known
    return name, run


@contextmanager
def open_run(
    text: "str | Path",
    ids: Sequence[int] | None = None,
    *,
    model: "Model | None" = None,
    wanted: Collection[str] | None = None,
    positions: Positions = "all",
    logits_rows: LogitRows = "all",
    arch: str | None = None,
    choice: Choice | None = None,
    **options: Any,
) -> Iterator[Trace]:
    """Open a run or a saved trace; yields a Trace whose values can be fetched inside the `with`.

    `text` is a saved trace (see `open_trace`) or RUN = `MODEL[@NAME[:DEVICE][:DTYPE]]` of a
    backend or an engine, which is run on `ids`; `choice` settles the part behind @ instead.
    `model`, open, is what a trace was made from, or for a run the MODEL itself, which then is not
    opened again. `wanted` are keys (`L3.attn_out`), None for every point there is. `options`:
    threads, memory, deterministic, hashes.

    Trace.run has `ids`, `model` and `backend` (`{"backend": "transformers", ...}`); of foreign runs
    `unknown` too: names that are no point of ours or could not be split, each with the reason.

    Raises UsageError for ids missing, FormatError for a damaged trace, BackendUnavailableError
    for a backend or engine that is not installed.
    """
    from aprfmt.model import open_model

    path = Path(text)
    if path.exists() and choice is None and is_trace(path):
        with open_trace(path, ids, model) as trace:
            yield trace
        return
    name, run = model_and_run(str(text))
    chosen = choice or (choose() if run is None else parse_run(run))
    if ids is None:
        raise UsageError(f"{text}: a run needs token ids; give --ids or --prompt")
    with ExitStack() as stack:
        opened = model if model is not None else stack.enter_context(open_model(name, arch=arch))
        with run_model(
            opened, ids, chosen, wanted=wanted, positions=positions, logits_rows=logits_rows,
            **options,
        ) as trace:  # fmt: skip
            yield trace


@contextmanager
def run_model(
    model: "Model",
    ids: Sequence[int],
    choice: Choice,
    *,
    wanted: Collection[str] | None = None,
    positions: Positions = "all",
    logits_rows: LogitRows = "all",
    threads: int | None = None,
    memory: int | None = None,
    deterministic: bool = False,
    hashes: bool = False,
    facts: Mapping[str, Value] | None = None,
) -> Iterator[Trace]:
    """Run an open model on a backend or an engine; yields the Trace with its values.

    A run that meets a NaN or an infinity goes on: what comes after it is recorded too.
    """
    refuse_to_run(model.resolution, model.path)
    if choice.is_engine:
        engine = ENGINES[choice.backend]
        with engine(
            model,
            ids,
            choice,
            wanted=wanted,
            positions=positions,
            threads=threads,
            hashes=hashes,
            logits_rows=logits_rows,
        ) as trace:
            yield replace(trace, run={"weights": weights_of(model), **trace.run, **(facts or {})})
        return
    backend = choice.open(deterministic=deterministic, threads=threads)
    with Session.of(model, backend, memory=memory) as session, Spool() as spool:
        keys = tuple(session.points) if wanted is None else wanted
        yield session.trace(
            ids, keys, positions=positions, keep=spool.keep, fetch=spool.fetch, hashes=hashes,
            stop=False, logits_rows=logits_rows,
            run={"model": str(model.path), "weights": weights_of(model), **(facts or {})},
        )  # fmt: skip
