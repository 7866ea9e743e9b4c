"""`aprfmt cat`: the values of one tensor."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aprfmt.cli import complete, options, render
from aprfmt.cli.damage import told
from aprfmt.errors import UsageError

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array
    from aprfmt.model import Model


@click.command("cat")
@options.model()
@click.argument("name", shell_complete=complete.tensors)
@click.option("--slice", "region", metavar="A:B,C", help="A NumPy-style slice, e.g. 0:4,:8.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write a .npy file instead.")
@click.option("--limit", type=click.IntRange(min=1), default=64, show_default=True,
              help="Print at most this many values.")  # fmt: skip
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
    as_json: bool,
    quiet: bool,
) -> int:
    """Print the values of one tensor, by name or role; -o x.npy writes them all."""
    from aprfmt.model import open_model

    with open_model(model, arch=arch, damaged=True) as opened:
        found, values = read(opened, name)
        if region is not None:
            values = values[parse_slice(region, values.shape)]
        body: dict[str, Any] = {
            "model": str(opened.path),
            "name": found,
            "shape": list(values.shape),
            "dtype": values.dtype.name,
        }
        if output is not None:
            write_npy(output, values, force)
            body["output"] = str(output)
        else:
            flat = values.reshape(-1)[:limit]
            body["values"] = flat.tolist()
            body["shown"] = int(flat.size)
            body["count"] = int(values.size)
        body["damage"], code = told(opened.damage)
    if not as_json:
        show(body)
    return render.emit("cat", code, body, as_json)


def read(opened: "Model", name: str) -> "tuple[str, Array]":
    """Return (spelling, values) of one tensor: a stored name, a role, or an unambiguous pattern."""
    from aprfmt.model.patterns import select_one
    from aprfmt.model.resolve import spellings_by_name

    if name in opened:
        return name, opened[name].numpy()
    role = opened.find(name)
    if role is not None:
        return name, role.numpy()
    names = list(opened)
    every = spellings_by_name(opened)
    at = select_one([every[stored] for stored in names], name, str(opened.path))
    return names[at], opened[names[at]].numpy()


def parse_slice(text: str, shape: tuple[int, ...]) -> tuple[int | slice, ...]:
    """Return a NumPy index for `0:4,:8`; UsageError where it does not fit the shape."""
    index: list[int | slice] = []
    for axis, part in enumerate(text.split(",")):
        fields = part.strip().split(":")
        try:
            numbers = [int(field) if field.strip() else None for field in fields]
        except ValueError:
            raise UsageError(f"--slice {text!r}: {part!r} is no number or range") from None
        if axis >= len(shape) or len(numbers) > 3:
            raise UsageError(f"--slice {text!r}: does not fit shape {list(shape)}")
        if len(numbers) == 1:
            at = numbers[0]
            if at is None or not -shape[axis] <= at < shape[axis]:
                raise UsageError(f"--slice {text!r}: {part!r} is outside axis of {shape[axis]}")
            index.append(at)
        else:
            if numbers[2:] == [0]:
                raise UsageError(f"--slice {text!r}: a step of 0")
            index.append(slice(*numbers))
    return tuple(index)


def write_npy(path: Path, values: "Array", force: bool) -> None:
    """Publish an array as .npy."""
    import io

    import numpy as np

    from aprfmt.formats.atomic import FileSet

    buffer = io.BytesIO()
    np.save(buffer, values, allow_pickle=False)
    with FileSet(force=force) as files:
        files.create(path).write(buffer.getbuffer())


def show(body: dict[str, Any]) -> None:
    """Print the values for people."""
    text = f"{render.escape(body['name'])} {render.shape_text(body['shape'])} {body['dtype']}"
    if "output" in body:
        render.line(f"{text} -> {render.escape(body['output'])}")
        return
    render.line(text, style="head")
    for start in range(0, len(body["values"]), 8):
        render.line(
            " ".join(
                f"{v:>13.7g}" if isinstance(v, float) else f"{v!s:>13}"
                for v in body["values"][start : start + 8]
            )
        )
    if body["shown"] < body["count"]:
        render.line(f"... {body['count'] - body['shown']} more (--limit, --slice)", style="dim")
