"""Seeded faults of `aprfmt/causes/forward/compressed_attention.py`.

Seen red: without their hypotheses these are placed, and not named.
"""

from typing import Any

import numpy as np

from tests.diagnosis.engine_changes import V4
from tests.diagnosis.engines import broken
from tests.diagnosis.making import engine


def alike(op: Any, kv: Any, gate: Any) -> Any:
    """Weigh the tokens of a window alike."""
    return op(kv, np.where(np.isinf(gate), gate, gate.dtype.type(0)))


def unmixed(point: str, layer: int, x: Any) -> Any:
    """Leave every stream as it is."""
    n = round(x.shape[-1] ** 0.5)
    eye = np.eye(n, dtype=x.dtype).reshape(1, -1)
    return np.repeat(eye, len(x), axis=0) if point.endswith("_comb") else x


def undoubled(point: str, layer: int, x: Any) -> Any:
    """Give the streams half of what a branch gives."""
    return x * x.dtype.type(0.5) if point.startswith("hc_") and point.endswith("_post") else x


ENGINE_FAULTS = (
    engine(
        "v4-alike",
        V4,
        "a window's tokens count alike",
        "compressed_keys",
        "attn_compressor",
        fine=True,
        backend=lambda: broken("compress", alike),
    ),
    engine(
        "v4-window",
        V4,
        "no compressed key is read",
        "compressed_keys",
        "heavy_layers",
        fine=True,
        hp={"heavy_layers": (False,) * 5, "index_layers": (False,) * 5},
    ),
    engine(
        "v4-unmixed",
        V4,
        "streams not mixed",
        "hyper_connections",
        "hc_streams",
        fine=True,
        alter=lambda: unmixed,
    ),
    engine(
        "v4-half",
        V4,
        "what a branch gives not doubled",
        "hyper_connections",
        "hc_streams",
        fine=True,
        alter=lambda: undoubled,
    ),
    engine(
        "v4-sinkhorn",
        V4,
        "weights normalised once",
        "hyper_connections",
        "hc_iterations",
        fine=True,
        hp={"hc_iterations": 1},
    ),
)  # fmt: skip
