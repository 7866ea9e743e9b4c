"""`aprfmt trace`: activations at named capture points."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from aprfmt.cli import options, render, running


@click.command("trace")
@click.argument("model", required=False)
@click.option("--payload", is_flag=True, help="Run the model; without it, the plan only.")
@running.what
@click.option("--points", metavar="NAMES", help="Points, slots or stages; all for every one.")
@click.option("--layers", metavar="LIST", help="Layers like 0,3-5 (default: all).")
@click.option("--positions", default="all", show_default=True, help="all, last, or 1,3.")
@click.option(
    "--behind",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Fill the cache with the first N tokens; trace the rest behind it.",
)
@click.option("--save", type=click.Path(path_type=Path), help="Save values as .safetensors.")
@click.option("--save-aprt", type=click.Path(path_type=Path, file_okay=False),
              help="Save values as an APRT folder.")  # fmt: skip
@click.option(
    "--load",
    "loaded",
    type=click.Path(path_type=Path),
    help="Show a saved trace instead of running: .safetensors, .npz of module outputs, "
    "the text of llama-eval-callback, an APRT folder. MODEL names its sizes.",
)
@click.option("--reference", metavar="RUN_OR_TRACE",
              help="Compare with a saved trace of any kind, or MODEL[@RUN].")  # fmt: skip
@click.option(
    "--engine",
    metavar="NAME",
    help="Run a foreign engine: transformers or llama.cpp (MODEL@NAME is the same).",
)
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="Write a page: heat map, histograms, sortable table.")  # fmt: skip
@click.option("--list-points", is_flag=True, help="Print the capture points and their meaning.")
@running.where
@options.arch
@options.force
@options.common
def command(
    model: str | None,
    payload: bool,
    prompt: str | None,
    ids: str | None,
    chat: str | None,
    points: str | None,
    layers: str | None,
    positions: str,
    behind: int,
    save: Path | None,
    save_aprt: Path | None,
    loaded: Path | None,
    reference: str | None,
    engine: str | None,
    html: Path | None,
    list_points: bool,
    as_json: bool,
    quiet: bool,
    force: bool,
    arch: str | None,
    **where: Any,
) -> int:
    """Show activations at named capture points.

    Without --payload or --engine nothing runs and the plan is printed. With one, the ten slots of
    every layer, the logits and their top 5. Exit 1 when a NaN or an infinity appears (the first
    point is named), or when --reference differs beyond the tolerance.
    """
    from dataclasses import replace

    from aprfmt.cli import trace_html, trace_run, trace_show
    from aprfmt.errors import UsageError
    from aprfmt.inference.engines.opening import weights_of
    from aprfmt.inference.identity import identity
    from aprfmt.inference.trace import parse_positions

    if loaded is not None:
        runs = {
            "--payload": payload, "--engine": engine, "--prompt": prompt, "--chat": chat,
            "--positions": positions != "all", "--behind": behind, "--list-points": list_points,
            "--arch": arch, 
            **{f"--{name.replace('_', '-')}": value for name, value in where.items()},
        }  # fmt: skip
        unused = [name for name, value in runs.items() if value]
        if unused:
            raise UsageError(f"--load shows a saved trace; leave {', '.join(unused)} out")
        given = None if ids is None else running.parse_ids(ids)
        chosen = points, layers
        return show_saved(
            loaded, model, given, save, save_aprt, reference, html, force, as_json, chosen
        )
    model = model if model is not None else only_model()
    if list_points or not (payload or engine):  # naming an engine asks for a run
        asked = {"--save": save, "--save-aprt": save_aprt, "--reference": reference, "--html": html}
        needs = [name for name, value in asked.items() if value]
        if needs and not list_points:
            raise UsageError(f"{', '.join(needs)}: needs --payload, which runs the model")
        body = plan(model, arch, points, layers, where["allow_missing"])
        if not as_json:
            trace_show.show_plan(body, details=list_points)
        return render.emit("trace", 0, body, as_json)
    options.check_new(force, save, save_aprt, html)
    wanted_positions = parse_positions(positions)
    histograms = trace_html.Histograms()
    with ExitStack() as stack:
        opened, choice, session = trace_run.open_runner(model, arch, engine, stack, **where)
        tokens, text = running.token_ids(opened, prompt, ids, chat)
        running.warn_of_length(opened, tokens)
        known = trace_run.running_points(opened, session)
        keys = wanted_keys(known, points, layers, save_aprt is not None)
        facts = {"prompt": text, "model": str(opened.path), "weights": weights_of(opened)}
        values = bool(save or save_aprt or reference)
        watch = histograms.add if html is not None else None
        other = None
        if reference is not None:
            other = trace_run.check_reference(reference, tokens, opened, stack)
        if session is None:
            if behind:
                raise UsageError(f"{choice}: --behind needs a backend; an engine runs one pass")
            trace = trace_run.run_engine(
                opened, tokens, keys, wanted_positions, choice, stack, facts, watch, where
            )
            body = trace_show.body(trace)
            body["run"] = trace_run.engine_facts(opened, choice, trace)
        else:
            trace = trace_run.run(
                session, tokens, keys, wanted_positions, stack, facts, values, watch, behind
            )
            body = trace_show.body(trace) | {"run": running.run_facts(opened, choice, session)}
        body["tokens"] = {"ids": tokens, "text": text}
        if "logits" in body and body["logits"] is not None:
            trace_show.name_tokens(body["logits"], opened)
        code, difference = 1 if trace.nonfinite else 0, None
        if save or save_aprt:
            trace = replace(trace, run={**trace.run, **identity(opened, tokens)})
            body["trace"] = dict(trace.run)
        body["saved"] = write(trace, save, save_aprt, force)
        if not as_json:
            trace_show.show(trace, body)
        if reference is not None:
            difference = trace_run.compare(
                trace, other, reference, tokens, keys, wanted_positions, stack, opened, behind,
                where,
            )  # fmt: skip
            body["reference"] = {"against": reference, **difference.to_json()}
            code = code or difference.exit_code
            if not as_json:
                trace_show.show_difference(difference, reference)
        if html is not None:
            write_html(html, trace, body, histograms, difference, force)
            body["html"] = str(html)
    return render.emit("trace", code, body, as_json)


def show_saved(
    path: Path, text: str | None, ids: list[int] | None, save: Path | None,
    save_aprt: Path | None, reference: str | None, html: Path | None, force: bool, as_json: bool,
    chosen: tuple[str | None, str | None] = (None, None),
) -> int:  # fmt: skip
    """Show a saved trace, beside another saved one if `reference` names it.

    `text` is the model it was made from: with it foreign files are read completely. Saving one
    again makes ours of a foreign one.
    """
    from aprfmt.cli import trace_html, trace_run, trace_show
    from aprfmt.compare.traces import compare_traces
    from aprfmt.inference.engines.opening import open_trace
    from aprfmt.model import open_model

    with ExitStack() as stack:
        model = None if text is None else stack.enter_context(open_model(text))
        trace = part(stack.enter_context(open_trace(path, ids, model)), *chosen)
        body = trace_show.body(trace)
        unknown = dict(trace.run.get("unknown") or {})
        for name, why in list(unknown.items())[:8]:
            render.warn(f"{path}: {name}: {why}")
        other = None
        if reference is not None:
            tokens = trace.run.get("ids") or ids
            other = trace_run.check_reference(reference, tokens, model, stack, runs=False)
        code, difference = 1 if trace.nonfinite else 0, None
        body["saved"] = write(trace, save, save_aprt, force)
        if not as_json:
            trace_show.show(trace, body)
        if reference is not None and other is not None:
            difference = compare_traces(trace, other)
            body["reference"] = {"against": reference, **difference.to_json()}
            code = code or difference.exit_code
            if not as_json:
                trace_show.show_difference(difference, reference)
        if html is not None:
            histograms = trace_html.Histograms()
            for key in trace.records:
                values, mask = trace.values(key), trace.mask(key)
                if values is not None:
                    histograms.add(key, values if mask is None else values[mask])
            write_html(html, trace, body, histograms, difference, force)
            body["html"] = str(html)
    return render.emit("trace", code, body, as_json)


def write_html(
    path: Path, trace: Any, body: dict[str, Any], histograms: Any, difference: Any, force: bool
) -> None:
    """Publish the page of a trace."""
    from aprfmt.cli.html import write_page
    from aprfmt.cli.trace_html import render_page

    write_page(path, render_page(trace, body, histograms, difference), force)


def only_model() -> str:
    """Return the one model of the current folder, named on stderr; UsageError lists several."""
    from aprfmt.errors import UsageError
    from aprfmt.model.hf_folder import candidates

    found = candidates(Path.cwd())
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "no model here"
        raise UsageError(f"trace: name a MODEL; the current folder has {names}")
    click.echo(f"using {render.escape(found[0].name)}", err=True)
    return found[0].name


def parse_layers(text: str | None, count: int) -> set[int]:
    """Return the layers of `0,3-5`; UsageError for others than the model has."""
    import re

    from aprfmt.errors import UsageError

    if text is None:
        return set(range(count))
    chosen: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part.strip())
        if match is None:
            raise UsageError(f"--layers {text!r}: {part!r} is no layer; expected for example 0,3-5")
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < count:
            raise UsageError(f"--layers {text!r}: the model has layers 0 to {count - 1}")
        chosen |= set(range(first, last + 1))
    return chosen


def part(trace: Any, points: str | None, layers: str | None) -> Any:
    """Return a trace with the records of these points and layers only; UsageError for none."""
    from dataclasses import replace

    from aprfmt.errors import UsageError
    from aprfmt.inference.capture import POINTS, SLOTS, WHOLE, select_points

    if points is None and layers is None:
        return trace
    names = set(POINTS if points is None else select_points(points.split(",")))
    layered = parse_layers(
        layers, 1 + max((record.layer for record in trace.records.values()), default=0)
    )
    records = {
        key: record for key, record in trace.records.items()
        if names.issuperset(SLOTS.get(record.point, (record.point,)))  # a joined slot has its parts
        and (record.layer == WHOLE or record.layer in layered)
    }  # fmt: skip
    if not records:
        raise UsageError("--points, --layers: the trace holds none of these")
    aliases = {key: target for key, target in trace.aliases.items() if target in records}
    return replace(trace, records=records, aliases=aliases)


def wanted_keys(known: Any, points: str | None, layers: str | None, aprt: bool) -> list[str]:
    """Return the keys to record, in execution order."""
    from aprfmt.inference.capture import SLOTS, STAGES, WHOLE, select_points

    if points is not None:
        names = set(select_points(points.split(",")))
    else:
        names = {name for parts in SLOTS.values() for name in parts}
        names |= {"embd", "final_norm", "logits"}
    if aprt:
        names |= {name for parts in STAGES.values() for name in parts}
    count = 1 + max((item.layer for item in known.values()), default=0)
    chosen = parse_layers(layers, count)
    return [
        key for key, item in known.items()
        if item.point.name in names and (item.layer == WHOLE or item.layer in chosen)
    ]  # fmt: skip


def write(trace: Any, save: Path | None, save_aprt: Path | None, force: bool) -> list[str]:
    """Save a trace where asked; return what was written."""
    from aprfmt.inference.aprt import save_aprt as write_aprt
    from aprfmt.inference.trace_file import save_trace

    written: list[str] = []
    if save is not None:
        save_trace(save, trace, force=force)
        written.append(str(save))
    if save_aprt is not None:
        written += [str(path) for path in write_aprt(save_aprt, trace, force=force)]
    return written


def plan(
    text: str, arch: str | None, points: str | None, layers: str | None, allowed: tuple[str, ...]
) -> dict[str, Any]:
    """Return the points of a model without running it: no statistics are made up."""
    from aprfmt.inference.capture import instances
    from aprfmt.inference.engines.opening import model_and_run
    from aprfmt.model import open_model
    from aprfmt.model.completeness import refuse_to_run

    path, _ = model_and_run(text)
    with open_model(path, arch=arch, allow_missing=allowed) as opened:
        refuse_to_run(opened.resolution, opened.path)
        known = instances(opened.spec.block, opened.hyper, opened.roles)
        keys = set(wanted_keys(known, points or "all", layers, False))
        rows = [
            {
                "key": key, "point": item.point.name,
                "layer": None if item.layer < 0 else item.layer,
                "alias_of": item.alias_of or None, "absent": item.absent,
                "shape": item.point.shape, "says": item.point.sentence,
                "llama_cpp": ", ".join(map(str, item.point.llama_cpp)), "apr": item.point.apr,
                "hf": ", ".join(map(str, item.point.hf)),
            }
            for key, item in known.items() if key in keys
        ]  # fmt: skip
        return {
            "model": str(opened.path), "architecture": opened.spec.name,
            "stats_source": "metadata-only", "points": rows,
        }  # fmt: skip
