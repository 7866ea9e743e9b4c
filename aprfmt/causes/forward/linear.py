"""Hypotheses about a matrix product: its bias, the weight used, and the order of its rows."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from aprfmt.causes.forward.mismatch import Array, Change, Hypothesis, Mismatch
from aprfmt.causes.forward.point_signatures import PointPair, PointSignature
from aprfmt.causes.forward.product import (
    other_weight_changes,
    product_of,
    product_with_weight,
    replace_weights,
    scale_weights_change,
    weight_values,
    weights_of_same_shape,
    zero_weights_change,
)
from aprfmt.causes.row import Cause
from aprfmt.causes.tensor.permutation import adjacent_pair_order, invert_permutation
from aprfmt.inference.replay.patched_model import PatchedModel
from aprfmt.measure.distances import rel_l2
from aprfmt.tensors.norms import exact_norm

CAUSE_ROWS = (
    Cause(
        "repeated_bias", "forward", "bug",
        "A bias is added more than once: twice, or by each of several devices before their sum.",
        "The difference is the same vector in every row, a whole multiple of the bias.",
        "Adding the bias as often makes the difference vanish.",
    ),
)  # fmt: skip


def find_missing_bias(case: Mismatch) -> Iterator[Change]:
    """Yield changes of a bias, if the trace differs by the same vector in every row.

    The bias is missing, repeated, another one, or one that the model does not have. Where a
    product comes before the point but is not the point itself, its bias is left out or repeated.
    """
    found = product_of(case)
    if found is None:
        yield from _leave_out_biases(case)
        return
    # The difference must be one vector in all rows.
    away = found.theirs.astype(np.float64) - found.ours
    vector = away.mean(axis=0)
    size = exact_norm(found.theirs)
    if exact_norm(away - vector) > 3 * case.view.tolerance * size:
        if found.key:
            yield from _leave_out_biases(case)
        return
    # Name the vector: an added bias, a missing one, a repeated one, or another.
    name = f"{found.role}.bias"
    near = max(1e-3, 10 * case.view.tolerance)
    if found.bias is None:
        small = exact_norm(vector) * len(away) ** 0.5 <= case.view.tolerance * size
        even = exact_norm(vector - vector.mean()) <= 1e-3 * exact_norm(vector)
        small |= case.view.point == "logits" and even  # one number for a row: no softmax sees it
        if len(away) > 1 and not small:
            yield Change(
                "missing_bias",
                f"a bias is added that the model does not have: the same vector in every row of "
                f"{case.view.key}",
                (name,),
                replace_weights({name: vector.astype(np.float32)}),
                scoped=False,
            )
    elif rel_l2(vector, -found.bias) <= near:
        yield dropped_bias_change(case.patched, name)
    elif (times := _bias_repetitions(vector, found.bias, near)) is not None:
        often = "twice" if times == 2 else f"{times} times"
        yield Change(
            "repeated_bias",
            f"{name} is added {often}",
            (name,),
            replace_weights({name: (times * found.bias).astype(np.float32)}),
            {"times": times},
            scoped=False,
        )
    elif len(away) > 1:
        yield Change(
            "stale_tensor",
            f"{name} has other values (the same vector is off in every row)",
            (name,),
            replace_weights({name: (found.bias + vector).astype(np.float32)}),
            scoped=False,
            general=True,
        )


def _bias_repetitions(vector: Array, bias: Array, near: float) -> int | None:
    """Return how often a bias was added, if at least twice; None otherwise.

    `vector` is what was added beyond one bias; `near` is the largest relative distance of equal
    vectors.
    """
    times = 1 + round(float(np.sum(vector * bias) / max(float(np.sum(bias * bias)), 1e-300)))
    more = 2 <= times <= 64 and rel_l2(vector, (times - 1) * bias) <= near
    return times if more else None


def dropped_bias_change(patched: PatchedModel, name: str) -> Change:
    """Return the change that leaves out the bias `name`."""
    return zero_weights_change("missing_bias", f"{name} is not added", (name,), patched)


def repeated_bias_change(patched: PatchedModel, name: str, times: float) -> Change:
    """Return the change that adds the bias `name` `times` times."""
    says = f"{name} is added {'twice' if times == 2 else f'{times:g} times'}"
    return scale_weights_change("repeated_bias", says, (name,), patched, times)


def _leave_out_biases(case: Mismatch) -> Iterator[Change]:
    """Yield changes that leave out a product's bias before the point, or add it 2, 4 or 8 times."""
    for call in case.calls("linear", "router"):
        name = f"{call.args[1].key.removesuffix('.weight')}.bias"
        if name in case.patched.weights:
            yield dropped_bias_change(case.patched, name)
            for times in (2.0, 4.0, 8.0):
                yield repeated_bias_change(case.patched, name, times)


def try_other_weights(case: Mismatch) -> Iterator[Change]:
    """Yield the change to another weight of the same shape that gives the trace's output."""
    found = product_of(case)
    if found is None or not found.key:
        return
    some = min(len(found.x), 4)
    for other in weights_of_same_shape(case.patched, found.key):
        w = weight_values(case.patched, other)
        if w is None:
            return
        y = found.x[:some] @ w.T
        shifts = [0.0 if found.bias is None else found.bias, 0.0]
        bias_name = f"{other.removesuffix('.weight')}.bias"
        if bias_name in case.patched.stored:
            shifts.append(np.asarray(case.patched.stored[bias_name].numpy()))
        if any(
            rel_l2(y + shift, found.theirs[:some]) <= 10 * case.view.tolerance for shift in shifts
        ):
            yield from other_weight_changes(case, found.key, other)
            return


def try_transposed_weight(case: Mismatch) -> Iterator[Change]:
    """Yield the change that reads the weight's numbers column by column, if that fits the trace."""
    product = product_with_weight(case)
    if product is None:
        return
    found, w = product
    flat = np.ascontiguousarray(w.T).reshape(w.shape)  # the same numbers, columns first
    if found.explains_output(case, flat):
        says = f"{found.key} is read with rows and columns exchanged"
        yield found.weight_change(case, "transpose", says, flat)


def match_weight_rows(case: Mismatch) -> Iterator[Change]:
    """Yield the change to another order of the weight's rows that gives the trace's output."""
    product = product_with_weight(case)
    if product is None:
        return
    found, w = product
    if len(found.x) < 2 or w.shape[0] > 20000:
        return
    order = _match_columns(found.x @ w.T, found.output_without_bias, case.view.tolerance)
    if order is None or np.array_equal(order, np.arange(len(order))):
        return
    cause, says, values = _name_row_order(case, found.key, order)
    yield found.weight_change(case, cause, f"{found.key}: {says}", w[order], values)


def _match_columns(ours: Array, theirs: Array, bound: float) -> Array | None:
    """Return, for each column of `theirs`, the number of the equal column in `ours`, or None.

    None if one has no equal. Columns are looked up by their first three values, rounded to a
    grid. `bound` is relative L2.
    """
    keys: dict[tuple[int, ...], list[int]] = {}
    scale = np.linalg.norm(ours, axis=0).mean() / len(ours) ** 0.5 or 1.0
    grain = max(1e-3, 20 * bound) * scale
    for j, column in enumerate(ours.T):
        keys.setdefault(tuple(np.floor(column[:3] / grain).astype(int)), []).append(j)
    order = np.empty(theirs.shape[1], np.int64)
    for j, column in enumerate(theirs.T):
        base = np.floor(column[:3] / grain).astype(int)
        near = [
            i
            for step in np.ndindex(*(3,) * len(base))
            for i in keys.get(tuple(base + np.asarray(step) - 1), ())
        ]
        away = [exact_norm(ours[:, i] - column) for i in near]
        if not near or min(away) > 10 * max(bound, 1e-4) * max(exact_norm(column), scale):
            return None
        order[j] = near[int(np.argmin(away))]
    return order


def _name_row_order(case: Mismatch, key: str, order: Array) -> tuple[str, str, Mapping[str, Any]]:
    """Return (cause, sentence, values) that describe a permutation of a weight's rows.

    `key` is the weight's; `order` holds, for each row that was used, the number of the stored
    row.
    """
    role = key.removesuffix(".weight").rpartition(".")[2]
    d = int(case.patched.hp["head_dim"])
    count = len(order)
    # Orders that have a name in attention: heads, rope pairs, a wrong head count.
    if role in ("attn_q", "attn_k", "attn_v") and count % d == 0:
        heads = order.reshape(-1, d)
        if (heads // d == heads[:, :1] // d).all() and (heads % d == np.arange(d)).all():
            found = (heads[:, 0] // d).tolist()
            return "head_order", f"heads stand in the order {found}", {"order": found}
        half = np.arange(d).reshape(2, -1).T.reshape(-1)
        for inside, words in ((half, "adjacent pairs"), (np.argsort(half), "split halves")):
            if (heads == np.arange(count).reshape(-1, d)[:, inside]).all():
                return (
                    "rope_pairing",
                    f"rows of each head are ordered for {words}",
                    {"rows_of_a_head": inside.tolist()[:16]},
                )
        found_heads = _wrong_head_count(order, count // d)
        if found_heads is not None:
            many, words = found_heads
            return (
                "gqa_mapping",
                f"rows were permuted for {many} heads{words}; the tensor has {count // d}",
                {"heads": many},
            )
    # One device's rows in another's place.
    for ranks in (n for n in (2, 3, 4, 8) if count % n == 0):
        blocks = order.reshape(ranks, -1)
        shares = blocks[:, 0] // blocks.shape[1]
        whole = (blocks == shares[:, None] * blocks.shape[1] + np.arange(blocks.shape[1])).all()
        if whole and len({*shares.tolist()}) < ranks:
            found = shares.tolist()
            listed = ", ".join(map(str, found))
            says = f"the rows are those of shards {listed} of {ranks}, one after the other"
            return "tensor_parallel", says, {"shards": found}
    # Any other order: a shift, or no known one.
    shift = np.unique((order - np.arange(count)) % count)
    if len(shift) == 1:
        move = int(shift[0]) if shift[0] <= count // 2 else int(shift[0]) - count
        return "row_offset", f"rows are read {move} further on", {"offset": move}
    return "row_offset", f"rows are in another order ({order[:6].tolist()}, ...)", {}


def _wrong_head_count(order: Array, right: int) -> tuple[int, str] | None:
    """Return (number of heads, words) if `order` is a rope permutation for a wrong head count.

    `right` is the true number. `words` is "", or a clause that the permutation for `right` heads
    was undone as well. None if no number of heads gives the order.
    """
    count = len(order)
    own = adjacent_pair_order(count, right) if count % (2 * right) == 0 else None
    for heads in range(1, count // 2 + 1):
        if count % (2 * heads) or heads == right:
            continue
        other = adjacent_pair_order(count, heads)
        ways = {"": (other, invert_permutation(other))}
        if own is not None:
            ways[f", and undone for {right}"] = (
                invert_permutation(own)[other],
                invert_permutation(other)[own],
            )
        for words, made in ways.items():
            if any(np.array_equal(order, one) for one in made):
                return heads, words
    return None


# Points that products with a bias make.
BIASED = ("q", "k", "v", "attn_out", "ffn_gate", "ffn_up", "ffn_out", "router")


def see_added_vector(pair: PointPair) -> str:
    """Return that every row of a product differs by one vector, as by a bias; "" if not."""
    if pair.point not in BIASED or len(pair.rows) < 2:
        return ""
    spread = exact_norm(pair.away - pair.away.mean(0))
    alike = spread < 1e-3 * exact_norm(pair.away)
    return "the difference is the same vector in every row" if alike else ""


HYPOTHESES = (
    Hypothesis("missing_bias", find_missing_bias, 40, "one vector in every row"),
    Hypothesis("swapped_tensors", try_other_weights, 90, "a stored matrix, before solved ones"),
    Hypothesis("transpose", try_transposed_weight, 100, "the same values in one known order"),
    Hypothesis("head_order", match_weight_rows, 110, "the same values in any order"),
    PointSignature("missing_bias", see_added_vector, 1000, "a vector, before any factor"),
)
