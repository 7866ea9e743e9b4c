"""`aprfmt tensors`: every tensor of a file, one line each."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

import click

from aprfmt.cli import options, render
from aprfmt.cli.damage_report import report_damage
from aprfmt.errors import AprfmtError

if TYPE_CHECKING:
    from aprfmt.tensors.view import View


STATS = ("mean", "std", "min", "max", "zeros", "nan", "inf")  # columns of --stats


class TensorRow(TypedDict):
    """A tensor's row: `damage` where its bytes cannot be trusted, `stats` where asked for."""

    name: str
    role: str
    shape: list[int]
    encoding: str
    nbytes: int
    offset: int
    parts: dict[str, str]
    damage: NotRequired[str]
    stats: NotRequired[dict[str, object]]


def tensor_row(name: str, tensor: "View", roles: tuple[str, ...], stats: bool) -> TensorRow:
    """Return one tensor's JSON row; `stats` decodes it for statistics.

    `roles` are the roles that the tensor has.
    """
    row: TensorRow = {
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


def tensor_stats(tensor: "View") -> dict[str, object]:
    """Return the statistics of one tensor, or {"error": why it cannot be decoded}."""
    from aprfmt.tensors.stats import tensor_stats as of_tensor

    try:
        result: dict[str, Any] = of_tensor(tensor.stored[0]).to_json()
        return result
    except AprfmtError as error:
        return {"error": str(error)}


def show(rows: list[TensorRow], total: int, stats: bool) -> None:
    """Print a table of tensors; `total` is the number before --limit.

    `stats` adds their columns. `rows` is the JSON of the tensors.
    """
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
                for key in STATS
            ]
        if damaged:
            cells.append("damaged" if "damage" in row else "")
        table.append(cells)
    columns = STATS if stats else ()
    headers = ["name", "role", "shape", "encoding", "bytes", "offset", *columns]
    render.table(table, headers + ["damage"] * damaged, "lllrrr" + "r" * len(columns))
    if len(rows) < total:
        render.line(f"... {total - len(rows)} more (--limit)", style="dim")


@click.command("tensors")
@options.model()
@options.patterns
@click.option("--stats", is_flag=True, help="Decode and add mean, std, min, max, zeros, NaN, Inf.")
@click.option("--limit", type=options.WholeNumber(1), help="Show at most this many.")
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
) -> int:
    """List tensors: name, role, shape, encoding, bytes, offset.

    PATTERN is whole dot-components from the left (blk.3.ffn_gate) or, where none match there,
    anywhere (ffn_gate); or a glob, or re:...; in any spelling, or by role.
    """
    from aprfmt.model import open_model
    from aprfmt.model.resolve import names_matching

    with open_model(model, arch=arch, partial=partial, damaged=True) as opened:
        roles = opened.roles_of
        names = names_matching(opened, patterns) if patterns else list(opened)
        rows = []
        with render.ProgressLine("tensors") as progress:
            for i, name in enumerate(names[:limit]):
                rows.append(tensor_row(name, opened[name], roles.get(name, ()), stats))
                progress(i + 1, len(names[:limit]))
        for note in opened.notes:
            if note.level == "warning" or note.key == "remark":
                render.warn_note(note)
        damage, code = report_damage(opened.damage, partial=partial)
    body = {"model": str(opened.path), "count": len(names), "tensors": rows, "damage": damage}
    return render.emit(body, code, lambda: show(rows, len(names), stats))
