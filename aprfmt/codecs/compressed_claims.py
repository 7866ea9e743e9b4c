"""Compare what the configuration says of a compressed-tensors weight with the tensors stored.

A *config group* is one entry of the configuration's `config_groups`: a kind of quantization and the
modules it is for.

Source: compressed-tensors 0.20, quantization/quant_args.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from aprfmt.codecs.dialect import GROUP_SIZES, config_integer
from aprfmt.errors import CodecError

NAME = "compressed-tensors"
GROUPED = ("group", "tensor_group")  # for groups of inputs, the second under a scale of the tensor
STRATEGIES = ("tensor", "channel", *GROUPED, "block")  # of weights; "token" is of activations


def check_claims(weights: Mapping[str, Any], where: str, **holds: Any) -> None:
    """Raise CodecError where the configuration of a weight contradicts its stored tensors.

    `weights` are the arguments under "weights" in the weight's config group. `holds` is {key of
    these: value that the stored tensors have}, and `where` names those tensors in the message. A
    key that the configuration leaves out contradicts nothing.
    """
    for key, value in holds.items():
        if weights.get(key) not in (None, value):
            raise CodecError(f"{NAME}: config says {key} {weights[key]!r}, {where} has {value!r}")


def scale_strategy(
    weights: Mapping[str, Any], scale: Sequence[int], allowed: Sequence[str] = STRATEGIES
) -> str | None:
    """Return the scale strategy ("group", "channel", ...) of a config group; None without one.

    `weights` are the group's arguments under "weights". Raises CodecError for a strategy that is
    not in `allowed`. `scale` is the scales' shape, for the message only.
    """
    stated = weights.get("strategy")
    if stated is not None and stated not in allowed:
        raise CodecError(
            f"{NAME}: config says strategy {stated!r}, the scales have shape {list(scale)}; "
            f"expected {' or '.join(allowed)}: correct it in config_groups"
        )
    return stated


def scale_shapes(
    shape: tuple[int, ...], weights: Mapping[str, Any], strategy: str | None
) -> list[tuple[int, ...]]:
    """Return the shapes that scales may have by strategy and group size; [] if any shape will do.

    `shape` is the weight's. `weights` are the arguments under "weights" of its config group.
    """
    size = weights.get("group_size")
    if strategy == "tensor" and len(shape) == 2:
        return [(1,), (), (1, 1)]
    if strategy == "channel" or (strategy == "group" and size == -1):
        return [(*shape[:-1], 1), shape[:-1]]
    if strategy != "group" or size is None:
        return []
    size = config_integer(NAME, weights, "group_size", GROUP_SIZES)
    return [(*shape[:-1], -(-shape[-1] // size))]
