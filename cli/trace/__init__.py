"""`aprfmt trace`: activations at named capture points."""

from pathlib import Path

import click

from aprfmt.cli import dry_run, options, run_options
from aprfmt.cli.trace import modes
from aprfmt.cli.trace.dumped_arrays import DumpedArrays
from aprfmt.cli.trace.request import TraceOutputs, TraceRequest


@click.command("trace")
@options.gather_options(
    asked=TraceRequest,
    wanted=TraceOutputs,
    dumped=DumpedArrays,
    tokens=run_options.TokenOptions,
    where=run_options.WhereOptions,
)
@click.argument("model", type=options.MODEL_RUN, required=False)
@click.option("--payload", is_flag=True, help="Run the model; without it, the plan only.")
@run_options.what
@click.option(
    "--points", metavar="NAMES", help="Points (or apr's slots and stages); all for every one."
)
@click.option("--layers", metavar="LIST", help="Layers like 0,3-5 (default: all).")
@click.option("--positions", default="all", show_default=True, help="all, last, or 1,3.")
@click.option(
    "--behind",
    type=options.WholeNumber(0),
    default=0,
    metavar="N",
    help="Fill the cache with the first N tokens; trace the rest after them.",
)
@click.option("--save", "-o", type=options.NamedPath(), help="Save values as .safetensors.")
@click.option(
    "--save-aprt", type=options.NamedPath(file_okay=False), help="Save values as an APRT folder."
)
@click.option(
    "--load",
    "loaded",
    type=options.NamedPath(),
    help="Show a saved trace instead of running: .safetensors, .npz of module outputs, "
    "the text of llama-eval-callback, an APRT folder, a mapping file. MODEL names its "
    "sizes.",
)
@click.option(
    "--map",
    "arrays",
    type=options.NamedPath(),
    metavar="DIR",
    help="Arrays that another engine dumped (.npy, .npz, .safetensors, .pt, raw .bin): "
    "propose which is which point.",
)
@click.option(
    "--mapping",
    type=options.NamedPath(dir_okay=False),
    metavar="FILE",
    help="With --map: use this mapping file as it is.",
)
@click.option(
    "--reference",
    type=options.MODEL_RUN,
    metavar="RUN_OR_TRACE",
    help="Compare with a saved trace of any kind, or MODEL[@RUN].",
)
@click.option(
    "--same-dtype",
    type=options.MODEL_RUN,
    metavar="RUN_OR_TRACE",
    help="With a float32 --reference: the reference in this run's dtype. Each point has "
    "R = |this - reference| / |same dtype - reference|.",
)
@click.option(
    "--exact",
    is_flag=True,
    help="With --reference: exit 1 if any value differs, as when a batch changes a row. With --map "
    "alone: if requests of the dump with the same tokens differ.",
)
@click.option(
    "--engine",
    metavar="NAME",
    help="Run a foreign engine: transformers or llama.cpp (MODEL@NAME is the same).",
)
@click.option(
    "--draft",
    is_flag=True,
    help="Trace the model's draft head (MTP), which reads the model's last rows and the "
    "tokens after them: one row less than tokens, layer 0 is its own.",
)
@click.option(
    "-v", "--verbose", is_flag=True, help="With --reference: every point and its statistics."
)
@options.accept()
@options.html("Write a page: heat map, histograms, sortable table.")
@dry_run.option
@options.budget
@click.option("--list-points", is_flag=True, help="Print the capture points and their meaning.")
@run_options.where
@options.arch
@options.force
@options.common
def command(
    model: str | None,
    loaded: Path | None,
    list_points: bool,
    asked: TraceRequest,
    wanted: TraceOutputs,
    dumped: DumpedArrays,
    tokens: run_options.TokenOptions,
    where: run_options.WhereOptions,
) -> int:
    """Show activations at named capture points.

    Without --payload or --engine nothing runs and the plan is printed. With one, ten points of
    every layer, the logits and their top 5 are shown. Exit 1 if a NaN or an infinity appears (the
    first point is named), or if --reference differs beyond the tolerance. Then the points beyond it
    are shown, and -v shows all.
    """
    return modes.run_trace(model, loaded, list_points, asked, wanted, dumped, tokens, where)
