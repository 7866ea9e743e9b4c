"""Hypotheses about position biases on attention scores (ALiBi): none, or with other slopes."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from aprfmt.causes.forward.mismatch import Array, Change, Hypothesis, Mismatch, Patch
from aprfmt.causes.forward.rounding import round_to_type
from aprfmt.inference.replay.patched_model import PatchedModel
from aprfmt.inference.score_bias import alibi_slopes, key_bias

MOST = (1.0, 2.0, 4.0, 16.0, 32.0)  # exponents at which slopes end, other than the usual 8
AFTER = ("scores", "probs", "attn", "attn_out", "attn_contrib", "mid", "out", "logits")


def is_score_bias(call: Any) -> bool:
    """Return whether a call adds a bias to scores [heads, tokens, keys], not to the stream."""
    return call.op == "add" and getattr(call.args[1], "ndim", 0) == 3


def change_score_bias(how: Callable[[Any, Array], Any]) -> Patch:
    """Return a patch function: scores with their bias become how(scores, bias)."""

    def override(op: Any, at: Any, a: Any, b: Any) -> Any:
        """Return the mistaken how(scores, bias) where a bias of 3 axes is added.

        Elsewhere it returns op(a, b), their sum.
        """
        return np.asarray(how(a, b), a.dtype) if b.ndim == 3 else op(a, b)

    return lambda patched, layers: patched.with_op("add", override, layers)


def no_score_bias_change() -> Change:
    """Return the change that adds no position bias to the scores."""
    return Change(
        "positions",
        "nothing is added to the scores for the distance",
        ("scores",),
        change_score_bias(lambda scores, bias: scores),
        {"score_bias": None},
    )


def _geometric_slopes(heads: int, power: int, most: float) -> Array:
    """Return ALiBi's slopes 2^(-most * i / power) for i = 1 to `heads` (Press et al., 2022)."""
    return np.array([2.0 ** (-most * (i + 1) / power) for i in range(heads)])


# What is said -> the slopes of so many heads, of the model's own ones.
TAKEN: Mapping[str, Callable[[Array, float], Array]] = {
    "are those of a number of heads that is a power of two": lambda own, most: _geometric_slopes(
        len(own), len(own), most
    ),
    "go on by the step of the power of two below": lambda own, most: _geometric_slopes(
        len(own), 1 << (len(own).bit_length() - 1), most
    ),
    "are the first ones of the power of two above": lambda own, most: _geometric_slopes(
        len(own), 1 << (len(own) - 1).bit_length(), most
    ),
    "stand in the order of their size": lambda own, most: np.sort(own)[::-1],
    "stand the other way round": lambda own, most: own[::-1],
    "have the other sign": lambda own, most: -own,
    "begin one head early, with 1": lambda own, most: np.concatenate([[1.0], own[:-1]]),
    "are twice as large": lambda own, most: 2 * own,
    "are half as large": lambda own, most: own / 2,
    "are rounded to bfloat16": lambda own, most: round_to_type(own, "bfloat16"),
}  # fmt: skip


def _slopes_by_rank(own: Array, most: float) -> Iterator[tuple[str, Array]]:
    """Yield (end of a sentence on the slopes, slopes [heads]) as ranks may mistake them.

    The heads are divided evenly among ranks. Every rank takes the slopes of the first rank's heads,
    or those of a model that has no more heads than one rank.
    """
    for ranks in range(2, len(own) + 1):
        if len(own) % ranks:
            continue
        share = len(own) // ranks
        yield (
            f"of each of {ranks} ranks are those of the first one's heads",
            np.tile(own[:share], ranks),
        )
        yield (
            f"of each of {ranks} ranks are those of a model of {share} heads",
            np.tile(alibi_slopes(share, most), ranks),
        )


def slopes_by_rule(own: Array, most: float) -> Iterator[tuple[str, Array]]:
    """Yield (end of a sentence on the slopes, slopes [heads]) by each wrong rule of a kernel.

    They are the rules of TAKEN and of ranks. `own` are the model's slopes, which end at 2^-most.
    """
    for says, taken in TAKEN.items():
        yield says, taken(own, most)
    yield from _slopes_by_rank(own, most)


def use_slopes(patched: PatchedModel, own: Array, slopes: Array) -> Patch:
    """Return a patch function: the heads' slopes are `slopes` in place of the model's `own`."""
    if patched.spec.block.score_bias == "alibi_keys":  # rounded at every step, so made anew
        scale = float(patched.hp["attn_scale"])
        return change_score_bias(
            lambda scores, bias: scores + key_bias(slopes, bias.shape[-1], scale)[:, None]
        )
    ratio = (slopes / own).astype(np.float32)[:, None, None]
    return change_score_bias(lambda scores, bias: scores + bias * ratio)


def model_slopes(patched: PatchedModel) -> Array | None:
    """Return the ALiBi slopes [heads] of the model; None if it has none."""
    most = patched.hp["alibi_max_bias"]
    if not patched.spec.block.score_bias.startswith("alibi") or most is None:
        return None
    return alibi_slopes(int(patched.hp["n_heads"]), float(most))


def usual_score_bias_mistakes(patched: PatchedModel) -> Iterator[Change]:
    """Yield changes for usual mistakes of a bias on scores; none for models without one."""
    if patched.spec.block.score_bias == "none":
        return
    yield no_score_bias_change()
    yield Change(
        "positions",
        "what is added to the scores for the distance is added twice",
        ("scores",),
        change_score_bias(lambda scores, bias: scores + 2 * bias),
        {"score_bias": "twice"},
    )
    # ALiBi's slopes by other rules.
    own = model_slopes(patched)
    if own is None:
        return
    configured = float(patched.hp["alibi_max_bias"])
    for most in (*MOST, 8.0):
        if most != configured:
            make = use_slopes(patched, own, alibi_slopes(len(own), most))
            yield Change(
                "positions",
                f"the slopes on distances end at 2^-{most:g}; the model says 2^-{configured:g}",
                ("alibi_max_bias",),
                make,
                {"alibi_max_bias": most},
            )
    for says, slopes in slopes_by_rule(own, configured):
        if not np.allclose(slopes, own, rtol=1e-6):
            yield Change(
                "positions",
                f"the slopes on distances {says}",
                ("alibi_slopes",),
                use_slopes(patched, own, slopes),
                {"alibi_slopes": says},
            )
    # The slopes with or without the scale of the scores.
    scale = float(patched.hp["attn_scale"])
    if scale != 1:
        says = "are multiplied by the scale of the scores, too"
        if patched.spec.block.score_bias == "alibi_keys":
            scale, says = 1 / scale, "are not multiplied by the scale of the scores"
        yield Change(
            "positions",
            f"the slopes on distances {says}",
            ("alibi_slopes",),
            use_slopes(patched, own, own * scale),
            {"alibi_slopes": says},
        )


def find_score_bias(case: Mismatch) -> Iterator[Change]:
    """Yield changes of the bias on scores: usual mistakes, then slopes solved from the trace.

    Nothing for points before such a bias.
    """
    sums = [call for call in case.view.calls if is_score_bias(call)]
    if case.layer < 0 or not sums or case.view.point not in AFTER:
        return
    yield from usual_score_bias_mistakes(case.patched)
    own = model_slopes(case.patched)
    theirs = case.recorded_result(sums[-1])
    if own is None or theirs is None or len(case.rows) != case.tokens:
        return
    # Solve each head's slope by least squares on even rows.
    scores, bias = (case.array(x).astype(np.float64) for x in sums[-1].args)
    even = np.arange(case.tokens) % 2 == 0  # judged on all rows, the odd ones among them
    ratio = np.sum((theirs - scores)[:, even] * bias[:, even], axis=(1, 2)) / np.maximum(
        np.sum(np.square(bias[:, even]), axis=(1, 2)), 1e-300
    )
    slopes = own * ratio
    shown = ", ".join(f"{value:.4g}" for value in slopes[:6].tolist())
    yield Change(
        "positions",
        f"the slopes on distances are {shown}{', ...' if len(own) > 6 else ''}; the "
        f"model says {', '.join(f'{value:.4g}' for value in own[:6].tolist())}",
        ("alibi_slopes",),
        use_slopes(case.patched, own, slopes),
        {"alibi_slopes": slopes.tolist()},
        general=True,
    )


HYPOTHESES = (
    Hypothesis("positions", find_score_bias, 190, "what is added to the scores, before angles"),
)
