"""Hypotheses about rope's angles computed in a type of few bits.

A position above 256 is no number of bfloat16, and position times frequency is an angle of which
only 8 bits are left: far from the start whole turns are wrong. Engines that cast the module, or the
positions, to the model's type do that (transformers#25681).
"""

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from aprfmt.causes.forward.mismatch import Array, Change, Hypothesis, Layers, Mismatch
from aprfmt.causes.forward.rotations import (
    has_rope_between_points,
    rope_frequencies,
    rope_kind_of_layer,
    token_positions,
)
from aprfmt.causes.row import Cause
from aprfmt.inference.replay.patched_model import PatchedModel
from aprfmt.inference.rope import RopeFrequencies, RopeKind

CAUSE_ROWS = (
    Cause(
        "rope_precision", "forward", "bug",
        "Rope's angles are made in bfloat16 or float16: position times frequency is rounded before "
        "its cosine and sine are taken.",
        "q and k are equal before rope and differ after it, more with position; the lengths are "
        "equal, and no frequency fits all positions.",
        "Rope with angles rounded to the named type is equal.",
    ),
)  # fmt: skip

TYPES = (("bfloat16", ml_dtypes.bfloat16), ("float16", np.float16))
# What is rounded: positions, frequencies, their product, cosine and sine; and in words.
ROUNDED = (
    ((True, True, True, True), "positions, frequencies, angles, cosines and sines"),
    ((True, True, True, False), "positions, frequencies and angles"),
    ((False, True, False, False), "frequencies"),
    ((True, False, False, False), "positions"),
    ((False, False, True, False), "angles"),
)


def rounded_table(
    where: Array, rope: RopeFrequencies, kind: Any, which: tuple[bool, ...]
) -> tuple[Array, Array]:
    """Return rope's (cos, sin), float32 [tokens, pairs], computed with roundings to a short type.

    `where` are the positions [tokens], `kind` is the type, `which` says what is rounded to it:
    positions, frequencies, angles, and cos and sin. Both are multiplied by rope's factor. Angles
    past the type's range give NaN.
    """

    def cast(values: Array, rounds: bool) -> Array:
        """Return values as float32, rounded to the short type `kind` before if `rounds`."""
        held = np.asarray(values, np.float32)
        return held.astype(kind).astype(np.float32) if rounds else held

    factor = np.float32(rope.factor)
    with np.errstate(over="ignore", invalid="ignore"):  # a long text's positions in float16
        angles = cast(cast(where, which[0])[:, None] * cast(rope.inv_freq, which[1]), which[2])
        return cast(np.cos(angles), which[3]) * factor, cast(np.sin(angles), which[3]) * factor


def try_rounded_angles(case: Mismatch) -> Iterator[Change]:
    """Yield changes to rope angles rounded to a 16-bit type, where the rounding changes them."""
    kind = rope_kind_of_layer(case)
    if kind is None or not has_rope_between_points(case) or case.view.base:
        return
    yield from rounded_angle_changes(case.patched, kind)


def rounded_angle_changes(patched: PatchedModel, kind: RopeKind) -> Iterator[Change]:
    """Yield the changes of one kind of rope to angles rounded to a 16-bit type.

    Those are left out that change no angle, and those whose angles are past the type's range.
    """
    rope, where = rope_frequencies(patched, kind), token_positions(patched)
    plain = rounded_table(where, rope, np.float32, ROUNDED[0][0])
    for name, made in TYPES:
        for which, words in ROUNDED:
            table = rounded_table(where, rope, made, which)
            same = all(np.array_equal(x, y) for x, y in zip(table, plain, strict=True))
            if not same and all(np.isfinite(part).all() for part in table):
                yield _table_change(name, words, table)


def _table_change(name: str, words: str, table: tuple[Array, Array]) -> Change:
    """Return the change of rope's (cos, sin) to `table`, computed in the type called `name`.

    `words` says what is rounded.
    """

    def make(patched: PatchedModel, layers: Layers) -> PatchedModel:
        """Return the model whose rope in `layers` uses the cos and sin of `table`."""

        def override(op: Any, at: Any, x: Any, own: Any, **kwargs: Any) -> Any:
            """Return `x` rotated by `table`, or by the model's own if the shapes differ."""
            if tuple(own[0].shape) != table[0].shape:
                return op(x, own, **kwargs)
            dtype = patched.backend.to_numpy(own[0]).dtype
            other = tuple(patched.backend.array(part.astype(dtype)) for part in table)
            return op(x, other, **kwargs)

        return patched.with_op("rope", override, layers)

    return Change(
        "rope_precision",
        f"rope's angles are made in {name}: {words} are rounded to it",
        ("rope",),
        make,
        {"dtype": name, "rounded": words},
    )


HYPOTHESES = (
    Hypothesis(
        "rope_precision", try_rounded_angles, 265, "a type has no free number, as a scaling has"
    ),
)
