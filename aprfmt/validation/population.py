"""Checks against the architecture: is every tensor there, of its shape, and plausible."""

import math
from typing import TYPE_CHECKING

from aprfmt.errors import ArchError
from aprfmt.validation.report import Finding, NotRun, Result

if TYPE_CHECKING:
    from aprfmt.arch.spec import ArchSpec
    from aprfmt.tensors.stats import Stats
    from aprfmt.tensors.view import View
    from aprfmt.validation.context import Context


def architecture(ctx: "Context") -> Result:
    """Check that names and keys fit the tables of the architecture the file names."""
    name = ctx.spec.name
    try:
        resolution = ctx.model.resolution
    except ArchError as error:
        found = str(error).removeprefix(f"{ctx.where}: ")
        finding = Finding(ctx.where, found, f"tensors and keys of {name}", "see --arch")
        return Result(name, [finding])
    return Result(f"{name}, {len(resolution.roles)} roles")


def completeness(ctx: "Context") -> Result:
    """Check that every tensor the configuration demands is there, biases and head included."""
    found = ctx.resolution.coverage
    expected = f"all {found.expected} tensors of the configuration"
    findings = [
        Finding(key, "missing", expected,
                "get the file again, correct the configuration, or accept it: --allow-missing ROLE")
        for key in found.missing
    ]  # fmt: skip
    findings += [
        Finding(key, "missing, and accepted as such", expected, level="warning")
        for key in found.accepted
    ]
    tied = " (the head is the embedding)" if ctx.resolution.hyper["tied_embeddings"] else ""
    return Result(f"{found.found} of {found.expected}{tied}", findings)


def shapes(ctx: "Context") -> Result:
    """Check that every tensor has the shape that the configuration gives it."""
    findings = [
        Finding(key, f"shape {list(has)}", f"{list(wanted)}", "weights and configuration disagree")
        for key, has, wanted in ctx.resolution.coverage.misshapen
    ]
    return Result(f"{len(ctx.resolution.roles)} roles", findings)


def unexpected(ctx: "Context") -> Result:
    """Look for tensors that the architecture has no place for."""
    findings = [
        Finding(name, "a tensor of no role", f"tensors of {ctx.spec.name} only",
                "is it another model, or a part of another?", "warning")
        for name in ctx.resolution.unbound
    ]  # fmt: skip
    return Result("none", findings)


def hyperparameters(ctx: "Context") -> Result:
    """Check that keys, configuration and tensors say the same of the forward pass."""
    resolution = ctx.resolution
    report = resolution.report
    said = [(ctx.where, text) for text in (*report.conflicts, *report.warnings)]
    said += [(note.where, note.text) for note in resolution.notes if note.level == "warning"]
    findings = [
        Finding(where, text, "one value from every source", level="warning") for where, text in said
    ]
    return Result(f"{len(list(resolution.hyper))} values", findings)


FAR = 100.0  # beyond a bound by this factor it is no matter of training any more


def role_bounds(ctx: "Context") -> Result:
    """Check that embeddings and norms have statistics of trained weights.

    Those are bounded that have a usual size; biases may be as large as they like.
    """
    from aprfmt.arch.spec import split_key
    from aprfmt.validation.weight_bounds import EMBEDDING
    from aprfmt.validation.weight_bounds import role_bounds as bounds_of

    resolution = ctx.resolution
    findings, seen = [], 0
    for key, logical in resolution.roles.items():
        kind = bounds_of(resolution.spec.name, split_key(key)[1])
        bound = kind.std if kind is EMBEDDING else kind.rms
        stats = _stats(ctx, logical) if bound is not None else None
        if bound is None or stats is None or stats.std is None:
            continue
        seen += 1
        what, value = "standard deviation", stats.std
        if bound is kind.rms:
            what, value = "root mean square", _rms(stats, _offset(logical, resolution.spec))
        if not bound.holds(value):
            far = not bound.low / FAR <= value <= bound.high * FAR
            findings.append(
                Finding(f"{key} ({logical.stored[0].info.name})", f"{what} {value:.4g}",
                        f"{bound}: {bound.reason}",
                        "is the encoding's tag right, and was the file converted correctly?",
                        "fail" if far else "warning")
            )  # fmt: skip
    if not seen:
        raise NotRun("no embedding and no norm is stored as numbers")
    return Result(f"{seen} tensors", findings)


def _stats(ctx: "Context", logical: "View") -> "Stats | None":
    """Return the statistics of the one stored tensor that a role is, if it is one."""
    if len(logical.stored) != 1:
        return None
    row = ctx.census.get(logical.stored[0].info.name)
    if row is None or row.scale or row.stats is None or row.stats.nan or row.stats.inf:
        return None  # reported by another check
    return row.stats


def _offset(logical: "View", spec: "ArchSpec") -> float:
    """Return what the forward pass adds to a stored norm weight: gemma's checkpoints need 1."""
    from aprfmt.arch.steps import Added

    steps = logical.layout
    return spec.block.norm_offset - sum(step.amount for step in steps if isinstance(step, Added))


def _rms(stats: "Stats", offset: float) -> float:
    assert stats.l2 is not None and stats.mean is not None
    squares = stats.l2**2 / max(stats.finite, 1) + 2 * offset * stats.mean + offset**2
    return math.sqrt(max(squares, 0.0))
