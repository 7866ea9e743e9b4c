"""The ways `aprfmt parity` runs: comparing runs, calibrating, writing or replaying a bundle."""

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aprfmt.base.budget import Budget
from aprfmt.cli import dry_run, output_format, render, run_options
from aprfmt.cli.parity import output
from aprfmt.errors import UsageError

if TYPE_CHECKING:
    from aprfmt.inference.device import DeviceChoice
    from aprfmt.inference.parity.parity_records import Parity
    from aprfmt.inference.parity.request import ParityRequest
    from aprfmt.measure.tolerances import CalibratedBound
    from aprfmt.model import Model


@dataclass(frozen=True)
class ParityOptions(run_options.WithinOptions):
    """What the runs are compared on: points, weights, tolerances, and the options of a run."""

    points: str | None
    through: str | None
    arbiter: bool
    thresholds: Path | None
    budget: Budget | None
    accept: tuple[str, ...]


@dataclass(frozen=True)
class ParityOutputs:
    """What a comparison writes: a bundle, a page, the tables; and whether it is a dry run."""

    bundle: Path | None
    html: Path | None
    every: bool
    verbose: bool
    force: bool
    dry_run: bool


def run_parity(
    text: str,
    runs: list[str],
    base: str | None,
    calibrate: Path | None,
    repeats: int,
    options: ParityOptions,
    wanted: ParityOutputs,
    tokens: run_options.TokenOptions,
) -> int:
    """Compare the runs, or calibrate with them; print the result and return the exit code.

    `text` is the model, `base` the model before quantization, `calibrate` the file to write
    tolerances to, `repeats` the sequences to calibrate with. `options` says what is compared,
    `wanted` what is written of it. Raises UsageError for `base` together with --through.
    """
    from aprfmt.inference.device import parse_run

    if base is not None and options.through is not None:
        raise UsageError("--through has its own base: the model itself; leave --base out")
    choices = [parse_run(run) for run in runs]
    if not wanted.dry_run:
        for choice in choices:
            choice.refuse_missing_gpu()  # before the model is opened and read
    with ExitStack() as stack:
        opened, request = prepare_runs(text, options, tokens, stack)
        request = replace(request, by_position=wanted.html is not None)
        if not tokens.given and (wanted.dry_run or calibrate is not None):
            if output_format.answer_format() != "json":
                render.line(output.chosen_text(request.ids))
        if wanted.dry_run:
            return dry_run.report_parity(opened, choices, request)
        if calibrate is not None:
            return calibrate_tolerances(opened, choices, request, repeats, calibrate, wanted)
        found = compare_runs(opened, choices, request, base, options)
        found = replace(found, accept=options.accept)
        body = found.to_json() | {"ids_chosen": not tokens.given, "bundle": None}
        if wanted.bundle is not None:
            body["bundle"] = write_bundle(wanted.bundle, found, runs, wanted.force)
    return finish_parity(found, body, wanted)


def split_arguments(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return (models, runs) among the words of a command line, each in order."""
    from aprfmt.inference.device import is_run

    runs = [word for word in words if is_run(word)]
    return [word for word in words if word not in runs], runs


def model_and_runs(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return (the one model, its runs); UsageError for more models, or fewer than two runs.

    Next to the model a word that is no file and no address is taken for a misspelt run.
    """
    from aprfmt.remote.paths import is_address

    models, runs = split_arguments(words)
    there = [word for word in models if os.path.exists(word) or is_address(Path(word))]
    for word in models:
        if word not in (there or models[:1]):
            from aprfmt.inference.device import parse_run

            parse_run(word)  # raises UsageError, which lists the backends and engines
    if len(models) != 1:
        found = ", ".join(models) or "none"
        raise UsageError(
            f"expected one MODEL and runs after --between, found the models {found}; "
            "a run begins with a backend, an engine, cpu or cuda"
        )
    if len(runs) < 2:
        raise UsageError(f"{len(runs)} runs; give at least two: --between cpu torch")
    return models[0], runs


def prepare_runs(
    text: str, options: ParityOptions, tokens: run_options.TokenOptions, stack: ExitStack
) -> "tuple[Model, ParityRequest]":
    """Return (the open model, the ParityRequest of what to run on it) for `aprfmt parity`.

    `text` is the model's path; `stack` closes it. `options` has the points, tolerances and options
    of the runs. Token ids are chosen if `tokens` gives none.
    """
    from aprfmt.inference.capture import point_instances, select_keys
    from aprfmt.inference.parity.request import ParityRequest
    from aprfmt.inference.probe_ids import choose_ids
    from aprfmt.model import open_model
    from aprfmt.model.completeness import check_runnable

    rows: Sequence[CalibratedBound] = ()
    if options.thresholds is not None:
        from aprfmt.inference.parity.calibrate import load_calibration

        rows = load_calibration(options.thresholds)
    opened = open_model(text, arch=options.arch, allow_missing=options.allow_missing)
    model = stack.enter_context(opened)
    run_options.warn_of_model(model)
    check_runnable(model.resolution, model.path)
    if tokens.given:
        ids, said = run_options.token_ids(model, tokens)
    else:
        ids, said = list(choose_ids([model.hyper], long=True)), None
    wanted = None
    if options.points is not None:
        known = point_instances(model.spec.block, model.hyper, model.roles)
        names = {key: item.point.name for key, item in known.items()}
        wanted = list(select_keys([*options.points.split(","), "logits"], names))
    return model, ParityRequest(
        tuple(ids),
        text=said,
        wanted=wanted,
        through=options.through,
        arbiter=options.arbiter,
        budget=options.budget,
        threads=options.threads,
        memory=options.memory,
        deterministic=options.deterministic,
        calibrated=rows,
        calibrated_by=None if options.thresholds is None else str(options.thresholds),
    )


def compare_runs(
    model: "Model",
    choices: "list[DeviceChoice]",
    request: "ParityRequest",
    base: str | None,
    options: ParityOptions,
) -> "Parity":
    """Run the model in each way and return the comparison with the first run.

    `base` is the model before quantization, or None. `choices` are the runs, the first of which is
    the reference.
    """
    from aprfmt.inference.parity.run_comparison import compare_choices
    from aprfmt.model import open_model

    render.STATUS.doing(f"running {', '.join(map(str, choices))}")
    if base is None:
        return compare_choices(model, choices, request)
    with open_model(base, arch=options.arch, allow_missing=options.allow_missing) as source:
        return compare_choices(model, choices, request, source)


def finish_parity(found: "Parity", body: dict[str, object], wanted: ParityOutputs) -> int:
    """Write the page if asked, print the comparison, and return the exit code.

    `body` is the JSON of the comparison `found`; `wanted` says what to write.
    """
    if wanted.html is not None:
        from aprfmt.cli.html_page import add_page
        from aprfmt.cli.parity.page import render_page

        add_page(body, wanted.html, wanted.force, lambda: render_page(body))
    chosen, bundle = bool(body["ids_chosen"]), None
    if wanted.bundle is not None:
        none = "no operation to reproduce; wrote none"
        bundle = f"wrote {wanted.bundle}" if body["bundle"] else none

    def show() -> None:
        """Print the comparison's short answer, or its tables with -v or --all."""
        if not (wanted.verbose or wanted.every):
            output.show_answer(found, chosen, bundle)
            return
        if chosen:
            render.line(output.chosen_text(found.ids))
        output.show(found, wanted.every)
        if bundle is not None:
            render.say(bundle)

    return render.emit(
        body, found.exit_code, show, answer=lambda: output.answer(found, chosen, bundle)
    )


def write_bundle(
    path: Path, found: "Parity", runs: list[str], force: bool
) -> dict[str, object] | None:
    """Write the first operation that can be reproduced, and return {path, key, residual, bytes}.

    None where no operation was run alone. `runs` are the runs as asked for. `found` is the
    comparison.
    """
    from aprfmt.inference.parity.bundle import choose_bundle, save_bundle

    made = choose_bundle(found, runs)
    if made is None:
        return None
    save_bundle(path, made, ["aprfmt", *sys.argv[1:]], force=force)
    return {
        "path": str(path),
        "key": made.cell.key,
        "residual": made.residual,
        "bytes": path.stat().st_size,
    }


def replay_bundle(path: Path, runs: list[str]) -> int:
    """Run the operation of a bundle again, print the result; return 1 if it reproduces."""
    from aprfmt.inference.parity.bundle import replay_bundle as run_again

    found = run_again(path, runs)
    code = 1 if found.reproduced else 0
    return render.emit({"replay": found.to_json()}, code, lambda: output.show_replay(found))


def calibrate_tolerances(
    model: "Model",
    choices: "list[DeviceChoice]",
    request: "ParityRequest",
    repeats: int,
    path: Path,
    wanted: ParityOutputs,
) -> int:
    """Measure tolerances and write them to `path`; return 1 where a difference is too large.

    Nothing is written then. `repeats` is the number of sequences: the ids, rotated. `wanted` says
    whether the file may be replaced.
    """
    from aprfmt.inference.parity.calibrate import calibrate_tolerances, save_calibration

    render.STATUS.doing(f"calibrating over {repeats} sequences")
    found = calibrate_tolerances(model, choices, request, repeats)
    body: dict[str, Any] = {"calibration": found.to_json(), "written": None}
    if not found.beyond:
        save_calibration(path, found, force=wanted.force)
        body["written"] = str(path)
    show = partial(output.show_calibration, found, body["written"])
    return render.emit(body, 1 if found.beyond else 0, show)
