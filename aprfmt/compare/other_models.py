"""Signs that two models are different ones, not two copies of one."""

from collections.abc import Sequence

from aprfmt.causes.remedies import has_weights
from aprfmt.causes.tensor.token_tables import is_token_table
from aprfmt.measure.records import EQUAL, TensorDiff
from aprfmt.model import Model

_SIZES = ("hidden_size", "n_layers", "vocab_size", "n_experts")
_FAR = 0.05  # relative L2 beyond which a tensor that nothing explains is another one


def other_model_sentence(a: Model, b: Model, rows: Sequence[TensorDiff]) -> str:
    """Return by what A and B are different models: sizes, block specs, no equal tensor; else "".

    `rows` are all their tensors, explained. What holds of single tensors of two such models says
    nothing of how one was made from the other.
    """
    if not a.hyper or not b.hyper:
        return ""
    other = [
        name
        for name in _SIZES
        if a.hyper[name] != b.hyper[name]
        and not (name == "vocab_size" and explains_vocabulary_size(rows))
    ]
    if other:
        sizes = ", ".join(f"{name} {a.hyper[name]} and {b.hyper[name]}" for name in other)
        return f"these are models of other sizes: {sizes}"
    if any(row.verdict in EQUAL for row in rows):
        return ""
    if a.spec.block != b.spec.block:
        return f"A is {a.spec.name}, B {b.spec.name}: other blocks, and no tensor in common"
    matched = sum(row.verdict not in ("ONLY_IN_A", "ONLY_IN_B") for row in rows)
    if matched and _is_other_training(rows):
        return (
            f"none of {matched} tensors is equal or explained: these are two checkpoints, not two "
            "copies of one"
        )
    return ""


def explains_vocabulary_size(rows: Sequence[TensorDiff]) -> bool:
    """Return whether two vocabulary sizes can belong to copies of one model.

    The sizes are read from the lengths of token tables, of which one may be padded, cut, or one
    rank's share.
    """
    return differ_in_tables_alone(rows) or _are_parts_of_ranks(rows)


def _are_parts_of_ranks(rows: Sequence[TensorDiff]) -> bool:
    """Return whether all tensors of two shapes are confirmed as a rank's share or ranks' copies.

    False where no tensor has two shapes.
    """
    shaped = [row for row in rows if row.verdict == "SHAPE_DIFFERS"]
    return bool(shaped) and all(
        row.explanation is not None
        and row.explanation.confirmed
        and has_weights(row.explanation.cause, "rank")
        for row in shaped
    )


def differ_in_tables_alone(rows: Sequence[TensorDiff]) -> bool:
    """Return whether the only tensors of different shapes are token tables of different lengths.

    The rows that both tables have can then be compared. False where each of these tables differs
    without an explanation and no other tensor is equal: these may be two models.
    """
    shaped = [row for row in rows if row.verdict == "SHAPE_DIFFERS"]
    if not shaped or not all(is_token_table(row.key, row.shape_a, row.shape_b) for row in shaped):
        return False
    return all(row.explanation is not None for row in shaped) or any(
        row.verdict in EQUAL for row in rows
    )


def _is_other_training(rows: Sequence[TensorDiff]) -> bool:
    """Return whether over 80 % of the tensors differ, unexplained, as in two training runs.

    False for one or two tensors in common.
    """
    both = [row for row in rows if row.verdict not in ("ONLY_IN_A", "ONLY_IN_B")]
    strange = [
        row
        for row in both
        if row.verdict in ("DIFFERENT", "SHAPE_DIFFERS")
        and (row.explanation is None or not row.explanation.confirmed)
        and (row.stats is None or row.stats.rel_l2 > _FAR)
    ]
    return len(strange) > 0.8 * len(both) and len(both) > 2
