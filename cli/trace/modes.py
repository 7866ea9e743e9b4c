"""The ways `aprfmt trace` runs: a plan, a model run, a saved trace, dumped arrays."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aprfmt.cli import dry_run, options, output_format, render, run_options
from aprfmt.cli.trace import dumped_arrays
from aprfmt.cli.trace.request import TraceOutputs, TraceRequest
from aprfmt.errors import UsageError

if TYPE_CHECKING:
    from aprfmt.cli.trace.page import Histograms
    from aprfmt.inference.trace import Trace
    from aprfmt.measure.traces import TraceDiff
    from aprfmt.model import Model
    from aprfmt.model.ledger import NotCompared
    from aprfmt.model.verdict import Pronounced


def run_trace(
    model: str | None,
    loaded: Path | None,
    list_points: bool,
    request: TraceRequest,
    wanted: TraceOutputs,
    dumped: dumped_arrays.DumpedArrays,
    tokens: run_options.TokenOptions,
    where: run_options.WhereOptions,
) -> int:
    """Run `aprfmt trace` in the way the options ask for, and return the exit code.

    `loaded` is the trace of --load, `request` what to record, `wanted` what to make of it, `dumped`
    arrays to map. Raises UsageError for options of two ways at once. `where` has the options of the
    run.
    """
    if wanted.accept and wanted.reference is None:
        raise UsageError("--accept is of a comparison; give --reference RUN_OR_TRACE")
    if wanted.exact and wanted.reference is None and dumped.arrays is None:
        raise UsageError("--exact is of a comparison; give --reference RUN_OR_TRACE")
    if wanted.same_dtype is not None and wanted.reference is None:
        raise UsageError("--same-dtype goes with --reference, a float32 run")
    if dumped.mapping is not None and dumped.arrays is None:
        raise UsageError("--mapping goes with --map DIR; a mapping file alone is opened by --load")
    if request.budget is not None:
        if not (request.payload or request.engine) or request.dry_run:
            raise UsageError("--budget limits a run; add --payload or --engine")
        if wanted.save or wanted.save_aprt:
            raise UsageError("a saved trace has every point asked for; leave --budget out")
    if dumped.arrays is not None:
        if (
            loaded is not None
            or request.payload
            or request.engine
            or request.dry_run
            or list_points
        ):
            raise UsageError(
                "--map reads dumped arrays; leave --load, --payload, --engine and --list-points out"
            )
        options.check_new(wanted.force, wanted.save, wanted.save_aprt, wanted.html)
        named = model if model is not None else find_only_model()
        return show_mapped(named, dumped, tokens, where, wanted, request)
    if loaded is not None:
        unused = unused_with_load(request, tokens, where, list_points)
        if unused:
            raise UsageError(f"--load shows a saved trace; leave {', '.join(unused)} out")
        given = None if tokens.ids is None else run_options.parse_ids(tokens.ids)
        return show_saved(loaded, model, given, request, wanted)
    model = model if model is not None else find_only_model()
    runs = request.payload or request.engine or request.dry_run  # naming an engine asks for a run
    if list_points or not runs:
        return show_points(model, list_points, request, wanted, where)
    if request.dry_run:
        if request.draft:
            raise UsageError("--dry-run counts the passes of a model; leave --draft out")
        there = replace(where, backend=request.engine) if request.engine else where
        return dry_run.print_trace_estimate(model, tokens, there, request, wanted)
    options.check_new(wanted.force, wanted.save, wanted.save_aprt, wanted.html)
    return show_run(model, request, wanted, tokens, where)


def unused_with_load(
    request: TraceRequest,
    tokens: run_options.TokenOptions,
    where: run_options.WhereOptions,
    list_points: bool,
) -> list[str]:
    """Return the names of the given options that have no meaning for a saved trace."""
    runs = {
        "--payload": request.payload, "--engine": request.engine, "--prompt": tokens.prompt,
        "--chat": tokens.chat, "--positions": request.positions != "all",
        "--behind": request.behind, "--dry-run": request.dry_run, "--list-points": list_points,
        "--draft": request.draft, "--arch": where.arch,
        **{f"--{field.name.replace('_', '-')}": getattr(where, field.name)
           for field in fields(where)},
    }  # fmt: skip
    return [name for name, value in runs.items() if value]


def find_only_model() -> str:
    """Return the name of the current folder's only model; UsageError for none or several.

    The name is printed on stderr.
    """
    from aprfmt.model.missing_path import likely_models

    here = Path.cwd()
    found = [path for path in likely_models(here) if path.is_file()]
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "no model here"
        raise UsageError(f"trace: name a MODEL; the current folder has {names}")
    render.STATUS.clear()
    click.echo(f"using {render.escape(found[0].name)}", err=True)
    return found[0].name


def show_points(
    model: str,
    details: bool,
    request: TraceRequest,
    wanted: TraceOutputs,
    where: run_options.WhereOptions,
) -> int:
    """Print the capture points of a model without running it, and return exit code 0.

    `details` adds what each point means. `request` selects points and layers, `wanted` are the
    outputs that need a run. Raises UsageError for options that need a run. `where` has the options
    of the run.
    """
    from aprfmt.cli.trace import output, point_selection

    needs = [
        f"--{name.replace('_', '-')}"
        for name in ("save", "save_aprt", "reference", "html")
        if getattr(wanted, name)
    ]
    if needs and not details:
        raise UsageError(f"{', '.join(needs)}: needs --payload, which runs the model")
    body = point_selection.plan_points(model, request.points, request.layers, where, request.draft)
    return render.emit(body, 0, partial(output.show_plan, body, details=details))


def show_run(
    text: str,
    request: TraceRequest,
    wanted: TraceOutputs,
    tokens: run_options.TokenOptions,
    where: run_options.WhereOptions,
) -> int:
    """Run a model, print or save its capture points, and return the exit code.

    `request` says what to record, `wanted` what to make of it. `text` is MODEL[@RUN], `where` has
    the options of the run.
    """
    from aprfmt.cli.trace import output, page, point_selection, recording
    from aprfmt.inference.identity import trace_identity
    from aprfmt.inference.trace import parse_positions
    from aprfmt.model.ledger import OF_A_PASS, make_ledger

    positions = parse_positions(request.positions)
    histograms = page.Histograms()
    with ExitStack() as stack:
        run = recording.open_runner(text, request.engine, where, stack, request.draft)
        ids, said = recording.tokens_of_run(run.model, tokens, wanted.reference)
        run_options.warn_of_length(run.model, ids)
        # Choose what to record, and refuse a useless reference before anything runs.
        aprt = wanted.save_aprt is not None
        keys = point_selection.keys_to_record(run.points, request.points, request.layers, aprt)
        other, same = recording.check_references(wanted, ids, run.model, stack)
        save = wanted.save is not None
        rows = len(ids) - request.draft  # a draft head has one row less
        places, few = recording.logits_to_record(run.model, rows, save, other)
        run_request = recording.recording_request(
            run.request, ids, keys, positions, request.behind, places, rows
        )
        if few and positions == "all" and "logits" in keys:
            render.warn(
                f"logits: the last of {len(ids)} rows alone is recorded, all take more than "
                f"{recording.LOGITS >> 20} MiB; name rows by --positions", "few_logits"
            )  # fmt: skip
        watch = histograms.add if wanted.html is not None else None
        trace = recording.record_trace(
            run, run_request, stack, {"prompt": said}, wanted.values, watch, request.budget
        )
        late = recording.unreached_points(run, keys, trace, request.budget)
        # Put into JSON what was recorded and where it ran.
        body = output.trace_to_json(trace) | {"run": run_options.run_facts(run, trace)}
        body["tokens"] = {"ids": ids, "text": said}
        if body["logits"] is not None:
            run_options.name_tokens(body["logits"]["top"], run.model)
        if wanted.save or wanted.save_aprt:
            trace = replace(trace, run={**trace.run, **trace_identity(run.model, ids)})
            body["trace"] = dict(trace.run)

        def against() -> "TraceDiff":
            """Return the trace's comparison with the reference, which is run or read now."""
            found = recording.compare_with_reference(
                trace, (other, same), wanted, run_request, run, where, request.budget
            )
            unread = make_ledger(run.model, OF_A_PASS).not_compared
            return replace(found, left=tuple(dict.fromkeys((*found.left, *late, *unread))))

        failed = 0
        if late and wanted.reference is None:
            verdict = pronounce_recorded(len(keys) - len(late), len(keys), late)
            body |= verdict.to_json()
            failed = verdict.exit
            render.warn(verdict.says, "budget")
        return finish_trace(trace, body, wanted, against, histograms, failed)


def pronounce_recorded(done: int, every: int, late: "Sequence[NotCompared]") -> "Pronounced":
    """Return the verdict on a run that a budget ended after `done` of `every` points.

    `late` are the points that were not reached.
    """
    from aprfmt.model.verdict import Compared, VerdictWords, pronounce

    words = VerdictWords("recorded", "not recorded", "recorded in part")
    return pronounce(words, Compared(False, {"points": (done, every)}, tuple(late)))


def show_saved(
    path: Path, text: str | None, ids: list[int] | None, request: TraceRequest, wanted: TraceOutputs
) -> int:
    """Print a saved trace, compared with --reference if given, and return the exit code.

    `text` is the model it was made from, or None: with it other engines' files are read completely.
    Saving such a trace again writes it in aprfmt's format. `request` selects points and layers,
    `wanted` says what to make of the trace.
    """
    from aprfmt.cli.trace import output, page, point_selection, recording
    from aprfmt.inference.engines.opening import open_trace
    from aprfmt.model import open_model

    histograms = page.Histograms()
    with ExitStack() as stack:
        model = None if text is None else stack.enter_context(open_model(text))
        trace = stack.enter_context(open_trace(path, ids, model))
        trace = point_selection.select_records(trace, request.points, request.layers)
        unknown: Any = trace.run.get("unknown") or {}
        recording.warn_of_unknown(str(path), unknown)
        known: Any = trace.run.get("ids") or ids
        saved = recording.check_references(wanted, known, model, stack, runs=False)
        if wanted.html is not None:
            for key in trace.records:
                values, mask = trace.recorded_values(key), trace.values_mask(key)
                if values is not None:
                    histograms.add(key, values if mask is None else values[mask])
        against = partial(compare_stored, trace, saved, model, wanted)
        return finish_trace(trace, output.trace_to_json(trace), wanted, against, histograms)


def show_mapped(
    model: str,
    dumped: dumped_arrays.DumpedArrays,
    tokens: run_options.TokenOptions,
    where: run_options.WhereOptions,
    wanted: TraceOutputs,
    request: TraceRequest,
) -> int:
    """Print dumped arrays as a trace, with the point of each, and return the exit code.

    `dumped` are the arrays of `model`, `request` selects points and layers, `wanted` says what to
    make of the trace. `where` has the options of the run.
    """
    from aprfmt.cli.trace import output, page, point_selection, recording
    from aprfmt.measure.repeated_tokens import repeated_tokens

    with ExitStack() as stack:
        opened, trace, found, new = dumped_arrays.map_arrays(
            model, dumped, tokens, where, wanted.save, wanted.force, stack
        )
        trace = point_selection.select_records(trace, request.points, request.layers)
        ids: Any = trace.run["ids"]
        saved = recording.check_references(wanted, ids, opened, stack, runs=False)
        against = partial(compare_stored, trace, saved, opened, wanted)
        pairs = repeated_tokens(trace)
        if wanted.exact and wanted.reference is None and not pairs:
            raise UsageError(
                "--exact is of a comparison, and no two requests of the dump have the same tokens; "
                "give --reference RUN_OR_TRACE"
            )
        # Both files are there before anything is printed: a reader may close the pipe.
        if new is not None:
            dumped_arrays.write_mapping(*new, wanted.force)
        written = save_trace_files(trace, wanted)
        if output_format.answer_format() == "human":
            dumped_arrays.show_mapping(found)
        verdict = dumped_arrays.mapping_verdict(found, trace, wanted.exact)
        human = output_format.answer_format() == "human"
        if human or (verdict.exit == 2 and wanted.reference is None):
            render.say(verdict.says, style="warn" if verdict.not_compared else "good")
        if wanted.reference is None:
            for one in pairs:
                render.say(one.says, style="bad" if one.differs(wanted.exact) else "")
        body = output.trace_to_json(trace) | {"mapping": found, **verdict.to_json()}
        failed = verdict.exit  # 1: ranks that should agree do not; 2: a point was not read
        return finish_trace(trace, body, wanted, against, page.Histograms(), failed, written)


def compare_stored(
    trace: "Trace",
    saved: "tuple[Trace | None, Trace | None]",
    model: "Model | None",
    wanted: TraceOutputs,
) -> "TraceDiff":
    """Return the comparison of a stored trace with the one that --reference names.

    `saved` are the traces of --reference and --same-dtype. `model` says whether there are experts
    (None: unknown). For a page each token position is compared too; `wanted` says whether there is
    one.
    """
    from aprfmt.cli.trace import recording
    from aprfmt.measure.traces import compare_traces

    other, same = saved
    assert other is not None
    return compare_traces(
        trace,
        other,
        moe=recording.uses_experts(model),
        positions=wanted.html is not None,
        same_dtype=same,
    )


def finish_trace(
    trace: "Trace",
    body: dict[str, object],
    wanted: TraceOutputs,
    against: "Callable[[], TraceDiff]",
    histograms: "Histograms",
    failed: int = 0,
    written: list[str] | None = None,
) -> int:
    """Save, print, compare and draw a recorded trace as asked, and return the exit code.

    `body` is its JSON, which is added to; `against` returns the comparison. `failed` is 1 if the
    trace itself is known to be wrong, 2 if it is known to be incomplete. `wanted` says what to
    make of the trace; `histograms` are for its page. `written` are the paths of a trace that is
    saved already, None for one that is not.
    """
    from aprfmt.cli.html_page import add_page
    from aprfmt.cli.trace import output, reference
    from aprfmt.cli.trace.page import render_page

    code, difference = 1 if trace.nonfinite else failed, None
    body["saved"] = save_trace_files(trace, wanted) if written is None else written
    if wanted.reference is not None:
        difference = replace(against(), accept=wanted.accept, exact=wanted.exact)
        verdict = difference.pronounced
        body["reference"] = {"against": wanted.reference, **difference.to_json()}
        body |= verdict.to_json()
        code = 1 if verdict.exit == 1 else code or verdict.exit
    add_page(
        body, wanted.html, wanted.force, lambda: render_page(trace, body, histograms, difference)
    )

    def show() -> None:
        """Print the trace's table, and how the trace differs from the reference if there is one."""
        output.show_trace(trace, body, table=wanted.verbose or wanted.reference is None)
        if difference is not None:
            reference.show_difference(difference, wanted.reference or "", wanted.verbose)

    answer = None
    if difference is not None and not wanted.verbose:
        names = wanted.reference or "", str(trace.run.get("model", ""))
        answer = partial(reference.reference_answer, difference, *names)
    return render.emit(body, code, show, answer=answer)


def save_trace_files(trace: "Trace", wanted: TraceOutputs) -> list[str]:
    """Save a trace in the formats asked for, and return the paths written.

    `wanted` has the formats and paths.
    """
    from aprfmt.inference.aprt import save_aprt
    from aprfmt.inference.trace_file import save_trace

    written: list[str] = []
    if wanted.save is not None:
        save_trace(wanted.save, trace, force=wanted.force)
        written.append(str(wanted.save))
    if wanted.save_aprt is not None:
        written += map(str, save_aprt(wanted.save_aprt, trace, force=wanted.force))
    return written
