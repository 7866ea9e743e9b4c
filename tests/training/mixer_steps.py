"""Steps whose faults are in mixers, experts, adapters and rules of optimizers, and right ones.

An eighth set: windows that a backward of attention forgets, decays of delta nets that are constants
in it, gates of shared experts, means over the tokens of an expert, heads that are quantized too,
lengths of DoRA that have a gradient, decay and momentum of SGD, the parameter's size in Adafactor.
They are what a set after public threads got wrong at its first look. What is right stands in each
row, written before the row was first run.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.mistral import modeling_mistral
from transformers.models.qwen2_moe import modeling_qwen2_moe
from transformers.models.qwen3_5 import modeling_qwen3_5

from aprfmt.training.saved_step import SavedStep
from tests.models import tiny
from tests.training.adapter_steps import beside, quantized
from tests.training.judged_steps import (
    LR,
    RULE,
    WD,
    JudgedStep,
    backward,
    batch_of,
    by_name,
    gradient_step,
    lora,
    loss_of,
    patched,
    taken,
    with_gradient_of,
    with_gradients,
    written,
)
from tests.training.part_steps import BOUND, misread
from tests.training.steps import save_arrays
from tests.training.thread_steps import direction, row_of, rule_step, sgd

ANY = "."
OF_LAST = r"at L2\."
RATE, DECAY = 0.1, 0.05
Rule = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def without_window(module: Any) -> Callable[[], Any]:
    """Return what lets the backward of attention of a module's models look at all tokens before."""

    def inside() -> Any:
        own = module.eager_attention_forward

        def attend(layer: Any, q: Any, k: Any, v: Any, mask: Any, **rest: Any) -> Any:
            value, weights = own(layer, q, k, v, mask, **rest)
            every = torch.full((q.shape[2],) * 2, float("-inf")).triu(1)
            other, _ = own(layer, q, k, v, every[None, None], **rest)
            return with_gradient_of(value, other), weights

        return patched(module, "eager_attention_forward", attend)

    return inside


def constant_in_delta(module: Any, rule: str, which: str) -> Callable[[], Any]:
    """Return what makes an argument of a delta rule a constant: `g` or `beta`."""

    def inside() -> Any:
        own = getattr(module, rule)

        def delta(*given: Any, **named: Any) -> Any:
            return own(*given, **named | {which: named[which].detach()})

        return patched(module, rule, delta)

    return inside


QWEN_RULE, KIMI_RULE = "torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention"


def chunks_apart() -> Any:
    """The state of the delta rule gives no gradient on to earlier chunks of six tokens."""
    own = modeling_qwen3_5.torch_chunk_gated_delta_rule

    def delta(q: Any, k: Any, v: Any, *, g: Any, beta: Any, **rest: Any) -> Any:
        reads, state = [], None
        rest |= {"output_final_state": True}
        for start in range(0, q.shape[1], 6):
            part = slice(start, start + 6)
            rest["initial_state"] = None if state is None else state.detach()
            read, state = own(
                q[:, part], k[:, part], v[:, part], g=g[:, part], beta=beta[:, part], **rest
            )
            reads.append(read)
        return torch.cat(reads, 1), state

    return patched(modeling_qwen3_5, QWEN_RULE, delta)


def with_points(around: Callable[[], Any] | None) -> Callable[[Path], dict[str, Any]]:
    """Return what saves the gradients of a delta net's parameters and modules."""

    def make(folder: Path) -> dict[str, Any]:
        model, batch = tiny("qwen3_5", tied=False), {k: x[[0, 2]] for k, x in batch_of().items()}
        given = written(folder, model, batch)
        with around() if around else torch.enable_grad():
            saved = SavedStep(model, folder / "saved", True)
            loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
            saved.before()
        grads = {n: p.grad.contiguous() for n, p in model.named_parameters() if p.grad is not None}
        given |= with_gradients(folder, grads)
        given["grads"].append(folder / "saved" / "points.safetensors")
        return given

    return make


def shared_gate_cut() -> Any:
    """The gate of the shared expert is a constant."""
    own = modeling_qwen2_moe.Qwen2MoeSparseMoeBlock.forward

    def forward(self: Any, x: torch.Tensor) -> Any:
        gate = self.shared_expert_gate
        gate.forward = lambda y: torch.nn.functional.linear(y, gate.weight).detach()
        try:
            return own(self, x)
        finally:
            del gate.forward

    return patched(modeling_qwen2_moe.Qwen2MoeSparseMoeBlock, "forward", forward)


def means_of_experts(kind: str) -> Callable[[Path], dict[str, Any]]:
    """Return what gives each expert the mean of its tokens' gradients, not their sum."""

    def make(folder: Path) -> dict[str, Any]:
        model, batch = tiny(kind, tied=False), batch_of()
        counts: dict[str, torch.Tensor] = {}
        hooks = [
            module.register_forward_hook(partial(count_tokens, counts, name))
            for name, module in model.named_modules()
            if name.endswith("mlp.gate")
        ]
        grads = backward(model, batch)
        for hook in hooks:
            hook.remove()
        for name in grads:
            if ".experts." in name:
                tokens = counts[name.rpartition(".experts.")[0]].clamp(min=1)
                grads[name] = (grads[name] / tokens[:, None, None]).contiguous()
        return written(folder, model, batch) | with_gradients(folder, grads)

    return make


def count_tokens(
    counts: dict[str, torch.Tensor], name: str, module: Any, given: Any, made: Any
) -> None:
    """Count the tokens of each expert that a router `name` chose, in `counts` by its block."""
    chosen = torch.bincount(made[-1].flatten(), minlength=module.weight.shape[0])
    counts[name.removesuffix(".gate")] = chosen.float()


def head_too(model: Any) -> Any:
    """Put NF4 into a model's layers and its head."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    w = quantized()(model).lm_head.weight
    with torch.no_grad():
        held = quantize_4bit(w.data, blocksize=64, compress_statistics=True, quant_type="nf4")
        w.copy_(dequantize_4bit(*held).to(w.dtype))
    return model


def codes_exchanged(units: torch.Tensor, scales: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """Decode the two codes of each byte in the other order."""
    return units.reshape(-1, 2).flip(1).reshape(units.shape) * scales


def of_dora(modules: tuple[str, ...], in_graph: bool) -> Callable[[Path], dict[str, Any]]:
    """Return what makes gradients of DoRA; `in_graph`: what it divides by has a gradient."""

    def make(folder: Path) -> dict[str, Any]:
        batch, base = batch_of(), tiny("llama", tied=False)
        files = written(folder, base, batch)
        model = lora(base, modules, use_dora=True)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "magnitude" in name:
                    p.copy_(torch.linspace(0.5, 1.5, p.numel()))
        model.save_pretrained(folder / "adapter")
        own = torch.Tensor.detach
        with patched(torch.Tensor, "detach", (lambda x: x) if in_graph else own):
            grads = {n: g for n, g in backward(model, batch).items() if "lora_" in n}
        return files | with_gradients(folder, grads) | {"adapter": folder / "adapter"}

    return make


class OwnSGD(torch.optim.Optimizer):
    """SGD with momentum whose gradient is multiplied by it, in place of the buffer."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": RATE, "momentum": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take one step; return None."""
        for group in self.param_groups:
            for p in group["params"]:
                held = self.state[p].get("momentum_buffer")
                held = p.grad.clone() if held is None else held + 0.9 * p.grad
                self.state[p]["momentum_buffer"] = held
                p.sub_(RATE * held)


def third_step(
    optimizer: Callable[[Any], torch.optim.Optimizer], rule: str | None, *, after: bool = False
) -> Callable[[Path], dict[str, Any]]:
    """Return what makes the third step of an optimizer, by its arrays of before or `after` it."""

    def make(folder: Path) -> dict[str, Any]:
        model, rows = tiny("llama", tied=False), batch_of()
        made = optimizer(model)
        for number in range(3):
            batch = row_of(rows, number)
            grads = backward(model, batch)
            if number == 2:
                given = written(folder, model, batch) | with_gradients(folder, grads)
                state = {name: x.copy() for name, x in by_name(model, made.state).items()}
            made.step()
        model.save_pretrained(folder / "after")
        save_arrays(folder / "state.npz", by_name(model, made.state) if after else state)
        del given["batch"]
        given |= {"after": folder / "after", "optimizer": rule}
        return given | {"optimizer_state": folder / "state.npz"}

    return make


def coupled(decay: float) -> Rule:
    """Return SGD's first step whose gradient has `decay` of the weight."""
    return lambda w, g: w - RATE * (g + decay * w)


def of_transformers(scaled: bool) -> Callable[[Any], torch.optim.Optimizer]:
    """Return what makes transformers' Adafactor; `scaled` by the size of each parameter."""
    from transformers.optimization import Adafactor

    return lambda model: Adafactor(
        model.parameters(), lr=LR, scale_parameter=scaled, relative_step=False, warmup_init=False
    )


def table_twice(model: Any) -> None:
    """Clip all by a norm in which the tied table counts twice."""
    grads = [p.grad for p in model.parameters()]
    norm = torch.nn.utils.get_total_norm([*grads, model.transformer.wte.weight.grad])
    torch.nn.utils.clip_grads_with_norm_(list(model.parameters()), BOUND, norm)


SGD_RULE = f"sgd:lr={RATE},wd={DECAY}"
MIXER_FAULTS = (
    JudgedStep(
        "window_left_out_backward",
        "the backward of attention looks at all tokens before, and not at the window",
        gradient_step("mistral", without_window(modeling_mistral)),
        cause="backward_mask",
        named="backward_mask.*without the window",
        at=OF_LAST,
    ),
    JudgedStep(
        "window_of_some_layers_left_out",
        "the same in a model of which every second layer has a window",
        gradient_step("gemma2", without_window(modeling_gemma2)),
        cause="backward_mask",
        named="backward_mask.*without the window",
        at=OF_LAST,
    ),
    JudgedStep(
        "decay_of_the_state_constant",
        "the decay of the delta rule has no backward",
        gradient_step("qwen3_5", constant_in_delta(modeling_qwen3_5, QWEN_RULE, "g")),
        cause="backward_recurrence",
        named="backward_recurrence.*decay",
        at=OF_LAST,
    ),
    JudgedStep(
        "strength_of_writing_constant",
        "the strength of writing of the delta rule has no backward",
        gradient_step("qwen3_5", constant_in_delta(modeling_qwen3_5, QWEN_RULE, "beta")),
        cause="backward_recurrence",
        named="backward_recurrence.*strength",
        at=OF_LAST,
    ),
    JudgedStep(
        "decay_by_channel_constant",
        "the decay of Kimi's delta rule has no backward",
        gradient_step("kimi_linear", constant_in_delta(modeling_kimi_linear, KIMI_RULE, "g")),
        cause="backward_recurrence",
        named="backward_recurrence.*decay",
        at=ANY,
    ),
    JudgedStep(
        "state_cut_between_chunks",
        "the state of the delta rule gives no gradient on to earlier chunks; first in layer 2",
        with_points(chunks_apart),
        named="backward_operation.*layer 2",
        at=r"L2\.delta_qkv",
    ),
    JudgedStep(
        "shared_gate_constant",
        "the gate of the shared expert is a constant; first in layer 2",
        gradient_step("qwen2_moe", shared_gate_cut),
        cause="backward_router",
        named="backward_router.*gate of the shared expert",
        at=r"at L2\.ffn_gate_inp_shexp",
    ),
    JudgedStep(
        "means_of_experts",
        "each expert has the mean over its tokens, not their sum",
        means_of_experts("qwen3_moe"),
        cause="gradient_part",
        named="gradient_part.*mean over the tokens",
        where="_exps",
    ),
    JudgedStep(
        "means_of_experts_beside_shared_ones",
        "the same beside a shared expert",
        means_of_experts("qwen2_moe"),
        cause="gradient_part",
        named="gradient_part.*mean over the tokens",
        where="_exps",
    ),
    JudgedStep(
        "head_in_nf4",
        "the trainer's head is NF4 as well, beside layers that are NF4 on both sides",
        beside(head_too, quantized()),
        cause="base_quantized",
        named="base_quantized.*of the head alone",
        where="lora",
    ),
    JudgedStep(
        "base_and_head_in_nf4",
        "the trainer's layers and head are NF4, the given ones are not",
        beside(head_too),
        cause="base_quantized",
        named="base_quantized.*of the head too",
        where="lora",
    ),
    JudgedStep(
        "base_by_exchanged_codes",
        "the backward decodes the two codes of each byte in the other order",
        misread(codes_exchanged),
        cause="backward_dequantization",
        named="backward_dequantization.*codes of each byte exchanged",
        at=ANY,
    ),
    JudgedStep(
        "lengths_no_constants",
        "what DoRA divides by is no constant in the backward",
        of_dora(("q_proj", "v_proj"), True),
        cause="lengths_in_graph",
        named="lengths_in_graph",
        where="lora_[ab]$",
    ),
    JudgedStep(
        "lengths_of_the_mlp_no_constants",
        "the same at the MLP",
        of_dora(("gate_proj", "down_proj"), True),
        cause="lengths_in_graph",
        named="lengths_in_graph",
        at="lora_[ab]",
    ),
    JudgedStep(
        "momentum_of_the_gradient",
        "the momentum multiplies the gradient, not the buffer",
        third_step(lambda m: OwnSGD(list(m.parameters())), f"sgd:lr={RATE},momentum=0.9,step=3"),
        cause="momentum",
        named="momentum.*multiplies the gradient",
        where=ANY,
    ),
    JudgedStep(
        "decay_under_the_loss_scale",
        "the decay is divided by the loss scale 1024",
        rule_step(coupled(DECAY / 1024), SGD_RULE),
        cause="decay_factor",
        named="decay_factor.*4.88e-06",
        where=ANY,
    ),
    JudgedStep(
        "decay_of_the_other_sign",
        "the decay of SGD makes weights larger",
        rule_step(coupled(-DECAY), SGD_RULE),
        cause="decay_factor",
        named="decay_factor.*grows",
        where=ANY,
    ),
    JudgedStep(
        "decay_of_adam_of_the_other_sign",
        "the decay of AdamW makes weights larger",
        rule_step(lambda w, g: w * (1 + LR * WD) - LR * direction(g), f"{RULE},step=1"),
        cause="decay_factor",
        named="decay_factor.*grows",
        where=ANY,
    ),
    JudgedStep(
        "tied_table_clipped_twice",
        "the norm that clips counts the tied table twice",
        taken(sgd, f"sgd:lr=0.1,clip={BOUND}", kind="gpt2", before_step=table_twice),
        cause="clip_by_part",
        named="clip_by_part.*counted twice",
        at=ANY,
    ),
    JudgedStep(
        "adafactor_not_by_size",
        "Adafactor's steps are not multiplied by the size of the parameters",
        third_step(of_transformers(False), f"adafactor:lr={LR}", after=True),
        cause="step_factor",
        named="step_factor.*not multiplied by the parameter's size",
        where=ANY,
    ),
)
MIXER_INNOCENTS = (
    JudgedStep("window", "a model with a window", gradient_step("mistral")),
    JudgedStep("some_windows", "a model with a window in some layers", gradient_step("gemma2")),
    JudgedStep("shared_gate", "a model with a gated shared expert", gradient_step("qwen2_moe")),
    JudgedStep("delta_points", "gradients of a delta net and its modules", with_points(None)),
    JudgedStep("kimi_delta", "Kimi's delta attention", gradient_step("kimi_linear")),
    JudgedStep("lengths_of_the_mlp", "DoRA at the MLP", of_dora(("gate_proj", "down_proj"), False)),
    JudgedStep("heads_in_nf4", "both heads are NF4, decoded", beside(head_too, head_too)),
    JudgedStep("decay_in_sgd", "decay in SGD's gradient", rule_step(coupled(DECAY), SGD_RULE)),
    JudgedStep("adafactor_by_size", "Adafactor by the size of the parameters",
               third_step(of_transformers(True), f"adafactor:lr={LR}", after=True)),
)  # fmt: skip
