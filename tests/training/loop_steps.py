"""Steps whose faults are those of collators, loops and checkpoints, and right steps beside them.

A third set beside `judged_steps` and `thread_steps`, of other kinds: what a collator lets out, how
a loop counts and saves, how shards are put together. What is right stands in each row, written
before the row was first run.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.nn import functional
from transformers.models.llama import modeling_llama

from tests.models import IDS, tiny
from tests.training.judged_steps import (
    LAST,
    LR,
    RULE,
    WD,
    Grads,
    JudgedStep,
    adamw,
    backward,
    batch_of,
    by_name,
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
from tests.training.thread_steps import (
    Batch,
    changed_files,
    direction,
    logits_and_labels,
    loss_by,
    own_loss,
    row_of,
    rule_step,
    sgd,
    whole,
)

PAD = IDS[6]  # a token of the text that a collator takes for padding


def tempered(model: Any, batch: Batch) -> torch.Tensor:
    """Divide the logits by a temperature of 2."""
    given = {key: each for key, each in batch.items() if key != "labels"}
    logits = model(**given).logits[:, :-1].float() / 2
    return functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())


def means_of_halves(model: Any, batch: Batch) -> torch.Tensor:
    """Average the means of both halves of the row, as ranks that share its positions do."""
    given = {key: each for key, each in batch.items() if key != "labels"}
    logits, labels = model(**given).logits[:, :-1].float(), batch["labels"][:, 1:]
    halves = [
        functional.cross_entropy(x.flatten(0, 1), y.flatten())
        for x, y in ((logits[:, part], labels[:, part]) for part in (slice(8), slice(8, None)))
    ]
    return torch.stack(halves).mean()


def pad_token_unscored(model: Any, batch: Batch) -> torch.Tensor:
    """Score no token that equals the padding, of the text either."""
    labels = batch["labels"].masked_fill(batch["input_ids"] == PAD, -100)
    return own_loss(model, batch | {"labels": labels})


def truncated(model: Any, batch: Batch) -> torch.Tensor:
    """Cut every row after 12 tokens."""
    return own_loss(model, {key: x[:, :12] for key, x in batch.items()})


def bias_of_one_row() -> Any:
    """Gradients of the biases of queries, keys and values are those of the first row."""
    own = torch.nn.Linear.forward

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if self.bias is None or x.ndim < 3:
            return own(self, x)
        first = (torch.arange(x.shape[0]) == 0)[:, None, None]
        bias = torch.where(first, self.bias, self.bias.detach())
        return functional.linear(x, self.weight) + bias

    return patched(torch.nn.Linear, "forward", forward)


def embedding_by(change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Any:
    """Change which occurrences of tokens give their row a gradient: a mask like the ids."""
    own = torch.nn.Embedding.forward

    def forward(self: Any, ids: torch.Tensor) -> torch.Tensor:
        y = own(self, ids)
        return torch.where(change(ids, y)[..., None], y, y.detach())

    return patched(torch.nn.Embedding, "forward", forward)


def last_of_each(ids: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """Return where a token occurs for the last time: a scatter that does not add."""
    flat = ids.flatten().tolist()
    keep = [token not in flat[i + 1 :] for i, token in enumerate(flat)]
    return torch.tensor(keep).reshape(ids.shape)


def scale_without_backward() -> Any:
    """The backward of attention does not multiply by the scale of the scores."""
    own = modeling_llama.eager_attention_forward

    def attend(module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float, **rest: Any) -> Any:
        value, weights = own(module, q, k, v, mask, scaling=scaling, **rest)
        # With p fixed by q and k, gradients of q and k are larger by 1/scaling; that of v stays.
        q2, k2 = (x.detach() + (x - x.detach()) / scaling for x in (q, k))
        other, _ = own(module, q2, k2, v, mask, scaling=scaling, **rest)
        return with_gradient_of(value, other), weights

    return patched(modeling_llama, "eager_attention_forward", attend)


def shards_exchanged(grads: Grads) -> Grads:
    """The halves of the rows of q, which two ranks have, are put together in the wrong order."""
    return {n: g.roll(len(g) // 2, 0) if "q_proj" in n else g for n, g in grads.items()}


def averaged_weights(w: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """Return a moving average of the weights, of 0.9, in place of those after the step."""
    after = w * (1 - LR * WD) - LR * direction(g)
    return 0.9 * w + 0.1 * after


def of_optax(w: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """Take AdamW's first step in optax's order: the rate times direction and decay."""
    return w - LR * (direction(g) + WD * w)


def of_lion(w: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """Take Lion's first step."""
    return w * (1 - LR * WD) - LR * g.sign()


def unmoved(w: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """Take no step."""
    return w


def layer_in_two_groups(model: Any) -> torch.optim.Optimizer:
    """Return SGD that steps layer 1 a second time, as part of a second group."""

    class Twice(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            for group in self.param_groups:
                group["params"] = [p for p in group["params"] if any(p is each for each in layer)]
            super().step(closure)

    layer = list(model.model.layers[1].parameters())
    return Twice(list(model.named_parameters()), lr=0.1)


def first_moment_lost(
    folder: Path, *lost: str, anew: bool = False, numbered: str = ""
) -> dict[str, Any]:
    """Write step 4 of AdamW, resumed from a state that has lost moments, or its count (`anew`).

    `lost` are the moments that are zero, the first by default. `numbered` is the model whose state
    has numbers for names.
    """
    model, batch = tiny(numbered or "llama", tied=False), batch_of()
    made = adamw()(model)
    if numbered:
        made = torch.optim.AdamW(list(model.parameters()), lr=LR, weight_decay=WD)
    for number in range(1, 5):
        grads = backward(model, batch)
        if number == 4:
            given = written(folder, model, batch) | with_gradients(folder, grads)
            torch.save(made.state_dict(), folder / "optimizer.pt")
            for p in model.parameters():
                for name in lost or (() if anew else ("exp_avg",)):
                    made.state[p][name].zero_()
                if anew:
                    made.state[p]["step"].zero_()
        made.step()
    model.save_pretrained(folder / "after")
    del given["batch"]
    return given | {
        "after": folder / "after",
        "optimizer": f"{RULE},step=4",
        "optimizer_state": folder / "optimizer.pt",
    }


def lost_by_number(moment: str, base: str) -> Callable[[Path], dict[str, Any]]:
    """Return a writer of a step of a model, resumed from a state of numbers that lost a moment."""
    return lambda folder: first_moment_lost(folder, moment, numbered=base)


def new_optimizer(
    *, state: bool = True, numbered: bool = False, right: bool = False
) -> Callable[[Path], dict[str, Any]]:
    """Return a writer of step 4, taken by an optimizer that was made anew.

    `state`: with the saved state of before it, `numbered` one without names. `right`: the optimizer
    has the saved state after all.
    """

    def write(folder: Path) -> dict[str, Any]:
        model, batch = tiny("llama", tied=False), batch_of()

        def anew() -> Any:
            if not numbered:
                return adamw()(model)
            return torch.optim.AdamW(list(model.parameters()), lr=LR, weight_decay=WD)

        made = anew()
        for number in range(1, 5):
            grads = backward(model, batch)
            if number == 4:
                given = written(folder, model, batch) | with_gradients(folder, grads)
                torch.save(made.state_dict(), folder / "optimizer.pt")
                made = made if right else anew()
            made.step()
        model.save_pretrained(folder / "after")
        del given["batch"]
        more = {"optimizer_state": folder / "optimizer.pt"} if state else {}
        return given | more | {"after": folder / "after", "optimizer": f"{RULE},step=4"}

    return write


def lora_plus(folder: Path) -> dict[str, Any]:
    """Write a step of an adapter whose factors B have 16 times the rate."""
    import copy

    model, batch = copy.deepcopy(lora_of()), batch_of()
    grads = {n: g for n, g in backward(model, batch).items() if "lora_" in n}
    given = written(folder, model_of("llama"), batch) | with_gradients(folder, grads)
    del given["batch"]
    model.save_pretrained(folder / "adapter")
    named = [(n, p) for n, p in model.named_parameters() if "lora_" in n]
    groups: list[dict[str, Any]] = [
        {"params": [(n, p) for n, p in named if "lora_A" in n]},
        {"params": [(n, p) for n, p in named if "lora_B" in n], "lr": 16 * LR},
    ]
    torch.optim.AdamW(groups, lr=LR, weight_decay=0.0).step()
    model.save_pretrained(folder / "after")
    return given | {
        "adapter": folder / "adapter",
        "after": folder / "after",
        "optimizer": f"adamw:lr={LR},step=1",
    }


def two_steps(folder: Path) -> dict[str, Any]:
    """Write the weights after two steps of SGD beside the gradients of the first."""
    model, batch = tiny("llama", tied=False), batch_of()
    grads = backward(model, batch)
    given = written(folder, model, batch) | with_gradients(folder, grads)
    made = torch.optim.SGD(list(model.named_parameters()), lr=0.01)
    made.step()
    backward(model, batch)
    made.step()
    model.save_pretrained(folder / "after")
    del given["batch"]
    return given | {"after": folder / "after", "optimizer": "sgd:lr=0.01"}


LOOP_FAULTS = (
    JudgedStep(
        "averaged_weights_saved",
        "a moving average of the weights is saved: a tenth of the step",
        rule_step(averaged_weights, f"{RULE},step=1"),
        named=r"step_factor.*(0\.1|1/10)|average",
        where=".",
    ),
    JudgedStep(
        "two_steps",
        "two steps were taken between the checkpoints",
        two_steps,
        named="two steps|2 steps|step_factor",
        at=".",
    ),
    JudgedStep(
        "first_moment_lost",
        "the first moments were zero when the step was taken, not those of the state",
        first_moment_lost,
        cause="moments_lost",
        named="moments_lost.*the first moment was zero",
        where=".",
    ),
    JudgedStep(
        "ascended",
        "the step goes up the gradient",
        taken(adamw(maximize=True), f"{RULE},step=1"),
        named="sign|direction|maximi|up",
        where=".",
    ),
    JudgedStep(
        "bias_of_one_row",
        "biases have the gradient of the first row of the batch",
        gradient_step("qwen2", bias_of_one_row),
        cause="samples_left_out",
        named="of biases alone, of 3 samples number 2, 3 are not in it",
        where=r"attn_[qkv]\.bias",
    ),
    JudgedStep(
        "rows_overwritten",
        "a token's row of the table has the gradient of its last occurrence only",
        gradient_step("llama", lambda: embedding_by(last_of_each)),
        cause="gradient_repeated",
        named="gradient_repeated.*tokens that occur more than once",
        where="token_embd",
    ),
    JudgedStep(
        "padding_row_dead",
        "the row of one token, taken for padding, has no gradient",
        gradient_step("llama", lambda: embedding_by(lambda ids, _: ids != PAD)),
        named="row|token|padding",
        where="token_embd",
    ),
    JudgedStep(
        "tempered",
        "logits are divided by 2 before the loss",
        gradient_step("llama", loss_by(tempered)),
        named="temperature|logits.*(2|half)",
        where=".",
    ),
    JudgedStep(
        "means_of_halves",
        "the mean of the means of both halves of the positions",
        gradient_step("llama", loss_by(means_of_halves)),
        cause="position_means",
        named="means of 2 parts of the positions",
        where=".",
    ),
    JudgedStep(
        "pad_token_unscored",
        "a token of the text that equals the padding is not scored",
        gradient_step("llama", loss_by(pad_token_unscored)),
        named=rf"labels_left_out.*token {PAD} is never",
        where=".",
    ),
    JudgedStep(
        "truncated",
        "rows are cut after 12 tokens",
        gradient_step("llama", loss_by(truncated)),
        cause="labels_left_out",
        named="cut after 12 tokens: 8 of 31",
        where=".",
    ),
    JudgedStep(
        "lora_plus_unsaid",
        "factors B have 16 times the rate",
        lora_plus,
        named="step_factor.*16|rate.*16",
        where=r"lora_b$",
    ),
    JudgedStep(
        "layer_in_two_groups",
        "layer 1 takes the step twice",
        taken(layer_in_two_groups, "sgd:lr=0.1"),
        named="step_factor.*2|twice",
        where=r"^L1\.",
    ),
    JudgedStep(
        "step_skipped",
        "gradients are right, and no step was taken",
        rule_step(unmoved, f"{RULE},step=1"),
        named="skip|frozen|no step|not moved",
        where=".",
    ),
    JudgedStep(
        "scale_without_backward",
        "the backward of the scores lacks their scale; first at q and k of layer 2",
        gradient_step("llama", scale_without_backward),
        named="scale|gradient_factor.*4",
        at=rf"(L{LAST}|layer {LAST}|layers 0-{LAST})",
    ),
    JudgedStep(
        "shards_exchanged",
        "the halves of the rows of all q are exchanged",
        gradient_step("llama", change=shards_exchanged),
        cause="gradient_order",
        named="2 equal blocks of rows stand in the order 1, 0",
        where=r"attn_q\.weight",
    ),
)


def in_another_order(folder: Path) -> dict[str, Any]:
    """Write gradients of a batch whose rows stand in another order, with more padding."""
    model, batch = model_of("llama"), batch_of()
    grads = backward(model, batch)
    turned = {
        key: functional.pad(x.flip(0), (0, 5), value=-100 if key == "labels" else 0)
        for key, x in batch.items()
    }
    return written(folder, model, turned) | with_gradients(folder, grads)


def accumulated_in_bfloat16(folder: Path) -> dict[str, Any]:
    """Write gradients of a model in bfloat16, added up over its rows in bfloat16."""
    model, batch = tiny("llama", tied=False).to(torch.bfloat16), batch_of()
    given = written(folder, model, batch)
    total = int((batch["labels"][:, 1:] >= 0).sum())
    model.zero_grad()
    for i in range(3):
        row = row_of(batch, i)
        loss = own_loss(model, row) * int((row["labels"][:, 1:] >= 0).sum()) / total
        loss.backward()  # type: ignore[no-untyped-call]
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    return given | with_gradients(folder, grads)


def experts_in_bfloat16(folder: Path) -> dict[str, Any]:
    """Write gradients of a model with experts in bfloat16."""
    model, batch = tiny("mixtral", tied=False).to(torch.bfloat16), batch_of()
    return written(folder, model, batch) | with_gradients(folder, backward(model, batch))


def sharded_names(folder: Path) -> dict[str, Any]:
    """Write gradients by the names of torch's FSDP and of checkpointed layers."""
    model, batch = model_of("llama"), batch_of()
    grads = {
        "_fsdp_wrapped_module." + n.replace(".mlp.", "._checkpoint_wrapped_module.mlp."): g
        for n, g in backward(model, batch).items()
    }
    return written(folder, model, batch) | with_gradients(folder, grads)


def arrays_of_state(folder: Path) -> dict[str, Any]:
    """Write step 3 of AMSGrad, with all of its state by name."""
    model, batch = tiny("llama", tied=False), batch_of()
    made = adamw(amsgrad=True)(model)
    for _ in range(3):
        given = written(folder, model, batch)
        backward(model, batch)
        made.step()
    model.save_pretrained(folder / "after")
    save_arrays(folder / "state.npz", by_name(model, made.state))
    del given["batch"]
    return given | {
        "after": folder / "after",
        "optimizer": f"{RULE},step=3",
        "optimizer_state": folder / "state.npz",
    }


def first_label_left_out(model: Any, batch: Batch) -> torch.Tensor:
    """Leave out the first label of each row, as a prompt that is counted one too long does."""
    labels = batch["labels"].clone()
    first = (labels[:, 1:] >= 0).int().argmax(1) + 1
    labels[torch.arange(len(labels)), first] = -100
    return own_loss(model, batch | {"labels": labels})


def weighted(weigh: Callable[[torch.Tensor], torch.Tensor], whole: bool = True) -> Any:
    """Return a loss in which the labels [rows, columns] have weights, divided by their sum.

    Not `whole`: divided by the number of labels.
    """

    def loss(model: Any, batch: Batch) -> torch.Tensor:
        logits, labels = logits_and_labels(model, batch)
        each = functional.cross_entropy(logits, labels, ignore_index=-100, reduction="none")
        scored = batch["labels"][:, 1:] >= 0
        weights = weigh(batch["labels"][:, 1:])[scored]
        return (each * weights).sum() / (weights.sum() if whole else scored.sum())

    return loss


def of_columns(labels: torch.Tensor) -> torch.Tensor:
    """Return a tenth for the first 5 columns, and 1 for the others."""
    return torch.where(torch.arange(labels.shape[1]) < 5, 0.1, 1.0).expand(labels.shape)


def of_prompts(labels: torch.Tensor) -> torch.Tensor:
    """Return a quarter for the first scored labels of each row, 3, 4 and 2 of them."""
    place = (labels >= 0).cumsum(1)
    return torch.where(place <= torch.tensor([[3], [4], [2]]), 0.25, 1.0)


def cut_and_divided_by_all(model: Any, batch: Batch) -> torch.Tensor:
    """Cut every row after 10 tokens, and divide by the labels of whole rows."""
    cut = {key: x[:, :10] for key, x in batch.items()}
    kept, every = ((each["labels"][:, 1:] >= 0).sum() for each in (cut, batch))
    return own_loss(model, cut) * kept / every


def last_labels(model: Any, batch: Batch) -> torch.Tensor:
    """Score the last label of each row alone."""
    labels, kept = batch["labels"], torch.full_like(batch["labels"], -100)
    last = torch.tensor([int(row.nonzero()[-1]) for row in labels >= 0])
    rows = torch.arange(len(labels))
    kept[rows, last] = labels[rows, last]
    return own_loss(model, batch | {"labels": kept})


def routed(
    own: dict[str, float], stated: dict[str, float], config: float | None = None
) -> Callable[[Path], dict[str, Any]]:
    """Return what makes the files of gradients of a model with experts and losses of its routers.

    `own` are the factors of what the trainer adds, `stated` those that the batch says; `config` is
    the factor that the configuration says.
    """

    def make(folder: Path) -> dict[str, Any]:
        model, batch = tiny("mixtral", tied=False), batch_of()
        if config is not None:
            model.config.output_router_logits = True
            model.config.router_aux_loss_coef = config
        given = {key: each for key, each in batch.items() if key != "labels"}
        out = model(**given, labels=batch["labels"], output_router_logits=True)
        real = batch["attention_mask"].flatten() > 0
        logits = [each[real] for each in out.router_logits]
        loss = own_loss(model, batch) + own.get("balance", 0.0) * out.aux_loss
        for x in logits:
            chosen = functional.one_hot(x.topk(2).indices, x.shape[-1]).sum(1).float().mean(0)
            alone = x.shape[-1] * (chosen * x.softmax(-1).mean(0)).sum() / len(logits)
            squares = x.logsumexp(-1).square().mean() / len(logits)
            loss = loss + own.get("by_layer", 0.0) * alone + own.get("z", 0.0) * squares
        model.zero_grad()
        loss.backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters()}
        files = written(folder, model, batch) | with_gradients(folder, grads)
        arrays = {key: each.numpy() for key, each in batch.items()}
        numbers = {key: torch.tensor(value).numpy() for key, value in stated.items()}
        save_arrays(folder / "batch.npz", arrays | numbers)
        return files

    return make


def frozen_in_between(
    optimizer: Callable[[Any], torch.optim.Optimizer], stated: str
) -> Callable[[Path], dict[str, Any]]:
    """Return what makes step 3, before which layer 1 was frozen: its gradients are zeros.

    They are not saved, and the optimizer steps by them. The state is that of before the step.
    """

    def make(folder: Path) -> dict[str, Any]:
        model, batch = tiny("llama", tied=False), batch_of()
        made = optimizer(model)
        for _ in range(2):
            backward(model, batch)
            made.step()
        grads = backward(model, batch)
        held = {name: g for name, g in grads.items() if ".layers.1." not in name}
        given = written(folder, model, batch) | with_gradients(folder, held)
        save_arrays(folder / "state.npz", by_name(model, made.state))
        for name, p in model.named_parameters():
            if name not in held:
                p.grad.zero_()
        made.step()
        model.save_pretrained(folder / "after")
        del given["batch"]
        files = {"after": folder / "after", "optimizer_state": folder / "state.npz"}
        return given | files | {"optimizer": stated}

    return make


def third_step(stated: str, *, sparse: bool) -> Callable[[Path], dict[str, Any]]:
    """Return what makes step 3 of Adam, of other tokens than those of steps 1 and 2.

    `sparse`: the table has torch's SparseAdam. The state is that of before the step.
    """

    def make(folder: Path) -> dict[str, Any]:
        model, batch = tiny("llama", tied=False), batch_of()
        table = model.model.embed_tokens
        table.sparse = sparse
        rest = [p for p in model.parameters() if p is not table.weight]
        first: Any = (torch.optim.SparseAdam if sparse else torch.optim.Adam)([table.weight], lr=LR)
        second = torch.optim.Adam(rest, lr=LR)
        for row in (0, 0, 1):
            model.zero_grad()
            own_loss(model, row_of(batch, row)).backward()  # type: ignore[no-untyped-call]
            if row:
                grads = {n: p.grad.to_dense().clone() for n, p in model.named_parameters()}
                given = written(folder, model, batch) | with_gradients(folder, grads)
                save_arrays(folder / "state.npz", by_name(model, {**first.state, **second.state}))
            first.step()
            second.step()
        model.save_pretrained(folder / "after")
        del given["batch"]
        files = {"after": folder / "after", "optimizer_state": folder / "state.npz"}
        return given | files | {"optimizer": stated}

    return make


def part_by_state(folder: Path) -> dict[str, Any]:
    """Write step 3 of AdamW with its state, and the gradients of layer 0 alone."""
    given = taken(adamw(), "", steps=3, state=True)(folder)
    grads = load_file(folder / "grads.safetensors")
    with_gradients(folder, {n: g for n, g in grads.items() if ".layers.0." in n})
    return given


ADAM = f"adam:lr={LR},step=3"


def adapter_of_experts(folder: Path) -> dict[str, Any]:
    """Write gradients of an adapter of a model with experts, load balancing in its loss."""
    model, batch = tiny("mixtral", tied=False), batch_of()
    given = written(folder, model, batch)
    made = lora(model, ("q_proj",))
    out = made(**batch, output_router_logits=True)
    (own_loss(made, batch) + 0.1 * out.aux_loss).backward()
    made.save_pretrained(str(folder / "adapter"))
    grads = {n: p.grad.clone() for n, p in made.named_parameters() if "lora_" in n}
    return given | with_gradients(folder, grads) | {"adapter": folder / "adapter"}


BALANCE, Z = "router_aux_loss_coef", "router_z_loss_coef"
ROUTED = r"ffn_gate_inp"


def interleaved(grads: Grads) -> Grads:
    """The rows of q and k that rope turns together stand side by side, as GGUF's llama has them."""

    def moved(g: torch.Tensor, heads: int) -> torch.Tensor:
        return g.reshape(heads, 2, -1, g.shape[-1]).transpose(1, 2).reshape(g.shape).contiguous()

    heads = {"q_proj": 4, "k_proj": 2}
    return {
        n: next((moved(g, many) for name, many in heads.items() if name in n), g)
        for n, g in grads.items()
    }


LOOP_RELATIVES = (
    JudgedStep(
        "second_moment_lost",
        "the second moments were zero when the step was taken",
        lambda folder: first_moment_lost(folder, "exp_avg_sq"),
        cause="moments_lost",
        named="moments_lost.*the second moment was zero",
        where=".",
    ),
    *(
        JudgedStep(
            f"{kind}_moment_lost_by_number_{base}",
            f"the {kind} moments were zero, of a state of {base} with numbers alone",
            lost_by_number({"first": "exp_avg", "second": "exp_avg_sq"}[kind], base),
            cause="moments_lost",
            named=f"moments_lost .confirmed.*the {kind} moment was zero",
            where=".",
        )
        for kind in ("first", "second")
        for base in ("qwen2", "gpt2")
    ),
    JudgedStep(
        "both_moments_lost",
        "both moments were zero when the step was taken, and its count went on",
        lambda folder: first_moment_lost(folder, "exp_avg", "exp_avg_sq"),
        cause="moments_lost",
        named="moments_lost.*both moments were zero",
        where=".",
    ),
    *(
        JudgedStep(
            name,
            f"the step is that of an optimizer made anew; {says}",
            new_optimizer(**how),
            cause="moments_lost",
            named="moments_lost .confirmed.*as a new optimizer's are.*load_state_dict",
            where=".",
        )
        for name, says, how in (
            ("new_optimizer", "the state that was to be loaded names its parameters", {}),
            ("new_optimizer_by_number", "the state has numbers alone", {"numbered": True}),
            ("new_optimizer_unsaid", "the state is not given", {"state": False}),
        )
    ),
    JudgedStep(
        "count_anew",
        "the count of steps began anew, and the moments were kept",
        lambda folder: first_moment_lost(folder, anew=True),
        cause="step_count",
        named="step_count.*that of step 1; the moments are of step 3",
        where=".",
    ),
    JudgedStep(
        "rows_interleaved",
        "rows of q and k that rope turns together stand side by side",
        gradient_step("llama", change=interleaved),
        cause="gradient_order",
        named="gradient_order.*side by side",
        where=r"attn_[qk]\.weight",
    ),
    JudgedStep(
        "frozen_moved_by_moments",
        "layer 1 was frozen, and moves by its old moments and its decay",
        frozen_in_between(adamw(), f"{RULE},step=3"),
        cause="moved_without_gradient",
        named="moved_without_gradient.*its old moments and its weight decay alone",
        where=r"^L1\.",
    ),
    JudgedStep(
        "frozen_moved_by_momentum",
        "layer 1 was frozen, and moves by SGD's momentum",
        frozen_in_between(
            lambda m: torch.optim.SGD(list(m.named_parameters()), lr=0.1, momentum=0.9),
            "sgd:lr=0.1,momentum=0.9,step=3",
        ),
        cause="moved_without_gradient",
        named="moved_without_gradient.*its old moments alone",
        where=r"^L1\.",
    ),
    JudgedStep(
        "sparse_unsaid",
        "rows of the table without a gradient did not move by their moments: SparseAdam",
        third_step(ADAM, sparse=True),
        cause="rows_frozen",
        named="rows_frozen.*rows without a gradient did not move: a sparse or lazy optimizer",
        where="token_embd",
    ),
    JudgedStep(
        "dense_though_sparse",
        "rows of the table without a gradient moved, and a sparse Adam is stated",
        third_step(f"{ADAM},sparse=1", sparse=False),
        cause="rows_moved",
        named="rows_moved.*dense, and sparse is stated",
        where="token_embd",
    ),
    JudgedStep(
        "balance_of_an_adapter",
        "load balancing is in the gradients of an adapter, 0.1 times",
        adapter_of_experts,
        cause="router_loss",
        named="load balancing over all layers, an auxiliary loss, is in the gradient 0.1 times",
        at="attn_q",
    ),
    JudgedStep(
        "balance_left_out",
        "the batch states 0.1 times load balancing, which is not in the gradient",
        routed({}, {BALANCE: 0.1}),
        cause="router_loss",
        named="load balancing over all layers is not in the gradient, and is stated 0.1 times",
        at=ROUTED,
    ),
    JudgedStep(
        "balance_of_config_left_out",
        "the configuration states 0.1 times load balancing, which is not in the gradient",
        routed({}, {}, config=0.1),
        cause="router_loss",
        named="load balancing over all layers is not in the gradient, and is stated 0.1 times",
        at=ROUTED,
    ),
    JudgedStep(
        "balance_of_another_factor",
        "load balancing is in the gradient 0.1 times, and stated 0.02 times",
        routed({"balance": 0.1}, {BALANCE: 0.02}),
        cause="router_loss",
        named="in the gradient 0.1 times; it is stated 0.02 times",
        at=ROUTED,
    ),
    JudgedStep(
        "balance_of_each_layer",
        "load balancing of each layer is in the gradient, 0.1 times",
        routed({"by_layer": 0.1}, {}),
        cause="router_loss",
        named="load balancing of each layer, an auxiliary loss, is in the gradient 0.1 times",
        at=ROUTED,
    ),
    JudgedStep(
        "router_z_loss",
        "the router's z-loss is in the gradient, 0.05 times",
        routed({"z": 0.05}, {}),
        cause="router_loss",
        named="the router's z-loss, an auxiliary loss, is in the gradient 0.05 times",
        at=ROUTED,
    ),
    JudgedStep(
        "router_losses_both",
        "both losses of routers are in the gradient, and only the z-loss is stated",
        routed({"balance": 0.1, "z": 0.05}, {Z: 0.05}),
        cause="router_loss",
        named="load balancing over all layers, an auxiliary loss, is in the gradient 0.1 times",
        at=ROUTED,
    ),
    JudgedStep(
        "first_label_left_out",
        "the first label of each row is not scored",
        gradient_step("llama", loss_by(first_label_left_out)),
        cause="labels_left_out",
        named="the first label of each row is not scored: 3 of 31",
        where=".",
    ),
    JudgedStep(
        "labels_of_columns_weighted",
        "the first columns count a tenth",
        gradient_step("llama", loss_by(weighted(of_columns))),
        cause="labels_weighted",
        named="labels up to column 5 count 0.1 times as much as the others, divided by the sum",
        where=".",
    ),
    JudgedStep(
        "prompts_weighted",
        "prompts of three lengths count a quarter",
        gradient_step("llama", loss_by(weighted(of_prompts, whole=False))),
        cause="labels_weighted",
        named="of their rows, the first, count 0.25 times .* by the number of labels",
        where=".",
    ),
    JudgedStep(
        "cut_and_divided_by_all",
        "rows are cut after 10 tokens, and the sum is divided by the labels of whole rows",
        gradient_step("llama", loss_by(cut_and_divided_by_all)),
        cause="labels_left_out",
        named="cut after 10 tokens.*divided by all",
        where=".",
    ),
    JudgedStep(
        "last_labels",
        "only the last label of each row is scored",
        gradient_step("llama", loss_by(last_labels)),
        cause="labels_left_out",
        named="only the last label of each row is scored",
        where=".",
    ),
)


def warm_up(model: Any) -> torch.optim.Optimizer:
    """Return AdamW under a linear warm-up, as transformers' schedules begin."""
    made: torch.optim.Optimizer = adamw()(model)
    torch.optim.lr_scheduler.LambdaLR(made, lambda step: step / 10)
    return made


LOOP_INNOCENTS = (
    JudgedStep("went_on", "step 4 by its state", new_optimizer(right=True)),
    JudgedStep(
        "went_on_by_number",
        "step 4 by its state of numbers alone",
        new_optimizer(right=True, numbered=True),
    ),
    JudgedStep("sparse_stated", "SparseAdam, stated", third_step(f"{ADAM},sparse=1", sparse=True)),
    JudgedStep("part_by_state", "step 3 by its state, with a part of its gradients", part_by_state),
    JudgedStep(
        "router_losses_stated",
        "losses of routers that the batch states",
        routed({"balance": 0.1, "z": 0.05}, {BALANCE: 0.1, Z: 0.05}),
    ),
    JudgedStep(
        "router_loss_of_config",
        "load balancing that the configuration states",
        routed({"balance": 0.1}, {}, config=0.1),
    ),
    JudgedStep("in_another_order", "the batch's rows in another order", in_another_order),
    JudgedStep("accumulated_in_bfloat16", "added up in bfloat16", accumulated_in_bfloat16),
    JudgedStep("experts_in_bfloat16", "experts, in bfloat16", experts_in_bfloat16),
    JudgedStep("sharded_names", "names of sharded and checkpointed modules", sharded_names),
    JudgedStep("optax", "AdamW in optax's order", rule_step(of_optax, f"{RULE},step=1")),
    JudgedStep("lion", "Lion's first step", rule_step(of_lion, f"lion:lr={LR},wd={WD},step=1")),
    JudgedStep(
        "zero_rate",
        "the first step of a warm-up, whose rate is 0",
        taken(adamw(lr=0.0), "adamw:lr=0,step=1"),
    ),
    JudgedStep(
        "warm_up_by_state",
        "the first step of a warm-up, whose rate is 0 in the state",
        taken(warm_up, "", state=True),
    ),
    JudgedStep(
        "bound_not_reached",
        "a norm of gradients below the stated bound",
        taken(sgd, "sgd:lr=0.1,clip=1e4"),
    ),
    JudgedStep("amsgrad", "step 3 of AMSGrad, by all of its state", arrays_of_state),
    JudgedStep(
        "parallel", "all gradients of a model whose attention and MLP are parallel", whole("cohere")
    ),
    JudgedStep(
        "noise_of_float16",
        "gradients of float32, saved in float16",
        changed_files(lambda grads: {n: g.half() for n, g in grads.items()}),
    ),
)
