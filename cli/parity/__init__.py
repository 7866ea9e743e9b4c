"""`aprfmt parity`: one model, several runs, point by point; reproductions and calibration."""

from pathlib import Path

import click

from aprfmt.cli import dry_run, options, run_options
from aprfmt.cli.parity import modes
from aprfmt.cli.parity.modes import ParityOptions, ParityOutputs
from aprfmt.errors import UsageError

REPEATS = 5


@click.command("parity", options_metavar="MODEL --between RUN RUN... [OPTIONS]")
@options.gather_options(asked=ParityOptions, wanted=ParityOutputs, tokens=run_options.TokenOptions)
@click.argument("words", nargs=-1, metavar="")
@click.option(
    "--between",
    is_flag=True,
    help="The runs follow: cpu, cuda, torch:cpu:bfloat16, "
    "transformers, llama.cpp. The first is the reference.",
)
@run_options.what
@click.option(
    "--points",
    metavar="NAMES",
    help="Points (L0.q_rope: of a layer), slots or stages (default: all).",
)
@click.option(
    "--through",
    metavar="ENCODING",
    help="Encode and decode the layers' matrices in this encoding first, for every run (NF4).",
)
@click.option(
    "--base",
    metavar="MODEL",
    help="The model before quantization: how far quantization alone goes.",
)
@click.option("--arbiter", is_flag=True, help="Run numpy in float64 too; say which run is nearer.")
@click.option(
    "--thresholds",
    type=options.FILE,
    metavar="FILE",
    help="Calibrated tolerances of an earlier --calibrate.",
)
@click.option(
    "--calibrate",
    type=options.FILE,
    metavar="FILE",
    help="Measure tolerances over repeated runs and write them.",
)
@click.option(
    "--repeats",
    type=options.WholeNumber(2, 1000),
    default=REPEATS,
    show_default=True,
    help="Sequences to calibrate with: the ids, rotated.",
)
@click.option(
    "--bundle",
    type=options.FILE,
    metavar="FILE",
    help="Write a minimal reproduction of the first wrong operation.",
)
@click.option(
    "--replay",
    "replayed",
    type=options.FILE,
    metavar="FILE",
    help="Run a reproduction again, without the model.",
)
@dry_run.option
@click.option("--all", "every", is_flag=True, help="Print every point, not the worst of each kind.")
@options.verbose("The runs, the worst points, operations, losses and checks.")
@options.html("Write a page: evidence, a map of all points for every run.")
@run_options.within
@options.accept()
@options.budget
@options.arch
@options.force
@options.common
def command(
    words: tuple[str, ...],
    between: bool,
    base: str | None,
    calibrate: Path | None,
    repeats: int,
    replayed: Path | None,
    asked: ParityOptions,
    wanted: ParityOutputs,
    tokens: run_options.TokenOptions,
) -> int:
    """Compare runs of one model: every capture point, logits, losses, experts.

    Without --prompt, --ids and --chat the token ids are chosen as `aprfmt diagnose` chooses them,
    and printed. Each run is compared with the first. If a point is beyond its tolerance, the
    operation that makes it runs alone in both, on equal inputs. Exit 1 if a difference is beyond
    rounding, 2 if a run is not possible here.
    """
    if wanted.html is not None and (replayed is not None or calibrate is not None):
        raise UsageError("--html shows runs compared; leave it out with --replay, --calibrate")
    options.check_new(wanted.force, wanted.html, wanted.bundle, calibrate)
    if replayed is not None:
        models, runs = modes.split_arguments(words)
        if models or wanted.bundle or calibrate:
            raise UsageError("--replay needs no model; give only --between RUN RUN with it")
        return modes.replay_bundle(replayed, runs)
    text, runs = modes.model_and_runs(words)
    return modes.run_parity(text, runs, base, calibrate, repeats, asked, wanted, tokens)
