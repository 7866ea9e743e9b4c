"""Kernels that a file of MLX's holds in torch's order, with their input channels second.

MLX's converters store the input channels last and its convolutions read them so. Some loaders turn
a kernel of torch's order first, others take it as it is.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from aprfmt.base.sequences import join_first
from aprfmt.causes.row import Cause
from aprfmt.measure.alignment import TensorPair
from aprfmt.measure.findings import Finding
from aprfmt.measure.records import EQUAL, TensorDiff
from aprfmt.model import Model
from aprfmt.tensors.view import View

CAUSE_ROWS = (
    Cause(
        "torch_layout", "tensor", "bug",
        "A file states that MLX wrote it and has kernels of convolutions in torch's order, whose "
        "loaders look for the input channels last.",
        "The same values in the same order as in a file of torch's, and `format` says MLX.",
        "Nothing is made again: a loader may turn the kernels by itself.",
        next="nothing", most="located",
    ),
)  # fmt: skip

STACKS = ("expert", "_exps", "switch_mlp", "switch_glu")  # in names of stacked experts
_KERNEL = "conv"  # in the name of a kernel over one dimension
_LEAST = 3  # axes of a kernel over one dimension, as many as of a stack of matrices
_SHOWN = 2


def is_of_mlx(model: Model) -> bool:
    """Return whether a file states that MLX wrote it, whose kernels have the channels last."""
    return model.metadata.get("format") == "mlx"


def torch_kernel_findings(
    a: Model, b: Model, pairs: Sequence[TensorPair], rows: Sequence[TensorDiff]
) -> Iterator[Finding]:
    """Yield at most one finding: an MLX file has convolution kernels in torch's order of channels.

    `rows` are the comparisons of `pairs`, in the same order. Exactly one of the two files must be
    MLX's; a kernel counts if it equals the other file's as it is stored. Kernels of a known role
    are left out, since readers of the architecture put either order right.
    """
    of_a = is_of_mlx(a)
    if of_a == is_of_mlx(b):
        return
    side = "A" if of_a else "B"
    keys: list[str] = []
    names: list[str] = []
    for pair, row in zip(pairs, rows, strict=True):
        mine = pair.a if of_a else pair.b
        alike = row.verdict in EQUAL or row.verdict == "WITHIN"
        if alike and mine is not None and _has_torch_order(mine, row):
            keys.append(row.key)
            names += mine.names
    if not names:
        return
    many = "1 kernel" if len(keys) == 1 else f"{len(keys)} kernels"
    yield Finding(
        "torch_layout",
        f"{side} states that MLX wrote it and has {many} in torch's order, with the input "
        f"channels second: {join_first(names, _SHOWN)}; MLX's convolutions read them last, so "
        f"{'it is' if len(keys) == 1 else 'they are'} wrong unless the loader turns them",
        "tensor",
        "bug",
        tuple(keys),
        False,
        side=side,
        keys=tuple(keys),
    )


def _has_torch_order(kernel: View, row: TensorDiff) -> bool:
    """Return whether a tensor of an MLX file is a kernel in torch's order, input channels second.

    `row` is its comparison with the other file's. False for a stack of experts, for a kernel whose
    values are the same in both orders, and where the two equal window sizes come before the
    channels, as MLX has them: then the other file is wrong.
    """
    shape = kernel.shape
    if kernel.role is not None or row.shape_a != row.shape_b or len(shape) < _LEAST:
        return False
    names = (row.key, *kernel.names)
    if any(word in name for name in names for word in STACKS):
        return False
    if len(shape) == _LEAST and not any(_KERNEL in name for name in names):
        return False
    if len(shape) > _LEAST and len({*shape[1:-1]}) == 1 < len({*shape[2:]}):
        return False
    if (shape[0], *shape[2:], shape[1]) != shape:
        return True
    values = kernel.numpy()
    kernel.drop()
    return not np.array_equal(values, np.moveaxis(values, 1, -1), equal_nan=True)
