"""Running what `aprfmt trace` shows: a backend's session, a foreign engine, a reference."""

from collections.abc import Callable
from contextlib import ExitStack
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

    return session.trace(
        tokens, keys, positions=positions, keep=keep, fetch=place.fetch, hashes=values, run=facts,
        behind=behind,
    )  # fmt: skip


def open_runner(
    text: str, arch: str | None, engine: str | None, stack: ExitStack, **where: Any
) -> tuple[Any, Any, Any]:
    """Return (model, choice, session); no session where a foreign engine runs the model."""
    from aprfmt.inference.device import choose, split_run
    from aprfmt.model import open_model

    path, named = split_run(text)
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
    model = stack.enter_context(open_model(path, arch=arch))
    for note in (*model.notes, *model.resolution.notes):
        if note.level == "warning":
            render.warn(f"{note.where}: {note.text}")
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

    trace = stack.enter_context(
        run_model(model, tokens, choice, wanted=keys, positions=positions, hashes=True,
            logits_rows="last",
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
        "backend": dict(trace.run["backend"]), "via": trace.run.get("via"),
        "peak_rss_bytes": peak_rss(),
    }  # fmt: skip


def compare(
    trace: Any, reference: str, tokens: list[int], keys: list[str], positions: Any,
    stack: ExitStack, model: Any, behind: int,
) -> Any:  # fmt: skip
    """Compare with a saved trace, or with a run of another model on the same tokens."""
    from aprfmt.compare.traces import compare_traces
    from aprfmt.inference.engines.opening import is_trace, open_trace, run_model, weights_of

    moe = bool(model.hyper["n_experts"])
    path = Path(reference)
    if path.exists() and is_trace(path):
        other = stack.enter_context(open_trace(path, tokens, model))
        return compare_traces(trace, other, moe=moe)
    no = dict.fromkeys(("device", "backend", "dtype", "threads", "memory"))
    opened, choice, session = open_runner(reference, None, None, stack, **no, deterministic=False)
    running.check_ids(opened, tokens)
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
                logits_rows="last",
            )
        )
    else:
        other = run(session, tokens, here, positions, stack, facts, True, behind=behind)
    return compare_traces(trace, other, moe=bool(opened.hyper["n_experts"]))
