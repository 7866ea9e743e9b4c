"""transformers' autograd as the judge of gradients: every parameter's, in float64.

Its gradients are put into its own parameters and saved by itself, so the names and layouts of the
file are its own too.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file
from torch.nn import functional

from tests.inference.judge import everything_float64
from tests.models import IDS, save_tiny

Found = dict[str, np.ndarray]


@dataclass(frozen=True)
class JudgedGradients:
    """The model's folder and batch, transformers' loss, gradients by stored name, dL/d(stream).

    `streams` are those of what enters each layer and of what the last norm gives, where
    transformers shows them. `without` are its parameters that autograd gives no gradient.
    """

    folder: Path
    batch: Path
    loss: float
    gradients: Found
    streams: list[np.ndarray]
    without: tuple[str, ...]


def write_batch(path: Path, padded: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Write a batch of two rows, prompts unscored; return its ids, mask and labels."""
    ids = np.stack([np.array(IDS), np.roll(np.array(IDS), 3)])
    mask = np.ones_like(ids)
    mask[1, -4 if padded else len(IDS) :] = 0
    labels = np.where(mask > 0, ids, -100)
    labels[0, :8] = -100
    np.savez(path, input_ids=ids, attention_mask=mask, labels=labels)
    return ids, mask, labels


def judged_gradients(
    name: str, folder: Path, *, padded: bool = False, **config: Any
) -> JudgedGradients:
    """Return what transformers computes of a tiny model's batch, all in float64."""
    model: Any = save_tiny(name, folder / "model", **config).double()
    ids, mask, labels = write_batch(folder / "batch.npz", padded)
    given = {"attention_mask": torch.tensor(mask)} if padded else {}
    with torch.no_grad():
        model(torch.tensor(ids[:1]))  # frequencies that go by the length are made in float32 here
    with everything_float64(model):
        out = model(torch.tensor(ids), output_hidden_states=True, **given)
        streams = [x for x in out.hidden_states or () if x.requires_grad and x.ndim == 3]
        for x in streams:
            x.retain_grad()
        logits = out.logits[:, :-1].flatten(0, 1)
        loss = functional.cross_entropy(logits, torch.tensor(labels)[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
    without = [each for each, p in model.named_parameters() if p.grad is None]
    inside = torch.tensor(mask) > 0
    flat = [x.grad[inside].numpy() for x in streams if x.grad is not None]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0 if parameter.grad is None else parameter.grad)
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.fill_(torch.nan)
    model.save_pretrained(folder / "gradients")
    found: Found = {}
    for path in (folder / "gradients").glob("*.safetensors"):
        found.update(load_file(path))
    # A buffer is no parameter: a trainer gives it no gradient. Those of integers stay as they are.
    found = {
        key: values
        for key, values in found.items()
        if values.dtype.kind == "f" and not np.isnan(values).all()
    }
    return JudgedGradients(
        folder / "model", folder / "batch.npz", loss.item(), found, flat, tuple(without)
    )
