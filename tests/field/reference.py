"""transformers as a judge of the rows themselves: what a fault changes in the logits."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.field.hf import loaded
from tests.models import IDS

Array = Any
PACKED = ("quantization_config", "quantization")


def distance(first: Path, second: Path) -> float | None:
    """Return the relative L2 distance of the logits of two sides; infinite if one is not finite.

    None for sides that transformers does not read: GGUF, packed encodings. Of a dump the logits are
    those it holds.
    """
    if not (plain(first) and (plain(second) or second.suffix == ".npz")):
        return None
    if second.suffix == ".npz":
        with np.load(second) as read:
            ids, theirs = [int(i) for i in read["input_ids"]], read["logits"][0]
        ours = logits(first, ids)[-len(theirs) :]
    else:
        ours, theirs = logits(first, IDS), logits(second, IDS)
    width = min(ours.shape[-1], theirs.shape[-1])  # a padded vocabulary
    ours, theirs = ours[:, :width], theirs[:, :width]
    found = float(np.linalg.norm(ours - theirs) / np.linalg.norm(ours))
    return found if np.isfinite(found) else float("inf")


def plain(folder: Path) -> bool:
    """Say whether a side is a folder of plain weights."""
    if not folder.is_dir():
        return False
    config = json.loads((folder / "config.json").read_text())
    return not any(key in config for key in PACKED)


def logits(folder: Path, ids: Any) -> Array:
    """Return transformers' float32 logits [tokens, vocabulary]."""
    import torch

    model = loaded(folder)
    with torch.no_grad():
        return model(torch.tensor([list(ids)])).logits[0].numpy()
