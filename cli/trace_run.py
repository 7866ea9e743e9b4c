"""Running what `aprfmt trace` shows: a backend's session, a foreign engine, a reference."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from aprfmt.cli import render, running


def run(
    session: Any, tokens: list[int], keys: list[str], positions: Any, stack: ExitStack,
    facts: dict[str, Any], values: bool, watch: Callable[[str, Any], None] | None = None,
    behind: int = 0,
) -> Any:  # fmt: skip
    """Run and record; values go to disk as they come, if anybody wants them, and past `watch`."""
    from aprfmt.inference.trace import Kept
    from aprfmt.inference.trace_file import Spool

    place: Any = stack.enter_context(Spool()) if values else Kept()

    def keep(record: Any, found: Any) -> None:
        if values or record.point == "logits":  # these for the top five
            place.keep(record, found)
        if watch is not None:
            watch(record.key, found)

    trace = session.trace(
        tokens, keys, positions=positions, keep=keep, fetch=place.fetch, hashes=values, run=facts,
        behind=behind, logits_rows=logit_rows(positions, len(tokens), behind),
    )  # fmt: skip
    if trace.nonfinite is None or (len(keys) == len(session.points) and positions == "all"):
        return trace
    # What was asked for may lie behind the place where it began: look at every point there is.
    every = session.trace(tokens, tuple(session.points), behind=behind)
    return replace(trace, nonfinite=every.nonfinite or trace.nonfinite)


def logit_rows(positions: Any, tokens: int, behind: int = 0) -> Any:
    """Return the rows of the pass whose logits are computed: the chosen positions, or the last."""
    if isinstance(positions, str):
        return "last"
    return sorted({place - behind for place in positions if behind <= place < tokens}) or "last"


def open_runner(
    text: str, arch: str | None, engine: str | None, stack: ExitStack, **where: Any
) -> tuple[Any, Any, Any]:
    """Return (model, choice, session); no session where a foreign engine runs the model."""
    from aprfmt.inference.device import choose
    from aprfmt.inference.engines.opening import model_and_run
    from aprfmt.model import open_model
    from aprfmt.model.completeness import refuse_to_run

    path, named = model_and_run(text)
    if engine is not None:
        from aprfmt.errors import UsageError

        if named or where.get("backend"):
            raise UsageError(f"--engine {engine}: the run is named already; leave one of them out")
        choice = choose(where.get("device"), engine, where.get("dtype"))
        if not choice.is_engine:
            raise UsageError(f"--engine {engine}: is a backend of ours; use --backend {engine}")
    else:
        choice = running.choose(where["device"], where["backend"], where["dtype"], named)
    if not choice.is_engine:
        opened, session, choice = stack.enter_context(running.session(text, arch=arch, **where))
        return opened, choice, session
    if where.get("deterministic") or where.get("memory"):
        render.warn(f"{choice}: --deterministic and --memory are for our own backends; ignored")
    allowed = where.get("allow_missing", ())
    model = stack.enter_context(open_model(path, arch=arch, allow_missing=allowed))
    running.warn_of(model)
    refuse_to_run(model.resolution, model.path)
    return model, choice, None


def running_points(model: Any, session: Any) -> Any:
    """Return a model's points by key, in execution order."""
    from aprfmt.inference.capture import instances

    if session is not None:
        return session.points
    return instances(model.spec.block, model.hyper, model.roles)


def run_engine(
    model: Any, tokens: list[int], keys: list[str], positions: Any, choice: Any, stack: ExitStack,
    facts: dict[str, Any], watch: Callable[[str, Any], None] | None, where: dict[str, Any],
) -> Any:  # fmt: skip
    """Run a foreign engine; its values are on disk."""
    from aprfmt.inference.engines.opening import run_model
    from aprfmt.inference.trace import check_positions

    check_positions(positions, range(len(tokens)))
    trace = stack.enter_context(
        run_model(model, tokens, choice, wanted=keys, positions=positions, hashes=True,
                  logits_rows=logit_rows(positions, len(tokens)),
                  threads=where.get("threads"), facts=facts)
    )  # fmt: skip
    if watch is not None:
        for key in trace.records:
            watch(key, trace.values(key))
    for name, why in list(trace.run["unknown"].items())[:8]:
        render.warn(f"{choice.backend}: {name}: {why}")
    return trace


def engine_facts(model: Any, choice: Any, trace: Any) -> dict[str, Any]:
    """Return what JSON says of where a foreign engine ran."""
    from aprfmt.inference.session import peak_rss

    return {
        "model": str(model.path), "format": model.format, "architecture": model.spec.name,
        "requested": choice.requested, "ran": str(choice), "why": choice.why,
        "allowed_missing": list(model.resolution.coverage.accepted),
        "backend": dict(trace.run["backend"]), "via": trace.run.get("via"),
        "peak_rss_bytes": peak_rss(),
    }  # fmt: skip


def check_reference(
    reference: str, tokens: list[int] | None, model: Any | None, stack: ExitStack,
    *, runs: bool = True,
) -> Any:  # fmt: skip
    """Refuse a reference that cannot be compared, before anything runs or is written.

    Returns a saved trace, open, or None for a model that is run later; where nothing `runs`, only
    saved traces can be compared. `tokens` are this side's, None where they are not known.
    """
    from aprfmt.compare.traces import check_ids
    from aprfmt.errors import UsageError
    from aprfmt.inference.device import parse_run
    from aprfmt.inference.engines.opening import is_trace, model_and_run, open_trace
    from aprfmt.inference.trace import Trace
    from aprfmt.model import open_model

    path = Path(reference)
    if path.exists() and is_trace(path):
        saved = stack.enter_context(open_trace(path, tokens, model))
        if tokens is not None:
            check_ids(Trace({"ids": tokens}, {}), saved)
        return saved
    if tokens is None or not runs:
        raise UsageError(
            f"--reference {reference}: is no saved trace; a saved trace is compared with another, "
            "a model needs --payload"
        )
    name, run = model_and_run(reference)
    if run is not None:
        parse_run(run)
    with open_model(name) as other:
        running.check_ids(other, tokens)
    return None


def compare(
    trace: Any, saved: Any, reference: str, tokens: list[int], keys: list[str], positions: Any,
    stack: ExitStack, model: Any, behind: int, where: dict[str, Any],
) -> Any:  # fmt: skip
    """Compare with a saved trace, or with a run of another model on the same tokens.

    `saved` is what check_reference returned. Of `where` the other run keeps what is about this
    machine and its bits; its backend, device and dtype are its own (MODEL@RUN).
    """
    from aprfmt.compare.traces import compare_traces
    from aprfmt.inference.engines.opening import run_model, weights_of

    if saved is not None:
        return compare_traces(trace, saved, moe=bool(model.hyper["n_experts"]))
    kept = where | dict.fromkeys(("device", "backend", "dtype"))
    opened, choice, session = open_runner(reference, None, None, stack, **kept)
    known = running_points(opened, session)
    here = [key for key in keys if key in known]
    facts = {"model": str(opened.path), "weights": weights_of(opened)}
    if session is None:
        other = stack.enter_context(
            run_model(
                opened,
                tokens,
                choice,
                wanted=here,
                positions=positions,
                facts=facts,
                logits_rows=logit_rows(positions, len(tokens)),
            )
        )
    else:
        other = run(session, tokens, here, positions, stack, facts, True, behind=behind)
    return compare_traces(trace, other, moe=bool(opened.hyper["n_experts"]))
