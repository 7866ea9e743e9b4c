"""Matrices that are zero throughout, of tensors that no architecture's table gives a role.

Training leaves no weight of a working layer at zero. So such a matrix was never filled, or a step
lost it, whatever the model is. Some tensors are zero in sound files, and their names say so.
"""

import re

from aprfmt.base.sequences import first_and_more
from aprfmt.checks.context import CheckContext
from aprfmt.checks.records import CheckFinding, Level
from aprfmt.errors import AprfmtError
from aprfmt.model.resolve import Resolution
from aprfmt.model.usual_zeros import is_usually_zero

# Layers that some networks begin with zeros in (diffusion models' outputs, SAM's and ViTDet's
# relative positions, Gemma 3's projector): zero until they are trained.
_ZERO_UNTRAINED = re.compile(
    r"(proj_out|out_layers\.\d+|final_layer\.linear|(^|\.)out\.\d|rel_pos)[._a-z]*$"
    r"|ada_?ln|modulation|dynamic_alpha|mm_input_projection_weight$",
    re.IGNORECASE,
)
_PARAMETER = re.compile(r"weight|kernel|embed|proj|(^|[._/])w[a-z]?\d*$", re.IGNORECASE)
_SHOWN = 3  # names in a finding


def find_zero_matrices(
    ctx: CheckContext, resolution: Resolution | None
) -> tuple[int, list[CheckFinding]]:
    """Return (how many matrices without a role were read, the findings on those all of zeros).

    `resolution` has the roles; None where the architecture is not known, so that no tensor has one.
    A matrix has two axes that are longer than 1. Tensors of packed weights are left out, and so are
    those that are zero in sound files by their names. A tensor that is no parameter by its name, or
    that begins as zeros in some networks, gives a warning.
    """
    roles = {} if resolution is None else resolution.roles
    known = {part.info.name for view in roles.values() for part in view.stored}
    for view in (*roles.values(), *ctx.model.values()):
        known |= {part.info.name for part in view.parts.values()}
    try:
        unread = ctx.model.unread
    except AprfmtError:
        unread = None
    known |= {one.name for one in unread.tensors} if unread is not None else set()
    seen, lost, warned, begun = 0, list[str](), list[str](), list[str]()
    for name, row in ctx.census.items():
        matrix = sum(size > 1 for size in row.info.shape) > 1
        stats = row.stats
        if not matrix or stats is None or row.scale or not stats.count or name in known:
            continue
        seen += 1
        if stats.zeros < stats.count or is_usually_zero(name):
            continue
        if _ZERO_UNTRAINED.search(name):
            begun.append(name)
        else:
            (lost if _PARAMETER.search(name) else warned).append(name)
    rows: tuple[tuple[list[str], Level, str], ...] = (
        (lost, "fail", ""),
        (begun, "warning", "; some networks begin with zeros there, and training changes them"),
        (warned, "warning", ""),
    )
    return seen, [_make_finding(names, level, says) for names, level, says in rows if names]


def _make_finding(names: list[str], level: Level, says: str) -> CheckFinding:
    """Return the finding on matrices of zeros; `says` is added to what was found of them."""
    return CheckFinding(
        first_and_more(names, _SHOWN),
        f"every value is 0{says}",
        "a matrix that was filled",
        "get the file again, or convert it again",
        level,
    )
