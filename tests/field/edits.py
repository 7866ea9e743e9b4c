"""Edits of stored tensors, each as a converter or a script once did it."""

from collections.abc import Callable, Sequence
from typing import Any

from tests.field.hf import State, on

Tensor = Any
Edit = Callable[[State], None]
Q, K, V = "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"


def rows(order: Sequence[int]) -> Callable[[Tensor], Tensor]:
    """Return an edit that puts equal blocks of rows in another order."""

    def change(x: Tensor) -> Tensor:
        blocks = x.reshape(len(order), -1, *x.shape[1:])
        return blocks[list(order)].reshape(x.shape)

    return change


def pairs_for_halves(heads: int) -> Callable[[Tensor], Tensor]:
    """Return the permutation of rows from split halves to adjacent pairs, in `heads` heads."""

    def change(x: Tensor) -> Tensor:
        wide = x.reshape(heads, 2, -1, *x.shape[1:])
        return wide.transpose(1, 2).reshape(x.shape)

    return change


def halves_for_pairs(heads: int) -> Callable[[Tensor], Tensor]:
    """Return the permutation back, with a head count that may be wrong."""

    def change(x: Tensor) -> Tensor:
        wide = x.reshape(heads, -1, 2, *x.shape[1:])
        return wide.transpose(1, 2).reshape(x.shape)

    return change


def by_group(heads: int, kv_heads: int, dim: int) -> Callable[[Tensor], Tensor]:
    """Return [all q, all k, all v] as Megatron has it: q... k v of each key head's group."""

    def change(x: Tensor) -> Tensor:
        import torch

        q, k, v = x.split([heads * dim, kv_heads * dim, kv_heads * dim])
        q = q.reshape(kv_heads, -1, *x.shape[1:])
        k, v = (part.reshape(kv_heads, -1, *x.shape[1:]) for part in (k, v))
        return torch.cat([q, k, v], 1).reshape(x.shape)

    return change


def alternating(x: Tensor) -> Tensor:
    """Return two halves row by row: gate 0, up 0, gate 1, up 1."""
    import torch

    return torch.stack(x.chunk(2), 1).reshape(x.shape)


def interleaved(size: int) -> Callable[[Tensor], Tensor]:
    """Return two halves in turns of `size` rows."""

    def change(x: Tensor) -> Tensor:
        import torch

        parts = [half.reshape(-1, size, *x.shape[1:]) for half in x.chunk(2)]
        return torch.stack(parts, 1).reshape(x.shape)

    return change


def exchanged(x: Tensor) -> Tensor:
    """Return the second half first."""
    import torch

    first, second = x.chunk(2)
    return torch.cat([second, first])


def lora(scale: float, *endings: str, rank: int = 2, seed: int = 5, layers: str = "") -> Edit:
    """Return an edit that adds a product of low rank to weights; `layers` a part of the names."""

    def run(state: State) -> None:
        import torch

        generator = torch.Generator().manual_seed(seed)
        for name in sorted(state):
            x = state[name]
            if not name.endswith(endings):
                continue
            down = torch.randn(rank, x.shape[1], generator=generator) / x.shape[1] ** 0.5
            up = torch.randn(x.shape[0], rank, generator=generator)
            if layers in name:
                made = x.float() + scale * x.float().std() * (up @ down)
                state[name] = made.to(x.dtype)

    return run


def tuned(size: float, seed: int = 9) -> Edit:
    """Return an edit that changes every matrix a little, as training does."""

    def run(state: State) -> None:
        import torch

        generator = torch.Generator().manual_seed(seed)
        for name in sorted(state):
            x = state[name]
            noise = torch.randn(x.shape, generator=generator)
            state[name] = (x.float() + size * x.float().std() * noise).to(x.dtype)

    return run


def tensors_zero(*endings: str) -> Edit:
    """Return an edit that fills tensors with zeros."""

    def run(state: State) -> None:
        for ending in endings:
            on(ending, lambda x: 0 * x)(state)

    return run


def corrupted(start: int, values: Sequence[float]) -> Callable[[Tensor], Tensor]:
    """Return an edit of some values in a row."""

    def change(x: Tensor) -> Tensor:
        import torch

        flat = x.reshape(-1).clone()
        flat[start : start + len(values)] = torch.tensor(values, dtype=x.dtype)
        return flat.reshape(x.shape)

    return change


def zeros_from(part: float) -> Callable[[Tensor], Tensor]:
    """Return an edit that leaves zeros behind a part of the data, as a short file does."""

    def change(x: Tensor) -> Tensor:
        flat = x.reshape(-1).clone()
        flat[int(part * len(flat)) :] = 0
        return flat.reshape(x.shape)

    return change


def shifted(count: int) -> Callable[[Tensor], Tensor]:
    """Return an edit that stores data `count` elements too late."""

    def change(x: Tensor) -> Tensor:
        flat = x.reshape(-1)
        moved = flat.roll(count).clone()
        moved[:count] = 0
        return moved.reshape(x.shape)

    return change


def layers_reordered(order: Sequence[int]) -> Edit:
    """Return an edit: layer i gets the tensors of layer order[i]."""

    def run(state: State) -> None:
        before = dict(state)
        for new, old in enumerate(order):
            for name, x in before.items():
                if name.startswith(f"model.layers.{old}."):
                    rest = name.removeprefix(f"model.layers.{old}.")
                    state[f"model.layers.{new}.{rest}"] = x

    return run


def experts_reordered(
    order: Sequence[int], parts: Sequence[str] = ("gate", "up", "down"), router: bool = False
) -> Edit:
    """Return an edit: expert i of every layer gets the weights of expert order[i]."""

    def run(state: State) -> None:
        before = dict(state)
        for name in before:
            head, found, tail = name.partition(".experts.")
            number, _, part = tail.partition(".")
            if found and part.removesuffix("_proj.weight") in parts and int(number) < len(order):
                state[name] = before[f"{head}.experts.{order[int(number)]}.{part}"]
            if router and name.endswith("mlp.gate.weight"):
                state[name] = before[name][list(order)]

    return run


def drawn(x: Tensor, seed: int = 0) -> Tensor:
    """Return other values of the same size: an initialisation."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(x.shape, generator=generator) * x.float().std()).to(x.dtype)


def rows_redrawn(x: Tensor, start: int) -> Tensor:
    """Return rows from `start` on as an initialisation leaves them."""
    x = x.clone()
    x[start:] = drawn(x[start:], 1)
    return x


def other_byte_order(x: Tensor) -> Tensor:
    """Return values whose bytes are in the other order."""
    import torch

    return torch.from_numpy(x.contiguous().numpy().byteswap())


def as_half(state: State) -> State:
    """Return 16-bit tensors under the label of float16."""
    import torch

    return {key: x.view(torch.float16) for key, x in state.items()}


def second_half_zero(x: Tensor) -> Tensor:
    """Return a matrix whose second half of columns was never read."""
    x = x.clone()
    x[:, x.shape[1] // 2 :] = 0
    return x


def experts_drawn(state: State) -> None:
    """Leave every expert at a small initialisation."""
    for seed, name in enumerate(sorted(state)):
        if ".experts." in name:
            state[name] = 0.1 * drawn(state[name], seed)


def biases_by_parts(state: State) -> None:
    """Join gate and up biases part by part where their halves are to follow each other."""
    import torch

    for name in [name for name in state if name.endswith("gate_proj.bias")]:
        other = name.replace("gate_proj", "up_proj")
        gate, up = state[name].chunk(2), state[other].chunk(2)
        state[name], state[other] = torch.cat([gate[0], up[0]]), torch.cat([gate[1], up[1]])


def norm_of_another_place(state: State) -> None:
    """Store the norm behind attention under the name of the one before the MLP, too."""
    for name in list(state):
        if name.endswith("post_attention_layernorm.weight"):
            other = name.replace("post_attention", "pre_feedforward")
            state[other] = state[name].clone()
