"""Steps whose faults are in a part of the model or of the arithmetic, and right steps beside them.

A seventh set: gradients that are clipped by the norm of a part of them, frozen bases of 4 bits that
a backward decodes wrongly, lengths of DoRA, steps that are skipped but for their decay, masks of
labels that are inverted, and routers. What is right stands in each row, written before the row was
first run.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers.models.qwen3_moe import modeling_qwen3_moe

from aprfmt.codecs.fp4 import CODEC as FP4_CODEC
from aprfmt.codecs.nf4 import CODEC as NF4_CODEC
from tests.models import tiny
from tests.training.adapter_steps import beside, quantized
from tests.training.judged_steps import (
    LR,
    RULE,
    WD,
    JudgedStep,
    adamw,
    backward,
    batch_of,
    clip,
    gradient_step,
    lora,
    matrices_and_rest,
    patched,
    taken,
    with_gradient_of,
    with_gradients,
    written,
)
from tests.training.thread_steps import sgd

ANY = "."
NF4, FP4 = NF4_CODEC.code.tolist(), FP4_CODEC.code.tolist()
VOCABULARY = 97
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


Decoding = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
BLOCK = 64


def misread(decode: Decoding) -> Callable[[Path], dict[str, Any]]:
    """Return what makes gradients of an adapter whose backward decodes an NF4 base by `decode`.

    `decode(units, scales, codes)` gives the weights [blocks, elements]; units are right weights
    over the scales [blocks, 1] of their blocks, codes the numbers of NF4.
    """

    def change(adapted: Any) -> Any:
        for module in adapted.modules():
            if isinstance(module, torch.nn.Linear) and not module.weight.requires_grad:
                if module.weight.shape[0] == VOCABULARY:
                    continue  # the head is not quantized
                rows = module.weight.detach().reshape(-1, BLOCK)
                scales = rows.abs().amax(1, keepdim=True)
                units = rows / scales
                codes = (units[..., None] - torch.tensor(NF4)).abs().argmin(-1)
                other = decode(units, scales, codes).reshape(module.weight.shape)
                forward = partial(product_with_gradient_of, module.weight, other)
                module.__dict__["forward"] = forward
        return adapted

    base = quantized("nf4", BLOCK, nested=True)
    return beside(base, base, change)


def product_with_gradient_of(
    weight: torch.Tensor, other: torch.Tensor, x: torch.Tensor
) -> torch.Tensor:
    """Return x times `weight`, whose backward multiplies by `other`."""
    return with_gradient_of(functional.linear(x, weight), functional.linear(x, other))


def no_offset(units: torch.Tensor, scales: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """Decode scales of double quantization without the mean that was taken off them."""
    return units * (scales - scales.mean())


def scale_before(units: torch.Tensor, scales: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """Decode each block by the scale of the one before it."""
    return units * scales.roll(1, 0)


def one_scale(units: torch.Tensor, scales: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """Decode all blocks by the largest scale."""
    return units * scales.max()


def by_fp4(_: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Decode the codes of NF4 by the values of FP4."""
    return torch.tensor(FP4)[codes] * scales


def rightly(units: torch.Tensor, scales: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """Decode as the forward does."""
    return units * scales


def of_lengths(
    change: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, g: g,
) -> Callable[[Path], dict[str, Any]]:
    """Return what makes a first step of a DoRA adapter; `change` is made to lengths' gradients."""

    def make(folder: Path) -> dict[str, Any]:
        batch, base = batch_of(), tiny("llama", tied=False)
        files = written(folder, base, batch)
        model = lora(base, use_dora=True)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "magnitude" in name:
                    p.copy_(torch.linspace(0.5, 1.5, p.numel()))
        model.save_pretrained(folder / "adapter")
        grads = {
            name: change(name, g) if "magnitude" in name else g
            for name, g in backward(model, batch).items()
            if "lora_" in name
        }
        files |= with_gradients(folder, grads) | {"adapter": folder / "adapter"}
        trained = {n: p for n, p in model.named_parameters() if n in grads}
        for name, p in trained.items():
            p.grad = grads[name]
        torch.optim.AdamW(list(trained.values()), lr=LR, weight_decay=WD).step()
        model.save_pretrained(folder / "after")
        return files | {"after": folder / "after", "optimizer": f"{RULE},step=1"}

    return make


def decayed_alone(layer: str = "") -> Callable[[Path], dict[str, Any]]:
    """Return what makes a step in which parameters of a layer, or all, decay and make no step."""

    def change(folder: Path) -> dict[str, Any]:
        given = taken(adamw(), f"{RULE},step=1")(folder)
        old = load_file(folder / "before" / "model.safetensors")
        path = folder / "after" / "model.safetensors"
        new = load_file(path)
        for name, w in old.items():
            if layer in name:
                new[name] = w * (1 - LR * WD)
        save_file(new, path, {"format": "pt"})
        return given

    return change


def without_gradient(folder: Path) -> dict[str, Any]:
    """Write a step in which the gradients of layer 1 are zero, which decays all the same."""
    model, rows = tiny("llama", tied=False), batch_of()
    made = adamw()(model)
    grads = backward(model, rows)
    for name, p in model.named_parameters():
        if ".layers.1." in name and p.grad is not None:
            p.grad.zero_()
            grads[name] = p.grad.clone()
    given = written(folder, model, rows) | with_gradients(folder, grads)
    made.step()
    model.save_pretrained(folder / "after")
    del given["batch"]
    return given | {"after": folder / "after", "optimizer": f"{RULE},step=1"}


def with_prompts(inverted: bool, padded: bool = False) -> Callable[[Path], dict[str, Any]]:
    """Return what makes gradients of rows whose first five tokens are no labels.

    `inverted`: these alone are the trainer's labels. `padded`: the last row ends with padding.
    """

    def make(folder: Path) -> dict[str, Any]:
        model, batch = tiny("llama", tied=False), batch_of()
        if padded:
            mask = torch.ones_like(batch["input_ids"])
            mask[-1, -4:] = 0
            batch = batch | {"attention_mask": mask}
        text = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
        prompt = torch.arange(text.shape[1]).expand_as(text) < 5
        ids = batch["input_ids"]
        stated = batch | {"labels": ids.masked_fill(prompt | ~text, -100)}
        scored = batch | {"labels": ids.masked_fill(~prompt | ~text, -100)}
        grads = backward(model, scored if inverted else stated)
        return written(folder, model, stated) | with_gradients(folder, grads)

    return make


def constant_sum() -> Any:
    """The sum by which the weights of the chosen experts are divided is a constant."""

    def route(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = functional.linear(x.reshape(-1, self.hidden_dim), self.weight)
        scores = functional.softmax(logits, dtype=torch.float, dim=-1)
        weights, experts = torch.topk(scores, self.top_k, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True).detach()
        return logits, weights.to(x.dtype), experts

    return patched(modeling_qwen3_moe.Qwen3MoeTopKRouter, "forward", route)


MISREAD = "backward_dequantization"
PART_FAULTS = (
    JudgedStep(
        "router_sum_constant",
        "the sum that the weights of the experts are divided by is a constant; first in layer 2",
        gradient_step("qwen3_moe", constant_sum),
        cause="backward_router",
        named="backward_router.*sum",
        at=r"at L2\.ffn_gate_inp",
    ),
    JudgedStep(
        "decayed_without_step",
        "the optimizer's step was skipped, and the decay made all the same",
        decayed_alone(),
        cause="step_skipped",
        named="step_skipped",
        where=ANY,
    ),
    JudgedStep(
        "layer_decayed_without_step",
        "layer 1 decays and makes no step",
        decayed_alone(".layers.1."),
        cause="step_skipped",
        named="step_skipped",
        where=r"^L1\.",
    ),
    JudgedStep(
        "label_mask_inverted",
        "prompts are scored, and answers are not",
        with_prompts(inverted=True),
        cause="other_labels",
        named="other_labels.*inverted",
        where=ANY,
    ),
    JudgedStep(
        "label_mask_inverted_beside_padding",
        "the same, and a row ends with padding, which is scored in neither",
        with_prompts(inverted=True, padded=True),
        cause="other_labels",
        named="other_labels.*inverted",
        where=ANY,
    ),
    JudgedStep(
        "lengths_without_gradient",
        "DoRA's lengths in layer 1 have no gradient",
        of_lengths(lambda name, g: torch.zeros_like(g) if ".layers.1." in name else g),
        cause="gradient_zero",
        named="gradient_zero",
        where=r"^L1\..*lora_magnitude",
    ),
    JudgedStep(
        "lengths_of_half_a_gradient",
        "DoRA's lengths have half of their gradient",
        of_lengths(lambda name, g: g / 2),
        cause="gradient_factor",
        named="gradient_factor.*1/2",
        where="lora_magnitude",
    ),
    JudgedStep(
        "base_without_offset",
        "the backward decodes scales of double quantization without their offset",
        misread(no_offset),
        cause=MISREAD,
        named=f"{MISREAD}.*without the offset",
        at=ANY,
    ),
    JudgedStep(
        "base_by_the_block_before",
        "the backward decodes each block of the base by the scale of the one before it",
        misread(scale_before),
        cause=MISREAD,
        named=f"{MISREAD}.*of the block before",
        at=ANY,
    ),
    JudgedStep(
        "base_of_one_scale",
        "the backward decodes the base by one scale",
        misread(one_scale),
        cause=MISREAD,
        named=f"{MISREAD}.*largest scale for all",
        at=ANY,
    ),
    JudgedStep(
        "base_by_fp4",
        "the backward decodes the codes of NF4 by the values of FP4",
        misread(by_fp4),
        cause=MISREAD,
        named=f"{MISREAD}.*by the values of FP4",
        at=ANY,
    ),
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
    JudgedStep("layer_of_zero_gradient", "layer 1 has gradients of zero, and decays",
               without_gradient),
    JudgedStep("prompts_unscored", "prompts are no labels, and a row ends with padding",
               with_prompts(inverted=False, padded=True)),
    JudgedStep("lengths", "a step of a DoRA adapter", of_lengths()),
    JudgedStep("base_read_rightly", "an NF4 base, decoded alike in both passes", misread(rightly)),
    JudgedStep("experts_clipped", "a model with experts, clipped by the norm of all",
               taken(sgd, CLIPPED, kind="qwen3_moe", before_step=clip(BOUND))),
    JudgedStep("two_groups_clipped", "two groups, clipped by the norm of both",
               taken(with_momentum, "sgd:lr=0.1,momentum=0.9,step=1,clip=0.5",
                     before_step=clip(BOUND), state=True)),
)  # fmt: skip
