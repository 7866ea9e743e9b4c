"""The sanity gate on logits: what a working model's forward pass cannot fail.

Thresholds with their source: a working Qwen2.5-0.5B gave standard deviation 2.65 and a peak of
(max - mean) / std = 5.68 over 151,936 logits; dead or broken heads give a flat vector.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.outcome import Check, Outcome
from aprfmt.stats import compute

MIN_STD = 0.01
MIN_PEAK = 1.5  # (max - mean) / std, no unit


def logits_gate(logits: NDArray[Any], where: str = "") -> list[Check]:
    """Return the checks of one token's logits [vocab]: finite, spread, peaked, argmax inside."""
    stats = compute(logits)
    size = int(logits.size)

    def check(name: str, passed: bool, found: str, expected: str) -> Check:
        outcome: Outcome = "PASS" if passed else "FAIL"
        todo = "" if passed else "trace the model to find the first point that is off"
        return Check(name, outcome, where, found, expected, todo)

    checks = [
        check("logits-no-nan", stats.nan == 0, f"{stats.nan} of {size}", "0 NaN"),
        check("logits-no-inf", stats.inf == 0, f"{stats.inf} of {size}", "0 infinities"),
    ]
    if stats.mean is None or stats.std is None or stats.max is None:
        return [*checks, check("logits-std", False, "no finite logit", f"above {MIN_STD}")]
    peak = (stats.max - stats.mean) / stats.std if stats.std else 0.0
    best = int(np.argmax(logits))
    return [
        *checks,
        check("logits-std", stats.std > MIN_STD, f"{stats.std:.4g}", f"above {MIN_STD}"),
        check("logits-peak", peak > MIN_PEAK, f"{peak:.4g}", f"(max - mean)/std above {MIN_PEAK}"),
        check("logits-argmax", 0 <= best < size and stats.nan == 0, str(best), f"in [0, {size})"),
    ]
