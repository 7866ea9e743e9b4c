"""Gradients that ranks hold in shards, and of which each rank clips its own shards."""

from collections.abc import Mapping
from typing import Any

import numpy as np


def shards(values: Mapping[str, Any], ranks: int, how: str) -> list[list[Any]]:
    """Return views of each rank's shards of all gradients, as torch and FSDP cut them."""
    import torch

    held: list[list[Any]] = [[] for _ in range(ranks)]
    if how == "buffer":
        flat = np.concatenate([x.reshape(-1) for x in values.values()])
        length = -(-flat.size // ranks)
        number = np.arange(flat.size) // length
        start = 0
        for x in values.values():
            own = number[start : start + x.size]
            for rank in range(ranks):
                held[rank].append(x.reshape(-1)[own == rank])
            start += x.size
        return held
    for x in values.values():
        given = torch.from_numpy(x if how == "rows" else x.reshape(-1))
        for rank, piece in enumerate(torch.chunk(given, ranks, 0)):
            held[rank].append(piece.numpy())
    return held


def clipped(values: Mapping[str, Any], ranks: int, how: str, bound: float) -> dict[str, Any]:
    """Return gradients that each rank clipped by the norm of its own shards."""
    made = {key: x.copy() for key, x in values.items()}
    if how == "buffer":
        flat = np.concatenate([x.reshape(-1) for x in made.values()])
        length = -(-flat.size // ranks)
        for start in range(0, flat.size, length):
            piece = flat[start : start + length]
            piece *= min(1.0, bound / (np.linalg.norm(piece) + 1e-6))
        ends = np.cumsum([x.size for x in made.values()])[:-1]
        parts = np.split(flat, ends)
        return {key: x.reshape(made[key].shape) for key, x in zip(made, parts, strict=True)}
    for pieces in shards(made, ranks, how):
        norm = np.sqrt(sum(float(np.square(x).sum()) for x in pieces))
        for piece in pieces:
            piece *= min(1.0, bound / (norm + 1e-6))
    return made
