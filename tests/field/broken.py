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


def skipped(*names: str) -> Patch:
    """Norms of these names give back what they get."""

    def patch(model: Any) -> None:
        chosen = [m for path, m in model.named_modules() if path.rpartition(".")[2] in names]
        assert chosen, names
        for module in chosen:
            module.forward = lambda x: x

    return patch


def norms_over_heads() -> Patch:
    """q and k are divided by the size of all heads together."""

    def patch(model: Any) -> None:
        for path, module in model.named_modules():
            if path.endswith(("q_norm", "k_norm")):
                module.forward = lambda x, module=module: (
                    x
                    * (x.pow(2).mean((-1, -2), keepdim=True) + module.variance_epsilon).rsqrt()
                    * module.weight
                )

    return patch


def frequencies_times(name: str, factor: float) -> Patch:
    """Inverse frequencies of one kind of layers are multiplied."""

    def patch(model: Any) -> None:
        rope = model.model.rotary_emb
        setattr(rope, name, getattr(rope, name) * factor)

    return patch


def grouped(*, biased: bool = False, factor: float | None = None, best: int = 2) -> Patch:
    """A router of groups: the bias in the weights, another factor, or groups ranked otherwise."""

    def new(module: Any, beneath: Any, x: Tensor) -> Any:
        import torch

        x = x.reshape(-1, x.shape[-1]).float()
        logits = x @ module.weight.float().T
        scores = logits.sigmoid()
        ranked = scores + module.e_score_correction_bias
        groups = ranked.reshape(len(x), module.num_group, -1)
        kept = groups.topk(best, -1).values.sum(-1).topk(module.topk_group, -1).indices
        mask = torch.zeros(groups.shape[:2]).scatter_(1, kept, 1)[..., None].expand_as(groups)
        chosen = ranked.masked_fill(mask.reshape(ranked.shape) == 0, float("-inf"))
        chosen = chosen.topk(module.top_k, -1).indices
        weights = (ranked if biased else scores).gather(1, chosen)
        if module.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        scale = module.routed_scaling_factor if factor is None else factor
        return logits, weights * scale, chosen

    return forward_of("TopkRouter", new)
