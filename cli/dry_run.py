"""`--dry-run` of commands that run a model: the memory a run needs, estimated from headers."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import click

from aprfmt.cli import render, run_options

if TYPE_CHECKING:
    from aprfmt.cli.trace.request import TraceOutputs, TraceRequest
    from aprfmt.inference.device import DeviceChoice
    from aprfmt.inference.memory_estimate import DeviceMemory, Estimate
    from aprfmt.inference.parity.request import ParityRequest
    from aprfmt.model import Model

option = click.option(
    "--dry-run", is_flag=True, help="Say what memory it takes on each device; run nothing."
)


def report_run(
    text: str, tokens: run_options.TokenOptions, where: run_options.WhereOptions, max_tokens: int
) -> int:
    """Print the memory that `aprfmt run` would need on each device; return exit code 0.

    Counted are the prompt's pass, and a decoding step for every generated token but the last.
    `text` names the model and its run, `where` has the options of the run.
    """
    from dataclasses import replace

    from aprfmt.inference.generation import room_in_context
    from aprfmt.inference.memory_estimate import estimate_run
    from aprfmt.model import open_model

    request = where.request(text)
    with open_model(request.model, arch=where.arch, allow_missing=where.allow_missing) as model:
        run_options.warn_of_model(model)
        ids, _ = run_options.token_ids(model, tokens)
        steps = min(max_tokens, room_in_context(model, len(ids))) - 1
        found = estimate_run(model, replace(request, ids=tuple(ids)), steps)
        return _report_estimates(model, len(ids), [found])


def print_trace_estimate(
    text: str,
    tokens: run_options.TokenOptions,
    where: run_options.WhereOptions,
    trace: "TraceRequest",
    wanted: "TraceOutputs",
) -> int:
    """Print the memory that `aprfmt trace --payload` would need; return exit code 0.

    `text` names the model and its run, `trace` the points to record, `wanted` the output files.
    """
    from aprfmt.cli.trace import point_selection, recording
    from aprfmt.inference.capture import point_instances
    from aprfmt.inference.memory_estimate import estimate_trace
    from aprfmt.inference.trace import parse_positions
    from aprfmt.model import open_model

    request = where.request(text)
    with open_model(request.model, arch=where.arch, allow_missing=where.allow_missing) as model:
        run_options.warn_of_model(model)
        ids, _ = run_options.token_ids(model, tokens)
        known = point_instances(model.spec.block, model.hyper, model.roles)
        aprt = wanted.save_aprt is not None
        keys = point_selection.keys_to_record(known, trace.points, trace.layers, aprt)
        positions = parse_positions(trace.positions)
        save = wanted.save is not None
        places, _ = recording.logits_to_record(model, len(ids), save, None)
        full = recording.recording_request(request, ids, keys, positions, trace.behind, places)
        found = estimate_trace(model, full)
        return _report_estimates(model, len(ids), [found])


def report_parity(
    model: "Model", choices: "Sequence[DeviceChoice]", request: "ParityRequest"
) -> int:
    """Print the memory that each run of a comparison needs, and all together; return 0.

    The runs stay open together, so their memory is added. `choices` are the runs; with
    `request.arbiter` numpy in float64 is one more. 0 is the exit code.
    """
    from aprfmt.inference.memory_estimate import estimate_trace
    from aprfmt.inference.parity.run_comparison import ARBITER, fused_rows

    every = [*choices, *([ARBITER] if request.arbiter else [])]
    plain = list(fused_rows(len(request.ids)))
    found = [
        f"{choice}: an engine manages its memory itself; not counted"
        if choice.is_engine
        else estimate_trace(model, request.with_choice(choice), plain)
        for choice in every
    ]
    return _report_estimates(model, len(request.ids), found)


def _report_estimates(model: "Model", tokens: int, found: "Sequence[Estimate | str]") -> int:
    """Print the estimates, as text or JSON, and return exit code 0.

    A text in `found` is the reason why a run was not estimated. Runs that do not fit in memory are
    marked, but the dry run does not fail for them.
    """
    from aprfmt.inference.memory_estimate import add_devices

    known = [one for one in found if not isinstance(one, str)]
    devices = add_devices(known)
    fits = all(one.fits for one in devices)
    body = {
        "dry_run": {
            "model": str(model.path), "architecture": model.spec.name, "tokens": tokens,
            "runs": [one.to_json() for one in known],
            "devices": [one.to_json() for one in devices],
            "notes": [one for one in found if isinstance(one, str)], "fits": fits,
        }
    }  # fmt: skip
    return render.emit(body, 0, partial(_print_estimates, found, devices if len(known) > 1 else ()))


def _print_estimates(found: "Sequence[Estimate | str]", together: "Sequence[DeviceMemory]") -> None:
    """Print each run's estimate, then the sum by device where several runs stay open.

    `together` is the sum by device, empty for a single run. `found` are the estimates; a text is
    the reason why a run has none.
    """
    for one in found:
        _print_estimate(one)
    if together:
        render.line("together, one after the other, all kept open", style="head")
    for device in together:
        _print_device(device)


def _print_estimate(found: "Estimate | str") -> None:
    """Print one run's tokens, bytes to read and memory by device, or why it has no estimate."""
    if isinstance(found, str):
        render.say(found, style="warn")
        return
    size = render.size_text
    steps = f" and {found.steps} steps" if found.steps else ""
    kept = f", values recorded {size(found.values_bytes)}" if found.values_bytes else ""
    text = f"{found.ran}: {found.tokens} tokens{steps}; reads {size(found.read_bytes)}{kept}"
    render.say(text, style="head")
    for device in found.devices:
        _print_device(device)


def _print_device(found: "DeviceMemory") -> None:
    """Print a device's peak memory, divided into weights, cache and everything else."""
    size = render.size_text
    rest = found.peak_bytes - found.weights_bytes - found.cache_bytes
    free = "" if found.free_bytes is None else f" of {size(found.free_bytes)} free"
    render.line(
        f"  {found.device}: at most {size(found.peak_bytes)}{free}: weights "
        f"{size(found.weights_bytes)}, cache {size(found.cache_bytes)}, the rest {size(rest)}",
        style="" if found.fits else "bad",
    )
