"""Why two tensors of one role differ: hypotheses that need no forward pass, tried in one order.

A *pair* is the two tensors that files A and B have of one role. A *hypothesis* reads a pair and
yields *guesses*, changes of A's or B's tensor that should make both equal. A *finding* is what is
said of a pair. A *side* is one of the two files, or its tensor.

The cost is bounded. A pair takes one pass over both tensors for the distance, and samples of
SAMPLE_ROWS rows for every hypothesis; each guess that fits the sample takes one more pass. The
index of all other tensors reads four rows of each, once per comparison.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from aprfmt.arch.role_vocabulary import split_key
from aprfmt.base.budget import Budget, end_where_time_is_over
from aprfmt.base.encodings import find_encoding as encoding_row
from aprfmt.base.registry import offered_items
from aprfmt.base.sequences import first_and_more
from aprfmt.causes import CAUSES
from aprfmt.causes.tensor.context import NotTried, PairContext
from aprfmt.causes.tensor.differing_pair import DifferingPair, count_stray_rows, row_distances
from aprfmt.causes.tensor.guess import Group, Guess, JointHypothesis, Take
from aprfmt.causes.tensor.other_tensors import (
    explain_empty_codes,
    explain_placeholder,
    explain_renamed,
)
from aprfmt.causes.tensor.proof import fitted_proof, make_finding, prove_guess
from aprfmt.causes.tensor.stored_bytes import SIXTEEN, take_byte_swapped
from aprfmt.causes.tensor.token_tables import common_rows
from aprfmt.errors import AprfmtError
from aprfmt.measure.alignment import TensorPair
from aprfmt.measure.findings import Finding
from aprfmt.measure.numbers import to_float64
from aprfmt.measure.proofs import cap_proof
from aprfmt.measure.records import TensorDiff
from aprfmt.measure.row_reader import ComputedRows, RowReader, SelectedRows
from aprfmt.model import Model
from aprfmt.tensors.view import View

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array

__all__ = ["PairContext", "explain_pair", "explain_pairs"]

TRIED = 6  # guesses applied to whole tensors, per pair
PART = 0.5  # at most this share of rows differs: then they are also examined alone
PART_ROWS = 1 << 12
LONG = 1 << 26  # values of a vector from which only its bytes are looked at
ALONE = 2  # pairs of a role that are tried alone before all layers are looked at together
MANY = 6  # pairs of a role that differ, from which this is done
DENSE = 0.3  # at a smaller distance not all values were misread
REREAD = ("dtype_mislabel", "endianness", "rounding", "quantisation")  # not combined
SANE = 4.0  # how far two root mean squares may be apart for a reading to be worth a try


def explain_pair(a: View, b: View, context: PairContext, key: str = "") -> Finding | None:
    """Return the finding of the first hypothesis that makes two tensors equal, or a likely finding.

    `key` is the pair's key if it is not the tensors' own. None if nothing fits, or if the tensors
    do not differ. Raises AprfmtError for a tensor that cannot be read.
    """
    with np.errstate(all="ignore"):  # misread values may overflow
        return _explain_differing(a, b, context, key)


def _explain_differing(a: View, b: View, context: PairContext, key: str) -> Finding | None:
    """Return the finding for two tensors by their shapes or values.

    None if no hypothesis fits, or if the tensors do not differ.
    """
    first, second = RowReader(a), RowReader(b)
    if a.shape != b.shape:
        placeholder = explain_placeholder(key or a.name, first, second)
        if placeholder is not None:
            return placeholder
    if not first.size or not second.size:
        return None
    case = DifferingPair(key or a.name, first, second, context)
    if a.shape != b.shape:
        tried = _best_hypothesis(case, shapes=True)
        shaped = None if tried is None else tried[0]
        if shaped is None or not shaped.confirmed:
            return _explain_common_rows(case) or shaped
        return shaped
    if not case.before.changed:
        return None
    empty = explain_empty_codes(case.key, first, second)
    if empty is not None:  # nothing relates values to codes that were never written
        return empty
    return _with_nonfinite(case, _explain_values(case))


def _with_nonfinite(case: DifferingPair, found: Finding | None) -> Finding | None:
    """Return a finding that also covers elements where only one side is NaN or infinite.

    `found` is the finding for all values, or None; it is returned unchanged if there are no such
    elements. NaN and infinities are explained only by a transformation that gives exactly the same
    bits or values; otherwise the cause is "nonfinite", confirmed only if all other values are
    equal.
    """
    odd = case.before.nonfinite
    if odd is None or not odd.alone:
        return found
    if found is not None and found.confirmed and CAUSES[found.cause].verdict == "bug":
        return replace(found, evidence=(*found.evidence, odd.text()))
    if found is not None and found.confirmed and found.residual_after == 0:
        # Made on all values, it gives the same NaN and infinities and the same other values.
        count = f"{odd.alone} value{' is' if odd.alone == 1 else 's are'} not finite then"
        if odd.at is not None:
            count += f", the first at {list(odd.at)}: A {odd.values[0]}, B {odd.values[1]}"
        evidence = (f"{found.evidence[0]}: {count}", *found.evidence[1:], odd.text())
        return replace(
            found,
            cause="nonfinite",
            verdict=CAUSES["nonfinite"].verdict,
            says=evidence[0],
            evidence=evidence,
        )
    says: tuple[str, ...]
    says = (
        f"{odd.side} is not finite where the other side is, or holds another such value",
        odd.text(),
    )
    # All other values may be equal, or within rounding.
    others = case.before.changed - odd.alone
    slack = case.slack()
    near = slack > 0 and case.before.rest <= slack and not case.before.leaves_factor(slack)
    equal = others == 0 or near
    if equal:
        within = " within the rounding of the coarser encoding" if others else ""
        says = (*says, f"all other values are equal{within}")
    if found is not None and found.cause != "stale_tensor":
        says = (*says, f"{found.cause}, which is not confirmed:", *found.evidence)
    after = case.before.rest if equal else None
    before = case.before.relative
    return make_finding("nonfinite", (case.key,), says, before, after, None, confirmed=equal)


def _explain_values(case: DifferingPair) -> Finding | None:
    """Return the finding for a pair of one shape: on all values, on some rows, or of two causes.

    None if nothing fits.
    """
    found = _best_hypothesis(case)
    if found is None or not found[0].confirmed:
        part = _explain_rows(case)
        vague = found is None or found[0].cause == "stale_tensor"
        found = part if part is not None and (vague or part[0].confirmed) else found
    if found is not None and found[0].confirmed:
        return found[0]
    return (
        _explain_remainder(case, found)
        or _explain_reread(case)
        or (None if found is None else found[0])
    )


Tried = tuple[Finding, Guess | None]


def _best_hypothesis(
    case: DifferingPair, *, shapes: bool = False, part: bool = False
) -> Tried | None:
    """Return (finding, its guess) of the first confirmed hypothesis, else of a likely one.

    The guess is None where a hypothesis gave the finding itself. Of likely ones, one with a guess
    goes first. `shapes`: only hypotheses for two shapes. `part`: only those for some of the rows.
    At most TRIED guesses are applied to whole tensors. None where nothing fits.
    """
    likely: Tried | None = None
    budget = TRIED
    for guess in _guesses_of_table(case, shapes, part):
        # A finding needs no pass over the tensors.
        if isinstance(guess, Finding):
            if guess.confirmed:
                return guess, None
            likely = likely or (guess, None)
            continue
        try:
            if not case.holds_on_sample(guess) or not budget:
                continue  # no more passes; what was found without one may still be said
            budget -= 1
            found = _confirm_guess(case, guess, shapes)
        except AprfmtError as error:
            case.context.record_not_tried((guess.cause,), case.key, error)
            continue
        if found is not None and found.confirmed:
            return found, guess
        if found is not None and (likely is None or likely[1] is None):
            likely = found, guess
    return likely


def _guesses_of_table(case: DifferingPair, shapes: bool, part: bool) -> Iterator[Guess | Finding]:
    """Yield the guesses and findings of all hypotheses for this pair.

    `shapes`: only hypotheses for two shapes. `part`: only those for some of the rows.
    """
    from aprfmt.causes.tensor.table import TABLE

    long = case.a.columns == 1 and case.a.rows > LONG
    for row in (*TABLE, *offered_items("explanations")):
        if long and not row.stored:
            continue
        end_where_time_is_over()
        if (row.shapes or not shapes) and (row.part or not part) and row.is_for(case):
            try:
                yield from row.find(case)
            except AprfmtError as error:
                case.context.record_not_tried(row.causes, case.key, error)


def _confirm_guess(case: DifferingPair, guess: Guess, shapes: bool) -> Finding | None:
    """Return the finding of a guess, applied to all its rows; None if it hardly helps.

    `shapes`: the sides have two shapes, so that there is no distance before.
    """
    after = case.distance(guess.left, guess.right, guess.rows, guess.slack)
    before = None if shapes else case.before.relative
    equal = after.equal(guess.slack)
    if not math.isfinite(after.relative):
        return None  # the remaining values have no bound to compare with
    if after.constant and after.count > 1 and not guess.constant:
        return None  # any function gives one number: that it is equal proves nothing
    if before is not None and after.relative > 0.5 * before and after.changed:
        return None if guess.beyond is None else guess.beyond()
    if equal and after.leaves_factor(guess.slack):
        return None
    says = guess.says
    beyond = case.count_beyond_rounding(guess) if equal else 0
    if beyond:
        equal = False
        says = (
            *says,
            f"then {beyond} of {after.count} values are further apart than rounding makes them",
        )
    elif not equal:
        says = (
            *says,
            f"then {after.changed} of {after.count} values still differ, by {after.relative:.3g} "
            "of the norm",
        )
    elif after.changed:
        says = (*says, "equal within the rounding of the coarser encoding")
    damaged = None if equal or guess.beyond is None else guess.beyond()
    if damaged is not None:
        return damaged
    where = guess.where or (case.key,)
    # Of values that were equal as stored nothing is shown.
    spoken = after.count if before is None else min(after.count, case.before.changed)
    came = spoken if equal else max(0, spoken - (beyond or after.changed))
    outside = 0
    if not shapes and guess.rows is not None and not guess.sampled:
        outside = len(np.setdiff1d(case.changed_rows, guess.rows)) * case.a.columns
    if equal and guess.sampled and (stray := count_stray_rows(case, guess.rows)):
        says = (*says, f"{stray} other rows are further apart than any of these: damage there")
        equal, outside = False, stray * case.a.columns
    share = came / max(1, spoken + outside)
    proof = prove_guess(case, guess, spoken, share)
    capped = cap_proof(proof, guess.most)
    if equal and not proof.judged:
        says = (*says, "too few values judge it")
    found = make_finding(guess.cause, where, says, before, after.relative, capped, confirmed=equal)
    return replace(found, leaves_side_open=guess.either)


def _explain_rows(case: DifferingPair) -> Tried | None:
    """Return (finding, None) about only the rows that differ; None if many or unexplained."""
    if case.a.columns == 1:
        return None
    near = row_distances(case.sample_a, case.sample_b) <= case.slack()
    if near.mean() < PART / 2:
        return None
    rows = case.changed_rows
    if not 0 < len(rows) <= min(PART * case.a.rows, PART_ROWS):
        return None
    part = DifferingPair(
        case.key, SelectedRows(case.a, rows), SelectedRows(case.b, rows), case.context
    )
    part.numbers, part.known = rows, False
    found = _best_hypothesis(part, part=True)
    if found is None:
        return None
    shown = ", ".join(str(i) for i in rows[:6].tolist()) + (" ..." if len(rows) > 6 else "")
    evidence = (*found[0].evidence, f"in {len(rows)} of {case.a.rows} rows: {shown}")
    return replace(found[0], evidence=evidence, residual_before=case.before.relative), None


def _explain_common_rows(case: DifferingPair) -> Finding | None:
    """Return the finding on the rows that two token tables of different lengths have in common.

    None where these are equal or unexplained: the rows after them are judged with the other
    tables.
    """
    common = common_rows(case.key, case.a, case.b)
    if common is None:
        return None
    both = DifferingPair(case.key, *common, case.context)
    both.known = False
    if both.before.equal(both.slack()):
        return None
    found = _best_hypothesis(both, part=True)
    if found is None or not found[0].confirmed:
        found = _explain_rows(both) or found
    if found is None:
        return None
    lengths = f"in the {both.a.rows} rows that both have; A has {case.a.rows}, B {case.b.rows}"
    evidence = (*found[0].evidence, lengths)
    return replace(found[0], evidence=evidence, residual_before=both.before.relative)


def _explain_remainder(case: DifferingPair, found: Tried | None) -> Finding | None:
    """Return the finding of two causes: a guess that helps, and one that explains what is left.

    `found` is the first cause with its guess. None without a guess, or if nothing is confirmed for
    what is left.
    """
    if found is None or found[1] is None:
        return None
    rest = remainder(case, found[1])
    if rest is None or not rest.before.changed:
        return None
    second = _best_hypothesis(rest) or _explain_rows(rest)
    if second is None or not second[0].confirmed:
        return None
    said = (*found[0].evidence, f"then {second[0].cause}:", *second[0].evidence)
    # Both together give all of it, and what judges the second judges them.
    proof = replace(second[0].proof or fitted_proof(case.before.changed), share=1.0)
    return replace(
        found[0],
        evidence=said,
        residual_after=second[0].residual_after,
        confirmed=True,
        proof=proof,
    )


def _explain_reread(case: DifferingPair) -> Finding | None:
    """Return the finding that bytes were read as a wrong type and elements were moved; or None."""
    if case.before.relative < DENSE:
        return None
    for cause, text, reread in rereadings(case):
        found = _best_hypothesis(reread)
        if found is not None and found[0].confirmed and found[0].cause not in REREAD:
            return replace(
                found[0],
                cause=cause,
                says=text,
                verdict=CAUSES[cause].verdict,
                evidence=(text, f"then {found[0].cause}:", *found[0].evidence),
                residual_before=case.before.relative,
            )
    return None


def explain_pairs(
    a: Model,
    b: Model,
    base: Model | None,
    pairs: Sequence[TensorPair],
    results: Sequence[TensorDiff],
    budget: Budget | None = None,
) -> tuple[list[TensorDiff], list[NotTried]]:
    """Return (comparisons with findings for pairs that differ, hypotheses that were not tried).

    `results` are the comparisons of `pairs`, in their order. If a role differs in many layers,
    and no finding is confirmed for the first few of its pairs alone, hypotheses about several
    tensors come before the others. A hypothesis cannot be tried where a tensor that it reads is
    damaged or `budget` has no time; the others are still tried.
    """
    context = PairContext(a, b, base, {row.key: row for row in results})
    made = list(results)
    budget = budget or Budget()
    with np.errstate(all="ignore"), budget.in_force() as reading:  # misread values may overflow
        _explain_in_order(context, pairs, made)
    if reading.over:
        context.record_not_tried((), "", budget.reason)
    return made, context.not_tried


def _explain_in_order(
    context: PairContext, pairs: Sequence[TensorPair], made: list[TensorDiff]
) -> None:
    """Add findings to the comparisons `made` of all pairs that differ, hypothesis by hypothesis.

    What has been added when the search is ended stays.
    """
    late: list[int] = []
    tried = FailedAttempts(made)
    # Try pairs alone, until enough of a role were tried in vain.
    for i, pair in enumerate(pairs):
        if tried.tried_enough(made[i]):
            late.append(i)
            continue
        made[i] = _explain_alone(context, pair, made[i])
        tried.add(made[i])
    # Then all tensors together, then the pairs that were put off.
    made[:] = _explain_together(context, pairs, made)
    left = [i for i in late if made[i].explanation is None]
    for i in left:
        made[i] = _explain_alone(context, pairs[i], made[i])
    if left:
        made[:] = _explain_together(context, pairs, made)


class FailedAttempts:
    """Counts, by role, how many pairs were examined alone without success."""

    def __init__(self, rows: Sequence[TensorDiff]) -> None:
        """Count, by role, the pairs that differ; none is tried yet."""
        self.many = Counter(split_key(row.key)[1] for row in rows if row.verdict == "DIFFERENT")
        self.vain: Counter[str] = Counter()

    def tried_enough(self, row: TensorDiff) -> bool:
        """Return whether enough tensors of this row's role were examined alone without success."""
        role = split_key(row.key)[1]
        vain = self.vain[role] >= ALONE and self.many[role] >= MANY
        return vain and row.verdict == "DIFFERENT"

    def add(self, row: TensorDiff) -> None:
        """Count a tensor whose difference has no finding, an unconfirmed one, or only a factor."""
        found = row.explanation
        if row.verdict == "DIFFERENT" and (
            found is None or not found.confirmed or found.cause == "scale"
        ):
            self.vain[split_key(row.key)[1]] += 1


def _explain_alone(context: PairContext, pair: TensorPair, row: TensorDiff) -> TensorDiff:
    """Return a pair's comparison, with the finding of its two tensors alone if there is one."""
    found = None
    try:
        if row.verdict in ("DIFFERENT", "SHAPE_DIFFERS") and pair.a and pair.b:
            found = explain_pair(pair.a, pair.b, context, row.key)
        elif row.verdict in ("ONLY_IN_A", "ONLY_IN_B"):
            found = explain_renamed(row.key, row.verdict[-1].lower(), context)
    except AprfmtError as error:  # the pair itself is no longer readable
        context.record_not_tried((), row.key, error)
    pair.drop()
    if found is None:
        return row
    cause = found.cause if found.confirmed and not row.cause else row.cause
    return replace(row, explanation=found, cause=cause)


def _explain_together(
    context: PairContext, pairs: Sequence[TensorPair], rows: Sequence[TensorDiff]
) -> list[TensorDiff]:
    """Return the comparisons with the findings of hypotheses about several tensors added."""
    from aprfmt.causes.tensor.table import JOINT

    made = {row.key: row for row in rows}
    by_key = {pair.key: pair for pair in pairs}
    for hypothesis in JOINT:
        if not hypothesis.is_for(context, made.values()):
            continue
        for group in _groups_of_hypothesis(hypothesis, context, by_key, made):
            end_where_time_is_over()
            try:
                found = group()
            except AprfmtError as error:
                context.record_not_tried(hypothesis.causes, "", error)
                continue
            for key, one in found.items():
                cause = one.cause if one.confirmed else made[key].cause
                made[key] = replace(made[key], explanation=one, cause=cause)
    return [made[row.key] for row in rows]


def _groups_of_hypothesis(
    hypothesis: JointHypothesis,
    context: PairContext,
    pairs: Mapping[str, TensorPair],
    rows: Mapping[str, TensorDiff],
) -> Iterator[Group]:
    """Yield functions that each return {tensor key: finding} for some tensors together.

    An AprfmtError of the hypothesis is recorded in the context and ends them.
    """
    try:
        yield from hypothesis.find(context, pairs, rows)
    except AprfmtError as error:
        context.record_not_tried(hypothesis.causes, "", error)


def not_tried_lines(not_tried: Sequence[NotTried]) -> list[str]:
    """Return a sentence for each reason why hypotheses could not be tried, with their number."""
    groups: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for one in not_tried:
        groups.setdefault((one.causes, one.why), []).append(one.key)
    said = []
    for (causes, why), keys in groups.items():
        where = list(dict.fromkeys(filter(None, keys)))
        of = f" of {first_and_more(where, 1)}" if where else ""
        said.append(f"not tried: {', '.join(causes) or 'any explanation'}{of}: {why}")
    return said


class Transformed(ComputedRows):
    """A tensor's rows after a transformation; it has values but no stored bytes."""

    def __init__(self, like: RowReader, take: Take) -> None:
        """Take the sizes of `like`, and the rows from `take`, a function of row numbers."""
        super().__init__(like.side)
        self.rows, self.columns, self.shape = like.rows, like.columns, like.shape
        self._take = take

    def take(self, index: "Array | list[int]") -> "Array":
        """Return the transformed rows with these numbers."""
        return self._take(np.asarray(index))


def remainder(case: DifferingPair, guess: Guess) -> DifferingPair | None:
    """Return the pair of tensors after a guess is applied; None if it changes only some rows."""
    if guess.rows is not None or case.a.shape != case.b.shape:
        return None
    a, b = Transformed(case.a, guess.left), Transformed(case.b, guess.right)
    rest = DifferingPair(case.key, a, b, case.context)
    rest.numbers, rest.known = case.numbers, False
    return rest


def rereadings(case: DifferingPair) -> Iterator[tuple[str, str, DifferingPair]]:
    """Yield (cause, sentence, pair) with one tensor's bytes read as another type or byte order.

    Only if the values then have about the magnitude of the other file's.
    """
    for label, side, other in (("B", case.b, case.a), ("A", case.a, case.b)):
        row = encoding_row(side.encoding.split("+")[0])
        if side.row_bytes is None or not row.numpy or row.type_size == 1:
            continue
        size = _root_mean_square(other.take(case.sample))
        # Another byte order, and for 16-bit floats the other type.
        readings: list[tuple[str, str, Take]] = [
            (
                "endianness",
                f"{label} has every {row.type_size}-byte value in the other byte order",
                take_byte_swapped(side, True),
            )
        ]
        if side.encoding in SIXTEEN:
            name = SIXTEEN[1 - SIXTEEN.index(side.encoding)]
            readings.append(
                (
                    "dtype_mislabel",
                    f"{label} is {name} under the label {side.encoding}",
                    side.rows_as(name),
                )
            )
        # Only readings that give values of a plausible size.
        for cause, text, take in readings:
            now = _root_mean_square(take(case.sample))
            if not 1 / SANE < now / max(size, 1e-300) < SANE:
                continue
            made = Transformed(side, take)
            a, b = (other, made) if label == "B" else (made, other)
            reread = DifferingPair(case.key, a, b, case.context)
            reread.known = False
            yield cause, text, reread


def _root_mean_square(values: "Array") -> float:
    """Return the root mean square of values; 0 if anything is not finite, or without values."""
    values = to_float64(values)
    if not np.isfinite(values).all() or not values.size:
        return 0.0
    with np.errstate(over="ignore"):
        found = float(np.sqrt(np.mean(values * values)))
    return found if np.isfinite(found) else 0.0
