"""Wrong transformers models: one step of their modules computes something else."""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from tests.diagnosis.dumps import Break, instead

Tensor = Any
Attend = Callable[[Any, Tensor, Tensor, Tensor, Tensor, float], Tensor]


def both(*breaks: Break) -> Break:
    """Break several things."""

    def wrong(model: Any, stack: ExitStack) -> None:
        for one in breaks:
            one(model, stack)

    return wrong


def function(name: str, make: Callable[[Any], Any]) -> Break:
    """Replace a function of the model's code; `make` gets the one beneath."""
    return lambda model, stack: stack.enter_context(
        instead(sys.modules[type(model).__module__], name, make)
    )


def forwards(ending: str, new: Callable[..., Any]) -> Break:
    """Replace the forward of every module of a class: `new(module, beneath, *args, **kwargs)`."""

    def wrong(model: Any, stack: ExitStack) -> None:
        for module in model.modules():
            if type(module).__name__.endswith(ending):
                beneath = module.forward
                module.forward = lambda *a, m=module, b=beneath, **k: new(m, b, *a, **k)

    return wrong


# --- rope ----------------------------------------------------------------------------------------


def queries_only(own: Any) -> Any:
    """Leave the keys unrotated."""
    return lambda q, k, *rest, **how: (own(q, k, *rest, **how)[0], k)


def rotated_twice(own: Any) -> Any:
    """Rotate q and k, then rotate them again."""
    return lambda q, k, *rest, **how: own(*own(q, k, *rest, **how), *rest, **how)


def other_sign(own: Any) -> Any:
    """Turn the other way round."""
    return lambda q, k, cos, sin, *rest, **how: own(q, k, cos, -sin, *rest, **how)


def jump(at: int, by: int) -> Break:
    """Tokens from one on have positions that are too large."""

    def new(module: Any, beneath: Any, x: Tensor, position_ids: Tensor, *more: Any) -> Any:
        moved = position_ids.clone()
        moved[..., at:] += by
        return beneath(x, moved, *more)

    return forwards("RotaryEmbedding", new)


# --- attention -----------------------------------------------------------------------------------


def attending(how: Attend) -> Break:
    """Attention in steps of one's own, on keys and values of every query head."""

    def make(own: Any) -> Any:
        def attention(
            module: Any,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            mask: Tensor,
            scaling: float = 1.0,
            **more: Any,
        ) -> Any:
            groups = query.shape[1] // key.shape[1]
            k, v = (x.repeat_interleave(groups, 1) for x in (key, value))
            return how(module, query, k, v, mask, scaling).transpose(1, 2).contiguous(), None

        return attention

    return function("eager_attention_forward", make)


def attended(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Return attention as it should be."""
    return (q @ k.transpose(2, 3) * scale + mask).softmax(-1) @ v


def seen(rule: Callable[[Tensor, Tensor], Tensor], layer: int | None = None) -> Break:
    """Query i sees key j by a rule of one's own, in one layer or in all."""
    import torch

    def how(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
        at = torch.arange(q.shape[2])
        if layer is None or module.layer_idx == layer:
            mask = torch.where(rule(at[:, None], at[None]), 0.0, torch.finfo(q.dtype).min)
        return attended(q, k, v, mask, scale)

    return attending(how)


def hidden_as_zero() -> Break:
    """Hidden keys have a score of zero."""

    def how(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
        return (q @ k.transpose(2, 3) * scale * (mask == 0)).softmax(-1) @ v

    return attending(how)


def first_layers_cache() -> Break:
    """Every layer reads the first layer's keys and values."""
    held: dict[str, Any] = {}

    def how(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
        if module.layer_idx == 0:
            held["first"] = (k, v)
        k, v = held["first"]
        return attended(q, k, v, mask, scale)

    return attending(how)


def never_written(layer: int, start: int, stop: int) -> Break:
    """Some keys and values of a layer are zero."""

    def how(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
        if module.layer_idx == layer:
            k, v = k.clone(), v.clone()
            k[:, :, start:stop] = v[:, :, start:stop] = 0
        return attended(q, k, v, mask, scale)

    return attending(how)


def turned_values() -> Break:
    """Values are rotated as the keys are."""
    held: dict[str, Any] = {}

    def keep(own: Any) -> Any:
        def rope(q: Tensor, k: Tensor, *angles: Any, **how: Any) -> Any:
            held["rope"] = lambda v: own(v, v, *angles, **how)[1]
            return own(q, k, *angles, **how)

        return rope

    def how(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
        return attended(q, k, held["rope"](v), mask, scale)

    return both(function("apply_rotary_pos_emb", keep), attending(how))


# --- norms, the MLP, the stream ------------------------------------------------------------------


def eps_outside(module: Any, beneath: Any, x: Tensor) -> Tensor:
    """Epsilon is added to the root."""
    root = x.pow(2).mean(-1, keepdim=True).sqrt()
    return module.weight * x / (root + module.variance_epsilon)


def by_length(module: Any, beneath: Any, x: Tensor) -> Tensor:
    """Rows are divided by their length."""
    return module.weight * x * (x.pow(2).sum(-1, keepdim=True) + module.variance_epsilon).rsqrt()


def left_out(*names: str) -> Break:
    """Norms of these names give their input back."""

    def wrong(model: Any, stack: ExitStack) -> None:
        for path, module in model.named_modules():
            if path.rpartition(".")[2] in names:
                module.forward = lambda x: x

    return wrong


def one_eps(name: str, eps: float) -> Break:
    """One norm adds another epsilon."""
    return lambda model, stack: setattr(model.get_submodule(name), "variance_epsilon", eps)


def short_factor(model: Any, stack: ExitStack) -> None:
    """The factor of the embedding is rounded to bfloat16."""
    factor = model.model.embed_tokens.embed_scale
    factor.copy_(factor.bfloat16())


def nothing_from(name: str) -> Break:
    """Modules of this name give zeros."""

    def wrong(model: Any, stack: ExitStack) -> None:
        for path, module in model.named_modules():
            if path.rpartition(".")[2] == name:
                module.forward = lambda x: 0 * x

    return wrong


def quick_gelu(module: Any, beneath: Any, x: Tensor) -> Tensor:
    """x times the sigmoid of 1.702 x."""
    return x * (1.702 * x).sigmoid()


def layer_of(new: Callable[[Any, Tensor, Callable[[Tensor], Tensor]], Tensor]) -> Break:
    """A decoder layer of one's own: `new(layer, stream, attention of a normed stream)`."""

    def forward(module: Any, beneath: Any, hidden_states: Tensor, **how: Any) -> Tensor:
        return new(module, hidden_states, lambda h: module.self_attn(hidden_states=h, **how)[0])

    return forwards("DecoderLayer", forward)


def twice_added(layer: Any, x: Tensor, attention: Callable[[Tensor], Tensor]) -> Tensor:
    """What attention gives is added twice."""
    x = x + 2 * attention(layer.input_layernorm(x))
    return x + layer.mlp(layer.post_attention_layernorm(x))


def itself_added(layer: Any, x: Tensor, attention: Callable[[Tensor], Tensor]) -> Tensor:
    """The stream is added to itself, and attention's result is lost."""
    x = x + x
    return x + layer.mlp(layer.post_attention_layernorm(x))


def sum_normed(layer: Any, x: Tensor, attention: Callable[[Tensor], Tensor]) -> Tensor:
    """Norms behind a sublayer are applied to its sum with the stream."""
    x = layer.post_attention_layernorm(x + attention(x))
    return layer.post_feedforward_layernorm(x + layer.mlp(x))


def beside_each_other(layer: Any, x: Tensor, attention: Callable[[Tensor], Tensor]) -> Tensor:
    """Both norms read the layer's input."""
    made = attention(layer.input_layernorm(x))
    return x + made + layer.mlp(layer.post_attention_layernorm(x))


def without_bias(name: str) -> Break:
    """One bias is zero."""
    return lambda model, stack: dict(model.named_parameters())[name].data.zero_()


# --- experts -------------------------------------------------------------------------------------


def weighted(change: Callable[[Tensor, Tensor], Tensor]) -> Break:
    """Weights of the chosen experts: `change(logits, probabilities)` of these."""

    def new(module: Any, beneath: Any, x: Tensor) -> Any:
        import torch

        logits, _, chosen = beneath(x)
        return (
            logits,
            change(torch.gather(logits, -1, chosen), torch.gather(logits.softmax(-1), -1, chosen)),
            chosen,
        )

    return forwards("TopKRouter", new)
