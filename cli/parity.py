"""`aprfmt parity`: one model, several runs, point by point; reproductions and calibration."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from aprfmt.cli import options, parity_show, render, running

REPEATS = 5


@click.command("parity", options_metavar="MODEL --between RUN RUN... [OPTIONS]")
@click.argument("words", nargs=-1, metavar="")
@click.option("--between", is_flag=True, help="The runs follow: cpu, cuda, torch:cpu:bfloat16, "
              "transformers, llama.cpp. The first is the reference.")  # fmt: skip
@running.what
@click.option("--points", metavar="NAMES", help="Points, slots or stages (default: all).")
@click.option(
    "--through",
    metavar="ENCODING",
    help="Push the layers' matrices through this encoding and back, for every run (NF4).",
)
@click.option("--base", metavar="MODEL",
              help="The model before quantization: how far quantization alone goes.")  # fmt: skip
@click.option("--arbiter", is_flag=True, help="Run numpy in float64 too; say which run is nearer.")
@click.option("--thresholds", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="Calibrated tolerances of an earlier --calibrate.")  # fmt: skip
@click.option("--calibrate", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="Measure tolerances over repeated runs and write them.")  # fmt: skip
@click.option("--repeats", type=click.IntRange(2, 1000), default=REPEATS, show_default=True,
              help="Sequences to calibrate with: the ids, rotated.")  # fmt: skip
@click.option("--bundle", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="Write a minimal reproduction of the first wrong operation.")  # fmt: skip
@click.option("--replay", "replayed", type=click.Path(path_type=Path, dir_okay=False),
              metavar="FILE", help="Run a reproduction again, without the model.")  # fmt: skip
@click.option("--threads", type=click.IntRange(min=1), help="Threads of the arithmetic.")
@click.option("--memory", callback=options.size, metavar="SIZE", help="Budget for weights (2G).")
@click.option("--deterministic", is_flag=True, help="Fixed row blocks and thread count.")
@click.option("--all", "every", is_flag=True, help="Print every point, not the worst of each kind.")
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="Write a page: evidence, a map of all points for every run.")  # fmt: skip
@options.allow_missing
@options.arch
@options.force
@options.common
def command(
    words: tuple[str, ...], between: bool, prompt: str | None, ids: str | None, chat: str | None,
    points: str | None, through: str | None, base: str | None, arbiter: bool,
    thresholds: Path | None, calibrate: Path | None, repeats: int, bundle: Path | None,
    replayed: Path | None, threads: int | None, memory: int | None, deterministic: bool,
    every: bool, html: Path | None, allow_missing: tuple[str, ...], arch: str | None, force: bool,
    as_json: bool, quiet: bool,
) -> int:  # fmt: skip
    """Compare runs of one model: every capture point, logits, losses, experts.

    Without --prompt, --ids and --chat the token ids are chosen as `aprfmt diagnose` chooses them,
    and said. Each run is compared with the first. A point beyond its tolerance is taken apart: the
    operation that makes it runs alone in both, on equal inputs. Exit 1 where a difference is
    beyond rounding, 2 where a run is not possible here.
    """
    from aprfmt.errors import UsageError
    from aprfmt.inference.device import is_run, parse_run

    models = [word for word in words if not is_run(word)]
    runs = [word for word in words if is_run(word)]
    if html is not None and (replayed is not None or calibrate is not None):
        raise UsageError("--html shows runs compared; leave it out beside --replay, --calibrate")
    options.check_new(force, html, bundle, calibrate)
    if replayed is not None:
        if models or bundle or calibrate:
            raise UsageError("--replay needs no model; give only --between RUN RUN with it")
        return replay(replayed, runs, as_json)
    if len(models) != 1:
        named = ", ".join(models) or "none"
        raise UsageError(f"expected one MODEL and runs behind --between, found the models {named}; "
                         "a run begins with a backend, an engine, cpu or cuda")  # fmt: skip
    if len(runs) < 2:
        raise UsageError(f"{len(runs)} runs; give at least two: --between cpu torch")
    if base is not None and through is not None:
        raise UsageError("--through has its own base: the model itself; leave --base out")
    choices = [parse_run(run) for run in runs]
    with ExitStack() as stack:
        opened, request = prepare(
            models[0], arch, prompt, ids, chat, points, stack, allow_missing=allow_missing,
            through=through, arbiter=arbiter, calibrated=thresholds, threads=threads,
            memory=memory, deterministic=deterministic,
        )  # fmt: skip
        chosen = prompt is None and ids is None and chat is None
        if chosen and not as_json:
            parity_show.show_chosen(request.ids)
        if calibrate is not None:
            return measure(opened, choices, request, repeats, calibrate, force, as_json)
        from aprfmt.inference.parity.between import parity
        from aprfmt.model import open_model

        source = None
        if base is not None:
            source = stack.enter_context(open_model(base, arch=arch, allow_missing=allow_missing))
        found = parity(opened, choices, request, source)
        body = found.to_json() | {"ids_chosen": chosen, "bundle": None}
        if bundle is not None:
            body["bundle"] = write_bundle(bundle, found, runs, force)
    if html is not None:
        from aprfmt.cli.html import write_page
        from aprfmt.cli.parity_html import render_page

        write_page(html, render_page(body), force)
        body["html"] = str(html)
    if not as_json:
        parity_show.show(found, every)
        if bundle is not None:
            said = f"wrote {bundle}" if body["bundle"] else "no operation to reproduce; wrote none"
            render.line(render.escape(said))
    return render.emit("parity", found.exit_code, body, as_json)


def prepare(
    text: str, arch: str | None, prompt: str | None, ids: str | None, chat: str | None,
    points: str | None, stack: ExitStack, *, allow_missing: tuple[str, ...],
    calibrated: Path | None, **rest: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """Open the model; return it and what to run on it, its ids chosen where none are named."""
    from aprfmt.diagnosis.prompt import chosen_ids
    from aprfmt.inference.capture import instances, select_points
    from aprfmt.inference.parity.calibrate import load_calibration
    from aprfmt.inference.parity.request import Request
    from aprfmt.model import open_model
    from aprfmt.model.completeness import refuse_to_run

    rows = () if calibrated is None else load_calibration(calibrated)
    model = stack.enter_context(open_model(text, arch=arch, allow_missing=allow_missing))
    running.warn_of(model)
    refuse_to_run(model.resolution, model.path)
    said: str | None = None
    if prompt is None and ids is None and chat is None:
        tokens = list(chosen_ids([model.hyper], long=True))
    else:
        tokens, said = running.token_ids(model, prompt, ids, chat)
    wanted = None
    if points is not None:
        names = set(select_points(points.split(","))) | {"logits"}
        known = instances(model.spec.block, model.hyper, model.roles)
        wanted = [key for key, item in known.items() if item.point.name in names]
    return model, Request(
        tuple(tokens), said, wanted, calibrated=rows,
        calibrated_by=None if calibrated is None else str(calibrated), **rest,
    )  # fmt: skip


def write_bundle(path: Path, found: Any, runs: list[str], force: bool) -> dict[str, Any] | None:
    """Write the first reproduction there is; None where no operation was taken apart."""
    import sys

    from aprfmt.inference.parity.bundle import save_bundle
    from aprfmt.inference.parity.reproduce import bundle_of

    made = bundle_of(found, runs)
    if made is None:
        return None
    save_bundle(path, made, ["aprfmt", *sys.argv[1:]], force=force)
    return {"path": str(path), "key": made.cell.key, "residual": made.residual,
            "bytes": path.stat().st_size}  # fmt: skip


def replay(path: Path, runs: list[str], as_json: bool) -> int:
    """Run a reproduction again; exit 1 where it still reproduces."""
    from aprfmt.inference.parity.bundle import replay as run_again

    found = run_again(path, runs)
    if not as_json:
        parity_show.show_replay(found)
    body = {"replay": found.to_json()}
    return render.emit("parity", 1 if found.reproduced else 0, body, as_json)


def measure(
    model: Any, choices: Any, request: Any, repeats: int, path: Path, force: bool, as_json: bool
) -> int:
    """Calibrate; exit 1, nothing written, where a point is beyond what a tolerance may excuse."""
    from aprfmt.inference.parity.calibrate import calibrate, save_calibration

    found = calibrate(model, choices, request, repeats)
    body: dict[str, Any] = {"calibration": found.to_json(), "written": None}
    if not found.beyond:
        save_calibration(path, found, force=force)
        body["written"] = str(path)
    if not as_json:
        parity_show.show_calibration(found, body["written"])
    return render.emit("parity", 1 if found.beyond else 0, body, as_json)
