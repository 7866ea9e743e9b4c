"""Reorderings that do not change the function: neurons, heads or experts, in all tensors alike.

A *unit* is what is moved as a whole: a neuron of the MLP, a head, an expert. A *place* is the
number of a unit or row in B.

Each tensor alone looks misordered. Together they are the same model: an MLP's neurons reordered in
gate, up and down; query heads together with the columns of the output product; the rows inside a
head of q and k, where no rope tells them apart; experts together with the router's rows. It is
tried only if a tensor was explained by a rearrangement, and confirmed only if one order makes every
tensor of the group equal.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from aprfmt.arch.role_vocabulary import split_key
from aprfmt.causes.row import Cause
from aprfmt.causes.tensor import permutation, row_sources
from aprfmt.causes.tensor.context import PairContext
from aprfmt.causes.tensor.differing_pair import DifferingPair
from aprfmt.causes.tensor.guess import Group, JointHypothesis
from aprfmt.causes.tensor.proof import FEW, make_finding, prove_values
from aprfmt.measure.alignment import TensorPair
from aprfmt.measure.findings import Finding
from aprfmt.measure.records import TensorDiff
from aprfmt.measure.row_reader import RowReader

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array

CAUSE_ROWS = (
    Cause(
        "permuted_neurons", "tensor", "same",
        "An MLP's neurons stand in another order, in gate, up and down alike; the function is "
        "equal.",
        "Each of the layer's MLP tensors has its rows (down: its columns) in another order.",
        "One order makes all of them equal.",
    ),
    Cause(
        "permuted_heads", "tensor", "same",
        "Attention heads stand in another order, in all tensors of the layer alike and every "
        "query head with its key head; the function is equal.",
        "Blocks of head_dim rows of q, k or v and columns of the output product are in another "
        "order.",
        "One order of query heads and one of key heads make all of them equal.",
    ),
    Cause(
        "permuted_head_rows", "tensor", "same",
        "The rows inside each head stand in another order, in q and k alike, of a layer that "
        "rotates neither; the scores are equal.",
        "Rows of q and of k are in another order, no row is in another head.",
        "One order of a head's rows makes q and k equal, their biases and norms too.",
    ),
    Cause(
        "permuted_experts", "tensor", "same",
        "The experts of a layer stand in another order, their router's rows too; the function is "
        "equal.",
        "The router's rows and every stack of experts are in another order.",
        "One order makes all of them equal.",
    ),
)  # fmt: skip

# What a rearranged tensor is called while it is looked at alone.
_ALONE = ("row_offset", "head_order", "gqa_mapping", "expert_order", "rope_pairing", "byte_offset")


@dataclass(frozen=True)
class Symmetry:
    """A way to reorder a layer: which tensors move together, in which units, along which axis.

    `rows` and `columns` map a unit to the roles whose rows (columns) it orders; roles that a layer
    lacks are left out. `known` are prefixes of the roles that a unit can affect: if the layer has
    such a role that is in neither, the symmetry is not assumed.
    """

    cause: str
    says: str
    rows: Mapping[str, tuple[str, ...]]
    columns: Mapping[str, tuple[str, ...]]
    known: str
    still: tuple[str, ...] = ()  # roles with such a prefix that no unit orders


SYMMETRIES: tuple[Symmetry, ...] = (
    Symmetry(
        "permuted_neurons",
        "the MLP's neurons stand in another order, in all its tensors alike: the function is equal",
        {"neuron": ("ffn_up.weight", "ffn_gate.weight", "ffn_up.bias", "ffn_gate.bias")},
        {"neuron": ("ffn_down.weight",)},
        "ffn_",
        ("ffn_down.bias", "ffn_norm.weight", "ffn_norm.bias"),
    ),
    Symmetry(
        "permuted_heads",
        "attention heads stand in another order, in all tensors alike and each query head with its "
        "key head: the function is equal",
        {
            "query head": (
                "attn_q.weight", "attn_q.bias", "attn_q_norm.weight", "attn_sinks.weight",
            ),
            "key head": (
                "attn_k.weight", "attn_v.weight", "attn_k.bias", "attn_v.bias",
                "attn_k_norm.weight",
            ),
        },
        {"query head": ("attn_output.weight",)},
        "attn_",
        ("attn_output.bias", "attn_norm.weight", "attn_norm.bias"),
    ),
    Symmetry(
        "permuted_experts",
        "the experts and their router's rows stand in another order alike: the function is equal",
        {
            "expert": (
                "ffn_gate_inp.weight", "ffn_gate_inp.bias", "exp_probs_b.bias",
                "ffn_up_exps.weight", "ffn_gate_exps.weight", "ffn_down_exps.weight",
                "ffn_up_exps.bias", "ffn_gate_exps.bias", "ffn_down_exps.bias",
            )
        },
        {},
        "ffn_",
        ("ffn_norm.weight", "ffn_norm.bias", "ffn_up_shexp.weight", "ffn_gate_shexp.weight",
         "ffn_down_shexp.weight", "ffn_gate_inp_shexp.weight"),
    ),
)  # fmt: skip


def moved_layers(
    context: PairContext, pairs: Mapping[str, TensorPair], rows: Mapping[str, TensorDiff]
) -> Iterator[Group]:
    """Yield a function for each symmetry and layer with a reordered tensor.

    It returns {tensor key: finding} of units, such as neurons or heads, that were moved in all
    tensors together.
    """
    suspects = {
        (layer, role)
        for row in rows.values()
        if row.explanation is not None and row.explanation.cause in _ALONE
        for layer, role in [split_key(row.key)]
        if layer is not None
    }
    for symmetry in SYMMETRIES:
        roles = [*sum(symmetry.rows.values(), ()), *sum(symmetry.columns.values(), ())]
        for layer in sorted({layer for layer, role in suspects if role in roles}):
            yield partial(_explain_layer, context, pairs, rows, symmetry, layer)
    inside = {role for roles in _HEAD_ROWS.values() for role in roles}
    for layer in sorted({layer for layer, role in suspects if role in inside}):
        yield partial(_explain_head_rows, context, pairs, rows, layer)


def _explain_layer(
    context: PairContext,
    pairs: Mapping[str, TensorPair],
    rows: Mapping[str, TensorDiff],
    symmetry: Symmetry,
    layer: int,
) -> dict[str, Finding]:
    """Return {tensor key: finding} of a layer's tensors; {} unless all moved consistently."""
    # All tensors that the symmetry orders must be there, in equal shapes.
    start = f"L{layer}."
    here = {key.removeprefix(start): pair for key, pair in pairs.items() if key.startswith(start)}
    members = list(_tensors_of_layer(symmetry, here))
    told = {role for _, role, _ in members} | set(symmetry.still)
    if any(role.startswith(symmetry.known) and role not in told for role in here):
        return {}
    cases: dict[str, DifferingPair] = {}
    for _, role, _ in members:
        a, b = here[role].a, here[role].b
        if a is None or b is None or a.shape != b.shape:
            return {}
        cases[role] = DifferingPair(start + role, RowReader(a), RowReader(b), context)
    # Find the order of each unit (heads, neurons, experts).
    counts = _unit_counts(context, symmetry, cases)
    orders: dict[str, Array] = {}
    for unit in symmetry.rows:
        order = (
            None if not counts.get(unit) else _find_unit_order(unit, counts[unit], members, cases)
        )
        if order is None:
            return {}
        orders[unit] = order
    if not _orders_are_consistent(orders):
        return {}
    # The orders must make every tensor equal.
    found = {}
    for unit, role, axis in members:
        case = cases[role]
        if _has_shared_head_norm(case, context):
            continue
        size = case.a.rows if axis == 0 else case.a.columns
        if size % counts[unit]:
            return {}
        p = permutation.expand_blocks(orders[unit], size // counts[unit])
        explanation = _order_explanation(case, symmetry, unit, orders[unit], p, axis)
        if explanation is None:
            return {}
        found[case.key] = explanation
    return {key: one for key, one in found.items() if rows[key].verdict == "DIFFERENT"}


# Roles with a row for each element of a head, by the size that counts their heads.
_HEAD_ROWS: Mapping[str, tuple[str, ...]] = {
    "n_heads": ("attn_q.weight", "attn_q.bias", "attn_q_norm.weight", "attn_q_norm.bias"),
    "n_kv_heads": ("attn_k.weight", "attn_k.bias", "attn_k_norm.weight", "attn_k_norm.bias"),
}
_HEAD_ROWS_SAY = (
    "the rows inside each head stand in another order, in q and k alike: the scores are equal, as "
    "no rope rotates them"
)


def _explain_head_rows(
    context: PairContext,
    pairs: Mapping[str, TensorPair],
    rows: Mapping[str, TensorDiff],
    layer: int,
) -> dict[str, Finding]:
    """Return {tensor key: finding} of the q and k tensors of a layer without rope whose rows moved.

    There the rows inside a key head may have any order, if the query heads that read it have the
    same. {} unless one such order makes all these tensors of the layer equal.
    """
    if context.rotated_pairs(layer) != "none":
        return {}
    cases: dict[str, tuple[DifferingPair, int]] = {}
    for size, roles in _HEAD_ROWS.items():
        for role in roles:
            pair = pairs.get(f"L{layer}.{role}")
            if pair is None:
                continue
            if pair.a is None or pair.b is None or pair.a.shape != pair.b.shape:
                return {}
            case = DifferingPair(pair.key, RowReader(pair.a), RowReader(pair.b), context)
            shared = "_norm." in role and case.a.size == context.hyper[0]["head_dim"]
            cases[role] = case, 1 if shared else int(context.hyper[0][size])
    order = _order_inside_heads(cases)
    if order is None:
        return {}
    found = {}
    for case, heads in cases.values():
        # Query head h reads key head h div (query heads / key heads); a shared norm has head 0's.
        own = order[np.arange(heads) * len(order) // heads]
        if heads == 1 and bool((order != order[0]).any()):
            return {}
        p = (np.arange(heads)[:, None] * order.shape[1] + own).reshape(-1)
        explanation = _head_rows_explanation(case, p)
        if explanation is None:
            return {}
        found[case.key] = explanation
    return {key: one for key, one in found.items() if rows[key].verdict == "DIFFERENT"}


def _order_inside_heads(cases: Mapping[str, tuple[DifferingPair, int]]) -> "Array | None":
    """Return where in its head of B each row of A's key heads is, int64 [key heads, head size].

    `cases` is {role: (compared pair, number of heads)}. None if k's rows are not all found in B, if
    one is in another head, or if none moved.
    """
    if not {"attn_q.weight", "attn_k.weight"} <= cases.keys():
        return None
    case, heads = cases["attn_k.weight"]
    rows = permutation.find_rows(case) if case.a.rows % heads == 0 else None
    if rows is None or not rows.is_complete:
        return None
    size = case.a.rows // heads
    order: Array = rows.at.reshape(heads, size) - np.arange(heads)[:, None] * size
    whole = bool((np.sort(order, axis=1) == np.arange(size)).all())
    return order if whole and bool((order != np.arange(size)).any()) else None


def _head_rows_explanation(case: DifferingPair, p: "Array") -> Finding | None:
    """Return the finding that B has A's rows in another order, None if they then still differ.

    `p` is the place in B of each row of A.
    """
    if len(p) != case.a.rows:
        return None
    slack = case.slack()
    after = case.distance(case.a.take, lambda numbers: case.b.take(p[numbers]), None, slack)
    if after.nonfinite is not None:
        return None
    if after.changed and not (slack and after.relative <= slack and not after.stray):
        return None
    moved = int(np.count_nonzero(p != np.arange(len(p))))
    sample = case.b.take(np.arange(min(case.b.rows, FEW)))
    return make_finding(
        "permuted_head_rows",
        (case.key,),
        (_HEAD_ROWS_SAY, f"{moved} of {len(p)} rows moved"),
        case.before.relative,
        after.relative,
        # The order was read from k's rows: all other tensors judge it.
        prove_values(sample, after.count, len(p) if case.role == "attn_k.weight" else 0, slack),
    )


def _tensors_of_layer(
    symmetry: Symmetry, here: Mapping[str, TensorPair]
) -> Iterator[tuple[str, str, int]]:
    """Yield (unit, role, axis) of a layer's tensors whose rows (0) or columns (1) consist of units.

    `here` are the layer's tensors by role.
    """
    for axis, groups in ((0, symmetry.rows), (1, symmetry.columns)):
        for unit, roles in groups.items():
            yield from ((unit, role, axis) for role in roles if role in here)


def _unit_counts(
    context: PairContext, symmetry: Symmetry, cases: Mapping[str, DifferingPair]
) -> dict[str, int]:
    """Return {unit: number of them} of a symmetry, such as heads.

    {} if not known or not exchangeable. `cases` are the layer's pairs by role.
    """
    if not context.hyper:
        return {}
    hyper = context.hyper[0]
    if symmetry.cause == "permuted_neurons":
        return {"neuron": cases["ffn_up.weight"].a.rows} if "ffn_up.weight" in cases else {}
    if symmetry.cause == "permuted_experts":
        # Grouped experts are chosen by group: moving them between groups changes the function.
        return (
            {} if (hyper.get("n_expert_groups") or 1) > 1 else {"expert": int(hyper["n_experts"])}
        )
    needed = ("attn_q.weight", "attn_k.weight", "attn_v.weight", "attn_output.weight")
    if any(role not in cases for role in needed):
        return {}
    return {"query head": int(hyper["n_heads"]), "key head": int(hyper["n_kv_heads"])}


def _find_unit_order(
    unit: str,
    count: int,
    members: Sequence[tuple[str, str, int]],
    cases: Mapping[str, DifferingPair],
) -> "Array | None":
    """Return the place in B of each unit of A, int64 [count]; None if it is not found.

    Units keep their places if no tensor with units as rows differs. `members` are (unit, role,
    axis) of tensors, `cases` the layer's pairs by role.
    """
    still = True
    # The first changed tensor whose rows are units gives the order.
    for own, role, axis in members:
        case = cases[role]
        if own != unit or axis != 0 or case.a.columns == 1 or case.a.rows % count:
            continue
        if not case.before.changed:
            continue
        still = False
        size = case.a.rows // count
        if size == 1:
            rows = permutation.find_rows(case)
            order: Array | None = rows.at if rows is not None and rows.is_complete else None
        else:
            first = np.arange(count) * size
            order = row_sources.match_rows(case.a.take(first), case.b.take(first), case.slack())
        if order is not None and sorted(order.tolist()) == list(range(count)):
            return order
    return np.arange(count) if still else None


def _has_shared_head_norm(case: DifferingPair, context: PairContext) -> bool:
    """Return whether the tensor is a q/k-norm with one weight for all heads.

    The order of heads then does not matter.
    """
    return case.role.endswith("_norm.weight") and case.a.size == context.hyper[0]["head_dim"]


def _orders_are_consistent(orders: "Mapping[str, Array]") -> bool:
    """Return whether some unit moved, and every query head still reads its own key head.

    `orders` are the places in B by unit.
    """
    if all(np.array_equal(order, np.arange(len(order))) for order in orders.values()):
        return False
    if "key head" not in orders:
        return True
    query, key = orders["query head"], orders["key head"]
    each = len(query) // len(key)
    own = np.arange(len(query)) // each
    return bool(np.array_equal(query // each, key[own]))


def _order_explanation(
    case: DifferingPair, symmetry: Symmetry, unit: str, order: "Array", p: "Array", axis: int
) -> Finding | None:
    """Return the finding if an order of units makes the whole tensor equal, else None.

    `order` is that of the units, `p` the same for single rows (axis 0) or columns (axis 1).
    """
    b = case.b

    def reordered_rows(rows: "Array") -> "Array":
        """Return rows of B with its neurons, heads or experts put in A's order.

        `rows` are row numbers in that order.
        """
        return b.take(p[rows]) if axis == 0 else b.take(rows)[:, p]

    slack = case.slack()
    after = case.distance(case.a.take, reordered_rows, None, slack)
    if after.nonfinite is not None:
        return None  # NaN and infinities cannot show an equal function
    if after.changed and not (slack and after.relative <= slack and not after.stray):
        return None
    moved = np.flatnonzero(order != np.arange(len(order)))
    shown = ", ".join(f"{unit} {i} of A is {int(order[i])} of B" for i in moved[:3].tolist())
    more = f"{len(moved)} of {len(order)} {unit}s moved" + (f": {shown}" if shown else "")
    sample = b.take(np.arange(min(b.rows, FEW)))
    return make_finding(
        symmetry.cause,
        (case.key,),
        (symmetry.says, more),
        case.before.relative,
        after.relative,
        prove_values(sample, after.count, len(order), slack),
    )


HYPOTHESES = (
    JointHypothesis(
        ("permuted_neurons", "permuted_heads", "permuted_head_rows", "permuted_experts"),
        moved_layers,
        410,
        "one order of whole units, before rows that stand anywhere",
        weak=_ALONE,
    ),
)
