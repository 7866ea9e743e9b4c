"""Seeded faults of `aprfmt/causes/forward/zero_results.py`."""

from collections.abc import Callable
from typing import Any

from tests.diagnosis.making import engine


def zeros_at(point: str) -> Callable[[], Callable[[str, int, Any], Any]]:
    """Return a maker of a pass in which the value at `point` is zeros in every layer."""
    return lambda: lambda name, layer, x: x * 0 if name == point else x


ENGINE_FAULTS = (
    engine("experts-zero", "mixtral", "the experts' sum is zeros", "zero_result", "moe_out",
           alter=zeros_at("moe_out")),
)  # fmt: skip
