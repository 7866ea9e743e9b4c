"""Steps whose faults trainers' users reported, and right steps that look like faults.

A fourth set, of other kinds: experts over ranks, activations computed again, clipping over shards,
decay made twice, padding that is attended to, positions that count it, noise in embeddings, rates
by layer, moments in few bits, shards of the vocabulary. What is right stands in each row, written
before the row was first run.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.models import VOCAB, tiny
from tests.training.judged_steps import (
    LAST,
    LR,
    RULE,
    SEED,
    WD,
    Grads,
    JudgedStep,
    adamw,
    backward,
    batch_of,
    clip,
    clip_parts,
    gradient_step,
    lora,
    matrices_and_rest,
    model_of,
    packed,
    taken,
    with_gradients,
    written,
)
from tests.training.steps import save_arrays
from tests.training.thread_steps import (
    Batch,
    direction,
    left_padded,
    rank_stabilized,
    row_of,
    rule_step,
    scaled,
    sgd,
)


def without_layers(grads: Grads) -> Grads:
    """Give zeros to all parameters of the layers: checkpointed, and nothing before them trains."""
    return {n: g * (0 if ".layers." in n else 1) for n, g in grads.items()}


def decayed_twice(w: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """Decay before the optimizer, which decays too."""
    return w * (1 - LR * WD) * (1 - LR * WD) - LR * direction(g)


def moment_in(kind: torch.dtype) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return AdamW's first step whose second moment is kept in 16 bits."""

    def rule(w: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        v = (1e-3 * g.square()).to(kind).float() / 1e-3
        return w * (1 - LR * WD) - LR * g / (v.sqrt() + 1e-8)

    return rule


def layer_of(name: str, _: torch.Tensor) -> str:
    """Return the number of the layer that has a parameter; "" outside the layers."""
    return name.partition(".layers.")[2].partition(".")[0]


def on_left_padding(
    kind: str, change: Callable[[Batch], Batch] | None = None
) -> Callable[[Path], dict[str, Any]]:
    """Return what makes the files of gradients of a padded batch that the trainer passes changed.

    Without a change the positions are those of the tokens.
    """

    def make(folder: Path) -> dict[str, Any]:
        model, batch = model_of(kind), left_padded()
        right = batch | {"position_ids": (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)}
        grads = backward(model, right if change is None else change(batch))
        return written(folder, model, batch) | with_gradients(folder, grads)

    return make


def attending_padding(batch: Batch) -> Batch:
    """Pass a mask of ones: the collator found no padding at the end of the row."""
    return batch | {"attention_mask": torch.ones_like(batch["attention_mask"])}


def counting_padding(batch: Batch) -> Batch:
    """Number the tokens from the beginning of the row, padding among them."""
    return batch | {"position_ids": torch.arange(16).expand(2, 16)}


def noisy_embeddings() -> Any:
    """The embeddings have uniform noise, as NEFTune adds it."""
    model = model_of("llama")
    torch.manual_seed(SEED)

    class Noise:
        def __enter__(self) -> None:
            self.hook = model.model.embed_tokens.register_forward_hook(
                lambda module, given, x: x + torch.empty_like(x).uniform_(-0.1, 0.1)
            )

        def __exit__(self, *error: Any) -> None:
            self.hook.remove()

    return Noise()


def rates_by_layer(model: Any) -> torch.optim.Optimizer:
    """Return AdamW with half of the rate in layer 1, and a quarter in layer 0."""
    named = list(model.named_parameters())
    groups = [
        {"params": [(n, p) for n, p in named if f".layers.{i}." in n], "lr": LR / 2 ** (LAST - i)}
        for i in range(LAST)
    ]
    rest = [(n, p) for n, p in named if not any(f".layers.{i}." in n for i in range(LAST))]
    return torch.optim.AdamW([*groups, {"params": rest}], lr=LR, weight_decay=WD)


def without_half_of_the_vocabulary(grads: Grads) -> Grads:
    """Give no gradient to the rows of the table from half of the vocabulary on."""
    table = "model.embed_tokens.weight"
    made = grads[table].clone()
    made[VOCAB // 2 :] = 0
    return grads | {table: made}


TRAINER_FAULTS = (
    JudgedStep(
        "experts_twice",
        "all experts have twice their gradient: summed over the ranks that hold them",
        gradient_step("mixtral", change=scaled(2.0, lambda n, _: ".experts." in n)),
        cause="gradient_factor",
        named="gradient_factor.*2 times",
        where=r"ffn_(gate|up|down)_exps",
    ),
    JudgedStep(
        "layers_without_gradient",
        "no parameter of a layer has a gradient: nothing before checkpointed layers trains",
        gradient_step("llama", change=without_layers),
        cause="gradient_zero",
        named="gradient_zero",
        where=r"^L\d",
    ),
    JudgedStep(
        "clipped_by_shard",
        "two ranks clip their shards to 0.5, each by its own norm",
        taken(
            sgd,
            "sgd:lr=0.1,clip=0.5",
            before_step=clip_parts(0.5, lambda n, p: layer_of(n, p) in ("0", "1")),
        ),
        cause="clip_by_tensor",
        named="clip",
        where=".",
    ),
    JudgedStep(
        "decayed_twice",
        "the decay is made twice: before the optimizer and by it",
        rule_step(decayed_twice, f"{RULE},step=1"),
        cause="decay_factor",
        named="decay_factor.*twice",
        where=".",
    ),
    JudgedStep(
        "second_moment_in_float16",
        "the second moment is kept in float16, where small ones are zero",
        rule_step(moment_in(torch.float16), f"{RULE},step=1"),
        cause="moment_rounded",
        named="second moment",
        where=".",
    ),
    JudgedStep(
        "padding_attended",
        "tokens attend to the padding at the beginning of their row",
        on_left_padding("llama", attending_padding),
        cause="padding_seen",
        named="padding",
        where=".",
    ),
    JudgedStep(
        "padding_counted",
        "positions count the padding at the beginning of the row",
        on_left_padding("gpt2", counting_padding),
        cause="padding_seen",
        named="position",
        where=r"^(?!.*attn_k\.bias)",  # whose gradients are zero
    ),
    JudgedStep(
        "noise_in_embeddings",
        "noise is added to the embeddings: the gradients are of another forward pass",
        gradient_step("llama", noisy_embeddings),
        named="noise|dropout",
        where=".",
    ),
    JudgedStep(
        "rates_by_layer",
        "layer 1 has half of the rate, layer 0 a quarter of it",
        taken(rates_by_layer, f"{RULE},step=1"),
        cause="step_factor",
        named="step_factor.*(1/2|1/4)",
        where=r"^L[01]\.",
    ),
    JudgedStep(
        "half_of_the_vocabulary",
        "rows of the table from half of the vocabulary on have no gradient",
        gradient_step("llama", change=without_half_of_the_vocabulary),
        cause="gradient_rows",
        named="gradient_rows",
        where="token_embd",
    ),
)


def kahan(folder: Path) -> dict[str, Any]:
    """Write step 3 of AdamW in bfloat16 that carries what rounding takes in a second number."""
    model, batch = tiny("llama", tied=False).to(torch.bfloat16), batch_of()
    rest = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    moments = {n: [torch.zeros(p.shape), torch.zeros(p.shape)] for n, p in model.named_parameters()}
    for step in (1, 2, 3):
        grads = backward(model, batch)
        if step == 3:
            given = written(folder, model, batch) | with_gradients(folder, grads)
        with torch.no_grad():
            for n, p in model.named_parameters():
                m, v = moments[n]
                g = grads[n].float()
                m.lerp_(g, 0.1)
                v.mul_(0.999).addcmul_(g, g, value=1e-3)
                under = (v / (1 - 0.999**step)).sqrt() + 1e-8
                change = -1e-5 * (m / (1 - 0.9**step) / under)
                rest[n].add_(change.to(torch.bfloat16))
                old = p.clone()
                p.add_(rest[n])
                rest[n].add_(old - p)
    model.save_pretrained(folder / "after")
    state = {
        f"{n}.{key}": x.float().numpy()
        for n, (m, v) in moments.items()
        for key, x in (("exp_avg", m), ("exp_avg_sq", v), ("kahan_comp", rest[n]))
    }
    steps = {f"{n}.step": np.full(1, 3.0) for n in moments}
    save_arrays(folder / "state.npz", state | steps)
    del given["batch"], given["grads"]
    return given | {
        "after": folder / "after",
        "optimizer": "adamw:lr=1e-5,step=3",
        "optimizer_state": folder / "state.npz",
    }


def decoupled_adam(model: Any) -> torch.optim.Optimizer:
    """Return torch's Adam whose decay is decoupled, as its state says."""
    return torch.optim.Adam(
        list(model.named_parameters()), lr=LR, weight_decay=WD, decoupled_weight_decay=True
    )


def head_beside_table(folder: Path) -> dict[str, Any]:
    """Write the first step of a tied model, after which the head is saved beside the table."""
    given = taken(adamw(), f"{RULE},step=1", kind="gpt2", batch=True)(folder)
    path = folder / "after" / "model.safetensors"
    values = load_file(path)
    table = next(name for name in values if "wte" in name)
    head = "lm_head.weight"
    save_file(values | {head: values[table].clone()}, path, {"format": "pt"})
    return given


def in_shards(folder: Path) -> dict[str, Any]:
    """Write a first step, after which the checkpoint is in several files."""
    given = taken(adamw(), f"{RULE},step=1")(folder)
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder / "after")
    model.save_pretrained(folder / "shards", max_shard_size="50KB")
    return given | {"after": folder / "shards"}


def adapter_of(dropout: float, rows: int = 3) -> Callable[[Path], dict[str, Any]]:
    """Return what makes the files of gradients of an adapter, of the first rows of its batch."""

    def make(folder: Path) -> dict[str, Any]:
        model = lora(tiny("llama", tied=False), lora_dropout=dropout).train()
        batch = batch_of()
        some = {key: x[:rows] for key, x in batch.items()}
        grads = {n: g for n, g in backward(model, some).items() if "lora_" in n}
        given = written(folder, model_of("llama"), batch) | with_gradients(folder, grads)
        model.save_pretrained(folder / "adapter")
        return given | {"adapter": folder / "adapter"}

    return make


def scheduled_groups(last: float, frozen: str = "") -> Callable[[Path], dict[str, Any]]:
    """Return what makes step 2 of two groups, after which the schedule sets `last` of a rate.

    `frozen` is a part of the names of parameters that stay as they were.
    """
    return taken(
        lambda model: torch.optim.AdamW(
            matrices_and_rest(model, lr=0.1 * LR), lr=LR, weight_decay=WD
        ),
        "",
        steps=2,
        state=True,
        grads=False,
        schedule=lambda step: (1.0, 0.6, last)[step],
        frozen=frozen,
    )


def layer_of_one_row(folder: Path) -> dict[str, Any]:
    """Write gradients of which those of layer 1 are of the first row: a rank alone."""
    model, batch = model_of("llama"), batch_of()
    alone = backward(model, row_of(batch, 0))
    grads = {n: alone[n] if ".layers.1." in n else g for n, g in backward(model, batch).items()}
    return written(folder, model, batch) | with_gradients(folder, grads)


def clipped_by_kind(folder: Path) -> dict[str, Any]:
    """Write step 3 of AdamW with the state of before it; matrices and norms clipped apart."""
    model, batch = tiny("llama", tied=False), batch_of()
    made = adamw()(model)
    for step in (1, 2, 3):
        grads = backward(model, batch)
        if step == 3:
            given = written(folder, model, batch) | with_gradients(folder, grads)
            torch.save(made.state_dict(), folder / "optimizer.pt")
            clip_parts(0.1, lambda _, p: p.ndim > 1)(model)
        made.step()
    model.save_pretrained(folder / "after")
    del given["batch"]
    files = {"after": folder / "after", "optimizer_state": folder / "optimizer.pt"}
    return given | files | {"optimizer": f"{RULE},step=3,clip=0.1"}


TRAINER_RELATIVES = (
    JudgedStep(
        "clipped_by_kind",
        "matrices and norms are clipped by their own norms, in step 3 of AdamW",
        clipped_by_kind,
        cause="clip_by_tensor",
        named="clip_by_tensor.*of (matrices|vectors).* that they have together",
        where=".",
    ),
    JudgedStep(
        "norm_of_four_copies",
        "the norm that clips to 0.5 is that of four copies of the gradients: half of the step",
        taken(sgd, "sgd:lr=0.1,clip=0.5", before_step=clip(0.25)),
        cause="step_factor",
        named="step_factor.*as of 4 copies",
        where=".",
    ),
    JudgedStep(
        "rank_stabilized_untrained",
        "the adapter is scaled by alpha/r, its file says alpha/sqrt(r)",
        rank_stabilized(False, True),
        cause="adapter_scale",
        named="adapter_scale.*over the root of r",
        where="lora",
    ),
    JudgedStep(
        "edge_scored",
        "the first token of the second document of a packed row is scored",
        lambda folder: packed(folder, edge=True),
        cause="other_labels",
        named="other_labels.*first token of each document",
        where=".",
    ),
    JudgedStep(
        "edge_scored_and_joined",
        "the same, and the documents of the row see each other",
        lambda folder: packed(folder, edge=True, cached=True),
        cause="other_labels",
        named="other_labels.*first token of each document.*attend to each other",
        where=".",
    ),
    JudgedStep(
        "layer_of_one_row",
        "layer 1 has the gradient of the first row alone: not reduced over ranks",
        layer_of_one_row,
        cause="samples_left_out",
        named="samples_left_out.*of 3 samples number 2, 3 are not in it: all other gradients",
        where=r"^L1\.",
    ),
    JudgedStep(
        "clipped_by_layer",
        "each layer, and what is outside them, is clipped to 0.5 by its own norm",
        taken(sgd, "sgd:lr=0.1,clip=0.5", before_step=clip_parts(0.5, layer_of)),
        cause="clip_by_tensor",
        named="clip",
        where=".",
    ),
    JudgedStep(
        "second_moment_in_bfloat16",
        "the second moment is kept in bfloat16",
        rule_step(moment_in(torch.bfloat16), f"{RULE},step=1"),
        cause="moment_rounded",
        named="second moment",
        where=".",
    ),
    JudgedStep(
        "padding_attended_and_counted",
        "tokens attend to the padding at the beginning of their row, and positions count it",
        on_left_padding("gpt2", attending_padding),
        cause="padding_seen",
        named="padding",
        where=r"^(?!.*attn_k\.bias)",
    ),
    JudgedStep(
        "dropout_of_an_adapter",
        "the dropout of an adapter is active",
        adapter_of(0.2),
        cause="dropout_active",
        named="dropout",
        at=".",
    ),
    JudgedStep(
        "row_of_an_adapter",
        "two of three micro-batches are lost in an adapter's gradients",
        adapter_of(0.0, rows=1),
        cause="samples_left_out",
        named="samples_left_out",
        where=".",
    ),
    JudgedStep(
        "scheduled_and_frozen",
        "a state whose schedule went on, and layer 1 did not move",
        scheduled_groups(0.5, "layers.1."),
        cause="frozen",
        named="frozen",
        where=r"^L1\.",
    ),
)
TRAINER_INNOCENTS = (
    JudgedStep("kahan", "bfloat16 weights whose rounding is kept in a second number", kahan),
    JudgedStep("decoupled_adam", "Adam with a decoupled decay, by its state",
               taken(decoupled_adam, "", steps=3, state=True, grads=False)),
    JudgedStep("head_beside_table", "a tied model whose head is saved beside the table",
               head_beside_table),
    JudgedStep("in_shards", "a checkpoint in several files after the step", in_shards),
    JudgedStep("scheduled", "a state saved after the schedule set the next rate",
               taken(adamw(), "", steps=3, state=True, grads=False,
                     schedule=lambda step: 1 / (1 + step))),
    JudgedStep("scheduled_groups", "the same with two groups of parameters",
               scheduled_groups(0.5)),
    JudgedStep("scheduled_to_zero", "a state whose schedule has ended at a rate of zero",
               scheduled_groups(0.0)),
    JudgedStep("counted_by_rope", "rope whose positions count the padding, which turns nothing",
               on_left_padding("llama", counting_padding)),
)  # fmt: skip
