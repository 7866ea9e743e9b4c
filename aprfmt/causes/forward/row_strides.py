"""Hypotheses that gate or up, parts of one joined product, are read as if they stood alone.

A joined product gives rows [gate | up]. Each part is a view whose rows lie two widths apart in
memory. A kernel that takes a part for contiguous reads one width after the other: of row t it gets
row t // 2, and every second row is of the other part. The first row is right.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from aprfmt.causes.forward.mismatch import (
    Array,
    Change,
    Hypothesis,
    Layers,
    Mismatch,
    Patch,
    differing_rows,
)
from aprfmt.causes.forward.product import remember_product
from aprfmt.causes.row import Cause
from aprfmt.inference.replay.patched_model import PatchedModel

CAUSE_ROWS = (
    Cause(
        "row_stride", "forward", "bug",
        "A kernel reads a part of a joined product as if its rows stood one after the other.",
        "The first token is right. Others are computed of rows of earlier tokens, of both parts in "
        "turn.",
        "Gate or up, read so from the joined rows, makes the difference vanish.",
    ),
)  # fmt: skip

ROLE = "ffn_up.weight"
ORDERS = (("gate", "up"), ("up", "gate"))  # of the parts in a joined row


def read_as_contiguous(parts: Sequence[Array], place: int) -> Array:
    """Return part `place` of joined rows as a kernel reads it that takes it for contiguous.

    `parts` are equal arrays [tokens, width], in the order in which they are joined. The result is
    [tokens, width]; it begins where the part's first row begins.
    """
    joined = np.concatenate([np.asarray(part) for part in parts], axis=-1)
    tokens, width = len(joined), joined.shape[-1] // len(parts)
    flat = joined.reshape(-1)[place * width :]
    return flat[: tokens * width].reshape(tokens, width)


def find_row_strides(case: Mismatch) -> Iterator[Change]:
    """Yield the changes in which gate, up or both are read from joined rows as contiguous.

    Nothing where the first token differs: its row is right.
    """
    if case.patched.spec.block.mlp == "plain" or case.layer < 0 or case.tokens < 2:
        return
    if not case.calls("activate") or case.view.point == "moe_out":
        return
    late = differing_rows(case)
    if not len(late) or late[0] == 0 or case.rows[0] != 0:
        return
    for order in ORDERS:
        for read in (("gate",), ("up",), ("gate", "up")):
            yield _stride_change(order, read)


def _stride_change(order: Sequence[str], read: Sequence[str]) -> Change:
    """Return the change that the parts `read` are read as contiguous from rows of `order`."""
    which = " and ".join(read)
    says = (
        f"{which} {'is' if len(read) == 1 else 'are'} read from rows [{' | '.join(order)}] as if "
        "they held nothing else: row t is row t // 2, of both parts in turn"
    )
    where = tuple(f"ffn_{name}" for name in read)
    return Change("row_stride", says, where, _read_parts(order, read), {"read": ", ".join(read)})


def _read_parts(order: Sequence[str], read: Sequence[str]) -> Patch:
    """Return a patch: a gated MLP reads its parts `read` as contiguous from rows of `order`."""

    def make(patched: PatchedModel, layers: Layers) -> PatchedModel:
        """Return the model whose gated MLPs in `layers` read so."""
        held: dict[str, Any] = {}

        def parts(gate: Array, up: Array) -> list[Array]:
            """Return [gate, up] as they are read."""
            own = {"gate": gate, "up": up}
            joined = [own[name] for name in order]
            return [
                read_as_contiguous(joined, order.index(name)) if name in read else own[name]
                for name in own
            ]

        def activate(op: Any, at: Any, x: Any, *rest: Any, **kwargs: Any) -> Any:
            """Return the activation of the gate as it is read, or of `x` if up is not known yet."""
            up = held.pop(ROLE, None)
            held["again"] = lambda gate: op(gate, *rest, **kwargs)
            held["gate"] = x
            if up is not None and up.shape == x.shape:
                x = parts(x, up)[0]
            held["made"] = op(x, *rest, **kwargs)
            return held["made"]

        def mul(op: Any, at: Any, a: Any, b: Any) -> Any:
            """Return the product of both parts as they are read where `a` is the activation."""
            inside = at.point == "ffn_act" or a is held.get("made")
            if not inside or "gate" not in held or held["gate"].shape != b.shape:
                return op(a, b)
            gate, up = parts(held.pop("gate"), b)
            return op(held["again"](gate), up)

        patched = patched.with_op("linear", remember_product(ROLE, held), layers)
        return patched.with_op("activate", activate, layers).with_op("mul", mul, layers)

    return make


HYPOTHESES = (Hypothesis("row_stride", find_row_strides, 377, "what is activated, before how"),)
