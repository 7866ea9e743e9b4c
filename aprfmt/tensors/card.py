"""Show a tensor in a notebook."""

import math
from typing import TYPE_CHECKING

from aprfmt.base.notebook import Card
from aprfmt.errors import AprfmtError

if TYPE_CHECKING:
    from aprfmt.tensors.view import View

SHOWN = 6  # values


def tensor_card(tensor: "View") -> str:
    """Return a tensor's facts as HTML, with first values if a row can be decoded alone."""
    first, wrong = "", tensor.damage
    # The first values, if a row can be decoded alone.
    try:
        count = math.prod(tensor.shape)
        if not wrong and tensor.row_bytes is not None and count:
            numbers = tensor.rows(0, 1)[0, :SHOWN]
            more = " ..." if count > len(numbers) else ""
            first = " ".join(f"{number:.6g}" for number in numbers.tolist()) + more
    except AprfmtError as error:
        wrong = str(error)
    return Card(
        tensor.name,
        wrong,
        "bad",
        [
            ("shape", list(tensor.shape)),
            ("encoding", tensor.encoding),
            ("bytes", f"{tensor.nbytes:,}"),
            ("offset", tensor.offset),
            ("stored as", "" if tensor.role is None else ", ".join(tensor.names)),
            ("layout", ", ".join(tensor.steps)),
            ("parts", ", ".join(tensor.parts)),
            ("values", first),
        ],
    ).html()
