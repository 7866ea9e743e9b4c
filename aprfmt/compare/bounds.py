"""How far a quantized value may be from its source: one table of steps, by encoding.

A step is the distance between neighbouring representable values, the largest of the block's (of
the 256-element superblock's, for K-quants). Measured on clean files without an importance matrix:
no element is further than one step from its source, while one moved weight is 2.7 steps off and
more; half a step of an element's own sub-block is the wrong bound.
"""

from collections.abc import Callable, Mapping
from typing import Any

# Largest gap between neighbouring codes of NF4 (-1.0 to -0.6962) and FP4 (0.6667 to 1.0).
NF4_GAP = 0.30380720
FP4_GAP = 0.33333334


def _first_half(raw: Any, size: int, at: int = 0) -> Any:
    import numpy as np

    blocks = np.frombuffer(raw, np.uint8).reshape(-1, size)
    return np.abs(blocks[:, at : at + 2].copy().view("<f2").astype(np.float32).reshape(-1))


def _k_scales(raw: Any, size: int) -> Any:
    """Largest d*scale of a Q4_K or Q5_K superblock (6-bit scales in 12 bytes at offset 4)."""
    import numpy as np

    blocks = np.frombuffer(raw, np.uint8).reshape(-1, size)
    s = blocks[:, 4:16].astype(np.int32)
    low = s[:, 0:4] & 63
    high = (s[:, 8:12] & 15) | ((s[:, 0:4] >> 6) << 4)
    largest = np.maximum(low.max(axis=1), high.max(axis=1))
    return _first_half(raw, size) * largest.astype(np.float32)


def _q6_k(raw: Any) -> Any:
    import numpy as np

    blocks = np.frombuffer(raw, np.uint8).reshape(-1, 210)
    scales = np.abs(blocks[:, 192:208].view(np.int8).astype(np.float32)).max(axis=1)
    return _first_half(raw, 210, 208) * scales


def _q2_k(raw: Any) -> Any:
    import numpy as np

    blocks = np.frombuffer(raw, np.uint8).reshape(-1, 84)
    scales = (blocks[:, 0:16] & 15).max(axis=1).astype(np.float32)
    return _first_half(raw, 84, 80) * scales


def _q3_k(raw: Any) -> Any:
    import numpy as np

    blocks = np.frombuffer(raw, np.uint8).reshape(-1, 110)
    s = blocks[:, 96:108].astype(np.int32)
    low = np.concatenate([s[:, 0:8] & 15, s[:, 0:8] >> 4], axis=1)
    high = np.concatenate([(s[:, 8:12] >> (2 * k)) & 3 for k in range(4)], axis=1)
    scales = np.abs((low | (high << 4)) - 32).max(axis=1).astype(np.float32)
    return _first_half(raw, 110, 108) * scales


def _apr_q8(raw: Any) -> Any:
    import numpy as np

    return np.abs(np.frombuffer(raw[:4], "<f4"))


# encoding -> (elements that share a step, steps from the raw main part)
_STEPS: Mapping[str, tuple[int, Callable[[Any], Any]]] = {
    "Q4_0": (32, lambda raw: _first_half(raw, 18)),
    "Q4_1": (32, lambda raw: _first_half(raw, 20)),
    "Q5_0": (32, lambda raw: _first_half(raw, 22)),
    "Q5_1": (32, lambda raw: _first_half(raw, 24)),
    "Q8_0": (32, lambda raw: _first_half(raw, 34)),
    "Q2_K": (256, _q2_k),
    "Q3_K": (256, _q3_k),
    "Q4_K": (256, lambda raw: _k_scales(raw, 144)),
    "Q5_K": (256, lambda raw: _k_scales(raw, 176)),
    "Q6_K": (256, _q6_k),
    "APR_Q4": (32, lambda raw: _first_half(raw, 18)),
}

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
    import numpy as np

    if encoding in _STEPS:
        size, of_block = _STEPS[encoding]
        return np.repeat(of_block(parts[""]), size)[:count]
    if encoding == "APR_Q8":
        return np.repeat(_apr_q8(parts[""]), count)
    if encoding in ("NF4", "FP4"):
        return _absmax(parts, count) * np.float32(NF4_GAP if encoding == "NF4" else FP4_GAP)
    return None


def _absmax(parts: Mapping[str, Any], count: int) -> Any:
    """Per-element absmax of a bitsandbytes weight, double quantization resolved."""
    import numpy as np

    from aprfmt.codecs.quant_state import STATE, absmax_of, state_of

    name = next(key for key in parts if key.startswith(STATE)).removeprefix(STATE).upper()
    state = state_of(name, parts)
    return np.repeat(absmax_of(name, parts, state), state.blocksize)[:count]
