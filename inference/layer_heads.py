"""How many heads a layer has, and which layer's keys and values it uses.

Windowed layers may differ from the others.
"""

from collections.abc import Mapping

from aprfmt.base.protocols import Value
from aprfmt.errors import ArchError

Hyper = Mapping[str, Value]


def kv_head_count(hp: Hyper, layer: int) -> int:
    """Return the number of key-value heads of a layer."""
    other = None if hp["window_layers"][layer] else hp["global_kv_heads"]
    return int(hp["n_kv_heads"] if other is None else other)


def head_dim_of_layer(hp: Hyper, layer: int) -> int:
    """Return the width of a layer's query and key heads."""
    other = None if hp["window_layers"][layer] else hp["global_head_dim"]
    return int(hp["head_dim"] if other is None else other)


def values_are_keys(hp: Hyper, layer: int) -> bool:
    """Return whether a layer uses its keys, before norm and rope, as its values."""
    return bool(hp["value_is_key"]) and not hp["window_layers"][layer]


def key_value_layer(hp: Hyper, layer: int) -> int:
    """Return the layer whose keys and values a layer uses: itself, or an earlier one.

    The earlier one is the nearest that computes keys and is of the same kind, with a sliding window
    or without. Raises ArchError where there is none.
    """
    if hp["own_kv_layers"][layer]:
        return layer
    kind = hp["window_layers"][layer]
    for other in range(layer - 1, -1, -1):
        if hp["own_kv_layers"][other] and hp["window_layers"][other] == kind:
            return other
    which = "with" if kind else "without"
    raise ArchError(
        f"layer {layer} uses the keys and values of an earlier layer {which} a window; the model "
        "has none that has its own"
    )


def gives_keys_to_later(hp: Hyper, layer: int) -> bool:
    """Return whether a later layer uses a layer's keys and values."""
    if all(hp["own_kv_layers"]):
        return False
    return any(
        key_value_layer(hp, other) == layer for other in range(layer + 1, int(hp["n_layers"]))
    )


def compress_rate(hp: Hyper, layer: int) -> int:
    """Return how many tokens a layer's compressed keys stand for, 0 where it has none."""
    if hp["index_layers"][layer]:
        return int(hp["sparse_rate"])
    return int(hp["heavy_rate"]) if hp["heavy_layers"][layer] else 0
