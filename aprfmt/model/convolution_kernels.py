"""Finds kernels of convolutions that are stored in another shape than readers look for.

Exporters write the kernels [out, in, height, width] of a convolution as the matrix [out, in *
height * width] that a product takes, or that matrix transposed, and MLX has the input channels
last.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from aprfmt.arch.layout_steps import ChannelsLast, Reshaped, Transposed
from aprfmt.errors import ArchError
from aprfmt.model.relations import Relation, opening_path
from aprfmt.model.renames import command_line

if TYPE_CHECKING:
    from aprfmt.arch.binding import BoundGroup, BoundNames
    from aprfmt.arch.spec import ArchSpec, Array, HyperParams

Shape = tuple[int, ...]
KernelSteps = tuple[ChannelsLast | Reshaped | Transposed, ...]
_EXPERTS = "_exps."  # in the role of matrices that are stacked, and no kernels
_LEAST = 3  # axes of a kernel over one dimension


def reshape_kernels(
    spec: "ArchSpec",
    bound: "BoundNames",
    shapes: Mapping[str, Shape],
    hyper: "HyperParams",
    path: Path,
    mlx: bool,
) -> "tuple[BoundNames, tuple[Relation, ...]]":
    """Return (bound names, relations), with kernels of another shape read in the config's shape.

    `shapes` are the stored shapes by name. `mlx` says that MLX wrote the file: its readers expect
    the input channels last, and no relation mentions it.
    """
    made: list[BoundGroup] = []
    found: dict[str, list[tuple[str, Shape, Shape]]] = {}
    for group in bound.groups:
        stored, wanted = shapes.get(group.stored[0], ()), _kernel_shape(spec, group, hyper)
        steps = kernel_steps(stored, wanted)
        if steps:
            group = replace(group, binding=replace(group.binding, steps=steps))
            kind = type(steps[0]).__name__
            found.setdefault(kind, []).append((group.stored[0], stored, wanted))
        made.append(group)
    if not found:
        return bound, ()
    said = [kind for kind in found if not (mlx and kind == ChannelsLast.__name__)]
    relations = tuple(_kernel_relation(_WORDS[kind], found[kind], path) for kind in said)
    return replace(bound, groups=tuple(made)), relations


def kernel_steps(stored: Shape, wanted: Shape) -> KernelSteps:
    """Return the layout steps from a kernel's stored shape to the wanted one; () if there are none.

    There are none for equal shapes, for fewer than three wanted axes, and for shapes that are
    neither channels-last nor flattened. A square matrix is taken for [out, in * size].
    """
    if len(wanted) < _LEAST or stored == wanted or len(stored) < 2:
        return ()
    if stored == ChannelsLast().stored_shapes([wanted], {}, 1)[0]:
        return (ChannelsLast(),)
    flat = (wanted[0], math.prod(wanted[1:]))
    parted = Reshaped(tuple(map(str, wanted)), tuple(map(str, flat)))
    if stored == flat:
        return (parted,)
    return (Transposed(), parted) if stored == flat[::-1] else ()


def undo_steps(steps: KernelSteps, stored: "Array") -> "Array":
    """Return a stored kernel's values in the shape that these steps lead to."""
    for step in steps:
        stored = step.undo([stored], {})[0]
    return stored


def _kernel_shape(spec: "ArchSpec", group: "BoundGroup", hyper: "HyperParams") -> Shape:
    """Return the shape that the config asks of a group's kernel; () if the group is no kernel.

    A kernel is one stored tensor of one role, which has no layout steps yet.
    """
    from aprfmt.arch.required_roles import logical_shape

    if len(group.stored) > 1 or len(group.roles) > 1 or group.binding.steps:
        return ()
    if _EXPERTS in group.roles[0]:
        return ()
    try:
        return logical_shape(spec, group.roles[0], hyper)
    except (ArchError, KeyError):
        return ()


_WORDS: Mapping[str, str] = {  # first step -> how a kernel is stored
    "Reshaped": "as a matrix [out, in * size], readers expect [out, in, size]: flattened",
    "Transposed": (
        "as a matrix [in * size, out], readers expect [out, in, size]: flattened, transposed"
    ),
    "ChannelsLast": "with the input channels last, as MLX has them, readers expect them second",
}


def _kernel_relation(how: str, found: list[tuple[str, Shape, Shape]], path: Path) -> Relation:
    """Return the Relation that says which kernels have another shape, and the convert command.

    `how` says how they are stored, `found` are (name, stored shape, shape that readers look for).
    """
    many = "1 kernel is" if len(found) == 1 else f"{len(found)} kernels are each"
    examples = tuple((f"{name} {list(has)}", f"{list(wanted)}") for name, has, wanted in found)
    where = tuple(name for name, _, _ in found)
    remedy = command_line("convert", opening_path(path), "OUT")
    return Relation("kernels", f"{many} stored {how}", where, examples, remedy)
