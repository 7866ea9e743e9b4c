"""Hypotheses about recurrent layers: order of value heads, direction of kernels, A_log.

A and B are the two files that are compared; a *side* is one of them, or its tensor. A *guess* is a
change of one tensor of a pair after which both should be equal.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from aprfmt.arch.grouped_rows import Tiled
from aprfmt.arch.recurrent_steps import NegativeExp
from aprfmt.causes.row import Cause
from aprfmt.causes.tensor.differing_pair import DifferingPair
from aprfmt.causes.tensor.guess import Finding, Guess, PairHypothesis
from aprfmt.causes.tensor.proof import make_finding, prove_values
from aprfmt.errors import ArchError
from aprfmt.measure.numbers import to_float64
from aprfmt.measure.row_reader import RowReader

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array

CAUSE_ROWS = (
    Cause(
        "value_heads", "tensor", "bug",
        "The value heads of a delta net stand key head by key head on one side, and with the key "
        "heads running fastest on the other, as in a GGUF of qwen3_5.",
        "Equal multiset of blocks of a value head's rows (of the output: columns).",
        "Putting the value heads in the other order makes the tensors equal.",
    ),
    Cause(
        "tap_order", "tensor", "bug",
        "The kernels of a short convolution run the other way: the first tap is the last.",
        "Every kernel holds the other side's values in reverse.",
        "Reversing every kernel makes the tensors equal.",
    ),
)  # fmt: skip

_KEYS = "2*delta_key_heads*delta_key_dim"
_HEAD = Tiled("1")
# Roles with an axis of value heads, and how a GGUF of qwen3_5 has them along it.
TILED: Mapping[str, Tiled] = {
    "attn_qkv.weight": Tiled("delta_value_dim", _KEYS),
    "attn_gate.weight": Tiled("delta_value_dim"),
    "ssm_conv1d.weight": Tiled("delta_value_dim", _KEYS),
    "ssm_out.weight": Tiled("delta_value_dim", axis=1),
    "ssm_beta.weight": _HEAD, "ssm_alpha.weight": _HEAD, "ssm_a.weight": _HEAD,
    "ssm_dt.bias": _HEAD,
}  # fmt: skip
FEWEST = 3  # rates that show what a file holds
KERNELS = ("ssm_conv1d.weight", "shortconv.conv.weight")


def explain_initial_rates(case: DifferingPair) -> Iterator[Finding]:
    """Yield the finding that one side's A_log (Mamba) is still the initial log(1), log(2), ...

    The numbers count the states in every row of Mamba's [width, states], and the heads of Mamba-2.
    """
    if case.role != "ssm_a.weight" or case.numbers is not None or case.a.rows != case.b.rows:
        return
    import numpy as np

    for label, side in (("B", case.b), ("A", case.a)):
        values = side.take(np.arange(side.rows)).reshape(side.rows, -1)
        where = " in every row" if values.shape[1] > 1 else ""
        rates = values if where else values.reshape(1, -1)
        if rates.shape[1] > 2 and np.allclose(
            rates, np.log(np.arange(1, rates.shape[1] + 1)), 1e-2
        ):
            text = f"{label} holds log(1), log(2), ...{where}: what training begins with"
            yield make_finding(
                "stale_tensor",
                (case.key,),
                (f"{text}, never filled",),
                case.before.relative,
                None,
                None,
                confirmed=False,
            )
            return


def explain_unconverted_rates(case: DifferingPair) -> Iterator[Finding]:
    """Yield the finding that a side's file holds no decay rates where its format stores them.

    A GGUF stores -exp(A_log). It may hold A_log itself, or exp(A_log): read as rates, these are
    mostly NaN, and NaN tells nothing of what the file holds.
    """
    if case.numbers is not None or case.a.shape != case.b.shape:
        return
    import numpy as np

    slack = 4 * case.slack(moved=False) + 1e-5
    for label, mine, right in (("B", case.b, case.a), ("A", case.a, case.b)):
        stored, logs = _stored_rates(mine), to_float64(right.whole).reshape(-1)
        if stored is None or len(logs) < FEWEST or not np.isfinite(logs).all():
            continue
        for what, made in (
            ("the logarithms of the decay rates, not the rates", logs),
            ("the decay rates without their sign", np.exp(logs)),
        ):
            if np.allclose(stored, made, slack, slack):
                text = f"{label} stores {what}: its format stores minus their exponentials"
                proof = prove_values(logs, len(logs), 0, slack)
                before = case.before.relative
                yield make_finding("function_of", (case.key,), (text,), before, 0.0, proof)
                return


def _stored_rates(reader: RowReader) -> "Array | None":
    """Return the values of a side's file in the logical order, before their logarithm is taken.

    None where the file stores the logarithms.
    """
    group = reader.side.group
    if group is None:
        return None
    steps = tuple(step for step in group.binding.steps if not isinstance(step, NegativeExp))
    if len(steps) == len(group.binding.steps):
        return None
    plain = replace(group, binding=replace(group.binding, steps=steps))
    return to_float64(reader.side.in_group(plain).numpy()).reshape(-1)


def guess_value_head_order(case: DifferingPair) -> Iterator[Guess]:
    """Yield guesses that one file stores the value heads of a delta net in tiled order.

    There the key heads vary fastest; the other file has each key head's value heads together.
    """
    step, a, b = TILED.get(case.role), case.a, case.b
    if step is None or not case.context.hyper or (a.rows, a.columns) != (b.rows, b.columns):
        return
    try:
        count = a.columns if step.axis else a.rows
        orders = list(_value_head_orders(step, count, case.context.hyper[0]))
    except ArchError:  # no delta nets, or of other sizes
        return
    for side, order in orders:
        text = f"{side} has the value heads tiled, the key heads running fastest"

        def moved(rows: "Array", order: "Array" = order) -> "Array":
            """Return rows of A with the delta net's value heads in `order`.

            `rows` are row numbers.
            """
            return a.take(rows)[:, order] if step.axis else a.take(order[rows])

        yield case.guess("value_heads", (text,), "A", moved)


def _value_head_orders(
    step: Tiled, count: int, hp: Mapping[str, object]
) -> Iterator[tuple[str, "Array"]]:
    """Yield (file that is tiled, order): row or column i of B is number order[i] of A.

    `count` is how many rows or columns `step` reorders. Nothing if both orders are equal.
    """
    import numpy as np

    along = Tiled(step.size, step.before)
    every = np.arange(count)
    tiled, grouped = along.apply([every], hp)[0], along.undo([every], hp)[0]
    if not np.array_equal(tiled, every):
        yield "B", tiled
        yield "A", grouped


def guess_tap_order(case: DifferingPair) -> Iterator[Guess]:
    """Yield the guess that every kernel of a convolution is reversed."""
    a, b = case.a, case.b
    if case.role not in KERNELS or (a.rows, a.columns) != (b.rows, b.columns) or a.columns < 2:
        return
    text = "every kernel of B is A's from the last tap to the first"
    yield case.guess("tap_order", (text,), "A", lambda rows: a.take(rows)[:, ::-1])


HYPOTHESES = (
    PairHypothesis(
        ("function_of",),
        explain_unconverted_rates,
        54,
        "what the file holds, before values that its reading made NaN",
        roles=("ssm_a.weight",),
    ),
    PairHypothesis(
        ("stale_tensor",),
        explain_initial_rates,
        55,
        "values that an initialisation gives, before what fits numbers",
        roles=("ssm_a.weight",),
    ),
    PairHypothesis(
        ("value_heads",),
        guess_value_head_order,
        58,
        "one known order, before damage of the few bytes that it moves in a vector",
        roles=("attn_qkv.", "attn_gate.", "ssm_"),
    ),
    PairHypothesis(
        ("tap_order",),
        guess_tap_order,
        140,
        "one known order, before any order of columns",
        roles=KERNELS,
    ),
)
