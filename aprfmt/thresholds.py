"""Every tolerance of comparing runs, once: number, unit, reason.

A tolerance is a relative L2 distance of a whole capture point. The base depends on the coarser
arithmetic of the two runs; errors of float arithmetic grow slowly with depth, and expert choices
make them jump. Measured: float32 runs of an 8-layer model are within 1.2e-6 of each other and of
float64, f16 3.9e-3, bf16 1.5e-2; the smallest real bug seen is 2.7e-4.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tolerance:
    """A bound and why it is what it is."""

    rel_l2: float
    reason: str


# arithmetic dtype -> bound at every point
BASE: dict[str, Tolerance] = {
    "float64": Tolerance(1e-9, "float64 on both sides; rope tables are float32 everywhere"),
    "float32": Tolerance(2e-5, "float32 reductions in another order, ten times the measured"),
    "float16": Tolerance(2e-2, "float16 arithmetic, five times the measured"),
    "bfloat16": Tolerance(8e-2, "bfloat16 arithmetic, five times the measured"),
}
# Points that are choices or differences of near values: a rounding may flip them.
DISCRETE = ("experts", "router_margin")
# A mixture of experts amplifies rounding: another expert is another function.
MOE_FACTOR = 5.0


def tolerance(dtype_a: str, dtype_b: str, *, moe: bool = False) -> Tolerance:
    """Return the bound for two runs, by the coarser arithmetic."""
    worst = max((BASE[dtype_a], BASE[dtype_b]), key=lambda row: row.rel_l2)
    if not moe or worst.rel_l2 < 1e-3:
        return worst
    return Tolerance(worst.rel_l2 * MOE_FACTOR, worst.reason + ", experts may flip")
