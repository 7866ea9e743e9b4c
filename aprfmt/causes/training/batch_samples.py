"""Gradients in which samples of a batch have other weights, or see what they should not."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from aprfmt.arch.role_vocabulary import split_key
from aprfmt.causes.row import Cause
from aprfmt.causes.training.backward_case import (
    BackwardCase,
    BackwardGuess,
    BackwardHypothesis,
    all_differ,
    first_wrong,
)
from aprfmt.causes.training.gradient_case import distance
from aprfmt.causes.training.optimizers import F64
from aprfmt.inference.gradients.changes import BackwardChange, Joined

_MADE = "The batch's gradients, computed that way, give every parameter's."
CAUSE_ROWS = (
    Cause(
        "micro_batch_means",
        "gradient",
        "bug",
        "The gradient is the mean of the means of micro-batches or ranks: one with few labels "
        "counts as much as one with many.",
        "Each sample is in every gradient with its own factor, which follows from the counts of "
        "labels.",
        _MADE,
    ),
    Cause(
        "samples_left_out",
        "gradient",
        "bug",
        "Some samples of the batch are not in the gradient: that of one micro-batch or rank is "
        "left, the others' were not added.",
        "The factor of some samples is 0 in every gradient.",
        _MADE,
    ),
    Cause(
        "samples_weighted",
        "gradient",
        "bug",
        "The samples of the batch have factors in the gradient that their labels do not give.",
        "Each sample is in every gradient with a factor of its own.",
        _MADE,
    ),
    Cause(
        "packed_attention",
        "gradient",
        "bug",
        "The documents of a packed row attend to each other.",
        "All gradients differ, and rows hold several documents.",
        _MADE,
    ),
    Cause(
        "norm_tokens_left_out",
        "gradient",
        "bug",
        "The gradients of norms cover only a part of each row: they were not summed over the "
        "ranks that a sequence is split over.",
        "Only norms are wrong, and each is the sum over some columns of the batch.",
        _MADE,
    ),
    Cause(
        "padding_seen",
        "gradient",
        "bug",
        "Tokens attend to the padding at the beginning of their row, or their positions count it: "
        "the mask did not reach the model.",
        "All gradients differ, those after the layers too.",
        _MADE,
    ),
    Cause(
        "other_labels",
        "gradient",
        "bug",
        "Other tokens are scored than the labels of the batch.",
        "All gradients differ, those after the layers too.",
        _MADE,
    ),
    Cause(
        "loss_term",
        "gradient",
        "bug",
        "The gradients are those of another loss: labels are smoothed, or a z-loss is added.",
        "All gradients differ, those after the layers too.",
        _MADE,
    ),
    Cause(
        "adapter_scale",
        "gradient",
        "bug",
        "What an adapter adds has another factor than its configuration says: alpha over r, over "
        "the root of r, or alpha alone.",
        "All gradients of an adapter differ, and its factors B are not zero.",
        _MADE,
    ),
    Cause(
        "dropout_active",
        "gradient",
        "bug",
        "Dropout was active, which draws other numbers in every pass.",
        "All gradients differ, nothing gives them, and the model states a rate.",
        "Nothing makes the same numbers again: save the step with dropout at 0.",
        most="located",
    ),
)
SAMPLES = 16  # of a batch whose factors are solved
PARTS = 8  # of a row that ranks may have
NEAR = 1e-2  # how far a measured factor of a sample may be from one that is meant
SIGNED = 5e-2  # of the largest factor: a smaller one may be what rounding leaves of zero
PLAIN = 1e-6  # of a scale: two that are this near are one
# What an alpha that was changed is times the stated one, in words that follow the stated factor.
ALPHAS = {
    number: f"with {text} the alpha"
    for n in (2, 3, 4)
    for number, text in ((float(n), f"{n} times"), (1 / n, f"1/{n} of"))
}
LIKELY = 1.5  # times the usual gradient's size: what it may be from the factor of an adapter
FEWEST = 32  # elements of a parameter that a number is solved on
ENOUGH = 4  # elements for each factor that is solved


def guess_documents(case: BackwardCase) -> Iterator[BackwardGuess]:
    """Yield guesses that documents in one row attend to each other; nothing if none is packed."""
    ways: tuple[Joined, ...] = ("positions count on", "positions restart")
    if case.packed and all_differ(case):
        for way in ways:
            says = f"the documents of a packed row attend to each other ({way})"
            yield BackwardGuess("packed_attention", says, BackwardChange(joined=way))


def guess_padding(case: BackwardCase) -> Iterator[BackwardGuess]:
    """Yield guesses that padding before a row's text is attended to, or counts in the positions.

    Nothing where no row begins with padding.
    """
    if case.padded_first and all_differ(case):
        says = "tokens attend to the padding at the beginning of their row"
        yield BackwardGuess("padding_seen", says, BackwardChange(padding="attended"))
        says = "positions count the padding at the beginning of a row"
        yield BackwardGuess("padding_seen", says, BackwardChange(padding="counted"))


def guess_samples(case: BackwardCase) -> Iterator[BackwardGuess]:
    """Yield the guess that samples have other weights, which are solved on one parameter.

    Its gradient is fitted by the gradients of each sample alone.
    """
    scored = [row for row, count in enumerate(case.labels) if count]
    whole = all_differ(case)
    kind = "" if whole or not (case.wrong and case.right) else _kind_of_wrong(case) or "these"
    if not (2 <= len(scored) <= SAMPLES and (kind or whole)):
        return
    key = _smallest_wrong_gradient(case, ENOUGH * len(scored))
    if key is None:
        return
    alone = []
    for row in scored:
        factors = tuple(float(other == row) for other in range(len(case.labels)))
        found = case.recompute(BackwardChange(rows=factors), case.names[key])
        alone.append(_flatten(found.gradient(key)) if key in found.keys else None)
    solved = _solve_sample_factors(case, key, alone)
    if solved is None:
        return
    counts = [case.labels[row] for row in scored]
    cause, says, values = _named_factors(solved, counts, [row + 1 for row in scored])
    every = [1.0] * len(case.labels)
    for row, value in zip(scored, values, strict=True):
        every[row] = value
    change = BackwardChange(rows=tuple(every))
    if kind:
        says = f"of {kind} alone, {says}: all other gradients have every sample"
    elif has_both_signs(values):
        yield BackwardGuess(cause, objective_text("samples", says), change, objective=True)
        return
    yield BackwardGuess(cause, says, change, alone=bool(kind))


def has_both_signs(factors: Sequence[float] | F64) -> bool:
    """Return whether some factors are clearly positive and others clearly negative.

    `factors` [n] are what samples, or labels, are multiplied by in the gradient. One below SIGNED
    of the largest counts as zero. Cross-entropy raises the probability of every label, so that its
    factors have one sign. A preference loss and a policy gradient have both.
    """
    sizes = np.asarray(factors, np.float64)
    least = SIGNED * float(np.abs(sizes).max(initial=0.0))
    return bool((sizes > least).any() and (sizes < -least).any())


def objective_text(what: str, says: str) -> str:
    """Return the sentence that gradients are of an objective that the batch does not state.

    `what` are "samples" or "labels", and `says` gives their factors.
    """
    return (
        f"not judged: the gradient is of an objective that raises some {what} and lowers others, "
        f"as a preference loss or a policy gradient does ({says}); cross-entropy raises all"
    )


def _kind_of_wrong(case: BackwardCase) -> str:
    """Return the kind of parameter that all wrong gradients and no right one have, or "".

    It is "biases", "norms", "routers", "experts" or "tables".
    """
    kinds = {
        "biases": lambda key: key.endswith(".bias"),
        "norms": lambda key: "norm" in key,
        "routers": lambda key: "ffn_gate_inp" in key,
        "experts": lambda key: "_exps" in key,
        "tables": lambda key: "embd" in key,
    }
    for name, belongs in kinds.items():
        if case.wrong and all(map(belongs, case.wrong)) and not any(map(belongs, case.right)):
            return name
    return ""


def guess_other_labels(case: BackwardCase) -> Iterator[BackwardGuess]:
    """Yield guesses that other tokens are labels: shifted otherwise, unmasked, or at row ends."""
    key = _smallest_wrong_gradient(case, FEWEST) if all_differ(case) else None
    if key is None:
        return
    edges = "the first token of each document of a packed row is scored by the one before it"
    joined = f"{edges}, and the documents attend to each other"
    padding = "the padding at the end of rows is scored"
    every = f"{padding}, and so are prompts and all else that -100 leaves out"
    seen = "padding attends to padding"
    padded = (
        (padding, BackwardChange(padding="scored")),
        (every, BackwardChange(padding="scored", unmasked=True)),
        (f"{padding}; {seen}", BackwardChange(padding="scored and seen")),
        (f"{every}; {seen}", BackwardChange(padding="scored and seen", unmasked=True)),
    )
    packed = (
        (edges, BackwardChange(edges=True)),
        (joined, BackwardChange(edges=True, joined="positions count on")),
        (joined, BackwardChange(edges=True, joined="positions restart")),
    )
    inverted = (
        "the mask of labels is inverted: prompts, or all that -100 leaves out, are scored, and the "
        "labels are not",
        BackwardChange(inverted=True),
    )
    for says, change in (
        *((inverted,) if case.partly_labelled else ()),
        *(packed if case.packed else ()),
        *(padded if case.padded_last else ()),
        ("the labels are shifted twice: each row is scored against the token after the next",
         BackwardChange(shift=2)),
        ("the labels are not shifted: each row is scored against its own token",
         BackwardChange(shift=0)),
        ("the labels are shifted the other way: each row is scored against the token before it",
         BackwardChange(shift=-1)),
        *((f"the labels are shifted {ahead} times: each row is scored against the token {ahead} "
           "after it", BackwardChange(shift=ahead)) for ahead in (3, 4)),
        ("the labels are shifted the other way, twice: each row is scored against the token two "
         "before it", BackwardChange(shift=-2)),
        *((f"the labels are rolled by one to the {side} before the loss shifts them",
           BackwardChange(rolled=(0, by))) for by, side in ((-1, "left"), (1, "right"))),
        *((f"the labels are those of the row {where}", BackwardChange(rolled=(by, 0)))
          for by, where in ((1, "before"), (-1, "after"))),
        ("tokens that are no labels are scored too: prompts, or all that -100 leaves out",
         BackwardChange(unmasked=True)),
    ):  # fmt: skip
        found = case.recompute(change, case.names[key])
        if key not in found.keys:
            continue
        made = _flatten(found.gradient(key))
        for divided, factor in _divisors(case, found.scored):
            if is_near(case, key, factor * made):
                rows = None if factor == 1 else (factor,) * len(case.labels)
                yield BackwardGuess("other_labels", says + divided, replace(change, rows=rows))
                break


def _divisors(case: BackwardCase, scored: int) -> Iterator[tuple[str, float]]:
    """Yield (clause, factor) for each number that a sum over other labels may be divided by.

    `scored` is the number of these labels. The factor is that number over the divisor: a mean has
    1. A loss that lost its mask after the divisor was counted has the labels of the batch.
    """
    yield "", 1.0
    labels, tokens = sum(case.labels), len(case.labels) * case.row_length
    for divided, by in (
        (
            f"; the sum is divided by the {labels} labels of the batch, not by these {scored}",
            labels,
        ),
        (
            f"; the sum is divided by all {tokens} tokens of the batch, not by these {scored}",
            tokens,
        ),
        (f"; the sum of these {scored} is not divided", 1),
    ):
        if by and by != scored:
            yield divided, scored / by


def guess_loss_terms(case: BackwardCase) -> Iterator[BackwardGuess]:
    """Yield guesses that labels are smoothed, or that a z-loss is added to the cross-entropy.

    The amount is solved on one small parameter, whose gradient is linear in it.
    """
    key = _smallest_wrong_gradient(case, FEWEST) if all_differ(case) else None
    if key is None:
        return
    plain = _flatten(case.case(key).computed)
    for kind, whole in (
        ("smoothing", BackwardChange(smoothing=1.0)),
        ("z-loss", BackwardChange(z_loss=1.0)),
    ):
        found = case.recompute(whole, case.names[key])
        if key not in found.keys:
            continue
        term = _flatten(found.gradient(key)) - plain
        rest = _flatten(case.case(key).given) - plain
        size = float((term[::2] ** 2).sum())
        share = float((term[::2] * rest[::2]).sum()) / size if size else 0.0
        if not 0 < share < 1 or not is_near(case, key, plain + share * term):
            continue
        short = float(f"{share:.1g}")  # somebody wrote it
        share = short if abs(share - short) <= NEAR * short else share
        if kind == "smoothing":
            says = f"the labels are smoothed by {share:.3g}"
            yield BackwardGuess("loss_term", says, BackwardChange(smoothing=share))
        else:
            says = (
                f"the loss has {share:.3g} times the z-loss, log(sum(exp(logits)))^2, added to it"
            )
            yield BackwardGuess("loss_term", says, BackwardChange(z_loss=share))


def is_near(case: BackwardCase, key: str, wanted: F64) -> bool:
    """Return whether a given gradient is within NEAR, in relative L2, of `wanted` [elements]."""
    return distance_to_given(case, key, wanted) <= NEAR


def distance_to_given(case: BackwardCase, key: str, wanted: F64) -> float:
    """Return the relative L2 distance of a parameter's given gradient from `wanted` [elements]."""
    return distance(_flatten(case.case(key).given), wanted)


def _named_factors(
    solved: Sequence[float], counts: Sequence[int], numbers: Sequence[int]
) -> tuple[str, str, list[float]]:
    """Return (cause, sentence, exact factors) for the measured factors of samples.

    `solved` are the measured factors, `counts` the scored labels of each sample, `numbers` the
    samples' numbers from 1. Factors near those of a known mistake are replaced by them.
    """
    total, many = sum(counts), len(counts)
    there = [abs(value) > NEAR for value in solved]
    if not all(there) and any(there):
        lost = ", ".join(str(number) for number, one in zip(numbers, there, strict=True) if not one)
        part = sum(count for count, one in zip(counts, there, strict=True) if one)
        shared = next(
            (each for each in (1.0, total / part) if _are_near(solved, there, each)), None
        )
        values = [
            0.0 if not one else (value if shared is None else shared)
            for value, one in zip(solved, there, strict=True)
        ]
        says = f"of {many} samples number {lost} {'is' if lost.isdecimal() else 'are'} not in it"
        return "samples_left_out", says, values
    for size in range(1, many):
        starts = range(0, many, size)
        sums = [sum(counts[start : start + size]) for start in starts]
        if many % size:
            continue
        for summed in (1, len(sums)):
            values = [summed * total / len(sums) / sums[i // size] for i in range(many)]
            if np.allclose(solved, values, rtol=NEAR):
                what = "sum" if summed > 1 else "mean"
                of = "1 sample" if size == 1 else f"{size} samples"
                says = f"the {what} of the means of {len(sums)} micro-batches or ranks of {of}"
                return "micro_batch_means", says, values
    shown = ", ".join(f"{value:.3g}" for value in [*solved][:6])
    more = ", ..." if many > 6 else ""
    return "samples_weighted", f"samples count {shown}{more} times", [float(x) for x in solved]


def _are_near(solved: Sequence[float], there: Sequence[bool], value: float) -> bool:
    """Return whether the factors selected by `there` are all within NEAR of `value`, relative."""
    return all(
        abs(each - value) <= NEAR * value for each, one in zip(solved, there, strict=True) if one
    )


def guess_norm_columns(case: BackwardCase) -> Iterator[BackwardGuess]:
    """Yield the guess that only some columns of the batch count in the gradients of norms."""
    if not case.wrong or not case.right or case.missing or case.row_length < PARTS:
        return
    if any("norm" not in key for key in case.wrong):
        return
    key = _smallest_wrong_gradient(case, ENOUGH * PARTS)
    if key is None:
        return
    ends = [case.row_length * part // PARTS for part in range(PARTS + 1)]
    alone = []
    for start, stop in pairwise(ends):
        found = case.recompute(BackwardChange(norm_tokens=(start, stop)), case.names[key])
        alone.append(_flatten(found.gradient(key)) if key in found.keys else None)
    solved = _solve_sample_factors(case, key, alone)
    if solved is None:
        return
    none = [each is None or not each.any() for each in alone]  # columns of padding
    inside = [part for part in range(PARTS) if solved[part] > 0.5 and not none[part]]
    if not inside:
        return
    first, last = inside[0], inside[-1]
    if any(
        abs(solved[part] - (first <= part <= last)) > NEAR
        for part in range(PARTS)
        if not none[part]
    ):
        return
    columns = ends[first], ends[last + 1]
    says = (
        f"the gradients of norms are those of columns {columns[0]}-{columns[1] - 1} of "
        f"{case.row_length} alone: not summed over the ranks that have the other tokens"
    )
    yield BackwardGuess("norm_tokens_left_out", says, BackwardChange(norm_tokens=columns))


def other_scales(scale: float, rank: int) -> dict[float, list[str]]:
    """Return {another scale of an adapter: sentences on the usual mistakes that give it}.

    `scale` is the stated one, `rank` that of the adapter's factors A and B.
    """
    root = rank**0.5
    meant: dict[float, list[str]] = {}
    for value, what in (
        (scale * root, "times the root of r, as of a rank-stabilized one"),
        (scale / root, "over the root of r, as of one that is not rank-stabilized"),
        (scale * rank, "times r, as of alpha that is not divided by r"),
        (scale / rank, "over r, as of alpha that is divided by r twice"),
        (scale * scale, "applied twice"),
        (1.0, "left out"),
    ):
        if abs(value - scale) > PLAIN * scale:
            same = next((each for each in meant if abs(value - each) <= PLAIN * each), value)
            meant.setdefault(same, []).append(what)
    return meant


def guess_adapter_scale(case: BackwardCase) -> Iterator[BackwardGuess]:
    """Yield guesses that the adapter's scale is not the one that its configuration states.

    Examples are alpha over r in place of alpha over its root, alpha alone, or another alpha.
    Mistakes with the same scale are one guess, which names them all. Nothing without an adapter.
    """
    if case.adapter is None or not all_differ(case):
        return
    scale, rank = case.adapter
    meant = other_scales(scale, rank)
    # Another alpha, or another r, makes some of these too: neither is then the reason.
    sizes = [given / computed for given, computed in case.norms.values() if given and computed]
    usual = float(np.median(sizes)) if sizes else 1.0
    for number, what in ALPHAS.items():
        same = next((each for each in meant if abs(number * scale - each) <= PLAIN * each), 0.0)
        if same:
            meant[same].append(what)
        elif max(number / usual, usual / number) <= LIKELY:
            meant[number * scale] = [what]
    for value, each in meant.items():
        what = ", or ".join(each)
        says = f"the adapter has the factor {value:.4g}: the stated {scale:.4g} {what}"
        yield BackwardGuess("adapter_scale", says, BackwardChange(adapter_scale=value / scale))


def guess_dropout(case: BackwardCase) -> Iterator[BackwardGuess]:
    """Yield the guess that dropout was active in the trainer, which no pass here can confirm."""
    if case.dropout and all_differ(case):
        key, rate = max(case.dropout.items(), key=lambda each: each[1])
        says = (
            f"no other pass gives them; dropout may be active ({key} is {rate:g}): save the step "
            "with dropout at 0"
        )
        yield BackwardGuess("dropout_active", says)


def loss_differs(case: BackwardCase) -> bool:
    """Return whether nearly all gradients differ, those after the layers among them."""
    first = first_wrong(case.wrong | case.open | case.missing)
    return all_differ(case) and split_key(first[0])[0] is None


def _smallest_wrong_gradient(case: BackwardCase, elements: int) -> str | None:
    """Return the key of the smallest wrong gradient with at least `elements` elements, or None.

    Where no gradient is wrong, one whose difference may be rounding (open) is taken.
    """
    sizes = {key: case.case(key).given.size for key in sorted(case.wrong or case.open)}
    enough = [key for key, size in sizes.items() if size >= elements]
    return min(enough, key=lambda key: sizes[key], default=None)


def _flatten(values: F64) -> F64:
    """Return the elements of an array as float64 [n]."""
    return values.astype(np.float64).reshape(-1)


def _solve_sample_factors(
    case: BackwardCase, key: str, alone: Sequence[F64 | None]
) -> list[float] | None:
    """Return a factor for each gradient in `alone`, with which they add up to the given gradient.

    An entry None is a zero gradient. None if the fit leaves more than NEAR.
    """
    given = _flatten(case.case(key).given)
    parts = np.stack([np.zeros_like(given) if each is None else each for each in alone], axis=1)
    solved, left = fit_factors(parts, given)
    return [float(x) for x in solved] if left <= NEAR else None


def fit_factors(parts: F64, given: F64) -> tuple[F64, float]:
    """Return (factors by which the columns add up to `given`, relative L2 distance of the sum).

    `parts` [elements, columns] has a gradient in each column, such as that of one sample, `given`
    [elements] is the trainer's gradient. The factors are solved by least squares on every second
    element, and the distance is taken on the others.
    """
    solved: F64 = np.linalg.lstsq(parts[::2], given[::2], rcond=1e-9)[0].astype(np.float64)
    return solved, distance(given[1::2], parts[1::2] @ solved)


HYPOTHESES = (
    BackwardHypothesis(("norm_tokens_left_out",), guess_norm_columns, 312, "norms alone are wrong"),
    BackwardHypothesis(("packed_attention",), guess_documents, 320, "nothing is fitted"),
    BackwardHypothesis(("padding_seen",), guess_padding, 319, "nothing is fitted"),
    BackwardHypothesis(("adapter_scale",), guess_adapter_scale, 318, "nothing is fitted"),
    BackwardHypothesis(("other_labels",), guess_other_labels, 321, "nothing is fitted"),
    BackwardHypothesis(("loss_term",), guess_loss_terms, 324, "one number is fitted"),
    BackwardHypothesis(
        ("micro_batch_means", "samples_left_out", "samples_weighted"),
        guess_samples,
        322,
        "one number for each sample is fitted",
    ),
    BackwardHypothesis(
        ("dropout_active",), guess_dropout, 390, "it is not made again: after all others"
    ),
)
