"""`aprfmt diagnose`: where two models, traces or runs first differ, and why."""

from dataclasses import replace
from pathlib import Path

import click

from aprfmt.cli import diagnose_show, options, render
from aprfmt.cli.diagnose_html import render_page
from aprfmt.cli.html_page import add_page


@click.command("diagnose")
@click.argument("a", type=options.MODEL_RUN)
@click.argument("b", type=options.MODEL_RUN)
@click.option("--model", metavar="MODEL", help="The weights that saved traces ran on.")
@click.option("--ids", metavar="IDS", help="Token ids: 1,2,3 or a .npy file (default: chosen).")
@click.option("--prompt", metavar="TEXT", help="Text instead of ids, tokenized as A does it.")
@click.option(
    "--memory", callback=options.parse_size, metavar="SIZE", help="Budget for decoded weights (2G)."
)
@options.accept()
@options.verbose("Evidence, points, what was checked, every next step.")
@options.html("Write a page: the chain of evidence, a map of all points.")
@options.arch
@options.force
@options.common
def command(
    a: str, b: str, model: str | None, ids: str | None, prompt: str | None, memory: int | None,
    accept: tuple[str, ...], verbose: bool, html: Path | None, arch: str | None, force: bool,
) -> int:  # fmt: skip
    """Find where A and B first differ, and why.

    A and B are models in any format, runs (MODEL@torch:cpu:bfloat16, MODEL@transformers) or saved
    traces. It prints the class with the cause, the place in the file's own names, how sure and how
    large, what was not compared, and the next command; -v has evidence and coverage.

    Exit 0: the same, or precision; 1: a bug, a difference that no probe reached, a derived model
    (fine-tuned, merged), or something that nothing reads on one side only; 2: they cannot be
    compared, or not in all that counts.
    """
    from aprfmt.cli.run_options import parse_ids
    from aprfmt.diagnosis import diagnose

    options.check_new(force, html)
    with render.ProgressLine("diagnose") as progress:
        result = diagnose(
            a, b, model=model, ids=None if ids is None else parse_ids(ids), prompt=prompt,
            arch=arch, memory=memory, progress=progress, notice=progress.say,
        )  # fmt: skip
    result = replace(result, accept=accept)
    body = result.to_json()
    add_page(body, html, force, lambda: render_page(body))
    return render.emit(body, result.exit_code, lambda: diagnose_show.show(result, verbose))
