"""Engines of others: a transformers model patched with the bug, its modules dumped by hooks.

The dump is what people make to compare two engines: `numpy.savez` of every module's result under
its path, with the token ids. Nothing of aprfmt takes part in it.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from tests.diagnosis.engines import COARSE, place, trace
from tests.diagnosis.engines import LONG as LONG
from tests.field.hf import base, loaded
from tests.field.row import Pair
from tests.models import IDS

Tensor = Any
Model = Any
# Patches a loaded model; what it returns is undone after the run (patches of the module's code).
Patch = Callable[[Model], "ExitStack | None"]
Keep = Callable[[str], bool]


def layers_only(key: str) -> bool:
    """Keep the residual stream after every layer, and the logits."""
    return key == "logits" or key.rpartition(".")[2].isdigit()


def slots_only(key: str) -> bool:
    """Keep what usual dumps have: norms, projections, both blocks, layers, logits."""
    last = key.rpartition(".")[2]
    wanted = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    return layers_only(key) or last in wanted or "norm" in last


def dump(
    arch: str,
    name: str,
    *patches: Patch,
    ids: Sequence[int] = IDS,
    keep: Keep | None = None,
    dtype: str = "float32",
    weights: str = "float32",
    **options: Any,
) -> Callable[[], Pair]:
    """Return a maker of a model's folder and the dump of a patched engine that ran it.

    `dtype` is the engine's arithmetic, `weights` what the folder stores; keyword arguments are
    config values.
    """

    def make() -> Pair:
        folder = base(arch, weights, **options)
        path = place(f"field-{name}.npz")
        dumped(folder, path, patches, ids, keep, dtype)
        return folder, path

    return make


def dumped(
    folder: Path,
    path: Path,
    patches: Sequence[Patch],
    ids: Sequence[int],
    keep: Keep | None,
    dtype: str,
) -> None:
    import torch

    model = loaded(folder, dtype)
    if getattr(model, "_can_set_experts_implementation", lambda: False)():
        model.set_experts_implementation("eager")
    kept: dict[str, Any] = {}
    with ExitStack() as stack, torch.no_grad():
        for patch in patches:
            undo = patch(model)
            if undo is not None:
                stack.enter_context(undo)
        _hook(model, kept)
        found = model(torch.tensor([list(ids)]), use_cache=False)
    kept["logits"] = found.logits
    arrays = {
        key: value.detach().to(torch.float32).numpy()
        for key, value in kept.items()
        if keep is None or keep(key)
    }
    np.savez(path, input_ids=np.array(ids, np.int64), **arrays)


def _hook(model: Model, kept: dict[str, Any]) -> None:
    def after(path: str) -> Callable[..., None]:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            value = output[0] if isinstance(output, tuple) else output
            if hasattr(value, "detach") and value.is_floating_point():
                kept[path] = value.clone()

        return hook

    def before(path: str) -> Callable[..., None]:
        def hook(module: Any, inputs: Any) -> None:
            kept[f"{path}#in"] = inputs[0].clone()

        return hook

    for path, module in model.named_modules():
        if not path or path == "model" or "rotary" in path:
            continue
        module.register_forward_hook(after(path))
        if path.endswith((".o_proj", ".down_proj", ".dense")):
            module.register_forward_pre_hook(before(path))


# --- patches ------------------------------------------------------------------------------------


def code_of(model: Model) -> Any:
    """Return the module with the model's code."""
    return sys.modules[type(model).__module__]


def replaced(name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Patch:
    """Return a patch of a function of the model's code; `make` gets the function beneath."""

    def patch(model: Model) -> ExitStack:
        stack = ExitStack()
        code = code_of(model)
        stack.enter_context(mock.patch.object(code, name, make(getattr(code, name))))
        return stack

    return patch


def every(kind: str, change: Callable[[Any], None]) -> Patch:
    """Return a patch of every module whose class's name ends so (in module order)."""

    def patch(model: Model) -> None:
        chosen = [module for module in model.modules() if type(module).__name__.endswith(kind)]
        assert chosen, kind
        for module in chosen:
            change(module)

    return patch


def setting(kind: str, **values: Any) -> Patch:
    """Return a patch that sets attributes of every module of a class."""

    def change(module: Any) -> None:
        for name, value in values.items():
            assert hasattr(module, name), name
            setattr(module, name, value(module) if callable(value) else value)

    return every(kind, change)


def configured(**values: Any) -> Patch:
    """Return a patch of the config that the forward pass reads."""

    def patch(model: Model) -> None:
        for name, value in values.items():
            assert hasattr(model.config, name), name
            setattr(model.config, name, value)

    return patch


def weights(ending: str, change: Callable[[Tensor], Tensor]) -> Patch:
    """Return a patch of every parameter whose name ends so."""

    def patch(model: Model) -> None:
        chosen = [p for name, p in model.named_parameters() if name.endswith(ending)]
        assert chosen, ending
        for parameter in chosen:
            parameter.data = change(parameter.data.clone())

    return patch


def forward_of(kind: str, new: Callable[..., Any]) -> Patch:
    """Return a patch of a class's forward: `new(module, beneath, *args, **kwargs)`."""

    def change(module: Any) -> None:
        beneath = module.forward
        module.forward = lambda *args, **kwargs: new(module, beneath, *args, **kwargs)

    return every(kind, change)


def frequencies(change: Callable[[Any, Any], Any], which: str = "inv_freq") -> Patch:
    """Return a patch of the inverse frequencies: `change(config, inv_freq)`."""

    def patch(model: Model) -> None:
        rope = model.model.rotary_emb
        setattr(rope, which, change(model.config, getattr(rope, which)))

    return patch


def plain_frequencies(theta: float | None = None) -> Callable[[Any, Any], Any]:
    """Return frequencies without scaling, of another base if it is given."""

    def change(config: Any, old: Any) -> Any:
        import torch

        rope = config.rope_parameters
        base_ = float(rope["rope_theta"]) if theta is None else theta
        steps = torch.arange(0, 2 * len(old), 2, dtype=torch.float32) / (2 * len(old))
        return base_**-steps

    return change


def attention(
    *,
    scale: Callable[[float], float] = lambda x: x,
    repeat: str = "each",
    cap: str = "before",
    mask: Callable[[Tensor], Tensor] = lambda x: x,
    softmax: Callable[[Tensor], Tensor] | None = None,
    keys: Callable[[Any, Tensor], Tensor] = lambda module, x: x,
    values: Callable[[Any, Tensor], Tensor] = lambda module, x: x,
) -> Patch:
    """Return a patch with an attention of one's own, in steps; a knob for each thing to break.

    `repeat` "tile" repeats all key heads one after another; `cap` "after" caps after the mask.
    """

    def make(beneath: Callable[..., Any]) -> Callable[..., Any]:
        import torch

        def forward(
            module: Any,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attention_mask: Tensor,
            dropout: float = 0.0,
            scaling: float | None = None,
            softcap: float | None = None,
            **more: Any,
        ) -> Any:
            groups = query.shape[1] // key.shape[1]
            key, value = keys(module, key), values(module, value)
            wide = [
                x.repeat(1, groups, 1, 1) if repeat == "tile" else x.repeat_interleave(groups, 1)
                for x in (key, value)
            ]
            factor = module.head_dim**-0.5 if scaling is None else scaling
            scores = query @ wide[0].transpose(2, 3) * scale(factor)
            hidden = mask(attention_mask)
            if softcap is not None and cap == "before":
                scores = softcap * torch.tanh(scores / softcap)
            scores = scores + hidden
            if softcap is not None and cap == "after":
                scores = softcap * torch.tanh(scores / softcap)
            probs = scores.softmax(-1) if softmax is None else softmax(scores)
            return (probs @ wide[1]).transpose(1, 2).contiguous(), probs

        return forward

    return replaced("eager_attention_forward", make)


def adjacent_pairs(beneath: Callable[..., Any]) -> Callable[..., Any]:
    """Return a rope that turns elements 2i and 2i + 1 where the code turns i and i + n/2."""

    def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **more: Any) -> Any:
        import torch

        half = cos.shape[-1] // 2
        c, s = (x[..., :half].repeat_interleave(2, -1).unsqueeze(1) for x in (cos, sin))

        def turned(x: Tensor) -> Tensor:
            pairs = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
            return x * c + pairs * s

        return turned(q), turned(k)

    return rope


def own_layer(*, attn_from: str = "stream", mlp_from: str = "stream") -> Patch:
    """Return a patch of a pre-norm layer's sums: "normed" adds to the norm's result instead.

    "twice" doubles the stream instead of adding what the block gives.
    """

    def new(module: Any, beneath: Any, hidden_states: Tensor, **more: Any) -> Tensor:
        def block(x: Tensor, norm: Any, run: Callable[[Tensor], Tensor], how: str) -> Tensor:
            normed = norm(x)
            made = run(normed)
            return {"stream": x, "normed": normed, "twice": x}[how] + (
                x if how == "twice" else made
            )

        x = block(
            hidden_states,
            module.input_layernorm,
            lambda h: module.self_attn(hidden_states=h, **more)[0],
            attn_from,
        )
        return block(x, module.post_attention_layernorm, module.mlp, mlp_from)

    return forward_of("DecoderLayer", new)


def traced(arch: str, name: str, *, coarse: bool = False, **how: Any) -> Callable[[], Pair]:
    """Return a maker of a model's folder and the saved trace of a pass with one thing broken."""

    def make() -> Pair:
        folder = base(arch)
        return folder, trace(folder, f"field-{name}", points=COARSE if coarse else None, **how)

    return make
