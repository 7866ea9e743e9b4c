"""Changes of the rotation that keys of earlier passes have where later tokens read them."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from aprfmt.causes.forward.mismatch import (
    Array,
    Change,
    Hypothesis,
    Layers,
    Mismatch,
    differing_rows,
)
from aprfmt.inference.replay.patched_model import PatchedModel

# How often rope was applied to cached keys -> what is said of it.
TIMES = {0: "as they are before rope", 2: "rotated twice"}
NEAR = 1e-2  # of the largest value: how near the keys are to what was rotated last


def cached_rotation_changes(patched: PatchedModel, first: int) -> Iterator[Change]:
    """Yield changes in which tokens from `first` on read cached keys rotated 0 or 2 times.

    Those of the passes before: one pass for all tokens from `first` on, or one for each of them.
    None without rope, and where a norm of keys follows it.
    """
    block, hp = patched.spec.block, patched.hp
    late_norm = bool(hp["qk_norm"]) and block.qk_norm_place != "before_rope"
    if block.position != "rope" or not any(hp["rope_layers"]) or late_norm or first < 1:
        return
    for times, read in TIMES.items():
        for each in (False, True):
            if each or first > 1:
                says = (
                    f"from token {first} on attention reads the keys of "
                    f"{'all earlier tokens' if each else f'the tokens before {first}'} {read}: "
                    f"the cache holds {'unrotated' if not times else 'rotated'} keys"
                )
                values = {"cached keys rotated": times, "since": first}
                make = partial(_read_rotated, times, first, each)
                yield Change("kv_cache", says, ("kv_cache",), make, values)


def _read_rotated(
    times: int, first: int, each: bool, patched: PatchedModel, layers: Layers
) -> PatchedModel:
    """Return the model whose queries from `first` on read cached keys rotated `times` times.

    Keys are those of the tokens before `first`, or with `each` before the query itself.
    """
    held: dict[str, Any] = {}

    def rope(op: Any, at: Any, x: Any, table: Any, **kwargs: Any) -> Any:
        """Return `x` rotated; it is kept as it was and rotated twice, the last of a layer."""
        y = op(x, table, **kwargs)
        held.clear()
        held.update(layer=at.layer, key=x if not times else op(y, table, **kwargs), right=y)
        return y

    def scores(op: Any, at: Any, q: Any, k: Any, heads: Any) -> Any:
        """Return the scores of q with the keys k, of cached keys with the other rotation."""
        other = _with_rotated_part(k, held) if held.get("layer") == at.layer else None
        right = op(q, k, heads)
        if other is None:
            return right
        query, key = np.arange(len(q))[:, None], np.arange(len(k))[None]
        cached = (query >= first) & (key < (query if each else first))
        return np.where(cached, op(q, other, heads), right).astype(right.dtype)

    return patched.with_op("rope", rope, layers).with_op("scores", scores, layers)


def _with_rotated_part(k: Any, held: dict[str, Any]) -> Array | None:
    """Return keys [tokens, heads, d] with the kept rotation of their last elements.

    One kept head is that of all (latent attention). None where what was rotated is not the keys'.
    """
    own, right = held["key"], held["right"]
    width = own.shape[-1]
    if len(own) != len(k) or own.shape[1] not in (1, k.shape[1]) or width > k.shape[-1]:
        return None
    start = k.shape[-1] - width
    if not np.allclose(k[..., start:], right, atol=NEAR * float(np.abs(right).max())):
        return None  # the queries of a layer without own keys were rotated last
    made: Array = np.array(k)
    made[..., start:] = own
    return made


def find_cached_rotations(case: Mismatch) -> Iterator[Change]:
    """Yield cached keys of another rotation, where the point's first rows are right."""
    if case.call("scores") is None or len(case.rows) != case.tokens:
        return
    late = differing_rows(case)
    if len(late) and late[0] > 0:
        yield from cached_rotation_changes(case.patched, int(late[0]))


HYPOTHESES = (
    Hypothesis("kv_cache", find_cached_rotations, 316, "known keys, before other rows of a cache"),
)
