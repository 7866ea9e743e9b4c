"""The verdicts on two models or runs, the levels of evidence, and the levels of certainty."""

from collections.abc import Iterable
from typing import Literal

Level = Literal["identity", "config", "tensor", "forward", "capture", "gradient", "update"]
Verdict = Literal["same", "precision", "bug", "not_comparable"]
Certainty = Literal["located", "explained", "confirmed"]

# The order in which levels are compared; the first level that explains the later ones decides.
LEVELS: dict[Level, str] = {
    "identity": "the same checkpoint, tokenizer and token ids",
    "config": "hyperparameters that change the forward pass, with their origin",
    "tensor": "stored bytes, then values",
    "forward": "the forward pass, point by point in execution order",
    "capture": "where and on which rows the values were taken",
    "gradient": "the gradients of a batch, parameter by parameter",
    "update": "what a training step did to each weight",
}

# In the order in which several together are one: the last of them, which is the worst.
VERDICTS: dict[Verdict, str] = {
    "same": "the same computation; nothing differs but how it is stored, or where or on which rows "
    "it was looked at",
    "precision": "the same computation in other rounding: another dtype, a quantized copy within "
    "its bound, another order of summation, an expert flipped by a margin inside the rounding",
    "bug": "another computation; the cause and the place are named",
    "not_comparable": "the two do not answer the same question; the reason says why",
}

# How sure a cause is, the least first.
CERTAINTIES: dict[Certainty, str] = {
    "located": "with A's item in B's place the difference is gone, or it was only measured: where "
    "it is and how large, not what happened",
    "explained": "the stated change was made and gives the other side, but not in every element, "
    "or only in the elements that it was found on, or only within a bound of the accused side",
    "confirmed": "the stated change was made and gives the other side in every element that it "
    "concerns, also in elements that it was not found on",
}


def worst_verdict(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the worst of several verdicts; "same" for none."""
    return max(verdicts, key=list(VERDICTS).index, default="same")
