"""`aprfmt tensors`: every tensor of a file, one line each."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aprfmt.cli import options, render
from aprfmt.cli.damage import told
from aprfmt.errors import AprfmtError

if TYPE_CHECKING:
    from aprfmt.tensors.view import View


@click.command("tensors")
@options.model()
@options.patterns
@click.option("--stats", is_flag=True, help="Decode and add mean, std, min, max, zeros, NaN, Inf.")
@click.option("--limit", type=click.IntRange(min=1), help="Show at most this many.")
@click.option("--partial", is_flag=True, help="A cut file, or a missing one of a set, is no error.")
@options.arch
@options.common
def command(
    model: Path,
    patterns: tuple[str, ...],
    stats: bool,
    limit: int | None,
    partial: bool,
    arch: str | None,
    as_json: bool,
    quiet: bool,
) -> int:
    """List tensors: name, role, shape, encoding, bytes, offset.

    PATTERN is whole dot-components from the left (blk.3.ffn_gate) or, where none match there,
    anywhere (ffn_gate); or a glob, or re:...; in any spelling, or by role.
    """
    from aprfmt.model import open_model
    from aprfmt.model.patterns import select
    from aprfmt.model.resolve import spellings_by_name

    with open_model(model, arch=arch, partial=partial, damaged=True) as opened:
        roles = opened.roles_of
        names = list(opened)
        if patterns:
            every = spellings_by_name(opened)
            names = [names[i] for i in select(list(every.values()), patterns, str(opened.path))]
        total = len(names)
        rows: list[dict[str, Any]] = []
        with render.Progress("tensors", quiet) as progress:
            for i, name in enumerate(names[:limit]):
                rows.append(listed(name, opened[name], roles.get(name, ()), stats))
                progress(i + 1, len(names[:limit]))
        for note in opened.notes:
            if note.level == "warning" or note.key == "remark":
                render.warn_note(note)
        damage, code = told(opened.damage, partial=partial)
        body = {"model": str(opened.path), "count": total, "tensors": rows, "damage": damage}
    if not as_json:
        show(rows, total, stats)
    return render.emit("tensors", code, body, as_json)


def listed(name: str, tensor: "View", roles: tuple[str, ...], stats: bool) -> dict[str, Any]:
    """Return one tensor's row."""
    row: dict[str, Any] = {
        "name": name,
        "role": " ".join(roles),
        "shape": list(tensor.shape),
        "encoding": tensor.encoding,
        "nbytes": tensor.nbytes,
        "offset": tensor.offset,
        "parts": {key: part.info.name for key, part in tensor.parts.items()},
    }
    if tensor.damage:
        row["damage"] = tensor.damage
    if stats:
        row["stats"] = tensor_stats(tensor)
    return row


def tensor_stats(tensor: "View") -> dict[str, Any]:
    """Return the statistics of one tensor, or the reason there are none."""
    from aprfmt.tensors.stats import tensor_stats as of_tensor

    try:
        result: dict[str, Any] = of_tensor(tensor.stored[0]).to_json()
        return result
    except AprfmtError as error:
        return {"error": str(error)}


def show(rows: list[dict[str, Any]], total: int, stats: bool) -> None:
    """Print the table for people."""
    headers = ["name", "role", "shape", "encoding", "bytes", "offset"]
    align = "lllrrr"
    damaged = any("damage" in row for row in rows)
    table = []
    for row in rows:
        cells = [
            row["name"], row["role"], render.shape_text(row["shape"]), row["encoding"],
            row["nbytes"], row["offset"],
        ]  # fmt: skip
        if stats:
            found = row["stats"]
            cells += [
                f"{found[key]:.6g}" if isinstance(found.get(key), float) else found.get(key, "-")
                for key in ("mean", "std", "min", "max", "zeros", "nan", "inf")
            ]
        if damaged:
            cells.append("damaged" if "damage" in row else "")
        table.append(cells)
    if stats:
        headers += ["mean", "std", "min", "max", "zeros", "nan", "inf"]
        align += "rrrrrrr"
    headers += ["damage"] * damaged
    render.table(table, headers, align)
    if len(rows) < total:
        render.line(f"... {total - len(rows)} more (--limit)", style="dim")
