"""Seeded faults of `aprfmt/causes/forward/product_tails.py`.

Seen red: all of them were left at "no cause of the table fits", one with "an adapter of this rank".
"""

from typing import Any

from tests.causes.forward.shards import columns
from tests.diagnosis.engine_changes import FIVE, placed, traced
from tests.diagnosis.engines import COARSE


def tail(w: Any, half: int) -> None:
    """Lose what is left after tiles of 16."""
    w[:, w.shape[1] // 16 * 16 :] = 0


def head(w: Any, half: int) -> None:
    """Lose the first three inputs."""
    w[:, :3] = 0


def misread(w: Any, half: int) -> None:
    """Multiply what is left after tiles of 16 by the columns before it, too."""
    size = w.shape[1] % 16
    w[:, -size:] = w[:, -2 * size : -size].copy()


def stacked(w: Any, half: int) -> None:
    """Lose what is left after tiles of 16 in every expert."""
    w[..., w.shape[-1] // 16 * 16 :] = 0


ENGINE_FAULTS = (
    traced("product-tail-lost", "llama", "the MLP's last product loses what is left after tiles",
           ["product_tail"], ["ffn_down"], COARSE, FIVE, **columns("ffn_down", tail)),
    traced("product-tail-misread", "llama",
           "the inputs after the last tile meet the columns before", ["product_tail"],
           ["ffn_down"], COARSE, FIVE, **columns("ffn_down", misread)),
    placed("product-head-lost", "qwen3", "attention's product loses its first three inputs",
           "product_tail", "attn_output", columns("attn_output", head)),
    placed("experts-tail-lost", "mixtral", "the experts' last product loses its tail",
           "product_tail", "ffn_down_exps", columns("ffn_down_exps", stacked)),
)  # fmt: skip
