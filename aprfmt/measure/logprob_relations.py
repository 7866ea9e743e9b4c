"""What relates two sides' log-probabilities that are not equal: a factor, a list, a number a row.

A *side* is the log-probabilities of one of two runs: *this side* is judged, the other is the
reference. A *row* is one position.

A temperature multiplies logits by 1/T before the softmax; an answer may be normalised over the
tokens that it lists, or hold logits of which no softmax was taken. Such a relation is found on
every second position and judged on the others.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from aprfmt.measure.kept_mass import NOISE, Descending, RaisedRow, find_kept_mass
from aprfmt.measure.short_numbers import short_number
from aprfmt.measure.softmax import log_sum_exp

Numbers = NDArray[np.float64]
Kind = Literal["temperature", "listed", "offset", "fewer", "scaled", "base", "shifted", "penalty"]
SIDES = ("this side", "the reference")
FEWEST = 3  # listed tokens of a position from which its factor shows
POSITIONS = 4  # such positions from which a relation is judged
SPAN = 1e-2  # nats that the log-probabilities of a position must span, at least
UNLIKE = 1e-3  # how far a factor after the softmax is from 1, at least
LOGS = {"e": 1.0, "2": math.log(2), "10": math.log(10)}  # nats of one unit, by the base
NEAR = 2e-4  # relative: how well a factor is fitted that is between two bases
BETTER = 0.25  # of the distance at most is left by a relation
ADDED = 1e-3  # nats that a sum of rounded probabilities may be off 0
NEARLY_AS = 1.1  # times what a fitted factor leaves: what the model's own may leave
REACH = 3.0  # logarithm of the largest factor, and of 1 over the least, that is fitted by trials
SLOPE = 1e-3  # relative change of a factor, from which its slope is computed
GRID, STEPS, FITTED = 31, 30, 32  # trials of factors, steps that narrow them, rows that they are of


@dataclass(frozen=True)
class SharedRow:
    """One position's log-probabilities of the tokens that both sides list, float64 [tokens].

    `whole`: they are all of the vocabulary. `full_here` and `full_reference` are a side's
    log-probabilities of all tokens [vocabulary], None where it lists some only. `printed` are the
    nats by which rounding for print may have moved each value, `unit` the nats by which an error as
    large as the logits' spread would.
    """

    here: Numbers
    reference: Numbers
    printed: Numbers
    unit: float
    whole: bool = False
    full_here: Numbers | None = None
    full_reference: Numbers | None = None

    def turned(self) -> "SharedRow":
        """Return the row with this side and the reference exchanged."""
        return SharedRow(
            self.reference,
            self.here,
            self.printed,
            self.unit,
            self.whole,
            self.full_reference,
            self.full_here,
        )

    def distance(self, made: Numbers) -> float:
        """Return the root mean square of `made` less this side's values, in units of `unit`.

        What rounding for print explains is left out.
        """
        apart = np.maximum(np.abs(made - self.here) - self.printed, 0.0)
        return float(np.sqrt(np.mean((apart / self.unit) ** 2)))


@dataclass(frozen=True)
class ModelFactor:
    """The model's own factor `value` of its logits, and the name `key` that its file has for it.

    `run`: this side is a run of the model, which multiplies by the factor once.
    """

    value: float
    key: str
    run: bool


@dataclass(frozen=True)
class LogprobRelation:
    """How this side's log-probabilities follow from the reference's at every position.

    `kind` is "temperature": its logits are `factor` times the reference's; "listed": `side` is
    normalised over the tokens that it lists; "offset": `side` holds logits, which differ from
    log-probabilities by one number a position; "fewer": `side` is normalised over fewer tokens than
    the other, which are those that a rule of samplers keeps, or are not known; "scaled": its
    log-probabilities are `factor` times the reference's, with no softmax after it; "base": they are
    logarithms to another base than the other side's, which `factor` makes of them; "shifted": each
    row of `side` is the other's of another position; "penalty": a sampler's rule changed the logits
    of some tokens of `side`. `factor` and
    `temperature`, which is 1/factor, are 1 where there is none; `says` states it in words.
    `harmless`: both sides say the same probabilities.
    """

    kind: Kind
    says: str
    side: str
    positions: int
    factor: float = 1.0
    temperature: float = 1.0
    harmless: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return plain data of all fields."""
        return asdict(self)


def _apply_relation(row: SharedRow, factor: float, kind: Kind, drawn: bool = False) -> Numbers:
    """Return the values that a relation gives for this side, from the reference's of one row.

    Where only some tokens are listed, the constant of the softmax is fitted to the row itself. With
    `drawn` it is that of the reference's whole row.
    """
    scaled: Numbers = factor * row.reference
    if kind in ("scaled", "base"):
        return scaled
    if drawn and row.full_reference is not None:
        return scaled - log_sum_exp(factor * row.full_reference)
    if kind == "listed" or (kind == "temperature" and row.whole):
        return scaled - log_sum_exp(scaled)
    moved: Numbers = scaled + (row.here - scaled).mean()
    return moved


@dataclass(frozen=True)
class _Search:
    """The positions in which a relation is looked for, and the distance that counts as equal.

    `drawn`: the reference's rows are whole, and this side lists too few tokens to fit a constant.
    `is_turned`: this side is called the reference here, and the reference this side.
    """

    rows: Sequence[SharedRow]
    tolerance: float
    drawn: bool = False
    is_turned: bool = False

    def turned(self) -> "_Search":
        """Return the search with this side and the reference exchanged."""
        rows = [row.turned() for row in self.rows]
        return replace(self, rows=rows, is_turned=not self.is_turned)

    def holds(self, kind: Kind, factor: float = 1.0, *, fitted: bool = True) -> bool:
        """Return whether this side's log-probabilities are the reference's under relation `kind`.

        They are up to rounding, at all positions. A `fitted` factor is judged on the positions that
        it was not fitted on; one that is not, as that of two bases, on all.
        """
        rows = self.rows if factor == 1 or not fitted else self.rows[1::2]
        apart = [row.distance(_apply_relation(row, factor, kind, self.drawn)) for row in rows]
        before = [row.distance(row.reference) for row in rows]
        left = float(np.sqrt(np.mean(np.square(apart))))
        limit = self.tolerance * max(1.0, factor)
        return left <= limit and left <= BETTER * float(np.sqrt(np.mean(np.square(before))))

    def left(self, made: Sequence[Numbers]) -> float:
        """Return the distance of this side's values from those `made` for each row, over all rows.

        It is a root mean square in the rows' units.
        """
        apart = [row.distance(values) for row, values in zip(self.rows, made, strict=True)]
        return float(np.sqrt(np.mean(np.square(apart))))

    def factor(self) -> float | None:
        """Return the factor from the reference's differences inside a row to this side's, or None.

        It is fitted on every second row; None where it is not positive.
        """
        product = power = 0.0
        for row in self.rows[::2]:
            x, y = row.reference - row.reference.mean(), row.here - row.here.mean()
            product, power = product + float(x @ y), power + float(x @ x)
        return product / power if power and product > 0 else None

    def factor_by_trials(self) -> float:
        """Return the factor of the reference's logits that brings this side's values nearest.

        It is found on every second row, and on FITTED of these at most: first among factors that
        are far apart, then by golden section, in logarithms.
        """
        rows = self.rows[::2]
        rows = rows[:: -(-len(rows) // FITTED)]

        def left(power: float) -> float:
            """Return the mean square distance under the factor exp(power)."""
            factor = math.exp(power)
            made = (_apply_relation(row, factor, "temperature", self.drawn) for row in rows)
            return sum(row.distance(one) ** 2 for row, one in zip(rows, made, strict=True))

        grid = np.linspace(-REACH, REACH, GRID).tolist()
        best, step = min(grid, key=left), 2 * REACH / (GRID - 1)
        low, high, ratio = best - step, best + step, (math.sqrt(5) - 1) / 2
        for _ in range(STEPS):
            x, y = high - ratio * (high - low), low + ratio * (high - low)
            low, high = (low, y) if left(x) < left(y) else (x, high)
        return math.exp((low + high) / 2)

    def distance_under(self, factor: float) -> float:
        """Return the distance of all rows from the reference's logits times a factor."""
        made = [_apply_relation(row, factor, "temperature", self.drawn) for row in self.rows]
        return self.left(made)

    def _span(self, row: SharedRow, factor: float) -> float:
        """Return by how many nats a factor e times as large would move a row's values.

        Of lists it is what they span, and of few tokens the slope of what the whole row gives.
        """
        if not self.drawn:
            return float(np.ptp(row.reference))
        moved = (
            _apply_relation(row, factor * more, "temperature", self.drawn)
            for more in (1 + SLOPE, 1 - SLOPE)
        )
        return float(np.abs(np.subtract(*moved)).mean()) / (2 * SLOPE)

    def scale(self) -> float | None:
        """Return the factor from the reference's log-probabilities to this side's, or None.

        It is fitted on every second row; None where it is not positive.
        """
        product = power = 0.0
        for row in self.rows[::2]:
            product += float(row.reference @ row.here)
            power += float(row.reference @ row.reference)
        return product / power if power and product > 0 else None

    def temperature(self, factor: float) -> float:
        """Return 1/factor, with as many digits as the rows show."""
        return short_number(1 / factor, self.digits(factor))

    def digits(self, factor: float) -> float:
        """Return the relative precision in which the rows show the fitted `factor`."""
        span = float(np.median([self._span(row, factor) for row in self.rows]))
        noise = float(np.median([row.printed.max() for row in self.rows]))
        return max(2e-5, (noise + self.tolerance * self.rows[0].unit) / max(span, SPAN) / 10)


def _relations(search: _Search, own_factor: ModelFactor | None) -> Iterator[LogprobRelation]:
    """Yield the relations that hold at all positions of a search, the simplest first.

    `own_factor` is the model's factor of its logits, None where it has none.
    """
    count = len(search.rows)
    for side, own in zip(SIDES, (search, search.turned()), strict=True):
        sums = [log_sum_exp(row.here) for row in own.rows]
        others = [log_sum_exp(row.reference) for row in own.rows]
        # No softmax was taken: the probabilities would add up to more than 1.
        if max(sums) > ADDED and own.holds("offset"):
            says = (
                f"{side} lists logits of which no softmax was taken: less one number for each "
                "position they are the other's log-probabilities"
            )
            yield LogprobRelation("offset", says, side, count, harmless=True)
        # What one side lists adds up to 1, and what the other has of it does not.
        if max(map(abs, sums)) <= ADDED < max(map(abs, others)):
            tokens = max(len(row.here) for row in own.rows)
            says = f"{side} is normalised over the tokens that it lists (at most {tokens})"
            if own.holds("listed"):
                yield LogprobRelation("listed", says, side, count)
            factor = own.factor()
            if factor is not None and own.holds("listed", factor):
                t = own.temperature(factor)
                says += f", of {factor:.6g} times the other's logits: a temperature of {t:.6g}"
                yield LogprobRelation("listed", says, side, count, factor, t)
    factor = search.factor()
    if factor is None or not search.holds("temperature", factor):
        return
    if search.temperature(factor) == 1:
        yield from _of_fewer_tokens(search)
        return
    yield _times_a_factor(search, factor, own_factor)


def _times_a_factor(
    search: _Search, factor: float, own_factor: ModelFactor | None
) -> LogprobRelation:
    """Return the relation "temperature" by the fitted `factor` of a search.

    It says the model's own factor of the logits where that explains the values as well.
    """
    count = len(search.rows)
    known = None if own_factor is None else _by_model_factor(search, factor, own_factor)
    if known is not None:
        factor = known[0]
    # Mostly a temperature below 1 is set, and divided the larger logits.
    after, before = SIDES if (factor > 1) != search.is_turned else SIDES[::-1]
    own = search if factor > 1 or search.drawn else search.turned()
    larger, near = max(factor, 1 / factor), own.digits(factor)
    factor = 1 / factor if search.is_turned else factor
    told = (
        f"the logits of {after} are {larger:.6g} times those of {before}, at all {count} positions"
    )
    if known is not None:
        says = f"{known[1]}: {told}; a temperature of {1 / larger:.6g} would give the same"
        return LogprobRelation("temperature", says, SIDES[0], count, factor, 1 / factor)
    says = (
        f"{told}: a temperature of {short_number(1 / larger, near):.6g} divided those of {after} "
        f"alone (or one of {larger:.6g} those of {before})"
    )
    temperature = short_number(1 / factor, near)
    return LogprobRelation("temperature", says, SIDES[0], count, factor, temperature)


def _by_model_factor(search: _Search, factor: float, own: ModelFactor) -> tuple[float, str] | None:
    """Return (factor of the search, what a side does with the model's own, in words), or None.

    The model's number is not fitted: it has to hold at all positions, and to leave hardly more than
    the fitted `factor`.
    """
    here, reference = SIDES
    named = f"the model's own factor of the logits, {own.value:.6g} ({own.key})"
    every = {
        own.value: f"{reference} lacks {named}",
        1 / own.value: f"{here} lacks {named}",
        own.value**2: f"{reference} divides by {named}",
        own.value**-2: f"{here} divides by {named}",
    }
    if own.run:  # a run of the model does neither
        every = {
            own.value: every[own.value],
            1 / own.value: f"{reference} applies {named}, twice",
            own.value**2: every[own.value**2],
        }
    bound = NEARLY_AS * search.distance_under(factor) + search.tolerance / 100
    for exact, says in every.items():
        value = 1 / exact if search.is_turned else exact
        if search.distance_under(value) <= bound and search.holds(
            "temperature", value, fitted=False
        ):
            return value, says
    return None


def _of_drawn_tokens(search: _Search, own_factor: ModelFactor | None) -> Iterator[LogprobRelation]:
    """Yield the relation "temperature" where one side has whole rows, and the other few tokens.

    Of the whole rows every temperature's log-probability of a token is known, so that one token a
    position shows it.
    """
    for own in (search, search.turned()):
        if any(row.full_reference is None or row.full_here is not None for row in own.rows):
            continue
        drawn = replace(own, drawn=True)
        factor = drawn.factor_by_trials()
        if abs(math.log(factor)) >= REACH or drawn.temperature(factor) == 1:
            continue
        if drawn.holds("temperature", factor):
            yield _times_a_factor(drawn, factor, own_factor)


def _scaled_after_softmax(search: _Search) -> LogprobRelation | None:
    """Return the relation "scaled" if one factor gives all log-probabilities; None if none does.

    A temperature before the softmax also adds a number to each position's, which this has not.
    """
    factor = search.scale()
    if factor is None or abs(factor - 1) < UNLIKE or not search.holds("scaled", factor):
        return None
    between = _between_bases(search, factor)
    if between is not None:
        return between
    after, before = SIDES if factor > 1 else SIDES[::-1]
    larger = max(factor, 1 / factor)
    divisor = short_number(1 / larger, 1e-4)
    says = (
        f"the log-probabilities of {after} are {larger:.6g} times those of {before}, at all "
        f"{len(search.rows)} positions, as if they were divided by {divisor:g} after the softmax: "
        "a temperature divides logits before it, and these do not add up to 1"
    )
    return LogprobRelation("scaled", says, after, len(search.rows), factor)


def _is_nearer_before_softmax(search: _Search, left: float) -> bool:
    """Return whether a factor of the logits leaves less than `left`.

    That is what the fitted factor after the softmax leaves. Where all tokens are near 0 or far from
    it, the softmax's sums are nearly 1, and both factors hold within a wide tolerance. Of listed
    tokens alone the sums are fitted, which always leaves less: there a factor of the logits has to
    leave a small share (BETTER).
    """
    factor = search.factor()
    if factor is None or not search.holds("temperature", factor):
        return False
    whole = all(row.whole for row in search.rows)
    return search.distance_under(factor) < left * (1.0 if whole else BETTER)


def _between_bases(search: _Search, factor: float) -> LogprobRelation | None:
    """Return the relation "base" if the sides hold logarithms to two bases; None if they do not.

    `factor` is the fitted one from the reference's log-probabilities to this side's. The factor
    between two bases is no fitted number: it is applied at all positions. The side whose base is
    not e is the one that is named.
    """
    for here, reference in itertools.permutations(LOGS, 2):
        exact = LOGS[reference] / LOGS[here]
        if abs(factor / exact - 1) > NEAR or not search.holds("base", exact, fitted=False):
            continue
        named, other = (SIDES, SIDES[::-1])[here == "e"]
        bases = (here, reference) if here != "e" else (reference, here)
        says = (
            f"{named} holds logarithms to base {bases[0]} and {other} to base {bases[1]}: "
            f"recomputed to one base they agree, at all {len(search.rows)} positions"
        )
        return LogprobRelation("base", says, named, len(search.rows), exact)
    return None


def _of_fewer_tokens(search: _Search) -> Iterator[LogprobRelation]:
    """Yield the relation "fewer" if one side's values are all larger, by one number a position."""
    moved = [float((row.here - row.reference).mean()) for row in search.rows]
    side, other = SIDES if moved[0] > 0 else SIDES[::-1]
    apart = sorted(map(abs, moved))
    if min(moved) < 0 < max(moved) or not apart[0] or not search.holds("temperature"):
        return
    says = (
        f"every log-probability of {side} is larger than that of {other} by one number for each "
        f"position, {apart[0]:.3g} to {apart[-1]:.3g} nats at {len(moved)} positions: it is "
        "normalised over fewer tokens (top-k, top-p, or a share of the vocabulary)"
    )
    yield LogprobRelation("fewer", says, side, len(moved))


def _of_kept_tokens(search: _Search, limit: float = math.inf) -> Iterator[LogprobRelation]:
    """Yield the relation "fewer" if one side is the other's distribution cut by a sampler's rule.

    `limit` is the distance that another relation leaves: a rule has to leave less.
    It is one number of top_p, top_k or min_p that gives every listed log-probability, the mass
    of each position recomputed from the other side's distribution. Nothing where no side has whole
    distributions.
    """
    for (side, other), own in zip((SIDES, SIDES[::-1]), (search, search.turned()), strict=True):
        made = []
        for row in own.rows:
            if row.full_reference is None or row.full_here is not None:
                break
            noise = NOISE * own.tolerance * row.unit + float(row.printed.max())
            up, lowest = float((row.here - row.reference).mean()), float(row.reference.min())
            if up + noise <= 0:
                break
            made.append(RaisedRow(up, noise, lowest, Descending.of(row.full_reference)))
        if len(made) < len(own.rows):
            continue
        found = [one for one in find_kept_mass(made) if _is_cut_by(own, one.masses, limit)]
        if not found:
            continue
        rules = " or ".join(f"{one.name} {one.number:g}" for one in found)
        masses = sorted(found[0].masses)
        ends = list(dict.fromkeys(f"{mass:.3g}" for mass in (masses[0], masses[-1])))
        says = (
            f"every log-probability of {side} is that of {other} over the mass of the tokens that "
            f"{rules} keeps ({' to '.join(ends)} at {len(made)} positions, recomputed from the "
            f"distributions of {other}): {side} holds what a sampler drew from, and not the "
            "model's own log-probabilities"
        )
        yield LogprobRelation("fewer", says, side, len(made))


def _is_cut_by(search: _Search, masses: Sequence[float], limit: float) -> bool:
    """Return whether this side's values are the reference's, less the logarithm of each mass.

    The distance left is less than `limit`, and as small as a relation's has to be.
    """
    made = [row.reference - math.log(m) for row, m in zip(search.rows, masses, strict=True)]
    left, before = search.left(made), search.left([row.reference for row in search.rows])
    return left < limit and left <= min(search.tolerance, BETTER * before)


def find_relation(
    rows: Sequence[SharedRow], tolerance: float, own_factor: ModelFactor | None = None
) -> LogprobRelation | None:
    """Return the relation of two sides' log-probabilities that holds at every position, or None.

    `rows` are positions with the tokens that both sides list, `tolerance` the root mean square
    distance, in units of a row, that rounding makes. `own_factor` is the model's factor of its
    logits, None where it has none. None too where too few positions have enough tokens.
    """
    finite = [
        row
        for row in rows
        if len(row.here) and np.isfinite(row.here).all() and np.isfinite(row.reference).all()
    ]
    every = [row.reference for row in finite]
    if len(finite) >= 2 * POSITIONS and np.ptp(np.concatenate(every)) > SPAN:
        search = _Search(finite, tolerance)
        scaled = _scaled_after_softmax(search)
        if scaled is not None:
            # Of numbers that are much alike, a factor and a sum are so too: the nearer counts.
            values = [_apply_relation(row, scaled.factor, scaled.kind) for row in finite]
            left = search.left(values)
            if scaled.kind == "base" or not _is_nearer_before_softmax(search, left):
                return next(_of_kept_tokens(search, left), scaled)
    some = [row for row in finite if len(row.here) >= FEWEST and np.ptp(row.reference) > SPAN]
    found = None
    if len(some) >= POSITIONS:
        found = next(_relations(_Search(some, tolerance), own_factor), None)
    # A rule that says which tokens are kept says more than that there are fewer.
    if len(finite) >= POSITIONS and (found is None or found.kind == "fewer"):
        found = next(_of_kept_tokens(_Search(finite, tolerance)), found)
    if len(finite) >= 2 * POSITIONS and found is None:
        found = next(_of_drawn_tokens(_Search(finite, tolerance), own_factor), None)
    return found
