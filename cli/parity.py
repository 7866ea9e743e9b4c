"""`aprfmt parity`: one model, several runs, point by point; reproductions and calibration."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import click

from aprfmt.cli import options, parity_run, parity_show, running
from aprfmt.cli.parity_run import Asked, Wanted
from aprfmt.errors import UsageError

REPEATS = 5


@click.command("parity", options_metavar="MODEL --between RUN RUN... [OPTIONS]")
@options.gathered(asked=Asked, wanted=Wanted, tokens=running.Tokens)
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
@click.option("--thresholds", type=options.FILE, metavar="FILE",
              help="Calibrated tolerances of an earlier --calibrate.")  # fmt: skip
@click.option("--calibrate", type=options.FILE, metavar="FILE",
              help="Measure tolerances over repeated runs and write them.")  # fmt: skip
@click.option("--repeats", type=click.IntRange(2, 1000), default=REPEATS, show_default=True,
              help="Sequences to calibrate with: the ids, rotated.")  # fmt: skip
@click.option("--bundle", type=options.FILE, metavar="FILE",
              help="Write a minimal reproduction of the first wrong operation.")  # fmt: skip
@click.option("--replay", "replayed", type=options.FILE,
              metavar="FILE", help="Run a reproduction again, without the model.")  # fmt: skip
@click.option("--threads", type=click.IntRange(min=1), help="Threads of the arithmetic.")
@click.option("--memory", callback=options.size, metavar="SIZE", help="Budget for weights (2G).")
@click.option("--deterministic", is_flag=True, help="Fixed row blocks and thread count.")
@click.option("--all", "every", is_flag=True, help="Print every point, not the worst of each kind.")
@options.html("Write a page: evidence, a map of all points for every run.")
@options.allow_missing
@options.arch
@options.force
@options.common
def command(
    words: tuple[str, ...], between: bool, base: str | None, calibrate: Path | None, repeats: int,
    replayed: Path | None, quiet: bool, asked: Asked, wanted: Wanted, tokens: running.Tokens,
) -> int:  # fmt: skip
    """Compare runs of one model: every capture point, logits, losses, experts.

    Without --prompt, --ids and --chat the token ids are chosen as `aprfmt diagnose` chooses them,
    and said. Each run is compared with the first. A point beyond its tolerance is taken apart: the
    operation that makes it runs alone in both, on equal inputs. Exit 1 where a difference is
    beyond rounding, 2 where a run is not possible here.
    """
    from aprfmt.inference.device import parse_run

    if wanted.html is not None and (replayed is not None or calibrate is not None):
        raise UsageError("--html shows runs compared; leave it out beside --replay, --calibrate")
    options.check_new(wanted.force, wanted.html, wanted.bundle, calibrate)
    if replayed is not None:
        models, runs = named(words)
        if models or wanted.bundle or calibrate:
            raise UsageError("--replay needs no model; give only --between RUN RUN with it")
        return parity_run.replay(replayed, runs, wanted.as_json)
    text, runs = model_and_runs(words)
    if base is not None and asked.through is not None:
        raise UsageError("--through has its own base: the model itself; leave --base out")
    choices = [parse_run(run) for run in runs]
    with ExitStack() as stack:
        opened, request = parity_run.prepare(text, asked, tokens, stack)
        request = replace(request, by_position=wanted.html is not None)
        if not tokens.given and not wanted.as_json:
            parity_show.show_chosen(request.ids)
        if calibrate is not None:
            return parity_run.measure(opened, choices, request, repeats, calibrate, wanted)
        found = parity_run.compared(opened, choices, request, base, asked)
        body = found.to_json() | {"ids_chosen": not tokens.given, "bundle": None}
        if wanted.bundle is not None:
            body["bundle"] = parity_run.write_bundle(wanted.bundle, found, runs, wanted.force)
    return parity_run.finish(found, body, wanted)


def named(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the models and the runs among the words of a command line."""
    from aprfmt.inference.device import is_run

    runs = [word for word in words if is_run(word)]
    return [word for word in words if word not in runs], runs


def model_and_runs(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the one model and its runs; UsageError for more, or for fewer than two runs."""
    models, runs = named(words)
    if len(models) != 1:
        found = ", ".join(models) or "none"
        raise UsageError(f"expected one MODEL and runs behind --between, found the models {found}; "
                         "a run begins with a backend, an engine, cpu or cuda")  # fmt: skip
    if len(runs) < 2:
        raise UsageError(f"{len(runs)} runs; give at least two: --between cpu torch")
    return models[0], runs
