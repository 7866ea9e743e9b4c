"""What samplers add to the logits of some tokens: penalties of what a text holds, and biases.

A penalty changes the logits of tokens that stand in the text up to a position, and of no others; a
bias changes the same tokens everywhere. So all tokens that a rule does not name keep their logits
up to rounding, which shows the rule; its number is fitted on every second position and judged on
the others.

Sources: OpenAI's API reference for presence and frequency penalties and for `logit_bias`;
transformers' RepetitionPenaltyLogitsProcessor for the repetition penalty.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aprfmt.measure.short_numbers import short_number

Numbers = NDArray[np.float64]
POSITIONS = 4  # positions from which a rule is judged
_CLEAR = 0.03  # of the changed tokens' difference at most is that of the others
_LEFT = 0.05  # of the changed tokens' difference at most is left by a rule
_FEW = 0.2  # of a vocabulary at most has its logits changed
_SEEN = 0.9  # share of the changes that counted tokens explain, at least
_DIGITS = 2e-4  # relative precision in which a rule's number is said


@dataclass(frozen=True)
class LogitRows:
    """One side's log-probabilities of all tokens, float64 [positions, vocabulary].

    `sums` are the log-sum-exps [positions] by which logits were reduced; None where the file holds
    log-probabilities, which do not tell them.
    """

    values: Numbers
    sums: Numbers | None

    @property
    def logits(self) -> Numbers | None:
        """The logits of all tokens, [positions, vocabulary]; None where they are not known."""
        return None if self.sums is None else self.values + self.sums[:, None]


@dataclass(frozen=True)
class Penalty:
    """A rule that changed logits of one side: its words, and whether that is the reference."""

    says: str
    of_reference: bool


@dataclass(frozen=True)
class _Changes:
    """The change of logits [positions, vocabulary] by a rule, and which ones it may have changed.

    `plain` are the logits of the side that the rule did not change, None where they are not known.
    `counts` [positions, vocabulary] says how often the text up to a position holds a token.
    """

    moved: Numbers
    changed: NDArray[np.bool_]
    counts: NDArray[np.int64]
    plain: Numbers | None

    def rows(self, first: int) -> "_Changes":
        """Return every second position, from `first` on."""
        part = slice(first, None, 2)
        plain = None if self.plain is None else self.plain[part]
        return _Changes(self.moved[part], self.changed[part], self.counts[part], plain)

    @property
    def size(self) -> float:
        """The root mean square change of the changed logits."""
        return _rms(self.moved[self.changed])


def find_penalty(ids: Sequence[int], positions: Sequence[int], here: LogitRows,
                 reference: LogitRows) -> Penalty | None:  # fmt: skip
    """Return the sampler's rule by which one side's logits differ from the other's, or None.

    `ids` are the tokens of the text, `positions` those of both sides' rows, in order.
    """
    apart = reference.values - here.values
    if len(positions) < POSITIONS or not np.isfinite(apart).all():
        return None
    apart = apart - np.median(apart, axis=1, keepdims=True)  # what the softmax's sums differ by
    noise = float(np.quantile(np.abs(apart), 0.5)) * 8 + 1e-6
    differs = np.abs(apart) > noise
    if not differs.any() or differs.mean() > _FEW:
        return None
    for counts in _possible_counts(ids, positions, differs):
        for of_reference, moved, plain in (
            (True, apart, here.logits),
            (False, -apart, reference.logits),
        ):
            found = _Changes(moved, counts > 0, counts, plain)
            says = next(_fitting_penalties(found), "") if _is_clear(found) else ""
            if says:
                return Penalty(says, of_reference)
    return _find_bias(apart, differs)


def _possible_counts(
    ids: Sequence[int], positions: Sequence[int], differs: NDArray[np.bool_]
) -> Iterator[NDArray[np.int64]]:
    """Yield how often each token may stand in the text up to and with each position.

    The counts are int [positions, vocabulary]. A server counts a prompt's tokens or leaves them
    out, so that every place is tried as the start. Yielded are the starts whose counted tokens are
    nearest to those that differ; none where even these are far from them. `differs` [positions,
    vocabulary] marks the logits that differ. `positions` ascend.
    """
    tokens, named = np.unique(np.asarray(ids[: positions[-1] + 1], np.int64), return_inverse=True)
    held = np.zeros((len(named) + 1, len(tokens)), np.int64)
    held[np.arange(1, len(named) + 1), named] = 1
    before = np.cumsum(held, axis=0)  # [tokens of the text + 1, its kinds of tokens]
    ends = np.asarray(positions) + 1
    starts = {}
    for first in range(len(named)):
        counts = np.maximum(before[ends] - before[first], 0)
        starts[first] = int(((counts > 0) != differs[:, tokens]).sum())
    least = min(starts.values())
    if least > (1 - _SEEN) * differs.sum():
        return
    for first, wrong in starts.items():
        if wrong == least:
            counts = np.zeros(differs.shape, np.int64)
            counts[:, tokens] = np.maximum(before[ends] - before[first], 0)
            yield counts


def _is_clear(found: _Changes) -> bool:
    """Return whether the tokens that may be changed differ, and the others hardly do."""
    others = found.moved[~found.changed]
    return _rms(others) <= _CLEAR * found.size


def _fitting_penalties(found: _Changes) -> Iterator[str]:
    """Yield the rules of penalties that give the changes, each in words.

    A rule that favours what the text holds is told as a penalty of the other side.
    """
    fit, judge = found.rows(0), found.rows(1)
    if not (fit.changed.any() and judge.changed.any()):
        return
    amounts = _fit_amounts(fit)
    made = amounts[0] + amounts[1] * judge.counts[judge.changed]
    if sum(amounts) < 0 and _rms(judge.moved[judge.changed] - made) <= _LEFT * judge.size:
        yield _amounts_text(*amounts)
    for by_sign in (True, False):
        pairs = _repetition_operands(fit, by_sign), _repetition_operands(judge, by_sign)
        if pairs[0] is None or pairs[1] is None:
            return
        x, y = pairs[0]
        number = float(x @ y) / float(x @ x) if x.any() else 0.0
        x, y = pairs[1]
        if number > 1 and _rms(y - number * x) <= _LEFT * _rms(y - x):
            yield _repetition_text(number, by_sign=by_sign)


def _fit_amounts(fit: _Changes) -> tuple[float, float]:
    """Return (what is added once, what is added for each time) to the logit of a token."""
    moved, counts = fit.moved[fit.changed], fit.counts[fit.changed].astype(np.float64)
    if np.ptp(counts) == 0:
        return float(moved.mean()), 0.0
    terms = np.stack([np.ones_like(counts), counts], axis=1)
    (once, each), *_ = np.linalg.lstsq(terms, moved, rcond=None)
    size = max(abs(once), abs(each))
    once, each = (0.0 if abs(one) < 0.01 * size else float(one) for one in (once, each))
    return once, each


def _amounts_text(once: float, each: float) -> str:
    """Return what presence and frequency penalties do, in words."""
    named = [
        f"a {kind} penalty of {short_number(-amount, _DIGITS):.6g}"
        for kind, amount in (("presence", once), ("frequency", each))
        if amount
    ]
    how = " and for each time that they stand there" if each else ""
    return (
        f"logits of tokens that the text holds differ by one number{how}, and no others: "
        f"{' and '.join(named)}"
    )


def _repetition_operands(found: _Changes, by_sign: bool) -> tuple[Numbers, Numbers] | None:
    """Return (x, y), both [changed logits]: under a repetition penalty p, y is p times x.

    A positive logit is divided by p: x is the logit after it, and y the one before. A negative one
    is multiplied: x is before it, and y after. Without `by_sign` all are divided. None where the
    logits are not known.
    """
    if found.plain is None:
        return None
    plain = found.plain[found.changed]
    after = plain + found.moved[found.changed]
    divided = (plain > 0) | (not by_sign)
    return np.where(divided, after, plain), np.where(divided, plain, after)


def _repetition_text(number: float, *, by_sign: bool) -> str:
    """Return what a repetition penalty does, in words."""
    how = "" if by_sign else ", which divides negative logits too, where it should multiply them"
    return (
        "logits of tokens that the text holds differ, and no others: a repetition penalty of "
        f"{short_number(number, _DIGITS):.6g}{how}"
    )


def _find_bias(apart: Numbers, differs: NDArray[np.bool_]) -> Penalty | None:
    """Return the logit bias that explains the difference of two sides, or None.

    `apart` [positions, vocabulary] is the reference less this side, less the median of each row.
    `differs` marks what is larger than noise. Each token with a bias differs by a constant of its
    own at all positions. Which side has the bias is not known: it is said of the reference.
    """
    tokens = np.flatnonzero(differs.all(axis=0))
    if not len(tokens):
        return None
    added = apart[0::2, tokens].mean(axis=0)
    others = np.delete(apart, tokens, axis=1)
    left = _rms(apart[1::2, tokens] - added)
    if max(_rms(others), left) > _CLEAR * _rms(added):
        return None
    count = "a token" if len(tokens) == 1 else f"{len(tokens)} tokens"
    first = short_number(float(added[0]), _DIGITS)
    says = (
        f"the logits of {count} differ by one number at all positions, and no others: a logit "
        f"bias, of {first:+.6g} for token {tokens[0]}"
    )
    return Penalty(says, of_reference=True)


def _rms(values: Numbers) -> float:
    """Return the root mean square of values; 0 of none."""
    return float(np.sqrt(np.mean(np.square(values)))) if values.size else 0.0
