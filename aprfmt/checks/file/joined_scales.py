"""Finds weights that engines multiply as one, and whose common scale is not one."""

from collections.abc import Iterator

import numpy as np

from aprfmt.arch.engine_parameters import parts_of_one_factor
from aprfmt.base.protocols import LazyTensor
from aprfmt.checks.context import CheckContext
from aprfmt.checks.records import CheckFinding, NotRun, Result
from aprfmt.codecs import decode
from aprfmt.errors import AprfmtError

# Names after the weight's of the factor of NVFP4's scales. Of FP8 engines quantize the parts again
# to one scale, which loses little.
FACTORS = (".weight_global_scale", ".weight_scale_2")


def check_joined_scales(ctx: CheckContext) -> Result:
    """Return a Result with a warning where joined weights have different NVFP4 factors.

    Engines join query, key and value, or gate and up, and take one factor for the whole. Raises
    NotRun where no such weight has a factor of the whole tensor.
    """
    groups = list(_factors(ctx))
    if not groups:
        raise NotRun("no weight that engines join has a factor of a whole NVFP4 tensor")
    apart = {name: max(values) / min(values) for name, values in groups if len({*values}) > 1}
    says = f"{len(groups)} joined matrices"
    if not apart:
        return Result(says)
    worst = max(apart, key=lambda name: apart[name])
    finding = CheckFinding(
        worst,
        f"{len(apart)} of {len(groups)} matrices that engines join have parts with other factors "
        f"of the whole tensor, here {apart[worst]:.3g} times apart",
        "one factor for query, key and value, and one for gate and up",
        "engines that join them take one factor for all: quantize again with shared factors",
        "warning",
    )
    return Result(says, [finding])


def _factors(ctx: CheckContext) -> Iterator[tuple[str, list[float]]]:
    """Yield (names of the weights, their NVFP4 factors) of each matrix that engines join of them.

    Each expert has a matrix. A matrix is left out if a factor is no positive number, which other
    checks report.
    """
    stored = {key: view.stored for key, view in ctx.resolution.roles.items()}
    for parts in parts_of_one_factor(stored):
        values = [value for part in parts for value in _factor(part)]
        if len(values) == len(parts):
            yield ", ".join(part.info.name for part in parts), values


def _factor(stored: LazyTensor) -> list[float]:
    """Return [the NVFP4 factor of a whole stored weight]; [] where it has none that can be read."""
    part = next((stored.parts[one] for one in FACTORS if one in stored.parts), None)
    if part is None:
        return []
    try:
        values = decode(part.info.encoding, part.raw(), part.info.shape).reshape(-1)
    except AprfmtError:
        return []
    known = values.size == 1 and bool(np.isfinite(values[0])) and values[0] > 0
    return [float(values[0])] if known else []
