"""Hypotheses about a product whose first or last inputs do not count, or meet other columns.

A kernel multiplies tile by tile. Where a product has no whole number of tiles, what is left is its
*tail*: the last columns of its weight, and the inputs that these multiply. A kernel without code
for it leaves the tail out, or multiplies its inputs by the columns of the tile before.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from aprfmt.causes.forward.mismatch import Array, Change, Hypothesis, Mismatch, Patch
from aprfmt.causes.forward.product import Product, product_with_weight
from aprfmt.causes.forward.shards import COUNTS, role_of
from aprfmt.causes.row import Cause
from aprfmt.tensors.norms import exact_norm

CAUSE_ROWS = (
    Cause(
        "product_tail", "forward", "bug",
        "A product leaves out its first or last inputs, or multiplies its last ones by other "
        "columns: a kernel handles what is left after whole tiles wrongly.",
        "The product of some inputs with their columns of the weight is missing in every row.",
        "The product without these inputs, or with the other columns, is equal.",
    ),
)  # fmt: skip

TILES = (8, 16, 32, 64, 128, 256)  # inputs that a kernel takes at once
CHUNK = 256  # columns that are summed up at once
CLOSE = 3.0  # times the point's tolerance that may be left of one row
Columns = tuple[int, int]  # the first, and the one after the last


def find_product_tails(case: Mismatch) -> Iterator[Change]:
    """Yield changes in which a product's first or last inputs do not count, or meet other columns.

    The inputs are found on the row that differs most. Nothing is yielded where they are a device's
    share: then a sum over devices lacks it.
    """
    found = product_with_weight(case)
    if found is None:
        for role, width in _products_before(case).items():
            for size in _tail_sizes(width):
                yield _tail_change(role, (width - size, width), width)
        return
    product, w = found
    width, role = w.shape[1], role_of(product.key)
    apart = product.theirs.astype(np.float64) - product.ours
    row = int(np.argmax(np.linalg.norm(apart, axis=1)))
    terms = product.x[row].astype(np.float64)
    bound = CLOSE * case.view.tolerance * exact_norm(product.theirs[row])
    if exact_norm(apart[row]) <= bound:
        return
    for last in (True, False):
        size = _lost_inputs(terms, w, apart[row], bound, last=last)
        if size and not any(size * count % width == 0 for count in COUNTS):
            yield _tail_change(role, (width - size, width) if last else (0, size), width)
    yield from _misread_tails(product, w, apart[row], row, bound)


def _lost_inputs(terms: Array, w: Array, apart: Array, bound: float, *, last: bool) -> int:
    """Return how many of the first or `last` inputs do not count in a row; 0 if none explain it.

    `terms` [columns] is the row's input, `w` [rows, columns] the weight, `apart` [rows] what the
    trace has more than the product. What is left of it is within `bound`. It is the least number,
    since inputs that are zero count for nothing.
    """
    width = len(terms)
    carried, best, size = apart.copy(), bound, 0
    for start in range(0, width - 1, CHUNK):
        at = np.arange(start, min(start + CHUNK, width - 1))
        at = width - 1 - at if last else at
        summed = np.cumsum(w[:, at] * terms[at], axis=1) + carried[:, None]
        left = np.linalg.norm(summed, axis=0)
        nearest = int(np.argmin(left))
        if left[nearest] < best / 2 or (not size and left[nearest] <= best):
            best, size = float(left[nearest]), start + nearest + 1
        carried = summed[:, -1]
    return size


def _tail_sizes(width: int) -> list[int]:
    """Return how many inputs are left after whole tiles of usual sizes, without 0 and all."""
    return list(dict.fromkeys(width % tile for tile in TILES if 0 < width % tile < width))


def _products_before(case: Mismatch) -> dict[str, int]:
    """Return {role: number of inputs} of the products before the point; {} outside the layers."""
    if case.layer < 0:
        return {}
    return {
        role_of(call.args[1].key): int(case.array(call.args[0]).shape[-1])
        for call in case.calls("linear")
    }


def _misread_tails(
    product: Product, w: Array, apart: Array, row: int, bound: float
) -> Iterator[Change]:
    """Yield the changes in which a tail's inputs are multiplied by other columns of the weight.

    These are the columns right before the tail, and the first ones. `apart` [rows] is what the
    trace has more than the product in the row `row`, within `bound`.
    """
    width, terms = w.shape[1], product.x[row].astype(np.float64)
    for size in _tail_sizes(width):
        own = (width - size, width)
        for start in dict.fromkeys((width - 2 * size, 0)):
            if start < 0:
                continue
            tail = terms[own[0] :]
            made = w[:, start : start + size] @ tail - w[:, own[0] :] @ tail
            if exact_norm(made - apart) <= bound:
                yield _tail_change(role_of(product.key), own, width, start)


def _tail_change(role: str, lost: Columns, width: int, read: int | None = None) -> Change:
    """Return the change that inputs of the products of `role` do not count.

    `lost` are the inputs, of `width`. With `read` they are multiplied by as many columns of the
    weight from there on.
    """
    first, end = lost
    where = f"the last {end - first}" if end == width else f"the first {end}"
    does = "do not count" if end - first > 1 else "does not count"
    where = where if end - first > 1 else where.removesuffix(" 1")
    noun = "inputs" if end - first > 1 else "input"
    says = f"{where} of {width} {noun} {does} in the product of {role}"
    values = {"first": first, "last": end - 1}
    if read is not None:
        says = (
            f"{where} of {width} {noun} of the product of {role} meet columns {read} to "
            f"{read + end - first - 1} of the weight, not their own"
        )
        values["read"] = read
    return Change("product_tail", says, (role,), _patch_inputs(role, lost, width, read), values)


def _patch_inputs(role: str, lost: Columns, width: int, read: int | None) -> Patch:
    """Return a patch that makes inputs of the products of `role` zero, or moves them to `read`.

    `lost` are the inputs, of `width`. Moved inputs are added to those that are there.
    """
    first, end = lost

    def override(op: Any, at: Any, x: Any, w: Any, *rest: Any) -> Any:
        """Return the product of `w` with `x` [tokens, columns], whose lost inputs are elsewhere.

        Products of other roles are computed as usual.
        """
        if role_of(w.key) != role or x.shape[-1] != width:
            return op(x, w, *rest)
        moved = np.array(x)
        moved[..., first:end] = 0
        if read is not None:
            moved[..., read : read + end - first] += x[..., first:end]
        return op(moved, w, *rest)

    return lambda patched, layers: patched.with_op("linear", override, layers)


HYPOTHESES = (
    Hypothesis(
        "product_tail", find_product_tails, 112, "some columns of the right weight, in no order"
    ),
)
