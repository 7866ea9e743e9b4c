"""Steps whose faults are those of public threads about trainers, and right steps that look odd.

A second set beside `judged_steps`, of other kinds: denominators of accumulation, scales not undone,
clipping in the wrong place, terms added to the loss, reductions over some ranks, states of Adam.
What is right stands in each row, written before the row was first run.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn import functional
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

from tests.models import IDS, tiny
from tests.training import judged_steps
from tests.training.judged_steps import (
    LAST,
    LR,
    NORM,
    RULE,
    WD,
    Grads,
    JudgedStep,
    adamw,
    backward,
    batch_of,
    by_name,
    clip_parts,
    gradient_step,
    lora,
    lora_of,
    model_of,
    patched,
    taken,
    with_gradient_of,
    with_gradients,
    written,
)
from tests.training.steps import save_arrays

Batch = dict[str, torch.Tensor]
Loss = Callable[[Any, Batch], torch.Tensor]
ANY_OF_LAST = rf"(L{LAST}|layer {LAST}|layers 0-{LAST})"


def loss_by(changed: Loss) -> Callable[[], Any]:
    """Return what puts another loss into the trainer."""
    return lambda: patched(judged_steps, "loss_of", changed)


own_loss = judged_steps.loss_of


def logits_and_labels(model: Any, batch: Batch, shift: int = 1) -> tuple[Any, Any]:
    """Return the scored logits and their labels."""
    given = {key: each for key, each in batch.items() if key != "labels"}
    logits = model(**given).logits[:, :-shift].float()
    labels = batch["labels"][:, shift:]
    return logits[labels >= 0], labels[labels >= 0]


def z_loss(model: Any, batch: Batch) -> torch.Tensor:
    """Add 0.01 times the square of the logarithm of the softmax's denominator."""
    logits, labels = logits_and_labels(model, batch)
    z = logits.logsumexp(-1).square().mean()
    found: torch.Tensor = functional.cross_entropy(logits, labels) + 1e-2 * z
    return found


def smoothed(model: Any, batch: Batch) -> torch.Tensor:
    """Smooth the labels by 0.1."""
    return functional.cross_entropy(*logits_and_labels(model, batch), label_smoothing=0.1)


def shifted_twice(model: Any, batch: Batch) -> torch.Tensor:
    """Shift labels that the collator has shifted already."""
    return functional.cross_entropy(*logits_and_labels(model, batch, 2))


def not_shifted(model: Any, batch: Batch) -> torch.Tensor:
    """Score each row against its own token."""
    given = {key: each for key, each in batch.items() if key != "labels"}
    logits, labels = model(**given).logits.float(), batch["labels"]
    return functional.cross_entropy(logits[labels >= 0], labels[labels >= 0])


def prompts_scored(model: Any, batch: Batch) -> torch.Tensor:
    """Score every token of the mask."""
    labels = torch.where(batch["attention_mask"] > 0, batch["input_ids"], -100)
    return own_loss(model, batch | {"labels": labels})


def row_of(batch: Batch, i: int) -> Batch:
    """Return one row of a batch."""
    return {key: x[i : i + 1] for key, x in batch.items()}


def count(batch: Batch) -> int:
    """Return the number of labels."""
    return int((batch["labels"][:, 1:] >= 0).sum())


def first_denominator(model: Any, batch: Batch) -> torch.Tensor:
    """Divide every micro-batch by the labels of the first one."""
    return own_loss(model, batch) * count(batch) / count(row_of(batch, 0))


def first_row_twice(model: Any, batch: Batch) -> torch.Tensor:
    """Add the first micro-batch up twice, the denominator as it should be."""
    again = own_loss(model, row_of(batch, 0)) * count(row_of(batch, 0)) / count(batch)
    return own_loss(model, batch) + again


def balanced(model: Any, batch: Batch) -> torch.Tensor:
    """Add the auxiliary loss of the router, 0.1 times."""
    given = {key: each for key, each in batch.items() if key != "labels"}
    aux: torch.Tensor = model(**given, output_router_logits=True, labels=batch["labels"]).aux_loss
    return own_loss(model, batch) + 0.1 * aux


def tanh_without_slope() -> Any:
    """The softcaps hand gradients through unchanged."""
    own = torch.tanh
    return patched(torch, "tanh", lambda x: with_gradient_of(own(x), x))


def softmax_without_sum() -> Any:
    """The backward of the attention's softmax lacks the sum over a row: p * g alone."""
    own = functional.softmax

    def softmax(x: torch.Tensor, *given: Any, **rest: Any) -> torch.Tensor:
        p = own(x, *given, **rest)
        return with_gradient_of(p, p.detach() * x.clamp(min=-1e9))

    return patched(functional, "softmax", softmax)


def silu_of_sigmoid() -> Any:
    """The slope of SiLU is the sigmoid alone."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        gate = self.gate_proj(x)
        act = with_gradient_of(self.act_fn(gate), torch.sigmoid(gate).detach() * gate)
        y: torch.Tensor = self.down_proj(act * self.up_proj(x))
        return y

    return patched(modeling_llama.LlamaMLP, "forward", forward)


def without_residual() -> Any:
    """The residual around layer 1 gives no gradient on."""
    own = modeling_llama.LlamaDecoderLayer.forward

    def forward(self: Any, x: torch.Tensor, *given: Any, **rest: Any) -> Any:
        value = own(self, x, *given, **rest)
        return with_gradient_of(value, value - x) if self.self_attn.layer_idx == 1 else value

    return patched(modeling_llama.LlamaDecoderLayer, "forward", forward)


def norms_of_half_the_heads() -> Any:
    """Gradients of the norms of queries and keys are those of the first half of the heads."""
    own = modeling_qwen3.Qwen3RMSNorm.forward

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = own(self, x)
        if x.ndim < 4:
            return value
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        half = (torch.arange(x.shape[2]) < x.shape[2] // 2)[None, None, :, None]
        return torch.where(half, self.weight, self.weight.detach()) * (x * scale)

    return patched(modeling_qwen3.Qwen3RMSNorm, "forward", forward)


def scaled(factor: float, chosen: Callable[[str, torch.Tensor], bool]) -> Callable[[Grads], Grads]:
    """Return what multiplies the chosen gradients."""
    return lambda grads: {n: g * (factor if chosen(n, g) else 1) for n, g in grads.items()}


def clipped_scaled(grads: Grads) -> Grads:
    """Clip to 1 gradients that carry the loss scale 1024, and take the scale off afterwards."""
    norm = float(torch.stack([g.square().sum() for g in grads.values()]).sum().sqrt()) * 1024
    return {name: g * min(1.0, 1 / norm) for name, g in grads.items()}


def by_value(bound: float) -> Callable[[Any], None]:
    """Return what clips every element of the gradients."""
    return lambda model: torch.nn.utils.clip_grad_value_(model.parameters(), bound)


def sgd(model: Any) -> torch.optim.Optimizer:
    """Return plain SGD."""
    return torch.optim.SGD(list(model.named_parameters()), lr=0.1)


def rule_step(
    rule: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], stated: str, dtype: str = "float32"
) -> Callable[[Path], dict[str, Any]]:
    """Return what makes the files of a step by a rule of the weights and their gradients."""

    def make(folder: Path) -> dict[str, Any]:
        model, batch = tiny("llama", tied=False).to(getattr(torch, dtype)), batch_of()
        grads = backward(model, batch)
        given = written(folder, model, batch) | with_gradients(folder, grads)
        del given["batch"]
        torch.manual_seed(judged_steps.SEED)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(rule(p.float(), grads[name].float()))
        model.save_pretrained(folder / "after")
        return given | {"after": folder / "after", "optimizer": stated}

    return make


def direction(g: torch.Tensor) -> torch.Tensor:
    """Return the direction of Adam's first step."""
    return g / (g.abs() + 1e-8)


def decayed_without_rate(w: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """Decay by the whole of the weight decay, not by rate times decay."""
    return w * (1 - WD) - LR * direction(g)


def counted(number: int, *, second: bool = True) -> Callable[[Any, Any], torch.Tensor]:
    """Return AdamW's first step whose moments are corrected for step `number`."""

    def rule(w: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        m = 0.1 * g / (1 - 0.9**number)
        v = 1e-3 * g.square() / ((1 - 0.999**number) if second else 1)
        return w * (1 - LR * WD) - LR * m / (v.sqrt() + 1e-8)

    return rule


def stochastic(w: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """Take AdamW's first step and round it to bfloat16 at random."""
    made = (w * (1 - LR * WD) - LR * direction(g)).view(torch.int32)
    return ((made + torch.randint(0, 1 << 16, made.shape)) & -65536).int().view(torch.float32)


def frozen_decays(folder: Path) -> dict[str, Any]:
    """Write a step of AdamW in which layer 1 is frozen, but has gradients of zero, and decays."""
    model, batch = tiny("llama", tied=False), batch_of()
    grads = backward(model, batch)
    held = {name: g for name, g in grads.items() if ".layers.1." not in name}
    given = written(folder, model, batch) | with_gradients(folder, held)
    del given["batch"]
    for name, p in model.named_parameters():
        if name not in held:
            p.grad.zero_()
    adamw()(model).step()
    model.save_pretrained(folder / "after")
    return given | {"after": folder / "after", "optimizer": f"{RULE},step=1"}


def amsgrad(folder: Path) -> dict[str, Any]:
    """Write the third step of Adam that divides by the largest second moment so far."""
    model, batch = tiny("llama", tied=False), batch_of()
    made = torch.optim.AdamW(
        list(model.named_parameters()), lr=LR, weight_decay=WD, amsgrad=True, betas=(0.9, 0.5)
    )
    for number in range(3):
        grads = backward(model, batch)
        if number == 2:
            given = written(folder, model, batch) | with_gradients(folder, grads)
        for p in model.parameters():
            p.grad *= 100 if number == 0 else 1
        made.step()
    model.save_pretrained(folder / "after")
    state = by_name(model, made.state)
    kept = {name: x for name, x in state.items() if not name.endswith("max_exp_avg_sq")}
    save_arrays(folder / "state.npz", kept)
    del given["batch"]
    return given | {
        "after": folder / "after",
        "optimizer": f"{RULE},b2=0.5,step=3",
        "optimizer_state": folder / "state.npz",
    }


def rank_stabilized(trained: bool, said: bool) -> Callable[[Path], dict[str, Any]]:
    """Return what makes the files of an adapter scaled by alpha / sqrt(r), or said to be so."""

    def make(folder: Path) -> dict[str, Any]:
        batch = batch_of()
        grads = {n: g for n, g in backward(lora_of(trained), batch).items() if "lora_" in n}
        given = written(folder, model_of("llama"), batch) | with_gradients(folder, grads)
        lora_of(said).save_pretrained(folder / "adapter")
        return given | {"adapter": folder / "adapter"}

    return make


THREAD_FAULTS = (
    JudgedStep(
        "tied_halved",
        "the gradient of the tied table is half: averaged over its two uses",
        gradient_step("gpt2", change=scaled(0.5, lambda n, _: "wte" in n)),
        cause="gradient_factor",
        named="gradient_factor.*1/2|gradient_tied",
        where="token_embd",
    ),
    JudgedStep(
        "first_denominator",
        "all micro-batches are divided by the labels of the first",
        gradient_step("llama", loss_by(first_denominator)),
        cause="gradient_factor",
        named="gradient_factor|denominator",
        where=".",
    ),
    JudgedStep(
        "first_row_twice",
        "the first micro-batch is counted twice",
        gradient_step("llama", loss_by(first_row_twice)),
        cause="samples_weighted",
        named="sample",
        where=".",
    ),
    JudgedStep(
        "norms_not_unscaled",
        "the loss scale 65536 is taken off matrices, not off norms",
        gradient_step("llama", change=scaled(65536.0, lambda _, g: g.ndim < 2)),
        cause="gradient_factor",
        named="gradient_factor.*65536",
        where=NORM,
    ),
    JudgedStep(
        "clipped_before_unscale",
        "clipped to 1 while the loss scale 1024 was on: the norm is 1/1024",
        gradient_step("llama", change=clipped_scaled),
        cause="clip_before_unscale",
        named="clip",
        where=".",
    ),
    JudgedStep(
        "each_clipped",
        "every parameter is clipped by its own norm",
        taken(sgd, "sgd:lr=0.1,clip=0.05", before_step=clip_parts(0.05, lambda name, _: name)),
        cause="clip_by_tensor",
        named="clip",
        at=".",
    ),
    JudgedStep(
        "clipped_by_value",
        "each element is clipped to 0.003, not the norm of all to 1",
        taken(sgd, "sgd:lr=0.1,clip=1", before_step=by_value(0.003)),
        cause="clip_by_value",
        named=r"clip.*0\.003",
        at=".",
    ),
    JudgedStep(
        "value_not_clipped",
        "elements should be clipped to 0.003 and are not",
        taken(sgd, "sgd:lr=0.1,clip_value=0.003"),
        cause="clip_missing",
        named=r"clip_missing.*0\.003",
        at=".",
    ),
    JudgedStep(
        "value_clipped_before_unscale",
        "elements are clipped to 1 while the loss scale 1024 is on",
        gradient_step("llama", change=lambda grads: at_bound(2.0**-10)(grads)),
        cause="clip_before_unscale",
        named="clip_before_unscale.*each element.*1024",
        where=".",
    ),
    JudgedStep(
        "value_clipped_but_one_dead",
        "elements are clipped to 0.003, and the keys of layer 1 have no gradient",
        gradient_step(
            "llama",
            change=lambda grads: at_bound(0.003)(
                scaled(0.0, lambda n, _: "layers.1.self_attn.k_proj" in n)(grads)
            ),
        ),
        cause="gradient_zero",
        named="gradient_zero",
        where=r"L1\.attn_k\.weight",
    ),
    JudgedStep(
        "rank_stabilized_unsaid",
        "the adapter is scaled by alpha/sqrt(r), its file says alpha/r",
        rank_stabilized(True, False),
        cause="adapter_scale",
        named="sqrt|root|stabili",
        where="lora",
    ),
    JudgedStep(
        "frozen_decays",
        "layer 1 has no gradient and decays all the same",
        frozen_decays,
        cause="moved_without_gradient",
        named="moved_without_gradient.*its weight decay alone",
        where=r"^L1\.",
    ),
    JudgedStep(
        "decayed_without_rate",
        "the decay is not multiplied by the rate",
        rule_step(decayed_without_rate, f"{RULE},step=1"),
        cause="decay_factor",
        named="decay",
        where=".",
    ),
    JudgedStep(
        "steps_of_micro_batches",
        "the step is counted by micro-batch: moments corrected for step 3 at step 1",
        rule_step(counted(3), f"{RULE},step=1"),
        cause="step_count",
        named="step_count.*step 3",
        where=".",
    ),
    JudgedStep(
        "second_not_corrected",
        "the second moment is not corrected",
        rule_step(counted(1, second=False), f"{RULE},step=1"),
        cause="bias_correction",
        named="bias_correction",
        where=".",
    ),
    JudgedStep(
        "amsgrad_unsaid",
        "Adam divides by the largest second moment so far; it is said to be AdamW",
        amsgrad,
        named="amsgrad|largest",
        at=".",
    ),
    JudgedStep(
        "shard_halved",
        "the first shard (table and layer 0) is divided by twice the ranks",
        gradient_step(
            "llama", change=scaled(0.5, lambda n, _: "embed_tokens" in n or ".layers.0." in n)
        ),
        cause="gradient_factor",
        named="gradient_factor.*1/2",
        where=r"^(token_embd|L0\.)",
    ),
    JudgedStep(
        "qk_norms_of_one_rank",
        "norms of queries and keys have the gradient of half the heads",
        gradient_step("qwen3", norms_of_half_the_heads),
        named="head|ranks",
        where=r"attn_[qk]_norm",
    ),
    JudgedStep(
        "z_loss",
        "0.01 of the squared log of the softmax's denominator is in the loss",
        gradient_step("llama", loss_by(z_loss)),
        cause="loss_term",
        named="loss_term.*0.01 times the z-loss",
        where=".",
    ),
    JudgedStep(
        "router_balanced",
        "the auxiliary loss of the router is in the gradients",
        gradient_step("mixtral", loss_by(balanced)),
        cause="router_loss",
        named="load balancing over all layers, an auxiliary loss.*0.1 times; it is not stated",
        at="ffn_gate_inp",
    ),
    JudgedStep(
        "labels_smoothed",
        "labels are smoothed by 0.1",
        gradient_step("llama", loss_by(smoothed)),
        cause="loss_term",
        named="loss_term.*smoothed by 0.1",
        where=".",
    ),
    JudgedStep(
        "shifted_twice",
        "labels are shifted twice",
        gradient_step("llama", loss_by(shifted_twice)),
        cause="other_labels",
        named="other_labels.*shifted twice",
        where=".",
    ),
    JudgedStep(
        "not_shifted",
        "labels are not shifted: each row is scored against its own token",
        gradient_step("llama", loss_by(not_shifted)),
        cause="other_labels",
        named="other_labels.*not shifted",
        where=".",
    ),
    JudgedStep(
        "prompts_scored",
        "prompts are scored, too",
        gradient_step("llama", loss_by(prompts_scored)),
        cause="other_labels",
        named="other_labels.*prompts",
        where=".",
    ),
    JudgedStep(
        "softcap_identity",
        "the backward of the softcaps is the identity; first at the logits",
        gradient_step("gemma2", tanh_without_slope),
        named="softcap|cap",
        at="output|logits|attn",
    ),
    JudgedStep(
        "softmax_without_sum",
        "the backward of the softmax lacks the sum over its row; first in layer 2",
        gradient_step("llama", softmax_without_sum),
        named="softmax",
        at=ANY_OF_LAST,
    ),
    JudgedStep(
        "silu_of_sigmoid",
        "the slope of SiLU is the sigmoid alone; first in layer 2",
        gradient_step("llama", silu_of_sigmoid),
        named="silu|activation|gate",
        at=rf"L{LAST}\.ffn",
    ),
    JudgedStep(
        "residual_detached",
        "the residual around layer 1 gives no gradient on: first in layer 0",
        gradient_step("llama", without_residual),
        named="residual",
        at=r"L0|L1|layer [01]",
    ),
    JudgedStep(
        "embedding_not_scaled",
        "the table's gradient lacks the root of the width, by which its rows are multiplied",
        gradient_step("gemma2", change=scaled(64**-0.5, lambda n, _: "embed_tokens" in n)),
        cause="gradient_factor",
        named="gradient_factor",
        where="token_embd",
    ),
)


def whole(kind: str, batch: Batch | None = None) -> Callable[[Path], dict[str, Any]]:
    """Return what makes the files of right gradients."""

    def make(folder: Path) -> dict[str, Any]:
        model, rows = model_of(kind), batch_of() if batch is None else batch
        return written(folder, model, rows) | with_gradients(folder, backward(model, rows))

    return make


def left_padded() -> Batch:
    """Return two rows, the second padded at its beginning, whose first token is not scored."""
    ids = torch.tensor([IDS[:16], (0,) * 6 + tuple(IDS[4:14])])
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    labels = ids.clone()
    labels[1, :7] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def one_without_labels() -> Batch:
    """Return a batch of which one row scores nothing."""
    batch = batch_of()
    labels = batch["labels"].clone()
    labels[1] = -100
    return batch | {"labels": labels}


def wrapped_names(folder: Path) -> dict[str, Any]:
    """Write gradients by the names of a model that is compiled and wrapped for many devices."""
    model, batch = model_of("llama"), batch_of()
    grads = {f"module._orig_mod.{n}": g for n, g in backward(model, batch).items()}
    return written(folder, model, batch) | with_gradients(folder, grads)


def changed_files(
    change: Callable[[Grads], Grads], **given: Any
) -> Callable[[Path], dict[str, Any]]:
    """Return what makes files whose gradients are changed, rightly."""

    def make(folder: Path) -> dict[str, Any]:
        model, batch = model_of("llama"), batch_of()
        grads = change(backward(model, batch))
        return written(folder, model, batch) | with_gradients(folder, grads) | given

    return make


def at_bound(bound: float) -> Callable[[Grads], Grads]:
    """Return what clips every element."""
    return lambda grads: {n: g.clamp(-bound, bound) for n, g in grads.items()}


def unscaled_half(grads: Grads) -> Grads:
    """Keep gradients in float16 under a loss scale of 1024, and take the scale off there."""
    return {n: (g * 1024).half() / 1024 for n, g in grads.items()}


def normed(grads: Grads) -> Grads:
    """Clip by the norm of all, as torch does."""
    total = torch.nn.utils.get_total_norm(list(grads.values()))
    return {n: g * torch.clamp(0.5 / (total + 1e-6), max=1.0) for n, g in grads.items()}


def lora_of_bfloat16(folder: Path) -> dict[str, Any]:
    """Write gradients of an adapter in float32 over a base in bfloat16."""
    base, batch = tiny("llama", tied=False).to(torch.bfloat16), batch_of()
    given = written(folder, base, batch)
    model = lora(base)
    grads = {n: g for n, g in backward(model, batch).items() if "lora_" in n}
    model.save_pretrained(str(folder / "adapter"))
    return given | with_gradients(folder, grads) | {"adapter": folder / "adapter"}


def of_masters(folder: Path) -> dict[str, Any]:
    """Write a step of float32 weights whose checkpoints are in bfloat16."""
    model, batch = tiny("llama", tied=False), batch_of()
    grads = backward(model, batch)
    save_file(grads, folder / "grads.safetensors")
    made = torch.optim.AdamW(list(model.named_parameters()), lr=2e-2, weight_decay=WD)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.to(torch.bfloat16).save_pretrained(folder / "before")
    model.float()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(start[name])
    for name, p in model.named_parameters():
        p.grad = grads[name]
    made = torch.optim.AdamW(list(model.named_parameters()), lr=2e-2, weight_decay=WD)
    made.step()
    model.to(torch.bfloat16).save_pretrained(folder / "after")
    return {
        "model": folder / "before",
        "after": folder / "after",
        "grads": [folder / "grads.safetensors"],
        "optimizer": f"adamw:lr=2e-2,wd={WD},step=1",
    }


def dampened(model: Any) -> torch.optim.Optimizer:
    """Return SGD with decay and a dampened momentum."""
    return torch.optim.SGD(
        list(model.named_parameters()), lr=0.1, weight_decay=0.01, momentum=0.9, dampening=0.1
    )


THREAD_INNOCENTS = (
    JudgedStep(
        "saved_in_bfloat16",
        "gradients of float32, saved in bfloat16",
        changed_files(lambda grads: {n: g.bfloat16() for n, g in grads.items()}),
    ),
    JudgedStep(
        "value_clipped_in_the_step",
        "each element clipped to 0.003, which nothing says",
        taken(sgd, "sgd:lr=0.1", before_step=by_value(0.003)),
    ),
    JudgedStep(
        "value_clipped_as_stated",
        "each element clipped as stated",
        taken(sgd, "sgd:lr=0.1,clip_value=0.003", before_step=by_value(0.003)),
    ),
    JudgedStep("value_clipped", "gradients clipped by value", changed_files(at_bound(0.003))),
    JudgedStep("norm_clipped", "gradients clipped by norm", changed_files(normed)),
    JudgedStep(
        "unscaled_in_float16",
        "gradients scaled and unscaled in float16",
        changed_files(unscaled_half, trained_in="float16"),
    ),
    JudgedStep("softcaps", "all gradients of a model with softcaps", whole("gemma2")),
    JudgedStep("qk_norms", "all gradients of a model with norms of its keys", whole("qwen3")),
    JudgedStep("joined", "all gradients of a model with joined projections", whole("gpt_neox")),
    JudgedStep("left_padded", "a row padded at its beginning", whole("llama", left_padded())),
    JudgedStep("unlabelled_row", "a row without labels", whole("llama", one_without_labels())),
    JudgedStep("wrapped_names", "names of a compiled, wrapped model", wrapped_names),
    JudgedStep("lora_of_bfloat16", "an adapter in float32 over bfloat16", lora_of_bfloat16),
    JudgedStep(
        "dampened",
        "SGD with decay and dampened momentum, by its state",
        taken(dampened, "", steps=3, state=True),
    ),
    JudgedStep(
        "amsgrad_first",
        "the first step of AMSGrad, which is Adam's",
        taken(adamw(amsgrad=True), f"{RULE},step=1"),
    ),
    JudgedStep("masters", "float32 weights, checkpoints in bfloat16", of_masters),
    JudgedStep(
        "stochastic",
        "rounded to bfloat16 at random",
        rule_step(stochastic, f"{RULE},step=1", dtype="bfloat16"),
    ),
)
