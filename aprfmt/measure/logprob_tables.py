"""Compares the log-probabilities that two runs give for the same tokens, by position.

A *side* is the log-probabilities of one of two runs: *this side* (`here`) is judged, the other is
the reference. A *row* is one position.

Each side has for a position the log-probabilities of some tokens, or of all. They are compared
where both sides have them, after normalising: a row of logits is reduced by its log-sum-exp, a row
that adds up to 1 already is taken unchanged.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.measure.log_softmax import is_log_softmax
from aprfmt.measure.logprob_relations import (
    BETTER,
    POSITIONS,
    SIDES,
    LogprobRelation,
    ModelFactor,
    SharedRow,
    find_relation,
)
from aprfmt.measure.sampler_penalties import LogitRows, find_penalty
from aprfmt.measure.softmax import log_softmax
from aprfmt.measure.tolerances import Threshold

Numbers = NDArray[Any]
_FLOOR = 1e-5  # least share of an error that reaches a log-probability near 0
_ONE_ROW = 3.0  # times the tolerance of all rows that one row's differences may have
# Log-probabilities of one row differ by what the logits do. Those of a 16-bit head are multiples
# of a power of two: of 2^-9 for bfloat16 from 1/4 on, of 2^-10 for float16 from 1 on.
_STEP = 2.0**-10
_NOISE = 1.5e-5  # what float32 and its decimals leave of such a difference, of numbers up to 32
# Two float32 log-probabilities: the log-sum-exp and what is left of the logit are each rounded by
# 2^-24 of their size on both sides, in any arithmetic.
_PRINTED = 2.0**-22
_DECIMALS = 6  # more than these show nothing: a float32 has them
_ENOUGH, _NEARLY = 12, 0.95  # differences that are looked at; the share of them on the grid
_HELD = 1 << 21  # log-probabilities of which a relation is looked for
LEAST = -9999.0  # what vLLM writes for minus infinity
_MOVES = (1, -1, 2, -2, 3, -3)  # positions by which rows are looked for late or early


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities of some tokens: at position p of the token after p, given those up to p.

    `ids` are all tokens of the text. `rows` maps a position to {token: log-probability}. `full`
    says that a row has all tokens of the vocabulary. `whose` names the side.
    """

    ids: tuple[int, ...]
    rows: Mapping[int, Mapping[int, float]]
    full: bool = False
    whose: str = ""


@dataclass(frozen=True, slots=True)
class LogprobRow:
    """One position: the token after it, both sides' log-probabilities of it, and their distance.

    `difference` is this side less the reference. `largest` is the largest difference of any shared
    token. `rms` is the root mean square of all, in units of what an error as large as the spread of
    the logits makes of them. `kl` is KL(reference || this side) in nats over the shared tokens; all
    other tokens of the row count as one more token.
    """

    position: int
    token: int | None
    here: float | None
    reference: float | None
    difference: float | None
    largest: float
    kl: float
    shared: int
    rms: float


@dataclass(frozen=True)
class LogprobTable:
    """The positions that both sides have, and their distance; `only_*` count the other positions.

    `bits`: all log-probabilities are equal, bit by bit. `tolerance` is what rounding of the logits
    allows. `relation` says how this side follows from the reference where they differ by more.
    """

    rows: tuple[LogprobRow, ...]
    scaled: float  # root mean square of all differences in the units of a row's `rms`
    bits: bool
    tolerance: Threshold
    only_here: int
    only_there: int
    exact: Threshold | None = None  # in float32, where an arithmetic is not known
    lost: tuple[int, ...] = ()  # positions of this side that the reference could have, and has not
    unshared: tuple[int, ...] = ()  # of both sides, which list no token in common
    relation: LogprobRelation | None = None

    @property
    def compared(self) -> int:
        """The number of positions with a token on both sides."""
        return len(self.rows)

    @property
    def beyond(self) -> bool:
        """Whether the probabilities differ by more than rounding of the logits explains."""
        if self.relation is not None:
            return not self.relation.harmless
        return not self.scaled <= self.tolerance.rel_l2 or self.first is not None

    @property
    def first(self) -> LogprobRow | None:
        """The first row whose differences exceed what is allowed for a single row, or None."""
        return self._first_beyond(self.tolerance)

    @property
    def undecided(self) -> bool:
        """Whether the sides agree only because a coarser arithmetic than float32 is assumed."""
        if self.exact is None or self.beyond or self.relation is not None:
            return False
        return not self.scaled <= self.exact.rel_l2 or self._first_beyond(self.exact) is not None

    def _first_beyond(self, tolerance: Threshold) -> LogprobRow | None:
        """Return the first row whose differences exceed `_ONE_ROW` times `tolerance`, or None."""
        if self.relation is not None and self.relation.harmless:
            return None
        bound = _ONE_ROW * tolerance.rel_l2
        return next((row for row in self.rows if not row.rms <= bound), None)

    def to_json(self) -> dict[str, Any]:
        """Return plain data: the summary, and the positions."""
        told = [row.difference for row in self.rows if row.difference is not None]
        kl = [row.kl for row in self.rows]
        return {
            "compared": self.compared,
            "only_here": self.only_here,
            "only_in_reference": self.only_there,
            "bits": self.bits,
            "scaled": self.scaled,
            "tolerance": self.tolerance.rel_l2,
            "reason": self.tolerance.reason,
            "tolerance_float32": None if self.exact is None else self.exact.rel_l2,
            "undecided": self.undecided,
            "max_difference": max((row.largest for row in self.rows), default=0.0),
            "mean_difference": float(np.mean(told)) if told else None,
            "mean_abs_difference": float(np.mean(np.abs(told))) if told else None,
            "mean_kl": float(np.mean(kl)) if kl else 0.0,
            "max_kl": max(kl, default=0.0),
            "first": None if self.first is None else self.first.position,
            "relation": None if self.relation is None else self.relation.to_json(),
            "positions": [asdict(row) for row in self.rows],
        }


def rows_from_logits(
    ids: Sequence[int], logits: Numbers, positions: Sequence[int], whose: str
) -> "LogprobMatrix":
    """Return logits [positions, vocabulary] as a LogprobMatrix of log-probabilities.

    `ids` are the run's tokens, `positions` those of the rows, `whose` names the side. The values
    are float64.
    """
    # Less the log-sum-exp of each row; log-probabilities are taken as they are.
    values, sums = np.asarray(logits, np.float64), None
    if not is_log_softmax(np.asarray(logits)):
        top = values.max(-1)
        values = log_softmax(values)
        sums = top - values.max(-1)
    return LogprobMatrix(tuple(ids), values, tuple(positions), whose, sums)


@dataclass(frozen=True)
class LogprobMatrix:
    """Log-probabilities of all tokens, [positions, vocabulary]; `whose` names the side.

    `sums` are the log-sum-exps [positions] that logits were reduced by, None where they are not
    known.
    """

    ids: tuple[int, ...]
    values: Numbers
    positions: tuple[int, ...]
    whose: str = ""
    sums: Numbers | None = None


Side = Logprobs | LogprobMatrix


def _row_as_dict(side: Side, position: int, tokens: Sequence[int] | None) -> dict[int, float]:
    """Return {token: log-probability} of one position.

    They are those of `tokens`, or of all that the side lists if it is None.
    """
    if isinstance(side, Logprobs):
        held = side.rows[position]
        return dict(held) if tokens is None else {one: held[one] for one in tokens if one in held}
    values = side.values[side.positions.index(position)]
    chosen = range(len(values)) if tokens is None else [t for t in tokens if t < len(values)]
    return {token: float(values[token]) for token in chosen}


def _full_row(side: Side, position: int) -> Numbers | None:
    """Return a side's log-probabilities of all tokens at a position; None if it lists some only."""
    if isinstance(side, Logprobs):
        return None
    row: Numbers = side.values[side.positions.index(position)]
    return row


def has_16_bit_logits(side: Side) -> bool:
    """Return whether a side's log-probabilities come from logits that were rounded to 16 bits.

    Their differences inside a row are then multiples of a power of two. False if every row lists
    one token only, which does not show it.
    """
    parts = []
    for at in side.rows if isinstance(side, Logprobs) else side.positions:
        row = _row_as_dict(side, at, None)
        values = np.sort([one for one in row.values() if one > LEAST])[::-1]
        parts.append(values[0] - values[1:64] if len(values) else values)
    apart = np.concatenate(parts) if parts else np.zeros(0)
    apart = apart[apart > _STEP / 2]
    off = np.abs(apart - np.round(apart / _STEP) * _STEP)
    noise = _NOISE + 2 * printed_resolution(side)
    if apart.size < _ENOUGH or noise > _STEP / 4:
        return False
    return float(np.mean(off <= noise)) >= _NEARLY


def printed_resolution(side: Side) -> float:
    """Return half a unit of the last decimal of log-probabilities that were rounded to be printed.

    0 where they have more decimals than are looked for, or are too few to show how many they have.
    """
    if isinstance(side, LogprobMatrix):
        return 0.0
    held = np.array([one for row in side.rows.values() for one in row.values()], np.float64)
    held = held[np.isfinite(held) & (held > LEAST) & (held != 0)]
    if held.size < _ENOUGH:
        return 0.0
    for decimals in range(1, _DECIMALS + 1):
        if np.array_equal(np.round(held, decimals), held):
            return 0.5 * 10.0**-decimals
    return 0.0


def logit_size(here: Side, reference: Side) -> float:
    """Return the largest absolute logit of a row, in standard deviations of the logits.

    It is a root mean square over the rows. Log-probabilities do not tell the logits' mean: it is
    taken as 0 where a row is whole. Where both sides list some tokens only, it is the largest
    log-probability's size, at most 32.
    """
    both = [here, reference]
    full = next((side for side in both if isinstance(side, LogprobMatrix)), None)
    if full is not None:
        values = np.where(np.isfinite(full.values), full.values, np.nan)
        values = values[~np.isnan(values).all(axis=-1)]
        if not values.size:
            return 1.0  # a run that ended in NaN has no size
        values = values - np.nanmean(values, axis=-1, keepdims=True)
        spread = max(float(np.nanmean(np.nanstd(values, axis=-1))), 1e-6)
        return float(np.sqrt(np.mean(np.nanmax(np.abs(values), axis=-1) ** 2))) / spread
    rows = [row for side in both if isinstance(side, Logprobs) for row in side.rows.values()]
    least = [min(max(row.values(), key=lambda x: -abs(x)), 0.0) for row in rows if row]
    return float(np.sqrt(np.mean(np.square(np.maximum(least, -32.0))))) if least else 1.0


def compare_logprobs(
    here: Side,
    reference: Side,
    tolerance: Threshold,
    exact: Threshold | None = None,
    own_factor: ModelFactor | None = None,
) -> LogprobTable:
    """Return how far apart two sides are, at every position that both have, and what relates them.

    `tolerance` is that of the arithmetic that is known or assumed; `exact` is that of float32,
    given if it is assumed. `own_factor` is the model's factor of its logits, None where it has
    none.
    """
    table, values = _compare_rows(here, reference, tolerance, exact)
    if not (table.beyond or table.undecided):
        return table
    penalty = _penalty_of_rows(here, reference)
    if penalty is not None:
        return replace(table, relation=penalty)
    if not table.beyond:
        return table
    relation = find_relation(values, tolerance.rel_l2, own_factor)
    if relation is not None and relation.harmless and relation.positions < len(table.rows):
        return table  # of the other positions nothing is known
    return replace(table, relation=relation or _shift_of_rows(here, reference, table))


def _penalty_of_rows(here: Side, reference: Side) -> LogprobRelation | None:
    """Return the relation "penalty" if a sampler's penalty or bias changed logits of one side.

    None if it did not, and unless both sides have all tokens of the same vocabulary. Both are of
    the same text. Positions that one side lacks are left out.
    """
    if isinstance(here, Logprobs) or isinstance(reference, Logprobs):
        return None
    both = [at for at in here.positions if at in reference.positions]
    if here.values.shape[1] != reference.values.shape[1]:
        return None
    found = find_penalty(here.ids, both, _rows_at(here, both), _rows_at(reference, both))
    if found is None:
        return None
    side = SIDES[found.of_reference]
    return LogprobRelation("penalty", f"of {side}, {found.says}", side, len(both))


def _rows_at(side: LogprobMatrix, positions: Sequence[int]) -> LogitRows:
    """Return the rows of some positions."""
    at = [side.positions.index(one) for one in positions]
    return LogitRows(side.values[at], None if side.sums is None else side.sums[at])


def _shift_of_rows(here: Side, reference: Side, table: LogprobTable) -> LogprobRelation | None:
    """Return the relation "shifted" if all rows of one side are the other's of other positions.

    `table` compares the two. Half of its positions must have a row after the move, and nearly all
    of the distance must be gone.
    """
    for places in _MOVES:
        moved = _with_moved_rows(reference, -places)
        found = _compare_rows(here, moved, table.tolerance, None)[0]
        if found.compared < max(POSITIONS, table.compared / 2) or found.beyond:
            continue
        if not found.scaled <= BETTER * table.scaled:
            continue
        way, other = ("late", "before") if places > 0 else ("early", "after")
        count = f"{abs(places)} position{'s' * (abs(places) > 1)}"
        says = (
            f"the rows of {SIDES[1]} stand {count} too {way} against those of {SIDES[0]}: each is "
            f"the row {count} {other} it, at {found.compared} positions"
        )
        return LogprobRelation("shifted", says, SIDES[1], found.compared)
    return None


def _with_moved_rows(side: Side, places: int) -> Side:
    """Return a side whose rows stand `places` positions later, without those that have none."""
    if isinstance(side, Logprobs):
        rows = {at + places: row for at, row in side.rows.items() if at + places >= 0}
        return replace(side, rows=rows)
    kept = [at + places >= 0 for at in side.positions]
    positions = tuple(at + places for at in side.positions if at + places >= 0)
    return replace(side, values=side.values[kept], positions=positions)


def _compare_rows(
    here: Side, reference: Side, tolerance: Threshold, exact: Threshold | None
) -> tuple[LogprobTable, list[SharedRow]]:
    """Return (how far apart two sides are, the rows in which a relation may be looked for)."""
    mine = list(here.rows) if isinstance(here, Logprobs) else list(here.positions)
    theirs = list(reference.rows) if isinstance(reference, Logprobs) else list(reference.positions)
    both = sorted(set(mine) & set(theirs))
    # The size of logits by which errors are scaled.
    spread = _logit_spread(here, reference, both)
    reach = spread * logit_size(here, reference)
    printed = printed_resolution(here) + printed_resolution(reference)
    rows, total, count, bits, unshared = [], 0.0, 0, True, []
    values, held = list[SharedRow](), 0
    for at in both:
        few = here if isinstance(here, Logprobs) else reference
        listed = list(_row_as_dict(few, at, None)) if isinstance(few, Logprobs) else None
        x, y = _row_as_dict(here, at, listed), _row_as_dict(reference, at, listed)
        shared = [one for one in x if one in y]
        if not shared:
            unshared.append(at)
            continue
        a, b = np.array([x[one] for one in shared]), np.array([y[one] for one in shared])
        # Differences count where both are finite; equal infinities are no difference.
        finite = np.isfinite(a) & np.isfinite(b) & (a > LEAST) & (b > LEAST)
        alike = (a == b) | (np.maximum(a, LEAST) == np.maximum(b, LEAST))
        apart = np.where(finite, np.abs(a - b), np.where(alike, 0.0, np.inf))
        bits &= bool(np.all(apart == 0))
        # What one error d of every logit makes of a log-probability: d times 1 - p, not d.
        moved = np.maximum(1.0 - np.exp(np.minimum(b, 0.0)), _FLOOR)
        own = printed + _PRINTED * (1.0 + np.where(np.isfinite(b), np.abs(b), 0.0) + reach)
        scaled = np.maximum(apart - own, 0.0) / (spread * moved * np.sqrt(2.0))
        total += float(np.sum(scaled**2))
        count += len(shared)
        if finite.all() and held + len(shared) <= _HELD:
            whole = listed is None
            full = (_full_row(side, at) for side in (here, reference))
            shown = np.broadcast_to(own, a.shape)
            values.append(SharedRow(a, b, shown, spread * 2**0.5, whole, *full))
            held += len(shared)
        token = reference.ids[at + 1] if at + 1 < len(reference.ids) else None
        told = token in x and token in y
        rows.append(
            LogprobRow(
                at,
                token,
                x[token] if told and token is not None else None,
                y[token] if told and token is not None else None,
                x[token] - y[token] if told and token is not None else None,
                float(apart.max()),
                kl_divergence(b[finite], a[finite]) if (finite | alike).any() else math.inf,
                len(shared),
                float(np.sqrt(np.mean(scaled**2))),
            )
        )
    return LogprobTable(
        tuple(rows),
        float(np.sqrt(total / max(count, 1))),
        bits and bool(rows),
        tolerance,
        len(set(mine) - set(theirs)),
        len(set(theirs) - set(mine)),
        exact,
        tuple(sorted(set(mine) - set(theirs) - {_without_entry(reference)})),
        tuple(unshared),
    ), values


def _without_entry(side: Side) -> int:
    """Return the last token's position, of which an answer has no entry; -1 for a trace."""
    return len(side.ids) - 1 if isinstance(side, Logprobs) else -1


def _logit_spread(here: Side, reference: Side, positions: Sequence[int]) -> float:
    """Return the standard deviation of logits within a row, as the mean over the rows `positions`.

    The size of roundings follows from it. For two sides that list only some tokens, it is that of
    all listed values, at least 1 nat.
    """
    full = next((side for side in (reference, here) if isinstance(side, LogprobMatrix)), None)
    if full is not None:
        chosen = full.values[[full.positions.index(at) for at in positions]]
        chosen = np.where(np.isfinite(chosen), chosen, np.nan)
        return max(float(np.nanmean(np.nanstd(chosen, axis=-1))), 1e-6) if chosen.size else 1.0
    assert isinstance(reference, Logprobs)
    values = [value for at in positions for value in reference.rows[at].values() if value > LEAST]
    return max(float(np.std(values)), 1.0) if values else 1.0


def kl_divergence(p: Numbers, q: Numbers) -> float:
    """Return KL(p || q) in nats of some tokens' log-probabilities; all others count as one."""
    x, y = np.exp(p), np.exp(q)
    rest = max(0.0, 1.0 - float(x.sum())), max(0.0, 1.0 - float(y.sum()))
    found = float(np.sum(x * (p - q)))
    if rest[0] > 1e-6 and rest[1] > 1e-6:
        found += rest[0] * float(np.log(rest[0] / rest[1]))
    return max(0.0, found)
