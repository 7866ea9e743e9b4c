"""YaRN's factors on attention's scores: its factor on cos and sin, and MLA's mscale_all_dim.

A factor on cos and sin is on queries and keys, so its square is on their scores where all elements
of a head turn. MLA multiplies the scores by another one, `mscale_all_dim`. Where the trace has no
rotated queries, rope's factor and a factor on the scores give the same values: both are proposed.
"""

from collections.abc import Iterator

from aprfmt.arch.rope_hf import yarn_mscale
from aprfmt.causes.forward.attention import score_scale_change
from aprfmt.causes.forward.mismatch import Change, Hypothesis, Mismatch, change_head_fields
from aprfmt.causes.forward.rotations import other_rope_factors, rope_frequencies
from aprfmt.inference.replay.patched_model import PatchedModel
from aprfmt.inference.rope import rotation_of_layer


def rope_factor_scales(patched: PatchedModel, layer: int) -> Iterator[Change]:
    """Yield changes of the attention scale that have the effect of a wrong rope factor in a layer.

    A factor on cos and sin of q and k scales the scores by its square. The wrong factors are those
    of `other_rope_factors`. Nothing without rope scaling.
    """
    kind = None if layer < 0 else rotation_of_layer(patched.hp, layer)
    if kind is None or patched.spec.block.position != "rope":
        return
    factor = rope_frequencies(patched, kind).factor
    own = float(patched.hp["attn_scale"])
    for other, _ in other_rope_factors(patched, kind):
        yield score_scale_change(patched, own * (other / factor) ** 2)


def yarn_score_changes(patched: PatchedModel) -> Iterator[Change]:
    """Yield changes of MLA's score factor: YaRN's mscale_all_dim left out, squared, or added.

    Nothing for other attention, and for a rope scaling that is not YaRN's.
    """
    for square, how, scale in _yarn_scales(patched):
        yield _yarn_change(square, how, scale)


def yarn_factor_scales(patched: PatchedModel) -> Iterator[Change]:
    """Yield changes of the factor on scores with the same effect as a wrong mscale_all_dim.

    Each has the factor of one of `yarn_score_changes`: no values tell the two causes apart.
    """
    for _, _, scale in _yarn_scales(patched):
        yield score_scale_change(patched, scale)


def _yarn_scales(patched: PatchedModel) -> list[tuple[float, str, float]]:
    """Return the usual wrong factors on MLA's scores: (YaRN's factor, how it was applied, result).

    "How" is in words. [] for other attention, and for a rope scaling that is not YaRN's.
    """
    scaling = patched.hp["rope_scaling"]
    if patched.spec.block.attention != "mla" or not scaling or scaling["type"] != "yarn":
        return []
    own, every = float(patched.hp["attn_scale"]), scaling["mscale_all_dim"]
    square = yarn_mscale(scaling["factor"], every or 1.0) ** 2
    if square == 1.0:
        return []
    if not every:
        return [(square, "applied, which the model does not say", own * square)]
    return [(square, "left out", own / square), (square, "applied twice", own * square)]


def _yarn_change(square: float, how: str, scale: float) -> Change:
    """Return the change of the factor on scores to `scale`.

    `square` is the factor in it that comes of YaRN, `how` says in words how that was applied.
    """
    return Change(
        "rope_scaling",
        f"YaRN's factor {square:.6g} on the scores (mscale_all_dim) is {how}",
        ("rope_scaling.mscale_all_dim",),
        lambda patched, layers: change_head_fields(patched, layers, scale=scale),
        {"attn_scale": scale},
    )


def find_yarn_scores(case: Mismatch) -> Iterator[Change]:
    """Yield the changes of MLA's factor on the scores, where the point needs scores."""
    if case.call("scores") is not None:
        yield from yarn_score_changes(case.patched)


def find_scores_of_yarn_factors(case: Mismatch) -> Iterator[Change]:
    """Yield changes of the factor on scores that have the same effect as a wrong factor of YaRN.

    These factors are rope's on cos and sin, and MLA's. Nothing for points before the scores.
    """
    if case.call("scores") is not None:
        yield from rope_factor_scales(case.patched, case.layer)
        yield from yarn_factor_scales(case.patched)


HYPOTHESES = (
    Hypothesis("rope_scaling", find_yarn_scores, 291, "named factors of the scores, after any"),
    Hypothesis("attention_scale", find_scores_of_yarn_factors, 292, "factors as YaRN's, after it"),
)
