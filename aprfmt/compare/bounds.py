"""How far a quantized value may be from its source: one step of its codec.

A step is the distance between neighbouring representable values, the largest of the block's (of
the 256-element superblock's, for K-quants). Measured on clean files without an importance matrix:
no element is further than one step from its source, while one moved weight is 2.7 steps off and
more; half a step of an element's own sub-block is the wrong bound.
"""

from collections.abc import Mapping
from typing import Any

# Typical NMSE (sum of squared errors over sum of squares) on heavy-tailed weights; with an
# importance matrix a single element proves nothing, so this and the share beyond a step decide.
NMSE: Mapping[str, float] = {
    "Q8_0": 7.4e-5, "Q6_K": 6.6e-4, "Q5_K": 2.2e-3, "Q5_0": 4.3e-3, "Q5_1": 4.3e-3,
    "Q4_K": 8.4e-3, "Q4_0": 1.6e-2, "Q4_1": 1.6e-2, "Q3_K": 5.0e-2, "Q2_K": 1.2e-1,
    "IQ4_NL": 1.2e-2, "IQ4_XS": 1.2e-2, "NF4": 1.6e-2, "FP4": 3.0e-2, "MXFP4": 3.0e-2,
    "APR_Q4": 2.0e-2,
}  # fmt: skip
NMSE_SLACK = 2.0  # a file twice as bad as the worst measured is worth a look
BEYOND_SHARE = 0.01  # share of elements beyond one step that importance matrices were seen to cause


def steps(encoding: str, parts: Mapping[str, Any], count: int) -> Any | None:
    """Return the step of every element (float32 [count]), or None where none is known."""
    from aprfmt.codecs import CODECS

    return CODECS[encoding].steps(parts, count) if encoding in CODECS else None
