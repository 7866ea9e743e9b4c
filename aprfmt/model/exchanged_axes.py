"""Finds weights whose last two axes are stored exchanged, by their shapes.

A *group* is roles that a file stores together, as one tensor or several.

Trainers and exporters write stacked experts as [experts, in, out] and matrices as [in, out]. Where
the two sizes are equal no shape tells; then only a comparison of values does.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from aprfmt.arch.layout_steps import Transposed, TransposedEach
from aprfmt.arch.required_roles import shapes_fit
from aprfmt.model.relations import Relation, opening_path
from aprfmt.model.renames import command_line

if TYPE_CHECKING:
    from aprfmt.arch.binding import BoundGroup, BoundNames
    from aprfmt.arch.spec import ArchSpec, HyperParams

Shape = tuple[int, ...]
_LEAST = 2  # tensors that must fit only when turned: one alone may be damaged in another way


def exchange_axes(
    spec: "ArchSpec",
    bound: "BoundNames",
    shapes: Mapping[str, Shape],
    hyper: "HyperParams",
    path: Path,
) -> "tuple[BoundNames, tuple[Relation, ...]]":
    """Return (bound names, relations), with last axes exchanged where the shapes fit only so.

    `shapes` are the stored shapes by name. Nothing is exchanged where fewer than two tensors need
    it: then `bound` is returned unchanged with no relation.
    """
    made: list[BoundGroup] = []
    found: list[tuple[str, Shape]] = []
    published = "[out, in]"
    for group in bound.groups:
        straight = [shapes.get(name, ()) for name in group.stored]
        steps = (TransposedEach(), *group.binding.steps)
        other = replace(group, binding=replace(group.binding, steps=steps))
        matrices = all(len(shape) > 1 for shape in straight)
        if matrices and not shapes_fit(spec, group, straight, hyper):
            if shapes_fit(spec, other, straight, hyper):
                if any(isinstance(step, Transposed) for step in group.binding.steps):
                    published = "[in, out]"
                found += zip(group.stored, straight, strict=True)
                made.append(other)
                continue
        made.append(group)
    if len(found) < _LEAST:
        return bound, ()
    return replace(bound, groups=tuple(made)), (_axes_relation(found, published, path),)


def _axes_relation(found: list[tuple[str, Shape]], published: str, path: Path) -> Relation:
    """Return the Relation that says which weights have exchanged axes, and the convert command.

    `found` are (name, stored shape). `published` is the order readers expect, such as "[out, in]".
    """
    other = "[in, out]" if published == "[out, in]" else "[out, in]"
    stacked = any(len(shape) > 2 for _, shape in found)
    right, wrong = (f"[experts, {each[1:]}" if stacked else each for each in (published, other))
    says = f"{len(found)} weights are stored as {wrong}, readers expect {right}: transposed"
    examples = tuple(
        (f"{name} {list(shape)}", f"{[*shape[:-2], shape[-1], shape[-2]]}") for name, shape in found
    )
    where = tuple(name for name, _ in found)
    return Relation(
        "axes", says, where, examples, command_line("convert", opening_path(path), "OUT")
    )
