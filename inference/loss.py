"""Cross-entropy in nats: windows over long texts, the mean over tokens, and when to doubt it.

A label is the token after the one whose logits predict it: the logits of token t are scored
against token t + 1. Everything is in nats; the loss of guessing uniformly is ln(vocab).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from aprfmt.errors import UsageError
from aprfmt.outcome import Check, Outcome

Numbers = NDArray[Any]
# A trained language model's loss on ordinary text stays above this; 0.00081 nats (perplexity
# 1.0008) was once reported by an evaluation that measured nothing.
IMPLAUSIBLY_GOOD = 0.05
# A model with random weights stays between these: 0.5 nats and 1.5 times the uniform loss.
RANDOM_BOUNDS = (0.5, 1.5)


@dataclass(frozen=True)
class Window:
    """Tokens [start, stop) go through the model; labels [first, stop) are scored.

    A label's logits are those of the token before it, so start < first.
    """

    start: int
    stop: int
    first: int

    @property
    def labels(self) -> int:
        """How many labels are scored."""
        return self.stop - self.first


def windows(tokens: int, capacity: int, *, prompt: int = 0, overlap: int = 0) -> list[Window]:
    """Return the windows of a sequence: every label from `prompt` on is scored exactly once.

    `capacity` is how many tokens a pass can hold, `overlap` how many tokens of left context later
    windows repeat (one always is: it predicts the first label). The first window begins at the
    sequence's start, or `overlap` before the first label where that is out of reach. A sequence
    without a label after the prompt gives no window. The one place where window arithmetic is
    done. Raises UsageError for sizes that cannot be.
    """
    if capacity < 2 or tokens < 0 or prompt < 0 or not 0 <= overlap < capacity:
        raise UsageError(
            f"{tokens} tokens, prompt {prompt}, windows of {capacity}, overlap {overlap}; expected "
            "windows of at least 2 and an overlap below that"
        )
    back = max(overlap, 1)
    found = []
    label = max(prompt, 1)
    start = 0 if label < capacity else label - min(back, label)
    while label < tokens:
        stop = min(start + capacity, tokens)
        found.append(Window(start, stop, label))
        label = stop
        start = stop - back
    return found


def sample_window(prompt: int, response: int, capacity: int) -> Window | None:
    """Return the window of one prompt with its response cut at `capacity`, as training sees it.

    None where no label of the response is inside: a sample to be skipped, loudly.
    """
    stop = min(prompt + response, capacity)
    first = max(prompt, 1)
    return Window(0, stop, first) if stop > first else None


def log_probabilities(logits: Numbers) -> Numbers:
    """Return float64 log-softmax of logits [..., vocab]."""
    wide = logits.astype(np.float64)
    wide = wide - np.max(wide, axis=-1, keepdims=True)
    result: Numbers = wide - np.log(np.sum(np.exp(wide), axis=-1, keepdims=True))
    return result


def cross_entropy(logits: Numbers, labels: Sequence[int] | Numbers) -> Numbers:
    """Return the loss of each label in nats, float64: logits [n, vocab], labels [n].

    Raises UsageError where counts differ or a label is outside the vocabulary.
    """
    wanted = np.asarray(labels, np.int64)
    if logits.ndim != 2 or wanted.shape != logits.shape[:1]:
        raise UsageError(
            f"logits {list(logits.shape)} for {wanted.size} labels; expected a row each"
        )
    if wanted.size and not 0 <= int(wanted.min()) <= int(wanted.max()) < logits.shape[1]:
        raise UsageError(f"a label is outside the vocabulary of {logits.shape[1]}")
    losses: Numbers = -np.take_along_axis(log_probabilities(logits), wanted[:, None], -1)[:, 0]
    return losses


@dataclass(frozen=True)
class Loss:
    """The mean over all scored tokens of all samples, in nats."""

    nats: float
    tokens: int
    vocab: int
    samples: int
    skipped: tuple[str, ...] = ()

    @property
    def perplexity(self) -> float:
        """Return e to the loss."""
        return math.exp(self.nats) if self.nats < 700 else math.inf

    @property
    def uniform(self) -> float:
        """ln(vocab): the loss of guessing."""
        return math.log(self.vocab)


def mean_loss(losses: Iterable[Numbers], vocab: int, skipped: Sequence[str] = ()) -> Loss:
    """Return the token-weighted mean; a sample without labels counts as nothing, not as 0.0.

    Without a single label the mean is NaN.
    """
    total, tokens, samples = 0.0, 0, 0
    for each in losses:
        if each.size:
            total += float(np.sum(each, dtype=np.float64))
            tokens += int(each.size)
            samples += 1
    nats = total / tokens if tokens else math.nan
    return Loss(nats, tokens, vocab, samples, tuple(skipped))


def judge(loss: Loss, weights: Literal["trained", "random"], where: str = "") -> list[Check]:
    """Return the checks of a measured loss; every one is two-sided or names its other side."""
    uniform = loss.uniform
    low, high = RANDOM_BOUNDS
    bounds = {"trained": (IMPLAUSIBLY_GOOD, uniform), "random": (low, high * uniform)}[weights]

    finite = math.isfinite(loss.nats)

    def check(name: str, passed: bool, expected: str, todo: str) -> Check:
        outcome: Outcome = "PASS" if passed else "FAIL"
        if not finite and name != "loss-finite":  # the other bounds say nothing of it
            return Check(name, "NOT_RUN", where, f"{loss.nats} nats", expected)
        return Check(
            name, outcome, where, f"{loss.nats:.6g} nats", expected, "" if passed else todo
        )

    if not loss.tokens:
        return [
            Check(
                "loss-measured", "FAIL", where, "no token was scored", "at least one label",
                "give a longer text, or a larger --max-seq-len",
            )
        ]  # fmt: skip
    return [
        check("loss-finite", finite, "a finite number",
              "trace the model: the first point with NaN or Inf is named"),
        check("loss-not-zero", loss.nats != 0.0, "above 0: an exact 0.0 means nothing was measured",
              "check that labels are the tokens after the inputs, and that logits were computed"),
        check("loss-below-uniform", loss.nats <= bounds[1], f"at most {bounds[1]:.4f} nats "
              f"(ln {loss.vocab} = {uniform:.4f})",
              "the model does worse than guessing: compare it with its source"),
        check("loss-plausible", loss.nats >= bounds[0], f"at least {bounds[0]:g} nats",
              "too good to be true: are inputs and labels the same tokens?"),
    ]  # fmt: skip


@dataclass(frozen=True)
class Divergence:
    """Two models' next-token distributions over the same tokens, means over `tokens` labels."""

    kl: float  # of the second from the first, nats
    max_kl: float  # of the token where it is largest
    top1: float  # share of equal argmax
    correct_change: float  # mean change of the right token's probability, second minus first
    tokens: int


def divergence(first: Numbers, second: Numbers, labels: Sequence[int] | Numbers) -> Divergence:
    """Compare logits [n, vocab] of two models; UsageError where their shapes differ."""
    if first.shape != second.shape or first.ndim != 2 or len(first) != len(labels):
        raise UsageError(
            f"logits {list(first.shape)} and {list(second.shape)} for {len(labels)} labels; "
            "expected equal shapes and a row for each label"
        )
    a, b = log_probabilities(first), log_probabilities(second)
    wanted = np.asarray(labels, np.int64)[:, None]
    change = np.exp(np.take_along_axis(b, wanted, -1)) - np.exp(np.take_along_axis(a, wanted, -1))
    kl = np.sum(np.exp(a) * (a - b), axis=-1)
    return Divergence(
        float(np.mean(kl)),
        float(np.max(kl)),
        float(np.mean(np.argmax(first, -1) == np.argmax(second, -1))),
        float(np.mean(change)),
        len(first),
    )


def mean_divergence(parts: Sequence[Divergence]) -> Divergence:
    """Join the divergences of several runs of tokens, each weighted by its tokens.

    Raises UsageError where there is none.
    """
    tokens = sum(part.tokens for part in parts)
    if not tokens:
        raise UsageError("no token was compared; give a longer text")

    def mean(values: Iterable[float]) -> float:
        return math.fsum(v * part.tokens for v, part in zip(values, parts, strict=True)) / tokens

    return Divergence(
        mean(part.kl for part in parts),
        float(np.max([part.max_kl for part in parts])),  # a NaN comes through
        mean(part.top1 for part in parts),
        mean(part.correct_change for part in parts),
        tokens,
    )
