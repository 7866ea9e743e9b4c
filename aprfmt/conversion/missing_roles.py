"""Check for tensors that a conversion's source lacks or holds in impossible shapes.

Absences that were accepted are recorded in the output.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from aprfmt.arch.binding import bind_names
from aprfmt.arch.required_roles import collapse_roles
from aprfmt.base.protocols import Note
from aprfmt.conversion.options import Drops, Options
from aprfmt.errors import ArchError, ConversionError
from aprfmt.model import Model
from aprfmt.model.completeness import (
    RECORD,
    accepted_absences_text,
    missing_record,
    require_complete,
    require_shapes,
)

if TYPE_CHECKING:
    from aprfmt.conversion.metadata import CarriedMetadata
    from aprfmt.conversion.outputs import Plan
    from aprfmt.model.resolve import Resolution


def check_complete(
    model: Model, options: Options, drops: Drops, *, known: bool, copied: bool = False
) -> None:
    """Raise ConversionError if a required tensor is missing, or has a shape the config excludes.

    A missing tensor is accepted where the file records it as left out or the options allow it.
    `drops` say which roles --drop leaves out. With `known` an unknown architecture is an error,
    without it such a model is not checked. With `copied`, packed weights are copied, so that it
    does not matter whether they can be decoded.
    """
    resolution = _resolution(model, options, known=known)
    if resolution is None:
        if model.unread is not None and not copied:
            raise ConversionError(f"{model.path}: {model.unread.refusal}")
        return
    found = resolution.coverage
    missing = tuple(
        key
        for key in found.missing
        if not any(match(key) for match in drops)
        and not (copied and key in resolution.unread_roles)
    )
    misshapen = tuple(
        row
        for row in found.misshapen
        if not any(match(name) for match in drops for name in _names(resolution, row[0]))
        and not (copied and row[0] in resolution.unread_roles)
    )
    left = replace(resolution, coverage=replace(found, missing=missing, misshapen=misshapen))
    require_complete(left, model.path, ConversionError)
    require_shapes(left, model.path, ConversionError)


def check_stored_shapes(model: Model) -> None:
    """Raise ConversionError if a plain copy would hold tensors in shapes the config excludes.

    A model of an unknown architecture is not checked: nothing says which shapes its tensors need.
    """
    try:
        resolution = model.resolution
    except ArchError:
        return
    require_shapes(resolution, model.path, ConversionError)


def _names(resolution: "Resolution", key: str) -> tuple[str, ...]:
    """Return the role key and the names of the stored tensors of that role."""
    view = resolution.roles.get(key)
    return (key,) if view is None else (key, *view.names)


def missing_output_roles(
    model: Model, plan: "Plan", options: Options, drops: Drops
) -> tuple[str, ...]:
    """Return the required roles missing in the output, in the architecture's order.

    Those that were accepted are noted in the plan. () where the output's architecture is not known.
    """
    resolution = _resolution(model, options)
    if resolution is None:
        return ()
    found = resolution.coverage
    lost = {*found.accepted, *(key for key in found.missing if any(match(key) for match in drops))}
    lost |= _dropped_roles(resolution, plan)
    accepted = accepted_absences_text(resolution)
    if accepted:
        plan.notes.append(Note("warning", str(model.path), accepted, "accepted_missing"))
    return tuple(key for key in found.required if key in lost)


def _resolution(model: Model, options: Options, *, known: bool = False) -> "Resolution | None":
    """Return how the model's tensor names map to roles; None if that is not to be checked.

    It is None too for an unknown architecture; with `known` that raises ArchError instead.
    """
    if options.arch == "none" or not options.complete:
        return None
    try:
        return model.resolution
    except ArchError:
        if known:
            raise
        return None


def _dropped_roles(resolution: "Resolution", plan: "Plan") -> set[str]:
    """Return the roles of which the plan drops a tensor, or one of several tensors."""
    if not plan.dropped or plan.style is None:
        return set()
    bound = bind_names(resolution.spec, plan.style, plan.dropped)
    return {key for group in bound.groups for key in group.roles} | set(bound.incomplete)


def record_missing_roles(
    carried: "CarriedMetadata", model: Model, plan: "Plan", options: Options
) -> tuple[str, ...]:
    """Record in the output's metadata the roles missing on purpose, and return them.

    `carried` is that metadata, `plan` lists the roles that it leaves out. A role missing in all
    layers that require it is returned once, without a layer. The source's own record is removed if
    nothing is missing any more.
    """
    resolution = _resolution(model, options)
    if resolution is None:
        return ()
    required = resolution.coverage.required
    if plan.absent:
        carried.metadata[RECORD] = missing_record(plan.absent, required)
    else:
        carried.metadata.pop(RECORD, None)
    return collapse_roles(plan.absent, required)
