"""Tables of decoders older than llama: one projection for q, k and v, under older names."""

from collections.abc import Iterable

from aprfmt.arch.grouped_rows import Grouped
from aprfmt.arch.joining_steps import Split
from aprfmt.arch.spec import Binding, LayoutStep
from aprfmt.arch.tensor_rows import KV, Q, RoleRow

PARTS = ("weight", "bias")
ROLES = {part: tuple(f"attn_{x}.{part}" for x in "qkv") for part in PARTS}
GROUPED: tuple[LayoutStep, ...] = (Grouped(),)
IN_ORDER: tuple[LayoutStep, ...] = (Split((Q, KV, KV)),)


def fused_rows(bias: str | None) -> tuple[RoleRow, ...]:
    """Return the tensor-table rows of q, k and v, which one stored matrix holds together.

    `bias` is the condition for a model to have their biases; None: it has none.
    """
    rows = [
        RoleRow(role, "", (size, "hidden_size"), gguf="")
        for role, size in zip(ROLES["weight"], (Q, KV, KV), strict=True)
    ]
    if bias is not None:
        rows += [
            RoleRow(role, "", (size,), bias, gguf="")
            for role, size in zip(ROLES["bias"], (Q, KV, KV), strict=True)
        ]
    return tuple(rows)


def fused_bindings(
    template: str, steps: tuple[LayoutStep, ...], parts: Iterable[str] = PARTS
) -> tuple[Binding, ...]:
    """Return the bindings of one stored matrix with q, k and v, and of its bias.

    `template` is its name, `steps` cut it into q, k and v, `parts` are "weight", "bias" or both.
    """
    return tuple(Binding((f"{template}.{part}",), ROLES[part], steps) for part in parts)


GGUF_FUSED = fused_bindings("blk.{L}.attn_qkv", IN_ORDER)
