"""Capture points of one model: keys, slots, stages, aliases. The table itself is points.py.

A *slot* is a name for several points of a layer that are joined along the last axis (`qkv` for q, k
and v). A *stage* is the name that `apr trace --save-tensor` has for a point or a slot.

A point's key is `L3.attn_out`, a whole-model point's its name.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile

from aprfmt.arch.spec import BlockSpec
from aprfmt.base.protocols import Value
from aprfmt.errors import UsageError
from aprfmt.inference.points import ABSENT as ABSENT
from aprfmt.inference.points import BEFORE as BEFORE
from aprfmt.inference.points import HERE as HERE
from aprfmt.inference.points import POINTS as POINTS
from aprfmt.inference.points import WHOLE as WHOLE
from aprfmt.inference.points import LayerFacts as LayerFacts
from aprfmt.inference.points import Point as Point
from aprfmt.model.patterns import similar_names

# The ten slots of `apr trace --payload` under their names there, and one more.
SLOTS: Mapping[str, tuple[str, ...]] = {
    "attn_norm": ("attn_norm",),
    "qkv": ("q", "k", "v"),
    "qkv_nobias": ("q_mm", "k_mm", "v_mm"),
    "attn_out": ("attn_out",),
    "ffn_norm": ("ffn_norm",),
    "ffn_gate": ("ffn_gate",),
    "ffn_up": ("ffn_up",),
    "ffn_silu": ("ffn_act",),
    "ffn_swigl": ("ffn_mul",),
    "ffn_out": ("ffn_out",),
    "output": ("out",),
}
# Slot -> a slot shown next to it if the two differ: without biases they are the same points.
NEIGHBOUR_SLOTS: Mapping[str, str] = {"qkv_nobias": "qkv"}
# Stages of APRT folders: `apr`'s name -> the points joined in it, in table order.
STAGES: Mapping[str, tuple[str, ...]] = {
    stage: tuple(point.name for point in POINTS.values() if point.apr == stage)
    for stage in dict.fromkeys(point.apr for point in POINTS.values() if point.apr)
}
STAGE_ALIASES: Mapping[str, str] = {"layer_output": "post_ffn_residual"}

# The whole-model points before the first layer.
ENTERING = tuple(takewhile(lambda name: not POINTS[name].layered, POINTS))

_KEY = re.compile(r"L(\d{1,9})\.(\w+)")


def key_name(point: str, layer: int) -> str:
    """Return `L3.attn_out`, or the name of a whole-model point."""
    return point if layer == WHOLE else f"L{layer}.{point}"


def find_key(key: str) -> tuple[str, int] | None:
    """Return (point, layer) of a key; None if the table has no such point."""
    match = _KEY.fullmatch(key)
    name, layer = (match[2], int(match[1])) if match else (key, WHOLE)
    known = name in POINTS and POINTS[name].layered == (layer != WHOLE)
    return (name, layer) if known else None


def parse_key(key: str) -> tuple[str, int]:
    """Return (point, layer) of a key; UsageError, with near names, if there is no such point."""
    found = find_key(key)
    if found is None:
        name = key.partition(".")[2] if _KEY.fullmatch(key) else key
        raise UsageError(
            f"capture point {key!r} is not known; near ones: "
            f"{', '.join(similar_names(name, POINTS))}, "
            "written L3.attn_out or final_norm"
        )
    return found


@dataclass(frozen=True)
class PointInstance:
    """A point of one model and layer: captured under its key, equal to another's, or absent."""

    point: Point
    layer: int
    alias_of: str  # key of the equal point, "" if none
    absent: bool

    @property
    def key(self) -> str:
        """The point's key, `L3.attn_out`, or the name of a whole-model point."""
        return key_name(self.point.name, self.layer)


def point_instances(
    block: BlockSpec, hp: Mapping[str, Value], roles: Collection[str]
) -> dict[str, PointInstance]:
    """Return {key: point} of every point of a model, in execution order.

    `block` describes its layers, `roles` are the role keys that its file stores. Aliases and absent
    points are included. `k_cache` and `v_cache` are captured only in passes that continue a cache.
    """
    layers = range(int(hp["n_layers"]))
    inside = [point for point in POINTS.values() if point.layered]
    before = [POINTS[name] for name in ENTERING]
    after = [point for point in POINTS.values() if not point.layered and point not in before]
    rows = [(point, WHOLE) for point in before]
    rows += [(point, layer) for layer in layers for point in inside]
    rows += [(point, WHOLE) for point in after]
    found = {}
    for point, layer in rows:
        status = point.where(LayerFacts(block, hp, roles, layer))
        alias = ""
        if status == BEFORE:
            alias = key_name("out", layer - 1)
        elif status not in (HERE, ABSENT):
            alias = key_name(status, layer if POINTS[status].layered else WHOLE)
        instance = PointInstance(point, layer, alias, status == ABSENT)
        found[instance.key] = instance
    return found


def resolve_alias(key: str, known: Mapping[str, PointInstance]) -> PointInstance | None:
    """Return the captured point that a key equals by its aliases; None if it is absent.

    `known` are the model's points by key, as `point_instances` gives them. Raises UsageError for a
    key the model does not have.
    """
    while key in known:
        instance = known[key]
        if instance.absent:
            return None
        if not instance.alias_of:
            return instance
        key = instance.alias_of
    parse_key(key)
    raise UsageError(f"{key}: the model has no such layer")


def select_points(patterns: Iterable[str]) -> tuple[str, ...]:
    """Return point names, in table order, for `all` and names of points, slots and stages.

    Raises UsageError for another name.
    """
    chosen: set[str] = set()
    for pattern in patterns:
        name = STAGE_ALIASES.get(pattern, pattern)
        names = tuple(POINTS) if name == "all" else SLOTS.get(name) or STAGES.get(name)
        if name in POINTS:
            names = (name,)
        if names is None:
            every = [*POINTS, *SLOTS, *STAGES]
            raise UsageError(
                f"capture point {pattern!r} is not known; near ones: "
                f"{', '.join(similar_names(pattern, every))}, or all"
            )
        chosen.update(names)
    return tuple(name for name in POINTS if name in chosen)


def select_keys(patterns: Iterable[str], points: Mapping[str, str]) -> tuple[str, ...]:
    """Return the keys, in the order of `points`, that names of points, slots or stages choose.

    A key such as `L0.q_rope` chooses the point in that layer, a name the point in every layer.
    `points` is {key: point name}. Raises UsageError for an unknown name, and for a key that
    `points` does not have.
    """
    patterns = tuple(patterns)
    keys = {pattern for pattern in patterns if _KEY.fullmatch(pattern)}
    for key in sorted(keys - points.keys()):
        parse_key(key)
        raise UsageError(f"{key}: there is no such point in that layer")
    names = set(select_points(pattern for pattern in patterns if pattern not in keys))
    # A joined slot has its parts.
    return tuple(
        key
        for key, name in points.items()
        if key in keys or names.issuperset(SLOTS.get(name, (name,)))
    )
