"""Tensors with the other side's values in another shape: axes joined, or channels last.

A and B are the two files that are compared; a *side* is one of them, or its tensor. A *guess* is a
change of one tensor of a pair after which both should be equal.
"""

from collections.abc import Iterator, Mapping

import numpy as np

from aprfmt.causes.row import Cause
from aprfmt.causes.tensor.differing_pair import DifferingPair
from aprfmt.causes.tensor.flat_shards import is_run, matrix_values
from aprfmt.causes.tensor.guess import Guess, PairHypothesis
from aprfmt.causes.tensor.kernel_orders import STACKS, is_of_mlx
from aprfmt.causes.tensor.proof import FEW, make_finding, prove_values
from aprfmt.measure.findings import Finding
from aprfmt.model.convolution_kernels import kernel_steps

CAUSE_ROWS = (
    Cause(
        "stored_shape", "tensor", "bug",
        "A tensor is stored in another shape than readers look for: a kernel flattened to the "
        "matrix of a product, or with its input channels last; axes joined, of a stack or all.",
        "Shapes of as many elements, of which one has the other's axes joined, or in MLX's order.",
        "In the other shape all values are the other side's.",
    ),
    Cause(
        "mlx_layout", "tensor", "same",
        "A kernel has its input channels last, as readers of MLX look for it.",
        "Shapes of as many elements, and the file says that MLX wrote it (`format`).",
        "With the input channels second all values are the other side's.",
    ),
)  # fmt: skip

LARGEST = 1 << 26  # elements of a kernel that is laid out anew in memory
_WORDS: Mapping[
    str, str
] = {  # first step from this shape to the other -> how a side has the kernel
    "ChannelsLast": "has the input channels last",
    "Transposed": "has it flattened to a matrix, and transposed",
}


def explain_stored_shape(case: DifferingPair) -> Iterator[Guess | Finding]:
    """Yield the guess or finding that one side is the other reshaped.

    Axes are joined, or a kernel has its channels last. Nothing for two matrices. A vector is only
    compared in order, for it shows no kernel's layout.
    """
    a, b = case.a, case.b
    fewer, more = sorted(len(side.shape) for side in (a, b))
    if a.size != b.size or fewer == more == 2 or more < 2:
        return
    said = f"all values of B are A's, of shape {list(b.shape)} for {list(a.shape)}"
    if is_run(b, a, 0, 0, a.size, case.slack()):
        says = (f"{said}, in the same order: axes were joined or parted",)
        proof = prove_values(matrix_values(a, 0, min(a.size, FEW)), a.size, 0, case.slack())
        yield make_finding("stored_shape", (case.key,), says, None, 0.0, proof)
    elif fewer > 1 and a.size <= LARGEST:
        yield from _guess_kernel(case, said)


def _guess_kernel(case: DifferingPair, said: str) -> Iterator[Guess]:
    """Yield the guess that a convolution's kernel has the other side's axes in another order.

    Nothing where only its axes were joined, where no known order has these shapes, and for three
    axes of which the files do not say whose order is MLX's. `said` is the beginning of the
    sentence.
    """
    away, back = (
        kernel_steps(case.b.shape, case.a.shape),
        kernel_steps(case.a.shape, case.b.shape),
    )
    if away and back:  # one axis and the channels: either side may have them last
        if not may_be_mlx_kernel(case):
            return
        away, back = ((), back) if _is_of_mlx(case, "A") else (away, ())
    values = case.b.take(np.arange(case.b.rows)).reshape(case.b.shape)
    for step in away:
        values = step.undo([values], {})[0]
    for step in reversed(back):
        values = step.apply([values], {})[0]
    how = _WORDS.get(str((away or back or ("",))[0]))
    if how is None:  # of a flat kernel as it is, the run of values is judged
        return
    rows = np.ascontiguousarray(values).reshape(case.a.rows, case.a.columns)
    side, other = ("B", "A") if away else ("A", "B")
    mlx = how == _WORDS["ChannelsLast"] and _is_of_mlx(case, side) and not _is_of_mlx(case, other)
    cause = "mlx_layout" if mlx else "stored_shape"
    says = (f"{said}: {side} {how}",)
    yield case.guess(cause, says, "B", lambda numbers: rows[numbers])


def may_be_mlx_kernel(case: DifferingPair) -> bool:
    """Return whether a tensor of three axes may be a kernel of which one file has MLX's order.

    One file alone says that MLX wrote it. Stacks of experts have three axes as well, and the same
    order in both.
    """
    names = (case.key, *case.a.side.names, *case.b.side.names)
    stacked = any(word in name for name in names for word in STACKS)
    alone = _is_of_mlx(case, "A") != _is_of_mlx(case, "B")
    return len(case.a.shape) == 3 and alone and not stacked


def _is_of_mlx(case: DifferingPair, label: str) -> bool:
    """Return whether side "A" or "B" states that MLX wrote it, whose kernels have channels last."""
    return is_of_mlx(case.context.models[label.lower()])


HYPOTHESES = (
    PairHypothesis(
        ("stored_shape", "mlx_layout"),
        explain_stored_shape,
        147,
        "two shapes of as many elements, before an order of rows",
        shapes=True,
    ),
)
