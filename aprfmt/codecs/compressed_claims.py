"""What the arguments of a compressed-tensors weight state, held to what it is stored as.

Source: compressed-tensors 0.20, quantization/quant_args.py.
"""

from collections.abc import Mapping
from typing import Any

from aprfmt.codecs.dialect import GROUP_SIZES, fact
from aprfmt.errors import CodecError

NAME = "compressed-tensors"


def agree(weights: Mapping[str, Any], where: str, **holds: Any) -> None:
    """Raise CodecError where the arguments of the weight state another thing than it holds."""
    for key, value in holds.items():
        if weights.get(key) not in (None, value):
            raise CodecError(f"{NAME}: config says {key} {weights[key]!r}, {where} has {value!r}")


def scale_shapes(shape: tuple[int, ...], weights: Mapping[str, Any]) -> list[tuple[int, ...]]:
    """Return the shapes that scales may have by strategy and group size; [] where that is open."""
    strategy, size = weights.get("strategy"), weights.get("group_size")
    if strategy == "tensor" and len(shape) == 2:
        return [(1,), (), (1, 1)]
    if strategy == "channel" or (strategy == "group" and size == -1):
        return [(*shape[:-1], 1), shape[:-1]]
    if strategy != "group" or size is None:
        return []
    size = fact(NAME, weights, "group_size", GROUP_SIZES)
    return [(*shape[:-1], -(-shape[-1] // size))]
