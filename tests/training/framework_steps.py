"""Steps whose faults are those of kernels, shards and resumed runs, and right steps beside them.

A sixth set: norms whose backward multiplies by another factor, shards that end inside a row, counts
of steps that are not those of the moments, tied heads that are stored twice. What is right stands
in each row, written before the row was first run.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers.models.gemma import modeling_gemma
from transformers.models.llama import modeling_llama

from tests.models import tiny
from tests.training.judged_steps import (
    LR,
    NORM,
    RULE,
    WD,
    Grads,
    JudgedStep,
    adamw,
    backward,
    batch_of,
    gradient_step,
    matrices_and_rest,
    patched,
    taken,
    with_gradient_of,
    with_gradients,
    written,
)

HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"
Change = Callable[[Any, Any], None]  # of a model and its optimizer


def gemma_norm_by_weight() -> Any:
    """The backward of Gemma's norm multiplies by its weight, not by 1 + the weight."""
    own = modeling_gemma.GemmaRMSNorm.forward

    def norm(self: Any, x: torch.Tensor) -> torch.Tensor:
        other = self._norm(x.float()) * self.weight.float()
        return with_gradient_of(own(self, x), other.type_as(x))

    return patched(modeling_gemma.GemmaRMSNorm, "forward", norm)


def llama_norm_by_one_more() -> Any:
    """The backward of Llama's norm multiplies by 1 + its weight, as Gemma's does."""

    def norm(self: Any, x: torch.Tensor) -> torch.Tensor:
        scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + float(self.variance_epsilon))
        return with_gradient_of(scaled * self.weight, scaled * (1 + self.weight))

    return patched(modeling_llama.LlamaRMSNorm, "forward", norm)


def layer_norm_without_weight() -> Any:
    """The backward of a layer norm leaves out its weight; that of the weight itself is right."""
    own = torch.nn.LayerNorm.forward

    def norm(self: Any, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weight, self.bias
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + self.eps)
        return with_gradient_of(own(self, x), scaled * (1 + weight - weight.detach()) + bias)

    return patched(torch.nn.LayerNorm, "forward", norm)


def resumed(
    change: Change = lambda model, made: None,
    *,
    rule: str = "",
    grads: bool = False,
    steps: int = 5,
) -> Callable[[Path], dict[str, Any]]:
    """Return what makes the files of the last of some steps, each of another batch.

    `change` is made to the model and its optimizer before the last step. Norms do not decay.
    """

    def make(folder: Path) -> dict[str, Any]:
        model = tiny("llama", tied=False)
        made = torch.optim.AdamW(matrices_and_rest(model, weight_decay=0.0), lr=1e-3)
        rows = batch_of()
        for number in range(steps):
            ids = (rows["input_ids"] + 7 * number) % 30
            found = backward(model, rows | {"input_ids": ids})
            if number + 1 == steps:
                given = written(folder, model, rows) | (
                    with_gradients(folder, found) if grads else {}
                )
                change(model, made)
            made.step()
        model.save_pretrained(folder / "after")
        torch.save(made.state_dict(), folder / "optimizer.pt")
        del given["batch"]
        after = {"after": folder / "after", "optimizer_state": folder / "optimizer.pt"}
        return given | after | {"optimizer": rule or None}

    return make


def counting(count: float, part: str = "") -> Change:
    """Return what sets the count of steps of the parameters whose names have `part`."""

    def change(model: Any, made: Any) -> None:
        for name, p in model.named_parameters():
            if part in name:
                made.state[p]["step"] = torch.tensor(count)

    return change


def begun_late(model: Any, made: Any) -> None:
    """Let the norms be frozen until the last step: they have no moments, and no count."""
    for name, p in model.named_parameters():
        if "norm" in name:
            made.state.pop(p)


def without_gradient(model: Any, made: Any) -> None:
    """Let an MLP have no gradient in the last step."""
    for name, p in model.named_parameters():
        if ".layers.1.mlp." in name:
            p.grad = None


def cut(part: str, begin: int, stop: int) -> Callable[[Path], dict[str, Any]]:
    """Return what makes a step after which elements [begin, stop) of some weights are old ones."""

    def make(folder: Path) -> dict[str, Any]:
        given = taken(adamw(), f"{RULE},step=1")(folder)
        old = load_file(folder / "before" / "model.safetensors")
        path = folder / "after" / "model.safetensors"
        new = load_file(path)
        for name in new:
            if part in name:
                new[name].view(-1)[begin:stop] = old[name].view(-1)[begin:stop]
        save_file(new, path, {"format": "pt"})
        return given

    return make


def stored_twice(
    change: Callable[[Grads], Grads], *, step: bool = True
) -> Callable[[Path], dict[str, Any]]:
    """Return what makes a step of a tied model whose files have the head beside the table.

    `change` is made to the gradients, where the table has that of both its uses. Without `step` the
    gradients alone are to be compared.
    """

    def make(folder: Path) -> dict[str, Any]:
        model, rows = tiny("llama", tied=True), batch_of()
        made = adamw()(model)
        given = written(folder, model, rows)
        given |= with_gradients(folder, change(backward(model, rows)))
        made.step()
        model.save_pretrained(folder / "after")
        for side in ("before", "after"):
            path = folder / side / "model.safetensors"
            values = load_file(path)
            save_file(values | {HEAD: values[TABLE].clone()}, path, {"format": "pt"})
        taken_step = {"after": folder / "after", "optimizer": f"{RULE},step=1"}
        return given | (taken_step if step else {})

    return make


def of_both_names(grads: Grads) -> Grads:
    """Return gradients that name the tied table twice."""
    return grads | {HEAD: grads[TABLE].clone()}


def stale_masters(far: float, dtype: str = "float32") -> Callable[[Path], dict[str, Any]]:
    """Return what makes a step of float32 masters that are `far` from the weights beside them.

    They are of the checkpoint before the one that was loaded.
    """

    def make(folder: Path) -> dict[str, Any]:
        model, rows = tiny("llama", tied=False), batch_of()
        masters = {name: p.detach().clone() for name, p in model.named_parameters()}
        noise = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(far * torch.randn(p.shape, generator=noise))
        model = model.to(getattr(torch, dtype))
        given = written(folder, model, rows) | with_gradients(folder, backward(model, rows))
        with torch.no_grad():
            for name, p in model.named_parameters():
                grad = p.grad
                held = torch.nn.Parameter(masters[name])
                assert grad is not None
                held.grad = grad.float()
                torch.optim.AdamW([held], lr=LR, weight_decay=WD).step()
                p.copy_(held)
        model.save_pretrained(folder / "after")
        del given["batch"]
        return given | {"after": folder / "after", "optimizer": f"{RULE},step=1"}

    return make


ANY = "."
FRAMEWORK_FAULTS = (
    JudgedStep(
        "norm_without_offset",
        "Gemma's norms multiply by w in their backward, not by 1 + w; first below the last norm",
        gradient_step("gemma", gemma_norm_by_weight),
        cause="backward_norm",
        named=r"backward_norm.*not by 1 \+ w",
        at="output_norm",
    ),
    JudgedStep(
        "count_of_norms_lost",
        "the norms are stepped as at step 1, by moments of five steps",
        resumed(counting(0.0, "norm")),
        cause="step_count",
        named="step_count.*count of 1",
        where=NORM,
    ),
    JudgedStep(
        "stale_masters",
        "the masters of bfloat16 weights are those of an older checkpoint",
        stale_masters(30 * LR, "bfloat16"),
        cause="other_weights",
        named="other_weights",
        at=ANY,
    ),
    JudgedStep(
        "shard_ends_in_a_row",
        "the second half of ffn_down of layer 1 did not move, from inside a row on",
        cut(".layers.1.mlp.down_proj", 250, 512),
        cause="rows_frozen",
        named="rows_frozen.*from column",
        where=r"^L1\.ffn_down",
    ),
)
FRAMEWORK_RELATIVES = (
    JudgedStep(
        "older_masters",
        "the masters of float32 weights are those of an older checkpoint",
        stale_masters(10 * LR),
        cause="other_weights",
        named="other_weights",
        at=ANY,
    ),
    JudgedStep(
        "norm_with_offset",
        "Llama's norms multiply by 1 + w in their backward, not by w",
        gradient_step("llama", llama_norm_by_one_more),
        cause="backward_norm",
        named=r"backward_norm.*by 1 \+ w, not by the weight",
        at="output_norm",
    ),
    JudgedStep(
        "layer_norm_without_weight",
        "layer norms leave out their weight in their backward",
        gradient_step("gpt2", layer_norm_without_weight),
        cause="backward_norm",
        named="backward_norm.*leaves out their weight",
        at="output_norm",
    ),
    JudgedStep(
        "all_counts_lost",
        "all parameters are stepped as at step 1, by moments of five steps",
        resumed(counting(0.0)),
        cause="step_count",
        named="step_count.*count of 1",
        where=ANY,
    ),
    JudgedStep(
        "count_of_a_layer_behind",
        "layer 1 is stepped as at step 2, by moments of eight steps, as its matrices show",
        resumed(counting(1.0, ".layers.1."), steps=8, grads=True),
        cause="step_count",
        named="step_count.*count of 2",
        where=r"^L1\.(attn_(q|k|v|output)|ffn_(gate|up|down))\.",
    ),
    JudgedStep(
        "shard_begins_in_a_row",
        "ffn_down of layer 1 did not move before a place inside a row",
        cut(".layers.1.mlp.down_proj", 0, 250),
        cause="rows_frozen",
        named="rows_frozen.*to before column",
        where=r"^L1\.ffn_down",
    ),
    JudgedStep(
        "shard_inside_a_vector",
        "a norm did not move from its sixth element on",
        cut(".layers.1.input_layernorm", 5, 16),
        cause="rows_frozen",
        named="rows_frozen.*from column 5",
        where=r"^L1\.attn_norm",
    ),
    JudgedStep(
        "half_of_a_table_stored_twice",
        "a tied table that is stored twice has half of its gradient",
        stored_twice(lambda grads: grads | {TABLE: grads[TABLE] / 2}, step=False),
        cause="gradient_factor",
        named="gradient_factor.*1/2",
        where="token_embd",
    ),
)
FRAMEWORK_INNOCENTS = (
    JudgedStep("gemma_norms", "all gradients of a model whose norms have 1 + w",
               gradient_step("gemma")),
    JudgedStep("counted_apart", "norms that were frozen until this step", resumed(begun_late)),
    JudgedStep("no_gradient_now", "an MLP without a gradient in this step",
               resumed(without_gradient)),
    JudgedStep("table_stored_twice", "a tied table that is stored twice, with its gradient",
               stored_twice(lambda grads: grads)),
    JudgedStep("gradient_stored_twice", "the same, whose gradient is stored twice as well",
               stored_twice(of_both_names)),
)  # fmt: skip
