"""Hypotheses about sums over tensor-parallel devices: summands left out, or added twice.

In tensor parallelism a device holds some columns of attention's and the MLP's last product, and
their results are summed (all-reduce). A device's *shard* is its columns of the weight. A device
that is not summed, a device that loaded another's shard, or a sum that is taken twice gives the
same products with other numbers before them.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from aprfmt.causes.forward.linear import dropped_bias_change, repeated_bias_change
from aprfmt.causes.forward.mismatch import Array, Change, Hypothesis, Layers, Mismatch, Patch
from aprfmt.causes.forward.product import Product, product_of, product_with_weight, weight_values
from aprfmt.causes.row import Cause
from aprfmt.inference.replay.patched_model import PatchedModel
from aprfmt.measure.distances import rel_l2

CAUSE_ROWS = (
    Cause(
        "tensor_parallel", "forward", "bug",
        "A sum over devices lacks a device's part, or has one in another's place, or a device's "
        "part of a product is multiplied by a factor.",
        "Attention's or the MLP's last product is that of some of its columns only, or one "
        "device's share of a dump is the right one times a number.",
        "The product in which the named shards count as named is equal.",
    ),
)  # fmt: skip

COUNTS = (2, 4, 8)  # devices that share a product
# What sums over devices -> roles of its products.
SUMMED: Mapping[str, tuple[str, ...]] = {
    "attention": ("attn_output", "ssm_out", "shortconv.out_proj"),
    "the MLP": ("ffn_down", "ffn_down_exps", "ffn_down_shexp"),
}
ROLES = tuple(role for roles in SUMMED.values() for role in roles)
# Products of which each rank computes equal shares of the columns.
_ROWS_SHARED = ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up")
# Tables whose rows devices share -> what a missing part of it leaves.
TABLES: Mapping[str, str] = {
    "token_embd.weight": "tokens of the others are embedded as zeros",
    "output.weight": "logits of the others are zero",
}


def role_of(key: str) -> str:
    """Return the role of a stored weight's key, without its layer and its expert.

    `L3.ffn_down_exps.weight[2]` gives `ffn_down_exps`.
    """
    name = key.partition("[")[0].removesuffix(".weight")
    layer, _, rest = name.partition(".")
    return rest if layer[:1] == "L" and layer[1:].isdigit() else name


def weight_column_blocks(roles: Sequence[str], factors: Sequence[float]) -> Patch:
    """Return a patch: blocks of columns of a weight are multiplied by `factors` in a product.

    It acts on the products of `roles`. The columns are cut into as many equal blocks as there are
    factors.
    """

    def override(op: Any, at: Any, x: Any, w: Any, *rest: Any) -> Any:
        """Return the product of `x` and `w` with each block of w's columns times its factor.

        Products of other roles are computed as usual.
        """
        width = x.shape[-1]
        if role_of(w.key) not in roles or width % len(factors):
            return op(x, w, *rest)
        each = np.repeat(np.asarray(factors, x.dtype), width // len(factors))
        return op(x * each, w, *rest)

    return lambda patched, layers: patched.with_op("linear", override, layers)


def _shard_count_text(factors: Sequence[float]) -> str:
    """Return in words which shards are left out or added several times; "" if none is."""
    count = len(factors)
    found = []
    for times in dict.fromkeys(factors):
        own = [str(i) for i, value in enumerate(factors) if value == times]
        name = f"shard{'s' if len(own) > 1 else ''} {', '.join(own)} of {count}"
        if times == 0:
            found.append(f"{name} {'are' if len(own) > 1 else 'is'} left out")
        elif times != 1:
            often = "twice" if times == 2 else f"{times:g} times"
            found.append(f"{name} {'count' if len(own) > 1 else 'counts'} {often}")
    return ", ".join(found)


def _shard_change(name: str, roles: Sequence[str], factors: Sequence[float]) -> Change:
    """Return the change that shards are added `factors` times in a sum over devices.

    `name` is the sublayer in words, `roles` are the products' roles.
    """
    return Change(
        "tensor_parallel",
        f"in the sum of {name} over devices {_shard_count_text(factors)}",
        tuple(roles),
        weight_column_blocks(roles, factors),
        {"shards": list(factors)},
    )


def _usual_shard_counts() -> Iterator[tuple[float, ...]]:
    """Yield usual wrong numbers of times that the products of 2 or 4 shards are added.

    One is left out, is added in place of another, or is the only one added.
    """
    yield from ((1.0, 0.0), (0.0, 1.0), (2.0, 0.0), (0.0, 2.0))
    for alone in range(4):
        yield tuple(float(i != alone) for i in range(4))
    yield 1.0, 0.0, 0.0, 0.0


def usual_shard_sum_mistakes(patched: PatchedModel) -> Iterator[Change]:
    """Yield changes for the usual mistakes in sums over devices."""
    held = {role_of(key) for key in patched.weights}
    parts = {name: [role for role in roles if role in held] for name, roles in SUMMED.items()}
    parts["attention and the MLP"] = [role for roles in parts.values() for role in roles]
    for factors in _usual_shard_counts():
        for name, roles in parts.items():
            if roles:
                yield _shard_change(name, roles, factors)
    for count in COUNTS:
        yield Change(
            "tensor_parallel",
            f"every sum of attention and the MLP over {count} devices is divided by their number",
            tuple(parts["attention and the MLP"]),
            weight_column_blocks(parts["attention and the MLP"], (1 / count,)),
            {"factor": 1 / count},
        )


def usual_shard_table_mistakes(patched: PatchedModel) -> Iterator[Change]:
    """Yield changes to token tables that have only one device's rows, with zeros for all others."""
    for key, leaves in TABLES.items():
        if key in patched.weights:
            for alone in (0, 1):
                yield Change(
                    "tensor_parallel",
                    f"of {key} only the rows of shard {alone} of 2 are there: {leaves}",
                    (key,),
                    _zero_half_table(key, alone),
                    {"shard": alone},
                    scoped=False,
                )


def _zero_half_table(key: str, alone: int) -> Patch:
    """Return a patch: one half of a table's rows is zero, for embedding and head.

    `alone` is the half that is kept: 0 for the first rows, 1 for the last.
    """

    def make(patched: PatchedModel, layers: Layers) -> PatchedModel:
        """Return the model whose table `key` has zeros in one half of the vocabulary's rows."""
        half = patched.weights[key].n_rows // 2

        def embed(op: Any, at: Any, table: Any, ids: Any) -> Any:
            """Return the rows of `ids` in `table`, zeros for ids outside the half `alone`.

            Other tables than `key` are read as usual.
            """
            y = op(table, ids)
            own = (np.asarray(ids) >= half) == bool(alone)
            return y * own[:, None].astype(y.dtype) if table.key == key else y

        def linear(op: Any, at: Any, x: Any, w: Any, *rest: Any) -> Any:
            """Return the logits, zeros for ids outside the half `alone`.

            Other products are as usual.
            """
            y = op(x, w, *rest)
            if w.key != key:
                return y
            own = (np.arange(y.shape[-1]) >= half) == bool(alone)
            return y * own.astype(y.dtype)

        return patched.with_op("embed", embed, layers).with_op("linear", linear, layers)

    return make


def find_shard_counts(case: Mismatch) -> Iterator[Change]:
    """Yield the change of how often each shard of a product is added, solved from the trace.

    It is solved on even rows and judged on odd ones.
    """
    found = product_of(case)
    solved = None if found is None else _solve_shard_counts(case, found, None)
    if solved is not None:
        yield solved[0]


def find_shard_counts_with_bias(case: Mismatch) -> Iterator[Change]:
    """Yield two changes of one product: how often shards are added, and how often its bias is.

    Neither explains the trace alone. They are solved on even rows and judged on odd ones.
    """
    found = product_of(case)
    if found is None or found.bias is None or not found.key:
        return
    solved = _solve_shard_counts(case, found, found.bias)
    if solved is not None:
        change, times = solved
        name = f"{found.role}.bias"
        yield change
        yield (
            repeated_bias_change(case.patched, name, times)
            if times
            else dropped_bias_change(case.patched, name)
        )


def _solve_shard_counts(
    case: Mismatch, found: Product, bias: Array | None
) -> tuple[Change, float] | None:
    """Return (change of how often each shard of `found` is added, times that the bias is added).

    With `bias` [columns] the second is solved too; with None it is 1. None where nothing fits.
    """
    role = role_of(found.key)
    if role not in ROLES:
        return None
    w = weight_values(case.patched, found.key)
    even = np.arange(len(found.x)) % 2 == 0
    if w is None or even.all():
        return None
    wanted = found.output_without_bias.astype(np.float64)
    # Solve how often each of so many blocks of columns counts.
    for count in COUNTS:
        width = w.shape[1]
        if width % count:
            return None
        size = width // count
        products = [
            found.x[:, i * size : (i + 1) * size] @ w[:, i * size : (i + 1) * size].T
            for i in range(count)
        ]
        if bias is not None:
            products.append(np.broadcast_to(bias, wanted.shape))
        parts = np.stack(products).astype(np.float64)
        columns = parts[:, even].reshape(len(parts), -1).T
        solved: Array = np.linalg.lstsq(columns, wanted[even].reshape(-1), rcond=None)[0]
        # Only whole counts that are not all equal say something.
        times = np.round(solved)
        factors, more = times[:count], times[count:]
        if (factors == factors[0]).all() or (factors < 0).any() or factors.max() > count:
            continue
        # The odd rows judge.
        made = np.tensordot(times, parts, 1)
        odd = ~even
        if rel_l2(made[odd], wanted[odd]) > 3 * case.view.tolerance or (more < -1).any():
            continue
        name = next(name for name, roles in SUMMED.items() if role in roles)
        return _shard_change(name, (role,), factors.tolist()), 1 + float(more.sum())
    return None


def find_sum_of_ranks(case: Mismatch) -> Iterator[Change]:
    """Yield the change that a sum over ranks is made twice, or is divided by their number.

    Only for dumps of several ranks: elsewhere such a factor may as well be the weight's.
    """
    dump = case.recorded.trace.run.get("dump")
    found = product_of(case)
    if not isinstance(dump, Mapping) or found is None or role_of(found.key) not in ROLES:
        return
    ours = (found.ours if found.bias is None else found.ours - found.bias).astype(np.float64)
    theirs = found.output_without_bias
    role = role_of(found.key)
    name = next(name for name, roles in SUMMED.items() if role in roles)
    for ranks in dict.fromkeys(int(size) for size in dump["ranks"].values()):
        for factor, says in (
            (float(ranks), f"of {ranks} ranks is taken again: it counts {ranks} times"),
            (1 / ranks, f"of {ranks} ranks is divided by their number"),
        ):
            if ranks > 1 and rel_l2(ours * factor, theirs) <= 3 * case.view.tolerance:
                yield Change(
                    "tensor_parallel",
                    f"the sum of {name} {says}",
                    (role,),
                    weight_column_blocks((role,), (factor,)),
                    {"factor": factor},
                )


def find_rank_factors(case: Mismatch) -> Iterator[Change]:
    """Yield changes by which some tensor-parallel ranks' products are off by a factor each.

    Only dumps of several ranks are looked at, and some ranks' products must be right: otherwise
    such a factor is the weight's. The factors are solved on even rows and judged on odd ones.
    """
    dump = case.recorded.trace.run.get("dump")
    product = product_with_weight(case)
    if not isinstance(dump, Mapping) or product is None:
        return
    found, w = product
    role = role_of(found.key)
    summed = role in ROLES
    for ranks in dict.fromkeys(int(size) for size in dump["ranks"].values()):
        divided = w.shape[1] if summed else w.shape[0]
        if ranks < 2 or divided % ranks or not (summed or role in _ROWS_SHARED):
            continue
        factors = _rank_factors(case, found, w, ranks, summed)
        if factors is None:
            continue
        wrong = [number for number, factor in enumerate(factors) if factor != 1]
        shown = " and ".join(
            f"rank {number} multiplies its part by {factors[number]:.6g}" for number in wrong
        )
        scaled = (
            w
            * np.repeat(np.asarray(factors, np.float32), divided // ranks)[
                None if summed else slice(None), slice(None) if summed else None
            ]
        )
        yield found.weight_change(
            case,
            "tensor_parallel",
            f"of {ranks} ranks that share {found.key}, {shown}: what it holds of the weight, or "
            "what it computes with that",
            scaled,
            {"factors": factors},
        )


def _rank_factors(
    case: Mismatch, found: Product, w: Array, ranks: int, summed: bool
) -> list[float] | None:
    """Return the factor of each rank's product; None unless some are 1 and some are not.

    `w` [rows, columns] is the weight, of which each rank has as many columns if their products are
    `summed`, else as many rows. A factor within 0.001 of 1 counts as 1. None too if the factors do
    not reproduce the recorded output.
    """
    wanted = found.output_without_bias.astype(np.float64)
    even = np.arange(len(found.x)) % 2 == 0
    if even.all():
        return None
    if summed:
        halves = zip(np.split(found.x, ranks, 1), np.split(w, ranks, 1), strict=True)
        parts = np.stack([x @ half.T for x, half in halves]).astype(np.float64)
        columns = parts[:, even].reshape(ranks, -1).T
        solved: Array = np.linalg.lstsq(columns, wanted[even].reshape(-1), rcond=None)[0]
    else:
        ours = (found.x @ w.T).astype(np.float64)
        pairs = list(zip(np.split(ours, ranks, 1), np.split(wanted, ranks, 1), strict=True))
        solved = np.array(
            [np.sum(x[even] * y[even]) / max(float(np.sum(x[even] ** 2)), 1e-300) for x, y in pairs]
        )
    # A number of few digits, if it fits as well, is what somebody meant, and one for all layers.
    rounded = np.array([float(f"{one:.4g}") for one in solved])
    near = np.abs(solved - 1) <= 1e-3
    for factors in (np.where(near, 1.0, rounded), np.where(near, 1.0, solved)):
        if (factors == 1).all() or not (factors == 1).any() or (np.abs(factors) < 1e-3).any():
            continue
        if summed:
            made = np.tensordot(factors, parts, 1)
        else:
            scaled = [x * factor for (x, _), factor in zip(pairs, factors, strict=True)]
            made = np.concatenate(scaled, 1)
        if rel_l2(made[~even], wanted[~even]) <= 3 * case.view.tolerance:
            return [float(one) for one in factors]
    return None


HYPOTHESES = (
    Hypothesis(
        "tensor_parallel",
        find_shard_counts,
        115,
        "the same values, some left out, before other values",
    ),
    Hypothesis(
        "tensor_parallel",
        find_sum_of_ranks,
        116,
        "a whole sum of ranks, before the same factor of a weight",
    ),
    Hypothesis(
        "tensor_parallel",
        find_rank_factors,
        117,
        "a factor of one rank's part, before factors of a weight's rows",
    ),
)
