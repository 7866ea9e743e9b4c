"""Right engines whose dumps were taken elsewhere, or that round otherwise."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.diagnosis.engines import place
from tests.field.foreign import Patch, dump, every
from tests.field.row import Pair

Tensor = Any
Arrays = dict[str, Any]


def _changed(make: Callable[[], Pair], name: str, change: Callable[[Arrays], None]) -> Pair:
    folder, path = make()
    with np.load(Path(str(path))) as read:
        arrays = {key: read[key] for key in read.files}
    change(arrays)
    target = place(f"field-{name}-changed.npz")
    np.savez(target, **arrays)
    return folder, target


def before_bias(arch: str, name: str) -> Callable[[], Pair]:
    """Return a maker of a dump whose q_proj results are without their bias."""

    def make() -> Pair:
        from tests.field.hf import base, state_of

        state = state_of(base(arch))

        def change(arrays: Arrays) -> None:
            for key in arrays:
                if key.endswith("q_proj"):
                    arrays[key] = arrays[key] - state[f"{key}.bias"].numpy()

        return _changed(dump(arch, name), name, change)

    return make


def before_rope(arch: str, name: str) -> Callable[[], Pair]:
    """Return a maker of a dump that calls q and k before their rope the rotated ones."""

    def make() -> Pair:
        def change(arrays: Arrays) -> None:
            for key in list(arrays):
                head, _, part = key.rpartition(".self_attn.")
                if part in ("q_proj", "k_proj"):
                    x = arrays[key]
                    wide = x.reshape(*x.shape[:-1], -1, 16).swapaxes(-2, -3)
                    arrays[f"{head}#{part[0]}_rope"] = wide

        return _changed(dump(arch, name), name, change)

    return make


def without_residual(arch: str, name: str) -> Callable[[], Pair]:
    """Return a maker of a dump whose layers' results are without the stream after attention."""

    def make() -> Pair:
        def change(arrays: Arrays) -> None:
            for key in list(arrays):
                if key.rpartition(".")[2].isdigit():
                    arrays[key] = arrays[f"{key}.mlp"]

        return _changed(dump(arch, name), name, change)

    return make


def last_rows(arch: str, name: str, count: int) -> Callable[[], Pair]:
    """Return a maker of a dump with the last rows of every module only."""

    def make() -> Pair:
        def change(arrays: Arrays) -> None:
            for key in arrays:
                if key != "input_ids":
                    arrays[key] = arrays[key][:, -count:]

        return _changed(dump(arch, name), name, change)

    return make


def rounded(x: Tensor, bits: int) -> Tensor:
    """Return float32 values whose mantissas have `bits` bits, ties to even."""
    import torch

    drop = 23 - bits
    whole = x.contiguous().view(torch.int32)
    half = (1 << (drop - 1)) - 1 + ((whole >> drop) & 1)
    return ((whole + half) & ~((1 << drop) - 1)).view(torch.float32)


def _products(change: Callable[[Any, Tensor], Tensor]) -> Patch:
    def patch(module: Any) -> None:
        module.forward = lambda x: change(module, x)

    return every("Linear", patch)


def in_other_precision(arch: str, name: str, bits: int) -> Callable[[], Pair]:
    """Return a maker of a dump whose products read values of `bits` mantissa bits."""

    def product(module: Any, x: Tensor) -> Tensor:
        made = rounded(x, bits) @ rounded(module.weight.data, bits).T
        return made if module.bias is None else made + module.bias

    return dump(arch, name, _products(product))


def other_order_of_sums(arch: str, name: str) -> Callable[[], Pair]:
    """Return a maker of a dump whose products are summed in four pieces, the last one first."""

    def product(module: Any, x: Tensor) -> Tensor:
        pieces = zip(x.chunk(4, -1), module.weight.data.chunk(4, -1), strict=True)
        made = sum(a @ b.T for a, b in reversed(list(pieces)))
        return made if module.bias is None else made + module.bias

    return dump(arch, name, _products(product))
