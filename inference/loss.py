"""Cross-entropy in nats: windows over long texts, the mean over tokens, and checks of the result.

A label is the token after the one whose logits predict it: the logits of token t are scored
against token t + 1. Everything is in nats; the loss of guessing uniformly is ln(vocab).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from aprfmt.base.outcome import Check, Outcome
from aprfmt.errors import UsageError
from aprfmt.measure.softmax import log_softmax

Numbers = NDArray[Any]
# A loss in bits is the loss in nats times this; a reported loss within this tolerance is in bits.
BITS = 1 / math.log(2)
BITS_WITHIN = 0.02
# Bytes of logits in memory at the same time; further rows are computed after these.
LOGIT_BYTES = 512 << 20
# A trained language model's loss on ordinary text stays above this; 0.00081 nats (perplexity
# 1.0008) was once reported by an evaluation that measured nothing.
IMPLAUSIBLY_GOOD = 0.05
# A model with random weights stays between these: 0.5 nats and 1.5 times the uniform loss.
RANDOM_BOUNDS = (0.5, 1.5)


@dataclass(frozen=True)
class WindowConvention:
    """How texts longer than a pass are cut: the default window size, and a description."""

    tokens: int
    says: str


# "llama.cpp" means its tool llama-perplexity: an incomplete last window is left out, BOS replaces
# the first token of a window, and only labels with half a window before them are scored.
CONVENTIONS: dict[str, WindowConvention] = {
    "disjoint": WindowConvention(2048, "the whole text, every label that its window predicts"),
    "llama.cpp": WindowConvention(512, "whole windows only, labels of their second half"),
}


def window_size(context: int, convention: str = "disjoint") -> int:
    """Return the tokens of a window for a model with a context length of `context`."""
    return min(context, CONVENTIONS[convention].tokens)


def rows_at_once(vocab: int) -> int:
    """Return the number of rows of float32 logits that LOGIT_BYTES of memory hold, at least 1."""
    return max(1, LOGIT_BYTES // (4 * vocab))


@dataclass(frozen=True)
class LossWindow:
    """One pass of a text that is cut: tokens [0, prefix), then [start, stop); labels [first, stop).

    A label's logits are those of the token before it in the pass.
    """

    start: int
    stop: int
    first: int
    prefix: int = 0

    @property
    def label_count(self) -> int:
        """The number of scored labels."""
        return self.stop - self.first

    @property
    def rows(self) -> range:
        """The rows of the pass whose logits predict the labels."""
        first = self.prefix + self.first - self.start - 1
        return range(first, first + self.label_count)

    def ids(self, sequence: Sequence[int]) -> list[int]:
        """Return the tokens of the pass, taken from the whole sequence."""
        return [*sequence[: self.prefix], *sequence[self.start : self.stop]]


def count_leading(ids: Sequence[int], leading: Sequence[int]) -> int:
    """Return the length of `leading` (BOS) if `ids` begin with it, else 0.

    Every window repeats these tokens.
    """
    return len(leading) if tuple(ids[: len(leading)]) == tuple(leading) else 0


def plan_loss_windows(
    tokens: int,
    capacity: int,
    *,
    prompt: int = 0,
    overlap: int = 0,
    prefix: int = 0,
    convention: str = "disjoint",
) -> list[LossWindow]:
    """Return the windows of a sequence, each of at most `capacity` tokens.

    The first `prefix` tokens of the sequence (BOS, if the model adds it) are repeated at the start
    of every window. Later windows repeat `overlap` tokens of left context without scoring them. If
    a window has neither, its first token is not a label, because no token predicts it. Every other
    label from `prompt` on is scored exactly once. The first window begins at the sequence's start;
    if the prompt is too long for that, it begins with the prompt's last tokens. All window
    arithmetic is done here, for every convention. Raises UsageError for impossible sizes.
    """
    room = capacity - prefix
    if capacity < 2 or tokens < 0 or min(prompt, prefix) < 0 or not 0 <= overlap < room:
        after = f" after {prefix}" if prefix else ""
        raise UsageError(
            f"{tokens} tokens, prompt {prompt}, windows of {capacity}{after}, overlap {overlap}; "
            "expected windows of at least 2 and an overlap below what they hold"
        )
    if convention == "llama.cpp":
        return _plan_llama_cpp_windows(tokens, capacity, prefix)
    found = []
    label = max(prompt, prefix, 1)
    reach = label - (overlap or (0 if prefix else 1))
    start = prefix if label - prefix < room else max(reach, prefix)
    while label < tokens:
        stop = min(start + room, tokens)
        first = label if prefix else max(label, start + 1)
        if first < stop:
            found.append(LossWindow(start, stop, first, prefix))
        label, start = stop, stop - overlap
    return found


def _plan_llama_cpp_windows(tokens: int, capacity: int, prefix: int) -> list[LossWindow]:
    """Return llama-perplexity's windows: only labels of each window's second half are scored.

    Windows are whole; the first `prefix` tokens are repeated in place of a window's first ones.
    """
    first = capacity // 2 + 1
    starts = range(0, tokens // capacity * capacity, capacity) if first < capacity else ()
    return [LossWindow(at + prefix, at + capacity, at + first, prefix) for at in starts]


def sample_window(prompt: int, response: int, capacity: int) -> LossWindow | None:
    """Return the window of a prompt and a response of these lengths, cut at `capacity`.

    It is cut as in training. None if no label of the response is inside; the caller reports such a
    sample as skipped.
    """
    found = plan_loss_windows(min(prompt + response, capacity), capacity, prompt=prompt)
    return found[0] if found else None


def log_probabilities(logits: Numbers) -> Numbers:
    """Return float64 log-softmax of logits [..., vocab]."""
    return log_softmax(logits.astype(np.float64))


def cross_entropy(logits: Numbers, labels: Sequence[int] | Numbers) -> Numbers:
    """Return the loss of each label in nats, float64: logits [n, vocab], labels [n].

    Raises UsageError if counts differ or a label is outside the vocabulary.
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
class MeanLoss:
    """The mean loss in nats over all scored tokens of all samples; `skipped` names the others."""

    nats: float
    tokens: int
    vocab: int
    samples: int
    skipped: tuple[str, ...] = ()

    @property
    def perplexity(self) -> float:
        """The perplexity, e to the power of the loss; infinite from 700 nats on."""
        return math.exp(self.nats) if self.nats < 700 else math.inf

    @property
    def uniform_loss(self) -> float:
        """ln(vocab) in nats: the loss of guessing uniformly."""
        return math.log(self.vocab)


def mean_loss(losses: Iterable[Numbers], vocab: int, skipped: Sequence[str] = ()) -> MeanLoss:
    """Return the mean of losses in nats, each sample weighted by its tokens.

    `losses` has an array for each sample, `vocab` is the number of tokens, `skipped` are messages
    on samples left out. A sample without labels is ignored, not counted as 0.0. Without any label
    the mean is NaN.
    """
    total, tokens, samples = 0.0, 0, 0
    for each in losses:
        if each.size:
            total += float(np.sum(each, dtype=np.float64))
            tokens += int(each.size)
            samples += 1
    nats = total / tokens if tokens else math.nan
    return MeanLoss(nats, tokens, vocab, samples, tuple(skipped))


def assess_loss(
    loss: MeanLoss, weights: Literal["trained", "random"], where: str = ""
) -> list[Check]:
    """Return the checks of a measured loss: too high, too low, or not finite.

    Bounds are those of `weights`, trained or random. `where` names the measured text in the
    checks. A loss that is not finite leaves the bounds NOT_RUN, and so does one of no tokens.
    """
    uniform = loss.uniform_loss
    low, high = RANDOM_BOUNDS
    bounds = {"trained": (IMPLAUSIBLY_GOOD, uniform), "random": (low, high * uniform)}[weights]

    finite = math.isfinite(loss.nats)

    def check(name: str, passed: bool, expected: str, todo: str) -> Check:
        """Return the check `name` of the loss, with `todo` as its advice if it failed.

        NOT_RUN for a bound on a loss that is not finite.
        """
        outcome: Outcome = "PASS" if passed else "FAIL"
        if not finite and name != "loss-finite":  # the other bounds cannot judge it
            return Check(name, "NOT_RUN", where, f"{loss.nats} nats", expected)
        return Check(
            name, outcome, where, f"{loss.nats:.6g} nats", expected, "" if passed else todo
        )

    if not loss.tokens:
        return [
            Check(
                "loss-measured",
                "NOT_RUN",
                where,
                "no token was scored",
                "at least one label",
                "give a longer text, or another --max-seq-len",
            )
        ]
    return [
        check(
            "loss-finite",
            finite,
            "a finite number",
            "trace the model: the first point with NaN or Inf is named",
        ),
        check(
            "loss-not-zero",
            loss.nats != 0.0,
            "above 0: an exact 0.0 means nothing was measured",
            "check that labels are the tokens after the inputs, and that logits were computed",
        ),
        check(
            "loss-below-uniform",
            loss.nats <= bounds[1],
            f"at most {bounds[1]:.4f} nats (ln {loss.vocab} = {uniform:.4f})",
            "the model does worse than guessing: compare it with its source",
        ),
        check(
            "loss-plausible",
            loss.nats >= bounds[0],
            f"at least {bounds[0]:g} nats",
            "too good to be true: are inputs and labels the same tokens?",
        ),
    ]


def is_in_bits(reported: float, nats: float) -> bool:
    """Return whether a reported loss is the measured one in bits: 1.4427 times the nats.

    `reported` is the reported loss, `nats` the measured one.
    """
    return nats > 0 and abs(reported / (nats * BITS) - 1) <= BITS_WITHIN


@dataclass(frozen=True)
class KlDivergence:
    """Differences of two models' next-token distributions, as means over `tokens` labels."""

    kl: float  # divergence of the second from the first, in nats
    max_kl: float  # the largest of a token
    top1: float  # share of equal argmax
    correct_change: float  # mean change of the right token's probability, second minus first
    tokens: int


def compare_distributions(
    first: Numbers, second: Numbers, labels: Sequence[int] | Numbers
) -> KlDivergence:
    """Return the differences of two models' next-token distributions from logits [n, vocab].

    `first` and `second` are the logits, `labels` [n] the right tokens. The divergence is
    KL(first || second), in nats. Raises UsageError if shapes differ.
    """
    if first.shape != second.shape or first.ndim != 2 or len(first) != len(labels):
        raise UsageError(
            f"logits {list(first.shape)} and {list(second.shape)} for {len(labels)} labels; "
            "expected equal shapes and a row for each label"
        )
    a, b = log_probabilities(first), log_probabilities(second)
    wanted = np.asarray(labels, np.int64)[:, None]
    change = np.exp(np.take_along_axis(b, wanted, -1)) - np.exp(np.take_along_axis(a, wanted, -1))
    kl = np.sum(np.exp(a) * (a - b), axis=-1)
    # A row that holds NaN has no top token: two of them do not agree.
    known = ~(np.isnan(first).any(-1) | np.isnan(second).any(-1))
    return KlDivergence(
        float(np.mean(kl)),
        float(np.max(kl)),
        float(np.mean(known & (np.argmax(first, -1) == np.argmax(second, -1)))),
        float(np.mean(change)),
        len(first),
    )


def mean_divergence(parts: Sequence[KlDivergence]) -> KlDivergence:
    """Return the divergences of several ranges of tokens as one, weighted by their token counts.

    `parts` are the ranges' divergences. The largest divergence is the largest of all. Raises
    UsageError if `parts` have no token.
    """
    tokens = sum(part.tokens for part in parts)
    if not tokens:
        raise UsageError("no token was compared; give a longer text")

    def mean(values: Iterable[float]) -> float:
        """Return the mean of `values`, one for each run, weighted by the runs' tokens."""
        return math.fsum(v * part.tokens for v, part in zip(values, parts, strict=True)) / tokens

    return KlDivergence(
        mean(part.kl for part in parts),
        float(np.max([part.max_kl for part in parts])),  # keeps a NaN
        mean(part.top1 for part in parts),
        mean(part.correct_change for part in parts),
        tokens,
    )
