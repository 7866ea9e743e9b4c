"""Required tensors that a conversion's source or output lacks: refused, or recorded."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from aprfmt.arch.required import collapsed
from aprfmt.completeness import RECORD, accepted_text, record, refuse_incomplete
from aprfmt.errors import ArchError, ConversionError
from aprfmt.names import compile_pattern
from aprfmt.tensor import Note

if TYPE_CHECKING:
    from aprfmt.conversion.metadata import Carried
    from aprfmt.conversion.options import Options
    from aprfmt.conversion.outputs import Plan
    from aprfmt.model import Model, Resolution


def check_complete(model: "Model", options: "Options", *, known: bool) -> None:
    """Refuse a model that lacks required tensors which neither it nor the user accepts.

    `known`: the architecture has to be known; else a model of an unknown one passes.
    """
    resolution = _resolution(model, options, known=known)
    if resolution is None:
        return
    found = resolution.coverage
    dropped = _matcher(options.drop)
    missing = tuple(key for key in found.missing if not dropped(key))
    left = replace(resolution, coverage=replace(found, missing=missing))
    refuse_incomplete(left, model.path, ConversionError)


def absent_roles(model: "Model", plan: "Plan", options: "Options") -> tuple[str, ...]:
    """Return the required roles that the output will lack, and say so in the plan's notes."""
    resolution = _resolution(model, options)
    if resolution is None:
        return ()
    found = resolution.coverage
    dropped = _matcher(options.drop)
    lost = {*found.accepted, *(key for key in found.missing if dropped(key))}
    lost |= _roles_of(resolution, plan)
    said = accepted_text(resolution)
    if said:
        plan.notes.append(Note("warning", str(model.path), said))
    return tuple(key for key in found.required if key in lost)


def _resolution(model: "Model", options: "Options", *, known: bool = False) -> "Resolution | None":
    """Return what the architecture makes of the model; None where nobody asks, or it is unknown."""
    if options.arch == "none" or not options.complete:
        return None
    try:
        return model.resolution
    except ArchError:
        if known:
            raise
        return None


def _matcher(patterns: Sequence[str]) -> Callable[[str], bool]:
    matchers = [compile_pattern(pattern) for pattern in patterns]
    return lambda key: any(match(key) for match in matchers)


def _roles_of(resolution: "Resolution", plan: "Plan") -> set[str]:
    """Return the roles of the outputs that were dropped, those of which a part is left too."""
    from aprfmt.arch.bind import bind

    if not plan.dropped or plan.style is None:
        return set()
    bound = bind(resolution.spec, plan.style, plan.dropped)
    return {key for group in bound.groups for key in group.roles} | set(bound.incomplete)


def record_absent(
    carried: "Carried", model: "Model", plan: "Plan", options: "Options"
) -> tuple[str, ...]:
    """Write into the output's metadata what it lacks on purpose; return the roles.

    A source's own record goes where nothing is missing any more.
    """
    resolution = _resolution(model, options)
    if resolution is None:
        return ()
    required = resolution.coverage.required
    if plan.absent:
        carried.metadata[RECORD] = record(plan.absent, required)
    else:
        carried.metadata.pop(RECORD, None)
    return collapsed(plan.absent, required)
