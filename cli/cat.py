"""`aprfmt cat`: the values of one tensor."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from aprfmt.cli import options, render, shell_completion
from aprfmt.cli.damage_report import report_damage

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array


@click.command("cat")
@options.model()
@click.argument("name", shell_complete=shell_completion.complete_tensors)
@click.option("--slice", "region", metavar="A:B,C", help="A NumPy-style slice, e.g. 0:4,:8.")
@click.option("-o", "--output", type=options.NamedPath(), help="Write a .npy file instead.")
@click.option(
    "--limit",
    type=options.WholeNumber(1),
    default=64,
    show_default=True,
    help="Print at most this many values.",
)
@options.force
@options.arch
@options.common
def command(
    model: Path,
    name: str,
    region: str | None,
    output: Path | None,
    limit: int,
    force: bool,
    arch: str | None,
) -> int:
    """Print the values of one tensor, by name or role; -o x.npy writes them all."""
    from aprfmt.base.shapes import parse_slice
    from aprfmt.formats.npy import write_npy
    from aprfmt.model import open_model
    from aprfmt.model.resolve import find_one_tensor

    with open_model(model, arch=arch, damaged=True) as opened:
        found, tensor = find_one_tensor(opened, name)
        values = tensor.numpy()
        if region is not None:
            values = values[parse_slice(region, values.shape)]
        body: dict[str, object] = {
            "model": str(opened.path), "name": found, "shape": list(values.shape),
            "dtype": values.dtype.name,
        }  # fmt: skip
        flat = values.reshape(-1)[:limit]
        if output is not None:
            write_npy(output, values, force)
            body["output"] = str(output)
        else:
            body |= {"values": flat.tolist(), "shown": int(flat.size), "count": int(values.size)}
        body["damage"], code = report_damage(opened.damage)
    return render.emit(body, code, lambda: show(found, values, flat, output))


def show(name: str, values: "Array", first: "Array", output: Path | None) -> None:
    """Print `first`, the flat values to be shown, or the file that all values were written to.

    `values` is the whole tensor, for its shape, dtype and count. `name` is the tensor.
    """
    text = f"{render.escape(name)} {render.shape_text(values.shape)} {values.dtype.name}"
    if output is not None:
        render.line(f"{text} -> {render.escape(str(output))}")
        return
    render.line(text, style="head")
    cells = [f"{v:>13.7g}" if isinstance(v, float) else f"{v!s:>13}" for v in first.tolist()]
    for start in range(0, len(cells), 8):
        render.line(" ".join(cells[start : start + 8]))
    if first.size < values.size:
        render.line(f"... {values.size - first.size} more (--limit, --slice)", style="dim")
