"""Faults of compressed attention, hyper-connections, and blocks of keys that an indexer chooses.

Seen red: without their hypotheses these are placed, and not named.
"""

from typing import Any

import numpy as np

from tests.diagnosis.engines import broken
from tests.diagnosis.making import engine

V4, M3 = "deepseek_v4", "minimax_m3_vl"


def alike(op: Any, kv: Any, gate: Any) -> Any:
    """Weigh the tokens of a window alike."""
    return op(kv, np.where(np.isinf(gate), gate, gate.dtype.type(0)))


def first_group(point: str, layer: int, x: Any) -> Any:
    """Let every group of heads read the first one's blocks."""
    return np.broadcast_to(x[:1], x.shape).copy() if point == "index_blocks" else x


def unmixed(point: str, layer: int, x: Any) -> Any:
    """Leave every stream as it is."""
    n = round(x.shape[-1] ** 0.5)
    eye = np.eye(n, dtype=x.dtype).reshape(1, -1)
    return np.repeat(eye, len(x), axis=0) if point.endswith("_comb") else x


def undoubled(point: str, layer: int, x: Any) -> Any:
    """Give the streams half of what a branch gives."""
    return x * x.dtype.type(0.5) if point.startswith("hc_") and point.endswith("_post") else x


def own_expert(op: Any, table: Any, ids: Any, n_experts: int) -> Any:
    """List the experts of the token before in the vocabulary."""
    return op(table, (np.asarray(ids) - 1) % table.shape[0], n_experts)


COMPRESSED_FAULTS = (
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
        "v4-two",
        V4,
        "two windows chosen for three",
        "key_choice",
        "index_topk",
        fine=True,
        hp={"index_topk": 2},
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
    engine(
        "v4-listed",
        V4,
        "experts of the token before",
        "moe_routing",
        "L0.ffn_gate_tid2eid.weight",
        fine=True,
        backend=lambda: broken("listed_experts", own_expert),
    ),
    engine(
        "m3-blocks",
        M3,
        "three blocks chosen for four",
        "key_choice",
        "index_topk",
        fine=True,
        hp={"index_topk": 3},
    ),
    engine(
        "m3-local",
        M3,
        "the query's own block not read first",
        "key_choice",
        "index_local_blocks",
        fine=True,
        hp={"index_local_blocks": 1},
    ),
    engine(
        "m3-group",
        M3,
        "every group reads the first one's blocks",
        "key_choice",
        "index_blocks",
        fine=True,
        alter=lambda: first_group,
    ),
)
