"""Ready-made patches of engines: one operation each, as it was wrong somewhere."""

from collections.abc import Callable
from typing import Any

from tests.field.foreign import Patch, attention, every, forward_of, replaced

Tensor = Any


def partial_sums(width: int) -> Callable[[Tensor], Tensor]:
    """Return a softmax that divides by the sum of the first `width` keys only."""

    def softmax(scores: Tensor) -> Tensor:
        e = (scores - scores.amax(-1, keepdim=True)).exp()
        return e / e[..., :width].sum(-1, keepdim=True)

    return softmax


def no_mask(mask: Tensor) -> Tensor:
    """Mask nothing."""
    return 0 * mask.clamp_min(-1)


def late(layer: int) -> Patch:
    """Keys and values of a layer come one position late."""

    def shifted(module: Any, x: Tensor) -> Tensor:
        if module.layer_idx != layer:
            return x
        x = x.clone()
        x[:, :, 1:] = x[:, :, :-1].clone()
        return x

    return attention(keys=shifted, values=shifted)


def left_empty(layer: int, start: int, stop: int) -> Patch:
    """Some positions of a layer's keys and values were never written."""

    def holes(module: Any, x: Tensor) -> Tensor:
        if module.layer_idx != layer:
            return x
        x = x.clone()
        x[:, :, start:stop] = 0
        return x

    return attention(keys=holes, values=holes)


def positions_from(first: int, start: int = 0) -> Patch:
    """Tokens from `start` on have positions that are `first` too large."""

    def new(module: Any, beneath: Any, x: Tensor, position_ids: Tensor, *more: Any) -> Any:
        ids = position_ids.clone()
        ids[..., start:] += first
        return beneath(x, ids, *more)

    return forward_of("RotaryEmbedding", new)


def routed(norm: bool, *, logits: bool = False) -> Patch:
    """A softmax router's weights with or without division by their sum; or its raw logits."""

    def new(module: Any, beneath: Any, x: Tensor) -> Any:
        import torch

        found, _, _ = beneath(x)
        probs = found.softmax(-1)
        weights, chosen = torch.topk(probs, module.top_k, -1)
        if norm:
            weights = weights / weights.sum(-1, keepdim=True)
        if logits:
            weights = torch.gather(found, -1, chosen)
        return found, weights, chosen

    return forward_of("TopKRouter", new)


def softmax_of_all() -> Patch:
    """gpt-oss's router with the softmax over all experts, not over the chosen ones."""
    return routed(False)


def activation(name: str) -> Patch:
    """Another activation function in every MLP."""

    def change(module: Any) -> None:
        from transformers.activations import ACT2FN

        names = ("act_fn", "activation_fn", "act")
        attribute = next(name for name in names if hasattr(module, name))
        setattr(module, attribute, ACT2FN[name])

    return every("MLP", change)


def norms_times(change: Callable[[Tensor], Tensor]) -> Patch:
    """Centred norms multiply by another function of their weight."""

    def new(module: Any, beneath: Any, x: Tensor) -> Tensor:
        kept = module.weight.data
        module.weight.data = change(kept)
        found = beneath(x)
        module.weight.data = kept
        return found

    return forward_of("RMSNorm", new)


def halves_of_gate_up() -> Patch:
    """gpt-oss's joined product split into halves where it alternates."""

    def change(module: Any) -> None:
        def gate(gate_up: Tensor) -> Tensor:
            first, second = gate_up.chunk(2, -1)
            first = first.clamp(max=module.limit)
            second = second.clamp(-module.limit, module.limit)
            return (second + 1) * first * (first * module.alpha).sigmoid()

        module._apply_gate = gate

    return every("GptOssExperts", change)


def split_by_heads() -> Patch:
    """phi3's joined product read head by head: q, k and v of a head beside each other."""

    def new(module: Any, beneath: Any, x: Tensor) -> Tensor:
        joined = beneath(x)
        heads = 3
        wide = joined.reshape(*joined.shape[:-1], -1, heads, 16)
        return wide.transpose(-2, -3).reshape(joined.shape)

    def change(module: Any) -> None:
        beneath = module.qkv_proj.forward
        module.qkv_proj.forward = lambda x: new(module, beneath, x)

    return every("Phi3Attention", change)


def one_rope() -> Patch:
    """Local layers get the global layers' angles."""

    def new(module: Any, beneath: Any, x: Tensor, position_ids: Tensor, kind: Any = None) -> Any:
        return beneath(x, position_ids, "full_attention")

    return forward_of("RotaryEmbedding", new)


def unscaled_embedding() -> Patch:
    """Embedding rows that are not multiplied."""

    def change(module: Any) -> None:
        module.embed_scale.fill_(1.0)

    return every("ScaledWordEmbedding", change)


def all_keys(mask: Tensor) -> Tensor:
    """Let local layers see every earlier token: the causal mask alone."""
    import torch

    size = mask.shape[-1]
    hidden = torch.full((size, size), torch.finfo(mask.dtype).min).triu(1)
    return hidden[None, None]


def windowed(window: int) -> Callable[[Tensor], Tensor]:
    """Return a mask with another window than the model's."""

    def change(mask: Tensor) -> Tensor:
        import torch

        size = mask.shape[-1]
        rows, columns = torch.arange(size)[:, None], torch.arange(size)[None]
        seen = (columns <= rows) & (columns > rows - window)
        return torch.where(seen, 0.0, torch.finfo(mask.dtype).min)[None, None]

    return change


def pairs() -> Patch:
    """Rope in adjacent pairs."""
    from tests.field.foreign import adjacent_pairs

    return replaced("apply_rotary_pos_emb", adjacent_pairs)


def drawn(x: Tensor) -> Tensor:
    """Return other weights of the same size: an initialisation."""
    import torch

    generator = torch.Generator().manual_seed(3)
    return torch.randn(x.shape, generator=generator) * x.std()


def tied_head(model: Any) -> None:
    """The embedding stands in for the head."""
    model.lm_head.weight = model.model.embed_tokens.weight


def gate_and_up(model: Any) -> None:
    """The activation is applied to the up product."""
    for layer in model.model.layers:
        layer.mlp.gate_proj, layer.mlp.up_proj = layer.mlp.up_proj, layer.mlp.gate_proj
