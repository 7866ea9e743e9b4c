"""Seeded faults of `aprfmt/causes/forward/layer_sharing.py`."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.diagnosis.engines import broken
from tests.diagnosis.making import engine


def other_owner(reader: int, owner: int, layers: int) -> Any:
    """Return a backend in which a layer reads the keys and values that another one wrote."""

    def make() -> Any:
        held: dict[str, Any] = {}
        turns = {"k": iter(range(1 << 30)), "v": iter(range(1 << 30))}

        def read(what: str, own: Any) -> Any:
            layer = next(turns[what]) % layers
            if layer == owner:
                held[what] = own
            return held[what] if layer == reader else own

        made = broken("scores", lambda op, q, k, heads: op(q, read("k", k), heads))
        mix = type(made).mix
        type(made).mix = lambda self, probs, v: mix(self, probs, read("v", v))  # type: ignore
        return made

    return make


def turned(op: Any, x: Any, coefs: Any) -> Any:
    """Mix copies by coefficients whose rows and columns are exchanged."""
    n = round(coefs.shape[-1] ** 0.5)
    return op(x, coefs.reshape(-1, n, n).swapaxes(1, 2).reshape(coefs.shape))


def altered(point: str, change: Callable[[Any], Any]) -> Any:
    """Return what alters a point's values in every layer."""
    return lambda: lambda at, layer, x: change(x) if at == point else x


def unpredicted() -> Any:
    """Return what gives a layer the copies as they entered it, not predicted ones."""
    held: dict[str, Any] = {}

    def alter(point: str, layer: int, x: Any) -> Any:
        if point in ("altup_embd", "out"):
            held["entered"] = x
        return held["entered"] if point == "altup_predicted" else x

    return alter


ENGINE_FAULTS = (
    engine("gemma3n-shared", "gemma3n", "a layer reads the first one's keys, not the third's",
           "kv_sharing", "L4.own_kv_layers", fine=True, backend=other_owner(4, 0, 6)),
    engine("gemma3n-shared-coarse", "gemma3n", "the same, outputs recorded", "kv_sharing",
           "L4.own_kv_layers", backend=other_owner(4, 0, 6)),
    engine("gemma3n-unpredicted", "gemma3n", "the copies are not predicted", "altup",
           "altup_streams", fine=True, alter=unpredicted),
    engine("gemma3n-transposed", "gemma3n", "copies mixed by transposed coefficients", "altup",
           "altup_streams", fine=True, backend=lambda: broken("mix_copies", turned)),
    engine("gemma4-dropped", "gemma4", "the layers' inputs are dropped", "per_layer_input",
           "per_layer_size", alter=altered("per_layer_contrib", lambda x: 0 * x)),
    engine("gemma4-next-input", "gemma4", "every layer takes the next one's input",
           "per_layer_input", "per_layer_size", fine=True,
           alter=altered("per_layer", lambda x: np.roll(x, -7, axis=-1))),
    engine("gemma4-shared", "gemma4", "a layer reads the first one's keys, not the second's",
           "kv_sharing", "L3.own_kv_layers", backend=other_owner(3, 0, 6)),
)  # fmt: skip
