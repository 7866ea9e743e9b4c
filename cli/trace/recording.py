"""Runs the model for `aprfmt trace`, on a backend or an engine, and compares with a reference.

An *item* is a point that was not compared, or a part of a model's files that nothing reads.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from aprfmt.base.budget import Budget, BudgetSpent
from aprfmt.cli import render, run_options
from aprfmt.cli.trace.request import TraceOutputs
from aprfmt.errors import UsageError
from aprfmt.inference.capture import resolve_alias
from aprfmt.inference.device import split_run
from aprfmt.inference.engines.opening import is_trace, open_trace
from aprfmt.inference.forward import LogitRows
from aprfmt.inference.record import Record
from aprfmt.inference.running import Run, RunRequest, make_request, split_known_run
from aprfmt.inference.session import Numbers
from aprfmt.inference.trace import (
    KeptValues,
    Positions,
    StoppedTrace,
    Trace,
    ValueStore,
    check_positions,
)
from aprfmt.inference.trace_file import Spool
from aprfmt.measure.traces import TraceDiff, check_ids, compare_traces
from aprfmt.model import Model, open_model
from aprfmt.model.ledger import LATE, NotCompared, items_of_other_model
from aprfmt.model.missing_path import missing_path_message
from aprfmt.remote.paths import is_address

Watch = Callable[[str, "Numbers"], None]
LOGITS = 1 << 28  # bytes of logits in float32 that are recorded with the last row's
UNKNOWN = 8  # names of a foreign run that are warned of


def open_runner(
    text: str,
    engine: str | None,
    where: run_options.WhereOptions,
    stack: ExitStack,
    draft: bool = False,
) -> Run:
    """Return MODEL[@RUN] opened on a backend or an engine; `stack` closes it.

    `engine` is that of --engine. With `draft` it is the model's draft head. Raises UsageError where
    the run is named twice. `text` is MODEL[@RUN], `where` has the options of the run.
    """
    if engine is not None:
        if split_known_run(text)[1] or where.backend:
            raise UsageError(f"--engine {engine}: the run is named already; leave one of them out")
        where = replace(where, backend=engine)
    choice = where.request(text).choice
    if engine is not None and not choice.is_engine:
        raise UsageError(f"--engine {engine}: is a backend of ours; use --backend {engine}")
    if choice.is_engine and (where.deterministic or where.memory):
        render.warn(f"{choice}: --deterministic and --memory are for our own backends; ignored",
                    "ignored_option")  # fmt: skip
    return stack.enter_context(run_options.open_session(text, where, engines=True, draft=draft))


def recording_request(
    request: RunRequest, ids: list[int], keys: list[str], positions: Positions, cached: int,
    logits_at: Sequence[int] = (), count: int | None = None,
) -> RunRequest:  # fmt: skip
    """Return the request to run `ids` and record the points `keys` at some positions.

    Logits are recorded at the same positions; of "all" at the last, and at `logits_at`. `cached` is
    the number of tokens that fill the cache first; positions count from the first of all tokens.
    `count` is that of the positions with logits, None for one a token; a draft head has one less.
    """
    rows: LogitRows = "last"
    count = len(ids) if count is None else count
    if not isinstance(positions, str):
        rows = sorted({at - cached for at in positions if cached <= at < count}) or "last"
    elif positions == "all" and logits_at:
        rows = sorted({at - cached for at in (*logits_at, count - 1) if cached <= at < count})
    return replace(
        request, ids=tuple(ids), wanted=keys, positions=positions, behind=cached, logits_rows=rows
    )


def logits_to_record(
    model: Model, count: int, save: bool, other: Trace | None
) -> tuple[Sequence[int], bool]:
    """Return (positions of logits to record with the last, whether some are left out).

    They are all of `count` tokens where the trace is saved, or those that the saved reference
    `other` has. Where they take more than LOGITS bytes, the last alone is recorded.
    """
    record = None if other is None else other.find_record("logits")
    wanted: Sequence[int] = range(count) if save else (record and record.positions) or ()
    if len(wanted) * int(model.hyper["vocab_size"] or 0) * 4 <= LOGITS:
        return wanted, False
    return (), True


class WatchedKeeper:
    """Keeps recorded values in `place`, and passes each to `watch`.

    Without `store_all` only the values that are printed are kept.
    """

    def __init__(
        self, place: ValueStore, store_all: bool, watch: Watch | None, budget: Budget | None = None
    ) -> None:
        """Keep values in `place`: of all points with `store_all`, else of logits or pooled output.

        `watch` is called with each record's key and values, unless it is None. The pass ends at the
        first point after the time of `budget`.
        """
        self._place, self._every, self._watch, self._budget = place, store_all, watch, budget
        self.fetch = place.fetch

    def keep(self, record: Record, values: Numbers) -> None:
        """Store a record's values if they are to be kept, and call `watch` with them.

        Raises StoppedTrace where the budget's time is over.
        """
        if self._budget is not None and not self._budget.has_time():
            raise StoppedTrace(record.key)
        if self._every or record.point in ("logits", "pooled"):
            self._place.keep(record, values)
        if self._watch is not None:
            self._watch(record.key, values)


def record_trace(
    run: Run, request: RunRequest, stack: ExitStack, facts: dict[str, object], values: bool,
    watch: Watch | None = None, budget: Budget | None = None,
) -> Trace:  # fmt: skip
    """Return the trace of a run on the tokens asked for.

    With `values` they are spooled to disk as they come, else only those printed are kept. `watch`
    is called with each record's key and values. If a NaN appears, the pass runs again over all
    points, to name the first. `budget` ends the pass, which then lacks the later points.
    Raises BudgetSpent where it has no room for the weights that a pass reads.
    """
    check_room(run, budget)
    assert request.ids is not None and request.wanted is not None
    if run.own is None:
        check_positions(request.positions, range(len(request.ids)))
        trace = stack.enter_context(run.trace(replace(request, hashes=True), facts=facts))
        for key in trace.records if watch is not None else ():
            values_there = trace.recorded_values(key)
            if watch is not None and values_there is not None:
                watch(key, values_there)
        unknown: Any = trace.run["unknown"]
        warn_of_unknown(run.choice.backend, unknown)
        return trace
    place: ValueStore = stack.enter_context(Spool()) if values else KeptValues()
    seen = WatchedKeeper(place, values, watch, budget)
    hashed = replace(request, hashes=values)
    trace = stack.enter_context(run.trace(hashed, place=seen, stop=True, facts=facts))
    whole = len(request.wanted) == len(run.points) and request.positions == "all"
    if trace.nonfinite is None or whole or budget is not None:
        return trace
    # The NaN may have begun before the points asked for: run again with every point.
    every = run.own.trace(request.ids, tuple(run.points), behind=request.behind)
    return replace(trace, nonfinite=every.nonfinite or trace.nonfinite)


def check_room(run: Run, budget: Budget | None) -> None:
    """Raise BudgetSpent if no time is left, or too few bytes for all weights of a pass."""
    if budget is None:
        return
    nbytes = sum(view.nbytes for view in run.model.roles.values())
    if not (budget.has_time() and budget.has_room(nbytes)):
        raise BudgetSpent(
            f"{run.model.path}: a pass reads {nbytes} bytes of weights: {budget.reason}; no point "
            "is recorded"
        )


def unreached_points(
    run: Run, keys: Sequence[str], trace: Trace, budget: Budget | None
) -> tuple[NotCompared, ...]:
    """Return an item for each wanted point of the model that a budget's end left unrecorded.

    `keys` are the wanted points, `trace` is what was recorded of them. () without a budget.
    """
    if budget is None:
        return ()
    found = ((key, resolve_alias(key, run.points)) for key in keys)
    return tuple(
        NotCompared("point", key, LATE, budget.reason)
        for key, instance in found
        if instance is not None
        and trace.records.keys().isdisjoint((trace.aliases.get(key, key), instance.key))
    )


def warn_of_unknown(where: str, unknown: Mapping[str, object]) -> None:
    """Warn of the names in another engine's run that match no capture point.

    `unknown` is {name: why}, `where` the run or file, which begins the warning.
    """
    for name, why in list(unknown.items())[:UNKNOWN]:
        render.warn(f"{where}: {name}: {why}", "unknown_point")


def uses_experts(model: Model | None) -> bool:
    """Return whether a model has experts (MoE); False where the model is not known."""
    return model is not None and bool(model.hyper["n_experts"])


def check_reference(
    reference: str, tokens: list[int] | None, model: Model | None, stack: ExitStack,
    *, runs: bool = True, option: str = "--reference",
) -> Trace | None:  # fmt: skip
    """Return the saved trace that an option names, opened; None for a model to be run later.

    It is called before anything runs or is written. Unless `runs`, only a saved trace can be
    compared. `tokens` are this side's ids, None where they are not known. `option` begins the
    messages: --reference or --same-dtype. Raises UsageError where the two cannot be compared.
    """
    path = Path(reference)
    if path.exists() and is_trace(path):
        saved = stack.enter_context(open_trace(path, tokens, model))
        if tokens is not None:
            check_ids(Trace({"ids": tokens}, {}), saved)
        return saved
    if tokens is None or not runs:
        if not os.path.exists(split_run(reference)[0]) and not is_address(path):
            raise UsageError(f"{option} {missing_path_message(path)}")
        raise UsageError(
            f"{option} {reference}: is no saved trace; a saved trace is compared with another, "
            "a model needs --payload"
        )
    with open_model(make_request(reference).model) as other:
        run_options.check_ids(other, tokens)
    return None


def check_references(
    wanted: TraceOutputs, tokens: list[int] | None, model: Model | None, stack: ExitStack,
    *, runs: bool = True,
) -> tuple[Trace | None, Trace | None]:  # fmt: skip
    """Return the saved traces that --reference and --same-dtype name, opened.

    None for an option that is not given, and for a model to be run later. Both are looked at before
    anything runs or is written. Unless `runs`, only saved traces can be compared. `tokens` are this
    side's ids, None where they are not known. Raises UsageError where one cannot be compared.
    """
    named = (("--reference", wanted.reference), ("--same-dtype", wanted.same_dtype))
    first, second = (
        None
        if text is None
        else check_reference(text, tokens, model, stack, runs=runs, option=option)
        for option, text in named
    )
    return first, second


def tokens_of_run(
    model: Model, tokens: run_options.TokenOptions, reference: str | None
) -> tuple[list[int], str | None]:
    """Return (token ids, their text or None) by the options, or else from a saved reference.

    A saved reference has token ids, or a recorded embedding in which the rows of tokens are found.
    Raises UsageError for no source or several, and for a saved reference that gives no ids.
    """
    path = None if reference is None else Path(reference)
    if tokens.given or path is None or not (path.exists() and is_trace(path)):
        return run_options.token_ids(model, tokens)
    from aprfmt.diagnosis.recorded_ids import ids_of_embedding

    with open_trace(path, None, model) as saved:
        held: Any = saved.run.get("ids") or ids_of_embedding(saved, model)
    if not held:
        raise UsageError(f"--reference {reference}: holds no token ids; give them with --ids")
    return run_options.check_ids(model, [int(each) for each in held]), None


def compare_with_reference(
    trace: Trace, saved: tuple[Trace | None, Trace | None], wanted: TraceOutputs,
    request: RunRequest, this_run: Run, where: run_options.WhereOptions,
    budget: Budget | None = None,
) -> TraceDiff:  # fmt: skip
    """Return the comparison with a saved trace, or with another model's run on the same tokens.

    `saved` is what check_references returned, `request` what `this_run` recorded. Of `where` the
    other run takes threads, memory and determinism; its backend, device and dtype are those of its
    MODEL@RUN. For a page each token position is compared too. `wanted` has the reference and
    whether a page is written. What `budget` leaves of another run, and what nothing reads of its
    model, is in `left`. Raises BudgetSpent where it leaves all.
    """
    with ExitStack() as stack:
        (other, same), moe = saved, uses_experts(this_run.model)
        left: tuple[NotCompared, ...] = ()
        if other is None:
            other, moe, left = _record_other(
                wanted.reference or "", request, this_run, where, stack, budget
            )
        if wanted.same_dtype is not None and same is None:
            same, _, _ = _record_other(wanted.same_dtype, request, this_run, where, stack, budget)
        found = compare_traces(
            trace, other, moe=moe, positions=wanted.html is not None, same_dtype=same
        )
        return replace(found, left=(*found.left, *left))


def _record_other(
    text: str,
    asked: RunRequest,
    this_run: Run,
    where: run_options.WhereOptions,
    stack: ExitStack,
    budget: Budget | None,
) -> tuple[Trace, bool, tuple[NotCompared, ...]]:
    """Return (trace of MODEL[@RUN], whether it chooses experts, items that were not compared).

    The items are the points that `budget` left, and what nothing reads of that model. `this_run` is
    the run to compare with, `where` its options. `text` is that MODEL[@RUN].
    """
    assert asked.wanted is not None
    there = open_runner(text, None, where.for_other_model(), stack, this_run.request.draft)
    keys = [key for key in asked.wanted if key in there.points]
    both = replace(
        there.request, ids=asked.ids, wanted=keys, positions=asked.positions,
        behind=asked.behind, logits_rows=asked.logits_rows,
    )  # fmt: skip
    trace = record_trace(there, both, stack, {}, True, None, budget)
    late = unreached_points(there, keys, trace, budget)
    unread = items_of_other_model(there.model, this_run.model)
    return trace, uses_experts(there.model), (*late, *unread)
