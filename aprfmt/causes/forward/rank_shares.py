"""Hypotheses about tensor-parallel ranks that hold another rank's part of a weight.

In tensor parallelism a rank has some rows of q, k, v, gate and up, and some columns of the last
product of a sublayer. These are its *share* of the weight, and the values computed with them its
*block* of the result. A rank that loaded another rank's share gives that rank's block in the
position of its own, or multiplies its input by columns that belong to another rank's input.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from aprfmt.causes.forward.mismatch import Array, Change, Hypothesis, Mismatch, Patch
from aprfmt.causes.forward.product import Product, product_of, weight_values
from aprfmt.causes.forward.shards import COUNTS, ROLES, role_of
from aprfmt.causes.row import Cause
from aprfmt.inference.replay.patched_model import PatchedModel
from aprfmt.measure.distances import rel_l2

CAUSE_ROWS = (
    Cause(
        "shard_order", "forward", "bug",
        "A rank holds another rank's share of a weight: it stands in another's place, or twice.",
        "Equal parts of a weight, or blocks of columns of a product, are those of other ones.",
        "The weight, or the product, whose shares are taken in that order is equal.",
    ),
)  # fmt: skip

# Products with a rank's share of rows -> the points they make, those of one sublayer together.
SHARED: Mapping[str, tuple[tuple[str, str], ...]] = {
    "attention": (("attn_q", "q"), ("attn_k", "k"), ("attn_v", "v")),
    "the MLP": (("ffn_gate", "ffn_gate"), ("ffn_up", "ffn_up")),
}


def block_order(mine: Array, theirs: Array, count: int, bound: float) -> list[int] | None:
    """Return, for each block of columns in `theirs`, the number of the equal block in `mine`.

    Both are [tokens, width] with `count` equal blocks. None if a block of `theirs` is not within
    `bound` of exactly one of `mine`, or if each equals the block at its own position.
    """
    if mine.shape[1] % count:
        return None
    ours, others = np.split(mine, count, 1), np.split(theirs, count, 1)
    order = []
    for other in others:
        away = [rel_l2(other, one) for one in ours]
        nearest = int(np.argmin(away))
        if not away[nearest] <= bound or sum(one <= bound for one in away) > 1:
            return None
        order.append(nearest)
    return None if order == list(range(count)) else order


def order_text(order: Sequence[int]) -> str:
    """Return a sentence on which rank has which rank's share; order[rank] is whose share it is."""
    permuted = len(set(order)) == len(order)
    moved = [f"rank {at} has that of rank {one}" for at, one in enumerate(order) if at != one]
    how = f"the shares of {len(order)} ranks in another order"
    if not permuted:
        how = f"one of the shares of {len(order)} ranks several times"
    return f"{how} ({', '.join(moved)})"


def find_share_order(case: Mismatch) -> Iterator[Change]:
    """Yield the change that ranks have each other's shares of a weight.

    It is found on even rows and judged on odd ones. In a run that was not put together from ranks,
    heads in another order look the same: there only columns are looked at that two ranks have.
    """
    joined = bool(case.recorded.trace.run.get("dump"))
    found = product_of(case)
    role = "" if found is None else role_of(found.key)
    if found is None or len(found.x) < 2:
        return
    for name, group in SHARED.items():
        if joined and role in [one for one, _ in group]:
            yield from _find_row_share_order(case, name, group, role)
    if role in ROLES:
        yield from _find_column_share_order(case, found, role, permuted=joined)


def _find_row_share_order(
    case: Mismatch, name: str, group: Sequence[tuple[str, str]], role: str
) -> Iterator[Change]:
    """Yield the change to another order of the ranks' blocks of a product's outputs.

    `group` are (role, capture point) of the products of the sublayer `name`; those with the same
    order as `role` are changed together.
    """
    bound = 3 * case.view.tolerance
    for count in COUNTS:
        orders = {}
        for other, point in group:
            view = case.found.views.get(f"L{case.layer}.{point}")
            if view is None or view.recorded is None or view.mine.shape != view.theirs.shape:
                continue
            mine, theirs = (x.reshape(len(x), -1) for x in (view.mine, view.theirs))
            even = block_order(mine[::2], theirs[::2], count, bound)
            if even is not None and even == block_order(mine[1::2], theirs[1::2], count, bound):
                orders[other] = even
        if role in orders:
            same = tuple(one for one, order in orders.items() if order == orders[role])
            yield _share_order_change(
                name, same, orders[role], _patch_output_order(same, orders[role])
            )
            return


def _find_column_share_order(
    case: Mismatch, found: Product, role: str, *, permuted: bool
) -> Iterator[Change]:
    """Yield the change in which ranks multiply their input by another rank's columns of the weight.

    `found` is the product, `role` its weight's role. Without `permuted` only where a share is
    multiplied twice.
    """
    w = weight_values(case.patched, found.key)
    even = np.arange(len(found.x)) % 2 == 0
    if w is None:
        return
    for count in COUNTS[:2]:
        if w.shape[1] % count:
            return
        # Solve which share of columns each share of the input was multiplied by.
        xs, ws = np.split(found.x, count, 1), np.split(w, count, 1)
        parts = np.stack([x @ share.T for x in xs for share in ws]).astype(np.float64)
        columns = parts[:, even].reshape(count * count, -1).T
        if columns.shape[0] < columns.shape[1]:
            return
        wanted = found.output_without_bias[even].astype(np.float64).reshape(-1)
        solved = np.round(np.linalg.lstsq(columns, wanted, rcond=None)[0]).reshape(count, count)
        # It must be one share each, in another order, and fit the odd rows.
        chosen = solved.argmax(1)
        if not np.array_equal(solved, np.eye(count)[chosen]) or list(chosen) == list(range(count)):
            continue
        if not permuted and len(np.unique(chosen)) == count:
            return
        made = np.tensordot(solved.reshape(-1), parts, 1)
        if rel_l2(made[~even], found.output_without_bias[~even]) <= 3 * case.view.tolerance:
            order = [int(one) for one in chosen]
            yield _share_order_change("the sum", (role,), order, _patch_input_order(role, order))
            return


# Usual wrong shares of 2 and of 4 ranks: the rank whose share each rank has. Few, since each is
# tried together with other mistakes, too.
REPEATED_SHARES = ((0, 0), (1, 1), (0, 0, 0, 0))


def usual_share_mistakes(patched: PatchedModel) -> Iterator[Change]:
    """Yield the changes that all ranks hold one rank's share of some weights, in all layers.

    They are rows of all products of a sublayer that read the same input, or columns of its last
    product. Rows and columns at once count the other rank's part twice, as
    `usual_shard_sum_mistakes` has it.
    """
    held = {role_of(key) for key in patched.weights}
    heads = {"attn_q": "n_heads", "attn_k": "n_kv_heads", "attn_v": "n_kv_heads"}
    last = {"attention": "attn_output", "the MLP": "ffn_down"}
    for order in REPEATED_SHARES:
        for name, group in SHARED.items():
            if last[name] in held:
                columns = _patch_input_order(last[name], order)
                made = _share_order_change(name, (last[name],), order, columns)
                yield replace(made, scoped=False)
            # Ranks that outnumber the key heads have whole heads, of which several ranks have one.
            rows = tuple(
                role
                for role, _ in group
                if role in held
                and (role not in heads or int(patched.hp[heads[role]]) % len(order) == 0)
            )
            if rows:
                made = _share_order_change(name, rows, order, _patch_output_order(rows, order))
                yield replace(made, scoped=False)


def _share_order_change(
    name: str, roles: Sequence[str], order: Sequence[int], make: Patch
) -> Change:
    """Return the change, made by the patch `make`, that ranks have each other's shares of weights.

    `roles` are the weights' roles, `name` the sublayer; order[rank] is the rank whose share it has.
    """
    return Change(
        "shard_order",
        f"{', '.join(roles)} of {name} has {order_text(order)}",
        tuple(roles),
        make,
        {"order": list(order)},
    )


def _patch_output_order(roles: Sequence[str], order: Sequence[int]) -> Patch:
    """Return a patch that puts the ranks' blocks of these products' outputs in another order."""

    def override(op: Any, at: Any, x: Any, w: Any, *rest: Any) -> Any:
        """Return the product of `x` and `w` with the ranks' blocks of outputs in another `order`.

        Products of other roles are computed as usual.
        """
        y = op(x, w, *rest)
        if role_of(w.key) not in roles or y.shape[-1] % len(order):
            return y
        blocks = np.split(y, len(order), -1)
        return np.concatenate([blocks[one] for one in order], -1)

    return lambda patched, layers: patched.with_op("linear", override, layers)


def _patch_input_order(role: str, order: Sequence[int]) -> Patch:
    """Return a patch that multiplies each rank's block of the input by another rank's columns.

    order[i] is the rank whose columns multiply block i of the input; several blocks may have the
    same.
    """

    def override(op: Any, at: Any, x: Any, w: Any, *rest: Any) -> Any:
        """Return the product of `w` with `x`, whose block i of columns is moved to order[i].

        Blocks that are moved to the same position are added. Products of other roles are as usual.
        """
        if role_of(w.key) != role or x.shape[-1] % len(order):
            return op(x, w, *rest)
        # A share of columns that several ranks have multiplies the sum of their inputs.
        place = np.zeros_like(x)
        taken = np.split(place, len(order), -1)
        for one, block in zip(order, np.split(x, len(order), -1), strict=True):
            taken[one] += block
        return op(place, w, *rest)

    return lambda patched, layers: patched.with_op("linear", override, layers)


HYPOTHESES = (
    Hypothesis(
        "shard_order", find_share_order, 114, "whole blocks of columns, before what ranks add up"
    ),
)
