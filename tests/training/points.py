"""A trainer's gradients of capture points: what SavedStep keeps of transformers' pass."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from aprfmt.training.saved_step import SavedStep
from tests.inference.judge import everything_float64
from tests.models import tiny
from tests.training.judged_steps import batch_of
from tests.training.steps import save_arrays


def saved(
    kind: str,
    folder: Path,
    around: Callable[[], Any] | None = None,
    *,
    padded: bool = True,
    loss_scale: float = 1.0,
) -> Path:
    """Save a step of a tiny model in float64, with its points; return its folder.

    Its backward pass is inside `around`. `loss_scale` is what trainers multiply the loss by, and
    take off the gradients of parameters.
    """
    model: Any = tiny(kind, tied=False if kind == "llama" else None).double()
    batch = batch_of()
    if not padded:
        batch = {"input_ids": batch["input_ids"][:1], "labels": batch["labels"][:1]}
    given = {key: x for key, x in batch.items() if key != "labels"}
    with torch.no_grad():
        model(**given)  # frequencies that go by the length are made in float32 here
    with everything_float64(model):
        step = SavedStep(model, folder / "step", points=True)
        with around() if around else nullcontext():
            logits = model(**given, use_cache=False).logits[:, :-1].flatten(0, 1)
            labels = batch["labels"][:, 1:].flatten()
            loss = functional.cross_entropy(logits, labels, ignore_index=-100)
            (loss * loss_scale).backward()  # type: ignore[no-untyped-call]
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= loss_scale
    save_arrays(folder / "step" / "batch.npz", {key: x.numpy() for key, x in batch.items()})
    step.before()
    return folder / "step"
