"""What `aprfmt tensors` says of a tensor: its row as plain data, and the table of all rows."""

from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from aprfmt.cli import render
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
    """Return one tensor's row."""
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
    """Return the statistics of one tensor, or the reason there are none."""
    from aprfmt.tensors.stats import tensor_stats as of_tensor

    try:
        result: dict[str, Any] = of_tensor(tensor.stored[0]).to_json()
        return result
    except AprfmtError as error:
        return {"error": str(error)}


def show(rows: list[TensorRow], total: int, stats: bool) -> None:
    """Print the table for people."""
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
