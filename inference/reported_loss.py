"""A loss that somebody reported, against the one recomputed from the same batch.

Two tables: which tokens were scored, and how their losses became one number. Each row is one
mistake that training and evaluation scripts make; the reported number is explained by a row whose
result it is. Mistakes of both kinds at once are tried when no single one fits.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from aprfmt.inference.batch import Batch, ScoredSample, first_predicted, other_packings, score_batch
from aprfmt.inference.loss import BITS, RANDOM_BOUNDS
from aprfmt.inference.loss_layouts import divide_into_chunks, score_elsewhere
from aprfmt.inference.micro_batches import micro_batches
from aprfmt.inference.session import Numbers, Session
from aprfmt.measure.tolerances import REPORTED, REPORTED_SURELY

# Powers of two that loss scalers start from and come down to; a smaller factor is rather the number
# of micro-batches or ranks.
LOSS_SCALES = range(7, 25)
LEFT_OVER = 1e-2  # of what a mistake changes, where it only comes near the number
NEAR_GUESSING = 0.01  # of ln(vocabulary): a loss as near to it is that of guessing
FAR_FROM_GUESSING = 0.05  # of ln(vocabulary): how far the right loss is from it, at least
SMOOTHED = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2)  # usual shares of label smoothing
Z_WEIGHTS = (1e-5, 1e-4, 2e-4, 5e-4, 1e-3, 1e-2)  # usual factors of a z-loss
CLOSER = 0.1  # of the bound: for numbers near the right loss, of which there are many
STEPS = (2, 3, 4, 6, 8, 16, 32, 64)  # of gradient accumulation, or ranks

Picked = Sequence[Numbers]  # the losses in nats of each sample's scored tokens
Says = Literal["agrees", "named", "likely", "ambiguous", "unexplained", "unmeasured"]


@dataclass(frozen=True)
class LossMistake:
    """A mistake of a training script: its name, what went wrong in words, and what to do."""

    name: str
    says: str
    todo: str


MISTAKES: dict[str, LossMistake] = {
    row.name: row
    for row in (
        LossMistake(
            "bits", "the loss is in bits: divided by ln 2", "report nats, or name the unit"
        ),
        LossMistake(
            "perplexity",
            "the number is the perplexity, e to the power of the loss",
            "take its logarithm",
        ),
        LossMistake(
            "sum", "the losses are added up, not averaged", "divide by the number of scored tokens"
        ),
        LossMistake(
            "sample_sum",
            "the losses of a sample are added up, then averaged over samples",
            "divide by the number of scored tokens",
        ),
        LossMistake(
            "sample_means",
            "the mean of the samples' means: short samples weigh as much as long ones",
            "divide the sum of all losses by the number of scored tokens",
        ),
        LossMistake(
            "divided_twice",
            "the mean is divided once more by a count",
            "divide once: the loss function's mean, or the sum by the tokens",
        ),
        LossMistake(
            "accumulation",
            "the mean is divided by the steps of gradient accumulation, as for the backward pass",
            "report the loss before that division",
        ),
        LossMistake(
            "accumulated_sum",
            "the means of micro-batches, ranks or chunks of tokens are added up, not "
            "averaged: the loss grows with their number",
            "divide the sum of all losses by the scored tokens of all of them",
        ),
        LossMistake(
            "group_means",
            "the mean of the means of micro-batches, ranks or chunks of tokens: one with few "
            "scored tokens weighs as much as one with many",
            "divide the sum of all losses by the scored tokens of all of them",
        ),
        LossMistake(
            "one_group",
            "one micro-batch, rank or chunk of tokens alone was reported",
            "add the losses and the counts of all before they are divided",
        ),
        LossMistake(
            "padding_counted",
            "tokens that are not scored count: padding, or all tokens of "
            "the batch, stand in the mean",
            "set the labels of padding to -100 and divide by the scored tokens",
        ),
        LossMistake(
            "other_count",
            "the sum of the losses is divided by another count than that of the scored tokens",
            "count the labels once, after the shift and without each document's first token, and "
            "divide by this count",
        ),
        LossMistake(
            "mask_ignored",
            "padding before the text is attended to, and positions count from it",
            "pass the attention mask, and positions that begin after the padding",
        ),
        LossMistake(
            "documents_joined",
            "the documents of a packed row attend to each other",
            "keep them apart: a mask of documents or cu_seqlens for attention, positions that "
            "begin anew with each",
        ),
        LossMistake(
            "positions_continued",
            "the documents of a packed row do not see each other, but positions go on from one to "
            "the next",
            "give positions that begin anew with each document",
        ),
        LossMistake(
            "boundary_scored",
            "the first token of a document is scored against the last row of the one before",
            "set the label of each document's first token to -100",
        ),
        LossMistake(
            "unshifted",
            "each row is scored against its own token, which it has seen",
            "shift the labels: row t predicts token t + 1",
        ),
        LossMistake(
            "shifted_twice",
            "labels are shifted by the loader and again by the loss: row t is "
            "scored against token t + 2",
            "shift once",
        ),
        LossMistake(
            "labels_elsewhere",
            "rows are scored against the labels of another place: samples and positions are "
            "exchanged, or samples stand in another order",
            "bring logits and labels to one layout before they are flattened",
        ),
        LossMistake(
            "prompt_scored",
            "the tokens of the prompt are scored too",
            "set the labels of the prompt to -100",
        ),
        LossMistake(
            "labels_left_out",
            "a label of each answer or sample is not scored",
            "score all labels: the row before an answer's first token predicts that token",
        ),
        LossMistake(
            "ends_masked",
            "the ends of turns are not scored: their labels are masked, as "
            "where padding has the same id",
            "mask the labels of padding by the attention mask, not by the token's id",
        ),
        LossMistake(
            "window",
            "only the first tokens of each sample are scored: the loss has a smaller "
            "window than the batch",
            "give the loss the capacity of the forward pass",
        ),
        LossMistake(
            "no_labels",
            "no token is left to score, and the mean of nothing was reported",
            "raise the window above the prompt, and refuse a batch without labels",
        ),
        LossMistake(
            "loss_scale",
            "the loss is still multiplied by the loss scale of mixed precision",
            "divide by the scaler's scale before it is reported",
        ),
        LossMistake(
            "labels_smoothed",
            "labels are smoothed: a share of each loss is the mean over the vocabulary",
            "report the cross-entropy of the labels alone, without label_smoothing",
        ),
        LossMistake(
            "z_loss_added",
            "a z-loss is added: the square of the logarithm that normalizes the logits",
            "report the cross-entropy of the labels before the z-loss is added",
        ),
    )
}


@dataclass(frozen=True)
class LossGuess:
    """What the loss would be with these mistakes (none: the right loss), with a detail in words.

    `todo` says what to do where it is other than what the mistakes say in general.
    """

    mistakes: tuple[str, ...]
    value: float
    detail: str = ""
    todo: str = ""

    def advice(self) -> str:
        """Return what to do about the mistakes, as clauses joined by "; "."""
        return self.todo or "; ".join(MISTAKES[name].todo for name in self.mistakes)


@dataclass(frozen=True)
class LossVerdict:
    """The verdict on a reported loss, with the guesses that give it, the best first.

    `right` is the recomputed loss in nats, `within` the relative tolerance.
    """

    says: Says
    reported: float
    right: float
    within: float
    guesses: tuple[LossGuess, ...]

    @property
    def distinct_mistakes(self) -> tuple[tuple[str, ...], ...]:
        """The distinct sets of mistakes that give the reported number, in the guesses' order."""
        return tuple(dict.fromkeys(guess.mistakes for guess in self.guesses))


def explain_loss(
    batch: Batch,
    scored: Sequence[ScoredSample],
    reported: float,
    within: float = REPORTED,
    digit: float = 0.0,
    session: Session | None = None,
) -> LossVerdict:
    """Return whether a reported loss is the batch's, and if it is not, which mistakes give it.

    `scored` are the losses of every sample. The right loss fits within the relative bound
    `within` plus `digit`, half a unit of the reported number's last digit. A mistake must fit
    within REPORTED_SURELY. Single mistakes are tried before pairs; last, `session` runs the
    samples packed into rows. Mistakes that give the same number are `ambiguous`. If none fits so
    closely, a reduction of all labels that fits `within` is `likely`, since low-precision
    arithmetic moves the loss.
    """
    right_ones = label_losses(batch, scored)
    right = _mean_loss(right_ones)

    def fits(guess: LossGuess, bound: float) -> bool:
        """Return whether a guessed mistake gives the reported loss, within a relative bound."""
        if not math.isfinite(guess.value):
            return guess.value == reported
        return abs(guess.value - reported) <= bound * abs(guess.value) + digit

    def answer(says: Says, guesses: Sequence[LossGuess]) -> LossVerdict:
        """Return the verdict `says` on the reported loss, with the mistakes that give it."""
        return LossVerdict(says, reported, right, within, tuple(guesses))

    if math.isfinite(right) and fits(LossGuess((), right), within):
        return answer("agrees", [LossGuess((), right)])
    if math.isnan(reported) or reported == 0:
        empty = list(_guess_empty_windows(batch, right_ones))
        return answer("named" if empty else "unexplained", empty)
    # One mistake, then two.
    bound = min(REPORTED_SURELY, within)
    for both in (False, True):
        found = [one for one in _all_guesses(batch, scored, right_ones, both) if fits(one, bound)]
        if not both:  # a term is small beside the loss: the number has to show the term itself
            found += [
                one
                for one in _guess_added_terms(batch, scored, right_ones)
                if fits(one, bound)
                and abs(one.value - reported) <= LEFT_OVER * abs(one.value - right) + digit
            ]
        if not found and not both:
            found = [one for one in _guess_copies(right_ones) if fits(one, bound)]
            for by_right, one in _guess_chunks(batch, scored):
                found += [one] if fits(one, bound * CLOSER if by_right else bound) else []
        if not found and not both:
            near = [
                one
                for one in _guess_reductions(batch, right_ones)
                if fits(one, within)
                and abs(one.value - reported) <= LEFT_OVER * abs(one.value - right)
            ]
            if len({one.mistakes for one in near}) == 1:
                return answer("likely", near)
        if found:
            found.sort(key=lambda one: abs(one.value - reported))
            alone = len({one.mistakes for one in found}) == 1
            return answer("named" if alone else "ambiguous", found)
    # Samples that the trainer packs into rows, and labels of another place: both take passes.
    if math.isfinite(right):
        found = [
            guess
            for words, value in score_elsewhere(batch, session)
            if fits(guess := LossGuess(("labels_elsewhere",), value, f"those {words}"), bound)
        ]
        if session is not None:
            found += [one for one in _guess_packings(batch, session) if fits(one, bound)]
        if found:
            alone = len({one.mistakes for one in found}) == 1
            return answer("named" if alone else "ambiguous", found)
    return answer("unmeasured" if math.isnan(right) else "unexplained", ())


def guessing_text(verdict: LossVerdict, vocabulary: int) -> str:
    """Return a clause that a reported loss is that of guessing, or of random weights; "" for none.

    Random weights give ln(`vocabulary`) nats or more. The recomputed loss must be clearly another:
    a loss above ln(vocabulary) is that of random weights only where the recomputed one is below it.
    """
    uniform = math.log(max(2, vocabulary))
    reported, right, named = verdict.reported, verdict.right, f"ln({vocabulary}) = {uniform:.4g}"
    if not abs(reported - right) > FAR_FROM_GUESSING * uniform:
        return ""
    if abs(reported - uniform) <= NEAR_GUESSING * uniform:
        return f"it is within 1 % of {named}, the loss of guessing, as of weights not trained"
    if uniform < reported <= RANDOM_BOUNDS[1] * uniform and right < uniform:
        return f"it is above {named}, the loss of guessing, as of weights at random"
    return ""


# --- which tokens ------------------------------------------------------------------------------


def _wanted_rows(
    batch: Batch, sample: int, ahead: int, wanted: NDArray[np.bool_]
) -> NDArray[np.intp]:
    """Return the rows t of a sample whose token t + ahead is wanted and exists.

    `wanted` is a mask [tokens + 1].
    """
    tokens = np.flatnonzero(wanted & (batch.ids[sample] >= 0)) - ahead
    return tokens[(tokens >= 0) & (tokens < batch.row_length)]


def _picked_losses(
    batch: Batch, sample: int, losses: Numbers, ahead: int, wanted: NDArray[np.bool_]
) -> Numbers:
    """Return a sample's losses of the tokens in the mask `wanted` [tokens + 1], NaN left out.

    `losses` are [AHEAD, tokens]; token t + `ahead` is scored by row t.
    """
    found = losses[ahead, _wanted_rows(batch, sample, ahead, wanted)]
    kept: Numbers = found[~np.isnan(found)]
    return kept


def label_losses(batch: Batch, scored: Sequence[ScoredSample]) -> list[Numbers]:
    """Return the losses in nats of each sample's labels, scored as they should be."""
    return [_sample_losses(batch, i, one) for i, one in enumerate(scored)]


def _sample_losses(batch: Batch, sample: int, one: ScoredSample, ahead: int = 1) -> Numbers:
    """Return the losses, in nats, of one sample's scored labels.

    `one` has the losses of all rows of sample number `sample`. `ahead` is how many tokens after
    its row a label stands: 1 where row i is scored on token i + 1.
    """
    return _picked_losses(batch, sample, one.nats, ahead, batch.label[sample])


def _real_tokens(batch: Batch, sample: int) -> NDArray[np.bool_]:
    """Return a mask [tokens + 1] of the tokens of a sample that could be labels.

    Padding is False, and so is the first token of each document but the row's first: no row of
    its document predicts it. The last entry is the token after the row.
    """
    there = np.append(batch.mask[sample], batch.label[sample, -1])
    found: NDArray[np.bool_] = there & ~batch.document_starts[sample]
    return found


def usual_windows(tokens: int) -> list[int]:
    """Return window sizes that scripts use, ascending and below a row's length.

    They are round numbers, and the length minus one.
    """
    powers = {2**k for k in range(1, 24)} | {3 * 2**k for k in range(2, 22)}
    steps = set(range(64, tokens, 64)) | set(range(100, tokens, 100)) | set(range(10, 100, 10))
    return sorted(n for n in powers | steps | {tokens - 1} if 1 < n < tokens)


def _wrong_selections(
    batch: Batch, scored: Sequence[ScoredSample]
) -> Iterator[tuple[str, str, Picked]]:
    """Yield (mistake, detail in words, losses by sample) of every wrong choice of tokens."""
    # Labels shifted wrongly, or tokens scored that are no labels.
    each = list(enumerate(scored))
    yield "unshifted", "", [_sample_losses(batch, i, one, 0) for i, one in each]
    yield "shifted_twice", "", [_sample_losses(batch, i, one, 2) for i, one in each]
    yield (
        "prompt_scored",
        "",
        [_picked_losses(batch, i, one.nats, 1, _real_tokens(batch, i)) for i, one in each],
    )
    columns = _labels_by_column(batch)
    if columns is not None:
        yield (
            "prompt_scored",
            "its length is counted from column 0, with the padding before it",
            [_picked_losses(batch, i, one.nats, 1, columns[i]) for i, one in each],
        )
    # Ends of turns that are masked like padding.
    ends = set(batch.ids[batch.label & batch.is_end].tolist())
    if ends:
        yield (
            "ends_masked",
            f"ids {', '.join(map(str, sorted(ends)))}",
            [
                _picked_losses(batch, i, one.nats, 1, batch.label[i] & ~batch.is_end[i])
                for i, one in each
            ],
        )
    for says, kept in _left_out_labels(batch):
        yield (
            "labels_left_out",
            says,
            [_picked_losses(batch, i, one.nats, 1, kept[i]) for i, one in each],
        )
    if batch.document is not None:
        yield from _wrong_packed_selections(batch, scored)
    # Padding that is scored, or attended to.
    if not batch.mask.all():
        longer = [batch.label[i] | ~_real_tokens(batch, i) for i, _ in each]
        yield (
            "padding_counted",
            "labels of padding are scored",
            [
                _picked_losses(
                    batch, i, np.where(np.isnan(one.nats), one.with_padding, one.nats), 1, longer[i]
                )
                for i, one in each
            ],
        )
        padding = batch.scored_padding
        yield (
            "padding_counted",
            "labels of the padding after a text are scored, by rows that attend to the text alone",
            [
                _picked_losses(
                    batch,
                    i,
                    one.nats if one.hidden_padding is None else one.hidden_padding,
                    1,
                    batch.label[i] | padding[i],
                )
                for i, one in each
            ],
        )
        everything = np.ones(batch.row_length + 1, bool)
        yield (
            "padding_counted",
            "every token is scored",
            [_picked_losses(batch, i, one.with_padding, 1, everything) for i, one in each],
        )
        yield (
            "mask_ignored",
            "",
            [_picked_losses(batch, i, one.with_padding, 1, batch.label[i]) for i, one in each],
        )
    # Windows shorter than the rows.
    for size in usual_windows(batch.row_length):
        inside = np.arange(batch.row_length + 1) < size
        yield (
            "window",
            f"{size} tokens",
            [_picked_losses(batch, i, one.nats, 1, batch.label[i] & inside) for i, one in each],
        )


def _labels_by_column(batch: Batch) -> NDArray[np.bool_] | None:
    """Return the labels [samples, tokens + 1] of a trainer that masks columns in place of tokens.

    As many columns are masked as a row's text has tokens before its first label, so that the end of
    a prompt behind padding is scored. None where no row has padding before its text or a prompt.
    """
    if batch.document is not None:
        return None
    start = batch.mask.argmax(1)[:, None]
    prompt = first_predicted(batch)[:, None] - start
    place = np.arange(batch.row_length + 1)
    more: NDArray[np.bool_] = (place >= prompt) & (place > start) & (place < start + prompt)
    more &= np.any(batch.predicted, axis=1, keepdims=True)
    return batch.label | more if more.any() else None


def _left_out_labels(batch: Batch) -> Iterator[tuple[str, NDArray[np.bool_]]]:
    """Yield (words, mask [samples, tokens + 1] of the labels kept) of usual ways to lose labels.

    The words say which labels are lost, such as the last of each answer. An answer is a run of
    predicted labels within one document. Equal masks are yielded once.
    """
    label = np.zeros_like(batch.label)
    label[:, 1:] = batch.predicted
    before = np.pad(label, ((0, 0), (1, 0)))[:, :-1] & ~batch.document_starts
    after = np.pad(label & ~batch.document_starts, ((0, 0), (0, 1)))[:, 1:]
    many = label.cumsum(1)
    seen = {(label & ~batch.is_end).tobytes(), label.tobytes()}
    for says, lost in (
        ("the first of each answer", label & ~before),
        ("the first of each sample", label & (many == 1)),
        ("the last of each answer", label & ~after),
        ("the last of each sample", label & (many == many[:, -1:])),
    ):
        kept = label & ~lost
        if kept.any() and kept.tobytes() not in seen:
            seen.add(kept.tobytes())
            yield says, kept


def _wrong_packed_selections(
    batch: Batch, scored: Sequence[ScoredSample]
) -> Iterator[tuple[str, str, Picked]]:
    """Yield (mistake, detail, losses by sample) of wrong ways to score documents in one row."""
    edged = batch.label | batch.document_starts
    yield (
        "boundary_scored",
        "",
        [_picked_losses(batch, i, one.nats, 1, edged[i]) for i, one in enumerate(scored)],
    )
    # Where positions count by their distance alone, going on with them changes nothing.
    going_on = [one.nats if one.continued is None else one.continued for one in scored]
    if not all(
        np.allclose(each, one.nats, rtol=REPORTED_SURELY, equal_nan=True)
        for one, each in zip(scored, going_on, strict=True)
    ):
        for says, wanted in (("", batch.label), ("each document's first token is scored", edged)):
            picked = [_picked_losses(batch, i, x, 1, wanted[i]) for i, x in enumerate(going_on)]
            yield "positions_continued", says, picked
    ways = dict.fromkeys(way for one in scored for way in one.joined or ())
    for way in ways:
        losses = [one.nats if one.joined is None else one.joined[way] for one in scored]
        yield (
            "documents_joined",
            way,
            [_picked_losses(batch, i, each, 1, batch.label[i]) for i, each in enumerate(losses)],
        )
        yield (
            "documents_joined",
            f"{way}, and each document's first token is scored",
            [_picked_losses(batch, i, each, 1, edged[i]) for i, each in enumerate(losses)],
        )


def _guess_packings(batch: Batch, session: Session) -> Iterator[LossGuess]:
    """Yield the losses that come out where the trainer packs the batch's samples wrongly.

    The batch has the samples in separate rows, as a loader has them before its collator packs them.
    """
    for says, packed in other_packings(batch):
        for name, detail, picked in _wrong_packed_selections(
            packed, list(score_batch(packed, session))
        ):
            detail = "; ".join(text for text in (f"the samples are {says}", detail) if text)
            yield LossGuess((name,), _mean_loss(picked), detail)


def _guess_empty_windows(batch: Batch, right: Picked) -> Iterator[LossGuess]:
    """Yield at most one guess with loss NaN, for a mean over no labels.

    The batch, a sample, or a window of a usual size may have no label.
    """
    if not sum(each.size for each in right):
        yield LossGuess(("no_labels",), math.nan, "the batch has no label")
        return
    bare = [i for i, each in enumerate(right) if not each.size]
    if bare:
        detail = f"sample {bare[0]} has no label: its mean alone is no number"
        yield LossGuess(("no_labels",), math.nan, detail)
        return
    places = np.flatnonzero(batch.label.any(0))
    first = int(places[places > 0][0])
    sizes = [size for size in usual_windows(batch.row_length) if size <= first]
    if sizes:
        detail = f"the first label is token {first}; a window of {sizes[-1]} or less has none"
        yield LossGuess(("no_labels",), math.nan, detail)


# --- how many become one -----------------------------------------------------------------------


def _mean_loss(picked: Picked) -> float:
    """Return the mean of all losses of all samples; NaN without any."""
    count = sum(each.size for each in picked)
    return float(sum(each.sum() for each in picked)) / count if count else math.nan


# The labels are right where only the divisor counts more than these.
TOO_MANY = "divide by the labels that are scored, counted after the shift: the labels are right"


def _counts_with_padding(batch: Batch) -> dict[str, int]:
    """Return the counts of a batch's tokens, by what they count, that have more than its labels."""
    samples = len(batch.mask)
    return {
        "the labels before the shift, with the first token of a sample": int(batch.label.sum()),
        "all tokens of the batch": batch.mask.size,
        "all tokens but the first of each sample": batch.mask.size - samples,
        "all tokens of the texts": int(batch.mask.sum()),
        "all tokens of the texts but their first": int(batch.mask.sum()) - samples,
    }


def _guess_reductions(batch: Batch, picked: Picked) -> Iterator[LossGuess]:
    """Yield a guess for every wrong way to make one number of the samples' losses."""
    total, count = float(sum(each.sum() for each in picked)), sum(each.size for each in picked)
    if not count:
        return
    mean, samples = total / count, len(picked)
    own = [float(each.mean()) for each in picked if each.size]
    yield LossGuess(("bits",), mean * BITS, "1.442695 times the nats")
    if mean < 700:
        yield LossGuess(("perplexity",), math.exp(mean))
    yield LossGuess(("sum",), total, f"{count} tokens")
    if samples > 1:
        yield LossGuess(("sample_sum",), total / samples, f"{samples} samples")
        yield LossGuess(("sample_means",), sum(own) / len(own), f"{len(own)} samples")
        yield LossGuess(("divided_twice",), mean / samples, f"by {samples} samples")
    yield LossGuess(("divided_twice",), mean / count, f"by {count} tokens")
    counted = _counts_with_padding(batch)
    for many in dict.fromkeys(counted.values()):
        if many > count:
            says = next(text for text, each in counted.items() if each == many)
            detail = f"divided by {says}: {many}"
            yield LossGuess(("padding_counted",), total / many, detail, TOO_MANY)
    for steps in STEPS:
        yield LossGuess(("accumulation",), mean / steps, f"{steps} steps")
        if steps <= samples:
            yield LossGuess(("accumulated_sum",), mean * steps, f"{steps} of them")
    for power in LOSS_SCALES:
        yield LossGuess(("loss_scale",), mean * 2.0**power, f"2^{power} = {2**power}")


def _guess_copies(right: Picked) -> Iterator[LossGuess]:
    """Yield a guess for every number of equal means, more than the samples, that may be added up.

    These are no means of groups of the samples: ranks hold the same samples, or parts of one. The
    number is free, so a guess that counts with the batch's own numbers goes before.
    """
    mean = _mean_loss(right)
    for steps in STEPS:
        if steps > len(right):
            says = f"{steps} of them, of more ranks than samples: with the same ones, or parts"
            yield LossGuess(("accumulated_sum",), mean * steps, says)


def _guess_chunks(batch: Batch, scored: Sequence[ScoredSample]) -> Iterator[tuple[bool, LossGuess]]:
    """Yield (whether the number is near the right loss, guess) of means of chunks joined wrongly.

    A mean over chunks without a label is 0, or such chunks are left out.
    """
    for says, many, chunks in divide_into_chunks(batch, scored):
        means = [float(each.mean()) for each in chunks]
        total = sum(means)
        yield False, LossGuess(("accumulated_sum",), total, f"{len(means)} {says}")
        yield True, LossGuess(("group_means",), total / len(means), f"{len(means)} {says}")
        if many > len(means):
            detail = f"{many} {says}, of which {many - len(means)} have no label and count as 0"
            yield True, LossGuess(("group_means",), total / many, detail)
        for place, mean in (("first", means[0]), ("last", means[-1])):
            yield True, LossGuess(("one_group",), mean, f"the {place} of {says}")


def _guess_other_counts(batch: Batch, right: Picked) -> Iterator[LossGuess]:
    """Yield a guess for every count of the batch that the sum of the right losses is divided by.

    Each is a number that a script has at hand: of documents or samples, the labels with a first
    token taken off or added once more, or the labels of one sample. A count that has several names
    is one guess with all of them. Counts that `_guess_reductions` divides by are left out.
    """
    sizes = [each.size for each in right]
    total, count = float(sum(each.sum() for each in right)), sum(sizes)
    samples, documents = len(right), batch.document_count
    counts = {
        "the labels less one for each sample": count - samples,
        "the labels of the first sample": sizes[0],
        "the labels of the last sample": sizes[-1],
        "the labels of the longest sample times the samples": max(sizes) * samples,
        "the tokens that are not scored": int(batch.mask.sum()) - count,
    }
    if batch.document is not None:
        between = documents - samples
        counts |= {
            "the documents": documents,
            "the labels less one for each document": count - documents,
            "the labels plus one for each document": count + documents,
            "the labels less one for each boundary between documents": count - between,
            "the labels plus one for each boundary between documents": count + between,
        }
    elsewhere = {count, 1, samples, *_counts_with_padding(batch).values()}
    for many in dict.fromkeys(counts.values()):
        if many > 0 and many not in elsewhere:
            names = ", or by ".join(text for text, each in counts.items() if each == many)
            detail = f"divided by {names}: {many} in place of {count}"
            yield LossGuess(("other_count",), total / many, detail)


def _guess_added_terms(
    batch: Batch, scored: Sequence[ScoredSample], right: Picked
) -> Iterator[LossGuess]:
    """Yield a guess for every usual term beside the cross-entropy of the right labels.

    Smoothed labels give every token of the vocabulary an equal part of a share of the label, as in
    torch and transformers. A z-loss is the squared logarithm of the sum of the exponentials of the
    logits. Nothing where these are not known of a sample's rows.
    """
    means, squares = [], []
    for i, one in enumerate(scored):
        if one.vocabulary_mean is None or one.log_total is None:
            return
        rows = _wanted_rows(batch, i, 1, batch.label[i])
        rows = rows[~np.isnan(one.nats[1, rows])]
        means.append(one.vocabulary_mean[rows])
        squares.append(one.log_total[rows] ** 2)
    own, mean, square = _mean_loss(right), _mean_loss(means), _mean_loss(squares)
    for share in SMOOTHED:
        yield LossGuess(("labels_smoothed",), own + share * (mean - own), f"by {share:g}")
    for weight in Z_WEIGHTS:
        yield LossGuess(("z_loss_added",), own + weight * square, f"times {weight:g}")


def _guess_group_reductions(picked: Picked) -> Iterator[LossGuess]:
    """Yield a guess for every wrong way to join the losses of groups of samples.

    A *group* is a micro-batch or the samples of one rank. A group without a scored token has no
    mean and is left out.
    """
    total = float(sum(each.sum() for each in picked))
    own = [float(each.mean()) for each in picked if each.size]
    if len(picked) > 1 and own:
        yield LossGuess(("accumulated_sum",), sum(own), f"{len(own)} samples, each by itself")
        for says, at in (("the first sample", 0), ("the last sample", -1)):
            if picked[at].size:
                yield LossGuess(("one_group",), float(picked[at].mean()), says)
    for says, groups in micro_batches(len(picked)):
        parts = [[picked[i] for i in group] for group in groups]
        means = [mean for each in parts if not math.isnan(mean := _mean_loss(each))]
        if len(means) < 2:
            continue
        yield LossGuess(("group_means",), sum(means) / len(means), says)
        yield LossGuess(("accumulated_sum",), sum(means), says)
        yield LossGuess(("sum",), total / len(parts), f"averaged over {len(parts)}: {says}")
        for place, mean in (("the first", means[0]), ("the last", means[-1])):
            yield LossGuess(("one_group",), mean, f"{place} of {says}")


def _all_guesses(
    batch: Batch, scored: Sequence[ScoredSample], right: Picked, pairs: bool
) -> Iterator[LossGuess]:
    """Yield a guess for every single mistake, or with `pairs` for every two mistakes at once.

    Two mistakes are a wrong choice of tokens and a wrong way to make one number of their losses.
    """
    if not pairs:
        yield from _guess_reductions(batch, right)
        yield from _guess_group_reductions(right)
        yield from _guess_other_counts(batch, right)
    for name, detail, picked in _wrong_selections(batch, scored):
        if not pairs:
            yield LossGuess((name,), _mean_loss(picked), detail)
        # A size, or which labels, and a way: something fits any number.
        if not pairs or name in ("window", "labels_left_out"):
            continue
        for more in _guess_reductions(batch, picked):
            says = "; ".join(text for text in (detail, more.detail) if text)
            todo = f"{MISTAKES[name].todo}; {more.todo}" if more.todo else ""
            yield LossGuess((name, *more.mistakes), more.value, says, todo)
