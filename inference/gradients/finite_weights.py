"""Refusal of weights of before a step that are NaN or infinite: nothing is said of their step."""

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.errors import UsageError

if TYPE_CHECKING:
    from aprfmt.model import Model
    from aprfmt.tensors.view import View

CHUNK = 1 << 21  # elements that are read at once
EXPECTED = "expected finite numbers: no gradient and no step can be computed of others"


def nonfinite_text(count: int, size: int) -> str:
    """Return "COUNT of its SIZE numbers are NaN or infinite", the clause on a tensor."""
    return f"{count} of its {size} numbers are NaN or infinite"


def check_finite_base(model: "Model") -> None:
    """Raise UsageError if a weight of a model is not finite.

    The message names the first such tensor, and counts its numbers that are NaN or infinite.
    """
    for view in model.roles.values():
        count = _count_in(view)
        if count:
            text = nonfinite_text(count, int(np.prod(view.shape)))
            raise UsageError(f"{model.path}: {' + '.join(view.names)}: {text}; {EXPECTED}")


def check_finite_before(view: "View", values: NDArray[Any]) -> None:
    """Raise UsageError if `values`, some rows of a parameter before the step, are not finite.

    `view` is the whole parameter, in which the message counts the NaN and infinite numbers.
    """
    if np.isfinite(values).all():
        return
    name = " + ".join(view.names)
    text = nonfinite_text(_count_in(view), int(np.prod(view.shape)))
    raise UsageError(f"{name}: before the step {text}; {EXPECTED}")


def _count_in(view: "View") -> int:
    """Return how many numbers of a tensor are NaN or infinite; its mapped pages are released."""
    count = 0
    for _, _, values in view.chunks(CHUNK):
        count += int(np.count_nonzero(~np.isfinite(values)))
        view.drop()
    return count
