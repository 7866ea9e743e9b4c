"""Finds what a merge did to one weight: once, twice, with a wrong scale, into another weight.

A weight is judged by reproduction: round(base + times * change) in the type that B stores has to
give B's values. That holds too where the type takes most of the change away. Each usual mistake is
tried as such a sum. Only where none gives B's values is the projection of B - A on the change used.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from aprfmt.codecs import codec
from aprfmt.measure.short_numbers import short_numbers

if TYPE_CHECKING:
    from numpy.typing import NDArray

    F64 = NDArray[np.float64]
    Mask = NDArray[np.bool_]

FRACTIONS = {"BF16": 7, "F16": 10, "F32": 23, "F64": 52}  # fraction bits of a significand
SMALLEST = {"F16": -24}  # exponent of the type's smallest step, where weights come near it
SUMS = 2.0**-20  # what sums in float32 are off by, relative to the largest value
ONCE, NOT, EITHER = "once", "not at all", "once or not at all"
NOTHING = "nothing to merge"  # the pair of a weight is zero, whatever the base
SCALED = "scaled otherwise"
EXCHANGED = "with exchanged factors"
ANOTHER = "another weight's change"
OTHER_ROWS = "in other rows"  # of a fused weight, among whose parts its change was spread
OTHERWISE, MORE = "otherwise", "once and another change"
TIMES = {2: "twice", 3: "3 times", -1: "subtracted"}
HIDDEN = 0.25  # of what a packed type may round off: a smaller change may be lost in it
NEAR, LITTLE = 0.05, 0.25  # of the projection to a whole number, and of what it leaves
CLEAR = 0.5  # of a change's norm: a remainder below it leaves no doubt that the change is there
MANY = 3  # times that another weight's change is added, at most
SAMPLE = 1 << 16  # values on which sums of changes are fitted
ELSE = "no change of the adapter gives the rest: another base than A, or B was changed in addition"
MOST = 0.99  # share of the values that a quantized base has to give
CHANCE = 0.7  # share of values that may lie on a code's entries by chance
WIDE = 0.005  # share of the values that a rounded base leaves a step off, at least
SPOTS = 0.05  # share of the values that damage of a weight changes, at most
HALF_STEP = 2.0**-7  # of half a step of a packed type, that rounded scales move it
SUMMED = 2.0**-18  # of a value, that a sum in another order moves a scale
LEAST = 1e-3  # of a multiple of the change: its size, and how far a shorter number may be off
TURNED = 1e-3  # share of the values that it may turn to the next code
FLAT = 64  # values under one scale of bitsandbytes, which rows do not end


class Factor(NamedTuple):
    """A multiple of the adapter's change that a mistake would add, and the mistake in words."""

    times: float
    says: str


class OtherChange(NamedTuple):
    """The change that an adapter makes to another weight of the same shape."""

    key: str
    change: "F64"


class Steps(NamedTuple):
    """Step, lowest and highest value of each element of a packed weight, of the weight's shape."""

    step: "F64"
    low: "F64"
    high: "F64"


@dataclass(frozen=True)
class Merge:
    """The values of one weight in the base and in B, with the adapter's change, in float64.

    Each is [rows, columns] or [experts, rows, columns]. `plain` is the base's weight, `change` what
    the adapter adds to it, `theirs` B's weight. `encoding` is B's encoding, `base` that of A.
    `close` says that B is the base with the change within the bound of a packed type. `again`
    encodes values in B's packed type and decodes them. `steps` are the steps of B's codes, for
    packed weights whose codes are evenly spaced.
    """

    plain: "F64"
    change: "F64"
    theirs: "F64"
    encoding: str
    base: str
    close: bool
    noise: float = 0.0  # relative error that B's packed type, or A's, may have
    again: "Callable[[F64], F64 | None] | None" = None
    steps: "Steps | None" = None

    def expert_merge(self, number: int) -> "Merge":
        """Return the Merge of one expert of a stack, number `number`, with its matrices alone."""
        return replace(
            self,
            plain=self.plain[number],
            change=self.change[number],
            theirs=self.theirs[number],
            again=None,
            steps=None if self.steps is None else Steps(*(part[number] for part in self.steps)),
        )


class Judged(NamedTuple):
    """What a merge did to one weight: `found` is the answer, as listed at ChangedWeight.

    `times` is the projection of B - A on the change, `rest` the norm of what that leaves, and
    `lost` the norm that rounding removed, both relative to the change. `source` is the weight whose
    change was added in place of this one's, "" where there is no single one.
    """

    found: str
    times: float
    rest: float
    says: str = ""
    lost: float = 0.0
    source: str = ""


_NO_PATTERNS = "alpha_pattern and rank_pattern are ignored: what all others have is taken"


def scale_factors(
    scale: float,
    rank: int,
    *,
    rank_stabilised: bool,
    alpha: float,
    r: int,
    stored: Sequence[float] = (),
) -> tuple[Factor, ...]:
    """Return the factors of the usual mistakes with a pair's scale; equal ones are joined.

    A factor is a multiple of the right change. `scale` is the pair's right scale, `rank` its rank,
    and `rank_stabilised` says that alpha is divided by the rank's root. `alpha` and `r` are those
    of the whole adapter, which patterns may overrule for a pair. `stored` are scales that tensors
    next to the pairs give (`.alpha`), which the configuration contradicts.
    """
    # The alpha of this pair, from its scale.
    own = scale * (math.sqrt(rank) if rank_stabilised else rank)
    power = math.sqrt if rank_stabilised else float
    # The scale that each usual mistake gives.
    usual = [
        (own / rank, "use_rslora is ignored: the scale is alpha / r")
        if rank_stabilised
        else (
            own / math.sqrt(rank),
            "the scale is rsLoRA's alpha / sqrt(r), which was not asked for",
        ),
        (own, "alpha is taken as the scale, and not divided by the rank"),
        (1.0, "the scale is left out: alpha and the rank are ignored"),
        (own / power(r), "rank_pattern is ignored: the rank of all others divides")
        if r
        else (0.0, ""),
        (alpha / power(rank), "alpha_pattern is ignored: the alpha of all others is taken"),
        (alpha / power(r), _NO_PATTERNS) if r else (0.0, ""),
        (power(rank) / own if own else 0.0, "the scale is turned over: r / alpha"),
    ]
    usual += [(each, "the scale is that of the .alpha tensors") for each in stored]
    # As multiples of the right scale; equal ones are one factor.
    found: dict[float, list[str]] = {}
    for other, says in usual:
        times = other / scale if scale else 0.0
        if not math.isfinite(times) or not times or math.isclose(times, 1, rel_tol=1e-6):
            continue
        same = next((each for each in found if math.isclose(each, times, rel_tol=1e-6)), times)
        if says == _NO_PATTERNS and any(
            "_pattern is ignored" in one for one in found.get(same, ())
        ):
            continue  # one pattern alone explains it
        found.setdefault(same, []).append(says)
    return tuple(
        Factor(times, f"{' or '.join(says)} ({times:.4g} times)") for times, says in found.items()
    )


def mlx_scale_factors(scale: float, rank: int) -> tuple[Factor, ...]:
    """Return the usual wrong multiples of an MLX adapter's change, each with its mistake in words.

    MLX states the scale itself, not an alpha to be divided. A multiple is of the right change.
    `scale` is the pair's right scale, `rank` its rank.
    """
    usual = (
        (1 / rank, "the scale is divided by the rank, as PEFT divides alpha"),
        (1 / scale if scale else 0.0, "the scale is left out"),
    )
    return tuple(
        Factor(times, f"{says} ({times:.4g} times)")
        for times, says in usual
        if times and not math.isclose(times, 1, rel_tol=1e-6)
    )


def judge_merge(
    merge: Merge,
    factors: Sequence[Factor] = (),
    others: Callable[[], Iterable[OtherChange]] = tuple,
) -> Judged:
    """Return what the merge did to a weight: once, twice, wrong scale, another's change, ...

    Where no answer fits a stack of experts, each expert is judged alone. `factors` are multiples of
    the change to try, `others` yields the changes of other weights that may have been added.
    """
    found = _judge_whole(merge, factors, others)
    if found.found not in (OTHERWISE, MORE) or merge.plain.ndim != 3 or len(merge.plain) < 2:
        return found
    each = [
        _judge_whole(merge.expert_merge(at), factors, partial(_expert_changes, merge, at, others))
        for at in range(len(merge.plain))
    ]
    words: dict[tuple[str, str], list[int]] = {}
    for at, one in enumerate(each):
        words.setdefault((one.found, one.says), []).append(at)
    if {found for found, _ in words} <= {OTHERWISE, MORE}:
        return found
    said = [
        f"expert{'s' * (len(experts) > 1)} {_expert_numbers(experts)} {word}"
        + f": {says}" * bool(says)
        for (word, says), experts in words.items()
    ]
    if len({word for word, _ in words}) == 1:
        return found._replace(found=each[0].found, says="; ".join(said))
    return found._replace(found="in some experts", says="; ".join(said))


def _expert_numbers(experts: Sequence[int]) -> str:
    """Return expert numbers as text: "0 to 3" for a range, else a list."""
    whole = len(experts) > 2 and experts[-1] - experts[0] == len(experts) - 1
    return f"{experts[0]} to {experts[-1]}" if whole else ", ".join(map(str, experts))


def _expert_changes(
    merge: Merge, at: int, others: Callable[[], Iterable[OtherChange]]
) -> Iterator[OtherChange]:
    """Yield the changes that expert number `at` of a stacked weight may have received by mistake.

    These are the other experts' changes, and what other weights' changes are for this expert.
    """
    for number, change in enumerate(merge.change):
        if number != at:
            yield OtherChange(f"expert {number}", change)
    for key, change in others():
        yield OtherChange(key, change[at] if change.ndim == 3 else change)


def _judge_whole(
    merge: Merge, factors: Sequence[Factor], others: Callable[[], Iterable[OtherChange]]
) -> Judged:
    """Return what the merge did to a weight, taken as one matrix or one stack.

    If the base alone, or the base plus the change, gives B's values, that is the answer. Else wrong
    multiples, misplaced changes, sums and other bases are tried in turn. `factors` and `others` are
    those of `judge_merge`.
    """
    size = float(np.square(merge.change).sum())
    if not size:
        says = "the change is nothing next to this weight, and both give the same values"
        return Judged(EITHER, 0.0, 0.0, says) if merge.close else Judged(OTHERWISE, 0.0, 0.0)
    off = merge.theirs - merge.plain
    times = float((off * merge.change).sum() / size)
    rest = float(np.sqrt(np.square(off - times * merge.change).sum() / size))
    found = Judged(OTHERWISE, times, rest)
    once, none = _reproduced_sums(merge)
    if once and none:
        says = f"{merge.encoding} takes the whole change away, and both give the same values"
        return found._replace(found=EITHER, says=says, lost=1.0)
    if once:
        left = merge.theirs - merge.plain - merge.change
        lost = float(np.sqrt(np.square(left).sum() / size))
        return found._replace(found=ONCE, lost=lost)
    if none:
        return found._replace(found=NOT)
    return (
        _usual_multiple(merge, found, factors)
        or _unnamed_multiple(merge, found)
        or _misplaced_change(merge, found, others)
        or _summed_changes(merge, found, others)
        or _judge_other_base(merge, found)
        or _hidden_change(merge, found)
        or _judge_by_projection(merge, found)
    )


def _usual_multiple(merge: Merge, found: Judged, factors: Sequence[Factor]) -> Judged | None:
    """Return the judgement that B has a usual multiple of the change, such as twice; None if not.

    `factors` are multiples to try besides whole numbers. `found` is the judgement so far, which is
    copied with the answer. None too where B is stored in a packed type.
    """
    if merge.encoding not in FRACTIONS:
        return None
    whole = [Factor(float(times), "") for times in TIMES]
    tried = sorted((*whole, *factors), key=lambda one: abs(one.times - found.times))
    held = [one for one in tried if _is_reproduced(merge, one.times)]
    if not held:
        return None
    words = [TIMES[round(one.times)] for one in held if not one.says]
    if not words:
        return found._replace(found=SCALED, says=" or ".join(one.says for one in held))
    says = " or ".join(f"added {words[0]}" if not one.says else one.says for one in held)
    return found._replace(found=words[0], says=says if len(held) > 1 else "")


def _unnamed_multiple(merge: Merge, found: Judged) -> Judged | None:
    """Return the judgement that B has another multiple of the change, and nothing else; else None.

    No mistake that is known gives the multiple: it is the shortest number near the projection by
    which all values of B follow. None too where B is stored in a packed type.
    """
    if merge.encoding not in FRACTIONS or not np.isfinite(found.times) or abs(found.times) < LEAST:
        return None
    for times in short_numbers(found.times):
        if abs(times - found.times) <= LEAST * abs(found.times) and _is_reproduced(merge, times):
            says = f"{times:g} times the change, which no number of the adapter gives"
            return found._replace(found=SCALED, says=says)
    return None


def _misplaced_change(
    merge: Merge, found: Judged, others: Callable[[], Iterable[OtherChange]]
) -> Judged | None:
    """Return the judgement that a change was added transposed, or another weight's; else None.

    `found` is the judgement so far, `others` yields other weights' changes. None too where B is
    stored in a packed type.
    """
    if merge.encoding not in FRACTIONS:
        return None
    turned = merge.change.swapaxes(-1, -2)
    if turned.shape == merge.change.shape and _sum_gives(merge, merge.plain + turned, turned):
        return found._replace(found="transposed", says="B @ A was added transposed")
    judged = (_other_change(merge, found, one) for one in others())
    return next((one for one in judged if one is not None), None)


def _other_change(merge: Merge, found: Judged, other: OtherChange) -> Judged | None:
    """Return the judgement that the change of another weight was added; None if it was not.

    `found` is the judgement so far, which is copied with the answer.
    """
    key, change = other
    if merge.encoding not in FRACTIONS or change.shape != merge.change.shape or not change.any():
        return None
    for own, word in ((0, "in place of its own"), (1, "after its own")):
        total = own * merge.change + change
        if _sum_gives(merge, merge.plain + total, total, 1 + own):
            says = f"the change of {key} was added {word}"
            return found._replace(found=ANOTHER, says=says, source="" if own else key)
    return None


def _summed_changes(
    merge: Merge, found: Judged, others: Callable[[], Iterable[OtherChange]]
) -> Judged | None:
    """Return the judgement that B has whole multiples of several weights' changes; None if not.

    The multiples are fitted by least squares on a sample of the values, and have to be whole
    numbers. Their sum has to give every value of B in a plain float type; in a packed one the norm
    of what remains has to be within what its steps leave.
    """
    step = max(1, merge.plain.size // SAMPLE)

    def sample(values: "F64") -> "F64":
        """Return every `step`-th of a weight's values, flat: the sample for fitting multiples."""
        return values.reshape(-1)[::step]

    held = {
        one.key: sample(one.change)
        for one in others()
        if one.change.shape == merge.change.shape and one.change.any()
    }
    if not held:
        return None
    columns = np.stack([sample(merge.change), *held.values()], axis=1)
    fitted = np.linalg.lstsq(columns, sample(merge.theirs - merge.plain), rcond=None)[0]
    whole = np.rint(fitted)
    if np.abs(fitted - whole).max() > NEAR or np.abs(whole).max() > MANY or not whole[1:].any():
        return None
    times = dict(zip(held, whole[1:], strict=True))
    total, moved = whole[0] * merge.change, np.abs(whole[0] * merge.change)
    for one in others():
        if times.get(one.key):
            total += times[one.key] * one.change
            moved += np.abs(times[one.key] * one.change)
    left = merge.theirs - merge.plain - total
    if merge.encoding in FRACTIONS:
        # Each sum was rounded, at sizes up to those of all parts together.
        rounds = int(np.abs(whole).sum())
        slack = rounds * _half_spacing(np.abs(merge.plain) + moved, merge.encoding)
        slack += np.ldexp(moved, -1 - FRACTIONS[merge.encoding])
        slack += SUMS * np.abs(merge.theirs).max(initial=0.0)
        if not (np.abs(left) <= slack).all():
            return None
    elif np.linalg.norm(left) >= _allowed_rest(merge) * np.linalg.norm(merge.change):
        return None
    added = [
        key if count == 1 else f"{key} ({TIMES.get(round(count), f'{count:g} times')})"
        for key, count in times.items()
        if count
    ]
    says = f"the change of {' and that of '.join(added)} was added "
    says += "after its own" if whole[0] else "in place of its own"
    alone = [key for key, count in times.items() if count]
    source = alone[0] if len(alone) == 1 and times[alone[0]] == 1 and not whole[0] else ""
    return found._replace(found=ANOTHER, says=says, source=source)


def judge_misplaced(merge: Merge, found: Judged, others: Iterable[OtherChange]) -> Judged:
    """Return `found`, or the judgement that B has the change of one of `others` instead.

    Each of the other changes is tried alone.
    """
    for one in others:
        again = _other_change(merge, found, one)
        again = again or _summed_changes(merge, found, partial(tuple, [one]))
        if again is not None:
            return again
    return found


def added_change(merge: Merge, change: "F64") -> tuple[bool, bool]:
    """Return (whether the base with `change` gives B's values, whether the base alone does).

    `change` (float64, of the weight's shape) takes the place of the adapter's own. Of a packed type
    that cannot be encoded again, the norm of what remains has to be within what its steps leave,
    and clearly below that of `change`.
    """
    again = replace(merge, change=change)
    found = _reproduced_sums(again)
    size = float(np.linalg.norm(change))
    if any(found) or merge.encoding in FRACTIONS or not size:
        return found
    left = float(np.linalg.norm(merge.theirs - merge.plain - change))
    return left < min(_allowed_rest(again), CLEAR) * size, False


def _allowed_rest(merge: Merge) -> float:
    """Return the largest norm of a remainder that storing in B's packed type explains.

    It is relative to the norm of the adapter's change.
    """
    size = float(np.linalg.norm(merge.change))
    return max(LITTLE, 1.5 * merge.noise * float(np.linalg.norm(merge.plain)) / size)


def judge_otherwise(
    merge: Merge, found: Judged, made: Iterable[tuple[str, "F64"]], word: str = SCALED
) -> Judged:
    """Return the judgement of a mistake whose result is B's weight; `found` if none is.

    `made` are pairs (mistake in words, the weight that it makes); `word` is the answer for all of
    them. `found` is returned as well where B is packed, or once merged, or the base unchanged.
    """
    if found.found in (ONCE, EITHER) or merge.encoding not in FRACTIONS:
        return found
    if _is_reproduced(merge, 0):
        return found
    for says, full in made:
        if _sum_gives(merge, full, full - merge.plain):
            return found._replace(found=word, says=says)
    return found


def find_added_change(
    plain: "F64", theirs: "F64", encoding: str, others: Iterable[OtherChange]
) -> str:
    """Return the key of the weight whose change was added to this one; "" for none.

    `plain` is the base's weight, which the adapter does not change, `theirs` is B's in `encoding`.
    `others` are the changes that the adapter makes to other weights. "" too for types that are no
    plain floats.
    """
    if encoding not in FRACTIONS:
        return ""
    for key, change in others:
        if change.shape != plain.shape or not change.any():
            continue
        merge = Merge(plain, change, theirs, encoding, encoding, False)
        if _is_reproduced(merge, 1) and not _is_reproduced(merge, 0):
            return key
    return ""


def _judge_by_projection(merge: Merge, found: Judged) -> Judged:
    """Return `found` with how many times the adapter's change was merged, by projection.

    `found.times` is the projection of B - A on the change, `found.rest` the norm of B - A without
    that projection, relative to the change. It is for weights for which no exact sum of A and the
    change gives B, such as quantized ones. `found` is returned unchanged where no number of times
    fits.
    """
    times, rest = found.times, found.rest
    allowed = _allowed_rest(merge)
    error = 4 * rest / math.sqrt(merge.plain.size)
    near = round(times)
    if abs(times - near) < max(NEAR, error) and rest < allowed:
        if near == 1 and merge.close:
            sure = error < 0.5
            return (
                found._replace(found=ONCE)
                if sure
                else found._replace(
                    found=EITHER, says=f"the steps of {merge.encoding} hide the change"
                )
            )
        if near == 1 and merge.base not in FRACTIONS:
            says = f"what is left is no more than storing the base as {merge.base} takes"
            return found._replace(found=ONCE, says=says)
        if near != 1:
            word = NOT if near == 0 else TIMES.get(near, f"{near} times")
            return found._replace(found=word)
    if abs(times - 1) < max(0.01, error) and error < 0.5:
        return found._replace(found=MORE, says=ELSE)
    return found


def _hidden_change(merge: Merge, found: Judged) -> Judged | None:
    """Return the judgement that B's packed type is too coarse to show the change; else None.

    B is then within the type's rounding of the base, with the change and without it. `found` is the
    judgement so far, with the projection of B - A on the change.
    """
    size = float(np.linalg.norm(merge.plain))
    small = float(np.linalg.norm(merge.change)) < HIDDEN * merge.noise * size
    between = -NEAR <= found.times <= 1 + NEAR and 0 < found.rest < _allowed_rest(merge)
    if merge.encoding in FRACTIONS or not (merge.close and small and between):
        return None
    return found._replace(found=EITHER, says=f"the steps of {merge.encoding} hide the change")


def _is_reproduced(merge: Merge, times: float) -> bool:
    """Return whether round(base + times * change) in B's type gives B's values."""
    change = times * merge.change
    if merge.encoding in FRACTIONS:
        return _sum_gives(merge, merge.plain + change, change, max(1, round(abs(times))))
    if merge.again is None or not (times == 1 or (times == 0 and merge.close)):
        return False
    made = merge.again(merge.plain + change)
    if made is None or not times:
        return made is not None and bool(np.array_equal(made, merge.theirs))
    # A library's sum in float32 ends elsewhere than ours, and a few values at the next code.
    apart = np.abs(made - merge.theirs) > SUMMED * np.abs(made)
    return bool(apart.mean() <= TURNED)


def _reproduced_sums(merge: Merge) -> tuple[bool, bool]:
    """Return (whether the base with the change gives B's values, whether the base alone does).

    The codes of a packed weight are compared with those nearest to either sum, in B's steps. If
    neither fits, a sum that was rounded to 16 bits before it was packed is tried; both are False
    where that fits either.
    """
    if merge.steps is None:
        return _is_reproduced(merge, 1), _is_reproduced(merge, 0)
    sums = (merge.plain + merge.change, merge.plain)
    once, none = (_is_nearest_code(merge, merge.steps, full) for full in sums)
    if once or none:
        return once, none
    once, none = (_is_nearest_code(merge, merge.steps, full, "BF16") for full in sums)
    return once and not none, none and not once


def _is_nearest_code(merge: Merge, steps: Steps, full: "F64", dtype: str = "F32") -> bool:
    """Return whether every value of B is the code nearest to the sum `full`, in steps of B's codes.

    Sums beyond a group's lowest and highest code are cut there. The sum and its summands were
    rounded to the float type `dtype` first, so a value halfway between two codes may have either.
    """
    held = np.clip(full, np.minimum(steps.low, steps.high), np.maximum(steps.low, steps.high))
    slack = np.ldexp(np.abs(full) + np.abs(merge.plain), -1 - FRACTIONS[dtype])
    near = np.abs(held - merge.theirs) <= steps.step / 2 * (1 + HALF_STEP) + slack
    return bool(near.all())


def _sum_gives(merge: Merge, full: "F64", change: "F64", rounds: int = 1) -> bool:
    """Return whether the sum `full`, rounded to B's float type, is B's value everywhere.

    `change` is the summand that was added to the base, `rounds` the number of additions.
    """
    return bool(_rounded_equal(merge, full, change, rounds).all())


def _rounded_equal(merge: Merge, full: "F64", change: "F64", rounds: int = 1) -> "Mask":
    """Return a bool array: True where the sum `full`, rounded to B's float type, is B's value.

    Where a value lies halfway between two, the other one counts as well: a library may have rounded
    the product (`change`) to the same type first, as PEFT does in half precision. `rounds` is the
    number of additions, and so of roundings.
    """
    largest = np.maximum(np.abs(merge.theirs), np.abs(full))
    half = rounds * _half_spacing(largest, merge.encoding)
    product = np.ldexp(np.abs(change), -1 - FRACTIONS[merge.encoding])
    near: Mask = np.abs(merge.theirs - full) <= half + product + SUMS * largest.max(initial=0.0)
    return near


def _half_spacing(values: "F64", encoding: str) -> "F64":
    """Return half the distance between neighbouring numbers of a float type, for each value."""
    exponent = np.frexp(values)[1] - 1 - FRACTIONS[encoding]
    half: F64 = np.ldexp(0.5, np.maximum(exponent, SMALLEST.get(encoding, -1074)))
    return half


def _judge_other_base(merge: Merge, found: Judged) -> Judged | None:
    """Return the judgement that B is another state of the base plus the change; None if not.

    Such a state is A before it was rounded to 16 bits, or A quantized to 4 or 8 bits and decoded. B
    may also be the merge but for a few damaged values, which is said. None too where A or B is
    packed.
    """
    if merge.encoding not in FRACTIONS or merge.base not in FRACTIONS:
        return None
    full = merge.plain + merge.change
    half = _half_spacing(np.abs(merge.plain), merge.base)
    exact = _rounded_equal(merge, full, merge.change)
    shift = np.abs(merge.theirs - full)
    slack = half + _half_spacing(np.maximum(np.abs(merge.theirs), np.abs(full)), merge.encoding)
    slack = slack + np.ldexp(np.abs(merge.change), -1 - FRACTIONS[merge.encoding])
    slack += SUMS * np.abs(full).max(initial=0.0)
    known = abs(found.times - 1) < max(0.02, 4 * found.rest / math.sqrt(full.size))
    if known and (shift <= slack).all() and 1 - exact.mean() > WIDE:
        says = f"the base that was merged is A before it was rounded to {merge.base}"
        return found._replace(found=ONCE, says=says)
    if exact.mean() > 1 - SPOTS:
        first = ", ".join(str(at) for at in np.argwhere(~exact)[0])
        says = f"once but for {int((~exact).sum())} of {exact.size} values, the first at {first}"
        return found._replace(says=says)
    name = _scheme_of_base(merge)
    if name:
        says = f"the base that was merged is A, decoded from {name}"
        return found._replace(found=ONCE, says=says)
    return None


class BaseScheme(NamedTuple):
    """A scheme in which a base may have been quantized: its code values, values per scale.

    `size` 0 is a whole row. `flat`: groups do not end at rows.
    """

    name: str
    entries: "Callable[[], F64]"
    size: int
    flat: bool = False


def _code_values(encoding: str, table: str) -> "Callable[[], F64]":
    """Return a function that returns the finite values of an encoding's codes, sorted (float64).

    `table` is the name of the codec's attribute that has them.
    """

    def load_code_values() -> "F64":
        """Return the finite values that codes of the packed type `encoding` stand for, sorted.

        They are float64. `table` is the name of the codec's attribute that lists the values.
        """
        values = np.asarray(getattr(codec(encoding), table), np.float64)
        return np.unique(values[np.isfinite(values)])

    return load_code_values


def _integer_codes(low: int, high: int) -> "Callable[[], F64]":
    """Return a function that returns the integers from `low` to `high`, as float64."""
    return lambda: np.arange(low, high + 1, dtype=np.float64)


SCHEMES = (
    BaseScheme("NF4", _code_values("NF4", "code"), FLAT, True),
    BaseScheme("FP4", _code_values("FP4", "code"), FLAT, True),
    BaseScheme("Q8_0", _integer_codes(-127, 127), 32),
    BaseScheme("8 bits, a scale for every row", _integer_codes(-127, 127), 0),
    BaseScheme("Q4_0", _integer_codes(-8, 7), 32),
    BaseScheme("FP8 (E4M3), a scale for every row", _code_values("F8_E4M3", "values"), 0),
)


def _scheme_of_base(merge: Merge) -> str:
    """Return the name of the scheme in which A, quantized and decoded, plus the change gives B.

    "" if none does. Each value of A takes the scheme's nearest code value. The scale of a group is
    fitted on every second value and judged on the others, so that it also fits quantized scales.
    """
    rows = merge.plain.reshape(-1, merge.plain.shape[-1])
    for scheme in SCHEMES:
        size = scheme.size or rows.shape[1]
        if size < 4 or (rows.size if scheme.flat else rows.shape[1]) % size:
            continue
        plain, change, theirs = (
            values.reshape(-1, size) for values in (merge.plain, merge.change, merge.theirs)
        )
        found = _decode_base(plain, change, theirs, scheme.entries())
        if any(_is_on_lattice(*found, change, theirs, merge, own) for own in ("F32", merge.base)):
            return scheme.name
    return ""


def _decode_base(
    plain: "F64", change: "F64", theirs: "F64", entries: "F64"
) -> "tuple[F64, F64, F64]":
    """Return (A quantized to the code values `entries` and decoded, median step, largest step).

    `plain`, `change` and `theirs` are A, the change and B as [groups, values], and so is the
    decoded base. Each group's scale is fitted so that decoded base plus change is nearest to B. A
    step is the distance between two code values times the group's scale; both steps are [groups,
    1].
    """
    largest = np.take_along_axis(plain, np.abs(plain).argmax(1)[:, None], 1)
    top = entries[np.abs(entries).argmax()]
    # Of entries that reach further to one side, the scale has the sign that reaches there.
    scale = largest / top if -entries[0] != entries[-1] else np.abs(largest) / abs(top)
    with np.errstate(all="ignore"):
        at = np.searchsorted((entries[1:] + entries[:-1]) / 2, np.where(scale, plain / scale, 0.0))
        code = entries[at]
        left = theirs - change
        size = np.square(code[:, ::2]).sum(1, keepdims=True)
        fitted = np.where(size, (left[:, ::2] * code[:, ::2]).sum(1, keepdims=True) / size, 0.0)
    gaps = np.diff(entries)
    return fitted * code, np.abs(fitted) * float(np.median(gaps)), np.abs(fitted) * gaps.max()


def _is_on_lattice(
    base: "F64", steps: "F64", widest: "F64", change: "F64", theirs: "F64", merge: Merge, own: str
) -> bool:
    """Return whether a decoded base, rounded to the type `own`, plus the change gives B's values.

    `steps` and `widest` are the median and largest distance of two code values in each group. Most
    values have to agree within rounding, and every value within one step. False too where steps are
    so small that most values would agree by chance.
    """
    full = base + change
    slack = (
        _half_spacing(np.maximum(np.abs(theirs), np.abs(full)), merge.encoding)
        + _half_spacing(np.abs(base), own)
        + np.ldexp(np.abs(change), -1 - FRACTIONS[merge.encoding])
        + np.ldexp(np.abs(base), -3 - FRACTIONS[merge.encoding])  # of the fitted scale
        + SUMS * np.abs(full).max(initial=0.0)
    )
    off = np.abs(theirs - full)
    chance = float(np.minimum(1.0, 2 * slack / np.maximum(steps, 1e-300)).mean())
    judged = (off <= slack)[:, 1::2]  # the scales were found on the others
    return chance < CHANCE and float(judged.mean()) >= MOST and bool((off <= slack + widest).all())
