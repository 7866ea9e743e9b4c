"""Steps whose faults are in a part of the model or of the arithmetic, and right steps beside them.

A seventh set: gradients that are clipped by the norm of a part of them. What is right stands in
each row, written before the row was first run.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.models import tiny
from tests.training.judged_steps import (
    JudgedStep,
    backward,
    batch_of,
    clip,
    matrices_and_rest,
    taken,
    with_gradients,
    written,
)
from tests.training.thread_steps import sgd

ANY = "."
BOUND = 0.5
CLIPPED = f"sgd:lr=0.1,clip={BOUND}"
Chosen = Callable[[str], bool]  # whether a parameter of a name counts in the norm


def clip_by(chosen: Chosen) -> Callable[[Any], None]:
    """Return what clips all gradients by the norm of those of the chosen parameters."""

    def change(model: Any) -> None:
        grads = [p.grad for name, p in model.named_parameters() if chosen(name)]
        norm = torch.nn.utils.get_total_norm(grads)
        torch.nn.utils.clip_grads_with_norm_(list(model.parameters()), BOUND, norm)

    return change


def no_expert(name: str) -> bool:
    """Return whether a parameter is none of an expert."""
    return ".experts." not in name


def no_table(name: str) -> bool:
    """Return whether a parameter is neither the table of tokens nor the head."""
    return "embed" not in name and "lm_head" not in name


def of_first_stage(name: str) -> bool:
    """Return whether a parameter is in layer 0 or before it."""
    return "embed" in name or ".layers.0." in name


def clipped_before_saved(folder: Path) -> dict[str, Any]:
    """Write a step whose gradients are saved after they were clipped without the experts' norm."""
    model, rows = tiny("qwen3_moe", tied=False), batch_of()
    made = sgd(model)
    backward(model, rows)
    clip_by(no_expert)(model)
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    given = written(folder, model, rows) | with_gradients(folder, grads)
    made.step()
    model.save_pretrained(folder / "after")
    return given | {"after": folder / "after", "optimizer": CLIPPED}


def with_momentum(model: Any) -> torch.optim.Optimizer:
    """Return SGD with momentum over two groups: matrices, and the rest."""
    return torch.optim.SGD(matrices_and_rest(model), lr=0.1, momentum=0.9)


PART_FAULTS = (
    JudgedStep(
        "clipped_without_experts",
        "all is clipped by the norm of all but the experts",
        taken(sgd, CLIPPED, kind="qwen3_moe", before_step=clip_by(no_expert)),
        cause="clip_by_part",
        named="clip_by_part.*all but the experts",
        where=ANY,
    ),
    JudgedStep(
        "clipped_without_experts_before_saved",
        "the same, and the gradients are saved after it",
        clipped_before_saved,
        cause="clip_by_part",
        named="clip_by_part.*all but the experts",
        where=ANY,
    ),
    JudgedStep(
        "clipped_without_tables",
        "all is clipped by the norm of all but the embedding and the head",
        taken(sgd, CLIPPED, before_step=clip_by(no_table)),
        cause="clip_by_part",
        named="clip_by_part.*all but embedding and head",
        where=ANY,
    ),
    JudgedStep(
        "clipped_by_first_stage",
        "all is clipped by the norm of the first stage of a pipeline: layer 0 and the embedding",
        taken(sgd, CLIPPED, before_step=clip_by(of_first_stage)),
        cause="clip_by_part",
        named="clip_by_part.*layers below 1",
        where=ANY,
    ),
    JudgedStep(
        "clipped_by_first_group",
        "all is clipped by the norm of the optimizer's first group, as its moments show",
        taken(
            with_momentum,
            "sgd:lr=0.1,momentum=0.9,step=1,clip=0.5",
            before_step=clip_by(lambda name: "norm" not in name),
            state=True,
        ),
        cause="clip_by_part",
        named="clip_by_part.*all but the norms",
        where=ANY,
    ),
)
PART_INNOCENTS = (
    JudgedStep("experts_clipped", "a model with experts, clipped by the norm of all",
               taken(sgd, CLIPPED, kind="qwen3_moe", before_step=clip(BOUND))),
    JudgedStep("two_groups_clipped", "two groups, clipped by the norm of both",
               taken(with_momentum, "sgd:lr=0.1,momentum=0.9,step=1,clip=0.5",
                     before_step=clip(BOUND), state=True)),
)  # fmt: skip
