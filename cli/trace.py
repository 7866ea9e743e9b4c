"""`aprfmt trace`: activations at named capture points."""

from dataclasses import fields
from pathlib import Path

import click

from aprfmt.cli import options, render, running, trace_ways
from aprfmt.cli.trace_map import Dumped
from aprfmt.cli.trace_ways import Asked, Wanted
from aprfmt.errors import UsageError


@click.command("trace")
@options.gathered(asked=Asked, wanted=Wanted, dumped=Dumped, tokens=running.Tokens,
                  where=running.Where)  # fmt: skip
@click.argument("model", required=False)
@click.option("--payload", is_flag=True, help="Run the model; without it, the plan only.")
@running.what
@click.option(
    "--points", metavar="NAMES", help="Points (or apr's slots and stages); all for every one."
)
@click.option("--layers", metavar="LIST", help="Layers like 0,3-5 (default: all).")
@click.option("--positions", default="all", show_default=True, help="all, last, or 1,3.")
@click.option(
    "--behind",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Fill the cache with the first N tokens; trace the rest behind it.",
)
@click.option("--save", "-o", type=click.Path(path_type=Path), help="Save values as .safetensors.")
@click.option("--save-aprt", type=click.Path(path_type=Path, file_okay=False),
              help="Save values as an APRT folder.")  # fmt: skip
@click.option(
    "--load",
    "loaded",
    type=click.Path(path_type=Path),
    help="Show a saved trace instead of running: .safetensors, .npz of module outputs, "
    "the text of llama-eval-callback, an APRT folder, a mapping file. MODEL names its sizes.",
)
@click.option("--map", "arrays", type=click.Path(path_type=Path), metavar="DIR",
              help="Arrays that another engine dumped (.npy, .npz, .safetensors, raw .bin): "
              "propose which is which point.")  # fmt: skip
@click.option("--mapping", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="With --map: use this mapping file as it is.")  # fmt: skip
@click.option("--reference", metavar="RUN_OR_TRACE",
              help="Compare with a saved trace of any kind, or MODEL[@RUN].")  # fmt: skip
@click.option(
    "--engine",
    metavar="NAME",
    help="Run a foreign engine: transformers or llama.cpp (MODEL@NAME is the same).",
)
@click.option("-v", "--verbose", is_flag=True,
              help="With --reference: every point and its statistics.")  # fmt: skip
@options.html("Write a page: heat map, histograms, sortable table.")
@click.option("--list-points", is_flag=True, help="Print the capture points and their meaning.")
@running.where
@options.arch
@options.force
@options.common
def command(
    model: str | None, loaded: Path | None, list_points: bool, quiet: bool,
    asked: Asked, wanted: Wanted, dumped: Dumped, tokens: running.Tokens, where: running.Where,
) -> int:  # fmt: skip
    """Show activations at named capture points.

    Without --payload or --engine nothing runs and the plan is printed. With one, ten places of
    every layer, the logits and their top 5. Exit 1 when a NaN or an infinity appears (the first
    point is named), or when --reference differs beyond the tolerance: the points that do, and a
    summary, are shown then, and -v shows all.
    """
    if dumped.mapping is not None and dumped.arrays is None:
        raise UsageError("--mapping goes with --map DIR; a mapping file alone is opened by --load")
    if dumped.arrays is not None:
        if loaded is not None or asked.payload or asked.engine or list_points:
            raise UsageError("--map reads dumped arrays; leave --load, --payload, --engine and "
                             "--list-points out")  # fmt: skip
        options.check_new(wanted.force, wanted.save, wanted.save_aprt, wanted.html)
        named = model if model is not None else only_model()
        return trace_ways.show_mapped(named, dumped, tokens, where, wanted, asked)
    if loaded is not None:
        unused = not_for_load(asked, tokens, where, list_points)
        if unused:
            raise UsageError(f"--load shows a saved trace; leave {', '.join(unused)} out")
        given = None if tokens.ids is None else running.parse_ids(tokens.ids)
        return trace_ways.show_saved(loaded, model, given, asked, wanted)
    model = model if model is not None else only_model()
    if list_points or not (asked.payload or asked.engine):  # naming an engine asks for a run
        return trace_ways.show_points(model, list_points, asked, wanted, where)
    options.check_new(wanted.force, wanted.save, wanted.save_aprt, wanted.html)
    return trace_ways.show_run(model, asked, wanted, tokens, where)


def not_for_load(
    asked: Asked, tokens: running.Tokens, where: running.Where, list_points: bool
) -> list[str]:
    """Return the options that were given and that a saved trace has no use for."""
    runs = {
        "--payload": asked.payload, "--engine": asked.engine, "--prompt": tokens.prompt,
        "--chat": tokens.chat, "--positions": asked.positions != "all", "--behind": asked.behind,
        "--list-points": list_points, "--arch": where.arch,
        **{f"--{field.name.replace('_', '-')}": getattr(where, field.name)
           for field in fields(where)},
    }  # fmt: skip
    return [name for name, value in runs.items() if value]


def only_model() -> str:
    """Return the one model of the current folder, named on stderr; UsageError lists several."""
    from aprfmt.model.hf_folder import candidates

    found = candidates(Path.cwd())
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "no model here"
        raise UsageError(f"trace: name a MODEL; the current folder has {names}")
    click.echo(f"using {render.escape(found[0].name)}", err=True)
    return found[0].name
