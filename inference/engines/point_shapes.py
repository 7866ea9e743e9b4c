"""Shapes of a model's points, as its table says them in names of sizes."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from aprfmt.base.protocols import Value
from aprfmt.inference.capture import PointInstance

_NAMED = 4  # points that a text names


def point_shapes(
    hp: Mapping[str, Value], known: Mapping[str, PointInstance], tokens: int
) -> dict[str, tuple[int, ...]]:
    """Return {key: shape} of every point of the model in a pass of `tokens` tokens.

    `hp` are the model's sizes, `known` its points by key. Points with an unknown size are left out.
    """
    known_sizes = _sizes_by_name(hp, known, tokens)
    found = {}
    for key, instance in known.items():
        if not instance.absent:
            parts = instance.point.shape.replace(" ", "").split(",")
            sizes = [_size_of(part, known_sizes) for part in parts]
            if None not in sizes:
                found[key] = tuple(size for size in sizes if size is not None)
    return found


def row_sizes(
    shape: str, hp: Mapping[str, Value], known: Mapping[str, PointInstance]
) -> tuple[int, ...] | None:
    """Return the shape of a capture point's value for one token, such as (heads, head size).

    `shape` is the point's text in the table: "tokens, heads*head_dim". `hp` are the model's
    hyperparameters, `known` its points by key. None if a size is unknown, and for a point that has
    no row for each token.
    """
    tokens, *axes = shape.replace(" ", "").replace("*", ",").split(",")
    sizes = _sizes_by_name(hp, known, 1)
    found = [_size_of(axis, sizes) for axis in axes]
    if tokens != "tokens" or not found:
        return None
    return None if None in found else tuple(size for size in found if size is not None)


def nearest_points_text(
    shape: Sequence[int], shapes: Mapping[str, tuple[int, ...]], tokens: int | None
) -> str:
    """Return an array's shape in words, and the points whose values have it or are nearest to it.

    `shapes` are those of the model's points by key, {} without a model. `tokens` is the length of
    the pass, None where it is not known. The array of one rank, which has only some columns, is
    like no point.
    """
    said = f"of shape {list(shape)}"
    size = math.prod(shape)
    sizes = {key: math.prod(one) for key, one in shapes.items() if math.prod(one)}
    if not sizes or not size:
        return said
    fits = [key for key, one in sizes.items() if one == size]
    if fits and tokens is not None:
        names = list(dict.fromkeys(key.rpartition(".")[2] for key in fits))
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        return f"{said}, as {', '.join(names[:_NAMED])}{more} of the model have"
    near = min(sizes, key=lambda key: abs(math.log(sizes[key] / size)))
    return (
        f"{said}; no point of the model has as many values, nearest is {near} {list(shapes[near])}"
    )


def _sizes_by_name(
    hp: Mapping[str, Value], known: Mapping[str, PointInstance], tokens: int
) -> dict[str, Any]:
    """Return {name of a dimension: size} for the shapes of capture points in a pass of `tokens`.

    `hp` are the model's hyperparameters, which are all included; `known` its points by key.
    """
    value_dim = int(hp["value_head_dim"] or hp["head_dim"])
    mla = bool(known) and not known["L0.kv_a"].absent
    head = int(hp["head_dim"])
    if mla:
        head = int(hp["qk_nope_head_dim"]) + int(hp["qk_rope_head_dim"])
    # Sizes by the names that the table of points uses.
    dims: dict[str, int] = {
        "hidden_size": int(hp["hidden_size"]),
        "head_dim": head,
        "value_dim": value_dim,
        "ffn_size": int(hp["ffn_size"] or 0),
        "vocab_size": int(hp["vocab_size"]),
        "heads": int(hp["n_heads"]),
        "tokens": tokens,
        "keys": tokens,
        "rows": tokens,
        "1": 1,
        "kv_heads": int(hp["n_heads"] if mla else hp["n_kv_heads"]),
    }
    return {**hp, **dims}


def _size_of(text: str, known: Mapping[str, Any]) -> int | None:
    """Return the size of an axis; None if a name in it is unknown.

    `text` is a name, or a sum or product of names.
    """
    for sign, join in (("+", sum), ("*", math.prod)):
        if sign in text:
            parts = [_size_of(part, known) for part in text.split(sign)]
            return None if None in parts else join(part for part in parts if part is not None)
    value = known.get(text)
    return int(value) if isinstance(value, (int, float)) else None
