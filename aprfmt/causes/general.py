"""Causes that several kinds of evidence show, such as NaN or tensors under other names."""

from collections.abc import Mapping, Sequence
from typing import Any

from aprfmt.base.sequences import join_first
from aprfmt.causes.row import Cause
from aprfmt.measure.findings import Finding
from aprfmt.measure.proofs import unfitted_proof


def is_odd_in_both(values: Mapping[str, Any]) -> bool:
    """Return whether each NaN and infinity of A is in B too, so that A has no damage of its own.

    `values` are a finding's: {"nonfinite": {tensor: counts}}. False where they name no tensor.
    """
    odd = values.get("nonfinite") or {}
    return bool(odd) and all(one["a"] == one["both"] for one in odd.values())


CAUSE_ROWS = (
    Cause(
        "none", "identity", "same",
        "Nothing differs.",
        "Every compared value is equal.",
        "Nothing to confirm.",
        next="nothing",
    ),
    Cause(
        "nonfinite", "tensor", "bug",
        "A NaN or an infinity on one side, where the other holds a number: damage, an overflow, or "
        "an operation that divides by nothing.",
        "A value of one side that is not finite, in a tensor or at a capture point; index and "
        "count are said.",
        "All other values of the tensor or point are equal, or within its bound; or a detour by "
        "another type gives just these.",
        next="stored",
        is_lost=is_odd_in_both,
    ),
    Cause(
        "tensor_names", "tensor", "bug",
        "Tensors stand under other names than readers look for: a prefix, a component, numbers of "
        "layers, or the names of another container.",
        "Tensors that the configuration demands are missing, and as many without a role are "
        "there.",
        "Under one rename every demanded tensor is there, of its shape.",
    ),
    Cause(
        "missing_tensors", "tensor", "bug",
        "One side lacks weights that a pass reads and the other has.",
        "A role of the architecture on one side only, under no other name and not packed.",
        "The names of both files say it; the tensors that both have are compared.",
        next="again",
    ),
    Cause(
        "equal_function", "tensor", "same",
        "Weights and numbers of the configuration differ, and together they compute the same "
        "function: a factor of the configuration stands in a weight, heads are repeated where "
        "their count says so.",
        "Several changes, each of which makes another model, and equal logits.",
        "Passes with all of them agree within rounding on every token tried, and with one alone "
        "they do not.",
        next="nothing",
    ),
    Cause(
        "extra_tensor", "tensor", "same",
        "One side stores a tensor that nothing of the architecture reads.",
        "A name on one side only that is no role; everything else is compared without it.",
        "The forward pass does not ask for it.",
        next="nothing",
    ),
)  # fmt: skip


def missing_tensors_finding(lost: Sequence[str]) -> Finding:
    """Return the finding that B lacks the tensors of these keys, of which there is at least one."""
    return Finding(
        "missing_tensors",
        f"B lacks {len(lost)} of the tensors: {join_first(lost, 4)}",
        "tensor",
        "bug",
        tuple(lost),
        True,
        side="B",
        proof=unfitted_proof(len(lost)),
    )
