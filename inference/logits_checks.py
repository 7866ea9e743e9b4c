"""Sanity checks of logits that every working model passes.

Source of the thresholds: a working Qwen2.5-0.5B gave standard deviation 2.65 and a peak of
(max - mean) / std = 5.68 over 151,936 logits; dead or broken heads give a flat vector, or one
logit above a flat rest, whose peak is sqrt(n - 1).
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.base import outcome
from aprfmt.base.outcome import Check
from aprfmt.tensors.stats import compute_stats

MIN_STD = 0.01
MAX_STD = 100.0  # seen: 1 to 5; a lost scale or norm gives thousands
MIN_PEAK = 1.5  # (max - mean) / std, no unit
MAX_PEAK = 0.95  # share of the largest possible peak
TODO = "trace the model to find the first point that is off"


def check_logits(logits: NDArray[Any], where: str = "") -> list[Check]:
    """Return the checks of one token's logits [vocab]: finite, spread, peaked, argmax inside.

    `where` names the row in the checks.
    """
    stats = compute_stats(logits)
    size = int(logits.size)

    def check(name: str, passed: bool, found: str, expected: str) -> Check:
        """Return the check `name` of the logits, with the advice that all these checks give."""
        return outcome.check(name, passed, found, expected, TODO, where)

    checks = [
        check("logits-no-nan", stats.nan == 0, f"{stats.nan} of {size}", "0 NaN"),
        check("logits-no-inf", stats.inf == 0, f"{stats.inf} of {size}", "0 infinities"),
    ]
    spread = f"above {MIN_STD}, at most {MAX_STD:g}"
    most = MAX_PEAK * math.sqrt(max(size - 1, 1))
    peaked, inside = f"(max - mean)/std above {MIN_PEAK}, below {most:.4g}", f"in [0, {size})"
    if stats.mean is None or stats.std is None or stats.max is None:
        left = {"logits-peak": peaked, "logits-argmax": inside}
        return [
            *checks,
            check("logits-std", False, "no finite logit", spread),
            *(Check(name, "NOT_RUN", where, "no finite logit", left[name]) for name in left),
        ]
    peak = (stats.max - stats.mean) / stats.std if stats.std else 0.0
    best = int(np.argmax(logits))
    return [
        *checks,
        check("logits-std", MIN_STD < stats.std <= MAX_STD, f"{stats.std:.4g}", spread),
        check("logits-peak", MIN_PEAK < peak < most, f"{peak:.4g}", peaked),
        check("logits-argmax", 0 <= best < size and stats.nan == 0, str(best), inside),
    ]


def check_last_row(logits: NDArray[Any]) -> list[Check]:
    """Return the checks of the last row of logits [tokens, vocab], and that all are finite."""
    bad = np.flatnonzero(~np.isfinite(logits).all(axis=-1))
    found = f"{bad.size} of {len(logits)} rows with NaN or Inf"
    found += f", the first at position {int(bad[0])}" if bad.size else ""
    every = outcome.check("logits-rows-finite", not bad.size, found, "no row", TODO, "every row")
    return [*check_logits(logits[-1], f"position {len(logits) - 1}"), every]
