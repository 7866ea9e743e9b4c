"""How a command repairs B, as the rows of the table of causes say it.

A and B are the two models that are compared. A cause is given by its name, "" for a difference
without a cause.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from aprfmt.causes import find_cause

if TYPE_CHECKING:
    from aprfmt.causes.row import Weights
    from aprfmt.measure.findings import Finding
    from aprfmt.model import Model


def has_weights(cause: str, kind: "Weights") -> bool:
    """Return whether a cause says of B's weights that they are of this kind (`Cause.weights`)."""
    row = find_cause(cause)
    return row is not None and row.weights == kind


def is_lost(cause: str, values: Mapping[str, Any]) -> bool:
    """Return whether only A has what stood in B, by the cause and the `values` of its finding."""
    row = find_cause(cause)
    if row is None:
        return False
    return row.weights == "lost" or (row.is_lost is not None and row.is_lost(values))


def is_repaired_by_rewriting(
    cause: str, confirmed: bool, values: Mapping[str, Any] | None = None
) -> bool:
    """Return whether B's tensors with this cause are repaired by writing B again from A.

    They are not if the cause is only located, unless only A has what stood there. `values` are the
    finding's.
    """
    return confirmed or is_lost(cause, values or {})


def is_trained_part(cause: str, a: "Model | None", b: "Model | None") -> bool:
    """Return whether what the cause speaks of was trained in B, so that A's does not replace it.

    False where a model is not known.
    """
    row = find_cause(cause)
    if row is None or row.is_trained is None or a is None or b is None:
        return False
    return row.is_trained(a, b)


def trained_command(b: "Model | None", finding: "Finding", pair: str) -> str:
    """Return the next command for what B, trained further than A, may have changed on purpose.

    "" where the usual command applies, and where B is no model. `pair` are A and B as quoted
    arguments.
    """
    row = find_cause(finding.cause)
    if row is None or row.trained_command is None or b is None:
        return ""
    return row.trained_command(b, finding, pair)
