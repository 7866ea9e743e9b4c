"""Hypotheses about biases of queries and keys that are added after rope."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from aprfmt.arch.role_vocabulary import role_key
from aprfmt.causes.forward.mismatch import Change, Hypothesis, Layers, Mismatch
from aprfmt.causes.forward.operation_patches import parts_in_turn
from aprfmt.causes.row import Cause
from aprfmt.inference.replay.patched_model import PatchedModel

CAUSE_ROWS = (
    Cause(
        "late_bias", "forward", "bug",
        "The bias of queries or keys is added after rope, which does not rotate it then.",
        "q, k and v are equal, what attention makes of them is not; the first token is right.",
        "Queries and keys rotated without their bias, which is added afterwards, are equal.",
    ),
)  # fmt: skip

ROTATED = ("attn_q", "attn_k")
SIDES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("queries and keys", ROTATED),
    ("queries", ("attn_q",)),
    ("keys", ("attn_k",)),
)


def late_bias_changes(patched: PatchedModel) -> Iterator[Change]:
    """Yield changes that add the bias of q, of k or of both after rope.

    None without such biases or without rope, and where a norm stands between bias and rope.
    """
    block, hp = patched.spec.block, patched.hp
    between = bool(hp["qk_norm"]) and block.qk_norm_place == "before_rope"
    if block.position != "rope" or not any(hp["rope_layers"]) or block.attention != "gqa":
        return
    stored = {key.partition(".")[2] for key in patched.stored}
    held = tuple(role for role in ROTATED if f"{role}.bias" in stored)
    if between or not held:
        return
    # What every key has more shows in no softmax, unless scores are capped or join a sink.
    seen_alone = block.sinks or hp["attn_softcap"] is not None
    for what, roles in SIDES:
        if {*roles} <= {*held} and ("attn_q" in roles or seen_alone):
            places = tuple(f"{role}.bias" for role in roles)
            says = f"the bias of {what} is added after rope, not before it"
            make = partial(_add_after_rope, roles)
            yield Change("late_bias", says, places, make, {"after_rope": list(roles)})


def _add_after_rope(roles: tuple[str, ...], patched: PatchedModel, layers: Layers) -> PatchedModel:
    """Return the model that adds the biases of `roles` in `layers` after rope."""
    part_of = parts_in_turn()

    def override(op: Any, at: Any, x: Any, table: Any, **kwargs: Any) -> Any:
        """Return `x` [tokens, heads, d] without its bias rotated, and the bias added."""
        role = f"attn_{part_of(at.layer)}"
        key = role_key(at.layer, f"{role}.bias")
        if role not in roles or key not in patched.weights:
            return op(x, table, **kwargs)
        bias = np.asarray(patched.weights[key].numpy(), x.dtype).reshape(x.shape[1:])
        return op(x - bias, table, **kwargs) + bias

    return patched.with_op("rope", override, layers)


def try_late_biases(case: Mismatch) -> Iterator[Change]:
    """Yield the changes that add biases after rope, where the point depends on a rotation."""
    if case.call("rope") is not None:
        yield from late_bias_changes(case.patched)


HYPOTHESES = (
    Hypothesis("late_bias", try_late_biases, 222, "a known vector, before solved rotations"),
)
